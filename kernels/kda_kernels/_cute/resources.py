"""What a compiled kernel takes of a processor, read off the machine code inside a shared object.

Lives here: the few records of NVIDIA's ELF files that tell registers, stack and shared memory (as
`cuobjdump --dump-resource-usage` prints them). Not here: compiling (compile.py), limits (tests).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass

_MACHINE_CUDA = 190
_FORMAT_SIZED = 4
_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12

# How DSL's intermediate code writes the shared memory of a launch: field 2 of its configuration.
_LAUNCH = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_SHARED_FIELD = re.compile(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] .*{_LAUNCH}")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Attributes:
        registers: of a thread.
        local: bytes of local memory of a thread: its stack, which spilled registers are on too.
        shared: bytes of shared memory of a block that are fixed in the machine code; some
            architectures count 1024 for the system among them.
        dynamic: bytes of shared memory of a block that the launch asks for; None: not known.
    """

    registers: int
    local: int
    shared: int
    dynamic: int | None = None

    def facts(self) -> dict[str, int | None]:
        """Return the resources by name, for a manifest."""
        return asdict(self)


def read(content: bytes) -> Resources:
    """Return the resources of the only kernel in a shared object or cubin.

    Raises:
        ValueError: there is no kernel in it, or more than one.
    """
    kernels = [found for code in _cubins(content) for found in _kernels(code)]
    if len(kernels) != 1:
        raise ValueError(f"{len(kernels)} kernels in an object that should have one")
    return kernels[0]


def _cubins(content: bytes) -> Iterator[bytes]:
    """Yield from where each machine code for a GPU starts."""
    for match in re.finditer(b"\x7fELF", content):
        code = content[match.start() :]
        if len(code) > 64 and struct.unpack_from("<H", code, 18)[0] == _MACHINE_CUDA:
            yield code


def _kernels(code: bytes) -> Iterator[Resources]:
    """Yield the resources of every kernel of one cubin."""
    sections = dict(_sections(code))
    found: dict[int, dict[int, int]] = {}
    for record, symbol, value in _records(sections[".nv.info"][0]):
        found.setdefault(symbol, {})[record] = value
    # What is reserved for the system on some architectures is nobody's launch.
    own = [name for name in sections if re.match(r"\.nv\.shared\.(?!reserved\.)", name)]
    shared = sum(sections[name][1] for name in own)
    for facts in found.values():
        if _REGISTERS in facts:
            local = max(facts.get(_FRAME, 0), facts.get(_STACK, 0))
            yield Resources(facts[_REGISTERS], local, shared)


def _sections(code: bytes) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Yield each section's name, content and size; one without content still has a size."""
    (table,) = struct.unpack_from("<Q", code, 40)
    count, names = struct.unpack_from("<HH", code, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + 64 * i) for i in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        name = code[start : code.index(b"\0", start)].decode()
        yield name, (code[header[4] : header[4] + header[5]], header[5])


def _records(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (record, symbol, value) of what is said about each kernel in the shared section."""
    at = 0
    while at + 4 <= len(content):
        kind, record, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if kind != _FORMAT_SIZED:
            continue
        if size == 8:
            symbol, value = struct.unpack_from("<II", content, at)
            yield record, symbol, value
        at += size


def shared_memory_of_launch(code: str) -> int | None:
    """Return the bytes of shared memory that a launch asks for, None where that cannot be read.

    Args:
        code: the compiled function in CuTe DSL's intermediate language.
    """
    field = _SHARED_FIELD.search(code)
    stored = field and re.search(rf"llvm\.store (%\w+), {field[1]} ", code[field.end() :])
    if not field or not stored:
        return None
    before = code[: field.end() + stored.start()]
    # Names are counted anew in each function, so the last one before the store is meant.
    values = re.findall(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", before)
    return int(values[-1]) if values else None

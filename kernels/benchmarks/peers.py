"""What other implementations of the step take on one H200: figures measured once, as facts.

Lives here: the table with its source, and how a figure carries over to another run. Not here: our
own figures (cuda_decode.py) and what is timed live beside them (live_peer.py).

Figures are microseconds of the kernels: caches cold (256 MB rewritten before every call), durations
of the GPU's own profiler, median of 50 calls, bf16 activations, T = 1, states in layout vk. In the
same run an in-place ``mul_`` of 1 GB moved CEILING bytes a second, which is what scales a figure to
another run on the same kind of machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CEILING = 4.24e12
"""Bytes a second of ``mul_`` on 1 GB in the run of the figures."""

MACHINE = "one NVIDIA H200 (132 processors)"

_ROWS = (1, 8, 32, 128, 512)
_MORE_ROWS = (1, 8, 16, 31, 32, 64, 128, 256, 512)
MORE_CELLS = (12, 64), (16, 31, 64, 256)
"""Heads, and rows beside the usual ones, at which packed steps of others were measured."""


@dataclass(frozen=True)
class Peer:
    """One implementation.

    Attributes:
        name: who made it, and which of their kernels it is.
        version: of the package that was measured.
        operator: our operator that does the same.
        figures: microseconds by (state, heads), then by rows.
    """

    name: str
    version: str
    operator: str
    figures: Mapping[tuple[str, int], Mapping[int, float]]


def _by_rows(rows: tuple[int, ...], text: str) -> dict[int, float]:
    return dict(zip(rows, map(float, text.split()), strict=True))


FLASHINFER_FUSED = Peer(
    "FlashInfer fused_kda_decode (CuTe DSL)",
    "0.7.2",
    "fused_decode",
    {
        ("f32", 12): _by_rows(_ROWS, "4.1 5.6 16.6 54.7 208.0"),
        ("f32", 16): _by_rows(_ROWS, "4.2 6.3 19.7 72.2 275.9"),
        ("f32", 32): _by_rows(_ROWS, "4.5 10.4 38.4 139.3 548.9"),
        ("f32", 64): _by_rows(_ROWS, "5.2 19.9 72.2 276.8 1095.1"),
        ("bf16", 12): _by_rows(_ROWS, "3.9 4.7 11.6 33.2 119.3"),
        ("bf16", 16): _by_rows(_ROWS, "3.9 5.1 12.9 42.6 157.2"),
        ("bf16", 32): _by_rows(_ROWS, "4.1 7.2 23.6 81.5 308.8"),
        ("bf16", 64): _by_rows(_ROWS, "4.4 12.9 43.1 156.7 609.4"),
    },
)
FLASHINFER_PACKED = Peer(
    "FlashInfer packed (CuTe DSL, its best schedule; offered for SM10x only)",
    "0.7.2",
    "packed_decode",
    {("bf16", 12): _by_rows(_MORE_ROWS, "2.5 4.2 5.5 8.6 8.6 15.0 27.5 53.3 102.9")},
)
SGLANG_PACKED = Peer(
    "SGLang packed (Triton)",
    "0.5.23",
    "packed_decode",
    {
        ("f32", 12): _by_rows(_MORE_ROWS, "4.9 7.6 10.4 19.0 19.3 32.2 57.3 109.2 213.6"),
        ("f32", 64): _by_rows(_MORE_ROWS, "6.6 23.4 40.2 72.9 74.4 142.9 284.2 559.5 1108.9"),
        ("bf16", 12): _by_rows(_MORE_ROWS, "3.9 5.3 7.0 10.2 10.4 18.9 32.6 58.9 111.7"),
        ("bf16", 64): _by_rows(_MORE_ROWS, "4.7 14.8 23.6 39.2 40.8 75.4 145.2 285.5 564.3"),
    },
)
SGLANG_FUSED_CUDA = Peer(
    "SGLang fused (CUDA)",
    "0.5.23",
    "fused_decode",
    {("f32", 12): _by_rows(_ROWS, "6.3 8.4 19.9 69.3 266.5")},
)
SGLANG_PACKED_CUDA = Peer(
    "SGLang packed (CUDA)",
    "0.5.23",
    "packed_decode",
    {("f32", 64): _by_rows(_ROWS, "13.7 24.8 85.6 304.7 1188.4")},
)
INDUCTOR_PACKED = Peer(
    "plain PyTorch packed step under Inductor (4 kernels)",
    "torch 2.11",
    "packed_decode",
    {
        ("f32", 64): _by_rows(_ROWS, "8.5 69.4 251.1 979.6 3895.7"),
        ("bf16", 64): _by_rows(_ROWS, "12.5 69.7 250.4 973.7 3871.1"),
    },
)

PEERS = (
    FLASHINFER_FUSED,
    FLASHINFER_PACKED,
    SGLANG_PACKED,
    SGLANG_FUSED_CUDA,
    SGLANG_PACKED_CUDA,
    INDUCTOR_PACKED,
)
"""Every peer, the one that comes first where a table has room for one."""


def figures(operator: str, state: str, heads: int, rows: int, ceiling: float) -> dict[str, float]:
    """Return what each peer would take in a run with another ceiling, by the peer's name.

    Args:
        operator: our operator.
        state: ``"f32"`` or ``"bf16"``.
        heads: of the cell.
        rows: of the cell.
        ceiling: bytes a second of ``mul_`` in that run.
    """
    found = {}
    for peer in PEERS:
        figure = peer.figures.get((state, heads), {}).get(rows)
        if peer.operator == operator and figure is not None:
            found[peer.name] = figure * CEILING / ceiling
    return found

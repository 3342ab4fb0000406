"""The vocabulary in which an operator is declared: dimensions, tensors, scalars, rules.

Lives here: frozen data with names from the field, and the sentences that print it. Not here: code
that checks values (check.py) or writes schemas (schema.py). A rule is a word of this vocabulary,
never a lambda, because documentation cannot print a lambda.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Any

HEAD_DIM = 128
"""D: width of a key head and of a value head."""

ACTIVATION = ("bfloat16", "float16", "float32")
"""Types of activations; all activation arguments of one call share one of them."""

_TERM = re.compile(r"^(?:(\d+)\*)?([A-Z]|\d+)(?:\*([A-Z]|\d+))?(?:\+(\d+))?$")


@dataclass(frozen=True)
class Extent:
    """One dimension of a shape: ``times * symbol + plus`` (symbol None: the constant ``plus``)."""

    text: str
    symbol: str | None
    times: int = 1
    plus: int = 0

    def value(self, dims: dict[str, Any]) -> Any:  # noqa: ANN401 - an int or a SymInt
        """Return the extent once the symbols are known."""
        return self.plus if self.symbol is None else self.times * dims[self.symbol] + self.plus


def parse_extent(text: str) -> Extent:
    """Read one dimension such as ``B``, ``3*H*D``, ``T+2`` or ``4``; D is the head width."""
    match = _TERM.match(text)
    if match is None:
        raise ValueError(f"not a dimension: {text!r}")
    times, symbol, plus = 1, None, int(match.group(4) or 0)
    for factor in match.group(1, 2, 3):
        if factor is None:
            continue
        if factor == "D" or factor.isdigit():
            times *= HEAD_DIM if factor == "D" else int(factor)
        else:
            symbol = factor
    return Extent(text, symbol, times, plus) if symbol else Extent(text, None, 1, times + plus)


def parse_shape(text: str) -> tuple[Extent, ...]:
    """Read a shape written as comma-separated dimensions."""
    return tuple(parse_extent(part.strip()) for part in text.split(","))


class Layout(enum.Enum):
    """How a tensor may lie in memory; the value is the sentence that documentation prints."""

    COMPACT = "contiguous"
    ROWS = "rows at any stride that does not overlap, each row contiguous"
    READ_ROWS = "rows at any stride, each row contiguous"
    SLOTS = "slots at any stride that does not overlap, 16-byte aligned, each slot contiguous"
    WINDOW = (
        "slots at any stride that does not overlap, 8-byte aligned, each slot SD "
        "(strides [slot, 1, 3*H*D]) or DS (strides [slot, L, 1])"
    )
    TAPS = "tap-major (strides [4*H*D, H*D, 1]) or channel-major (strides [4*H*D, 1, 4])"
    STRIDED = "any strides"


class Role(enum.Enum):
    """What an operator does with a tensor."""

    READ = "read"
    UPDATE = "updated in place"
    WRITE = "written"


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument.

    ``shapes`` are the accepted spellings, the first one canonical; ``any_shape`` accepts every
    shape with the same number of elements. ``dtypes`` may contain the word ``activation``.
    ``reads`` and ``writes`` are the elements that one call must move, as shapes.
    """

    name: str
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    layout: Layout
    doc: str
    role: Role = Role.READ
    optional: bool = False
    keyword: bool = False
    any_shape: bool = False
    reads: str = ""
    writes: str = ""
    extents: tuple[tuple[Extent, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Parse the shapes once."""
        object.__setattr__(self, "extents", tuple(parse_shape(text) for text in self.shapes))


class Rule(enum.Enum):
    """What a scalar must be; the value is the sentence."""

    FINITE = "a finite number"
    NEGATIVE = "finite and < 0 (or None for the softplus gate)"
    NON_NEGATIVE = "finite and >= 0"
    FIRST_SLOT = "an integer >= 0 (or None for PyTorch's negative indices)"
    CHOICE = "one of its choices"
    OUTPUT_DTYPE = "the activation type or float32"


@dataclass(frozen=True)
class ScalarArg:
    """A scalar argument; ``abi`` False means that kernels do not receive it."""

    name: str
    type: str
    default: Any
    rule: Rule
    doc: str
    optional: bool = False
    keyword: bool = True
    choices: tuple[str, ...] = ()
    abi: bool = True


@dataclass(frozen=True)
class Output:
    """The result: written by the ``out`` overload, allocated by the other one."""

    shape: str
    dtypes: tuple[str, ...]
    doc: str
    name: str = "output"
    layout: Layout = Layout.COMPACT
    extents: tuple[Extent, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Parse the shape once."""
        object.__setattr__(self, "extents", parse_shape(self.shape))


@dataclass(frozen=True)
class Operator:
    """The whole contract of one operator.

    ``dims`` maps every symbol to (the argument that fixes it, its meaning, its minimum).
    ``rows`` is the symbol that counts output rows; with ``rows_need_slots`` a call without
    state_indices needs at least as many slots as rows.
    """

    name: str
    public_name: str
    summary: str
    dims: dict[str, tuple[str, str, int]]
    arguments: tuple[TensorArg | ScalarArg, ...]
    output: Output
    rows: str
    rows_need_slots: bool = True

    @property
    def tensors(self) -> tuple[TensorArg, ...]:
        """The tensor arguments in order."""
        return tuple(a for a in self.arguments if isinstance(a, TensorArg))

    @property
    def scalars(self) -> tuple[ScalarArg, ...]:
        """The scalar arguments in order."""
        return tuple(a for a in self.arguments if isinstance(a, ScalarArg))

    @property
    def abi(self) -> tuple[TensorArg | ScalarArg, ...]:
        """What a kernel receives, in order; the output comes after it."""
        return tuple(a for a in self.arguments if isinstance(a, TensorArg) or a.abi)

    def argument(self, name: str) -> TensorArg | ScalarArg:
        """Return the argument of that name."""
        for candidate in self.arguments:
            if candidate.name == name:
                return candidate
        raise KeyError(f"{self.name} has no argument {name!r}")

    def tensor(self, name: str) -> TensorArg:
        """Return the tensor argument of that name."""
        found = self.argument(name)
        if isinstance(found, TensorArg):
            return found
        raise KeyError(f"{name!r} of {self.name} is no tensor")

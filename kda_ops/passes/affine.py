"""Integer-affine index expressions: where an element of a view lies in what it is a view of.

Lives here: constants plus integer multiples of named axes, flattening over a shape and splitting
again. Not here: tensors, graphs, or which operation moves which axis (terms.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Affine:
    """``constant`` plus the sum of ``coefficient * axis``, axes sorted by name."""

    constant: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    def coefficient(self, axis: str) -> int:
        """Return the coefficient of an axis, 0 when it does not occur."""
        return dict(self.terms).get(axis, 0)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that occur."""
        return frozenset(name for name, _ in self.terms)

    def scaled(self, factor: int) -> Affine:
        """Return the product with an integer."""
        if factor == 0:
            return ZERO
        return Affine(self.constant * factor, tuple((a, c * factor) for a, c in self.terms))

    def __add__(self, other: Affine) -> Affine:
        sums = dict(self.terms)
        for axis, coefficient in other.terms:
            sums[axis] = sums.get(axis, 0) + coefficient
        kept = tuple(sorted((a, c) for a, c in sums.items() if c))
        return Affine(self.constant + other.constant, kept)

    def renamed(self, old: str, new: str) -> Affine:
        """Return the expression with one axis called differently."""
        if old not in self.axes:
            return self
        return Affine(
            self.constant, tuple(sorted((new if a == old else a, c) for a, c in self.terms))
        )

    def at(self, name: str, value: int) -> Affine:
        """Return the expression at one value of an axis."""
        rest = tuple((a, c) for a, c in self.terms if a != name)
        return Affine(self.constant + self.coefficient(name) * value, rest)

    def bounds(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return the least and the greatest value over all axes."""
        spans = [(c * (sizes[a] - 1)) for a, c in self.terms]
        low = self.constant + sum(s for s in spans if s < 0)
        return low, self.constant + sum(s for s in spans if s > 0)


ZERO = Affine()
Index = tuple[Affine, ...]


def constant(value: int) -> Affine:
    """Return an expression without axes."""
    return Affine(value)


def axis(name: str) -> Affine:
    """Return the expression that is one axis."""
    return Affine(0, ((name, 1),))


def flatten(index: Index, shape: tuple[int, ...]) -> Affine:
    """Return the row-major position of an index in a shape."""
    position, stride = ZERO, 1
    for entry, size in zip(reversed(index), reversed(shape), strict=True):
        position = position + entry.scaled(stride)
        stride *= size
    return position


def split(position: Affine, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Index | None:
    """Return the index of a row-major position, or None where it is not affine.

    The inverse of :func:`flatten`: a term whose coefficient the stride divides belongs to that
    dimension, and what is left has to stay below the stride.
    """
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    entries = []
    rest = position
    for size, step in zip(shape, reversed(strides), strict=True):
        if size == 1:
            entries.append(ZERO)
            continue
        inside = tuple((a, c // step) for a, c in rest.terms if c % step == 0)
        outside = tuple((a, c) for a, c in rest.terms if c % step)
        entries.append(Affine(rest.constant // step, inside))
        rest = Affine(rest.constant % step, outside)
        low, high = rest.bounds(sizes)
        if low < 0 or high >= step:
            return None
    return tuple(entries) if rest == ZERO else None


def rename(index: Index, old: str, new: str) -> Index:
    """Return an index with one axis called differently."""
    return tuple(entry.renamed(old, new) for entry in index)


def substitute(index: Index, name: str, value: int) -> Index:
    """Return an index at one value of an axis."""
    return tuple(entry.at(name, value) for entry in index)


def axes_of(index: Index) -> frozenset[str]:
    """Return every axis that occurs in an index."""
    return frozenset().union(*(entry.axes for entry in index))

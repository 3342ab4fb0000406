"""The algebra of a step: polynomials that are linear in the state, over products of other values.

Lives here: monomials, sums over an axis, and equality up to the names of summed axes and the last
digits of constants. Not here: graphs (expression.py makes polynomials of nodes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from kda_ops.passes.affine import Affine, Index, axes_of, rename

RELATIVE = 1e-6  # two spellings of a constant (D**-0.5, 1/sqrt(D), float32 or not) differ by less


@dataclass(frozen=True)
class Value:
    """An element of a tensor that does not depend on the state."""

    node: Node
    index: Index

    @property
    def axes(self) -> frozenset[str]:
        """The axes that its index runs over."""
        return axes_of(self.index)

    def renamed(self, old: str, new: str) -> Value:
        """Return the element with one axis called differently."""
        return Value(self.node, rename(self.index, old, new))


@dataclass(frozen=True)
class State:
    """An element of the state before the step."""

    index: Index

    @property
    def axes(self) -> frozenset[str]:
        """The axes that its index runs over."""
        return axes_of(self.index)

    def renamed(self, old: str, new: str) -> State:
        """Return the element with one axis called differently."""
        return State(rename(self.index, old, new))


@dataclass(frozen=True)
class Contraction:
    """A sum over an axis of ``size`` of a product whose every factor runs over it.

    The axis is called by the nesting depth, so equal sums are equal objects.
    """

    size: int
    depth: int
    body: Product

    @property
    def bound(self) -> str:
        """Name of the summed axis."""
        return f"~{self.depth}"

    @property
    def axes(self) -> frozenset[str]:
        """The axes that are not summed over."""
        return product_axes(self.body) - {self.bound}

    def renamed(self, old: str, new: str) -> Contraction:
        """Return the sum with one free axis called differently."""
        return Contraction(self.size, self.depth, rename_product(self.body, old, new))

    def without_bound(self, name: str) -> Product:
        """Return the summed product with the summed axis called ``name``."""
        return rename_product(self.body, self.bound, name)


Factor = Value | State | Contraction
Product = frozenset[tuple[Factor, float]]  # factors with their exponents
Polynomial = dict[Product, float]  # products with their coefficients

ONE: Product = frozenset()


def product(powers: Iterable[tuple[Factor, float]]) -> Product:
    """Collect factors, adding exponents."""
    collected: dict[Factor, float] = {}
    for factor, power in powers:
        collected[factor] = collected.get(factor, 0.0) + power
    return frozenset((f, p) for f, p in collected.items() if p)


def times(left: Product, right: Product) -> Product:
    """Multiply two products."""
    return product([*left, *right])


def power(base: Product, exponent: float) -> Product:
    """Raise a product of positive values, or to a whole number."""
    return frozenset((f, p * exponent) for f, p in base)


def quotient(left: Product, right: Product) -> Product:
    """Divide two products."""
    return times(left, power(right, -1.0))


def product_axes(factors: Product) -> frozenset[str]:
    """Return every free axis of a product."""
    return frozenset().union(*(f.axes for f, _ in factors))


def rename_product(factors: Product, old: str, new: str) -> Product:
    """Return a product with one axis called differently."""
    return frozenset((f.renamed(old, new), p) for f, p in factors)


def has_state(factors: Product) -> bool:
    """Whether the state occurs, also below a sum."""
    return any(
        isinstance(f, State) or (isinstance(f, Contraction) and has_state(f.body))
        for f, _ in factors
    )


def add(left: Polynomial, right: Polynomial, factor: float = 1.0) -> Polynomial:
    """Return left + factor * right, dropping what cancels."""
    total = dict(left)
    for key, coefficient in right.items():
        total[key] = total.get(key, 0.0) + factor * coefficient
        if math.isclose(total[key], 0.0, abs_tol=1e-12):
            del total[key]
    return total


def multiply(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return the product of two polynomials."""
    total: Polynomial = {}
    for a, x in left.items():
        for b, y in right.items():
            total = add(total, {times(a, b): x * y})
    return total


def sum_over(terms: Polynomial, name: str, size: int) -> Polynomial:
    """Sum a polynomial over an axis, with every factor that does not run over it in front."""
    total: Polynomial = {}
    for factors, coefficient in terms.items():
        inner = frozenset((f, p) for f, p in factors if name in f.axes)
        outer = factors - inner
        if not inner:
            total = add(total, {outer: coefficient * size})
            continue
        depth = 1 + max((f.depth for f, _ in inner if isinstance(f, Contraction)), default=-1)
        summed = Contraction(size, depth, rename_product(inner, name, f"~{depth}"))
        total = add(total, {times(outer, frozenset({(summed, 1.0)})): coefficient})
    return total


def rename_polynomial(terms: Polynomial, old: str, new: str) -> Polynomial:
    """Return a polynomial with one axis called differently."""
    return {rename_product(factors, old, new): c for factors, c in terms.items()}


def equal(left: Polynomial, right: Polynomial) -> bool:
    """Whether two polynomials have the same products and, up to rounding, coefficients."""
    return left.keys() == right.keys() and all(
        math.isclose(left[key], right[key], rel_tol=RELATIVE) for key in left
    )


def is_axis(entry: Affine, name: str) -> bool:
    """Whether an index entry is exactly one axis."""
    return entry == Affine(0, ((name, 1),))

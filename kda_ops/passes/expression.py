"""Reads a region of a graph as algebra: what its values are, element by element.

Lives here: which operation means which sum or product, in float32 and nothing less. Not here:
views (terms.py), and what the result should look like (delta_rule.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from kda_ops.passes.affine import ZERO, Index, constant, substitute
from kda_ops.passes.algebra import (
    ONE,
    Contraction,
    Polynomial,
    Product,
    State,
    Value,
    add,
    has_state,
    multiply,
    power,
    product,
    sum_over,
    times,
)
from kda_ops.passes.nodes import CASTS, LOW, TAPS_AT_MOST, operands
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import Scope, Term

aten = torch.ops.aten

SUMS = frozenset({aten.sum.dim_IntList, aten.mean.dim})
ADDS = {
    aten.add.Tensor: 1.0,
    aten.add.Scalar: 1.0,
    aten.sub.Tensor: -1.0,
    aten.sub.Scalar: -1.0,
}
PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})
HEAD_WIDTH = 128
ROOTS = {aten.sqrt.default: 0.5, aten.rsqrt.default: -0.5}


@dataclass
class Reader:
    """Turns nodes into polynomials in one state.

    ``reads`` maps a node that holds the state before the step to the function from its index to
    the state's index; ``dependents`` are all nodes that the state flows into; ``stops`` are nodes
    whose values are taken as they are although they are products. Roundings are looked through
    (step.py decides whether they may be dropped), but for those of what the state flows into,
    unless ``state_rounds``.
    """

    scope: Scope
    reads: dict[Node, Callable[[Index], Index]]
    dependents: set[Node]
    stops: set[Node] = field(default_factory=set)
    whole: dict[Product, Term] = field(default_factory=dict)
    state_rounds: bool = False
    _known: dict[tuple[Node, Index], Polynomial] = field(default_factory=dict)

    def polynomial(self, operand: Any, index: Index) -> Polynomial:
        """Read an element of an operand (a node or a number)."""
        if not isinstance(operand, Node):
            return number(operand)
        term = self.scope.resolve(operand, self.scope.broadcast(operand, index))
        key = (term.node, term.index)
        if key not in self._known:
            self._known[key] = self._read(term)
        return self._known[key]

    def _read(self, term: Term) -> Polynomial:
        node, index = term.node, term.index
        if node in self.reads:
            return {frozenset({(State(self.reads[node](index)), 1.0)}): 1.0}
        if node not in self.dependents:
            coefficient, factors = self.factors(node, index)
            return {factors: coefficient}
        dtype = node.meta["val"].dtype
        if dtype is not torch.float32 and not (self.state_rounds and dtype in LOW):
            fact = f"{node.name} is {str(dtype).removeprefix('torch.')}"
            raise RefusalError(Reason.ROUNDING, node, fact)
        if node.target in CASTS or node.target is aten.copy.default:
            source = operands(node)[node.target is aten.copy.default]
            return self.polynomial(source, index)
        return self._combined(node, index)

    def _combined(self, node: Node, index: Index) -> Polynomial:
        """Read an element that the state flows into."""
        target, args = node.target, operands(node)
        if target in ADDS:
            alpha = ADDS[target] * number_of(node.kwargs.get("alpha", 1.0))
            left, right = (self.polynomial(a, index) for a in args[:2])
            return add(left, right, alpha)
        if target in PRODUCTS:
            return self._product(node, *(self.polynomial(a, index) for a in args[:2]))
        if target in QUOTIENTS:
            return self._quotient(node, index)
        if target is aten.neg.default:
            return add({}, self.polynomial(args[0], index), -1.0)
        if target is aten.addcmul.default:
            value = number_of(node.kwargs.get("value", 1.0))
            extra = self._product(node, *(self.polynomial(a, index) for a in args[1:3]))
            return add(self.polynomial(args[0], index), extra, value)
        if target in SUMS:
            return self._sum(node, index)
        if target in {aten.bmm.default, aten.mm.default}:
            return self._matmul(node, args[0], args[1], index)
        if target is aten.baddbmm.default:
            beta, alpha = (number_of(node.kwargs.get(n, 1.0)) for n in ("beta", "alpha"))
            base = add({}, self.polynomial(args[0], index), beta)
            return add(base, self._matmul(node, args[1], args[2], index), alpha)
        if target is aten.convolution.default:
            return self._convolved(node, index)
        if target is aten.where.self:
            raise RefusalError(Reason.MASKED_ROWS, node)
        raise RefusalError(Reason.NOT_UNDERSTOOD, node, f"{node.target}")

    def _product(self, node: Node, left: Polynomial, right: Polynomial) -> Polynomial:
        if any(map(has_state, left)) and any(map(has_state, right)):
            raise RefusalError(Reason.NOT_DELTA_RULE, node, "a product of the state with itself")
        return multiply(left, right)

    def _quotient(self, node: Node, index: Index) -> Polynomial:
        above, below = (self.polynomial(a, index) for a in operands(node)[:2])
        if len(below) != 1 or any(map(has_state, below)):
            raise RefusalError(Reason.NOT_UNDERSTOOD, node, "a quotient by the state or a sum")
        ((factors, coefficient),) = below.items()
        return multiply(above, {power(factors, -1.0): 1.0 / coefficient})

    def _sum(self, node: Node, index: Index) -> Polynomial:
        source, axes = summed_index(self.scope, node, index)
        total = self._summed_over(operands(node)[0], source, axes)
        return add({}, total, share(node, axes))

    def _summed_over(self, source: Any, index: Index, axes: list[tuple[str, int]]) -> Polynomial:
        """Sum an operand over some axes, short ones (taps) term by term: each lies elsewhere."""
        short = next((item for item in axes if item[1] <= TAPS_AT_MOST), None)
        if short is None:
            terms = self.polynomial(source, index)
            for name, size in axes:
                terms = sum_over(terms, name, size)
            return terms
        rest = [item for item in axes if item is not short]
        total: Polynomial = {}
        for position in range(short[1]):
            at = substitute(index, short[0], position)
            total = add(total, self._summed_over(source, at, rest))
        return total

    def _matmul(self, node: Node, left: Any, right: Any, index: Index) -> Polynomial:
        size = self.scope.shape(left)[-1]
        name, entry = self.scope.fresh(size)
        short = size <= TAPS_AT_MOST
        total: Polynomial = {}
        for inner in [constant(i) for i in range(size)] if short else [entry]:
            a = self.polynomial(left, (*index[:-1], inner))
            b = self.polynomial(right, (*index[:-2], inner, index[-1]))
            total = add(total, self._product(node, a, b))
        return total if short else sum_over(total, name, size)

    def _convolved(self, node: Node, index: Index) -> Polynomial:
        """Read a depthwise convolution without padding: a short sum along the last dimension."""
        source, weight, bias, stride, padding, dilation, transposed, _, groups = operands(node)
        channels, depth, taps = self.scope.shape(weight)
        steps = (list(stride), list(padding), list(dilation))
        plain = steps == ([1], [0], [1]) and not transposed and depth == 1 and groups == channels
        if not plain or taps > TAPS_AT_MOST:
            raise RefusalError(Reason.NOT_UNDERSTOOD, node, "a convolution that is not depthwise")
        total = {} if bias is None else self.polynomial(bias, (index[1],))
        for tap in range(taps):
            x = self.polynomial(source, (*index[:2], index[2] + constant(tap)))
            w = self.polynomial(weight, (index[1], ZERO, constant(tap)))
            total = add(total, self._product(node, x, w))
        return total

    def factors(self, operand: Any, index: Index) -> tuple[float, Product]:
        """Read an element that the state does not flow into, as a constant and a product.

        Products are taken apart down to ``stops``; ``whole`` remembers which node a product is the
        value of, so that an argument that happens to be a product is found again.
        """
        if not isinstance(operand, Node):
            return float(operand), ONE
        term = self.scope.resolve(operand, self.scope.broadcast(operand, index))
        coefficient, factors = self._taken_apart(term)
        if coefficient == 1.0:
            self.whole[factors] = term  # the last: of a value and its rounding, the rounding
        return coefficient, factors

    def _taken_apart(self, term: Term) -> tuple[float, Product]:
        node, index = term.node, term.index
        itself: Product = frozenset({(Value(node, index), 1.0)})
        if node in self.stops or node.op != "call_function":
            return 1.0, itself
        dtype = node.meta["val"].dtype
        if dtype is not torch.float32 and dtype not in LOW:
            return 1.0, itself
        target, args = node.target, operands(node)
        if target in CASTS:
            return self.factors(args[0], index)
        if target is aten.full.default and isinstance(args[1], int | float):
            return float(args[1]), ONE
        if target in PRODUCTS:
            (x, a), (y, b) = (self.factors(arg, index) for arg in args[:2])
            return x * y, times(a, b)
        if target in QUOTIENTS and not node.kwargs:
            (x, a), (y, b) = (self.factors(arg, index) for arg in args[:2])
            return (x / y, times(a, power(b, -1.0))) if y else (1.0, itself)
        if target is aten.neg.default:
            x, a = self.factors(args[0], index)
            return -x, a
        if target is aten.reciprocal.default:
            x, a = self.factors(args[0], index)
            return (1.0 / x, power(a, -1.0)) if x else (1.0, itself)
        if target is aten.pow.Tensor_Scalar and isinstance(args[1], int | float):
            return self._power(args[0], index, float(args[1]))
        if target in ROOTS:
            return self._power(args[0], index, ROOTS[target])
        if target in SUMS:
            return self._summed(node, index) or (1.0, itself)
        return 1.0, itself

    def _summed(self, node: Node, index: Index) -> tuple[float, Product] | None:
        """Read a sum over one axis as wide as a head: a norm, or k applied to q."""
        source, summed = summed_index(self.scope, node, index)
        if len(summed) != 1 or summed[0][1] != HEAD_WIDTH:
            return None
        coefficient, factors = self.factors(operands(node)[0], source)
        ((factors, coefficient),) = sum_over({factors: coefficient}, *summed[0]).items()
        return coefficient * share(node, summed), factors

    def _power(self, operand: Any, index: Index, exponent: float) -> tuple[float, Product]:
        x, a = self.factors(operand, index)
        if exponent == int(exponent) and exponent > 0:
            return x**exponent, power(a, exponent)
        if x == 1.0 and all(isinstance(f, Contraction) and squares(f) for f, _ in a):
            return x, power(a, exponent)
        term = self.scope.resolve(operand, self.scope.broadcast(operand, index))
        return 1.0, product([(Value(term.node, term.index), exponent)])


def squares(item: Contraction) -> bool:
    """Whether a sum adds up squares, so that roots of it may be taken apart and put together."""
    return all(p == 2.0 for _, p in item.body)


def share(node: Node, axes: list[tuple[str, int]]) -> float:
    """Return what a sum is multiplied by: one over the number of elements if it is a mean."""
    return 1.0 / math.prod(size for _, size in axes) if node.target is aten.mean.dim else 1.0


def number_of(value: Any) -> float:
    """Return a keyword of a node that is a number."""
    return float(value)


def number(value: Any) -> Polynomial:
    """Return a constant."""
    return {ONE: float(value)} if value else {}


def summed_index(scope: Scope, node: Node, index: Index) -> tuple[Index, list[tuple[str, int]]]:
    """Return the index into what a sum adds up, with fresh axes in the summed dimensions."""
    shape = scope.shape(operands(node)[0])
    dims = operands(node)[1] if len(operands(node)) > 1 and operands(node)[1] else range(len(shape))
    summed_dims = {d % len(shape) for d in dims}
    keep = bool(operands(node)[2]) if len(operands(node)) > 2 else False
    rest = iter(index)
    entries, summed = [], []
    for dim, size in enumerate(shape):
        if dim not in summed_dims:
            entries.append(next(rest))
            continue
        if keep:
            next(rest)
        name, entry = scope.fresh(size)
        entries.append(entry)
        if entry != ZERO:
            summed.append((name, size))
    return tuple(entries), summed

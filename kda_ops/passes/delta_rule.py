"""Recognises one step of the gated delta rule in the algebra of a region.

Lives here: the comparison of a written state and of an output with the mathematics of
docs/operators.md, and which element is q, k, v. Not here: gates and beta (gates.py), how arguments
are laid out (arguments.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from kda_ops.passes.affine import Index, axis, flatten, split
from kda_ops.passes.algebra import (
    ONE,
    Contraction,
    Polynomial,
    Product,
    State,
    Value,
    equal,
    has_state,
    multiply,
    product_axes,
    quotient,
    sum_over,
    times,
)
from kda_ops.passes.expression import Reader
from kda_ops.passes.nodes import operands
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import ROW, Scope, Term

aten = torch.ops.aten

HEAD, FIRST, SECOND, INNER = "h", "x", "y", "s"
L2_EPS = 1e-6
CLAMPS = frozenset(
    {aten.clamp_min.default, aten.maximum.default, aten.clamp.default, aten.add.Tensor}
)


@dataclass(frozen=True)
class Update:
    """The parts of S'' = S*d + beta*(v - (S*d)k)k^T, as elements over the step's axes."""

    layout: str
    key_axis: str
    value_axis: str
    terms: Polynomial
    decay: Value
    beta: Product
    key: Value
    value: Term


@dataclass(frozen=True)
class Output:
    """The output's node, the element of q, the constant it is scaled by."""

    node: Node
    query: Value
    scale: float


def state_index(scope: Scope, pool: Node, rows: int) -> Index:
    """Declare the axes of a step and return the index of a row's state."""
    _, heads, first, second = scope.shape(pool)
    scope.named(INNER, first)
    return (
        scope.named(ROW, rows),
        scope.named(HEAD, heads),
        scope.named(FIRST, first),
        scope.named(SECOND, second),
    )


def read_update(reader: Reader, written: Node, at: Index, index: Index) -> Update:
    """Compare the written state, whose element is ``at``, with the delta rule; name its parts."""
    terms = reader.polynomial(written, at)
    direct, summed, free = by_role(terms, written)
    kept = frozenset((f, p) for f, p in direct if not isinstance(f, State))
    (state,) = (f for f, _ in direct if isinstance(f, State))
    if state.index != index or not math.isclose(terms[direct], 1.0, rel_tol=1e-6):
        raise RefusalError(Reason.NOT_DELTA_RULE, written, "the old state is moved or scaled")
    key_axis = decay_axis(kept, written)
    value_axis = FIRST if key_axis == SECOND else SECOND
    ((decay, exponent),) = kept if len(kept) == 1 else ((None, 0.0),)
    if not isinstance(decay, Value) or exponent != 1.0:
        raise RefusalError(Reason.GATE_FORM, written, "the decay is not one exponential")
    (contraction,) = (f for f, _ in summed if isinstance(f, Contraction) and has_state(f.body))
    key = contracted_with(contraction, state, decay, key_axis)
    if key is None:
        fact = "the prediction is not (S*d) applied to k"
        raise RefusalError(Reason.NOT_DELTA_RULE, written, fact)
    outer = frozenset((f, p) for f, p in summed if f is not contraction)
    if (key, 1.0) not in outer:
        fact = "the error is not written along the k that predicted"
        raise RefusalError(Reason.NOT_DELTA_RULE, written, fact)
    rest = quotient(outer, frozenset({(key, 1.0)}))
    beta, norm = without_norm(reader, rest, key, key_axis, -1.0, written)
    unit_key = frozenset({(key, 1.0), (norm, -0.5)})
    value = reader.whole.get(quotient(free, times(beta, unit_key)))
    if value is None or not math.isclose(terms[free], -terms[summed], rel_tol=1e-6):
        raise RefusalError(Reason.NOT_DELTA_RULE, written, "the update is not beta*(v - S k)k^T")
    if not math.isclose(terms[free], 1.0, rel_tol=1e-6):
        raise RefusalError(Reason.BETA_FORM, written, f"beta is multiplied by {terms[free]:g}")
    layout = "kv" if key_axis == FIRST else "vk"
    return Update(layout, key_axis, value_axis, terms, decay, beta, key, value)


def by_role(terms: Polynomial, written: Node) -> tuple[Product, Product, Product]:
    """Return the product with the state itself, the one with its sum, the one without it."""
    direct = [p for p in terms if any(isinstance(f, State) for f, _ in p)]
    free = [p for p in terms if not has_state(p)]
    summed = [p for p in terms if has_state(p) and p not in direct]
    if not (len(direct) == len(free) == len(summed) == 1):
        fact = f"{len(direct)} terms in S, {len(summed)} in sums of S, {len(free)} without S"
        raise RefusalError(Reason.NOT_DELTA_RULE, written, fact)
    return direct[0], summed[0], free[0]


def decay_axis(kept: Product, written: Node) -> str:
    """Return which axis of the state the decay runs over: the key axis."""
    axes = product_axes(kept) & {FIRST, SECOND}
    if len(axes) == 1:
        return next(iter(axes))
    if kept and not axes:
        raise RefusalError(Reason.GATE_PER_HEAD, written)
    fact = "the state does not decay" if not kept else "the decay runs over keys and values"
    raise RefusalError(Reason.GATE_FORM, written, fact)


def contracted_with(
    contraction: Contraction, state: State, decay: Value, key_axis: str
) -> Value | None:
    """Return x when a sum is that of S*d*x over the key axis, else None."""
    body = contraction.without_bound(key_axis)
    rest = quotient(body, frozenset({(state, 1.0), (decay, 1.0)}))
    ((factor, exponent),) = rest if len(rest) == 1 else ((None, 0.0),)
    if isinstance(factor, Value) and exponent == 1.0:
        return factor
    return None


def without_norm(
    reader: Reader, factors: Product, base: Value, along: str, exponent: float, at: Node
) -> tuple[Product, Value]:
    """Take the L2 norm of ``base`` out of a product, or say what is there instead."""
    for factor, power in factors:
        if not isinstance(factor, Value) or power >= 0:
            continue
        found = squared_norm(reader, factor)
        if found is None or found[0] != base.renamed(along, INNER):
            continue
        if found[2] != 1.0:
            raise RefusalError(Reason.NORM_FORM, factor.node, "the mean of the squares")
        if not math.isclose(found[1], L2_EPS, rel_tol=1e-6):
            raise RefusalError(Reason.NORM_EPS, factor.node, f"eps = {found[1]:g}")
        if power != exponent:
            raise RefusalError(Reason.NORM_FORM, factor.node, f"exponent {power}")
        return factors - {(factor, power)}, factor
    for factor, power in factors:
        if isinstance(factor, Value) and power < 0 and factor.node.target in CLAMPS:
            raise RefusalError(Reason.NORM_FORM, factor.node)
        square = frozenset({(base.renamed(along, INNER), 2.0)})
        if isinstance(factor, Contraction) and factor.without_bound(INNER) == square:
            raise RefusalError(Reason.NORM_EPS, at, "eps = 0")
    raise RefusalError(Reason.NORM_MISSING, at)


def squared_norm(reader: Reader, value: Value) -> tuple[Value, float, float] | None:
    """Return (x, eps, share) when a value is share times the sum over INNER of x*x, plus eps."""
    node = value.node
    if node.target not in {aten.add.Tensor, aten.add.Scalar} or node.kwargs:
        return None
    total, eps = operands(node)[:2]
    if not isinstance(total, Node) or not isinstance(eps, int | float):
        return None
    share, factors = reader.factors(total, value.index)
    ((summed, power),) = factors if len(factors) == 1 else ((None, 0.0),)
    if not isinstance(summed, Contraction) or power != 1.0 or len(summed.body) != 1:
        return None
    ((factor, power),) = summed.without_bound(INNER)
    if power != 2.0 or not isinstance(factor, Value):
        return None
    return factor, float(eps), share


def output_index(scope: Scope, node: Node, update: Update, index: Index) -> Index | None:
    """Return the index of an output's element in a node that holds them in order, else None."""
    position = flatten((*index[:2], axis(update.value_axis)), (1, scope.sizes[HEAD], 128))
    return split(position, scope.shape(node), scope.sizes)


def read_output(reader: Reader, node: Node, update: Update, index: Index) -> Output | None:
    """Compare a node with scale * S'' q / |q|, or return None where it is another function."""
    position = output_index(reader.scope, node, update, index)
    if position is None:
        return None
    terms = reader.polynomial(node, position)
    state = State(index)
    for factors, scale in terms.items():
        sums = [f for f, _ in factors if isinstance(f, Contraction)]
        if len(sums) != 1 or not has_state(sums[0].body):
            continue
        query = contracted_with(sums[0], state, update.decay, update.key_axis)
        if query is None:
            continue
        outer = frozenset((f, p) for f, p in factors if f is not sums[0])
        applied = multiply(update.terms, {times(outer, frozenset({(query, 1.0)})): scale})
        if not equal(terms, sum_over(applied, update.key_axis, 128)):
            continue
        rest, _ = without_norm(reader, outer, query, update.key_axis, -0.5, node)
        if rest != ONE:
            raise RefusalError(Reason.SCALE_NOT_CONSTANT, node)
        return Output(node, query, scale)
    return None

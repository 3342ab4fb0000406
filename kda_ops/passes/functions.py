"""Recognises scalar functions by their values: sigmoid, softplus and SiLU, however spelled.

Lives here: evaluating the pointwise nodes between a value and one element that it is computed from,
on a grid. Not here: sums and products of several elements (expression.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from kda_ops.passes.algebra import Product, Value
from kda_ops.passes.nodes import CASTS, is_random, operands
from kda_ops.passes.terms import Scope, Term

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]

FAR = (32.0, 40.0, 64.0, 80.0, 87.0, 88.5, 89.0, 100.0, 1e3, 1e4, 1e30)
# Float32 rounds 1 + exp(x), so the best spelling of softplus is off by 6e-8 where it is small; a
# threshold of 10 in place of 20 is off by 5e-5.
TOLERANCE = 4e-7
FURTHEST = 32  # terms looked at in search of the argument


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x))."""
    return torch.nn.functional.softplus(x, threshold=40.0)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return x * torch.sigmoid(x)


def argument_of(scope: Scope, factors: Product, function: Function) -> Term | None:
    """Return the x for which a product of elements is ``function(x)`` at every x, or None."""
    values = [(f, p) for f, p in factors if isinstance(f, Value)]
    if not values or len(values) < len(factors):
        return None
    starts = [Term(value.node, value.index) for value, _ in values]
    with _disable_current_modes(), torch.no_grad():
        grid = points()
        wanted = function(grid.double())
        for leaf in inside(scope, starts):
            known = {leaf: grid}
            found = [evaluated(scope, start, known) for start in starts]
            if any(item is None for item in found):
                continue
            total = torch.ones_like(grid)
            for item, (_, power) in zip(found, values, strict=True):
                total = total * (item if power == 1.0 else item.float() ** power)
            if close(total, wanted):
                return leaf
    return None


def points() -> Tensor:
    """Return arguments to try: dense where the functions bend, and as far as float32 goes."""
    far = torch.tensor(FAR)
    return torch.cat([torch.linspace(-30.0, 30.0, 601), far, -far])


def close(found: Tensor, wanted: Tensor) -> bool:
    """Whether values are those of a function, up to float32's rounding."""
    allowed = TOLERANCE * (1.0 + wanted.abs())
    return bool(((found.double() - wanted).abs() <= allowed).all())


def inside(scope: Scope, starts: list[Term]) -> Iterator[Term]:
    """Yield the elements that some elements are computed from by pointwise nodes, near ones first.

    The starts themselves are not among them: nothing here is the identity.
    """
    seen, pending = set(starts), list(starts)
    while pending and len(seen) < FURTHEST:
        term = pending.pop(0)
        if not is_pointwise(term.node):
            continue
        for source in term.node.all_input_nodes:
            below = scope.resolve(source, scope.broadcast(source, term.index))
            if below in seen:
                continue
            seen.add(below)
            pending.append(below)
            value = below.node.meta.get("val")
            if isinstance(value, Tensor) and value.is_floating_point():
                yield below


def is_pointwise(node: Node) -> bool:
    """Whether a node computes each element from the same element of its operands."""
    if node.op != "call_function":
        return False
    if node.target in CASTS:
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and not is_random(node)


def evaluated(scope: Scope, term: Term, known: dict[Term, Any]) -> Any:
    """Return a term's values where the leaf has the grid's, or None where it is not decided.

    Casts are looked through: whether a rounding may be dropped is decided for the whole step.
    """
    if term in known:
        return known[term]
    node, target = term.node, cast(Any, term.node.target)
    if node.target is aten.full.default or node.target is aten.scalar_tensor.default:
        constant = operands(node)[-1] if node.target is aten.full.default else operands(node)[0]
        known[term] = torch.tensor(float(constant)) if isinstance(constant, int | float) else None
        return known[term]
    known[term] = None
    if not is_pointwise(node):
        return None

    def below(source: Node) -> Any:
        return evaluated(scope, scope.resolve(source, scope.broadcast(source, term.index)), known)

    if node.target in CASTS:
        known[term] = below(operands(node)[0])
        return known[term]
    sources = {source: below(source) for source in node.all_input_nodes}
    if all(value is not None for value in sources.values()):
        args, kwargs = torch.fx.node.map_arg(
            (operands(node), dict(node.kwargs)), lambda source: sources[source]
        )
        known[term] = target(*args, **kwargs)
    return known[term]

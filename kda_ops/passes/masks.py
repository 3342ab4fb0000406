"""Rows that only pad a batch: where(valid, new, old) on a state, where(valid, o, 0) on an output.

Lives here: recognising the mask of a written state and the masked form of an output. Not here: the
slots of padding rows as an argument (arguments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from kda_ops.passes.affine import Index
from kda_ops.passes.anchors import Anchor
from kda_ops.passes.functions import is_pointwise
from kda_ops.passes.nodes import CASTS, MOVES, is_view, operands
from kda_ops.passes.terms import Scope, Term

aten = torch.ops.aten
FURTHEST = 64  # nodes looked at behind an output
SUMS = frozenset({aten.sum.dim_IntList, aten.mean.dim})


@dataclass(frozen=True)
class Mask:
    """An element over the rows, and the value that it has on rows that are no padding."""

    valid: Term
    live: bool


def unmasked(scope: Scope, found: Anchor, at: Index) -> tuple[Node, Index, Mask | None]:
    """Return the state that valid rows are given, its index, and the mask, if there is one."""
    term = scope.resolve(found.value, found.value_index(scope, at))
    if term.node.target is not aten.where.self:
        return term.node, term.index, None
    condition, yes, no = operands(term.node)
    for kept, other, live in ((yes, no, True), (no, yes, False)):
        old = below(scope, other, term.index)
        if old.node in found.reads and found.read_index(scope, old.node, old.index) == at:
            valid = below(scope, condition, term.index)
            new = below(scope, kept, term.index)
            return new.node, new.index, Mask(valid, live)
    return term.node, term.index, None


def below(scope: Scope, node: Node, index: Index) -> Term:
    """Return an operand's element, looked through views."""
    return scope.resolve(node, scope.broadcast(node, index))


def masked(
    scope: Scope, start: Node, element: Term, mask: Mask, at: Callable[[Node], Index | None]
) -> Node | None:
    """Return the node that is an element on valid rows and zero on others, or None.

    ``at`` returns the index of an output's element in a node.
    """
    for node in users_of(start):
        index = at(node) if node.target in {aten.where.self, aten.mul.Tensor} else None
        if index is None:
            continue
        first, *rest = (below(scope, operand, index) for operand in node.all_input_nodes)
        if node.target is aten.mul.Tensor and len(rest) == 1 and mask.live:
            sides = ((first, rest[0]), (rest[0], first))
            if any(
                unrounded(scope, a, element) == element and is_mask(scope, b, mask)
                for a, b in sides
            ):
                return node
        if node.target is aten.where.self:
            _, yes, no = operands(node)
            kept, other = (yes, no) if mask.live else (no, yes)
            value = unrounded(scope, below(scope, kept, index), element)
            if first == mask.valid and value == element and is_zero(other):
                return node
    return None


def unrounded(scope: Scope, term: Term, element: Term | None = None) -> Term:
    """Look through casts, down to an element if it comes."""
    while term.node.target in CASTS and term != element:
        term = below(scope, operands(term.node)[0], term.index)
    return term


def is_mask(scope: Scope, term: Term, mask: Mask) -> bool:
    """Whether an element is the mask as a number."""
    return term.node.target in CASTS and unrounded(scope, term) == mask.valid


def is_zero(item: object) -> bool:
    """Whether an operand is the number zero."""
    if isinstance(item, Node) and item.target in {aten.full.default, aten.scalar_tensor.default}:
        return operands(item)[item.target is aten.full.default] == 0
    return isinstance(item, int | float) and item == 0


def users_of(start: Node) -> Iterator[Node]:
    """Yield what is computed from a node pointwise, by sums or by views, near ones first."""
    seen, pending = {start}, [start]
    while pending and len(seen) < FURTHEST:
        for user in pending.pop(0).users:
            known = is_view(user) or is_pointwise(user) or user.target in SUMS | MOVES
            if user in seen or not known or not isinstance(user.meta.get("val"), torch.Tensor):
                continue
            seen.add(user)
            pending.append(user)
            yield user

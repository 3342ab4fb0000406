"""How code names the rows of a pool: by indexing, look-ups, gathers and scatters of whole rows.

Lives here: the slots of one read or write, and pools whose rows are seen as vectors. Not here: who
else touches the pool (anchors.py), and the arguments made of it (arguments.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kda_ops.passes.affine import Index, flatten, split
from kda_ops.passes.nodes import CASTS, RESHAPES, is_exact_cast, operands
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import ROW, Scope, Term

aten = torch.ops.aten
INDEXED = frozenset({aten.index.Tensor, aten.index_put.default})  # negative slots are allowed
SPREAD = frozenset({aten.gather.default, aten.scatter.src})  # an index for each element
ROW_READS = frozenset({aten.index.Tensor, aten.embedding.default, aten.gather.default})
ROW_WRITES = frozenset({aten.index_put.default, aten.scatter.src})
ACCUMULATING = frozenset({aten.scatter_add.default, aten.scatter.reduce, aten.scatter_reduce.two})


def slots_of(node: Node, same: dict[Node, Node]) -> Node:
    """Return the tensor [rows] of slots that a read or write of whole rows takes, or refuse.

    It is the first of those nodes that compute it, below exact integer casts.
    """
    index: Any
    if node.target in INDEXED:
        indices = operands(node)[1]
        index = indices[0] if len(indices) == 1 else None
    elif node.target in SPREAD:
        index = row_slots(Scope(same=same), node).node
    else:
        index = operands(node)[1]
    if not isinstance(index, Node):
        raise RefusalError(Reason.INDEX_FORM, node, "not one index over the first dimension")
    value = index.meta["val"]
    if value.dim() != 1 or value.dtype not in {torch.int32, torch.int64}:
        raise RefusalError(Reason.INDEX_FORM, index, f"{value.dtype} with {value.dim()} dimensions")
    while index.target in CASTS and is_exact_cast(index):
        index = operands(index)[0]
    return same.get(index, index)


def row_slots(scope: Scope, node: Node) -> Term:
    """Return the slot that a gather or scatter takes for all elements of a row, or refuse."""
    pool, dim, index = operands(node)[:3]
    shape, whole = scope.shape(index), scope.shape(pool)
    if dim % len(whole):
        raise RefusalError(Reason.INDEX_FORM, node, f"along dimension {dim}")
    if shape[1:] != whole[1:]:
        raise RefusalError(Reason.INDEX_FORM, node, "only a part of each row")
    row = scope.named(ROW, shape[0])
    place = (row, *(scope.fresh(size)[1] for size in shape[1:]))
    term = scope.resolve(index, place, until=lambda below: below.meta["val"].dim() == 1)
    if term.index != (row,):
        raise RefusalError(Reason.INDEX_FORM, node, "not one slot for all elements of a row")
    return term


def regrouped(pool: Node) -> Node:
    """Return the pool below views that make its rows vectors: [slots, everything]."""
    while pool.target in RESHAPES and isinstance(operands(pool)[0], Node):
        scope, source = Scope(), operands(pool)[0]
        mine, below = scope.shape(pool), scope.shape(source)
        if not 2 <= len(mine) < len(below) or mine[0] != below[0]:
            break
        pool = source
    return pool


def forms_of(pool: Node) -> list[Node]:
    """Return a pool and every view of it that regroups its rows."""
    return [
        pool,
        *(user for user in pool.users if user.op == "call_function" and regrouped(user) is pool),
    ]


def regroup(scope: Scope, index: Index, given: Node, wanted: Node) -> Index:
    """Return the index of an element of a row in another grouping of the rows, or refuse."""
    shape, other = scope.shape(given)[1:], scope.shape(wanted)[1:]
    if shape == other:
        return index
    moved = split(flatten(index[1:], shape), other, scope.sizes)
    if moved is None:
        raise RefusalError(Reason.INDEX_FORM, given, "elements of a row are mixed")
    return (index[0], *moved)

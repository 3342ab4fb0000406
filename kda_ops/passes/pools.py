"""A pool as one version of an input, or as a part of one: views down to it, and back up again.

Lives here: which input a pool is a view of, what a write makes of the whole, and the epilogue that
stores it. Not here: what may be read between (anchors.py).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from kda_ops.passes.nodes import RESHAPES, SPLITS, is_input, operands
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.slots import ROW_WRITES, regroup, regrouped
from kda_ops.passes.terms import Scope

aten = torch.ops.aten
functionalized = torch.ops.higher_order.auto_functionalized_v2

# Views that name the same storage whatever the strides; reshape may copy.
STORAGE_VIEWS = frozenset(
    {
        aten.select.int,
        aten.slice.Tensor,
        aten.view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.alias.default,
    }
)
SCATTERS = frozenset({aten.select_scatter.default, aten.slice_scatter.default})


@dataclass(frozen=True)
class Place:
    """Where a pool is: ``base`` is a version of an input, ``views`` lead from it to the pool.

    ``twins`` are all nodes that are one of these views. ``path`` leads from the write to the next
    version of the base, which is its last node.
    """

    base: Node
    views: tuple[Node, ...]
    twins: frozenset[Node]
    path: tuple[Node, ...]

    @property
    def result(self) -> Node:
        """The next version of the base."""
        return self.path[-1]


def place_of(pool: Node, write: Node, same: dict[Node, Node]) -> Place:
    """Find the input behind a pool and what a write makes of it, or raise RefusalError."""
    views: list[Node] = []
    base = pool
    while (source := viewed_storage(base)) is not None:
        views.insert(0, base)
        base = source
    twins = twins_of(base, views, same)
    known = {base, *twins}
    path = [write]
    changed = bool(views) or regrouped(operands(write)[0]) is not operands(write)[0]
    while path[-1].meta["val"].shape != base.meta["val"].shape or len(path) <= changed:
        users = [user for user in path[-1].users if leads_up(user, path[-1], known)]
        if len(users) != 1:
            raise RefusalError(Reason.STATE_IS_VIEW, pool)
        path.append(users[0])
    place = Place(base, tuple(views), frozenset(twins), tuple(path))
    if changed and not inverse(place, pool, same):
        raise RefusalError(Reason.STATE_IS_VIEW, pool)
    return place


def viewed_storage(node: Node) -> Node | None:
    """Return what a node is a view of, in the sense of memory."""
    if node.target in STORAGE_VIEWS:
        return operands(node)[0]
    if node.target is operator.getitem and operands(node)[0].target in SPLITS:
        return operands(operands(node)[0])[0]
    return None


def twins_of(base: Node, views: list[Node], same: dict[Node, Node]) -> set[Node]:
    """Return every node that repeats one of the views."""
    found: set[Node] = set()
    level = {base}
    for view in views:
        first = same.get(view, view)
        users = {user for node in level for user in node.users}
        users |= {inner for user in users if user.target in SPLITS for inner in user.users}
        level = {user for user in users if same.get(user, user) is first}
        found |= level | {n for n in users if n.target in SPLITS and level & set(n.users)}
    return found


def leads_up(user: Node, node: Node, known: set[Node]) -> bool:
    """Whether a node puts a written part back into what it is a part of."""
    if user.target in SCATTERS:
        return operands(user)[1] is node and operands(user)[0] in known
    return user.target in STORAGE_VIEWS | RESHAPES and operands(user)[0] is node


def inverse(place: Place, pool: Node, same: dict[Node, Node]) -> bool:
    """Whether the written elements arrive where the pool's elements came from."""
    scope = Scope(same=same)
    index = tuple(scope.fresh(size)[1] for size in scope.shape(pool))
    below = scope.resolve(pool, index)
    if below.node is not same.get(place.base, place.base):
        return False
    above = scope.resolve(place.result, below.index)
    write = place.path[0]
    arrived = above.node is same.get(write, write)
    return arrived and regroup(scope, above.index, write, pool) == index


def pool_root(pool: Node) -> Node:
    """Return the input behind a pool, below views and what our own operators have made of it."""
    while (earlier := replaced_base(pool) or viewed_storage(pool)) is not None:
        pool = earlier
    return pool


def replaced_base(pool: Node) -> Node | None:
    """Return what one of our own operators made a pool from, or None where none did."""
    if pool.target is operator.getitem and operands(pool)[0].target is functionalized:
        source, which = operands(pool)
        bases: list[Node] = source.kwargs["_all_bases"]
        return bases[which - 1]
    return None


def is_next_version(node: Node) -> bool:
    """Whether a node is a pool with new rows, or what a pool is a part of with them."""
    while node.target in SCATTERS:
        node = operands(node)[1]
        while (source := viewed_storage(node)) is not None:
            node = source
    return node.target in ROW_WRITES and is_input(pool_root(regrouped(operands(node)[0])))


def before(node: Node) -> Node | None:
    """Return the version of a pool that a written one was made from."""
    if node.target in ROW_WRITES | SCATTERS | RESHAPES:
        return operands(node)[0]
    return replaced_base(node) or viewed_storage(node)


def write_back(root: Node, result: Node) -> Node:
    """Return the epilogue's copy_ that stores a written pool, possibly after later writes."""
    for user in root.users:
        if user.target is not aten.copy_.default or operands(user)[0] is not root:
            continue
        stored: Node | None = operands(user)[1]
        while stored is not None and stored is not result:
            stored = before(stored)
        if stored is result:
            return user
    raise RefusalError(Reason.STATE_NOT_WRITTEN_BACK, result)


def seen(place: Place, order: tuple[int, ...]) -> Tensor:
    """Return the fake pool as the operator is to see it: the views, applied to the input itself."""
    root = pool_root(place.base)
    if not is_input(root):
        raise RefusalError(Reason.STATE_NOT_INPUT, root)
    value: Any = root.meta["val"]
    with value.fake_mode:
        for view in place.views:
            if view.target is operator.getitem:
                parent, which = operands(view)
                value = cast(Any, parent.target)(value, *operands(parent)[1:])[which]
            else:
                value = cast(Any, view.target)(value, *operands(view)[1:])
        return value.permute(order)

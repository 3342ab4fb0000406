"""The pair "state read ... state written" of one graph input, indexed or dense.

Lives here: the nodes of the pair, and the rules about who else may touch the pool. Not here: where
to look for pairs (candidates.py), and what happens in between (delta_rule.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from kda_ops.passes.affine import Index
from kda_ops.passes.candidates import VIEWS_OF_POOL, written
from kda_ops.passes.nodes import (
    CASTS,
    SPLITS,
    is_exact_cast,
    is_input,
    is_view,
    operands,
)
from kda_ops.passes.pools import (
    SCATTERS,
    STORAGE_VIEWS,
    Place,
    place_of,
    pool_root,
    viewed_storage,
    write_back,
)
from kda_ops.passes.reasons import Reason, RefusalError

aten = torch.ops.aten
LOOKUPS = frozenset({aten.embedding.default, aten.gather.default})
COPIES = frozenset({aten.clone.default, aten.copy.default, aten.copy_.default})


@dataclass
class Anchor:
    """One state and its update.

    ``pool`` is the state before the step, ``write`` the functional index_put (or, for a dense
    state, the copy_ of the epilogue), ``value`` what is written, ``index`` the slots' node or None,
    ``reads`` the nodes that hold the rows' state before the step, ``back`` the epilogue's copy_.
    ``place`` says what the pool is a view of; ``order`` is the order of its dimensions that the
    operator knows.
    """

    pool: Node
    write: Node
    value: Node
    index: Node | None
    reads: list[Node]
    back: Node
    place: Place
    casts: list[Node] = field(default_factory=list)
    order: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def result(self) -> Node:
        """The node that holds the updated version of the input."""
        return self.place.result

    @property
    def touching(self) -> set[Node]:
        """The nodes around the pool that belong to the step."""
        twins, path = self.place.twins, self.place.path
        return {*twins, *path, *self.reads, *self.casts, self.back}

    def from_memory(self, index: Index) -> Index:
        """Return the pool's index of an element from its index as the operator knows it."""
        return tuple(index[self.order.index(dim)] for dim in range(len(index)))

    def to_memory(self, index: Index) -> Index:
        """Return the index of an element as the operator knows it from the pool's."""
        return tuple(index[dim] for dim in self.order)


def anchor(write: Node, same: dict[Node, Node], check: Callable[[Node], None]) -> Anchor:
    """Describe the state around a write, or say why the pool may not be worked on in place.

    ``check`` refuses pools of another form than the operator's.
    """
    pool, value = operands(write)[0], written(write)
    if write.target is aten.scatter.src:
        raise RefusalError(Reason.INDEX_FORM, write, "rows are written by scatter")
    pool = same.get(pool, pool)
    root = check_origin(write, pool)
    check(pool)
    if write.target is aten.copy_.default:
        place = Place(pool, (), frozenset(), (write,))
        found = Anchor(pool, write, value, None, [pool], write, place)
    else:
        place = place_of(pool, write, same)
        index = slot_index(write)
        reads, casts = gathers([pool, *place.twins], index, write, same)
        back = write_back(root, place.result)
        found = Anchor(pool, write, value, plain_index(index, same), reads, back, place, casts)
    check_users(found)
    return found


def check_origin(write: Node, pool: Node) -> Node:
    """Return the input behind a state; refuse states that are none, or are added to."""
    root = pool_root(pool)
    if not is_input(root):
        reason = Reason.STATE_IS_VIEW if root.target in VIEWS_OF_POOL else Reason.STATE_NOT_INPUT
        raise RefusalError(reason, root)
    if viewed_storage(pool) is not None and root.meta["val"].storage_offset() != 0:
        raise RefusalError(Reason.STATE_IS_VIEW, pool, "a view of an input that is one itself")
    if write.target is aten.index_put.default and len(operands(write)) > 3 and operands(write)[3]:
        raise RefusalError(Reason.ACCUMULATES, write)
    return root


def check_state(pool: Node) -> None:
    """Refuse states of another form than [slots, heads, 128, 128] in float32 or bfloat16."""
    value = pool.meta["val"]
    if value.dim() != 4:
        raise RefusalError(Reason.STATE_SHAPE, pool, f"it has {value.dim()} dimensions")
    if not all(isinstance(s, int) for s in value.shape[1:]):
        raise RefusalError(Reason.DYNAMIC_SHAPE, pool, f"shape {tuple(value.shape)}")
    if tuple(value.shape[2:]) != (128, 128):
        raise RefusalError(Reason.HEAD_WIDTH, pool, f"shape {tuple(value.shape)}")
    if value.dtype not in {torch.float32, torch.bfloat16}:
        raise RefusalError(Reason.STATE_DTYPE, pool, str(value.dtype))


def slot_index(write: Node) -> Node:
    """Return the one index tensor of a write over the first dimension."""
    indices = operands(write)[1]
    index = indices[0] if len(indices) == 1 else None
    if not isinstance(index, Node):
        raise RefusalError(Reason.INDEX_FORM, write, "not one index over the first dimension")
    value = index.meta["val"]
    if value.dim() != 1 or value.dtype not in {torch.int32, torch.int64}:
        raise RefusalError(Reason.INDEX_FORM, index, f"{value.dtype} with {value.dim()} dimensions")
    return index


def plain_index(index: Any, same: dict[Node, Node]) -> Any:
    """Return an index below exact integer casts, the first node of those that compute it."""
    while isinstance(index, Node) and index.target in CASTS and is_exact_cast(index):
        index = operands(index)[0]
    return same.get(index, index) if isinstance(index, Node) else index


def gathers(
    pools: list[Node], index: Node, write: Node, same: dict[Node, Node]
) -> tuple[list[Node], list[Node]]:
    """Return the gathers of a pool, and the casts of the whole pool that some of them read."""
    casts = [u for pool in pools for u in pool.users if u.target in CASTS and is_exact_cast(u)]
    reads = [u for s in (*pools, *casts) for u in s.users if u.target is aten.index.Tensor]
    matching = []
    for read in reads:
        indices = operands(read)[1]
        if len(indices) != 1:
            raise RefusalError(Reason.INDEX_FORM, read)
        if plain_index(indices[0], same) is plain_index(index, same):
            matching.append(read)
    if not matching:
        for looked in (n for s in pools for u in s.users for n in (u, *u.users)):
            if looked.target in LOOKUPS:
                raise RefusalError(Reason.INDEX_FORM, looked, f"rows are read by {looked.target}")
        raise RefusalError(Reason.INDEX_MISMATCH, write, f"written at {index.name}")
    return matching, casts


def check_users(found: Anchor) -> None:
    """Refuse a pool that anything but the step and its write-back touches."""
    own, place = found.touching, found.place
    for source in {found.pool, place.base, *place.twins, *found.casts}:
        for user in source.users:
            if user not in own and not (source is found.pool and is_operand(user, found)):
                raise outsider(user)
    for node in place.path[:-1]:
        if len(node.users) > 1:
            raise outsider(next(user for user in node.users if user not in own))
    if found.write is found.back:
        return
    users = list(found.result.users)
    continued = any(goes_on(user, found) for user in users)
    for user in users:
        later = goes_on(user, found) or (continued and user.target is aten.index.Tensor)
        if user is not found.back and not later:
            raise outsider(user)


def goes_on(user: Node, found: Anchor) -> bool:
    """Whether a user of the updated pool is a later step's: its write, or a view it works on."""
    if user.target is aten.index_put.default or user.target in SCATTERS:
        return operands(user)[0] is found.result
    views = STORAGE_VIEWS | SPLITS
    return bool(found.place.views) and user.target in views


def is_operand(user: Node, found: Anchor) -> bool:
    """Whether a user of a dense state may compute the step with it (step.py checks the rest)."""
    overwrites = user.target is aten.copy.default and operands(user)[1] is not found.pool
    return found.index is None and (overwrites or user.target not in COPIES)


def outsider(user: Node) -> RefusalError:
    """Name what another user of a pool does with it."""
    if user.target in COPIES:
        return RefusalError(Reason.STATE_SNAPSHOT, user)
    if user.target is aten.index.Tensor:
        return RefusalError(Reason.STATE_READ_ELSEWHERE, user, "gathered again")
    if user.target in VIEWS_OF_POOL or (user.op == "call_function" and is_view(user)):
        return RefusalError(Reason.STATE_ALIASED, user)
    return RefusalError(Reason.STATE_READ_ELSEWHERE, user)

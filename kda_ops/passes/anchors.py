"""The pair "state read ... state written" of one graph input, indexed or dense.

Lives here: the nodes of the pair, and the rules about who else may touch the pool. Not here: where
to look for pairs (candidates.py), and what happens in between (delta_rule.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
from kda_ops.passes.slots import (
    ACCUMULATING,
    INDEXED,
    ROW_READS,
    ROW_WRITES,
    SPREAD,
    forms_of,
    regroup,
    regrouped,
    row_slots,
    slots_of,
)
from kda_ops.passes.terms import Scope

aten = torch.ops.aten
COPIES = frozenset({aten.clone.default, aten.copy.default, aten.copy_.default})


@dataclass
class Anchor:
    """One state and its update.

    ``pool`` is the state before the step, ``write`` the functional index_put or scatter (or, for a
    dense state, the copy_ of the epilogue), ``value`` what is written, ``index`` the slots' node or
    None, ``reads`` the nodes that hold the rows' state before the step, ``back`` the epilogue's
    copy_. ``place`` says what the pool is a view of, ``wholes`` are casts and regroupings of all of
    it; ``order`` is the order of its dimensions that the operator knows.
    """

    pool: Node
    write: Node
    value: Node
    index: Node | None
    reads: list[Node]
    back: Node
    place: Place
    wholes: list[Node] = field(default_factory=list)
    order: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def result(self) -> Node:
        """The node that holds the updated version of the input."""
        return self.place.result

    @property
    def touching(self) -> set[Node]:
        """The nodes around the pool that belong to the step."""
        twins, path = self.place.twins, self.place.path
        return {*twins, *path, *self.reads, *self.wholes, self.back}

    @property
    def first_slot(self) -> int | None:
        """The least slot: None where negative ones count from the end, as plain indexing has it.

        Where any of the reads and the write has it that a negative slot is an error, it is 0.
        """
        nodes = (*self.reads, self.write) if self.index is not None else ()
        return None if all(node.target in INDEXED for node in nodes) else 0

    def read_index(self, scope: Scope, read: Node, index: Index) -> Index:
        """Return the pool's index of an element of a read."""
        return regroup(scope, index, read, self.pool)

    def value_index(self, scope: Scope, index: Index) -> Index:
        """Return the written value's index of an element of the pool's rows."""
        index = regroup(scope, index, self.pool, operands(self.write)[0])
        return index[len(index) - len(scope.shape(self.value)) :]

    def mark_rows(self, scope: Scope) -> None:
        """Note which dimensions of spread indices run over the rows."""
        for node in (*self.reads, self.write):
            if node.target in SPREAD:
                row_slots(scope, node)

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
    pool, value = regrouped(operands(write)[0]), written(write)
    pool = same.get(pool, pool)
    root = check_origin(write, pool)
    check(pool)
    if write.target is aten.copy_.default:
        place = Place(pool, (), frozenset(), (write,))
        found = Anchor(pool, write, value, None, [pool], write, place)
    else:
        place = place_of(pool, write, same)
        index = slots_of(write, same)
        reads, wholes = row_reads([pool, *place.twins], write, same)
        back = write_back(root, place.result)
        found = Anchor(pool, write, value, index, reads, back, place, wholes)
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
    adds = write.target is aten.index_put.default and any(operands(write)[3:])
    if adds or write.target in ACCUMULATING:
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


def row_reads(
    pools: list[Node], write: Node, same: dict[Node, Node]
) -> tuple[list[Node], list[Node]]:
    """Return the reads of a pool at the written slots, and the whole pools in other forms.

    These are exact casts of all of it, and views with rows as vectors, that reads go through.
    """
    casts = [u for pool in pools for u in pool.users if u.target in CASTS and is_exact_cast(u)]
    forms = [form for source in (*pools, *casts) for form in forms_of(source)]
    slots = slots_of(write, same)
    reads = [u for form in forms for u in form.users if u.target in ROW_READS]
    matching = [read for read in reads if slots_of(read, same) is slots]
    if not matching:
        raise RefusalError(Reason.INDEX_MISMATCH, write, f"written at {slots.name}")
    return matching, [form for form in forms if form not in pools]


def check_users(found: Anchor) -> None:
    """Refuse a pool that anything but the step and its write-back touches."""
    own, place = found.touching, found.place
    for source in {found.pool, place.base, *place.twins, *found.wholes}:
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
        later = goes_on(user, found) or (continued and user.target in ROW_READS)
        if user is not found.back and not later:
            raise outsider(user)


def goes_on(user: Node, found: Anchor) -> bool:
    """Whether a user of the updated pool is a later step's: its write, or a view it works on."""
    if user.target in ROW_WRITES | SCATTERS:
        return operands(user)[0] is found.result
    views = STORAGE_VIEWS | SPLITS
    grouped = regrouped(user) is not user
    return grouped or (bool(found.place.views) and user.target in views)


def is_operand(user: Node, found: Anchor) -> bool:
    """Whether a user of a dense state may compute the step with it (step.py checks the rest)."""
    overwrites = user.target is aten.copy.default and operands(user)[1] is not found.pool
    return found.index is None and (overwrites or user.target not in COPIES)


def outsider(user: Node) -> RefusalError:
    """Name what another user of a pool does with it."""
    if user.target in COPIES:
        return RefusalError(Reason.STATE_SNAPSHOT, user)
    if user.target in ROW_READS:
        return RefusalError(Reason.STATE_READ_ELSEWHERE, user, "gathered again")
    if user.target in VIEWS_OF_POOL or (user.op == "call_function" and is_view(user)):
        return RefusalError(Reason.STATE_ALIASED, user)
    return RefusalError(Reason.STATE_READ_ELSEWHERE, user)

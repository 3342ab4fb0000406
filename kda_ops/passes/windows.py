"""The windows of history that q, k and v are convolved over: one pool, or slices of one pool.

Lives here: finding the pool, and which of its channels each write moves. Not here: taps and how a
window moves (convolution.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from kda_ops.passes.affine import Affine, Index, constant
from kda_ops.passes.anchors import Anchor, anchor, check_origin, outsider
from kda_ops.passes.candidates import WRITES, written
from kda_ops.passes.core import local
from kda_ops.passes.nodes import RESHAPES, SPLITS, is_input, operands
from kda_ops.passes.pools import (
    SCATTERS,
    STORAGE_VIEWS,
    Place,
    pool_root,
    replaced_base,
)
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.slots import ROW_READS, ROW_WRITES, forms_of, regrouped, slots_of
from kda_ops.passes.terms import Scope, Term

aten = torch.ops.aten
ORDER = (0, 1, 2)


@dataclass(frozen=True)
class Piece:
    """Where a part of the pool is written: its corner in the pool, and its sizes, 0 for all."""

    anchor: Anchor
    corner: tuple[int, ...]
    sizes: tuple[int, ...]

    def holds(self, scope: Scope, index: Index) -> bool:
        """Whether all elements of the pool at an index are in this piece."""
        for entry, start, size in zip(index, self.corner, self.sizes, strict=True):
            low, high = entry.bounds(scope.sizes)
            if size and not (start <= low and high < start + size):
                return False
        return True

    def inside(self, index: Index) -> Index:
        """Return the piece's own index of an element of the pool."""
        return moved(index, self.corner, -1)


@dataclass(frozen=True)
class Windows:
    """A pool of windows: ``whole`` is what the operator works on, ``pieces`` are its writes."""

    whole: Anchor
    pieces: tuple[Piece, ...]
    corners: dict[Node, tuple[int, ...]] = field(default_factory=dict)

    @property
    def first_slot(self) -> int | None:
        """The least slot, as in :class:`Anchor`."""
        return None if all(p.anchor.first_slot is None for p in self.pieces) else 0

    def in_order(self, order: tuple[int, int, int]) -> Windows:
        """Return the pool with an order of its dimensions, (slot, channel, column)."""
        return replace(self, whole=replace(self.whole, order=order))

    def piece(self, scope: Scope, index: Index) -> Piece:
        """Return the piece that the elements at an index are in, or refuse."""
        for piece in self.pieces:
            if piece.holds(scope, index):
                return piece
        raise RefusalError(Reason.CONV_FORM, self.whole.pool, "channels without a window")

    def read_index(self, scope: Scope, read: Node, index: Index) -> Index:
        """Return the pool's index of an element of a read."""
        if read in self.corners:
            return moved(index, self.corners[read], 1)
        return self.whole.read_index(scope, read, index)


def moved(index: Index, corner: tuple[int, ...], factor: int) -> Index:
    """Return an index by as much further as a corner is away."""
    return tuple(e + constant(factor * c) for e, c in zip(index, corner, strict=True))


def windows_of(sums: tuple[Term, ...], same: dict[Node, Node]) -> Windows:
    """Find the pool that is read on the way to q, k and v and written in the graph, or refuse."""
    pools = {same.get(pool, pool) for part in sums for pool in pools_behind(part.node)}
    roots = {root_of(pool) for pool in pools}
    if len(pools) > len(roots) == 1:
        return sliced(roots.pop(), same)
    writes = {write for part in sums for write in writes_behind(part.node)}
    if len(writes) != 1:
        several = f"{len(writes)} windows where the operator takes one, with channels q, k, v"
        fact = several if writes else "no window of history"
        raise RefusalError(Reason.CONV_MISSING, sums[0].node, fact)
    (write,) = writes
    found = replace(anchor(write, same, check_window), order=ORDER)
    return Windows(found, (Piece(found, (0, 0, 0), (0, 0, 0)),))


def pools_behind(end: Node) -> Iterator[Node]:
    """Yield the pools, or parts of one, that rows are read of on the way to a value."""
    for node in local({end}):
        for source in node.all_input_nodes:
            if source.target in ROW_READS:
                pool = regrouped(operands(source)[0])
                root = root_of(pool)
                if is_input(root) and root.meta["val"].dim() == len(ORDER):
                    yield pool


def root_of(pool: Node) -> Node:
    """Return the input behind a pool, below views of it and earlier writes of other parts."""
    while True:
        pool = pool_root(pool)
        if pool.target not in SCATTERS:
            return pool
        pool = operands(pool)[0]


def writes_behind(end: Node) -> Iterator[Node]:
    """Yield the writes of states that a value is computed from."""
    for node in local({end}):
        for source in node.all_input_nodes:
            pool = regrouped(operands(source)[0] if source.target in ROW_READS else source)
            for form in forms_of(pool):
                yield from (user for user in form.users if is_write(user, form))


def is_write(user: Node, pool: Node) -> bool:
    """Whether a node is where a pool gets its new rows, not the epilogue that stores them."""
    if user.target not in WRITES or operands(user)[0] is not pool:
        return False
    value = written(user)
    if not isinstance(value, Node) or value.target in WRITES:
        return False
    return user.target is not aten.copy_.default or not stores_rows(value)


def stores_rows(value: Node) -> bool:
    """Whether a value is a pool, or what it is a part of, with rows that were written before."""
    pending = [value]
    while pending:
        node = pending.pop()
        if node.target in ROW_WRITES or replaced_base(node) is not None:
            return True
        if node.target in SCATTERS | RESHAPES | STORAGE_VIEWS:
            pending += operands(node)[: 1 + (node.target in SCATTERS)]
    return False


def check_window(pool: Node) -> None:
    """Refuse pools that are no windows of three to eight columns."""
    shape = pool.meta["val"].shape
    if len(shape) != 3 or not all(isinstance(size, int) for size in shape[1:]):
        raise RefusalError(Reason.CONV_FORM, pool, f"the window is {tuple(shape)}")


@dataclass
class Touching:
    """Everything in a graph that touches an input, views and versions of it included."""

    forms: list[Node] = field(default_factory=list)
    reads: list[Node] = field(default_factory=list)
    writes: list[Node] = field(default_factory=list)
    back: Node | None = None


def touching(root: Node) -> Touching:
    """Collect what touches an input; refuse what is neither a slice nor a row read or written."""
    found, pending, seen = Touching(), [root], {root}
    while pending:
        node = pending.pop(0)
        for user in node.users:
            first = operands(user)[0] if operands(user) else None
            if user in seen:
                continue
            seen.add(user)
            if user.target is aten.copy_.default and first is root:
                found.back = user
            elif user.target in ROW_READS and first is node:
                found.reads.append(user)
            elif user.target in ROW_WRITES and first is node:
                found.writes.append(user)
                pending.append(user)
            elif is_form(user):
                found.forms.append(user)
                pending.append(user)
            else:
                raise outsider(user)
    return found


def is_form(user: Node) -> bool:
    """Whether a node is a view of a pool, a part of it, or its next version."""
    return user.target in STORAGE_VIEWS | SPLITS | SCATTERS or user.target is operator.getitem


def sliced(root: Node, same: dict[Node, Node]) -> Windows:
    """Describe a pool that is read and written in slices of its channels, or refuse."""
    check_window(root)
    found = touching(root)
    if found.back is None or not found.writes:
        raise RefusalError(Reason.STATE_NOT_WRITTEN_BACK, root)
    result, slots = operands(found.back)[1], slots_of(found.writes[0], same)
    for node in (*found.writes, *found.reads):
        if slots_of(node, same) is not slots:
            raise RefusalError(Reason.INDEX_MISMATCH, node, f"written at {slots.name}")
    corners = {read: corner_of(root, operands(read)[0], same) for read in found.reads}
    path = (*found.writes, *(form for form in found.forms if form is not result), result)
    place = Place(root, (), frozenset(), path)
    pieces = []
    for write in found.writes:
        check_origin(write, root)
        part = operands(write)[0]
        corner = corner_of(root, part, same)
        check_arrival(result, write, corner, same)
        reads = [read for read, other in corners.items() if other == corner]
        value = written(write)
        held = Anchor(part, write, value, slots, reads, found.back, place, order=ORDER)
        sizes = tuple(int(size) for size in part.meta["val"].shape[1:])
        pieces.append(Piece(held, corner, (0, *sizes)))
    whole = Anchor(
        root, result, pieces[0].anchor.value, slots, found.reads, found.back, place, order=ORDER
    )
    return Windows(whole, tuple(pieces), corners)


def corner_of(root: Node, part: Node, same: dict[Node, Node]) -> tuple[int, ...]:
    """Return where a slice begins in a pool that no write has come before in it, or refuse."""
    scope = Scope(same=same)
    index = axes_of(scope, part)
    term = scope.resolve(part, index)
    ends = len(term.index) == len(index) and term.node is root
    corner = tuple(entry.constant for entry in term.index)
    if not ends or corner[0] or term.index != moved(index, corner, 1):
        raise RefusalError(Reason.CONV_FORM, part, "no slice of the window as it was")
    return corner


def check_arrival(
    result: Node, write: Node, corner: tuple[int, ...], same: dict[Node, Node]
) -> None:
    """Refuse a slice whose new rows are not in its place in the end."""
    scope = Scope(same=same)
    index = axes_of(scope, write)
    if scope.resolve(result, moved(index, corner, 1)) != Term(same.get(write, write), index):
        raise RefusalError(
            Reason.CONV_FORM, write, "the slice is written elsewhere than it is read"
        )


def axes_of(scope: Scope, node: Node) -> tuple[Affine, ...]:
    """Return an index with an axis for each dimension of a node."""
    return tuple(scope.fresh(size)[1] for size in scope.shape(node))

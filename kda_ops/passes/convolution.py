"""Recognises the short convolution in front of a step: SiLU, taps, window and how the window moves.

Lives here: reading q, k and v as functions of a window of history and the current token. Not here:
the recurrence (delta_rule.py), and laying the parts out as arguments (fused_arguments.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from kda_ops.passes.affine import Affine, Index, axis, constant
from kda_ops.passes.algebra import Polynomial, State, Value, equal, has_state
from kda_ops.passes.anchors import Anchor
from kda_ops.passes.candidates import flows
from kda_ops.passes.core import Core, D, reads_of, row_count
from kda_ops.passes.delta_rule import HEAD
from kda_ops.passes.expression import Reader
from kda_ops.passes.functions import argument_of, silu
from kda_ops.passes.masks import unmasked
from kda_ops.passes.nodes import TAPS_AT_MOST
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import ROW, Term
from kda_ops.passes.windows import Windows, windows_of

aten = torch.ops.aten
WIDTH = 4


@dataclass(frozen=True)
class Part:
    """q, k or v before the convolution: the current token, its taps (oldest first), the bias.

    ``channel`` is where the part's elements are in a window.
    """

    x: Term
    taps: tuple[Term, ...]
    bias: Term | None
    channel: Affine


@dataclass(frozen=True)
class Convolution:
    """The convolution of one step.

    ``mixed`` are q, k and v behind it; the order of the windows' pool makes it [slots, channels,
    columns].
    """

    windows: Windows
    mixed: tuple[Term, Term, Term]
    parts: tuple[Part, Part, Part]

    @property
    def anchor(self) -> Anchor:
        """The pool that the operator works on."""
        return self.windows.whole


def read_convolution(core: Core, same: dict[Node, Node]) -> Convolution:
    """Read the code that q, k and v come from, or raise RefusalError."""
    query, key, value = core.output.query, core.update.key, core.update.value
    mixed = (Term(query.node, query.index), Term(key.node, key.index), value)
    sums = tuple(before_silu(core, part) for part in mixed)
    windows = windows_of(sums, same)
    for piece in windows.pieces:
        check_slots(core, piece.anchor)
    reads = windows.whole.reads
    reader = Reader(
        core.scope,
        reads_of(core.scope, reads, windows.read_index),
        flows(reads),
        state_rounds=True,
    )
    terms = [reader.polynomial(part.node, part.index) for part in sums]
    order, columns = order_of(windows.whole, terms)
    windows = windows.in_order(order)
    first, second, third = (
        part_of(reader, part, item, order, columns) for part, item in zip(sums, terms, strict=True)
    )
    parts = (first, second, third)
    check_channels(core, parts)
    for part, rounded in zip(parts, mixed, strict=True):
        check_move(core, reader, windows, part, columns)
        if rounded.node.meta["val"].dtype != part.x.node.meta["val"].dtype:
            fact = "the operator rounds q, k and v to the type of x"
            raise RefusalError(Reason.ROUNDING, rounded.node, fact)
    return Convolution(windows, mixed, parts)


def check_slots(core: Core, found: Anchor) -> None:
    """Refuse windows in other slots than the state's; note what runs over the rows."""
    if core.anchor.index is not found.index:
        raise RefusalError(Reason.CONV_SLOTS, found.write)
    if row_count(core.scope, found) != core.scope.sizes[ROW]:
        raise RefusalError(Reason.CONV_SLOTS, found.write, "another number of rows")
    found.mark_rows(core.scope)


def check_channels(core: Core, parts: tuple[Part, ...]) -> None:
    """Refuse windows whose channels are not q | k | v, heads outside of positions."""
    update, width = core.update, core.scope.sizes[HEAD] * D
    along = (update.key_axis, update.key_axis, update.value_axis)
    for number, (part, name) in enumerate(zip(parts, along, strict=True)):
        head = core.index[1].scaled(D)
        if part.channel != head + axis(name) + constant(number * width):
            raise RefusalError(Reason.CONV_FORM, part.x.node, "channels are not q, k, v in order")


def before_silu(core: Core, part: Term) -> Term:
    """Return the x that a part of the packed row is SiLU of."""
    product = frozenset({(Value(part.node, part.index), 1.0)})
    found = argument_of(core.scope, product, silu)
    if found is None:
        raise RefusalError(Reason.CONV_MISSING, part.node, f"{part.node.name} is no SiLU")
    return found


def order_of(found: Anchor, terms: list[Polynomial]) -> tuple[tuple[int, int, int], int]:
    """Return the order of dimensions (slot, channel, column) of a window, and its columns."""
    states = [f for item in terms for p in item for f, _ in p if isinstance(f, State)]
    fixed = [{i for i in (1, 2) if not s.index[i].axes} for s in states]
    shape = found.pool.meta["val"].shape
    for order in ((0, 1, 2), (0, 2, 1)):
        if (
            states
            and all(order[2] in dims for dims in fixed)
            and 3 <= shape[order[2]] <= TAPS_AT_MOST
        ):
            return order, int(shape[order[2]])
    raise RefusalError(Reason.CONV_FORM, found.pool, "no column of the window is told from others")


def part_of(
    reader: Reader, at: Term, terms: Polynomial, order: tuple[int, int, int], columns: int
) -> Part:
    """Read w0 h0 + w1 h1 + w2 h2 + w3 x [+ bias] of one part."""
    taps: dict[int, Value] = {}
    channels: set[Affine] = set()
    rest: Polynomial = {}
    for factors, coefficient in terms.items():
        if not has_state(factors):
            rest[factors] = coefficient
            continue
        states = [(f, p) for f, p in factors if isinstance(f, State)]
        weights = [(f, p) for f, p in factors if isinstance(f, Value)]
        if coefficient != 1.0 or len(states) != 1 or len(weights) != 1 or len(factors) != 2:
            raise RefusalError(Reason.CONV_FORM, at.node, "a tap is not weight times history")
        index = states[0][0].index
        tap = index[order[2]].constant - (columns - WIDTH + 1)
        if tap in taps or not 0 <= tap < WIDTH - 1 or ROW in weights[0][0].axes:
            raise RefusalError(Reason.CONV_FORM, at.node, f"a tap at column {tap}")
        taps[tap] = weights[0][0]
        channels.add(index[order[1]])
    if len(taps) != WIDTH - 1 or len(channels) != 1:
        raise RefusalError(Reason.CONV_FORM, at.node, f"{len(taps)} taps of history")
    x, last, bias = token_of(reader, at, rest, taps)
    elements = (taps[0], taps[1], taps[2], last)
    (channel,) = channels
    return Part(x, tuple(Term(v.node, v.index) for v in elements), bias, channel)


def token_of(
    reader: Reader, at: Term, rest: Polynomial, taps: dict[int, Value]
) -> tuple[Term, Value, Term | None]:
    """Read w3 x [+ bias]: the weight is the one that the other taps lead to."""
    wanted = next_tap(taps)
    token = next((p for p in rest if (wanted, 1.0) in p), None)
    x = None if token is None else reader.whole.get(token - {(wanted, 1.0)})
    if token is None or x is None or rest.pop(token) != 1.0:
        raise RefusalError(Reason.CONV_FORM, at.node, "the current token's tap")
    if not rest:
        return x, wanted, None
    ((factors, coefficient),) = rest.items() if len(rest) == 1 else ((None, 0.0),)
    bias = None if factors is None else reader.whole.get(factors)
    if bias is None or coefficient != 1.0 or any(ROW in entry.axes for entry in bias.index):
        raise RefusalError(Reason.CONV_FORM, at.node, "more than taps and a bias is added")
    return x, wanted, bias


def next_tap(taps: dict[int, Value]) -> Value:
    """Return the element that follows three taps in the same tensor at the same distance."""
    first, second, third = (taps[i] for i in range(3))
    steps = {
        tuple(b.constant - a.constant for a, b in zip(x.index, y.index, strict=True))
        for x, y in ((first, second), (second, third))
        if x.node is y.node
    }
    if len(steps) != 1 or first.node is not third.node:
        raise RefusalError(Reason.CONV_FORM, first.node, "taps at uneven distances")
    (step,) = steps
    index = tuple(e + constant(s) for e, s in zip(third.index, step, strict=True))
    return Value(third.node, index)


def check_move(core: Core, reader: Reader, windows: Windows, part: Part, columns: int) -> None:
    """Refuse a window that does not move by one column with the token in the last."""
    row, found = core.index[0], windows.whole

    def at(column: int) -> Index:
        return found.from_memory((row, part.channel, constant(column)))

    for column in range(columns):
        piece = windows.piece(core.scope, at(column))
        new, place, mask = unmasked(core.scope, piece.anchor, piece.inside(at(column)))
        if mask != core.mask:
            raise RefusalError(Reason.CONV_SLOTS, found.write, "another mask of padding rows")
        moved = reader.polynomial(new, place)
        if column < columns - 1:
            wanted: Polynomial = {frozenset({(State(at(column + 1)), 1.0)}): 1.0}
        else:
            wanted = reader.polynomial(part.x.node, part.x.index)
        if not equal(moved, wanted):
            raise RefusalError(Reason.CONV_WINDOW, found.write, f"column {column}")

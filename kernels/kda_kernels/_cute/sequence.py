"""The tokens of one sequence and head in shared memory.

Lives here: the memory, and what is made in it before the state goes through the tokens. The blocks
of a cluster may share a head: then one of them makes each of q, k and v for all. Not here: the loop
over the tokens (token_loop.py), the window that they move (rolling_window.py), one token's rows
(token.py), sending (cluster.py), which rows and slots a sequence has (packed_fused_decode/cute.py).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from kda_kernels._cute import cluster, convolution, device, key_rows, makers, rolling_window
from kda_kernels._cute.token import (
    DECAYS,
    GAINS,
    Inputs,
    Tokens,
    form_of,
    make_part,
    put_decays,
    put_everywhere,
    put_gains,
    token_of,
)
from kda_kernels.contract.spec import HEAD_DIM as D

HISTORY = convolution.HISTORY
STEP = 4
"""Tokens that are prepared at once. With three or more the history of the next ones is all in the
packed rows."""
LINE_BYTES = 128
"""Of memory that a prefetch asks for."""
LAST_ROLE = 5
"""Of those that prepare a sequence: betas and slots, behind what prepares a token."""


@dataclass(frozen=True)
class Memory:
    """A block's shared memory: two tokens a sequence and more.

    Attributes:
        tokens: of the sequence.
        length: of the sequence.
        sums: of the warps, for two tokens in turn, in layout kv.
        barriers: what blocks of a cluster send each other is counted there, for each token and
            then for the outputs; None where a block has a head to itself.
    """

    tokens: Tokens
    length: Any
    sums: Any
    barriers: Any


def reserve(smem: SmemAllocator, v: Constexpr) -> Memory:
    """Reserve what a block needs."""
    tokens = Tokens(smem, v.room)
    length = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
    sums = None
    if v.layout == "kv":
        cut = key_rows.cut_of_tokens(v.schedule)
        size = key_rows.size_of_partial_sums(cut)
        both = cute.make_layout((size, 2), stride=(1, size))
        sums = smem.allocate_tensor(Float32, both, byte_alignment=16)
    return Memory(tokens, length, sums, cluster.reserve(smem, v.room + 1) if v.blocks > 1 else None)


def join(memory: Memory, thread: Int32, v: Constexpr) -> None:
    """Tell a cluster's other blocks what they will send; before anything else."""
    if v.blocks > 1:
        # Of a token one block makes each of q, k and v for all.
        each = Int32(makers.PARTS * D * cluster.NUMBER_BYTES)
        cluster.announce(memory.barriers, (each,) * v.room + (None,), thread)


def slot_of_lane(
    i: Inputs, state_indices: cute.Tensor, n: Int32, lane: Int32, first_slot: Int64, v: Constexpr
) -> Int32:
    """Return the slot of the checkpoint of a sequence's token ``lane``, -1 where it has none.

    Lanes beyond the last token get its slot. A live slot is below 2**31: a larger pool would not
    fit any memory.
    """
    t = cutlass.min(lane, Int32(state_indices.shape[1]) - 1)
    at = Int64(n) * state_indices.stride[0] + Int64(t) * state_indices.stride[1]
    slots = Int64(i.state.shape[0])
    slot, kept = device.slot_at(state_indices, at, slots, first_slot, v.wraps)
    return cutlass.select_(kept, Int32(slot), Int32(-1))


def side_by_side(v: Constexpr) -> int:
    """Return how many tokens a warp makes at once.

    With two, the steps of one fill the waits of the other. Where warps make tokens for others, the
    first token is waited for; and neither a block of few registers nor one whose long window is
    written whole has any to spare.
    """
    few = v.schedule.registers < 96 or (v.by_channel and v.room > STEP)
    return 1 if v.schedule.makers or few else 2


@cute.jit
def prepare_part(
    i: Constexpr,
    slot_window: cute.Pointer,
    span: tuple[Int32, Int32, Int32, Int32],
    place: tuple[Int32, Int32],
    part: Int32,
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Make q, k or v of ``STEP`` tokens with one warp, and move their window.

    Tokens past the sequence's end are read as its last row, and not made.

    Args:
        i: the call.
        slot_window: where the sequence's window starts.
        span: the sequence's first row and length, its accepted tokens less one, the first token.
        place: head and lane.
        part: 0 to 2, for q, k and v; one code serves all.
        memory: where the tokens go.
        v: the variant.
    """
    begin, length, accepted, start = span
    head, lane = place
    tokens, blocks = memory.tokens, const_expr(v.blocks)
    form, count = const_expr(form_of(v)), const_expr(convolution.CHANNELS)
    per_part = Int32(i.x.shape[1]) // 3
    channel = head * D + lane * count
    at = part * per_part + channel
    wide = const_expr(HISTORY + STEP)
    columns = cute.make_rmem_tensor(
        cute.make_layout((count, wide), stride=(wide, 1)), i.x.element_type
    )
    for t in cutlass.range_constexpr(STEP):
        row = cutlass.min(begin + start + t, begin + length - 1)
        rolling_window.read_row(i, row, at, columns[None, t + HISTORY], v)
    rolling_window.read_history(i, slot_window, at, begin, start, accepted, columns, v)
    if start == 0:
        makers.tell_window_asked(v)
    taps = convolution.read_taps(i.weight.iterator, part, channel, per_part, form)
    bias = None
    if const_expr(i.conv_bias is not None):
        bias = device.read(i.conv_bias.iterator, Int64(at), count, v.aligned)
    rolling_window.write(i, slot_window, at, (begin, length, start), columns, v)
    together = const_expr(side_by_side(v))
    # One code for all: each turn moves the columns on.
    for t in range(0, cutlass.min(Int32(STEP), length - start), together):
        pair = []
        for n in cutlass.range_constexpr(together):
            history = cute.make_tensor(
                columns.iterator + n, cute.make_layout((count, HISTORY), stride=(wide, 1))
            )
            made = convolution.silu_of_sum(taps, bias, history, columns[None, HISTORY + n])
            make_part(part, made, i.scale)
            pair.append(made)
        for n in cutlass.range_constexpr(together):
            number = start + t + n
            if (n == 0) | (number < length):
                barrier = None if const_expr(blocks == 1) else memory.barriers.iterator + number
                put_everywhere(token_of(tokens, number), part, pair[n], lane, blocks, barrier)
        for c in cutlass.range_constexpr(count):
            for j in cutlass.range_constexpr(wide - together):
                columns[c, j] = columns[c, j + together]


@cute.jit
def prepare(
    i: Constexpr,
    slot_window: cute.Pointer,
    span: tuple[Int32, Int32, Int32, Int32],
    place: tuple[Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Make ``STEP`` tokens in shared memory, as one_token.prepare makes one.

    Args:
        i: the call.
        slot_window: where the sequence's window starts.
        span: as in ``prepare_part``.
        place: head, rank of the block in its cluster, warp and lane.
        memory: where the tokens go.
        v: the variant.
    """
    begin, length, _, start = span
    head, rank, warp, lane = place
    tokens = memory.tokens
    # A part's window belongs to one warp of the cluster, which reads and writes it.
    part = warp - v.schedule.maker(0)
    if (part >= 0) & (part < DECAYS):
        if rank == part % v.blocks:
            prepare_part(i, slot_window, span, (head, lane), part, memory, v)
        elif start == 0:
            makers.tell_window_asked(v)
    # There is room for whole steps: what is made of the last row again is not read.
    if warp == v.schedule.maker(DECAYS):
        numbers = const_expr(range(STEP))
        rows = tuple(begin + cutlass.min(start + t, length - 1) for t in numbers)
        put_decays(tuple(token_of(tokens, start + t) for t in numbers), i, rows, head, lane, v)
    if warp == v.schedule.maker(GAINS):
        # The norm of token t is made in block t % blocks of the cluster.
        numbers = const_expr(range(0, STEP, v.blocks))
        first = (rank - start) & (v.blocks - 1)
        if first < STEP:
            rows = tuple(begin + cutlass.min(start + first + t, length - 1) for t in numbers)
            mine = tuple(token_of(tokens, start + first + t) for t in numbers)
            put_gains(mine, i, rows, head, lane, v)


@cute.jit
def ask_for_later_rows(
    i: Constexpr,
    span: tuple[Int32, Int32, Int32],
    place: tuple[Int32, Int32, Int32, Int32],
    v: Constexpr,
) -> None:
    """Ask for the rows behind the first step, by the warps that will read them."""
    head, rank, warp, lane = place
    part = warp - v.schedule.maker(0)
    if (part >= 0) & (part < DECAYS) & (rank == part % v.blocks):
        at = part * (Int32(i.x.shape[1]) // 3) + head * D
        ask_for_head(i, "x", 0, at, span, lane, v)
    if warp == v.schedule.maker(DECAYS):
        ask_for_head(i, "raw_gate", v.row_axis("raw_gate"), head * D, span, lane, v)
    if warp == v.schedule.maker(GAINS):
        ask_for_head(i, "output_gate", v.row_axis("output_gate"), head * D, span, lane, v)


@cute.jit
def ask_for_head(
    i: Constexpr,
    name: Constexpr,
    axis: Constexpr,
    at: Int32,
    span: tuple[Int32, Int32, Int32],
    lane: Int32,
    v: Constexpr,
) -> None:
    """Ask for the 128 channels from ``at`` on of a sequence's rows behind the first step.

    Args:
        i: the call.
        name: of the tensor.
        axis: of the tensor, which counts rows.
        at: the first channel.
        span: the sequence's first row and length, its accepted tokens less one.
        lane: within the warp.
        v: the variant.
    """
    source, (begin, length, _) = getattr(i, name), span
    lines = const_expr(D * source.element_type.width // 8 // LINE_BYTES)
    channel = at + lane % lines * (D // lines)
    together = const_expr(32 // lines)
    for start in cutlass.range_constexpr(STEP, v.room, together):
        t = start + lane // lines
        if t < length:
            device.prefetch(source.iterator, Int64(begin + t) * source.stride[axis] + channel)


@cute.jit
def prepare_all(
    i: Constexpr,
    slot_window: cute.Pointer,
    span: tuple[Int32, Int32, Int32],
    place: tuple[Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Make all tokens of a sequence in shared memory, ``STEP`` at a time."""
    begin, length, accepted = span
    if const_expr(v.room == STEP):
        prepare(i, slot_window, (begin, length, accepted, Int32(0)), place, memory, v)
    else:
        ask_for_later_rows(i, span, place, v)
        for start in range(0, length, STEP):
            prepare(i, slot_window, (begin, length, accepted, start), place, memory, v)

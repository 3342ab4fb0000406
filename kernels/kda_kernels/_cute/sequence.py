"""The tokens of one sequence and head in shared memory, and the window that they move.

Lives here: the memory, and what is made in it before the state goes through the tokens. The blocks
of a cluster may share a head: then one of them makes each of q, k and v for all. Not here: the loop
over the tokens (token_loop.py), one token's rows (token.py), sending (cluster.py), which rows and
slots a sequence has (packed_fused_decode/cute.py).
"""

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from kda_kernels._cute import cluster, convolution, device, key_rows, makers
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
LAST_ROLE = 5
"""Of those that prepare a sequence: betas and slots, behind what prepares a token."""
STATE_BITS = 32
"""Of an element of the state in registers."""


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
    tokens = Tokens(smem, v.room, by_key=v.layout == "kv")
    length = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
    sums = None
    if v.layout == "kv":
        cut = key_rows.Cut(STATE_BITS, v.schedule.warps, v.schedule.tile)
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


@cute.jit
def read_history(
    i: Constexpr,
    slot_window: cute.Pointer,
    at: Int32,
    begin: Int32,
    start: Int32,
    accepted: Int32,
    columns: cute.Tensor,
    whole: cute.Tensor,
    v: Constexpr,
) -> None:
    """Read the three columns before token ``start`` to the front of ``columns``.

    They are those from ``accepted`` on of the window, and later on rows of x. ``whole`` receives a
    window of layout DS.
    """
    form, channels = const_expr(form_of(v)), Int32(i.x.shape[1])
    if start == 0:
        if const_expr(v.by_channel):
            convolution.read_window(slot_window, at, channels, form, whole)
            for j in cutlass.range_constexpr(HISTORY):
                for c in cutlass.range_constexpr(convolution.CHANNELS):
                    chosen = whole[c, j]
                    for a in cutlass.range_constexpr(1, v.columns - HISTORY + 1):
                        chosen = cutlass.select_(accepted == a, whole[c, j + a], chosen)
                    columns[c, j] = chosen
        else:
            convolution.read_columns(slot_window, at, channels, accepted, form, columns)
    else:
        for j in cutlass.range_constexpr(HISTORY):
            row = begin + start - HISTORY + j
            offset = Int64(row) * i.x.stride[0] + at
            convolution.read_token(i.x.iterator, offset, form, columns[None, j])


@cute.jit
def write_window(
    i: Constexpr,
    slot_window: cute.Pointer,
    at: Int32,
    start: Int32,
    length: Int32,
    columns: cute.Tensor,
    whole: cute.Tensor,
    v: Constexpr,
) -> None:
    """Write tokens to the columns from ``start + 2`` on, and the newest history before token 0.

    ``columns`` has the history and the tokens behind it; those at ``length`` and beyond are none.
    """
    form, channels = const_expr(form_of(v)), Int32(i.x.shape[1])
    newest, count = const_expr(HISTORY - 1), const_expr(convolution.CHANNELS)
    if start == 0:
        if const_expr(v.by_channel):
            for c, j in const_expr(list(itertools.product(range(count), range(newest)))):
                whole[c, j] = columns[c, j + 1]
            most = const_expr(min(STEP, v.columns - newest))
            for c, t in const_expr(list(itertools.product(range(count), range(most)))):
                old, fresh = whole[c, t + newest], columns[c, t + HISTORY]
                whole[c, t + newest] = cutlass.select_(t < length, fresh, old)
            convolution.write_whole(slot_window, at, form, whole)
        else:
            for j in cutlass.range_constexpr(newest):
                convolution.write_column(slot_window, at, channels, j, form, columns[None, j + 1])
    for t in cutlass.range_constexpr(STEP):
        column = start + t + newest
        alone = start + t < length
        if const_expr(v.by_channel):
            alone = alone & (start > 0)
        if alone:
            token = columns[None, t + HISTORY]
            convolution.write_column(slot_window, at, channels, column, form, token)


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
    wide, held = const_expr(HISTORY + STEP), const_expr(max(v.columns, 1))
    columns = cute.make_rmem_tensor(
        cute.make_layout((count, wide), stride=(wide, 1)), i.x.element_type
    )
    whole = cute.make_rmem_tensor(
        cute.make_layout((count, held), stride=(held, 1)), i.x.element_type
    )
    for t in cutlass.range_constexpr(STEP):
        row = cutlass.min(begin + start + t, begin + length - 1)
        offset = Int64(row) * i.x.stride[0] + at
        convolution.read_token(i.x.iterator, offset, form, columns[None, t + HISTORY])
    read_history(i, slot_window, at, begin, start, accepted, columns, whole, v)
    if start == 0:
        makers.tell_window_asked(v)
    taps = convolution.read_taps(i.weight.iterator, part, channel, per_part, form)
    bias = None
    if const_expr(i.conv_bias is not None):
        bias = device.read(i.conv_bias.iterator, Int64(at), count, v.aligned)
    write_window(i, slot_window, at, start, length, columns, whole, v)
    history = cute.make_tensor(
        columns.iterator, cute.make_layout((count, HISTORY), stride=(wide, 1))
    )
    # One token's code for all: each moves the columns on.
    for t in range(cutlass.min(Int32(STEP), length - start)):
        made = convolution.silu_of_sum(taps, bias, history, columns[None, HISTORY])
        make_part(part, made, i.scale)
        barrier = None if const_expr(blocks == 1) else memory.barriers.iterator + (start + t)
        put_everywhere(token_of(tokens, start + t), part, made, lane, blocks, barrier)
        for c in cutlass.range_constexpr(count):
            for j in cutlass.range_constexpr(wide - 1):
                columns[c, j] = columns[c, j + 1]


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
        # A token's norm is made in one block of the cluster.
        numbers = const_expr(range(0, STEP, v.blocks))
        rows = tuple(begin + cutlass.min(start + t + rank, length - 1) for t in numbers)
        mine = tuple(token_of(tokens, start + t + rank) for t in numbers)
        put_gains(mine, i, rows, head, lane, v)


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
        for start in range(0, length, STEP):
            prepare(i, slot_window, (begin, length, accepted, start), place, memory, v)

"""The one token of a row and head in shared memory, made while the state is on its way.

Lives here: the memory, and what is made in it from the slot's window, which moves. Not here: the
pass over the state (one_token_pass.py), a token's rows (token.py), sending (cluster.py), which row
and slot a thread block has (<op>/cute.py).

Who makes the token: either the warps that also hold the state, or, where there are few states and
therefore registers to spare, warps of their own, so that neither waits for the other. Then the
blocks of a cluster may share a head, too: each makes the token for itself, and the first gathers
the output.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from kda_kernels._cute import cluster, convolution, device, key_rows, makers
from kda_kernels._cute.token import (
    DECAYS,
    GAINS,
    Token,
    Tokens,
    form_of,
    make_part,
    put,
    put_decays,
    put_gains,
    put_numbers,
    token_of,
)
from kda_kernels.contract.spec import HEAD_DIM as D

WINDOW_READ, OUTPUT_ARRIVED = 0, 1
"""Barriers of a cluster's first block."""


@dataclass(frozen=True)
class Memory:
    """A block's shared memory.

    Attributes:
        token: the token.
        sums: layout kv: every warp's sums.
        barriers: of a cluster, see above; None where a block has a head to itself.
        read: where the blocks of a cluster say that they have read the window, [3, blocks].
    """

    token: Token
    sums: Any
    barriers: Any
    read: Any


def reserve(smem: SmemAllocator, width: int, v: Constexpr) -> Memory:
    """Reserve what a block needs, for a state of elements of ``width`` bits."""
    token = token_of(Tokens(smem, 1), 0)
    sums = None
    if v.layout == "kv":
        cut = key_rows.cut_of_one_token(width, v.schedule)
        sums = key_rows.partial_sums(smem, cut)
    if v.blocks == 1:
        return Memory(token, sums, None, None)
    barriers = cluster.reserve(smem, 2)
    read = smem.allocate_tensor(
        Float32, cute.make_layout(makers.PARTS * v.blocks), byte_alignment=4
    )
    return Memory(token, sums, barriers, read.iterator)


@cute.jit
def join(memory: Constexpr, rank: Int32, thread: Int32, v: Constexpr) -> None:
    """Tell a cluster's blocks what the first of them will be sent; before anything else."""
    if const_expr(v.blocks > 1):
        first = cutlass.select_(rank == 0, Int32(cluster.NUMBER_BYTES), Int32(0))
        cluster.announce(memory.barriers, (first * (makers.PARTS * v.blocks), first * D), thread)


@cute.jit
def prepare_part(
    i: Constexpr,
    slot_window: cute.Pointer,
    part: Int32,
    place: tuple[Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Make q, k or v of a token with the lanes of one warp, and move their window.

    A lane that has read its part of the window is the only one of its block to do so, and writes it
    back moved by a column. In a cluster the first block does, once all have read it.

    Args:
        i: the call.
        slot_window: where the slot's window starts.
        part: 0 to 2, for q, k and v; one code serves all.
        place: row, head, rank of the block in its cluster, and lane.
        memory: the block's.
        v: the variant.
    """
    row, head, rank, lane = place
    form, count = const_expr(form_of(v)), const_expr(convolution.CHANNELS)
    channels = Int32(i.x.shape[1])
    channel = head * D + lane * count
    at = part * (channels // 3) + channel
    window = convolution.empty_window(form, i.x.element_type)
    fresh = cute.make_rmem_tensor((count,), i.x.element_type)
    convolution.read_window(slot_window, at, channels, form, window)
    taps = convolution.read_taps(i.weight.iterator, part, channel, channels // 3, form)
    makers.tell_window_asked(v)
    convolution.read_token(i.x.iterator, Int64(row) * i.x.stride[0] + at, form, fresh)
    bias = None
    if const_expr(i.conv_bias is not None):
        bias = device.read(i.conv_bias.iterator, Int64(at), count, v.aligned)
    history = cute.make_tensor(
        window.iterator + (v.columns - convolution.HISTORY),
        cute.make_layout((count, convolution.HISTORY), stride=(v.columns, 1)),
    )
    made = convolution.silu_of_sum(taps, bias, history, fresh)
    moved = (slot_window, at, channels, form, window, fresh)
    if const_expr(not v.schedule.makers):
        convolution.write_window(*moved)
    make_part(part, made, i.scale)
    put(memory.token.row_of_part(part), made, lane)
    makers.tell(makers.TOKENS_MADE, makers.everyone(v), v)
    if const_expr(v.blocks > 1):
        say_read(memory, made, (part, rank, lane), v)
        if rank == 0:
            cluster.wait(memory.barriers, WINDOW_READ)
            convolution.write_window(*moved)
    elif const_expr(v.schedule.makers):
        convolution.write_window(*moved)


@cute.jit
def prepare(
    i: Constexpr,
    slot: Int64,
    place: tuple[Int32, Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Make a token in shared memory, each of its rows with the lanes of one warp.

    Its rows are q and k, as unit vectors, v, the decay, and the gain behind the norm.
    """
    row, head, rank, warp, lane = place
    token, part = memory.token, warp - v.schedule.maker(0)
    if (part >= 0) & (part < DECAYS):
        prepare_part(i, i.window(slot), part, (row, head, rank, lane), memory, v)
    if warp == v.schedule.maker(DECAYS):
        if lane == 0:
            put_numbers(token, i, row, head, v)
        put_decays((token,), i, (row,), head, lane, v)
        makers.tell(makers.TOKENS_MADE, makers.everyone(v), v)
    if warp == v.schedule.maker(GAINS):
        put_gains((token,), i, (row,), head, lane, v)


@cute.jit
def say_read(
    memory: Constexpr, made: cute.Tensor, place: tuple[Int32, Int32, Int32], v: Constexpr
) -> None:
    """Tell a cluster's first block that a warp has read its part of the window.

    What is sent is made of all that was read, so it cannot come before.
    """
    part, rank, lane = place
    used = device.lane_sum(device.sum_of_squares(made), 32)
    if lane == 0:
        there = memory.read + (part * v.blocks + rank)
        cluster.send(there, memory.barriers.iterator + WINDOW_READ, Int32(0), (used,))

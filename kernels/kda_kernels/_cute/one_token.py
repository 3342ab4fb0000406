"""One token of one row and head, from window to output: what the kernels for one token share.

Lives here: the token made in shared memory while the state is on its way, the pass over the state
in either layout, the norm by one warp at the end. Not here: which row, slot and output a thread
block has (<op>/cute.py), the passes in their parts (value_rows.py, key_rows.py).

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

from kda_kernels._cute import cluster, convolution, device, key_rows, value_rows
from kda_kernels._cute.token import (
    DECAY,
    DECAYS,
    GAINS,
    MADE,
    Inputs,
    K,
    Q,
    Token,
    Tokens,
    V,
    dot_of_units,
    finish,
    form_of,
    make_part,
    put,
    put_decays,
    put_gains,
    put_numbers,
    token_of,
)
from kda_kernels.contract.spec import HEAD_DIM as D
from kda_kernels.schedule import MAKERS

TOKEN_MADE, SUMS_MADE, OUTPUT_MADE, WINDOW_ASKED = 1, 2, 3, 4
"""Barriers of a block whose token is made by warps of their own."""
WINDOW_READ, OUTPUT_ARRIVED = 0, 1
"""Barriers of a cluster's first block."""
NUMBER_BYTES = 4


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
    token = token_of(Tokens(smem, 1, by_key=v.layout == "kv"), 0)
    sums = None
    if v.layout == "kv":
        cut = key_rows.Cut(width, v.schedule.warps, v.schedule.tile)
        sums = key_rows.partial_sums(smem, cut)
    if v.blocks == 1:
        return Memory(token, sums, None, None)
    barriers = cluster.reserve(smem, 2)
    read = smem.allocate_tensor(Float32, cute.make_layout(3 * v.blocks), byte_alignment=4)
    return Memory(token, sums, barriers, read.iterator)


@cute.jit
def join(memory: Constexpr, rank: Int32, thread: Int32, v: Constexpr) -> None:
    """Tell a cluster's blocks what the first of them will be sent; before anything else."""
    if const_expr(v.blocks > 1):
        first = cutlass.select_(rank == 0, Int32(NUMBER_BYTES), Int32(0))
        cluster.announce(memory.barriers, (first * (3 * v.blocks), first * D), thread)


def told(barrier: int, warps: int, v: Constexpr) -> None:
    """Tell whoever waits at a barrier that this warp's part is done, where makers are apart."""
    if v.schedule.makers:
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=32 * warps)


def wait(barrier: int, warps: int, v: Constexpr) -> None:
    """Wait at a barrier of so many warps; where nobody makes the token alone, for all."""
    if v.schedule.makers:
        cute.arch.barrier(barrier_id=barrier, number_of_threads=32 * warps)
    else:
        cute.arch.sync_threads()


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
    window = cute.make_rmem_tensor(
        cute.make_layout((count, v.columns), stride=(v.columns, 1)), i.x.element_type
    )
    fresh = cute.make_rmem_tensor((count,), i.x.element_type)
    convolution.read_window(slot_window, at, channels, form, window)
    taps = convolution.read_taps(i.weight.iterator, part, channel, channels // 3, form)
    # Before the last of the reads, which keeps it in its place.
    told(WINDOW_ASKED, v.schedule.warps + 3, v)
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
    told(TOKEN_MADE, v.schedule.warps + MAKERS, v)
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
        told(TOKEN_MADE, v.schedule.warps + MAKERS, v)
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
    cute.arch.cluster_wait()
    if lane == 0:
        there = memory.read + (part * v.blocks + rank)
        cluster.send(there, memory.barriers.iterator + WINDOW_READ, Int32(0), (used,))


@cute.jit
def gather(memory: Constexpr, at: Int32, o: Float32, v: Constexpr) -> None:
    """Hand a number of the output to who norms it."""
    if const_expr(v.blocks > 1):
        barrier = memory.barriers.iterator + OUTPUT_ARRIVED
        cluster.send(memory.token.rows[MADE].iterator + at, barrier, Int32(0), (o,))
    else:
        made = memory.token.rows[MADE]
        made[at] = o


@cute.jit
def advance(
    i: Constexpr,
    slot: Int64,
    place: tuple[Int32, Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Take a row's head through its token.

    Args:
        i: the call.
        slot: of its state.
        place: row, head, rank of the block in its cluster, warp and lane.
        memory: the block's.
        v: the variant.
    """
    one_pass = const_expr(advance_key_rows if v.layout == "kv" else advance_value_rows)
    _, head, rank, warp, lane = place
    if const_expr(v.schedule.makers):
        if warp < v.schedule.warps:
            one_pass(i, slot, place, memory, v)
        else:
            prepare(i, slot, place, memory, v)
            if (warp == v.schedule.maker(GAINS)) & (rank == 0):
                if const_expr(v.blocks > 1):
                    cluster.wait(memory.barriers, OUTPUT_ARRIVED)
                else:
                    wait(OUTPUT_MADE, writers_of_output(v) + 1, v)
                cute.arch.sync_warp()
                finish(memory.token, i, head, lane)
    else:
        one_pass(i, slot, place, memory, v)
        # Found out again: nothing has to keep it all the while.
        thread = device.register("tid.x")
        if thread // 32 == writers_of_output(v) - 1:
            finish(memory.token, i, device.register("ctaid.x"), thread % 32)


def writers_of_output(v: Constexpr) -> int:
    """Return how many warps make a block's part of the output."""
    return 1 if v.layout == "kv" else v.schedule.warps


@cute.jit
def advance_value_rows(
    i: Constexpr,
    slot: Int64,
    place: tuple[Int32, Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Layout vk: a warp owns value rows whole and finishes them in batches."""
    _, head, rank, warp, lane = place
    token = memory.token
    tile, batch = const_expr(v.schedule.tile), const_expr(v.schedule.batch or v.schedule.tile)
    whole = const_expr(value_rows.Cut(i.state.element_type.width, tile))
    cut = const_expr(value_rows.Cut(i.state.element_type.width, batch))
    group, key = lane // cut.lanes, lane % cut.lanes
    S = value_rows.view(i.state_of(slot, head), cut)
    first = (rank * v.schedule.warps + warp) * tile
    if const_expr(v.schedule.token_first):
        prepare(i, slot, place, memory, v)
    if const_expr(v.blocks > 1):
        cute.arch.cluster_wait()
    if const_expr(v.schedule.makers):
        wait(WINDOW_ASKED, v.schedule.warps + 3, v)
    rows_of_state = value_rows.load(S, first + group, key, whole)
    device.let_the_next_kernel_start(v.overlaps)
    if const_expr(not v.schedule.token_first and not v.schedule.makers):
        prepare(i, slot, place, memory, v)
    wait(TOKEN_MADE, v.schedule.warps + MAKERS, v)
    d, k, q = (value_rows.of_lane(token.rows[r], key, cut) for r in (DECAY, K, Q))
    kq, b = dot_of_units(token, lane), token.beta[0]
    for n in cutlass.range_constexpr(tile // batch):
        start = first + n * batch
        mine = start + cut.finished(key, group)
        part = cute.make_tensor(
            rows_of_state.iterator + n * cut.held * cut.vector,
            cute.make_layout((cut.vector, cut.held)),
        )
        sk, sq = value_rows.sums(part, d, k, q, key, cut)
        bu = cute.make_rmem_tensor((cut.kept,), Float32)
        for j in cutlass.range_constexpr(cut.kept):
            at = mine + j * cut.together
            bu[j] = b * (token.rows[V][at] - sk[j])
            if cut.finishes(key):
                gather(memory, at, Float32(i.x.element_type(sq[j] + bu[j] * kq)), v)
        if const_expr(n == tile // batch - 1):
            told(OUTPUT_MADE, v.schedule.warps + 1, v)
        value_rows.update(part, d, k, bu, group, cut)
        value_rows.store(part, S, start + group, key, cut)
    if const_expr(not v.schedule.makers):
        cute.arch.sync_threads()


@cute.jit
def advance_key_rows(
    i: Constexpr,
    slot: Int64,
    place: tuple[Int32, Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Layout kv: a warp owns key rows, and all warps finish the sums of all value columns."""
    _, head, rank, warp, lane = place
    cut = const_expr(key_rows.Cut(i.state.element_type.width, v.schedule.warps, v.schedule.tile))
    vector = const_expr(cut.vector)
    group, column = lane // cut.lanes, lane % cut.lanes
    token, partial = memory.token, memory.sums
    factors = cute.make_tensor(token.base, cute.make_layout((4, D)))
    S = key_rows.view(i.state_of(slot, head), cut)
    first, own = warp * cut.keys + group, rank * cut.lanes + column
    if const_expr(v.schedule.token_first):
        prepare(i, slot, place, memory, v)
    if const_expr(v.blocks > 1):
        cute.arch.cluster_wait()
    if const_expr(v.schedule.makers):
        wait(WINDOW_ASKED, v.schedule.warps + 3, v)
    tile = key_rows.load(S, first, own, cut)
    device.let_the_next_kernel_start(v.overlaps)
    if const_expr(not v.schedule.token_first and not v.schedule.makers):
        prepare(i, slot, place, memory, v)
    wait(TOKEN_MADE, v.schedule.warps + MAKERS, v)
    key_rows.put_sums(tile, factors, first, (lane, group, column, warp), partial, cut)
    wait(SUMS_MADE, v.schedule.warps, v)
    sk = key_rows.get_sums(partial, 0, column, cut)
    bu = cute.make_rmem_tensor((vector,), Float32)
    b = token.beta[0]
    for j in cutlass.range_constexpr(vector):
        bu[j] = b * (token.rows[V][own * vector + j] - sk[j])
    if warp == 0:
        kq = dot_of_units(token, lane)
        sq = key_rows.get_sums(partial, 1, column, cut)
        if group == 0:
            for j in cutlass.range_constexpr(vector):
                o = Float32(i.x.element_type(sq[j] + bu[j] * kq))
                gather(memory, own * vector + j, o, v)
        cute.arch.sync_warp()
        told(OUTPUT_MADE, 2, v)
    key_rows.update(tile, factors, first, bu, cut)
    key_rows.store(tile, S, first, own, cut)

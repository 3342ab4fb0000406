"""One token of one row and head, from window to output: what the kernels for one token share.

Lives here: the token made in shared memory while the state is on its way, the pass over the state
in either layout, the norm by one warp at the end. Not here: which row, slot and output a thread
block has (<op>/cute.py), the passes in their parts (value_rows.py, key_rows.py).
"""

from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from kda_kernels._cute import convolution, device, key_rows, value_rows
from kda_kernels._cute.token import (
    DECAY,
    MADE,
    ROWS_OF_PARTS,
    K,
    Q,
    Tokens,
    V,
    dot_of_units,
    finish,
    form_of,
    make_unit,
    put,
    put_decays,
    put_gains,
    put_numbers,
    token_of,
)
from kda_kernels.contract.spec import HEAD_DIM as D


@cute.jit
def prepare(
    i: Constexpr,
    slot_window: cute.Pointer,
    place: tuple[Int32, Int32, Int32, Int32],
    token: Constexpr,
    v: Constexpr,
) -> None:
    """Make a token in shared memory, each of its rows with the lanes of one warp.

    Its rows are q and k, as unit vectors, v, the decay, and the gain behind the norm. A lane that
    has read its part of the window is the only one to do so, and writes it back moved by a column.
    """
    row, head, warp, lane = place
    form, count = const_expr(form_of(v)), const_expr(convolution.CHANNELS)
    per_part = Int32(i.x.shape[1]) // 3
    channel = head * D + lane * count
    for part in cutlass.range_constexpr(3):
        if warp == part % v.schedule.warps:
            at = part * per_part + channel
            window = cute.make_rmem_tensor(
                cute.make_layout((count, v.columns), stride=(v.columns, 1)), i.x.element_type
            )
            fresh = cute.make_rmem_tensor((count,), i.x.element_type)
            convolution.read_window(slot_window, at, 3 * per_part, form, window)
            convolution.read_token(i.x.iterator, Int64(row) * i.x.stride[0] + at, form, fresh)
            taps = convolution.read_taps(i.weight.iterator, part, channel, per_part, form)
            bias = None
            if const_expr(i.conv_bias is not None):
                bias = device.read(i.conv_bias.iterator, Int64(at), count, v.aligned)
            history = cute.make_tensor(
                window.iterator + (v.columns - convolution.HISTORY),
                cute.make_layout((count, convolution.HISTORY), stride=(v.columns, 1)),
            )
            made = convolution.silu_of_sum(taps, bias, history, fresh)
            convolution.write_window(slot_window, at, 3 * per_part, form, window, fresh)
            if const_expr(part < 2):
                make_unit(made, i.scale if part == 0 else None)
            put(token.rows[ROWS_OF_PARTS[part]], made, lane)
    if warp == 3 % v.schedule.warps:
        put_decays((token,), i, (row,), head, lane, v)
    if warp == 4 % v.schedule.warps:
        put_gains((token,), i, (row,), head, lane, v)
        if lane == 0:
            put_numbers(token, i, row, head, v)


@cute.jit
def advance_value_rows(
    i: Constexpr,
    slot: Int64,
    place: tuple[Int32, Int32, Int32, Int32],
    token: Constexpr,
    v: Constexpr,
) -> None:
    """Layout vk: a warp owns value rows whole and finishes them in batches."""
    _, head, warp, lane = place
    tile, batch = const_expr(v.schedule.tile), const_expr(v.schedule.batch or v.schedule.tile)
    whole = const_expr(value_rows.Cut(i.state.element_type.width, tile))
    cut = const_expr(value_rows.Cut(i.state.element_type.width, batch))
    group, key = lane // cut.lanes, lane % cut.lanes
    ingredients = (i, i.window(slot), place, token, v)
    S = value_rows.view(i.state_of(slot, head), cut)
    first = warp * tile
    if const_expr(v.schedule.token_first):
        prepare(*ingredients)
    rows_of_state = value_rows.load(S, first + group, key, whole)
    device.let_the_next_kernel_start(v.overlaps)
    if const_expr(not v.schedule.token_first):
        prepare(*ingredients)
    cute.arch.sync_threads()
    d, k, q = (value_rows.of_lane(token.rows[r], key, cut) for r in (DECAY, K, Q))
    kq, made = dot_of_units(token, lane), token.rows[MADE]
    b = token.beta[0]
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
                made[at] = Float32(i.x.element_type(sq[j] + bu[j] * kq))
        value_rows.update(part, d, k, bu, group, cut)
        value_rows.store(part, S, start + group, key, cut)
    cute.arch.sync_threads()
    # Found out again: nothing has to keep it all the while.
    thread = device.register("tid.x")
    if thread // 32 == v.schedule.warps - 1:
        finish(token, i, device.register("ctaid.x"), thread % 32)


@cute.jit
def advance_key_rows(
    i: Constexpr,
    slot: Int64,
    place: tuple[Int32, Int32, Int32, Int32],
    smem: Constexpr,
    v: Constexpr,
) -> None:
    """Layout kv: a warp owns key rows, and all warps finish the sums of all value columns."""
    _, head, warp, lane = place
    cut = const_expr(key_rows.Cut(i.state.element_type.width, v.schedule.warps, v.schedule.tile))
    vector = const_expr(cut.vector)
    group, column = lane // cut.lanes, lane % cut.lanes
    token, partial = smem
    factors = cute.make_tensor(token.base, cute.make_layout((4, D)))
    ingredients = (i, i.window(slot), place, token, v)
    S = key_rows.view(i.state_of(slot, head), cut)
    first = warp * cut.keys + group
    if const_expr(v.schedule.token_first):
        prepare(*ingredients)
    tile = key_rows.load(S, first, column, cut)
    device.let_the_next_kernel_start(v.overlaps)
    if const_expr(not v.schedule.token_first):
        prepare(*ingredients)
    cute.arch.sync_threads()
    key_rows.put_sums(tile, factors, first, (lane, group, column, warp), partial, cut)
    cute.arch.sync_threads()
    sk = key_rows.get_sums(partial, 0, column, cut)
    bu = cute.make_rmem_tensor((vector,), Float32)
    b = token.beta[0]
    for j in cutlass.range_constexpr(vector):
        bu[j] = b * (token.rows[V][column * vector + j] - sk[j])
    if warp == 0:
        kq, made = dot_of_units(token, lane), token.rows[MADE]
        sq = key_rows.get_sums(partial, 1, column, cut)
        if group == 0:
            for j in cutlass.range_constexpr(vector):
                made[column * vector + j] = Float32(i.x.element_type(sq[j] + bu[j] * kq))
        cute.arch.sync_warp()
    key_rows.update(tile, factors, first, bu, cut)
    key_rows.store(tile, S, first, column, cut)
    thread = device.register("tid.x")
    if thread < 32:
        finish(token, i, device.register("ctaid.x"), thread)


def value_rows_memory(smem: SmemAllocator) -> Any:  # noqa: ANN401 - a layout's own
    """Reserve what ``advance_value_rows`` takes."""
    return token_of(Tokens(smem, 1, by_key=False), 0)


def key_rows_memory(smem: SmemAllocator, width: int, v: Constexpr) -> Any:  # noqa: ANN401
    """Reserve what ``advance_key_rows`` takes, for a state of elements of ``width`` bits."""
    token = token_of(Tokens(smem, 1, by_key=True), 0)
    cut = key_rows.Cut(width, v.schedule.warps, v.schedule.tile)
    return token, key_rows.partial_sums(smem, cut)

"""One token of one row and head: the pass over the state in either layout, and the norm behind it.

Lives here: what a thread block does with the token that it makes, or that warps of its own make.
Not here: the making (one_token.py), which row, slot and output a block has (<op>/cute.py), the
passes in their parts (value_rows.py, key_rows.py).
"""

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute

from kda_kernels._cute import cluster, device, key_rows, makers, value_rows
from kda_kernels._cute.one_token import OUTPUT_ARRIVED, prepare
from kda_kernels._cute.token import DECAY, GAINS, MADE, K, Q, V, dot_of_units, finish


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
    if const_expr(v.blocks > 1):
        cute.arch.cluster_wait()
    if const_expr(v.schedule.makers):
        if warp < v.schedule.warps:
            one_pass(i, slot, place, memory, v)
        else:
            prepare(i, slot, place, memory, v)
    else:
        one_pass(i, slot, place, memory, v)
    if const_expr(v.blocks > 1):
        if (warp == v.schedule.maker(GAINS)) & (rank == 0):
            cluster.wait(memory.barriers, OUTPUT_ARRIVED)
            cute.arch.sync_warp()
            finish(memory.token, i, head, lane)
    else:
        if const_expr(v.schedule.makers or v.layout == "vk"):
            # Other warps than the one that norms made the output or the gains.
            cute.arch.sync_threads()
        # Found out again: nothing has to keep it all the while.
        thread = device.register("tid.x")
        if thread // 32 == (0 if v.layout == "kv" else v.schedule.warps - 1):
            finish(memory.token, i, device.register("ctaid.x"), thread % 32)


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
    makers.wait_for_window_asked(v)
    rows_of_state = value_rows.load(S, first + group, key, whole)
    device.let_the_next_kernel_start(v.overlaps)
    if const_expr(not v.schedule.token_first and not v.schedule.makers):
        prepare(i, slot, place, memory, v)
    makers.wait(makers.TOKENS_MADE, makers.everyone(v), v)
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
        value_rows.update(part, d, k, bu, group, cut)
        value_rows.store(part, S, start + group, key, cut)


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
    cut = const_expr(key_rows.cut_of_one_token(i.state.element_type.width, v.schedule))
    vector = const_expr(cut.vector)
    group, column = cut.place(lane)
    token, partial = memory.token, memory.sums
    factors = token.base
    first, at = cut.first(warp, group), rank * cut.lanes + column
    own = key_rows.start(i.state_of(slot, head), first, at, cut)
    if const_expr(v.schedule.token_first):
        prepare(i, slot, place, memory, v)
    makers.wait_for_window_asked(v)
    tile = key_rows.load(own, cut)
    device.let_the_next_kernel_start(v.overlaps)
    if const_expr(not v.schedule.token_first and not v.schedule.makers):
        prepare(i, slot, place, memory, v)
    makers.wait(makers.TOKENS_MADE, makers.everyone(v), v)
    key_rows.put_sums(tile, factors, first, (lane, group, column, warp), partial, cut)
    makers.wait(makers.SUMS_MADE, v.schedule.warps, v)
    sk = key_rows.get_sums(partial, 0, column, cut)
    bu = cute.make_rmem_tensor((vector,), Float32)
    b = token.beta[0]
    for j in cutlass.range_constexpr(vector):
        bu[j] = b * (token.rows[V][at * vector + j] - sk[j])
    if warp == 0:
        kq = dot_of_units(token, lane)
        sq = key_rows.get_sums(partial, 1, column, cut)
        if group == 0:
            for j in cutlass.range_constexpr(vector):
                o = Float32(i.x.element_type(sq[j] + bu[j] * kq))
                gather(memory, at * vector + j, o, v)
        cute.arch.sync_warp()
    key_rows.update(tile, factors, first, bu, cut)
    key_rows.store(tile, own, cut)

"""A state going through the tokens of one sequence and head, with a checkpoint for each.

Lives here: the loop over tokens in either layout, and the norms behind it. The state is read once,
stays in registers as float32, and is rounded only into checkpoints. Where the blocks of a cluster
share a head, each has value rows (or columns) of its state, and a token's output is gathered where
its norm is made. Not here: what the loop finds in shared memory (sequence.py), the passes in their
parts (value_rows.py, key_rows.py).
"""

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute

from kda_kernels._cute import cluster, device, key_rows, makers, value_rows
from kda_kernels._cute.sequence import (
    LAST_ROLE,
    Memory,
    prepare_all,
)
from kda_kernels._cute.token import (
    DECAY,
    DECAYS,
    GAINS,
    MADE,
    Inputs,
    K,
    Q,
    Token,
    V,
    dot_of_units,
    finish,
    put_numbers,
    token_of,
)
from kda_kernels.contract.spec import HEAD_DIM as D


@cute.jit
def make_ready(
    i: Constexpr,
    span: tuple[Int32, Int32, Int32],
    where: tuple[Int64, Int64, Int32],
    place: tuple[Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Make what the loop reads."""
    begin, length, _ = span
    home, _, own = where
    head, _, warp, lane = place
    kept, tokens = memory.length, memory.tokens
    prepare_all(i, i.window(home), span, place, memory, v)
    if warp == v.schedule.maker(LAST_ROLE):
        if lane < length:
            token = token_of(tokens, lane)
            put_numbers(token, i, begin + lane, head, v)
            slot = token.slot
            slot[0] = own
        if lane == 0:
            kept[0] = length
    if const_expr(v.schedule.makers):
        part = warp - v.schedule.maker(0)
        if (part >= first_to_tell(v)) & (part != GAINS):
            makers.tell(makers.TOKENS_MADE, v.schedule.warps + tellers(v), v)


def first_to_tell(v: Constexpr) -> int:
    """Return from which maker on those tell when they are done: q, k and v are also counted."""
    return 0 if v.blocks == 1 else DECAYS


def tellers(v: Constexpr) -> int:
    """Return how many makers tell; for the gains nobody waits."""
    return LAST_ROLE - first_to_tell(v)


@cute.jit
def advance(
    i: Constexpr,
    span: tuple[Int32, Int32, Int32],
    where: tuple[Int64, Int64, Int32],
    place: tuple[Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Take a sequence's head through its tokens.

    Args:
        i: the call.
        span: the sequence's first row and length, its accepted tokens less one.
        where: slots of its window and of the state that it reads, and the lane's own checkpoint.
        place: head, rank of the block in its cluster, warp and lane.
        memory: the block's.
        v: the variant.
    """
    one_pass = const_expr(advance_key_rows if v.layout == "kv" else advance_value_rows)
    _, length, _ = span
    _, rank, warp, lane = place
    blocks = const_expr(v.blocks)
    if const_expr(blocks > 1):
        mine = (length + (blocks - 1) - rank) // blocks
        count = mine * D * cluster.NUMBER_BYTES
        cluster.expect(memory.barriers, v.room, count, warp * 32 + lane)
        cute.arch.cluster_wait()
    if const_expr(v.schedule.makers):
        if warp < v.schedule.warps:
            one_pass(i, span, where, place, memory, v)
        else:
            make_ready(i, span, where, place, memory, v)
    else:
        one_pass(i, span, where, place, memory, v)
    cute.arch.sync_threads()
    if const_expr(blocks > 1):
        cluster.wait(memory.barriers, v.room)
    write_outputs(i, memory, v)


@cute.jit
def write_outputs(i: Constexpr, memory: Constexpr, v: Constexpr) -> None:
    """Write the gated norms of the tokens whose outputs the block has gathered, one to a warp.

    Where it is and how many there are is found out again: registers for it are too few in the loop.
    """
    tokens = memory.tokens
    blocks = const_expr(v.blocks)
    length = memory.length[0]
    block, thread = device.register("ctaid.x"), device.register("tid.x")
    head, rank, warp, lane = block // blocks, block % blocks, thread // 32, thread % 32
    for t in range(rank + blocks * warp, length, blocks * makers.everyone(v)):
        token = token_of(tokens, t)
        if token.slot[0] >= 0:
            finish(token, i, head, lane)
        else:
            target = i.target(token.place[0], head)
            for c in cutlass.range_constexpr(D // 32):
                target[lane + 32 * c] = target.element_type(0.0)


def gather(memory: Memory, token: Token, at: Int32, t: Int32, o: Float32, v: Constexpr) -> None:
    """Hand a number of a token's output to the block that makes its norm."""
    place = token.rows[MADE].iterator + at
    if v.blocks == 1:
        cute.make_tensor(place, cute.make_layout(1))[0] = o
    else:
        cluster.send(place, memory.barriers.iterator + v.room, t % v.blocks, (o,))


def checkpoint(i: Inputs, slot: Int64, own: Int32, vector: int) -> cute.Pointer:
    """Return where a lane's part of a slot's state starts, ``own`` elements into the slot.

    It is written in vectors of ``vector`` elements.
    """
    alignment = vector * i.state.element_type.width // 8
    at = slot * i.state.stride[0] + own
    return device.opaque(device.pointer(i.state.iterator, at, alignment), alignment)


@cute.jit
def advance_value_rows(
    i: Constexpr,
    span: tuple[Int32, Int32, Int32],
    where: tuple[Int64, Int64, Int32],
    place: tuple[Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Layout vk: a warp owns value rows whole, so tokens follow each other without a barrier."""
    _, length, _ = span
    _, source, _ = where
    head, rank, warp, lane = place
    tokens = memory.tokens
    tile, batch = const_expr(v.schedule.tile), const_expr(v.schedule.batch or v.schedule.tile)
    whole = const_expr(value_rows.Cut(Float32.width, tile))
    cut = const_expr(value_rows.Cut(Float32.width, batch))
    group, key = lane // cut.lanes, lane % cut.lanes
    first = (rank * v.schedule.warps + warp) * tile
    S = value_rows.view(i.state_of(source, head), cut)
    if const_expr(v.schedule.token_first):
        make_ready(i, span, where, place, memory, v)
    makers.wait_for_window_asked(v)
    raw = value_rows.load(S, first + group, key, whole)
    if const_expr(not v.schedule.token_first and not v.schedule.makers):
        make_ready(i, span, where, place, memory, v)
    device.let_the_next_kernel_start(v.overlaps)
    makers.wait(makers.TOKENS_MADE, v.schedule.warps + tellers(v), v)
    state = device.unpacked(raw)
    own = head * (D * D) + (first + group) * D + key * cut.vector
    for t in range(length):
        if const_expr(v.blocks > 1):
            cluster.wait(memory.barriers, t)
        token = token_of(tokens, t)
        slot = Int64(token.slot[0])
        d, k, q = (value_rows.of_lane(token.rows[r], key, cut) for r in (DECAY, K, Q))
        kq, b, values = dot_of_units(token, lane), token.beta[0], token.rows[V]
        target = value_rows.view(checkpoint(i, slot, own, cut.vector), cut)
        for m in cutlass.range_constexpr(tile // batch):
            held = const_expr(cut.held * cut.vector)
            rows = cute.make_tensor(
                state.iterator + m * held, cute.make_layout((cut.vector, cut.held))
            )
            mine = first + m * batch + cut.finished(key, group)
            sk, sq = value_rows.sums(rows, d, k, q, key, cut, keep=True)
            bu = cute.make_rmem_tensor((cut.kept,), Float32)
            for j in cutlass.range_constexpr(cut.kept):
                at = mine + j * cut.together
                bu[j] = b * (values[at] - sk[j])
                if cut.finishes(key):
                    o = Float32(i.x.element_type(sq[j] + bu[j] * kq))
                    gather(memory, token, at, t, o, v)
            value_rows.update(rows, None, k, bu, group, cut)
            if slot >= 0:
                value_rows.store(rows, target, Int32(m * batch), Int32(0), cut)


@cute.jit
def advance_key_rows(
    i: Constexpr,
    span: tuple[Int32, Int32, Int32],
    where: tuple[Int64, Int64, Int32],
    place: tuple[Int32, Int32, Int32, Int32],
    memory: Constexpr,
    v: Constexpr,
) -> None:
    """Layout kv: a warp owns key rows; sums of two tokens in turn have their own memory."""
    _, source, _ = where
    head, rank, warp, lane = place
    tokens = memory.tokens
    cut = const_expr(key_rows.cut_of_tokens(v.schedule))
    vector = const_expr(cut.vector)
    group, column = cut.place(lane)
    first, columns = cut.first(warp, group), rank * v.schedule.tile
    S = key_rows.start(i.state_of(source, head), first, rank * cut.lanes + column, cut)
    if const_expr(v.schedule.token_first):
        make_ready(i, span, where, place, memory, v)
    makers.wait_for_window_asked(v)
    raw = key_rows.load(S, cut)
    if const_expr(not v.schedule.token_first and not v.schedule.makers):
        make_ready(i, span, where, place, memory, v)
    device.let_the_next_kernel_start(v.overlaps)
    makers.wait(makers.TOKENS_MADE, v.schedule.warps + tellers(v), v)
    state = device.unpacked(raw)
    own = head * (D * D) + first * D + columns + column * vector
    t = Int32(0)
    # Read again for every token: registers for it are too few.
    while t < memory.length[0]:
        if const_expr(v.blocks > 1):
            cluster.wait(memory.barriers, t)
        token = token_of(tokens, t)
        partial = memory.sums[None, t % 2].iterator
        key_rows.put_sums(
            state, token.base, first, (lane, group, column, warp), partial, cut, keep=True
        )
        makers.wait(makers.SUMS_MADE, v.schedule.warps, v)
        sk = key_rows.get_sums(partial, 0, column, cut)
        bu = cute.make_rmem_tensor((vector,), Float32)
        b = token.beta[0]
        values = token.rows[V]
        for j in cutlass.range_constexpr(vector):
            bu[j] = b * (values[columns + column * vector + j] - sk[j])
        if warp == t % v.schedule.warps:
            kq = dot_of_units(token, lane)
            sq = key_rows.get_sums(partial, 1, column, cut)
            if group == 0:
                for j in cutlass.range_constexpr(vector):
                    o = Float32(i.x.element_type(sq[j] + bu[j] * kq))
                    gather(memory, token, columns + column * vector + j, t, o, v)
        key_rows.update(state, token.base, first, bu, cut, decayed=True)
        slot = Int64(token.slot[0])
        if slot >= 0:
            key_rows.store(state, checkpoint(i, slot, own, cut.vector), cut)
        t += 1

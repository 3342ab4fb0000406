"""fused_decode in CuTe DSL: convolution, gates, one pass over the state, gated RMSNorm.

Lives here: the kernels and how a variant is traced for the compiler. A thread block, or a cluster
of them, owns one row's head. While its lanes read the state, its first four warps make q, k, v and
the decay in shared memory; the norm gathers the squares of the whole head at the end.
Not here: the passes over the state (_cute/value_rows.py, _cute/key_rows.py), the convolution
(_cute/convolution.py), which variant a call needs (launch.py), how work is cut (config.py).
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from kda_kernels._cute import convolution, device, key_rows, value_rows
from kda_kernels._cute.call import VECTOR_BYTES
from kda_kernels._cute.tracing import MAX_GRID_Y, any_tensor, grid
from kda_kernels.contract.spec import HEAD_DIM as D
from kda_kernels.fused_decode.launch import TENSORS, Variant

ROLES = 4
"""What a block's first warps make of a token: q, k, v and the decay."""
DECAY, K, Q, V = 0, 1, 2, 3
"""Where they lie in shared memory; key_rows reads the first three together."""
ROWS_OF_PARTS = (Q, K, V)
"""Where each part of x goes."""


def form_of(v: Variant) -> convolution.Form:
    """Return how window and taps lie."""
    return convolution.Form(v.columns, v.by_channel, v.taps_last, v.aligned)


class Kept:
    """Registers for what a lane has read of window and row, which move_window writes back.

    A warp has one part of x, and then one set serves, or in a small block several.
    """

    def __init__(self, v: Variant, activation: Any) -> None:  # noqa: ANN401 - a traced type
        """Reserve the registers."""
        sets = 1 if v.schedule.warps >= len(ROWS_OF_PARTS) else len(ROWS_OF_PARTS)
        shape = cute.make_layout((convolution.CHANNELS, v.columns), stride=(v.columns, 1))
        windows = [cute.make_rmem_tensor(shape, activation) for _ in range(sets)]
        fresh = [cute.make_rmem_tensor((convolution.CHANNELS,), activation) for _ in range(sets)]
        self.window = [windows[part % sets] for part in range(len(ROWS_OF_PARTS))]
        self.fresh = [fresh[part % sets] for part in range(len(ROWS_OF_PARTS))]


@cute.jit
def prepare(
    x: cute.Tensor,
    weight: cute.Tensor,
    conv_bias: cute.Tensor,
    raw_gate: cute.Tensor,
    A_log: cute.Tensor,
    dt_bias: cute.Tensor,
    slot_window: cute.Pointer,
    place: tuple[Int32, Int32, Int32, Int32],
    scale: Float32,
    lower_bound: Float32,
    token: cutlass.Constexpr,
    kept: cutlass.Constexpr,
    v: cutlass.Constexpr,
) -> None:
    """Make q and k, as unit vectors, v and the decay in shared memory, each with one warp."""
    row, head, warp, lane = place
    form, count = const_expr(form_of(v)), const_expr(convolution.CHANNELS)
    per_part = Int32(x.shape[1]) // 3
    channel = head * D + lane * count
    for part in cutlass.range_constexpr(3):
        if warp == part % v.schedule.warps:
            at = part * per_part + channel
            window, fresh = kept.window[part], kept.fresh[part]
            convolution.read_window(slot_window, at, 3 * per_part, form, window)
            convolution.read_token(x.iterator, Int64(row) * x.stride[0] + at, form, fresh)
            taps = convolution.read_taps(weight.iterator, part, channel, per_part, form)
            bias = None
            if const_expr(conv_bias is not None):
                bias = device.read(conv_bias.iterator, Int64(at), count, v.aligned)
            made = convolution.silu_of_sum(taps, bias, window, fresh, form)
            if const_expr(part < 2):
                squares = device.lane_sum(device.sum_of_squares(made), 32)
                unit = cute.math.rsqrt(squares + device.L2_EPS)
                if const_expr(part == 0):
                    unit = unit * scale
                for c in cutlass.range_constexpr(count):
                    made[c] = made[c] * unit
            for c in cutlass.range_constexpr(count):
                token[ROWS_OF_PARTS[part]][lane * count + c] = made[c]
    if warp == 3 % v.schedule.warps:
        at = Int64(row) * raw_gate.stride[v.row_axis("raw_gate")] + channel
        a = device.read(raw_gate.iterator, at, count, v.aligned)
        bias = device.read(dt_bias.iterator, Int64(channel), count, v.aligned)
        rate = cute.math.exp(device.element(A_log.iterator, Int64(head)))
        for c in cutlass.range_constexpr(count):
            d = device.decay(a[c] + bias[c], rate, lower_bound, v.softplus)
            token[DECAY][lane * count + c] = d


@cute.jit
def move_window(
    slot_window: cute.Pointer,
    channels: Int32,
    place: tuple[Int32, Int32, Int32, Int32],
    split: Int32,
    kept: cutlass.Constexpr,
    v: cutlass.Constexpr,
) -> None:
    """Write the window back, moved by one column; one of the blocks does each part."""
    _, head, warp, lane = place
    splits = const_expr(v.schedule.splits(v.layout))
    for part in cutlass.range_constexpr(3):
        if (warp == part % v.schedule.warps) & (split == part % splits):
            channel = part * (channels // 3) + head * D + lane * convolution.CHANNELS
            convolution.write_window(
                slot_window,
                channel,
                channels,
                form_of(v),
                kept.window[part],
                kept.fresh[part],
            )


def beta_at(raw_beta: cute.Tensor, row: Int32, head: Int32, v: Variant) -> Int64:
    """Return where a row's head has its beta."""
    axis = v.beta_axis
    return Int64(row) * raw_beta.stride[axis] + Int64(head) * raw_beta.stride[axis + 1]


def reserve_token(smem: SmemAllocator, *, by_key: bool) -> tuple[cute.Pointer, list[Any]]:
    """Reserve shared memory for a token: where it starts, and its four rows of 128.

    ``by_key`` puts decay, k, q and a filler of each key side by side, so that one access fetches
    what a key row of the state needs; the values follow behind.
    """
    base = smem.allocate_tensor(Float32, cute.make_layout(5 * D), byte_alignment=16).iterator
    starts, step = ((0, 1, 2, 4 * D), 4) if by_key else ((0, D, 2 * D, 3 * D), 1)
    layouts = [cute.make_layout(D, stride=step)] * 3 + [cute.make_layout(D)]
    rows = [cute.make_tensor(base + at, k) for at, k in zip(starts, layouts, strict=True)]
    return base, rows


def dot_of_units(token: list[Any], lane: Int32) -> Float32:
    """Return k.q of the unit vectors, in every lane."""
    total = Float32(0.0)
    for j in range(D // 32):
        at = lane + 32 * j
        total = cute.math.fma(token[K][at], token[Q][at], total)
    return device.lane_sum(total, 32)


@cute.jit
def share_squares(
    mine: Float32, place: cute.Pointer, lane: Int32, splits: cutlass.Constexpr
) -> None:
    """Leave a warp's sum of squares at ``place`` in every block that shares the head."""
    if const_expr(splits == 1):
        if lane == 0:
            cute.make_tensor(place, cute.make_layout(1))[0] = mine
    elif lane < splits:
        device.store_in_cluster(place, lane, mine)


def scale_of_norm(squares: cute.Tensor, count: int, eps: Float32) -> Float32:
    """Return 1 / sqrt(mean of squares + eps) of the whole head."""
    total = squares[0]
    for i in range(1, count):
        total = total + squares[i]
    return cute.math.rsqrt(total * (1.0 / D) + eps)


@cute.kernel
def value_rows_kernel(
    x: cute.Tensor,
    weight: cute.Tensor,
    conv_state: cute.Tensor,
    raw_gate: cute.Tensor,
    raw_beta: cute.Tensor,
    A_log: cute.Tensor,
    dt_bias: cute.Tensor,
    state: cute.Tensor,
    state_indices: cute.Tensor,
    output_gate: cute.Tensor,
    norm_weight: cute.Tensor,
    conv_bias: cute.Tensor,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    norm_eps: Float32,
    first_slot: Int64,
    v: cutlass.Constexpr,
) -> None:
    """Layout vk: a warp owns value rows whole; blocks share a head by value rows."""
    cut = const_expr(value_rows.Cut(state.element_type.width, v.schedule.tile))
    warps, splits = const_expr(v.schedule.warps), const_expr(v.schedule.splits("vk"))
    device.wait_for_the_kernel_before(v.overlaps)
    thread, _, _ = cute.arch.thread_idx()
    index, y, z = cute.arch.block_idx()
    split, head, row = index % splits, index // splits, y + z * MAX_GRID_Y
    lane, warp = thread % 32, thread // 32
    group, key = lane // cut.lanes, lane % cut.lanes
    first = (split * warps + warp) * v.schedule.tile
    mine = first + cut.finished(key, group)
    heads = state.shape[1]
    slot, live = device.slot_and_liveness(
        state_indices,
        row,
        Int64(state.shape[0]),
        first_slot,
        v.wraps,
    )
    writes = cut.finishes(key)
    smem = SmemAllocator()
    _, token = reserve_token(smem, by_key=False)
    squares = smem.allocate_tensor(Float32, cute.make_layout((warps * splits,)), byte_alignment=16)
    if row < x.shape[0]:
        target = cute.make_tensor(
            output.iterator + ((Int64(row) * heads + head) * D + mine),
            cute.make_layout(cut.kept, stride=cut.together),
        )
        place = (row, head, warp, lane)
        channels = Int32(x.shape[1])
        kept = Kept(v, x.element_type)
        if live:
            base = device.pointer(
                state.iterator, slot * state.stride[0] + Int64(head) * (D * D), VECTOR_BYTES
            )
            S = value_rows.view(base, cut)
            tile = value_rows.load(S, first + group, key, cut)
            device.let_the_next_kernel_start(v.overlaps)
            slot_window = device.pointer(
                conv_state.iterator, slot * conv_state.stride[0], convolution.SLOT_BYTES
            )
            prepare(
                x,
                weight,
                conv_bias,
                raw_gate,
                A_log,
                dt_bias,
                slot_window,
                place,
                scale,
                lower_bound,
                token,
                kept,
                v,
            )
            if const_expr(splits == 1):
                move_window(slot_window, channels, place, split, kept, v)
            else:
                cute.arch.cluster_arrive()
            b = device.sigmoid(device.element(raw_beta.iterator, beta_at(raw_beta, row, head, v)))
            gain = cute.make_rmem_tensor((cut.kept,), Float32)
            for i in cutlass.range_constexpr(cut.kept):
                at = mine + i * cut.together
                step = output_gate.stride[v.row_axis("output_gate")]
                g = device.element(output_gate.iterator, Int64(row) * step + (head * D + at))
                gain[i] = device.sigmoid(g) * device.element(norm_weight.iterator, Int64(at))
            cute.arch.sync_threads()
            d = cute.make_rmem_tensor((cut.vector,), Float32)
            k = cute.make_rmem_tensor((cut.vector,), Float32)
            q = cute.make_rmem_tensor((cut.vector,), Float32)
            for r, registers in ((DECAY, d), (K, k), (Q, q)):
                by_lane = cute.make_layout((cut.vector, cut.lanes))
                by_lane = cute.make_tensor(token[r].iterator, by_lane)
                cute.autovec_copy(by_lane[None, key], registers)
            kq = dot_of_units(token, lane)
            sk, sq = value_rows.sums(tile, d, k, q, key, cut)
            bu = cute.make_rmem_tensor((cut.kept,), Float32)
            o = cute.make_rmem_tensor((cut.kept,), Float32)
            square = Float32(0.0)
            for i in cutlass.range_constexpr(cut.kept):
                bu[i] = b * (token[V][mine + i * cut.together] - sk[i])
                o[i] = Float32(x.element_type(sq[i] + bu[i] * kq))
                square += o[i] * o[i]
            square = device.lane_sum(cutlass.select_(writes, square, Float32(0.0)), 32)
            if const_expr(splits > 1):
                cute.arch.cluster_wait()
                move_window(slot_window, channels, place, split, kept, v)
            share_squares(square, squares.iterator + (split * warps + warp), lane, splits)
            if const_expr(splits > 1):
                cute.arch.cluster_arrive()
            value_rows.update(tile, d, k, bu, group, cut)
            value_rows.store(tile, S, first + group, key, cut)
            if const_expr(splits > 1):
                cute.arch.cluster_wait()
            else:
                cute.arch.sync_threads()
            unit = scale_of_norm(squares, warps * splits, norm_eps)
            if writes:
                for i in cutlass.range_constexpr(cut.kept):
                    target[i] = output.element_type(o[i] * unit * gain[i])
        elif writes:
            for i in cutlass.range_constexpr(cut.kept):
                target[i] = output.element_type(0.0)


@cute.kernel
def key_rows_kernel(
    x: cute.Tensor,
    weight: cute.Tensor,
    conv_state: cute.Tensor,
    raw_gate: cute.Tensor,
    raw_beta: cute.Tensor,
    A_log: cute.Tensor,
    dt_bias: cute.Tensor,
    state: cute.Tensor,
    state_indices: cute.Tensor,
    output_gate: cute.Tensor,
    norm_weight: cute.Tensor,
    conv_bias: cute.Tensor,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    norm_eps: Float32,
    first_slot: Int64,
    v: cutlass.Constexpr,
) -> None:
    """Layout kv: a block owns value columns and every warp finishes all of them for itself."""
    cut = const_expr(key_rows.Cut(state.element_type.width, v.schedule.warps, v.schedule.tile))
    vector, columns, splits = cut.vector, cut.columns, const_expr(v.schedule.splits("kv"))
    device.wait_for_the_kernel_before(v.overlaps)
    thread, _, _ = cute.arch.thread_idx()
    index, y, z = cute.arch.block_idx()
    split, head, row = index % splits, index // splits, y + z * MAX_GRID_Y
    lane, warp = thread % 32, thread // 32
    group, column = lane // cut.lanes, lane % cut.lanes
    heads = state.shape[1]
    slot, live = device.slot_and_liveness(
        state_indices,
        row,
        Int64(state.shape[0]),
        first_slot,
        v.wraps,
    )
    smem = SmemAllocator()
    base_of_token, token = reserve_token(smem, by_key=True)
    factors = cute.make_tensor(base_of_token, cute.make_layout((4, D)))
    partial = key_rows.partial_sums(smem, cut)
    squares = smem.allocate_tensor(Float32, cute.make_layout((splits,)), byte_alignment=16)
    if row < x.shape[0]:
        mine = split * columns + column * vector
        target = cute.make_tensor(
            output.iterator + ((Int64(row) * heads + head) * D + mine), cute.make_layout(vector)
        )
        place = (row, head, warp, lane)
        channels = Int32(x.shape[1])
        kept = Kept(v, x.element_type)
        if live:
            base = device.pointer(
                state.iterator, slot * state.stride[0] + Int64(head) * (D * D), VECTOR_BYTES
            )
            S = key_rows.view(base, cut)
            first = warp * cut.keys + group
            at = split * cut.lanes + column
            tile = key_rows.load(S, first, at, cut)
            device.let_the_next_kernel_start(v.overlaps)
            slot_window = device.pointer(
                conv_state.iterator, slot * conv_state.stride[0], convolution.SLOT_BYTES
            )
            prepare(
                x,
                weight,
                conv_bias,
                raw_gate,
                A_log,
                dt_bias,
                slot_window,
                place,
                scale,
                lower_bound,
                token,
                kept,
                v,
            )
            if const_expr(splits == 1):
                move_window(slot_window, channels, place, split, kept, v)
            else:
                cute.arch.cluster_arrive()
            b = device.sigmoid(device.element(raw_beta.iterator, beta_at(raw_beta, row, head, v)))
            cute.arch.sync_threads()
            key_rows.put_sums(tile, factors, first, (lane, group, column, warp), partial, cut)
            kq = dot_of_units(token, lane)
            cute.arch.sync_threads()
            sk, sq = key_rows.get_sums(partial, column, cut)
            bu = cute.make_rmem_tensor((vector,), Float32)
            o = cute.make_rmem_tensor((vector,), Float32)
            square = Float32(0.0)
            for j in cutlass.range_constexpr(vector):
                bu[j] = b * (token[V][mine + j] - sk[j])
                o[j] = Float32(x.element_type(sq[j] + bu[j] * kq))
                square += o[j] * o[j]
            square = device.lane_sum(square, cut.lanes)
            if const_expr(splits > 1):
                cute.arch.cluster_wait()
                move_window(slot_window, channels, place, split, kept, v)
                if warp == 0:
                    share_squares(square, squares.iterator + split, lane, splits)
                cute.arch.cluster_arrive()
            key_rows.update(tile, factors, first, bu, cut)
            key_rows.store(tile, S, first, at, cut)
            unit = cute.math.rsqrt(square * (1.0 / D) + norm_eps)
            if const_expr(splits > 1):
                cute.arch.cluster_wait()
                unit = scale_of_norm(squares, splits, norm_eps)
            if (warp == 0) & (group == 0):
                step = output_gate.stride[v.row_axis("output_gate")]
                g = device.read(
                    output_gate.iterator, Int64(row) * step + (head * D + mine), vector, False
                )
                gain = device.read(norm_weight.iterator, Int64(mine), vector, False)
                for j in cutlass.range_constexpr(vector):
                    y_j = o[j] * unit * (device.sigmoid(g[j]) * gain[j])
                    target[j] = output.element_type(y_j)
        elif (warp == 0) & (group == 0):
            for j in cutlass.range_constexpr(vector):
                target[j] = output.element_type(0.0)


@cute.jit
def fused_decode(
    x: cute.Tensor,
    weight: cute.Tensor,
    conv_state: cute.Tensor,
    raw_gate: cute.Tensor,
    raw_beta: cute.Tensor,
    A_log: cute.Tensor,
    dt_bias: cute.Tensor,
    state: cute.Tensor,
    state_indices: cute.Tensor | None,
    output_gate: cute.Tensor,
    norm_weight: cute.Tensor,
    conv_bias: cute.Tensor | None,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    norm_eps: Float32,
    first_slot: Int64,
    stream: Any,  # noqa: ANN401 - the runtime's
    v: cutlass.Constexpr,
) -> None:
    """Launch the kernel of a variant on the stream."""
    head = (x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, state_indices)
    tail = (output_gate, norm_weight, conv_bias, output, scale, lower_bound, norm_eps, first_slot)
    kernel = const_expr(key_rows_kernel if v.layout == "kv" else value_rows_kernel)
    splits = const_expr(v.schedule.splits(v.layout))
    kernel(*head, *tail, v).launch(
        grid=grid(splits * state.shape[1], x.shape[0]),
        block=[v.schedule.warps * 32, 1, 1],
        cluster=const_expr([splits, 1, 1] if splits > 1 else None),
        stream=stream,
        use_pdl=v.overlaps,
        min_blocks_per_mp=v.schedule.min_blocks,
        # Naming it keeps the compiler from asking a driver, which a machine without a GPU lacks.
        preferred_smem_carveout=v.schedule.carveout,
    )


def trace(v: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return the function of a variant and the arguments to compile it with."""
    tensors = [any_tensor(v.types[name], v.ranks.get(name, 1)) for name in TENSORS]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    scalars = (Float32(1.0), Float32(-1.0), Float32(1e-5), Int64(0))
    return fused_decode, (*tensors, *scalars, stream, v)

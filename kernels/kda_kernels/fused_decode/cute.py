"""fused_decode in CuTe DSL: convolution, gates, one pass over the state, gated RMSNorm.

Lives here: the kernels and how a variant is traced for the compiler. A thread block owns one row's
head. While its other warps read the state, the first ones make q, k, v, the decay and the gain
behind the norm in shared memory; one warp makes the norm at the end.
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

DECAY, K, Q, V, GAIN = 0, 1, 2, 3, 4
"""Where they lie in shared memory; key_rows reads the first three together."""
ROWS_OF_PARTS = (Q, K, V)
"""Where each part of x goes."""


def form_of(v: Variant) -> convolution.Form:
    """Return how window and taps lie."""
    return convolution.Form(v.columns, v.by_channel, v.taps_last, v.aligned)


@cute.jit
def prepare(
    x: cute.Tensor,
    weight: cute.Tensor,
    conv_bias: cute.Tensor,
    raw_gate: cute.Tensor,
    raw_beta: cute.Tensor,
    A_log: cute.Tensor,
    dt_bias: cute.Tensor,
    output_gate: cute.Tensor,
    norm_weight: cute.Tensor,
    slot_window: cute.Pointer,
    place: tuple[Int32, Int32, Int32, Int32],
    scale: Float32,
    lower_bound: Float32,
    token: cutlass.Constexpr,
    v: cutlass.Constexpr,
) -> None:
    """Make a token in shared memory, each of its rows with the lanes of one warp.

    Its rows are q and k, as unit vectors, v, the decay, and the gain behind the norm. A lane that
    has read its part of the window is the only one to do so, and writes it back moved by a column.
    """
    row, head, warp, lane = place
    form, count = const_expr(form_of(v)), const_expr(convolution.CHANNELS)
    per_part = Int32(x.shape[1]) // 3
    channel = head * D + lane * count
    decays, gains, beta = token.rows[DECAY], token.rows[GAIN], token.beta
    for part in cutlass.range_constexpr(3):
        row_of_part = token.rows[ROWS_OF_PARTS[part]]
        if warp == part % v.schedule.warps:
            at = part * per_part + channel
            window = cute.make_rmem_tensor(
                cute.make_layout((count, v.columns), stride=(v.columns, 1)), x.element_type
            )
            fresh = cute.make_rmem_tensor((count,), x.element_type)
            convolution.read_window(slot_window, at, 3 * per_part, form, window)
            convolution.read_token(x.iterator, Int64(row) * x.stride[0] + at, form, fresh)
            taps = convolution.read_taps(weight.iterator, part, channel, per_part, form)
            bias = None
            if const_expr(conv_bias is not None):
                bias = device.read(conv_bias.iterator, Int64(at), count, v.aligned)
            made = convolution.silu_of_sum(taps, bias, window, fresh, form)
            convolution.write_window(slot_window, at, 3 * per_part, form, window, fresh)
            if const_expr(part < 2):
                squares = device.lane_sum(device.sum_of_squares(made), 32)
                unit = cute.math.rsqrt(squares + device.L2_EPS)
                if const_expr(part == 0):
                    unit = unit * scale
                for c in cutlass.range_constexpr(count):
                    made[c] = made[c] * unit
            for c in cutlass.range_constexpr(count):
                row_of_part[lane * count + c] = made[c]
    if warp == 3 % v.schedule.warps:
        at = Int64(row) * raw_gate.stride[v.row_axis("raw_gate")] + channel
        a = device.read(raw_gate.iterator, at, count, v.aligned)
        bias = device.read(dt_bias.iterator, Int64(channel), count, v.aligned)
        rate = cute.math.exp(device.element(A_log.iterator, Int64(head)))
        for c in cutlass.range_constexpr(count):
            d = device.decay(a[c] + bias[c], rate, lower_bound, v.softplus)
            decays[lane * count + c] = d
    if warp == 4 % v.schedule.warps:
        at = Int64(row) * output_gate.stride[v.row_axis("output_gate")] + channel
        gate = device.read(output_gate.iterator, at, count, False)
        weights = device.read(norm_weight.iterator, Int64(lane * count), count, False)
        for c in cutlass.range_constexpr(count):
            gains[lane * count + c] = weights[c] * device.sigmoid(gate[c])
        axis = const_expr(v.beta_axis)
        at = Int64(row) * raw_beta.stride[axis] + Int64(head) * raw_beta.stride[axis + 1]
        logit = device.element(raw_beta.iterator, at)
        if lane == 0:
            beta[0] = device.sigmoid(logit)


class Token:
    """A token in shared memory: five rows of 128 and its beta.

    ``by_key`` puts decay, k, q and a filler of each key side by side, so that one access fetches
    what a key row of the state needs; the other rows follow behind.
    """

    def __init__(self, smem: SmemAllocator, *, by_key: bool) -> None:
        """Reserve the memory."""
        size = 6 * D
        self.base = smem.allocate_tensor(
            Float32, cute.make_layout(size), byte_alignment=16
        ).iterator
        starts, step = ((0, 1, 2, 4 * D, 5 * D), 4) if by_key else (range(0, 5 * D, D), 1)
        steps = (step, step, step, 1, 1)
        self.rows = [
            cute.make_tensor(self.base + at, cute.make_layout(D, stride=apart))
            for at, apart in zip(starts, steps, strict=True)
        ]
        self.beta = smem.allocate_tensor(Float32, cute.make_layout(1), byte_alignment=16)


def dot_of_units(token: Token, lane: Int32) -> Float32:
    """Return k.q of the unit vectors, in every lane."""
    total = Float32(0.0)
    for j in range(D // 32):
        at = lane + 32 * j
        total = cute.math.fma(token.rows[K][at], token.rows[Q][at], total)
    return device.lane_sum(total, 32)


def finish(
    made: cute.Tensor, token: Token, target: cute.Tensor, lane: Int32, norm_eps: Float32
) -> None:
    """Write the gated RMSNorm of a head with the lanes of one warp.

    Args:
        made: what the recurrence made, [128] in shared memory.
        token: its gain is norm_weight * sigmoid(output_gate).
        target: the head's output.
        lane: within the warp.
        norm_eps: of the norm.
    """
    count = D // 32
    by_lane = cute.make_layout((count, 32))
    o = cute.make_rmem_tensor((count,), Float32)
    gain = cute.make_rmem_tensor((count,), Float32)
    cute.autovec_copy(cute.make_tensor(made.iterator, by_lane)[None, lane], o)
    cute.autovec_copy(cute.make_tensor(token.rows[GAIN].iterator, by_lane)[None, lane], gain)
    total = device.lane_sum(device.sum_of_squares(o), 32)
    unit = cute.math.rsqrt(total * (1.0 / D) + norm_eps)
    y = cute.make_rmem_tensor((count,), target.element_type)
    for c in range(count):
        y[c] = target.element_type(o[c] * unit * gain[c])
    cute.autovec_copy(y, cute.make_tensor(target.iterator + lane * count, cute.make_layout(count)))


@cute.jit
def write_zeros(target: cute.Tensor, thread: Int32) -> None:
    """Write a null row's output."""
    if thread < D:
        target[thread] = target.element_type(0.0)


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
    """Layout vk: a warp owns value rows whole and finishes them in batches."""
    tile, batch = const_expr(v.schedule.tile), const_expr(v.schedule.batch or v.schedule.tile)
    whole = const_expr(value_rows.Cut(state.element_type.width, tile))
    cut = const_expr(value_rows.Cut(state.element_type.width, batch))
    warps = const_expr(v.schedule.warps)
    device.wait_for_the_kernel_before(v.overlaps)
    thread, _, _ = cute.arch.thread_idx()
    head, y, z = cute.arch.block_idx()
    row = y + z * MAX_GRID_Y
    lane, warp = thread % 32, thread // 32
    group, key = lane // cut.lanes, lane % cut.lanes
    heads = state.shape[1]
    slot, live = device.slot_and_liveness(
        state_indices, row, Int64(state.shape[0]), first_slot, v.wraps
    )
    smem = SmemAllocator()
    token = Token(smem, by_key=False)
    made = smem.allocate_tensor(Float32, cute.make_layout((D,)), byte_alignment=16)
    if row < x.shape[0]:
        target = cute.make_tensor(
            output.iterator + (Int64(row) * heads + head) * D, cute.make_layout(D)
        )
        if live:
            place = (row, head, warp, lane)
            slot_window = device.pointer(
                conv_state.iterator, slot * conv_state.stride[0], convolution.SLOT_BYTES
            )
            inputs = (x, weight, conv_bias, raw_gate, raw_beta, A_log, dt_bias)
            ingredients = (
                *inputs,
                output_gate,
                norm_weight,
                slot_window,
                place,
                scale,
                lower_bound,
                token,
                v,
            )
            base = device.pointer(
                state.iterator, slot * state.stride[0] + Int64(head) * (D * D), VECTOR_BYTES
            )
            S = value_rows.view(base, cut)
            first = warp * tile
            if const_expr(v.schedule.token_first):
                prepare(*ingredients)
            rows_of_state = value_rows.load(S, first + group, key, whole)
            device.let_the_next_kernel_start(v.overlaps)
            if const_expr(not v.schedule.token_first):
                prepare(*ingredients)
            cute.arch.sync_threads()
            d = cute.make_rmem_tensor((cut.vector,), Float32)
            k = cute.make_rmem_tensor((cut.vector,), Float32)
            q = cute.make_rmem_tensor((cut.vector,), Float32)
            by_lane = cute.make_layout((cut.vector, cut.lanes))
            for r, registers in ((DECAY, d), (K, k), (Q, q)):
                source = cute.make_tensor(token.rows[r].iterator, by_lane)
                cute.autovec_copy(source[None, key], registers)
            kq = dot_of_units(token, lane)
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
                for i in cutlass.range_constexpr(cut.kept):
                    at = mine + i * cut.together
                    bu[i] = b * (token.rows[V][at] - sk[i])
                    if cut.finishes(key):
                        made[at] = Float32(x.element_type(sq[i] + bu[i] * kq))
                value_rows.update(part, d, k, bu, group, cut)
                value_rows.store(part, S, start + group, key, cut)
            cute.arch.sync_threads()
            if warp == warps - 1:
                finish(made, token, target, lane, norm_eps)
        else:
            write_zeros(target, thread)


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
    """Layout kv: a warp owns key rows, and all warps finish the sums of all value columns."""
    cut = const_expr(key_rows.Cut(state.element_type.width, v.schedule.warps, v.schedule.tile))
    vector = const_expr(cut.vector)
    device.wait_for_the_kernel_before(v.overlaps)
    thread, _, _ = cute.arch.thread_idx()
    head, y, z = cute.arch.block_idx()
    row = y + z * MAX_GRID_Y
    lane, warp = thread % 32, thread // 32
    group, column = lane // cut.lanes, lane % cut.lanes
    heads = state.shape[1]
    slot, live = device.slot_and_liveness(
        state_indices, row, Int64(state.shape[0]), first_slot, v.wraps
    )
    smem = SmemAllocator()
    token = Token(smem, by_key=True)
    factors = cute.make_tensor(token.base, cute.make_layout((4, D)))
    partial = key_rows.partial_sums(smem, cut)
    made = smem.allocate_tensor(Float32, cute.make_layout((D,)), byte_alignment=16)
    if row < x.shape[0]:
        target = cute.make_tensor(
            output.iterator + (Int64(row) * heads + head) * D, cute.make_layout(D)
        )
        if live:
            place = (row, head, warp, lane)
            slot_window = device.pointer(
                conv_state.iterator, slot * conv_state.stride[0], convolution.SLOT_BYTES
            )
            inputs = (x, weight, conv_bias, raw_gate, raw_beta, A_log, dt_bias)
            ingredients = (
                *inputs,
                output_gate,
                norm_weight,
                slot_window,
                place,
                scale,
                lower_bound,
                token,
                v,
            )
            base = device.pointer(
                state.iterator, slot * state.stride[0] + Int64(head) * (D * D), VECTOR_BYTES
            )
            S = key_rows.view(base, cut)
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
                kq = dot_of_units(token, lane)
                sq = key_rows.get_sums(partial, 1, column, cut)
                if group == 0:
                    for j in cutlass.range_constexpr(vector):
                        o = Float32(x.element_type(sq[j] + bu[j] * kq))
                        made[column * vector + j] = o
                cute.arch.sync_warp()
            key_rows.update(tile, factors, first, bu, cut)
            key_rows.store(tile, S, first, column, cut)
            if warp == 0:
                finish(made, token, target, lane, norm_eps)
        else:
            write_zeros(target, thread)


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
    kernel(*head, *tail, v).launch(
        grid=grid(state.shape[1], x.shape[0]),
        block=[v.schedule.warps * 32, 1, 1],
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

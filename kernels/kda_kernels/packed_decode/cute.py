"""packed_decode in CuTe DSL: one pass over the state, two schedules for its two layouts.

Lives here: the kernels and how a variant is traced for the compiler. Every thread block owns a part
of one row's head and reads it whole before anything is written; the output is formed from the old
state (o = S'q + beta*u*(k.q)), so both dot products of a state row are summed together.
Not here: which variant a call needs (launch.py), how work is cut (config.py), caching (_cute/).
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from kda_kernels._cute import device, key_rows, value_rows
from kda_kernels._cute.call import VECTOR_BYTES
from kda_kernels._cute.tracing import MAX_GRID_Y, any_tensor, grid
from kda_kernels.contract.spec import HEAD_DIM as D
from kda_kernels.packed_decode.launch import Variant


def read_token(
    inputs: tuple[cute.Tensor, ...],
    place: tuple[Int32, Int32, Int32, Int32, Int32],
    cut: value_rows.Cut,
    v: Variant,
) -> tuple[Any, ...]:
    """Return what a lane needs of its token: q, k, raw gate, bias, values, raw beta, A_log.

    Args:
        inputs: qkv, gate, beta, A_log and dt_bias.
        place: row, head, how many heads there are, the lane's keys, the first row it finishes.
        cut: how the lanes share value rows.
        v: the variant.
    """
    qkv, gate, beta, A_log, dt_bias = inputs
    row, head, heads, key, mine = place
    token = Int64(row) * qkv.stride[0]
    at = head * D + key * cut.vector
    q = device.read(qkv.iterator, token + at, cut.vector, v.aligned)
    k = device.read(qkv.iterator, token + (heads * D + at), cut.vector, v.aligned)
    of_gate = Int64(row) * gate.stride[v.gate_axis] + at
    a = device.read(gate.iterator, of_gate, cut.vector, v.aligned)
    bias = device.read(dt_bias.iterator, Int64(at), cut.vector, v.aligned)
    value = cute.make_rmem_tensor((cut.kept,), Float32)
    for i in range(cut.kept):
        channel = (2 * heads + head) * D + mine + i * cut.together
        value[i] = device.element(qkv.iterator, token + channel)
    axis = v.beta_axis
    of_beta = Int64(row) * beta.stride[axis] + Int64(head) * beta.stride[axis + 1]
    raw_beta = device.element(beta.iterator, of_beta)
    return q, k, a, bias, value, raw_beta, device.element(A_log.iterator, Int64(head))


@cute.kernel
def value_rows_kernel(
    qkv: cute.Tensor,
    gate: cute.Tensor,
    beta: cute.Tensor,
    A_log: cute.Tensor,
    dt_bias: cute.Tensor,
    state: cute.Tensor,
    state_indices: cute.Tensor,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    first_slot: Int64,
    v: cutlass.Constexpr,
) -> None:
    """Layout vk: a warp prepares its token for itself, and no warp waits for another."""
    cut = const_expr(value_rows.Cut(state.element_type.width, v.schedule.tile))
    vector, lanes, kept, together = cut.vector, cut.lanes, cut.kept, cut.together
    splits = const_expr(v.schedule.splits("vk"))
    device.wait_for_the_kernel_before(v.overlaps)
    thread, _, _ = cute.arch.thread_idx()
    x, y, z = cute.arch.block_idx()
    split, head, row = x % splits, x // splits, y + z * MAX_GRID_Y
    lane, warp = thread % 32, thread // 32
    group, key = lane // lanes, lane % lanes
    first = (split * v.schedule.warps + warp) * v.schedule.tile
    mine = first + cut.finished(key, group)
    heads = state.shape[1]
    writes = cut.finishes(key)
    inputs, place = (qkv, gate, beta, A_log, dt_bias), (row, head, heads, key, mine)
    if row < qkv.shape[0]:
        target = cute.make_tensor(
            output.iterator + ((Int64(row) * heads + head) * D + mine),
            cute.make_layout(kept, stride=together),
        )
        early: Any = (
            read_token(inputs, place, cut, v) if const_expr(v.schedule.token_first) else None
        )
        slot, live = device.slot_and_liveness(
            state_indices, row, Int64(state.shape[0]), first_slot, v.wraps
        )
        if live:
            base = device.pointer(
                state.iterator, slot * state.stride[0] + Int64(head) * (D * D), VECTOR_BYTES
            )
            S = value_rows.view(base, cut)
            tile = value_rows.load(S, first + group, key, cut)
            device.let_the_next_kernel_start(v.overlaps)
            token = read_token(inputs, place, cut, v) if const_expr(early is None) else early
            q, k, a, bias, value, raw_beta, raw_rate = token
            b, rate = device.sigmoid(raw_beta), cute.math.exp(raw_rate)
            qq, kk, qk = Float32(0.0), Float32(0.0), Float32(0.0)
            for j in cutlass.range_constexpr(vector):
                qq += q[j] * q[j]
                kk += k[j] * k[j]
                qk += q[j] * k[j]
            q_unit = scale * cute.math.rsqrt(device.lane_sum(qq, lanes) + device.L2_EPS)
            k_unit = cute.math.rsqrt(device.lane_sum(kk, lanes) + device.L2_EPS)
            kq = device.lane_sum(qk, lanes) * q_unit * k_unit
            d = cute.make_rmem_tensor((vector,), Float32)
            for j in cutlass.range_constexpr(vector):
                d[j] = device.decay(a[j] + bias[j], rate, lower_bound, v.softplus)
                k[j] = k[j] * k_unit
                q[j] = q[j] * q_unit
            sk, sq = value_rows.sums(tile, d, k, q, key, cut)
            bu = cute.make_rmem_tensor((kept,), Float32)
            for i in cutlass.range_constexpr(kept):
                bu[i] = b * (value[i] - sk[i])
                if writes:
                    target[i] = output.element_type(sq[i] + bu[i] * kq)
            value_rows.update(tile, d, k, bu, group, cut)
            value_rows.store(tile, S, first + group, key, cut)
        elif writes:
            for i in cutlass.range_constexpr(kept):
                target[i] = output.element_type(0.0)


@cute.kernel
def key_rows_kernel(
    qkv: cute.Tensor,
    gate: cute.Tensor,
    beta: cute.Tensor,
    A_log: cute.Tensor,
    dt_bias: cute.Tensor,
    state: cute.Tensor,
    state_indices: cute.Tensor,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    first_slot: Int64,
    v: cutlass.Constexpr,
) -> None:
    """Layout kv: a block owns value columns, every warp finishes all of them for itself."""
    cut = const_expr(key_rows.cut_of_one_token(state.element_type.width, v.schedule))
    vector, columns, keys = cut.vector, cut.columns, cut.keys
    splits = const_expr(v.schedule.splits("kv"))
    device.wait_for_the_kernel_before(v.overlaps)
    thread, _, _ = cute.arch.thread_idx()
    x, y, z = cute.arch.block_idx()
    split, head, row = x % splits, x // splits, y + z * MAX_GRID_Y
    lane, warp = thread % 32, thread // 32
    group, column = cut.place(lane)
    heads = state.shape[1]
    slot, live = device.slot_and_liveness(
        state_indices, row, Int64(state.shape[0]), first_slot, v.wraps
    )
    smem = SmemAllocator()
    factors = smem.allocate_tensor(Float32, cute.make_layout((D, 3)), byte_alignment=16)
    partial = key_rows.partial_sums(smem, cut)
    if row < qkv.shape[0]:
        target = cute.make_tensor(
            output.iterator + ((Int64(row) * heads + head) * D + split * columns + column * vector),
            cute.make_layout(vector),
        )
        if live:
            base = device.pointer(
                state.iterator, slot * state.stride[0] + Int64(head) * (D * D), VECTOR_BYTES
            )
            first = cut.first(warp, group)
            at = split * cut.lanes + column
            place = key_rows.start(base, first, at, cut)
            tile = key_rows.load(place, cut)
            device.let_the_next_kernel_start(v.overlaps)
            token = Int64(row) * qkv.stride[0]
            own = warp * keys + lane % keys
            q_own = device.element(qkv.iterator, token + (head * D + own))
            k_own = device.element(qkv.iterator, token + ((heads + head) * D + own))
            a = device.element(
                gate.iterator, Int64(row) * gate.stride[v.gate_axis] + (head * D + own)
            )
            bias = device.element(dt_bias.iterator, Int64(head * D + own))
            b = device.sigmoid(
                device.element(
                    beta.iterator,
                    Int64(row) * beta.stride[v.beta_axis]
                    + Int64(head) * beta.stride[v.beta_axis + 1],
                )
            )
            rate = cute.math.exp(device.element(A_log.iterator, Int64(head)))
            qq, kk, qk = Float32(0.0), Float32(0.0), Float32(0.0)
            for j in cutlass.range_constexpr(D // 32):
                q = device.element(qkv.iterator, token + (head * D + j * 32 + lane))
                k = device.element(qkv.iterator, token + ((heads + head) * D + j * 32 + lane))
                qq += q * q
                kk += k * k
                qk += q * k
            q_unit = scale * cute.math.rsqrt(device.lane_sum(qq, 32) + device.L2_EPS)
            k_unit = cute.math.rsqrt(device.lane_sum(kk, 32) + device.L2_EPS)
            kq = device.lane_sum(qk, 32) * q_unit * k_unit
            if lane < keys:
                factors[own, 0] = device.decay(a + bias, rate, lower_bound, v.softplus)
                factors[own, 1] = k_own * k_unit
                factors[own, 2] = q_own * q_unit
            cute.arch.sync_warp()
            key_rows.put_sums(
                tile, factors.iterator, first, (lane, group, column, warp), partial, cut
            )
            # Read here and not with the rest, to hold 8 registers less while sums are formed.
            values = device.read(
                qkv.iterator, token + ((2 * heads + head) * D + at * vector), vector, False
            )
            cute.arch.sync_threads()
            sk = key_rows.get_sums(partial, 0, column, cut)
            bu = cute.make_rmem_tensor((vector,), Float32)
            for j in cutlass.range_constexpr(vector):
                bu[j] = b * (values[j] - sk[j])
            if warp == 0:
                sq = key_rows.get_sums(partial, 1, column, cut)
                if group == 0:
                    for j in cutlass.range_constexpr(vector):
                        target[j] = output.element_type(sq[j] + bu[j] * kq)
                cute.arch.sync_warp()
            key_rows.update(tile, factors.iterator, first, bu, cut)
            key_rows.store(tile, place, cut)
        elif (warp == 0) & (group == 0):
            for j in cutlass.range_constexpr(vector):
                target[j] = output.element_type(0.0)


@cute.jit
def packed_decode(
    qkv: cute.Tensor,
    gate: cute.Tensor,
    beta: cute.Tensor,
    A_log: cute.Tensor,
    dt_bias: cute.Tensor,
    state: cute.Tensor,
    state_indices: cute.Tensor | None,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    first_slot: Int64,
    stream: Any,  # noqa: ANN401 - the runtime's
    v: cutlass.Constexpr,
) -> None:
    """Launch the kernel of a variant on the stream."""
    arguments = (qkv, gate, beta, A_log, dt_bias, state, state_indices, output)
    scalars = (scale, lower_bound, first_slot, v)
    kernel = const_expr(key_rows_kernel if v.layout == "kv" else value_rows_kernel)
    rows, heads = qkv.shape[0], state.shape[1]
    kernel(*arguments, *scalars).launch(
        grid=grid(v.schedule.splits(v.layout) * heads, rows),
        block=[v.schedule.warps * 32, 1, 1],
        stream=stream,
        use_pdl=v.overlaps,
        min_blocks_per_mp=v.schedule.min_blocks,
        # Naming it keeps the compiler from asking a driver, which a machine without a GPU lacks.
        preferred_smem_carveout=v.schedule.carveout,
    )


def trace(v: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return the function of a variant and the arguments to compile it with."""
    names = ("qkv", "gate", "beta", "A_log", "dt_bias", "state", "index", "output")
    tensors = [any_tensor(getattr(v, name), v.ranks.get(name, 1)) for name in names]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return packed_decode, (*tensors, Float32(1.0), Float32(-1.0), Int64(0), stream, v)

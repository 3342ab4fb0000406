"""packed_decode in CuTe DSL: one pass over the state, two schedules for its two layouts.

Lives here: the kernels and how a variant is traced for the compiler. Every thread block owns a part
of one row's head and reads it whole before anything is written; the output is formed from the old
state (o = S'q + beta*u*(k.q)), so both dot products of a state row are summed together.
Not here: which variant a call needs (launch.py), how work is cut (config.py), caching (_cute/).
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from kda_kernels._cute import device
from kda_kernels.packed_decode.config import VECTOR_BYTES
from kda_kernels.packed_decode.launch import Variant

D = device.HEAD_DIM
MAX_GRID_Y = 65535
TYPES = {
    "float32": Float32,
    "bfloat16": BFloat16,
    "float16": Float16,
    "int32": Int32,
    "int64": Int64,
}


@cute.jit
def slot_and_liveness(
    state_indices: cute.Tensor, row: Int32, slots: Int64, first_slot: Int64, v: cutlass.Constexpr
) -> tuple[Int64, Any]:
    """Return the row's slot and whether it is one; any index value is safe."""
    if const_expr(v.index is None):
        return Int64(row), Int64(row) < slots
    index = Int64(device.raw(state_indices.iterator, Int64(row) * state_indices.stride[0]))
    slot = device.slot_of(index, slots, v.wraps)
    return slot, (slot >= first_slot) & (slot < slots)


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
    """Layout vk: a warp owns ``tile`` value rows, its lanes share the keys of each; no barrier.

    A lane holds 16 bytes of each of its rows. The sums over keys of all rows are reduced
    together, which leaves one row's pair of sums in each group of lanes; that group finishes it.
    """
    vector = const_expr(VECTOR_BYTES * 8 // state.element_type.width)
    lanes = const_expr(D // vector)
    together = const_expr(32 // lanes)
    held = const_expr(v.schedule.tile // together)
    # Value rows whose sums end in one group of lanes, and lanes that hold the same sum.
    kept = const_expr(max(1, 2 * held // lanes))
    steps = const_expr((2 * held // kept).bit_length() - 1)
    spread = const_expr(lanes.bit_length() - 1 - steps)
    splits = const_expr(v.schedule.splits("vk"))
    thread, _, _ = cute.arch.thread_idx()
    x, y, z = cute.arch.block_idx()
    split, head, row = x % splits, x // splits, y + z * MAX_GRID_Y
    lane, warp = thread % 32, thread // 32
    group, key = lane // lanes, lane % lanes
    first = (split * v.schedule.warps + warp) * v.schedule.tile
    mine = first + ((key >> spread) % (held // kept)) * (kept * together) + group
    heads = state.shape[1]
    slot, live = slot_and_liveness(state_indices, row, Int64(state.shape[0]), first_slot, v)
    writes = (key < lanes // 2) & ((key & ((1 << spread) - 1)) == 0)
    if row < qkv.shape[0]:
        target = cute.make_tensor(
            output.iterator + ((Int64(row) * heads + head) * D + mine),
            cute.make_layout(kept, stride=together),
        )
        if live:
            base = device.pointer(
                state.iterator, slot * state.stride[0] + Int64(head) * (D * D), VECTOR_BYTES
            )
            S = cute.make_tensor(base, cute.make_layout((vector, D, lanes), stride=(1, D, vector)))
            tile = cute.make_rmem_tensor(cute.make_layout((vector, held)), state.element_type)
            for i in cutlass.range_constexpr(held):
                cute.autovec_copy(S[None, first + i * together + group, key], tile[None, i])
            token = Int64(row) * qkv.stride[0]
            at = head * D + key * vector
            q = device.read(qkv.iterator, token + at, vector, v.aligned)
            k = device.read(qkv.iterator, token + (heads * D + at), vector, v.aligned)
            a = device.read(
                gate.iterator, Int64(row) * gate.stride[v.gate_axis] + at, vector, v.aligned
            )
            bias = device.read(dt_bias.iterator, Int64(at), vector, v.aligned)
            value = cute.make_rmem_tensor((kept,), Float32)
            for i in cutlass.range_constexpr(kept):
                channel = (2 * heads + head) * D + mine + i * together
                value[i] = device.element(qkv.iterator, token + channel)
            b = device.sigmoid(
                device.element(
                    beta.iterator,
                    Int64(row) * beta.stride[v.beta_axis]
                    + Int64(head) * beta.stride[v.beta_axis + 1],
                )
            )
            rate = cute.math.exp(device.element(A_log.iterator, Int64(head)))
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
            sums = cute.make_rmem_tensor((2 * held,), Float32)
            for i in cutlass.range_constexpr(held):
                sk, sq = Float32(0.0), Float32(0.0)
                for j in cutlass.range_constexpr(vector):
                    decayed = Float32(tile[j, i]) * d[j]
                    sk += decayed * k[j]
                    sq += decayed * q[j]
                sums[i] = sk
                sums[held + i] = sq
            device.halving_sum(sums, 2 * held, key, lanes // 2, steps)
            bu = cute.make_rmem_tensor((kept,), Float32)
            upper = key >= lanes // 2
            for i in cutlass.range_constexpr(kept):
                total = sums[i]
                for j in cutlass.range_constexpr(spread):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << (spread - 1 - j))
                other = cute.arch.shuffle_sync_bfly(total, offset=lanes // 2)
                sk = cutlass.select_(upper, other, total)
                sq = cutlass.select_(upper, total, other)
                bu[i] = b * (value[i] - sk)
                if writes:
                    target[i] = output.element_type(sq + bu[i] * kq)
            for i in cutlass.range_constexpr(held):
                device.launder_packed(tile[None, i])
                source = group * lanes + ((i // kept) << spread)
                bu_row = cute.arch.shuffle_sync(bu[i % kept], source)
                for j in cutlass.range_constexpr(vector):
                    tile[j, i] = state.element_type(Float32(tile[j, i]) * d[j] + bu_row * k[j])
            for i in cutlass.range_constexpr(held):
                cute.autovec_copy(tile[None, i], S[None, first + i * together + group, key])
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
    """Layout kv: a block owns ``tile`` value columns, its warps share the 128 key rows.

    The sums run along the strided axis: over a lane's own rows in registers, over the lanes of a
    warp that hold other rows of the same columns by shuffles, over the warps in shared memory,
    behind the only barrier. Every warp finishes all columns for itself.
    """
    vector = const_expr(VECTOR_BYTES * 8 // state.element_type.width)
    columns = const_expr(v.schedule.tile)
    warps = const_expr(v.schedule.warps)
    lanes = const_expr(columns // vector)
    together = const_expr(32 // lanes)
    keys = const_expr(D // warps)
    held = const_expr(keys // together)
    steps = const_expr(together.bit_length() - 1)
    # After the shuffles a lane holds ``share`` of its columns' 2 * vector sums, in whole chunks.
    share = const_expr(2 * vector // together)
    chunk = const_expr(min(share, vector))
    chunks = const_expr(share // chunk)
    per_sum = const_expr(vector // chunk)
    splits = const_expr(v.schedule.splits("kv"))
    thread, _, _ = cute.arch.thread_idx()
    x, y, z = cute.arch.block_idx()
    split, head, row = x % splits, x // splits, y + z * MAX_GRID_Y
    lane, warp = thread % 32, thread // 32
    group, column = lane // lanes, lane % lanes
    heads = state.shape[1]
    slot, live = slot_and_liveness(state_indices, row, Int64(state.shape[0]), first_slot, v)
    # By key row: decay, k, q and a filler, so that one access fetches what a row needs.
    smem = SmemAllocator()
    factors = smem.allocate_tensor(Float32, cute.make_layout((4, D)), byte_alignment=16)
    partial = smem.allocate_tensor(
        Float32,
        cute.make_layout(
            (chunk, per_sum, 2, lanes, warps),
            stride=(1, chunk, columns, vector, 2 * columns),
        ),
        byte_alignment=16,
    )
    whole = cute.make_tensor(
        partial.iterator,
        cute.make_layout((vector, 2, lanes, warps), stride=(1, columns, vector, 2 * columns)),
    )
    if row < qkv.shape[0]:
        target = cute.make_tensor(
            output.iterator + ((Int64(row) * heads + head) * D + split * columns + column * vector),
            cute.make_layout(vector),
        )
        if live:
            base = device.pointer(
                state.iterator, slot * state.stride[0] + Int64(head) * (D * D), VECTOR_BYTES
            )
            S = cute.make_tensor(
                base, cute.make_layout((vector, D, D // vector), stride=(1, D, vector))
            )
            tile = cute.make_rmem_tensor(cute.make_layout((vector, held)), state.element_type)
            first = warp * keys + group
            at = split * lanes + column
            for i in cutlass.range_constexpr(held):
                cute.autovec_copy(S[None, first + i * together, at], tile[None, i])
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
                made = cute.make_rmem_tensor((4,), Float32)
                made[0] = device.decay(a + bias, rate, lower_bound, v.softplus)
                made[1] = k_own * k_unit
                made[2] = q_own * q_unit
                made[3] = Float32(0.0)
                cute.autovec_copy(made, factors[None, own])
            cute.arch.sync_warp()
            sums = cute.make_rmem_tensor((2 * vector,), Float32)
            for j in cutlass.range_constexpr(2 * vector):
                sums[j] = Float32(0.0)
            factor = cute.make_rmem_tensor((4,), Float32)
            for i in cutlass.range_constexpr(held):
                cute.autovec_copy(factors[None, first + i * together], factor)
                for j in cutlass.range_constexpr(vector):
                    decayed = Float32(tile[j, i]) * factor[0]
                    sums[j] += decayed * factor[1]
                    sums[vector + j] += decayed * factor[2]
            device.halving_sum(sums, 2 * vector, lane, 16, steps)
            part = cute.make_rmem_tensor((chunk, chunks), Float32)
            for j in cutlass.range_constexpr(share):
                part[j] = sums[j]
            for c in cutlass.range_constexpr(chunks):
                n = group * chunks + c
                cute.autovec_copy(
                    part[None, c], partial[None, n % per_sum, n // per_sum, column, warp]
                )
            # Read here and not with the rest, to hold 8 registers less while sums are formed.
            values = device.read(
                qkv.iterator, token + ((2 * heads + head) * D + at * vector), vector, False
            )
            cute.arch.sync_threads()
            bu = cute.make_rmem_tensor((vector,), Float32)
            sq = cute.make_rmem_tensor((vector,), Float32)
            for j in cutlass.range_constexpr(vector):
                bu[j] = Float32(0.0)
                sq[j] = Float32(0.0)
            got = cute.make_rmem_tensor((vector,), Float32)
            for w in cutlass.range_constexpr(warps):
                cute.autovec_copy(whole[None, 0, column, w], got)
                for j in cutlass.range_constexpr(vector):
                    bu[j] += got[j]
                cute.autovec_copy(whole[None, 1, column, w], got)
                for j in cutlass.range_constexpr(vector):
                    sq[j] += got[j]
            for j in cutlass.range_constexpr(vector):
                bu[j] = b * (values[j] - bu[j])
            if (warp == 0) & (group == 0):
                for j in cutlass.range_constexpr(vector):
                    target[j] = output.element_type(sq[j] + bu[j] * kq)
            for i in cutlass.range_constexpr(held):
                device.launder_packed(tile[None, i])
                cute.autovec_copy(factors[None, first + i * together], factor)
                for j in cutlass.range_constexpr(vector):
                    tile[j, i] = state.element_type(
                        Float32(tile[j, i]) * factor[0] + bu[j] * factor[1]
                    )
            for i in cutlass.range_constexpr(held):
                cute.autovec_copy(tile[None, i], S[None, first + i * together, at])
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
        grid=[
            v.schedule.splits(v.layout) * heads,
            cutlass.min(rows, MAX_GRID_Y),
            (rows + MAX_GRID_Y - 1) // MAX_GRID_Y,
        ],
        block=[v.schedule.warps * 32, 1, 1],
        stream=stream,
        min_blocks_per_mp=v.schedule.min_blocks,
        # Naming it keeps the compiler from asking a driver, which a machine without a GPU lacks.
        preferred_smem_carveout=v.schedule.carveout,
    )


def trace(v: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return the function of a variant and the arguments to compile it with.

    Shapes and strides are all dynamic and unrelated, so that no legal call fails a check of the
    compiled function: what the kernel relies on, the contract has checked.
    """
    names = ("qkv", "gate", "beta", "A_log", "dt_bias", "state", "index", "output")
    tensors = [_any_tensor(getattr(v, name), v.ranks.get(name, 1)) for name in names]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return packed_decode, (*tensors, Float32(1.0), Float32(-1.0), Int64(0), stream, v)


def _any_tensor(dtype: str | None, rank: int) -> Any:  # noqa: ANN401
    """Return a tensor of a type and rank, None where the variant has none."""
    if dtype is None:
        return None
    shape = tuple(cute.sym_int32() for _ in range(rank))
    stride = tuple(cute.sym_int64() for _ in range(rank))
    return make_fake_tensor(TYPES[dtype], shape, stride, assumed_align=TYPES[dtype].width // 8)

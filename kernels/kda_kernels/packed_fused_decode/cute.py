"""packed_fused_decode in CuTe DSL: ragged sequences of up to T tokens, a checkpoint for each.

Lives here: the kernel, which gives a thread block (or a cluster of them) one sequence's head, and
how a variant is traced for the compiler. Not here: what a block does with it: one token a sequence
takes fused_decode's very body (_cute/one_token.py), more take _cute/sequence.py
and _cute/token_loop.py; which variant a call needs (launch.py), how work is cut (config.py).
"""

from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from kda_kernels._cute import device, one_token, one_token_pass, sequence, token_loop
from kda_kernels._cute.token import Inputs, write_zeros
from kda_kernels._cute.tracing import MAX_GRID_Y, any_tensor, grid
from kda_kernels.packed_fused_decode.launch import TENSORS, Variant


@cute.jit
def zero_rows(
    i: Constexpr, head: Int32, first: Int32, last: Int32, step: Int32, thread: Int32
) -> None:
    """Write zeros to a head of the rows ``first``, ``first + step``, ... before ``last``."""
    for row in range(first, last, step):
        write_zeros(i.target(row, head), thread)


def bound(query_start_loc: cute.Tensor, n: Int32, rows: Int32) -> Int32:
    """Return where a sequence starts, within the packed rows whatever stands there."""
    start = Int32(device.raw(query_start_loc.iterator, Int64(n) * query_start_loc.stride[0]))
    return cutlass.max(Int32(0), cutlass.min(start, rows))


@cute.kernel
def kernel(
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
    query_start_loc: cute.Tensor,
    num_accepted_tokens: cute.Tensor,
    t1_state_indices: cute.Tensor,
    conv_bias: cute.Tensor,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    norm_eps: Float32,
    first_slot: Int64,
    v: Constexpr,
) -> None:
    """One sequence's head to a thread block, and a share of the rows that belong to none."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    x_index, y, z = cute.arch.block_idx()
    head, rank = x_index // v.blocks, x_index % v.blocks
    memory = reserve(state.element_type.width, v)
    if const_expr(v.room == 1):
        one_token.join(memory, rank, thread, v)
    else:
        sequence.join(memory, thread, v)
    device.wait_for_the_kernel_before(v.overlaps)
    n = y + z * MAX_GRID_Y
    tensors = (x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state)
    others = (output_gate, norm_weight, conv_bias, output, scale, lower_bound, norm_eps)
    i = Inputs(*tensors, *others)
    rows, slots = Int32(x.shape[0]), Int64(state.shape[0])
    sequences, most = Int32(state_indices.shape[0]), Int32(state_indices.shape[1])
    used = bound(query_start_loc, Int32(query_start_loc.shape[0]) - 1, rows)
    begin, end, turns = Int32(0), Int32(0), sequences
    accepted, own = Int32(0), Int32(-1)
    # What tells where the sequence lies is read together, not one thing after the other: every lane
    # reads a token's slot.
    if const_expr(v.by_row):
        turns = rows
        begin, end = cutlass.min(n, used), cutlass.min(n + 1, used)
    elif n < sequences:
        begin = bound(query_start_loc, n, rows)
        end = bound(query_start_loc, n + 1, rows)
        own = sequence.slot_of_lane(i, state_indices, n, lane, first_slot, v)
        if const_expr(v.room > 1):
            at = Int64(n) * num_accepted_tokens.stride[0]
            told = Int32(device.raw(num_accepted_tokens.iterator, at))
            accepted = cutlass.max(Int32(1), cutlass.min(told, most)) - 1
    length = cutlass.max(Int32(0), cutlass.min(end - begin, most))
    home, source = Int64(own), Int64(own)
    live = length > 0
    if length > 0:
        if const_expr(v.by_row):
            home, live = device.slot_and_liveness(t1_state_indices, n, slots, first_slot, v.wraps)
        else:
            if const_expr(v.room > 1):
                home = Int64(cute.arch.shuffle_sync(own, offset=0))
                source = Int64(cute.arch.shuffle_sync(own, offset=accepted))
            live = (home >= 0) & (source >= 0)
    # First, so that the bounds need no registers afterwards. Rows behind the last sequence are
    # shared out among all; rows before the first, which a caller promised not to have, are its own.
    if const_expr(not v.by_row):
        if n == 0:
            zero_rows(i, head, Int32(0), begin, Int32(1), thread)
    zero_rows(i, head, begin + cutlass.select_(live, length, Int32(0)), end, Int32(1), thread)
    zero_rows(i, head, used + n, rows, cutlass.max(turns, 1), thread)
    if live:
        if const_expr(v.room == 1):
            one_token_pass.advance(i, home, (begin, head, rank, warp, lane), memory, v)
        else:
            place = (head, rank, warp, lane)
            where = (home, source, own)
            token_loop.advance(i, (begin, length, accepted), where, place, memory, v)


def reserve(width: int, v: Variant) -> Any:  # noqa: ANN401
    """Reserve a block's shared memory, for a state of elements of ``width`` bits."""
    smem = SmemAllocator()
    if v.room > 1:
        return sequence.reserve(smem, v)
    return one_token.reserve(smem, width, v)


@cute.jit
def packed_fused_decode(
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
    query_start_loc: cute.Tensor,
    num_accepted_tokens: cute.Tensor,
    t1_state_indices: cute.Tensor | None,
    conv_bias: cute.Tensor | None,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    norm_eps: Float32,
    first_slot: Int64,
    stream: Any,  # noqa: ANN401 - the runtime's
    v: Constexpr,
) -> None:
    """Launch the kernel of a variant on the stream."""
    tensors = (x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, state_indices)
    ragged = (query_start_loc, num_accepted_tokens, t1_state_indices)
    tail = (conv_bias, output, scale, lower_bound, norm_eps, first_slot)
    sequences = x.shape[0] if const_expr(v.by_row) else state_indices.shape[0]
    kernel(*tensors, output_gate, norm_weight, *ragged, *tail, v).launch(
        grid=grid(state.shape[1] * v.blocks, cutlass.max(sequences, 1)),
        cluster=const_expr([v.blocks, 1, 1] if v.blocks > 1 else None),
        block=[v.schedule.threads, 1, 1],
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
    return packed_fused_decode, (*tensors, *scalars, stream, v)

"""fused_decode in CuTe DSL: convolution, gates, one pass over the state, gated RMSNorm.

Lives here: the kernel, which gives a thread block one row's head, and how a variant is traced for
the compiler. Not here: what a block does with it (_cute/one_token.py, one_token_pass.py), which
variant a call needs (launch.py), how work is cut (config.py).
"""

from typing import Any

import cutlass
from cutlass import Float32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from kda_kernels._cute import device, one_token, one_token_pass
from kda_kernels._cute.token import Inputs, write_zeros
from kda_kernels._cute.tracing import MAX_GRID_Y, any_tensor, grid
from kda_kernels.fused_decode.launch import TENSORS, Variant


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
    conv_bias: cute.Tensor,
    output: cute.Tensor,
    scale: Float32,
    lower_bound: Float32,
    norm_eps: Float32,
    first_slot: Int64,
    v: cutlass.Constexpr,
) -> None:
    """One row's head to a thread block."""
    thread, _, _ = cute.arch.thread_idx()
    x_index, y, z = cute.arch.block_idx()
    head, rank = x_index // v.blocks, x_index % v.blocks
    row = y + z * MAX_GRID_Y
    memory = one_token.reserve(SmemAllocator(), state.element_type.width, v)
    one_token.join(memory, rank, thread, v)
    device.wait_for_the_kernel_before(v.overlaps)
    slot, live = device.slot_and_liveness(
        state_indices, row, Int64(state.shape[0]), first_slot, v.wraps
    )
    head_of_call = (x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state)
    tail_of_call = (output_gate, norm_weight, conv_bias, output, scale, lower_bound, norm_eps)
    i = Inputs(*head_of_call, *tail_of_call)
    if row < x.shape[0]:
        if live:
            one_token_pass.advance(i, slot, (row, head, rank, thread // 32, thread % 32), memory, v)
        else:
            write_zeros(i.target(row, head), thread)


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
    kernel(*head, *tail, v).launch(
        grid=grid(state.shape[1] * v.blocks, x.shape[0]),
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
    return fused_decode, (*tensors, *scalars, stream, v)

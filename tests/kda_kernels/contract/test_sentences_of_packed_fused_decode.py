"""Every illegal call of packed_fused_decode and the sentence it gets, as one snapshot."""

import expecttest

from kda_kernels.plan import launcher


def test_every_illegal_call_gets_this_sentence(sentences):
    expecttest.assert_expected_inline(
        sentences(launcher("packed_fused_decode").operator),
        """\
x is None
  DtypeError: x must be a tensor, got NoneType
x lost its last element
  ContractError: x must be [R, 3*H*D] = [6, 768], got [6, 767] (R = 6 from x, H = 2 from state)
x has int16 elements
  DtypeError: x must be bfloat16 or float16 or float32, got int16
x is on another device
  ContractError: weight must be on meta, got cpu (from x)
x has gaps between elements
  ContractError: x must be rows at any stride that does not overlap, each row contiguous, got
    strides [1536, 2] for shape [6, 768]
x has overlapping rows
  ContractError: x must be rows at any stride that does not overlap, each row contiguous, got
    strides [767, 1] for shape [6, 768]
weight is None
  DtypeError: weight must be a tensor, got NoneType
weight lost its last element
  ContractError: weight must be [3, 4, H*D] = [3, 4, 256], got [3, 4, 255] (H = 2 from state)
weight has int16 elements
  DtypeError: weight must be float32 or bfloat16, got int16 (activation type from x)
weight is on another device
  ContractError: weight must be on cpu, got meta (from x)
weight has gaps between elements
  ContractError: weight must be tap-major (strides [4*H*D, H*D, 1]) or channel-major (strides
    [4*H*D, 1, 4]), got strides [2048, 512, 2] for shape [3, 4, 256]
conv_state is None
  DtypeError: conv_state must be a tensor, got NoneType
conv_state lost its last element
  ContractError: conv_state must be [S, 3*H*D, T+2] = [9, 768, 5], got [9, 768, 4] (T = 3 from
    state_indices, H = 2 from state, S = 9 from state)
conv_state has int16 elements
  DtypeError: conv_state must be bfloat16, got int16 (activation type from x)
conv_state is on another device
  ContractError: conv_state must be on cpu, got meta (from x)
conv_state has gaps between elements
  ContractError: conv_state must be slots at any stride that does not overlap, 8-byte aligned,
    each slot SD (strides [slot, 1, 3*H*D]) or DS (strides [slot, L, 1]), got strides [7680, 10,
    2] for shape [9, 768, 5]
conv_state is expanded
  ContractError: conv_state must be slots at any stride that does not overlap, 8-byte aligned,
    each slot SD (strides [slot, 1, 3*H*D]) or DS (strides [slot, L, 1]), got strides [0, 1,
    768] for shape [9, 768, 5]
conv_state has misaligned slots
  ContractError: conv_state must be slots at any stride that does not overlap, 8-byte aligned,
    each slot SD (strides [slot, 1, 3*H*D]) or DS (strides [slot, L, 1]), got a slot stride of
    3841 elements of 2 bytes
conv_state starts off its alignment
  ContractError: conv_state must be slots at any stride that does not overlap, 8-byte aligned,
    each slot SD (strides [slot, 1, 3*H*D]) or DS (strides [slot, L, 1]), got a pool that starts
    2 bytes past a multiple of 8
raw_gate is None
  DtypeError: raw_gate must be a tensor, got NoneType
raw_gate lost its last element
  ContractError: raw_gate must be [1, R, H, D] = [1, 6, 2, 128] or [R, H, D] = [6, 2, 128] or
    [R, H*D] = [6, 256], got [1, 6, 2, 127] (R = 6 from x, H = 2 from state)
raw_gate has int16 elements
  DtypeError: raw_gate must be bfloat16, got int16 (activation type from x)
raw_gate is on another device
  ContractError: raw_gate must be on cpu, got meta (from x)
raw_gate has gaps between elements
  ContractError: raw_gate must be rows at any stride, each row contiguous, got strides [3072,
    512, 256, 2] for shape [1, 6, 2, 128]
raw_beta is None
  DtypeError: raw_beta must be a tensor, got NoneType
raw_beta lost its last element
  ContractError: raw_beta must be [1, R, H] = [1, 6, 2] or [R, H] = [6, 2], got [1, 6, 1] (R = 6
    from x, H = 2 from state)
raw_beta has int16 elements
  DtypeError: raw_beta must be bfloat16, got int16 (activation type from x)
raw_beta is on another device
  ContractError: raw_beta must be on cpu, got meta (from x)
raw_beta has gaps between elements
  ContractError: raw_beta must be rows at any stride, each row contiguous, got strides [24, 4,
    2] for shape [1, 6, 2]
A_log is None
  DtypeError: A_log must be a tensor, got NoneType
A_log lost its last element
  ContractError: A_log must be any shape of H = 2 elements, got [1] (H = 2 from state)
A_log has int16 elements
  DtypeError: A_log must be float32 or bfloat16, got int16
A_log is on another device
  ContractError: A_log must be on cpu, got meta (from x)
A_log has gaps between elements
  ContractError: A_log must be contiguous, got strides [2] for shape [2]
dt_bias is None
  DtypeError: dt_bias must be a tensor, got NoneType
dt_bias lost its last element
  ContractError: dt_bias must be any shape of H*D = 256 elements, got [255] (H = 2 from state)
dt_bias has int16 elements
  DtypeError: dt_bias must be float32 or bfloat16, got int16
dt_bias is on another device
  ContractError: dt_bias must be on cpu, got meta (from x)
dt_bias has gaps between elements
  ContractError: dt_bias must be contiguous, got strides [2] for shape [256]
state_indices is None
  DtypeError: state_indices must be a tensor, got NoneType
state_indices lost its last element
  ContractError: conv_state must be [S, 3*H*D, T+2] = [9, 768, 4], got [9, 768, 5] (T = 2 from
    state_indices, H = 2 from state, S = 9 from state)
state_indices has int16 elements
  DtypeError: state_indices must be int32 or int64, got int16
state_indices is on another device
  ContractError: state_indices must be on cpu, got meta (from x)
state is None
  DtypeError: state must be a tensor, got NoneType
state lost its last element
  ContractError: state must be [S, H, D, D] = [9, 2, 128, 128], got [9, 2, 128, 127] (H = 2 from
    state, S = 9 from state)
state has int16 elements
  DtypeError: state must be float32 or bfloat16, got int16
state is on another device
  ContractError: state must be on cpu, got meta (from x)
state has gaps between elements
  ContractError: state must be slots at any stride that does not overlap, 16-byte aligned, each
    slot contiguous, got strides [65536, 32768, 256, 2] for shape [9, 2, 128, 128]
state is expanded
  ContractError: state must be slots at any stride that does not overlap, 16-byte aligned, each
    slot contiguous, got strides [0, 16384, 128, 1] for shape [9, 2, 128, 128]
state has misaligned slots
  ContractError: state must be slots at any stride that does not overlap, 16-byte aligned, each
    slot contiguous, got a slot stride of 32769 elements of 4 bytes
state starts off its alignment
  ContractError: state must be slots at any stride that does not overlap, 16-byte aligned, each
    slot contiguous, got a pool that starts 4 bytes past a multiple of 16
output_gate is None
  DtypeError: output_gate must be a tensor, got NoneType
output_gate lost its last element
  ContractError: output_gate must be [1, R, H, D] = [1, 6, 2, 128] or [R, H, D] = [6, 2, 128] or
    [R, H*D] = [6, 256], got [1, 6, 2, 127] (R = 6 from x, H = 2 from state)
output_gate has int16 elements
  DtypeError: output_gate must be bfloat16, got int16 (activation type from x)
output_gate is on another device
  ContractError: output_gate must be on cpu, got meta (from x)
output_gate has gaps between elements
  ContractError: output_gate must be rows at any stride, each row contiguous, got strides [3072,
    512, 256, 2] for shape [1, 6, 2, 128]
norm_weight is None
  DtypeError: norm_weight must be a tensor, got NoneType
norm_weight lost its last element
  ContractError: norm_weight must be [D] = [128], got [127]
norm_weight has int16 elements
  DtypeError: norm_weight must be float32, got int16
norm_weight is on another device
  ContractError: norm_weight must be on cpu, got meta (from x)
norm_weight has gaps between elements
  ContractError: norm_weight must be contiguous, got strides [2] for shape [128]
query_start_loc is None
  DtypeError: query_start_loc must be a tensor, got NoneType
query_start_loc lost its last element
  ContractError: query_start_loc must be [N+1] = [3], got [2] (N = 2 from state_indices)
query_start_loc has int16 elements
  DtypeError: query_start_loc must be int32, got int16
query_start_loc is on another device
  ContractError: query_start_loc must be on cpu, got meta (from x)
num_accepted_tokens is None
  DtypeError: num_accepted_tokens must be a tensor, got NoneType
num_accepted_tokens lost its last element
  ContractError: num_accepted_tokens must be [N] = [2], got [1] (N = 2 from state_indices)
num_accepted_tokens has int16 elements
  DtypeError: num_accepted_tokens must be int32, got int16
num_accepted_tokens is on another device
  ContractError: num_accepted_tokens must be on cpu, got meta (from x)
lower_bound is 0.0
  ContractError: lower_bound must be finite and < 0 (or None for the softplus gate), got 0.0
lower_bound is 1.0
  ContractError: lower_bound must be finite and < 0 (or None for the softplus gate), got 1.0
lower_bound is nan
  ContractError: lower_bound must be finite and < 0 (or None for the softplus gate), got nan
lower_bound is -inf
  ContractError: lower_bound must be finite and < 0 (or None for the softplus gate), got -inf
norm_eps is -1e-05
  ContractError: norm_eps must be finite and >= 0, got -1e-05
norm_eps is nan
  ContractError: norm_eps must be finite and >= 0, got nan
norm_eps is inf
  ContractError: norm_eps must be finite and >= 0, got inf
norm_eps is None
  DtypeError: norm_eps must be finite and >= 0, got None
t1_state_indices lost its last element
  ContractError: t1_state_indices must be [R] = [6], got [5] (R = 6 from x)
t1_state_indices has int16 elements
  DtypeError: t1_state_indices must be int32 or int64, got int16
t1_state_indices is on another device
  ContractError: t1_state_indices must be on cpu, got meta (from x)
conv_bias lost its last element
  ContractError: conv_bias must be [3*H*D] = [768], got [767] (H = 2 from state)
conv_bias has int16 elements
  DtypeError: conv_bias must be float32, got int16
conv_bias is on another device
  ContractError: conv_bias must be on cpu, got meta (from x)
conv_bias has gaps between elements
  ContractError: conv_bias must be contiguous, got strides [2] for shape [768]
scale is nan
  ContractError: scale must be a finite number, got nan
scale is inf
  ContractError: scale must be a finite number, got inf
first_slot is -1
  ContractError: first_slot must be an integer >= 0 (or None for PyTorch's negative indices),
    got -1
state_layout is kx
  ContractError: state_layout must be 'vk' or 'kv', got 'kx'
state_layout is None
  DtypeError: state_layout must be 'vk' or 'kv', got None""",
    )

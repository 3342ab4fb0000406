"""Every illegal call of packed_decode and the sentence it gets, as one snapshot."""

import expecttest

from kda_kernels.plan import launcher


def test_every_illegal_call_gets_this_sentence(sentences):
    expecttest.assert_expected_inline(
        sentences(launcher("packed_decode").operator),
        """\
mixed_qkv is None
  DtypeError: mixed_qkv must be a tensor, got NoneType
mixed_qkv lost its last element
  ContractError: mixed_qkv must be [B, 3*H*D] = [3, 768], got [3, 767] (B = 3 from mixed_qkv, H
    = 2 from state)
mixed_qkv has int16 elements
  DtypeError: mixed_qkv must be bfloat16 or float16 or float32, got int16
mixed_qkv is on another device
  ContractError: raw_gate must be on meta, got cpu (from mixed_qkv)
mixed_qkv has gaps between elements
  ContractError: mixed_qkv must be rows at any stride that does not overlap, each row
    contiguous, got strides [1536, 2] for shape [3, 768]
mixed_qkv has overlapping rows
  ContractError: mixed_qkv must be rows at any stride that does not overlap, each row
    contiguous, got strides [767, 1] for shape [3, 768]
raw_gate is None
  DtypeError: raw_gate must be a tensor, got NoneType
raw_gate lost its last element
  ContractError: raw_gate must be [B, H*D] = [3, 256] or [B, H, D] = [3, 2, 128] or [1, B, H, D]
    = [1, 3, 2, 128], got [3, 255] (B = 3 from mixed_qkv, H = 2 from state)
raw_gate has int16 elements
  DtypeError: raw_gate must be bfloat16, got int16 (activation type from mixed_qkv)
raw_gate is on another device
  ContractError: raw_gate must be on cpu, got meta (from mixed_qkv)
raw_gate has gaps between elements
  ContractError: raw_gate must be rows at any stride, each row contiguous, got strides [512, 2]
    for shape [3, 256]
raw_beta is None
  DtypeError: raw_beta must be a tensor, got NoneType
raw_beta lost its last element
  ContractError: raw_beta must be [B, H] = [3, 2] or [1, B, H] = [1, 3, 2], got [3, 1] (B = 3
    from mixed_qkv, H = 2 from state)
raw_beta has int16 elements
  DtypeError: raw_beta must be bfloat16, got int16 (activation type from mixed_qkv)
raw_beta is on another device
  ContractError: raw_beta must be on cpu, got meta (from mixed_qkv)
raw_beta has gaps between elements
  ContractError: raw_beta must be rows at any stride, each row contiguous, got strides [4, 2]
    for shape [3, 2]
A_log is None
  DtypeError: A_log must be a tensor, got NoneType
A_log lost its last element
  ContractError: A_log must be any shape of H = 2 elements, got [1] (H = 2 from state)
A_log has int16 elements
  DtypeError: A_log must be float32 or bfloat16, got int16
A_log is on another device
  ContractError: A_log must be on cpu, got meta (from mixed_qkv)
A_log has gaps between elements
  ContractError: A_log must be contiguous, got strides [2] for shape [2]
dt_bias is None
  DtypeError: dt_bias must be a tensor, got NoneType
dt_bias lost its last element
  ContractError: dt_bias must be any shape of H*D = 256 elements, got [255] (H = 2 from state)
dt_bias has int16 elements
  DtypeError: dt_bias must be float32 or bfloat16, got int16
dt_bias is on another device
  ContractError: dt_bias must be on cpu, got meta (from mixed_qkv)
dt_bias has gaps between elements
  ContractError: dt_bias must be contiguous, got strides [2] for shape [256]
state is None
  DtypeError: state must be a tensor, got NoneType
state lost its last element
  ContractError: state must be [S, H, D, D] = [9, 2, 128, 128], got [9, 2, 128, 127] (H = 2 from
    state, S = 9 from state)
state has int16 elements
  DtypeError: state must be float32 or bfloat16, got int16
state is on another device
  ContractError: state must be on cpu, got meta (from mixed_qkv)
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
state_indices lost its last element
  ContractError: state_indices must be [B] = [3], got [2] (B = 3 from mixed_qkv)
state_indices has int16 elements
  DtypeError: state_indices must be int32 or int64, got int16
state_indices is on another device
  ContractError: state_indices must be on cpu, got meta (from mixed_qkv)
scale is nan
  ContractError: scale must be a finite number, got nan
scale is inf
  ContractError: scale must be a finite number, got inf
lower_bound is 0.0
  ContractError: lower_bound must be finite and < 0 (or None for the softplus gate), got 0.0
lower_bound is 1.0
  ContractError: lower_bound must be finite and < 0 (or None for the softplus gate), got 1.0
lower_bound is nan
  ContractError: lower_bound must be finite and < 0 (or None for the softplus gate), got nan
lower_bound is -inf
  ContractError: lower_bound must be finite and < 0 (or None for the softplus gate), got -inf
first_slot is -1
  ContractError: first_slot must be an integer >= 0 (or None for PyTorch's negative indices),
    got -1
state_layout is kx
  ContractError: state_layout must be 'vk' or 'kv', got 'kx'
state_layout is None
  DtypeError: state_layout must be 'vk' or 'kv', got None
output_dtype is int32
  DtypeError: output_dtype must be the activation type or float32, got torch.int32""",
    )

"""The decode step in plain PyTorch, as a model would spell it: what Inductor alone is given.

Lives here: functions over pools, one per operator, for torch.compile. Not here: references
(kda_kernels/<op>/reference.py), which serve correctness and are not written to compile well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIM = 128


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _advance(
    qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    state_layout: str,
) -> Tensor:
    """One delta-rule step over the pool; returns o in float32, [B, H, 128]."""
    rows, heads = raw_beta.shape
    q, k, v = qkv.float().view(rows, 3, heads, HEAD_DIM).unbind(1)
    q, k = _normalise(q) * HEAD_DIM**-0.5, _normalise(k)
    a = (raw_gate.float() + dt_bias).view(rows, heads, HEAD_DIM)
    decay = torch.exp(-5.0 * torch.sigmoid(torch.exp(A_log)[:, None] * a))
    beta = torch.sigmoid(raw_beta.float())[..., None]
    S = state[state_indices].float()
    if state_layout == "vk":
        S = S * decay[..., None, :]
        u = beta * (v - (S * k[..., None, :]).sum(-1))
        S = S + u[..., :, None] * k[..., None, :]
        o = (S * q[..., None, :]).sum(-1)
    else:
        S = S * decay[..., :, None]
        u = beta * (v - (S * k[..., :, None]).sum(-2))
        S = S + k[..., :, None] * u[..., None, :]
        o = (S * q[..., :, None]).sum(-2)
    state[state_indices] = S.to(state.dtype)
    return o


def packed_step(
    mixed_qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    state_layout: str,
) -> Tensor:
    """What packed_decode does; returns [B, 1, H, 128] in mixed_qkv's type."""
    o = _advance(mixed_qkv, raw_gate, raw_beta, A_log, dt_bias, state, state_indices, state_layout)
    return o.to(mixed_qkv.dtype)[:, None]


def fused_step(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    state_layout: str,
) -> Tensor:
    """What fused_decode does; returns [1, B, H, 128] in x's type."""
    rows, heads = raw_beta.shape
    taps = weight.transpose(1, 2).reshape(-1, 4)
    columns = torch.cat([conv_state[state_indices], x[..., None]], -1)
    conv_state[state_indices] = columns[..., 1:]
    qkv = F.silu((columns.float() * taps).sum(-1)).to(x.dtype)
    o = _advance(qkv, raw_gate, raw_beta, A_log, dt_bias, state, state_indices, state_layout)
    o = o.to(x.dtype).float()
    o = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + 1e-5) * norm_weight
    gate = torch.sigmoid(output_gate.float()).view(rows, heads, HEAD_DIM)
    return (o * gate).to(x.dtype)[None]

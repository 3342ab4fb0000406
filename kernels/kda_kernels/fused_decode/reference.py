"""fused_decode in eager PyTorch, written to be read: convolution, recurrence, gated norm.

Lives here: the convolution of one token and the gated RMSNorm. The recurrence is packed_decode's.
Not here: anything fast. ``dtype`` selects the arithmetic, float32 or float64; roundings to the
activation type happen where the contract says, whatever the arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_kernels.packed_decode.reference import HEAD_DIM, decay, live_slots, recur


def convolve(
    history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return silu of the width-4 convolution, rounded to x's type, in the arithmetic's type.

    Args:
        history: [..., C, 3], oldest first.
        x: [..., C] current token.
        weight: [3, 4, H*D]; tap 3 multiplies x.
        bias: [C] or None.
        dtype: type of the arithmetic.
    """
    taps = weight.transpose(1, 2).reshape(-1, 4).to(dtype)
    columns = torch.cat([history.to(dtype), x.to(dtype).unsqueeze(-1)], -1)
    mixed = (columns * taps).sum(-1)
    if bias is not None:
        mixed = mixed + bias.to(dtype)
    return F.silu(mixed).to(x.dtype).to(dtype)


def gated_norm(
    o: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Return RMSNorm(o rounded to the activation type) * weight * sigmoid(output_gate)."""
    o = o.to(activation).to(dtype)
    scaled = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
    return scaled * norm_weight.to(dtype) * torch.sigmoid(output_gate.to(dtype))


def fused_decode(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor | None,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    lower_bound: float | None,
    norm_eps: float,
    conv_bias: Tensor | None,
    scale: float | None,
    first_slot: int | None,
    state_layout: str,
    output: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Advance the live rows' slots of both pools in place and fill ``output``.

    Shapes and types as in the contract; with ``dtype`` float64 the state pool and the output may
    be float64 too, and then the state and the result are not rounded.
    """
    rows, (slots, heads) = x.shape[0], state.shape[:2]
    slot = live_slots(state_indices, rows, slots, first_slot)
    live = (slot >= 0).nonzero().squeeze(1)
    output.zero_()
    if live.numel() == 0:
        return
    slot, per_head = slot[live], (rows, heads, HEAD_DIM)
    window = conv_state[slot]
    mixed = convolve(window[..., -3:], x[live], weight, conv_bias, dtype)
    conv_state[slot] = torch.cat([window[..., 1:], x[live].unsqueeze(-1)], -1)
    d = decay(raw_gate.reshape(per_head)[live], A_log, dt_bias, lower_bound, dtype)
    beta = torch.sigmoid(raw_beta.reshape(rows, heads)[live].to(dtype))
    S = state[slot].to(dtype)
    qkv = mixed.view(-1, 3, heads, HEAD_DIM)
    o, S = recur(qkv, d, beta, S if state_layout == "vk" else S.mT, scale)
    state[slot] = (S if state_layout == "vk" else S.mT).to(state.dtype)
    gate = output_gate.reshape(per_head)[live]
    y = gated_norm(o, gate, norm_weight, norm_eps, x.dtype, dtype)
    output[0, live] = y.to(output.dtype)

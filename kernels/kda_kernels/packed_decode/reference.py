"""packed_decode in eager PyTorch, written to be read: the contract's mathematics, line by line.

Lives here: the recurrence of one token (gate, beta, delta rule) and the rule that says which rows
are live; the other references build on them. Not here: anything fast. ``dtype`` selects the
arithmetic: float32 as the kernels compute, float64 to measure their error.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIM = 128
L2_EPS = 1e-6


def live_slots(indices: Tensor | None, rows: int, slots: int, first_slot: int | None) -> Tensor:
    """Return the slot of every row as int64, -1 where the row is null.

    Live is ``first_slot <= index < slots``; with first_slot None, ``-slots <= index < slots`` and
    negative indices count from the end. Without indices row i uses slot i.
    """
    if indices is None:
        return torch.arange(rows)
    index = indices.to(torch.int64)
    if first_slot is None:
        index = torch.where((index < 0) & (index >= -slots), index + slots, index)
        first_slot = 0
    return torch.where((index >= first_slot) & (index < slots), index, -1)


def decay(
    raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, dtype: torch.dtype
) -> Tensor:
    """Return exp(g) per key channel, shape of raw_gate [..., H, D]."""
    heads = raw_gate.shape[-2]
    a = raw_gate.to(dtype) + dt_bias.to(dtype).view(heads, HEAD_DIM)
    rate = A_log.to(dtype).view(heads, 1).exp()
    if lower_bound is None:
        return torch.exp(-rate * F.softplus(a, threshold=20.0))
    return torch.exp(lower_bound * torch.sigmoid(rate * a))


def normalise(x: Tensor) -> Tensor:
    """Return x divided by its L2 norm over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def recur(
    qkv: Tensor, d: Tensor, beta: Tensor, S: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Advance the state by one token.

    Args:
        qkv: [..., 3, H, D] after the convolution, in the arithmetic's type.
        d: [..., H, D] decay.
        beta: [..., H] after the sigmoid.
        S: [..., H, V, K] state before the token.
        scale: factor of q, None for D**-0.5.

    Returns:
        o [..., H, D] and the state after the token.
    """
    q, k, v = qkv.unbind(-3)
    q = normalise(q) * (HEAD_DIM**-0.5 if scale is None else scale)
    k = normalise(k)
    S = S * d.unsqueeze(-2)
    u = v - (S * k.unsqueeze(-2)).sum(-1)
    S = S + (beta.unsqueeze(-1) * u).unsqueeze(-1) * k.unsqueeze(-2)
    return (S * q.unsqueeze(-2)).sum(-1), S


def packed_decode(
    mixed_qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    scale: float | None,
    lower_bound: float | None,
    first_slot: int | None,
    state_layout: str,
    output: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Advance the live rows' slots of ``state`` in place and fill ``output``.

    Shapes and types as in the contract; with ``dtype`` float64 the pool and the output may be
    float64 too, and then nothing is rounded.
    """
    rows, (slots, heads) = mixed_qkv.shape[0], state.shape[:2]
    slot = live_slots(state_indices, rows, slots, first_slot)
    live = (slot >= 0).nonzero().squeeze(1)
    output.zero_()
    if live.numel() == 0:
        return
    qkv = mixed_qkv[live].to(dtype).view(-1, 3, heads, HEAD_DIM)
    d = decay(raw_gate.reshape(rows, heads, HEAD_DIM)[live], A_log, dt_bias, lower_bound, dtype)
    beta = torch.sigmoid(raw_beta.reshape(rows, heads)[live].to(dtype))
    S = state[slot[live]].to(dtype)
    o, S = recur(qkv, d, beta, S if state_layout == "vk" else S.mT, scale)
    state[slot[live]] = (S if state_layout == "vk" else S.mT).to(state.dtype)
    output[live, 0] = o.to(output.dtype)

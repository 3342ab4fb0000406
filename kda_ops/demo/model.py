"""A small Kimi-Linear-style language model in plain PyTorch, decoding one token a row.

Nothing here knows of kda_ops: this is how a model is written before anyone thinks of kernels.
Sequences live in slots of two pools per layer: `state`, the delta-rule memory, and `window`, the
last inputs of the short convolution. Running it is decode.py's business.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = 128  # width of a head, for keys and for values


class DeltaAttention(nn.Module):
    """Kimi delta attention, one token a row: x [B, hidden], slots [B] -> [B, hidden]."""

    state: Tensor
    window: Tensor

    def __init__(self, hidden: int, heads: int, slots: int, state_dtype: torch.dtype) -> None:
        super().__init__()
        width = heads * D
        self.heads = heads
        self.sizes = (
            3 * width,
            width,
            width,
            heads,
        )  # q, k, v | decay | output gate | write strength
        self.project = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.conv = nn.Parameter(torch.randn(3 * width, 4) / 2)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.empty(width).uniform_(-7, -2))
        self.norm = nn.Parameter(torch.ones(D))
        self.out = nn.Linear(width, hidden, bias=False)
        self.register_buffer("state", torch.zeros(slots, heads, D, D, dtype=state_dtype))
        self.register_buffer("window", torch.zeros(slots, 3 * width, 3))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """Move the rows' slots on by one token."""
        heads = (-1, self.heads, D)
        qkv, decay, gate, beta = self.project(x).split(self.sizes, dim=-1)

        # Short causal convolution over the three inputs before this one and this one.
        taps = torch.cat([self.window[slots], qkv.unsqueeze(-1)], dim=-1)
        self.window[slots] = taps[..., 1:]
        q, k, v = F.silu((taps * self.conv).sum(-1)).chunk(3, dim=-1)
        q = unit(q.view(heads)) * D**-0.5
        k = unit(k.view(heads))
        v = v.view(heads)

        # How much of the memory each key channel keeps, and how strongly this token writes.
        a = (decay + self.dt_bias).view(heads)
        keep = torch.exp(-self.A_log.exp()[:, None] * F.softplus(a))
        beta = torch.sigmoid(beta)

        # Delta rule on the memory [B, H, K, V]: fade it, correct what it says of k, ask it for q.
        S = self.state[slots].to(v.dtype) * keep[..., None]
        u = beta[..., None] * (v - (S * k[..., None]).sum(-2))
        S = S + k[..., None] * u[..., None, :]
        o = (S * q[..., None]).sum(-2)
        self.state[slots] = S.to(self.state.dtype)

        o = F.rms_norm(o, (D,), self.norm, 1e-5) * torch.sigmoid(gate.reshape(heads))
        return self.out(o.flatten(1))


def unit(x: Tensor) -> Tensor:
    """The vectors of x, scaled to length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class GatedMLP(nn.Module):
    """x [B, hidden] -> [B, hidden]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Open a gate on twice the width."""
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, hidden: int, heads: int, slots: int, state_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(hidden)
        self.attention = DeltaAttention(hidden, heads, slots, state_dtype)
        self.norm_mlp = nn.RMSNorm(hidden)
        self.mlp = GatedMLP(hidden)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """Mix along the sequence, then along the channels."""
        x = x + self.attention(self.norm_attention(x), slots)
        return x + self.mlp(self.norm_mlp(x))


class DeltaLM(nn.Module):
    """Language model: tokens [B], slots [B] -> logits [B, vocabulary]; advances the pools."""

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int,
        heads: int,
        slots: int,
        hidden: int = 128,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, slots, state_dtype) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Say how likely every token is to come next."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, slots)
        return self.head(self.norm(x))

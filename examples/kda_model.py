"""A small language model that decodes with fused_kda_decode: what the other examples run.

Lives here: layers whose weights keep heads on an axis of their own, so that ranks can share them
out. Not here: slots, graphs and ranks, and what real models have besides (MLPs, other attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kda_ops

D = 128


class Weights(NamedTuple):
    """Weights of the operator for H heads, and of the projections in front of it."""

    qkv: Tensor  # [3, H, 128, hidden]
    decay: Tensor  # [H, 128, hidden]
    gate: Tensor  # [H, 128, hidden]
    beta: Tensor  # [H, hidden]
    conv: Tensor  # [3, 4, H, 128]: part, tap, head, channel
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H, 128]
    norm: Tensor  # [128]


def delta_attention(x: Tensor, w: Weights, slots: Tensor, pools: kda_ops.LayerPools) -> Tensor:
    """Advance one layer by one token a row: x [B, hidden] -> [B, H*128], H heads of this process.

    Null rows, those at index -1, give zeros and leave the pools alone.
    """
    by_head = (-1, w.A_log.shape[0], D)
    output = kda_ops.fused_kda_decode(
        F.linear(x, w.qkv.flatten(0, 2)),
        w.conv.flatten(2),
        pools.window,
        F.linear(x, w.decay.flatten(0, 1)).view(by_head),
        F.linear(x, w.beta)[None],
        w.A_log,
        w.dt_bias.flatten(),
        slots,
        pools.state,
        F.linear(x, w.gate.flatten(0, 1)).view(by_head),
        w.norm,
    )
    return output[0].flatten(1)


Attention = Callable[[Tensor, Weights, Any, kda_ops.LayerPools], Tensor]
"""What delta_attention does, for one kind of batch: there slots [B], one token each."""


class DeltaLayer(nn.Module):
    """Delta attention behind a norm, and a residual: x [B, hidden] -> [B, hidden]."""

    def __init__(self, hidden: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()

        def weight(*shape: int, scale: float = hidden**-0.5) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * scale)

        self.norm_in = nn.RMSNorm(hidden)
        self.qkv = weight(3, heads, D, hidden)
        self.decay = weight(heads, D, hidden)
        self.gate = weight(heads, D, hidden)
        self.beta = weight(heads, hidden)
        self.conv = weight(3, 4, heads, D, scale=0.5)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.empty(heads, D).uniform_(-7, -2))
        self.norm = nn.Parameter(torch.ones(D))
        self.out = weight(hidden, heads * D, scale=(heads * D) ** -0.5)
        for name in ("qkv", "decay", "gate", "beta", "out"):
            getattr(self, name).data = getattr(self, name).data.to(dtype)
        self.norm_in.to(dtype)

    def forward(
        self,
        x: Tensor,
        batch: Any,  # noqa: ANN401 - what ``attend`` takes
        pools: kda_ops.LayerPools,
        attend: Attention,
    ) -> Tensor:
        """Move the states of a batch on by its tokens."""
        return x + F.linear(attend(self.norm_in(x), self.weights, batch, pools), self.out)

    @property
    def weights(self) -> Weights:
        """What the operator needs; everything in it but the norm belongs to one head each."""
        return Weights(*(getattr(self, name) for name in Weights._fields))


class DeltaModel(nn.Module):
    """Tokens [B] and slots [B] to logits [B, vocabulary]; states live in a StateCache."""

    def __init__(
        self, vocabulary: int, hidden: int, spec: kda_ops.StateSpec, *, seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        dtype = spec.window_dtype
        self.embed = nn.Embedding(vocabulary, hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            DeltaLayer(hidden, spec.heads, dtype) for _ in range(spec.layers)
        )
        self.norm = nn.RMSNorm(hidden, dtype=dtype)
        self.head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        self.requires_grad_(False)

    def forward(
        self,
        batch: Any,  # noqa: ANN401 - what ``attend`` takes
        tokens: Tensor,
        cache: kda_ops.StateCache,
        attend: Attention = delta_attention,
    ) -> Tensor:
        """Say how likely every token is to come next; ``batch`` says which states they move."""
        x = self.embed(tokens)
        for layer, pools in zip(self.layers, cache.layers, strict=True):
            x = layer(x, batch, pools, attend)
        return self.head(self.norm(x))

    def greedy(self, cache: kda_ops.StateCache) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the step ``(slots, tokens) -> next tokens`` on a cache."""
        return lambda slots, tokens: self(slots, tokens, cache).argmax(-1)

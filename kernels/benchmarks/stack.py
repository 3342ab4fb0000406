"""A stack of delta-attention layers with the projections of Kimi K3, decoding one token a row.

Lives here: the layer in plain PyTorch, the same layer around the operator, and the stack. Not here:
how it is compiled, captured and timed (bench_model.py), the plain step itself (plain.py).

A layer is what one tensor-parallel rank of K3 runs: a norm; from the hidden state of 7168 one
projection to q, k, v and a full-rank output gate, to the 128 numbers behind the decay gate and to
beta; the decay gate's second projection; convolution, delta rule and gated norm; the projection
back; a residual. 12 heads are K3's 96 over 8 ranks, 32 over 3. Experts and attention layers are
left out: the stack is there to show the delta-attention layers. So is the sum over ranks, unless a
caller brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import kda_ops
import plain

D = 128
"""Width of a head."""

PROJECTIONS = 3
"""Matrix products of a layer: into the heads, the decay gate's second, out of the heads."""


@dataclass(frozen=True)
class Sizes:
    """A stack: what is built, and for how many rows at most.

    ``hidden`` and ``rank`` (of the decay gate) are those of K3.
    """

    layers: int = 24
    heads: int = 12
    rows: int = 32
    state_dtype: torch.dtype = torch.float32
    hidden: int = 7168
    rank: int = 128
    device: str = "cuda"
    activation: torch.dtype = torch.bfloat16


class Layer(nn.Module):
    """x [B, hidden], slots [B] -> [B, hidden]; moves the slots of its two pools on by a token."""

    state: Tensor
    window: Tensor

    def __init__(self, sizes: Sizes) -> None:
        """Make weights of the size that keeps activations near one, and pools for every row."""
        super().__init__()
        width, self.heads = sizes.heads * D, sizes.heads
        self.sizes = (3 * width, width, sizes.rank, sizes.heads)  # q k v | gate | decay | beta
        made: dict[str, Any] = {"device": sizes.device, "dtype": sizes.activation}
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5, **made)
        self.project = nn.Linear(sizes.hidden, sum(self.sizes), bias=False, **made)
        self.decay = nn.Linear(sizes.rank, width, bias=False, **made)
        self.out = nn.Linear(width, sizes.hidden, bias=False, **made)
        exact: dict[str, Any] = {"device": sizes.device, "dtype": torch.float32}
        # As a depthwise convolution keeps them: a channel's four taps side by side.
        self.taps = nn.Parameter(torch.randn(3, width, 4, **exact) / 2)
        self.A_log = nn.Parameter(torch.randn(sizes.heads, **exact) / 2)
        self.dt_bias = nn.Parameter(torch.randn(width, **exact))
        self.head_norm = nn.Parameter(torch.ones(D, **exact))
        pool = (sizes.rows, sizes.heads, D, D)
        self.register_buffer(
            "state", torch.empty(pool, device=sizes.device, dtype=sizes.state_dtype)
        )
        window = torch.empty(sizes.rows, 3, 3 * width, **made).transpose(1, 2)
        self.register_buffer("window", window)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """Run the layer in plain PyTorch."""
        qkv, gate, decay, beta = self.project(self.norm(x)).split(self.sizes, dim=-1)
        step = (qkv, self.taps.transpose(1, 2), self.window, self.decay(decay), beta)
        parameters = (self.A_log, self.dt_bias, self.state, slots)
        o = plain.fused_step(*step, *parameters, gate, self.head_norm, "vk")
        return x + self.out(o.flatten(-2)[0])

    def with_operator(
        self, x: Tensor, slots: Tensor, total: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run the layer around the operator, as a serving engine calls it.

        Args:
            x: [B, hidden].
            slots: [B].
            total: the sum over ranks of what this rank's heads are projected to, if it has a part
                of the heads.
        """
        qkv, gate, decay, beta = self.project(self.norm(x)).split(self.sizes, dim=-1)
        heads = (1, x.shape[0], self.heads, D)
        o = kda_ops.fused_kda_decode(
            qkv,
            self.taps.transpose(1, 2),
            self.window,
            self.decay(decay).view(heads),
            beta[None],
            self.A_log,
            self.dt_bias,
            slots,
            self.state,
            gate.unflatten(-1, heads[2:]),
            self.head_norm,
            first_slot=0,
        )
        out = self.out(o.flatten(-2)[0])
        return x + (out if total is None else total(out))


class Stack(nn.Module):
    """Layers one behind the other, with the inputs of a step."""

    def __init__(self, sizes: Sizes) -> None:
        """Build everything from one seed, the same at every call."""
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.requires_grad_(False).eval()
        self.x = torch.randn(sizes.rows, sizes.hidden, device=sizes.device).to(sizes.activation)
        self.slots = torch.randperm(sizes.rows, device=sizes.device)

    def reset(self) -> None:
        """Fill every pool with the same random numbers as before."""
        device = next(self.buffers()).device
        generator = torch.Generator(device).manual_seed(1)
        for pool in self.buffers():
            pool.normal_(generator=generator)

"""A layer with the attributes and the calls of flash-linear-attention's KimiDeltaAttention.

The library needs Triton to be imported at all, so what it computes is written out here in PyTorch,
and tests put the library's own functions in where it is installed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_ops.integrations.fla import Windows, use_fused_decode

D, HIDDEN = 128, 64


class ShortConvolution(nn.Conv1d):
    """A causal depthwise convolution with SiLU that returns its last four tokens."""

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool, activation: str) -> None:
        pad = kernel_size - 1
        super().__init__(
            hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=pad
        )
        self.activation = activation

    def forward(self, x: Tensor, cache: Tensor | None, **_: Any) -> tuple[Tensor, Tensor]:
        width = self.kernel_size[0]
        past = x.new_zeros(x.shape[0], x.shape[2], width) if cache is None else cache
        tokens = torch.cat([past, x.transpose(1, 2)], -1)
        weight = self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        y = F.conv1d(tokens[..., 1:].float(), weight, bias, groups=x.shape[2])
        return F.silu(y).to(x.dtype).transpose(1, 2), tokens[..., -width:].contiguous()


class FusedRMSNormGated(nn.Module):
    """RMSNorm with a gate behind it."""

    def __init__(self, hidden_size: int, eps: float, activation: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps, self.activation = eps, activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float() * gate.float().sigmoid()).to(x.dtype)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any) -> Any:
    """One token after the other, states [B, H, K, V]."""
    S, outputs = given["initial_state"], []
    for q_t, k_t, v_t, d, b in zip(*(x.unbind(1) for x in (q, k, v, g.exp(), beta)), strict=True):
        S = S * d[..., None]
        u = b[..., None] * (v_t - (S * k_t[..., None]).sum(-2))
        S = S + k_t[..., None] * u[..., None, :]
        outputs.append((S * q_t[..., None]).sum(-2) * D**-0.5)
    return torch.stack(outputs, 1), S


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    lower_bound: float | None,
    state_v_first: bool = False,
    naive: Callable[..., Any] = recurrence,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The gates and norms of a step, states [B, H, V, K], around a recurrence without them."""
    dtype = v.dtype
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    a = g + dt_bias.float().view(g.shape[-2:])
    rate = A_log.float().exp()[:, None]
    g = -rate * F.softplus(a) if lower_bound is None else lower_bound * torch.sigmoid(rate * a)
    S = q.new_zeros(q.shape[0], q.shape[2], D, D) if initial_state is None else initial_state
    S = S.transpose(-1, -2)
    o, S = naive(q, k, v, g, beta.sigmoid(), initial_state=S, output_final_state=True)
    return o.to(dtype), S.transpose(-1, -2).contiguous()


PARTS = SimpleNamespace(
    conv=ShortConvolution, norm=FusedRMSNormGated, recurrent=fused_recurrent_kda
)


class KimiDeltaAttention(nn.Module):
    """Projections, three convolutions, the recurrence and the gated norm."""

    def __init__(self, parts: Any = PARTS, heads: int = 2, **changes: Any) -> None:
        super().__init__()
        options = {"lower_bound": None, "bias": False, "conv_size": 4, "output": "sigmoid"}
        chosen = SimpleNamespace(**(options | changes))
        width = heads * D
        self.num_heads = self.num_v_heads = heads
        self.head_k_dim = self.head_v_dim = D
        self.use_short_conv, self.allow_neg_eigval, self.layer_idx = True, False, 0
        self.lower_bound, self.conv_size = chosen.lower_bound, chosen.conv_size
        for name in "qkv":
            setattr(self, f"{name}_proj", nn.Linear(HIDDEN, width, bias=False))
            conv = parts.conv(width, chosen.conv_size, bias=chosen.bias, activation="silu")
            setattr(self, f"{name}_conv1d", conv)
        for name, bias in (("f", False), ("g", True)):
            pair = nn.Linear(HIDDEN, D, bias=False), nn.Linear(D, width, bias=bias)
            setattr(self, f"{name}_proj", nn.Sequential(*pair))
        self.b_proj = nn.Linear(HIDDEN, heads, bias=False)
        self.A_log = nn.Parameter(torch.randn(heads) * 0.5)
        self.dt_bias = nn.Parameter(torch.randn(width))
        self.o_norm = parts.norm(D, eps=1e-5, activation=chosen.output)
        self.o_proj = nn.Linear(width, HIDDEN, bias=False)
        self.recurrent, self.calls = parts.recurrent, 0

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        self.calls += 1
        held = past_key_values
        state = held[self.layer_idx] if held is not None and len(held) > self.layer_idx else None
        windows = (None,) * 3 if state is None else state["conv_state"]
        mixed, kept = [], []
        for name, window in zip("qkv", windows, strict=True):
            conv, x = getattr(self, f"{name}_conv1d"), getattr(self, f"{name}_proj")(hidden_states)
            x, moved = conv(x=x, cache=window, output_final_state=use_cache)
            mixed.append(x.unflatten(-1, (-1, D)))
            kept.append(moved)
        q, k, v = mixed
        o, recurrent_state = self.recurrent(
            q=q,
            k=k,
            v=v,
            g=self.f_proj(hidden_states).unflatten(-1, (-1, D)),
            beta=self.b_proj(hidden_states),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            initial_state=None if state is None else state["recurrent_state"],
            output_final_state=use_cache,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=self.lower_bound,
            state_v_first=True,
        )
        if past_key_values is not None:
            states = {"recurrent_state": recurrent_state, "conv_state": tuple(kept)}
            past_key_values.update(**states, layer_idx=self.layer_idx, offset=o.shape[1])
        o = self.o_norm(o, self.g_proj(hidden_states).unflatten(-1, (-1, D)))
        return self.o_proj(o.flatten(-2)), None, past_key_values


class Cache:
    """States of each layer, as in flash-linear-attention's caches."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.seen = 0

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.states[layer_idx]

    def update(self, layer_idx: int, offset: int, **states: Any) -> None:
        if layer_idx == len(self.states):
            self.states.append({})
        self.states[layer_idx].update(states)
        self.seen += offset


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    """Compare against the largest element."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    tolerance = TOLERANCE[wanted.dtype] if tolerance is None else tolerance
    worst = (found.float() - wanted.float()).abs().max()
    assert worst <= tolerance * (1 + wanted.float().abs().max())


def compare(
    layer: Any, rows: int = 2, steps: int = 5, tolerance: float | None = None, new: Any = Cache
) -> None:
    """Decode with a layer as it is and with a copy of it that has been exchanged."""
    weight, fused = layer.o_proj.weight, copy.deepcopy(layer)
    caches = new(), new()
    with use_fused_decode(fused), torch.no_grad():
        for length in (3, *[1] * steps, 2, 1):
            x = torch.randn(rows, length, weight.shape[0]).to(weight.device, weight.dtype)
            pairs = zip((layer, fused), caches, strict=True)
            wanted, found = (each(x, past_key_values=c, use_cache=True)[0] for each, c in pairs)
            close(found, wanted, tolerance)
    one, other = (cache[0] for cache in caches)
    close(other["recurrent_state"], one["recurrent_state"], tolerance)
    for mine, theirs in zip(other["conv_state"], one["conv_state"], strict=True):
        close(mine, theirs, tolerance)
    assert isinstance(other["conv_state"], Windows)


@pytest.fixture
def comparison() -> Callable[..., None]:
    """Compare, for a layer that is the library's own."""
    torch.manual_seed(0)
    return compare


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The names of this file, with the layer in the place of the library's."""
    name = "fla.layers.kda"
    stand_in = SimpleNamespace(fused_recurrent_kda=fused_recurrent_kda)
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(KimiDeltaAttention, "__module__", name)
    torch.manual_seed(0)
    return SimpleNamespace(**globals())

"""A whole layer (convolution, step, gated norm) in many spellings, and its graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

D, ROWS, SLOTS, LOG2E = 128, 3, 6, 1.4426950408889634
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def tokens(h: Tensor, x: Tensor) -> Tensor:
    """The window with the current token behind it."""
    return torch.cat([h, x.unsqueeze(-1)], -1)


def conv_module(h: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.conv1d(tokens(h, x).float(), w[:, None], b, groups=w.shape[0])[..., -1]


def conv_sum(h: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = (tokens(h, x)[..., -4:].float() * w).sum(-1)
    return y if b is None else y + b


def conv_products(h: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = w[:, 3] * x.float() + sum(w[:, i] * h[..., i - 3].float() for i in range(3))
    return y if b is None else b + y


def conv_einsum(h: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = torch.einsum("bcl,cl->bc", tokens(h, x)[..., -4:].float(), w)
    return y if b is None else y + b


def conv_history_and_token(h: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = torch.addcmul((h[..., -3:].float() * w[:, :3]).sum(-1), x.float(), w[:, 3])
    return y if b is None else y + b


def move_cat(h: Tensor, x: Tensor) -> Tensor:
    return torch.cat([h[..., 1:], x.unsqueeze(-1)], -1)


def move_slice(h: Tensor, x: Tensor) -> Tensor:
    return tokens(h, x)[..., 1:]


def move_roll(h: Tensor, x: Tensor) -> Tensor:
    h = torch.roll(h, -1, -1)
    h[..., -1] = x
    return h


def silu_by_product(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def silu_by_quotient(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def split_chunk(m: Tensor, heads: int) -> Any:
    return tuple(p.view(-1, heads, D).float() for p in m.chunk(3, -1))


def split_unbind(m: Tensor, heads: int) -> Any:
    return m.float().view(-1, 3, heads, D).unbind(1)


def split_slices(m: Tensor, heads: int) -> Any:
    n = heads * D
    return tuple(m[:, i * n : (i + 1) * n].unflatten(1, (heads, D)).float() for i in range(3))


def unit_rsqrt(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def unit_root(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def unit_power(x: Tensor) -> Tensor:
    return x * ((x**2).sum(-1) + 1e-6).pow(-0.5)[..., None]


def gate_softplus(a: Tensor, A: Tensor) -> Tensor:
    return torch.exp(-A.exp() * F.softplus(a))


def gate_where(a: Tensor, A: Tensor) -> Tensor:
    return (-(torch.where(a > 20, a, torch.log(1 + a.exp())) * A.exp())).exp()


def gate_logaddexp(a: Tensor, A: Tensor) -> Tensor:
    return torch.exp(-(torch.logaddexp(a, torch.zeros_like(a)) * A.exp()))


def gate_stable(a: Tensor, A: Tensor) -> Tensor:
    return torch.exp(-A.exp() * (a.clamp_min(0) + torch.log1p(torch.exp(-a.abs()))))


def gate_base_two(a: Tensor, A: Tensor) -> Tensor:
    return torch.exp2(F.softplus(a) * -torch.exp2(A * LOG2E) * LOG2E)


def gate_bounded(a: Tensor, A: Tensor) -> Tensor:
    return torch.exp(-5.0 * torch.sigmoid(A.exp() * a))


def gate_bounded_tanh(a: Tensor, A: Tensor) -> Tensor:
    return torch.exp(torch.sigmoid(a * A.exp()) * -4.0)


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.float())


def sigmoid_by_quotient(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x.float()))


def recur_kv(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, b: Tensor) -> Any:
    S = S * d[..., None]
    u = b[..., None] * (v - (S * k[..., None]).sum(-2))
    S = S + k[..., None] * u[..., None, :]
    return (S * q[..., None]).sum(-2), S


def recur_vk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, b: Tensor) -> Any:
    S = S * d[..., None, :]
    u = b[..., None] * (v - (S * k[..., None, :]).sum(-1))
    S = S + u[..., None] * k[..., None, :]
    return (S * q[..., None, :]).sum(-1), S


def recur_einsum(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, b: Tensor) -> Any:
    S = torch.einsum("bhkv,bhk->bhkv", S, d)
    u = (v - torch.einsum("bhkv,bhk->bhv", S, k)) * b[..., None]
    S = S + torch.einsum("bhk,bhv->bhkv", k, u)
    return torch.einsum("bhkv,bhk->bhv", S, q), S


def recur_matmul(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, b: Tensor) -> Any:
    S = d[..., None] * S
    S = S + (k * b[..., None])[..., None] @ (v[..., None, :] - k[..., None, :] @ S)
    return (q[..., None, :] @ S)[..., 0, :], S


def recur_early(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, b: Tensor) -> Any:
    S = S * d[..., None]
    u = b[..., None] * (v - (S * k[..., None]).sum(-2))
    o = (S * q[..., None]).sum(-2) + (q * k).sum(-1, keepdim=True) * u
    return o, torch.addcmul(S, k[..., None], u[..., None, :])


def norm_rsqrt(o: Tensor, w: Tensor) -> Tensor:
    return o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def norm_root(o: Tensor, w: Tensor) -> Tensor:
    return w * (o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-5))


def norm_sum(o: Tensor, w: Tensor) -> Tensor:
    return w * o * torch.rsqrt((o * o).sum(-1, keepdim=True) / D + 1e-5)


PARTS: dict[str, list[Any]] = {
    "conv": [conv_module, conv_sum, conv_products, conv_einsum, conv_history_and_token],
    "move": [move_cat, move_slice, move_roll],
    "silu": [F.silu, silu_by_product, silu_by_quotient],
    "split": [split_chunk, split_unbind, split_slices],
    "unit": [unit_rsqrt, unit_root, unit_power],
    "gate": [
        gate_softplus,
        gate_where,
        gate_logaddexp,
        gate_stable,
        gate_base_two,
        gate_bounded,
        gate_bounded_tanh,
    ],
    "beta": [sigmoid, sigmoid_by_quotient],
    "recur": [recur_kv, recur_vk, recur_einsum, recur_matmul, recur_early],
    "norm": [norm_rsqrt, norm_root, norm_sum],
    "out": [sigmoid, sigmoid_by_quotient],
    "columns": [3, 4],
    "channels_last": [False, True],
    "bias": [False, True],
    "form": ["indexed", "dense", "stacked", "transposed", "masked"],
    "scale_output": [False, True],
    "heads": [1, 2],
    "activation": [torch.bfloat16, torch.float32, torch.float16],
    "pool": [torch.float32, torch.bfloat16],
}


def chosen(pick: Callable[[str, list[Any]], Any], **fixed: Any) -> SimpleNamespace:
    """Make every choice by ``pick(part, alternatives)``, but for those that are fixed."""
    return SimpleNamespace(**{part: pick(part, options) for part, options in PARTS.items()} | fixed)


def sampled(seed: int, **fixed: Any) -> SimpleNamespace:
    """Make every choice at random."""
    draw = random.Random(seed)
    return chosen(lambda _, options: draw.choice(options), **fixed)


def inputs(c: SimpleNamespace) -> dict[str, Any]:
    """Draw the tensors of a layer."""
    torch.manual_seed(0)
    H, C = c.heads, 3 * c.heads * D
    slots = torch.tensor([4, -1, 2]) if c.form == "masked" else torch.tensor([4, 1, 2])
    lead = {"dense": (ROWS,), "stacked": (2, SLOTS)}.get(c.form, (SLOTS,))
    width = (c.columns, C) if c.channels_last else (C, c.columns)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(c.activation)

    return {
        "x": draw(ROWS, C),
        "w": torch.randn(C, 4) / 2,
        "b": torch.randn(C) if c.bias else None,
        "window": draw(*lead, *width),
        "gate": draw(ROWS, H * D) * 2,
        "beta": draw(ROWS, H),
        "A_log": torch.randn(H) / 2,
        "dt_bias": torch.randn(H * D),
        "state": torch.randn(*lead, H, D, D).to(c.pool),
        "slots": None if c.form == "dense" else slots,
        "out_gate": draw(ROWS, H * D),
        "norm": torch.randn(D),
    }


def run(c: SimpleNamespace, t: dict[str, Any]) -> Tensor:
    """One step of the layer as chosen; windows and states move on in place."""
    window, state, slots = t["window"], t["state"], t["slots"]
    if c.form == "stacked":
        window, state = window[1], state[1]
    if c.form == "transposed":
        state = state.transpose(-1, -2)
    valid = None
    if c.form == "masked":
        valid, slots = slots >= 0, slots.clamp(min=0)
    old_window, old = (pool if slots is None else pool[slots] for pool in (window, state))
    h = old_window.transpose(1, 2) if c.channels_last else old_window
    mixed = c.silu(c.conv(h, t["x"], t["w"], t["b"])).to(t["x"].dtype)
    moved = c.move(h, t["x"])
    store(window, slots, moved.transpose(1, 2) if c.channels_last else moved, old_window, valid)
    q, k, v = c.split(mixed, c.heads)
    q, k, scale = c.unit(q), c.unit(k), D**-0.5
    a = (t["gate"].float() + t["dt_bias"]).view(-1, c.heads, D)
    d = c.gate(a, t["A_log"][:, None])
    q = q if c.scale_output else q * scale
    o, S = c.recur(old.float(), q, k, v, d, c.beta(t["beta"]))
    o = o * scale if c.scale_output else o
    store(state, slots, S.to(state.dtype), old, valid)
    o = o.to(t["x"].dtype).float()
    y = (c.norm(o, t["norm"]) * c.out(t["out_gate"].view(-1, c.heads, D))).to(t["x"].dtype)
    return y if valid is None else torch.where(valid[:, None, None], y, 0)


def store(pool: Tensor, slots: Any, new: Tensor, old: Tensor, valid: Tensor | None) -> None:
    if valid is not None:
        new = torch.where(valid.view(-1, *[1] * (new.dim() - 1)), new, old)
    if slots is None:
        pool.copy_(new)
    else:
        pool[slots] = new


@pytest.fixture(scope="session")
def layers(step: Any) -> Any:
    """The names of this file, for tests that cannot import it."""

    def trace(c: SimpleNamespace, layer: Callable[..., Tensor] = run, **how: Any) -> Any:
        """Trace a layer as AOTAutograd does, rewrite the graph, and run it next to eager."""
        return step.trace(inputs(c), lambda tensors: layer(c, tensors), TOLERANCE, **how)

    return SimpleNamespace(**globals(), trace=trace)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Run small tensors on one thread: waking others costs more than their share of the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""flash-linear-attention over drafted tokens, timed beside packed_fused_decode where it is there.

Lives here: its ways to take the same tokens, and that they compute what we do. Not here: its step
over one token (live_peer.py), how a call is timed (gpu_timing.py).

Either way is convolutions of q, k and v, the recurrence and a gated norm, each a function of its
own, as in its layer. The public ``fused_recurrent_kda`` keeps one state a sequence, float32
whatever it started from, in memory that it allocates. The kernel behind it can also do what
verifying drafted tokens takes: start from the state of the last accepted token, and write every
token's to its slot of a pool.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import live_peer
from decode_calls import HEAD_DIM, Values

TAPS = 4


def calls(
    layout: str, values: Values, ours: Callable[[Values], Tensor]
) -> dict[str, live_peer.Call]:
    """Return its calls by what they keep, with a word instead where one cannot run or differs.

    Args:
        layout: of the state, ``"vk"`` or ``"kv"``.
        values: the arguments of our call, windows SD, every sequence T tokens long.
        ours: makes our call with such arguments.
    """
    if live_peer.name() is None:
        return {}
    right, theirs = _copied(values), _copied(values)
    output = ours(right)
    ways: dict[str, tuple[Callable[[], live_peer.Call], Callable[[Tensor], live_peer.Pairs]]] = {
        "one state": (
            lambda: _one_state(layout, values),
            lambda made: [(made, output)],
        ),
        "checkpoints": (
            lambda: _checkpoints(layout, theirs),
            lambda made: [(made, output), (theirs["state"], right["state"])],
        ),
    }
    found = {
        what: live_peer.if_right(f"{live_peer.name()}, {what}", *way) for what, way in ways.items()
    }
    return {what: call for what, call in found.items() if call is not None}


def _copied(values: Values) -> Values:
    """Return the arguments with states and windows of their own."""
    return values | {name: values[name].clone() for name in ("state", "conv_state")}


def _one_state(layout: str, values: Values) -> live_peer.Call:
    """Return its public functions in turn."""
    recur: Any = importlib.import_module("fla.ops.kda").fused_recurrent_kda
    chosen = values["num_accepted_tokens"].long() - 1
    sources = values["state_indices"].gather(1, chosen[:, None])[:, 0]
    states = values["state"][sources.long()].contiguous()
    return _in_turn(layout, values, recur, {"initial_state": states, "output_final_state": True})


def _checkpoints(layout: str, values: Values) -> live_peer.Call:
    """Return the same with the recurrence's kernel writing every token's state into the pool."""
    module: Any = importlib.import_module("fla.ops.kda.fused_recurrent")
    pool = {
        "initial_state": values["state"],
        "inplace_final_state": True,
        "ssm_state_indices": values["state_indices"],
        "num_accepted_tokens": values["num_accepted_tokens"],
    }
    return _in_turn(layout, values, module.fused_recurrent_kda_fwd, pool)


def _in_turn(
    layout: str, values: Values, recur: Callable[..., Any], states: Mapping[str, Any]
) -> live_peer.Call:
    """Return convolutions, recurrence and norm; all is laid out before, so nothing is copied."""
    convolve: Any = importlib.import_module("fla.modules.convolution").causal_conv1d
    norm: Any = importlib.import_module("fla.modules.fused_norm_gate").rms_norm_gated
    n, t = values["state_indices"].shape
    heads = (n, t, values["state"].shape[1], HEAD_DIM)
    x, history = values["x"].reshape(n, t, -1), _history(values)
    taps = values["weight"].transpose(1, 2).reshape(-1, TAPS).to(x.dtype)
    in_parts = (x.chunk(3, -1), taps.chunk(3), history.chunk(3, 1))
    parts = [tuple(tensor.contiguous() for tensor in part) for part in zip(*in_parts, strict=True)]
    gate = values["output_gate"].reshape(heads)
    options = live_peer.options(values, heads) | {"state_v_first": layout == "vk"}
    weight, eps = values["norm_weight"].to(x.dtype), values["norm_eps"]

    def convolved(x: Tensor, taps: Tensor, history: Tensor) -> Tensor:
        made: Tensor = convolve(
            x, taps, initial_state=history, output_final_state=True, activation="silu"
        )[0]
        return made.view(heads)

    def call() -> Tensor:
        q, k, v = (convolved(*part) for part in parts)
        o, _ = recur(q, k, v, **states, **options)
        y: Tensor = norm(o, gate, weight, None, activation="sigmoid", eps=eps)
        return y.view(1, n * t, *heads[2:])

    return call


def _history(values: Values) -> Tensor:
    """Return [N, channels, 4]: the columns before the first token, behind one that is not read."""
    windows = values["conv_state"][values["state_indices"][:, 0].long()]
    first = values["num_accepted_tokens"].long()[:, None, None] - 1
    columns = first + torch.arange(TAPS - 1, device=first.device)
    before = windows.gather(2, columns.expand(-1, windows.shape[1], -1))
    return torch.nn.functional.pad(before, (1, 0)).contiguous()

"""flash-linear-attention's KimiDeltaAttention decodes through kda::fused_decode.

Lives here: the exchange of such layers' ``forward`` for one that takes one token a sequence through
the operator, its three convolutions in one window, and leaves every other call to the layer's own.
Not here: prefill and training, which stay with the model, and the operator itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kda_ops.integrations.exchange import Exchange
from kda_ops.ops import fused_kda_decode

LAYER = ("fla.layers.kda", "KimiDeltaAttention")
WIDTH, D = 4, 128


class Layer(Protocol):
    """What is used of a KimiDeltaAttention layer; all are modules but the numbers and weights."""

    layer_idx: int
    training: bool
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_size: int
    use_short_conv: bool
    allow_neg_eigval: bool
    lower_bound: float | None
    A_log: Tensor
    dt_bias: Tensor
    q_proj: Any
    k_proj: Any
    v_proj: Any
    f_proj: Any
    b_proj: Any
    g_proj: Any
    q_conv1d: Any
    k_conv1d: Any
    v_conv1d: Any
    o_norm: Any
    o_proj: Any
    forward: Callable[..., Any]


class Cache(Protocol):
    """What is used of a cache."""

    def __len__(self) -> int:
        """Return the number of layers that have states."""

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        """Return the states of a layer."""

    def update(self, *, layer_idx: int, offset: int, **states: object) -> object:
        """Store the states of a layer, ``offset`` tokens on."""


class FusedDecode(Exchange):
    """The exchange that :func:`use_fused_decode` made."""

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The layers that decode through the operator, in the model's order."""
        return tuple(layer for layer, _, _ in self._before)


def use_fused_decode(model: nn.Module) -> FusedDecode:
    """Let every KimiDeltaAttention layer of a model decode through ``kda::fused_decode``.

    Taken over are calls with one token a sequence, without gradients, with a cache that holds the
    layer's states. These states are updated in place: the recurrent one, and the three windows,
    which become parts of one tensor. Rows whose last entry of ``attention_mask`` is 0 are padding:
    zero output, states as they were. All other calls stay with the layer.

    The convolutions' and the norm's weights are copied into the operator's form now and at every
    later call that stays with the layer (each prefill), not while decoding.

    Args:
        model: a model of flash-linear-attention (0.5.1 or newer), or a part of one.

    Returns:
        The exchange, to undo or to use in a ``with`` block.

    Raises:
        ValueError: the model has no such layer, or one that the operator does not serve, and why;
            nothing has changed.
    """
    names = {n: part for n, part in model.named_modules() if kind_of(part) == LAYER}
    if not names:
        fact = "no KimiDeltaAttention layer of flash-linear-attention"
        raise ValueError(f"{type(model).__name__} has {fact}")
    for name, layer in names.items():
        if (reason := next(obstacles(layer), None)) is not None:
            raise ValueError(f"{name or type(layer).__name__} cannot decode fused: {reason}")
    return FusedDecode([(layer, "forward", LayerDecode(layer)) for layer in names.values()])


def kind_of(part: nn.Module) -> tuple[str, str]:
    """Return the module and the name of an object's class."""
    return type(part).__module__, type(part).__name__


def obstacles(layer: Layer) -> Iterator[str]:
    """Yield why the operator cannot serve a layer."""
    recurrent = getattr(sys.modules[LAYER[0]], "fused_recurrent_kda", None)
    if recurrent is None or "state_v_first" not in inspect.signature(recurrent).parameters:
        yield "flash-linear-attention 0.5.1 or newer is needed, which keeps states as [V, K]"
    heads, values = layer.num_heads, layer.num_v_heads
    if heads != values:
        yield f"grouped value attention, {values} value heads on {heads} of q and k"
    if (layer.head_k_dim, layer.head_v_dim) != (D, D):
        yield f"heads are {layer.head_k_dim} by {layer.head_v_dim}; it serves {D} by {D}"
    if not layer.use_short_conv:
        yield "it has no short convolutions (use_short_conv=False)"
    elif any(c.kernel_size != (WIDTH,) for c in convolutions(layer)):
        yield f"its convolutions are {layer.conv_size} wide; the operator's are {WIDTH}"
    elif any(c.activation not in {"silu", "swish"} for c in convolutions(layer)):
        yield "its convolutions have another activation than SiLU"
    if layer.allow_neg_eigval:
        yield "beta is doubled (allow_neg_eigval=True)"
    if layer.lower_bound is not None and not layer.lower_bound < 0:
        yield f"the gate's lower bound is {layer.lower_bound}; it has to be below 0"
    if layer.A_log is None:
        yield "the gate has no A_log"
    if layer.o_norm.activation != "sigmoid":
        yield f"the output gate is {layer.o_norm.activation}; the operator's is a sigmoid"


def convolutions(layer: Layer) -> tuple[Any, Any, Any]:
    """Return a layer's short convolutions of q, k and v."""
    return layer.q_conv1d, layer.k_conv1d, layer.v_conv1d


class Windows(tuple[Tensor, ...]):
    """The windows of q, k and v [B, H*128, 4] as a cache keeps them, parts of one tensor.

    ``joined`` is that tensor, [B, 3*H*128, 4].
    """

    joined: Tensor

    def __new__(cls, joined: Tensor) -> Windows:
        """Cut one tensor into three."""
        made = super().__new__(cls, joined.chunk(3, 1))
        made.joined = joined
        return made

    def __getnewargs__(self) -> tuple[Tensor]:
        """Copies are made of the one tensor."""
        return (self.joined,)


def joined(windows: Iterable[Tensor]) -> Windows:
    """Return three windows as parts of one tensor, copied unless they are already."""
    return windows if isinstance(windows, Windows) else Windows(torch.cat(tuple(windows), 1))


class LayerDecode:
    """The ``forward`` of one layer: the operator for one token a sequence, else the layer's own."""

    def __init__(self, layer: Layer) -> None:
        """Keep the layer, its own forward, and its weights in the operator's form."""
        self.layer = layer
        self.forward: Callable[..., Any] = layer.forward
        self.weights = self._read()

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: object,
    ) -> tuple[Tensor, None, Cache | None]:
        """Run the layer on [B, T, hidden_size]; return the same shape, None and the cache."""
        state = self._state(past_key_values)
        one = hidden_states.shape[1] == 1 and kwargs.get("cu_seqlens") is None
        mine = not (torch.is_grad_enabled() or self.layer.training)
        if mine and one and use_cache and past_key_values is not None and state is not None:
            output = self._decode(hidden_states, attention_mask, state)
            past_key_values.update(layer_idx=self.layer.layer_idx, offset=1, **state)
            return output, None, past_key_values
        result: tuple[Tensor, None, Cache | None] = self.forward(
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            **kwargs,
        )
        if mine:
            self._refresh()
            self._state(past_key_values)
        return result

    def _state(self, cache: Cache | None) -> dict[str, Any] | None:
        """Return a layer's states in a cache, its windows joined, or None where it has none."""
        number = self.layer.layer_idx
        held = cache[number] if cache is not None and len(cache) > number else None
        if not held or held["recurrent_state"] is None or held["conv_state"] is None:
            return None
        if not isinstance(held["conv_state"], Windows):
            held["conv_state"] = joined(held["conv_state"])
        return {name: held[name] for name in ("recurrent_state", "conv_state")}

    def _decode(self, hidden: Tensor, mask: Tensor | None, state: dict[str, Any]) -> Tensor:
        layer, hidden = self.layer, hidden[:, 0]
        rows, heads = hidden.shape[0], layer.num_heads
        parts = (layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden))
        slots = None
        if mask is not None:
            row = torch.arange(rows, device=hidden.device)
            slots = torch.where(mask[:, -1] != 0, row, -1)
        output = fused_kda_decode(
            torch.cat(parts, -1),
            self.weights["weight"].view(3, heads * D, WIDTH).transpose(1, 2),
            state["conv_state"].joined,
            layer.f_proj(hidden).view(1, rows, heads, D),
            layer.b_proj(hidden).view(1, rows, heads),
            self.weights["A_log"],
            self.weights["dt_bias"],
            slots,
            state["recurrent_state"],
            layer.g_proj(hidden).view(1, rows, heads, D),
            self.weights["norm_weight"],
            layer.lower_bound,
            layer.o_norm.eps,
            conv_bias=self.weights.get("conv_bias"),
            first_slot=0,
        )
        result: Tensor = layer.o_proj(output.view(rows, 1, heads * D))
        return result

    def _read(self) -> dict[str, Tensor]:
        """Return copies of the weights in the operator's form."""
        layer = self.layer
        # No inference tensors, which could not be written again outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            read = {
                "weight": torch.cat([c.weight for c in convolutions(layer)]),
                "A_log": layer.A_log.detach().float().clone(),
                "dt_bias": layer.dt_bias.detach().float().clone(),
                "norm_weight": torch.ones(D, device=layer.A_log.device),
            }
            if layer.o_norm.weight is not None:
                read["norm_weight"] = layer.o_norm.weight.detach().float().clone()
            if layer.q_conv1d.bias is not None:
                read["conv_bias"] = torch.cat([c.bias for c in convolutions(layer)]).float()
        return read

    def _refresh(self) -> None:
        """Read the weights again, in place where they are still of one kind."""
        for name, value in self._read().items():
            kept = self.weights[name]
            if (kept.device, kept.dtype) == (value.device, value.dtype):
                kept.copy_(value)
            else:
                self.weights[name] = value

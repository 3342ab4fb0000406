"""Pools of states and windows: their geometry, their memory, and marking them for CUDA graphs.

Lives here: StateSpec (what a slot holds and how it lies in memory), the tensors of one layer, and
mark_state_static for pools that people own themselves. Not here: who owns which slot (cache.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kda_kernels.contract.spec import HEAD_DIM as D

_ALIGNMENT = 16
_STATE_LAYOUTS = ("vk", "kv")
_WINDOW_LAYOUTS = ("SD", "DS")
_STATE_DTYPES = (torch.float32, torch.bfloat16)
_WINDOW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LayerPools(NamedTuple):
    """The pools of one layer, as the operators take them.

    Attributes:
        state: [S, H, 128, 128] recurrent states.
        window: [S, 3*H*128, L] convolution windows, oldest column first; L is 0 in a cache without
            windows.
        page: [S, page_bytes / itemsize] in the state's type, of which state and window are views,
            or None where each of them has an allocation of its own.
    """

    state: Tensor
    window: Tensor
    page: Tensor | None


@dataclass(frozen=True)
class StateSpec:
    """What one slot holds in every layer, and how it lies in memory.

    Attributes:
        layers: layers with a recurrent state.
        heads: heads of this process, H (under tensor parallelism: of this rank).
        tokens: T, tokens that one speculative step may bring; a window has T + 2 columns, so 3 for
            decoding token by token.
        windows: whether slots have convolution windows at all (``packed_kda_decode`` needs none).
        state_dtype: float32 or bfloat16.
        window_dtype: the activation type: bfloat16, float16 or float32.
        state_layout: ``"vk"`` or ``"kv"``, order of the last two axes of a state.
        window_layout: ``"SD"`` (a column's channels lie together) or ``"DS"`` (a channel's columns
            lie together).
        page_bytes: None gives every layer two separate pools. A number of bytes interleaves them:
            slot i of a layer is page i of one allocation, the window first, then the state, then
            padding up to ``page_bytes``, a multiple of 16.

    Raises:
        ValueError: a size, layout, dtype or page that cannot be.
    """

    layers: int
    heads: int
    tokens: int = 1
    windows: bool = True
    state_dtype: torch.dtype = torch.float32
    window_dtype: torch.dtype = torch.bfloat16
    state_layout: str = "vk"
    window_layout: str = "SD"
    page_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no pool can be made of."""
        for name in ("layers", "heads", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"StateSpec: {name} must be >= 1, got {getattr(self, name)}")
        for name, choices in (
            ("state_layout", _STATE_LAYOUTS),
            ("window_layout", _WINDOW_LAYOUTS),
            ("state_dtype", _STATE_DTYPES),
            ("window_dtype", _WINDOW_DTYPES),
        ):
            if getattr(self, name) not in choices:
                listed = " or ".join(repr(choice) for choice in choices)
                raise ValueError(f"StateSpec: {name} must be {listed}, got {getattr(self, name)!r}")
        if self.page_bytes is not None:
            needed = self.window_bytes + self.state_bytes
            if self.page_bytes < needed or self.page_bytes % _ALIGNMENT:
                rule = f"a multiple of {_ALIGNMENT} and >= {needed} (window and state)"
                raise ValueError(f"StateSpec: page_bytes must be {rule}, got {self.page_bytes}")

    @property
    def columns(self) -> int:
        """Columns of a window, L."""
        return self.tokens + 2 if self.windows else 0

    @property
    def channels(self) -> int:
        """Channels of a window: q | k | v."""
        return 3 * self.heads * D

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, of one slot in one layer."""
        return self.heads * D * D * self.state_dtype.itemsize

    @property
    def window_bytes(self) -> int:
        """Bytes of one window, of one slot in one layer."""
        return self.channels * self.columns * self.window_dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot takes over all layers, the padding of pages included."""
        return self.layers * (self.page_bytes or self.window_bytes + self.state_bytes)

    @property
    def padding_bytes(self) -> int:
        """Bytes of a slot, over all layers, that hold nothing."""
        return self.slot_bytes - self.layers * (self.window_bytes + self.state_bytes)

    def cut(self, page: Tensor) -> tuple[Tensor, Tensor]:
        """Return state and window as views of a layer's pages.

        torch.compile refuses a function that receives both views and updates them (one allocation,
        two types). Give it the pages, and cut inside. Pages change their type as a whole before
        they are cut: compiled code gets no other order right (torch 2.13).
        """
        slots, start = page.shape[0], self.window_bytes // self.state_dtype.itemsize
        strides = (page.stride(0), D * D, D, 1)
        state = page.as_strided((slots, self.heads, D, D), strides, start)
        channel, column = (1, self.channels) if self.window_layout == "SD" else (self.columns, 1)
        typed = page if self.window_dtype == self.state_dtype else page.view(self.window_dtype)
        shape = (slots, self.channels, self.columns)
        return state, typed.as_strided(shape, (typed.stride(0), channel, column), 0)

    def to_json(self) -> str:
        """Write the spec as JSON, for files."""
        facts = {n: getattr(self, n) for n in self.__dataclass_fields__}
        return json.dumps({n: _named(v) for n, v in facts.items()})

    @classmethod
    def from_json(cls, text: str) -> StateSpec:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: it is not such a text.
        """
        try:
            facts = json.loads(text)
            for name in ("state_dtype", "window_dtype"):
                facts[name] = getattr(torch, facts[name])
            return cls(**facts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"StateSpec: not the description of a cache: {text[:200]}") from error


def allocated(spec: StateSpec, slots: int, device: torch.device) -> tuple[LayerPools, ...]:
    """Allocate the pools of every layer, zero, at addresses that CUDA graphs take as fixed.

    A layer's pools are allocations of their own, not views of one allocation for all layers: what
    compiled code updates is then a whole tensor, which every torch version handles best.
    """
    # Ordinary tensors also where the cache is made in inference mode: it may be used outside of it.
    with torch.inference_mode(False):
        layers = tuple(_layer(spec, slots, device) for _ in range(spec.layers))
    for layer in layers:
        mark_state_static(*(pool for pool in layer if pool is not None))
    return layers


def mark_state_static(*pools: Tensor) -> None:
    """Let CUDA graphs of ``torch.compile`` take the addresses of pools as fixed.

    Under ``mode="reduce-overhead"`` a function that updates an argument in place runs without a
    graph unless that argument lies at a fixed address. Buffers of a module do; other tensors have
    to be marked. The mark belongs to the tensor *object*: a view taken from a marked pool is not
    marked, and two expressions ``pool[3]`` make two objects. So mark exactly what the compiled
    function receives, views included, and keep passing that object. A graph is recorded again
    when it meets a marked tensor at another address.

    :class:`kda_ops.StateCache` marks its pools itself.

    Args:
        *pools: tensors that a compiled function receives and updates.

    Raises:
        TypeError: something is not a tensor.
    """
    import torch._dynamo  # noqa: PLC0415 - seconds of imports that only compiled code needs

    for pool in pools:
        torch._dynamo.mark_static_address(pool, guard=False)


def _layer(spec: StateSpec, slots: int, device: torch.device) -> LayerPools:
    """Allocate one layer, in two pools or in pages."""
    if spec.page_bytes is not None:
        width = spec.page_bytes // spec.state_dtype.itemsize
        page = torch.zeros((slots, width), dtype=spec.state_dtype, device=device)
        return LayerPools(*spec.cut(page), page)
    state_shape = (slots, spec.heads, D, D)
    state = torch.zeros(state_shape, dtype=spec.state_dtype, device=device)
    axes = (spec.channels, spec.columns)
    if spec.window_layout == "DS":
        window = torch.zeros((slots, *axes), dtype=spec.window_dtype, device=device)
    else:
        window = torch.zeros((slots, *reversed(axes)), dtype=spec.window_dtype, device=device).mT
    return LayerPools(state, window, None)


def _named(value: object) -> object:
    """Spell a dtype by its name; everything else is JSON already."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

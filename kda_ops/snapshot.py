"""Copies of slots, in memory and in files.

Lives here: what a snapshot is, how one fits into a cache of another geometry, and safetensors files
of it. Not here: taking one and writing one back (cache.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_ops.pools import StateSpec

_FORMAT = "kda_ops.StateCache 1"
_MISSING = "saving and loading slots needs safetensors: pip install 'kda-ops[safetensors]'"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Copies of some slots over all layers, made by :meth:`kda_ops.StateCache.snapshot`.

    Attributes:
        spec: geometry of the cache they come from.
        slots: the slots they were copied from, n of them.
        states: per layer [n, H, 128, 128], in the layout and type of ``spec``.
        windows: per layer [n, 3*H*128, L].
        owner: whose slots these were; None for a snapshot that was read from a file.
        generations: how many times each slot had been handed out by then.
    """

    spec: StateSpec
    slots: tuple[int, ...]
    states: tuple[Tensor, ...] = field(repr=False)
    windows: tuple[Tensor, ...] = field(repr=False)
    owner: object = field(default=None, repr=False)
    generations: tuple[int, ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(tensor.nbytes for tensor in (*self.states, *self.windows))

    def place_of(self, slot: int) -> int:
        """Return where in the snapshot a slot is.

        Raises:
            ValueError: it is not in there.
        """
        if slot not in self.slots:
            raise ValueError(f"StateCache.rollback: slot {slot} is not in the snapshot")
        return self.slots.index(slot)


def fitted(snapshot: Snapshot, spec: StateSpec) -> tuple[list[Tensor], list[Tensor]]:
    """Return a snapshot's states and windows as a cache of another geometry keeps them.

    Raises:
        ValueError: the geometries do not fit; nothing is ever rounded to make them.
    """
    there = snapshot.spec
    for name in ("layers", "heads", "windows", "state_dtype", "window_dtype"):
        if getattr(there, name) != getattr(spec, name):
            facts = f"{getattr(there, name)} there and {getattr(spec, name)} here"
            raise ValueError(f"StateCache.adopt: {name} must be equal, got {facts}")
    if there.tokens not in (1, spec.tokens):
        raise ValueError(
            f"StateCache.adopt: tokens must be equal, or 1 there, got {there.tokens} there and "
            f"{spec.tokens} here: where in a window the history starts depends on what was accepted"
        )
    states, windows = list(snapshot.states), list(snapshot.windows)
    if there.state_layout != spec.state_layout:
        states = [state.transpose(-1, -2) for state in states]
    if there.columns != spec.columns:
        # Columns 0, 1, 2 are the history of a step that follows one accepted token.
        more = spec.columns - there.columns
        windows = [torch.nn.functional.pad(window, (0, more)) for window in windows]
    return states, windows


def write(path: Path | str, snapshot: Snapshot) -> None:
    """Write a snapshot into a safetensors file.

    Raises:
        ImportError: safetensors is not installed.
    """
    tensors = {}
    for number, (state, window) in enumerate(zip(snapshot.states, snapshot.windows, strict=True)):
        tensors[f"layers.{number}.state"] = state.contiguous()
        tensors[f"layers.{number}.window"] = window.contiguous()
    metadata = {"format": _FORMAT, "spec": snapshot.spec.to_json()}
    _safetensors().save_file(tensors, str(path), metadata)


def read(path: Path | str) -> Snapshot:
    """Read what :func:`write` has written; its tensors are on the CPU.

    Raises:
        ValueError: the file was written by something else, or does not hold what it says.
        ImportError: safetensors is not installed.
    """
    with _safetensors().safe_open(str(path), "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"StateCache.load: {path} holds no slots of a StateCache")
        spec = StateSpec.from_json(metadata.get("spec", ""))
        states = tuple(_tensor(file.get_tensor, path, n, "state") for n in range(spec.layers))
        windows = tuple(_tensor(file.get_tensor, path, n, "window") for n in range(spec.layers))
    count = len(states[0])
    for state, window in zip(states, windows, strict=True):
        if (
            state.shape != (count, spec.heads, 128, 128)
            or window.shape != (count, spec.channels, spec.columns)
            or (state.dtype, window.dtype) != (spec.state_dtype, spec.window_dtype)
        ):
            raise ValueError(f"StateCache.load: the tensors in {path} are not those of its spec")
    return Snapshot(spec, tuple(range(count)), states, windows)


def _tensor(get: Callable[[str], Tensor], path: Path | str, layer: int, kind: str) -> Tensor:
    """Read one tensor of a file."""
    try:
        return get(f"layers.{layer}.{kind}")
    except Exception as error:  # safetensors' own, which is not imported here
        raise ValueError(f"StateCache.load: {path} has no {kind} of layer {layer}") from error


def _safetensors() -> Any:  # noqa: ANN401 - an optional module
    """Import safetensors, or say what to install."""
    try:
        import safetensors.torch  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return safetensors.torch

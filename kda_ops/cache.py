"""State pools with slots: the sequences of a decode loop and the memory they live in.

Lives here: StateCache. Not here: how pools lie in memory (pools.py), which slots are free
(slots.py), what copies of slots are and how they are filed (snapshot.py), and replaying a decode
step (graphs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_ops import snapshot as copies
from kda_ops.pools import LayerPools, StateSpec, allocated
from kda_ops.slots import Slots
from kda_ops.snapshot import Snapshot


@dataclass(frozen=True)
class Memory:
    """Where a cache's memory is, in bytes.

    Attributes:
        total: everything allocated for pools: ``slot * S``.
        slot: one slot over all layers.
        live: slots in use.
        free: slots that can be allocated.
        reserved: slot 0, which belongs to nobody.
        padding: the part of ``total`` that pages leave unused.
    """

    total: int
    slot: int
    live: int
    free: int
    reserved: int
    padding: int


class StateCache:
    """Paged pools of recurrent states and convolution windows for all layers of a model.

    A sequence lives in one slot, the same one in every layer (in T slots where speculative steps
    keep T checkpoints). One rule serves every operator: **slot 0 is never handed out** (it is the
    padding of operators with ``first_slot=1``), and **index −1 pads a batch** (it is null under
    ``first_slot=1`` and ``first_slot=0`` alike). Code that indexes pools in plain PyTorch, where −1
    is the last slot, pads with 0: slot 0 then takes what padding rows write.

    A slot handed out is zero in every layer, whatever was in it before. Calls work on the current
    stream, in order with the steps that use the pools there. Errors leave everything as it was.
    Not thread-safe: one thread owns the slots.

    Args:
        spec: what a slot holds and how it lies in memory.
        slots: S, slots in every pool; ``slots - 1`` can be in use.
        device: where the pools are.

    Attributes:
        layers: :class:`kda_ops.pools.LayerPools` of every layer; the tensors stay where they are,
            and CUDA graphs take their addresses as fixed.
        null_index: −1, the index of a padding row.
        first_slot: 1, for the operators' argument of that name.

    Raises:
        ValueError: fewer than two slots.
    """

    null_index = -1
    first_slot = 1

    def __init__(self, spec: StateSpec, slots: int, device: torch.device | str = "cpu") -> None:
        """Allocate the pools, zero."""
        if slots < 2:
            raise ValueError(f"StateCache: slots must be >= 2 (slot 0 is reserved), got {slots}")
        self.spec = spec
        self.slots = slots
        self.layers: tuple[LayerPools, ...] = allocated(spec, slots, torch.device(device))
        self.device = self.layers[0].state.device
        self._owned = Slots(slots, reserved=1)

    def __repr__(self) -> str:
        size = f"slots={self.slots}, device={str(self.device)!r}"
        return f"StateCache({self.spec}, {size}): {len(self.live)} live, {self.free} free"

    @property
    def live(self) -> list[int]:
        """Slots in use, ascending."""
        return sorted(self._owned.live)

    @property
    def free(self) -> int:
        """How many slots can be allocated."""
        return len(self._owned.free)

    @property
    def memory(self) -> Memory:
        """Bytes of the pools and of what is in use."""
        slot = self.spec.slot_bytes
        live, free = len(self._owned.live) * slot, self.free * slot
        padding = self.slots * self.spec.padding_bytes
        return Memory(self.slots * slot, slot, live, free, slot, padding)

    def allocate(self, count: int = 1) -> list[int]:
        """Hand out slots, zero in every layer.

        Raises:
            OutOfSlotsError: fewer than ``count`` are free.
        """
        slots = self._owned.take(count)
        self._zero(slots)
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Take slots back.

        Raises:
            ValueError: a slot that is not in use (released before, never handed out, not of this
                cache) or that is named twice.
        """
        self._owned.give_back(self._owned.checked("release", slots))

    def reset(self, slots: Iterable[int]) -> None:
        """Make slots in use equal to fresh ones, zero in every layer, bit for bit.

        Raises:
            ValueError: as :meth:`release`.
        """
        self._zero(self._owned.checked("reset", slots))

    def fork(self, slot: int, count: int = 1) -> list[int]:
        """Copy a slot into new ones: beams, or sequences that share a prefix.

        Returns:
            The new slots; they and the old one go on independently.

        Raises:
            OutOfSlotsError: fewer than ``count`` are free.
            ValueError: as :meth:`release`.
        """
        source = self.snapshot([slot])
        forks = self._owned.take(count)
        self._write(
            forks,
            [state.expand(count, -1, -1, -1) for state in source.states],
            [window.expand(count, -1, -1) for window in source.windows],
        )
        return forks

    def snapshot(self, slots: Iterable[int]) -> Snapshot:
        """Copy slots, to come back to them with :meth:`rollback` or to carry them elsewhere.

        Raises:
            ValueError: as :meth:`release`.
        """
        chosen = self._owned.checked("snapshot", slots)
        index = self._index(chosen)
        return Snapshot(
            self.spec,
            tuple(chosen),
            tuple(layer.state.index_select(0, index) for layer in self.layers),
            tuple(layer.window.index_select(0, index) for layer in self.layers),
            self._owned,
            self._owned.generations_of(chosen),
        )

    def rollback(self, snapshot: Snapshot, slots: Iterable[int] | None = None) -> None:
        """Write a snapshot back into the slots it was made of; it can be used again.

        Args:
            snapshot: made by this cache.
            slots: those of its slots to restore, or None for all.

        Raises:
            ValueError: the snapshot is of another cache, a slot is not in it, or a slot has been
                released since it was made.
        """
        if snapshot.owner is not self._owned:
            raise ValueError("StateCache.rollback: the snapshot is of another cache; see adopt()")
        chosen = self._owned.checked("rollback", snapshot.slots if slots is None else slots)
        places = [snapshot.place_of(slot) for slot in chosen]
        made_for = [snapshot.generations[place] for place in places]
        self._owned.unchanged("rollback", chosen, made_for)
        index = self._index(places)
        self._write(
            chosen,
            [state.index_select(0, index) for state in snapshot.states],
            [window.index_select(0, index) for window in snapshot.windows],
        )

    def adopt(self, snapshot: Snapshot) -> list[int]:
        """Give the sequences of a snapshot, of this cache or another, slots of this one.

        Layers, heads and types must be equal. Layouts, pages and devices may differ. A window of
        a cache for one token becomes one for T tokens as the operators read it in a first step
        with ``num_accepted_tokens`` 1.

        Returns:
            New slots, in the order of ``snapshot.slots``.

        Raises:
            ValueError: the geometries do not fit.
            OutOfSlotsError: too few slots are free.
        """
        states, windows = copies.fitted(snapshot, self.spec)
        states = [state.to(self.device) for state in states]
        windows = [window.to(self.device) for window in windows]
        slots = self._owned.take(len(snapshot.slots))
        self._write(slots, states, windows)
        return slots

    def move(self, slots: Iterable[int], to: StateCache) -> list[int]:
        """Hand slots over to another cache, as prefill does to decode, and release them here.

        Returns:
            Their slots in ``to``, in the same order.

        Raises:
            ValueError, OutOfSlotsError: as :meth:`release` and :meth:`adopt`.
        """
        chosen = self._owned.checked("move", slots)
        moved = to.adopt(self.snapshot(chosen))
        self._owned.give_back(chosen)
        return moved

    def save(self, path: Path | str, slots: Iterable[int]) -> None:
        """Write slots into a safetensors file.

        Raises:
            ValueError: as :meth:`release`.
            ImportError: safetensors is not installed.
        """
        copies.write(path, self.snapshot(slots))

    def load(self, path: Path | str) -> list[int]:
        """Give the sequences of a file new slots, in the order in which they were saved.

        Raises:
            ValueError: the file is no such file, or as :meth:`adopt`.
            OutOfSlotsError: too few slots are free.
            ImportError: safetensors is not installed.
        """
        return self.adopt(copies.read(path))

    def indices(self, slots: Sequence[Any], rows: int | None = None) -> Tensor:
        """Return slots as the operators' ``state_indices``, padded with null rows.

        Args:
            slots: n slots in use, or n lists of T slots each (the checkpoints of a speculative
                step).
            rows: rows of the batch, at least n; None means n.

        Returns:
            int32 [rows] or [rows, T] on the cache's device.

        Raises:
            ValueError: a slot not in use or named twice, or more slots than rows.
        """
        flat = [s for row in slots for s in (row if isinstance(row, Sequence) else (row,))]
        self._owned.checked("indices", flat)
        rows = len(slots) if rows is None else rows
        if rows < len(slots):
            raise ValueError(f"StateCache.indices: {len(slots)} slots do not fit into {rows} rows")
        live = torch.tensor(slots, dtype=torch.int32)
        padded = torch.full((rows, *live.shape[1:]), self.null_index, dtype=torch.int32)
        padded[: len(slots)] = live
        if self.device.type == "cuda":
            # From pinned memory the copy does not hold up the host.
            return padded.pin_memory().to(self.device, non_blocking=True)
        return padded.to(self.device)

    def _index(self, places: Sequence[int]) -> Tensor:
        """Return numbers as an index on the cache's device."""
        return torch.tensor(places, dtype=torch.int64).to(self.device)

    def _zero(self, slots: Sequence[int]) -> None:
        """Write +0 into slots of every layer; padding between slots stays as it is."""
        index = self._index(slots)
        for layer in self.layers:
            layer.state.index_fill_(0, index, 0)
            layer.window.index_fill_(0, index, 0)

    def _write(
        self, slots: Sequence[int], states: Sequence[Tensor], windows: Sequence[Tensor]
    ) -> None:
        """Write one state and window a slot into every layer."""
        index = self._index(slots)
        for layer, state, window in zip(self.layers, states, windows, strict=True):
            layer.state.index_copy_(0, index, state)
            layer.window.index_copy_(0, index, window)

"""What a variant is read off: types, ranks and alignment of a validated call's tensors.

Lives here: the facts that every operator's launch.py asks for. Nothing here needs CUTLASS. Not
here: variants (<op>/launch.py) and schedules (<op>/config.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.spec import HEAD_DIM

OVERLAP_VARIABLE = "KDA_PDL"
VECTOR_BYTES = 16
"""One access of a lane, the widest there is."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the package."""
    return str(dtype).removeprefix("torch.")


def dtypes(tensors: Mapping[str, Tensor | None]) -> dict[str, str | None]:
    """Return the names of dtypes, None for absent tensors."""
    return {name: None if t is None else dtype_name(t.dtype) for name, t in tensors.items()}


def ranks(tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    """Return how many axes the tensors that are there have."""
    return {name: t.dim() for name, t in tensors.items() if t is not None}


def at_least_one_axis(tensor: Tensor) -> Tensor:
    """Return a scalar tensor as one of one element, others as they are."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def row_axis(rank: int) -> int:
    """Return the axis that counts rows, of [B, H*D], [B, H, D] or [1, B, H, D]."""
    return 1 if rank == 4 else 0


def are_aligned(rows: Sequence[tuple[Tensor, int]], *flat: Tensor | None) -> bool:
    """Tell whether lanes may read vectors: everything starts at 16 bytes.

    Args:
        rows: tensors of rows, each with its axis of rows; a single row has no stride that matters.
        flat: tensors without rows; None is skipped.
    """
    numbers = [t.data_ptr() for t in flat if t is not None]
    for t, axis in rows:
        numbers.append(t.data_ptr())
        if t.shape[axis] > 1:
            numbers.append(t.stride(axis) * t.element_size())
    return all(number % VECTOR_BYTES == 0 for number in numbers)


def slot_number(first_slot: int | None) -> int:
    """Return first_slot as the kernels take it: any integer, cut to what 62 bits hold."""
    return min(first_slot or 0, 1 << 62)


def scalars(values: Mapping[str, Any]) -> tuple[float, float, int]:
    """Return scale, lower_bound and first_slot of a call as every kernel takes them.

    The softplus gate ignores its bound.
    """
    scale = HEAD_DIM**-0.5 if values["scale"] is None else float(values["scale"])
    lower_bound = 0.0 if values["lower_bound"] is None else float(values["lower_bound"])
    return scale, lower_bound, slot_number(values["first_slot"])


def overlaps(can_overlap: bool) -> bool:
    """Tell whether launches shall overlap with the end of the kernel before, where they can.

    ``KDA_PDL=1`` in the environment asks for it; it is read when a signature is new. Only a kernel
    that signals can be overlapped with, and behind any other it costs a little.
    """
    return can_overlap and os.environ.get(OVERLAP_VARIABLE) == "1"

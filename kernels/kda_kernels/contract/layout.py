"""How tensors lie in memory: each word of the vocabulary as a predicate on sizes and strides.

Lives here: the test of strides and of alignment for every Layout. Works on symbolic sizes. Not
here: the error (check.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.spec import Extent, Layout

ALIGNMENT = {Layout.SLOTS: 16, Layout.WINDOW: 8}
"""Bytes at whose multiples every slot of a pool starts."""


def lies_as(layout: Layout, tensor: Tensor, extents: Sequence[Extent]) -> bool:
    """Tell whether a tensor's strides obey a layout; ``extents`` is the shape's spelling."""
    if layout is Layout.STRIDED:
        return True
    if layout is Layout.COMPACT:
        return tensor.is_contiguous()
    if layout is Layout.TAPS:
        n = tensor.shape[2]
        return strides_match(tensor, (4 * n, n, 1)) or strides_match(tensor, (4 * n, 1, 4))
    slot = tensor.stride(0)
    if layout is Layout.WINDOW:
        channels, columns = tensor.shape[1], tensor.shape[2]
        shaped = strides_match(tensor, (slot, 1, channels))
        shaped = shaped or strides_match(tensor, (slot, columns, 1))
        return shaped and _apart(tensor, 0, channels * columns)
    row = next(i for i, extent in enumerate(extents) if extent.symbol in ("B", "R", "S"))
    inner = tensor.shape[row + 1 :]
    shaped = strides_match(tensor, (*tensor.stride()[: row + 1], *compact(inner)))
    return shaped and (layout is Layout.READ_ROWS or _apart(tensor, row, math.prod(inner)))


def misalignment(layout: Layout, tensor: Tensor) -> str:
    """Return how a pool breaks its layout's alignment, or an empty string."""
    unit, size = ALIGNMENT[layout], tensor.element_size()
    if tensor.shape[0] > 1 and (tensor.stride(0) * size) % unit != 0:
        return f"a slot stride of {number(tensor.stride(0))} elements of {size} bytes"
    # Fake and meta tensors have no address; torch's allocators align far beyond the unit, so there
    # the offset into the storage tells what the address would.
    start = tensor.data_ptr() if has_address(tensor) else tensor.storage_offset() * size
    if start % unit != 0:
        return f"a pool that starts {number(start % unit)} bytes past a multiple of {unit}"
    return ""


def number(size: Any) -> str:  # noqa: ANN401 - int or SymInt
    """Print a size for an error: a traced call that fails says the numbers of the eager call.

    Asking a symbolic size for its value specialises the trace, which is given up anyway.
    """
    try:
        return str(int(size))
    except Exception:  # a size that depends on data has no value yet
        return str(size)


def compact(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a contiguous tensor of these sizes."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(sizes):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def strides_match(tensor: Tensor, wanted: Sequence[Any]) -> bool:
    """Compare strides, where an axis of one element has none that matters."""
    return all(
        size <= 1 or have == want
        for size, have, want in zip(tensor.shape, tensor.stride(), wanted, strict=True)
    )


def has_address(tensor: Tensor) -> bool:
    """Tell whether a tensor has an address (fake and meta tensors have none)."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def _apart(tensor: Tensor, axis: int, extent: Any) -> bool:  # noqa: ANN401 - int or SymInt
    """Rows or slots along ``axis`` do not overlap."""
    return bool(tensor.shape[axis] <= 1 or tensor.stride(axis) >= extent)

"""Legal calls without data: a contract's tensors on the meta device, from sizes and types.

Lives here: what warm-up and ahead-of-time builds show to whatever chooses a kernel, which looks at
shapes, strides, dtypes and alignment only; and real tensors of the same metadata that a kernel can
be launched on without reading or writing any slot. Not here: random inputs for tests
(kda_kernels.testing.cases).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.spec import Layout, Operator, Role, TensorArg

WINDOWS = ("SD", "DS")
TAPS = ("tap-major", "channel-major")
_ALIGNMENT = 16


@dataclass(frozen=True)
class Kinds:
    """What the tensors of a call are like, beside their sizes.

    Attributes:
        activation: type of rows, gates and windows.
        state: type of the state pool.
        parameter: type of A_log and dt_bias.
        weight: type of the convolution's weight.
        index: type of state_indices; None leaves it out.
        window: ``"SD"`` (channels next to each other) or ``"DS"`` (columns next to each other).
        taps: ``"tap-major"`` or ``"channel-major"``.
        conv_bias: whether the convolution has one.
    """

    activation: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.float32
    parameter: torch.dtype = torch.float32
    weight: torch.dtype = torch.float32
    index: torch.dtype | None = torch.int32
    window: str = "SD"
    taps: str = "tap-major"
    conv_bias: bool = False

    def __post_init__(self) -> None:
        """Refuse the name of a layout that does not exist."""
        for given, known in ((self.window, WINDOWS), (self.taps, TAPS)):
            if given not in known:
                raise ValueError(f"{given!r} is no layout: {' or '.join(map(repr, known))}")


def example(
    operator: Operator,
    sizes: Mapping[str, int] | None = None,
    kinds: Kinds | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of one call by name, every tensor on the meta device.

    Args:
        operator: the contract.
        sizes: by the contract's symbols; the least above zero where one is missing.
        kinds: types and layouts; every shape is spelled as the contract spells it first.
        scalars: by name; defaults where one is missing.
    """
    kinds = kinds or Kinds()
    given = scalars or {}
    dims = {symbol: max(least, 1) for symbol, (_, _, least) in operator.dims.items()}
    dims.update(sizes or {})
    values: dict[str, Any] = {}
    for argument in operator.arguments:
        if isinstance(argument, TensorArg):
            values[argument.name] = _tensor(argument, dims, kinds)
        else:
            values[argument.name] = given.get(argument.name, argument.default)
    return values


def _tensor(argument: TensorArg, dims: dict[str, int], kinds: Kinds) -> Tensor | None:
    """Make one tensor, None where the kinds leave it out."""
    dtype = _dtype(argument, kinds)
    absent = argument.optional and argument.name not in ("state_indices", "conv_bias")
    if dtype is None or absent or (argument.name == "conv_bias" and not kinds.conv_bias):
        return None
    shape = [extent.value(dims) for extent in argument.extents[0]]
    if argument.layout is Layout.WINDOW and kinds.window == "SD":
        shape = [shape[0], shape[2], shape[1]]
        return torch.empty(shape, dtype=dtype, device="meta").transpose(1, 2)
    if argument.layout is Layout.TAPS and kinds.taps == "channel-major":
        shape = [shape[0], shape[2], shape[1]]
        return torch.empty(shape, dtype=dtype, device="meta").transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device="meta")


def _dtype(argument: TensorArg, kinds: Kinds) -> torch.dtype | None:
    """Choose the type of a tensor."""
    chosen = {
        "weight": kinds.weight,
        "state": kinds.state,
        "A_log": kinds.parameter,
        "dt_bias": kinds.parameter,
        "state_indices": kinds.index,
    }
    if argument.name in chosen:
        return chosen[argument.name]
    return kinds.activation if "activation" in argument.dtypes else _named(argument.dtypes[0])


def _named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def blank(operator: Operator, values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a call with the metadata of ``values`` on a device, zeros in pools without slots.

    Without slots every row is a null row, so a kernel that is launched on it writes zeros to the
    output and nothing else. The sequences of a ragged call are empty.
    """
    roles = {argument.name: argument.role for argument in operator.tensors}
    return {
        name: _blank(value, device, pool=roles[name] is Role.UPDATE)
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }


def _blank(tensor: Tensor, device: torch.device, *, pool: bool) -> Tensor:
    """Allocate zeros that lie like ``tensor``, which may have no data."""
    shape = (0, *tensor.shape[1:]) if pool else tuple(tensor.shape)
    # Where rows start within 16 bytes decides how they are read; allocations start at multiples.
    start = tensor.storage_offset() % (_ALIGNMENT // tensor.element_size())
    flat = torch.zeros(start + _reach(shape, tensor.stride()), dtype=tensor.dtype, device=device)
    return flat.as_strided(shape, tensor.stride(), start)


def shadow(tensor: Tensor, address: int = 0) -> Tensor:
    """Return a tensor on the meta device that lies like ``tensor``.

    Args:
        tensor: of any device.
        address: where its data starts; 0: not known, and its offset into the storage tells.
    """
    size = tensor.element_size()
    start = (address % _ALIGNMENT) // size if address else int(tensor.storage_offset())
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    flat = torch.empty(start + _reach(shape, stride), dtype=tensor.dtype, device="meta")
    return flat.as_strided(shape, stride, start)


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements a tensor reaches over, from its first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))

"""Random inputs drawn from a contract: every layout, type and optional argument by name.

Lives here: a Case (how one call looks) and the tensors made for it. Rows, slots and channels lie
the way serving engines lay them out: row-strided slices, padded slots, sequence-first or
dimension-first windows. Not here: expectations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.spec import Layout, Operator, TensorArg, parse_shape
from kda_kernels.plan import reference


@dataclass(frozen=True)
class Case:
    """How one call looks.

    ``sizes`` gives every symbol of the contract. ``row_padding`` and ``slot_padding`` are elements
    between rows and slots, ``row_offset`` elements before the first row (so 1 breaks every wider
    alignment). ``absent`` lists optional tensors left out. ``scalars`` override defaults.
    """

    sizes: dict[str, int]
    activation: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    window: str = "SD"
    taps: str = "tap-major"
    spelling: int = 0
    row_padding: int = 0
    row_offset: int = 0
    slot_padding: int = 0
    absent: frozenset[str] = frozenset({"conv_bias", "t1_state_indices"})
    scalars: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


def draw(operator: Operator, case: Case, device: str = "cpu") -> dict[str, Any]:
    """Return the arguments of one legal call by name, without an output.

    Live indices are distinct and start at the call's first_slot; every pool is filled with random
    values, padding with NaN. A seed gives other values on another device; on "meta" there are none.
    """
    generator = None if device == "meta" else torch.Generator(device).manual_seed(case.seed)
    values: dict[str, Any] = {}
    for argument in operator.arguments:
        if not isinstance(argument, TensorArg):
            values[argument.name] = case.scalars.get(argument.name, argument.default)
        elif argument.name in case.absent:
            values[argument.name] = None
        elif argument.layout is Layout.STRIDED:
            continue
        else:
            values[argument.name] = _tensor(argument, case, device, generator)
    values.update(_indices(operator, case, values.get("first_slot"), device, generator))
    return {argument.name: values[argument.name] for argument in operator.arguments}


def clone(values: dict[str, Any]) -> dict[str, Any]:
    """Copy a call with its strides, offsets and padding, so that two runs start alike."""
    return {
        name: _clone(value) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def output_of(
    operator: Operator, values: dict[str, Any], dtype: torch.dtype | None = None
) -> Tensor:
    """Return an output tensor full of NaN for a call."""
    dims = dimensions(operator, values)
    first = values[operator.tensors[0].name]
    shape = [extent.value(dims) for extent in operator.output.extents]
    return torch.full(shape, math.nan, dtype=dtype or first.dtype, device=first.device)


def dimensions(operator: Operator, values: dict[str, Any]) -> dict[str, int]:
    """Return the value of every symbol of a call."""
    dims: dict[str, int] = {}
    for symbol, (name, _, _) in operator.dims.items():
        texts = [extent.text for extent in operator.tensor(name).extents[0]]
        dims[symbol] = int(values[name].shape[texts.index(symbol)])
    return dims


def run_reference(
    operator: Operator, values: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Run the reference on a call, in place on its pools, and return the output."""
    output = output_of(operator, values, torch.float64 if dtype is torch.float64 else None)
    arguments = [values[argument.name] for argument in operator.abi]
    reference(operator.name)(*arguments, output, dtype=dtype)
    return output


def exact(operator: Operator, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return output and state pool of a call in float64, neither of them rounded."""
    wide = clone(values)
    wide["state"] = wide["state"].to(torch.float64)
    output = run_reference(operator, wide, torch.float64)
    return output, wide["state"]


def traffic(operator: Operator, values: dict[str, Any]) -> int:
    """Return the bytes that a call with only live rows must move, read and written."""
    dims = dimensions(operator, values)
    total = 0
    for argument in operator.tensors:
        tensor = values[argument.name]
        if tensor is None:
            continue
        for shape in (argument.reads, argument.writes):
            total += _count(shape, dims) * tensor.element_size()
    size = values[operator.tensors[0].name].element_size()
    return total + _count(operator.output.shape, dims) * size


def _count(shape: str, dims: dict[str, int]) -> int:
    """Return the number of elements of a shape given as text."""
    return math.prod(extent.value(dims) for extent in parse_shape(shape)) if shape else 0


def _dtype(argument: TensorArg, case: Case) -> torch.dtype:
    """Choose the type of a tensor."""
    chosen = {
        "weight": case.weight_dtype,
        "state": case.state_dtype,
        "A_log": case.parameter_dtype,
        "dt_bias": case.parameter_dtype,
    }
    fixed = torch.float32 if argument.dtypes == ("float32",) else case.activation
    return chosen.get(argument.name, fixed)


def _tensor(
    argument: TensorArg, case: Case, device: str, generator: torch.Generator | None
) -> Tensor:
    """Make one floating-point tensor in its layout."""
    extents = argument.extents[min(case.spelling, len(argument.extents) - 1)]
    shape = [extent.value(case.sizes) for extent in extents]
    drawn = torch.randn(shape, generator=generator, device=device)
    data = _distribution(argument.name, drawn)
    data = data.to(_dtype(argument, case))
    if argument.layout in (Layout.SLOTS, Layout.WINDOW):
        if argument.layout is Layout.WINDOW and case.window == "SD":
            return strided(data.mT.contiguous(), 0, case.slot_padding).mT
        return strided(data, 0, case.slot_padding)
    if argument.layout in (Layout.ROWS, Layout.READ_ROWS):
        axis = next(i for i, extent in enumerate(extents) if extent.symbol in ("B", "R"))
        return strided(data, axis, case.row_padding, case.row_offset)
    if argument.layout is Layout.TAPS and case.taps == "channel-major":
        return data.transpose(1, 2).contiguous().transpose(1, 2)
    return data


def _distribution(name: str, data: Tensor) -> Tensor:
    """Scale standard normal numbers to what a trained model shows."""
    if name == "A_log":
        return data * 0.5
    if name == "norm_weight":
        return 1 + data * 0.1
    if name in ("weight", "conv_bias"):
        return data * 0.5
    return data


def strided(data: Tensor, axis: int, padding: int, offset: int = 0) -> Tensor:
    """Lay a contiguous tensor out with ``padding`` elements of NaN after each index of ``axis``."""
    if padding == 0 and offset == 0:
        return data.contiguous()
    shape = list(data.shape)
    inner = math.prod(shape[axis + 1 :])
    step = inner + padding
    strides = list(data.contiguous().stride())
    strides[: axis + 1] = [math.prod(shape[i + 1 : axis + 1]) * step for i in range(axis + 1)]
    size = offset + math.prod(shape[: axis + 1]) * step
    flat = torch.full((size,), math.nan, dtype=data.dtype, device=data.device)
    view = flat.as_strided(shape, strides, offset)
    view.copy_(data)
    return view


def _clone(tensor: Tensor) -> Tensor:
    """Copy the whole storage, so that padding and neighbours come along."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _indices(
    operator: Operator,
    case: Case,
    first_slot: int | None,
    device: str,
    generator: torch.Generator | None,
) -> dict[str, Any]:
    """Make the integer arguments: distinct slots, sequences that fill the rows, accepted counts."""
    sizes, names = case.sizes, {argument.name for argument in operator.tensors}
    first = first_slot or 0
    slots = max(sizes["S"] - first, 0)
    order = torch.randperm(slots, generator=generator, device=device) + first
    if "query_start_loc" not in names:
        if "state_indices" in case.absent:
            return {"state_indices": None}
        return {"state_indices": order[: sizes["B"]].to(case.index_dtype)}
    rows, count, tokens = sizes["R"], sizes["N"], sizes["T"]
    bounds = [min(n * tokens, rows) for n in range(count + 1)]
    made: dict[str, Any] = {
        "state_indices": order[: count * tokens].reshape(count, tokens).to(case.index_dtype),
        "query_start_loc": torch.tensor(bounds, dtype=torch.int32, device=device),
        "num_accepted_tokens": torch.randint(
            1, tokens + 1, (count,), generator=generator, device=device
        ).to(torch.int32),
    }
    if "t1_state_indices" not in case.absent:
        made["t1_state_indices"] = order[:rows].to(case.index_dtype)
    return made

"""The validator: holds a call against its operator's contract before anything is launched.

Lives here: the checks of shapes, dtypes, devices, layouts, alignment and scalars, and the facts
they yield. It runs once per signature (see signature.py) and in fake implementations, so it reads
metadata only, works on symbolic sizes and never looks at values. Not here: what kernels serve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.spec import (
    ACTIVATION,
    Extent,
    Layout,
    Operator,
    Output,
    Role,
    Rule,
    ScalarArg,
    TensorArg,
)
from kda_kernels.errors import ContractError, DtypeError

_ALIGNMENT = {Layout.SLOTS: 16, Layout.WINDOW: 8}
_SCALAR_TYPES = {"float": (float, int), "int": (int,), "str": (str,), "dtype": (torch.dtype,)}


@dataclass(frozen=True)
class Facts:
    """What a legal call says about itself.

    ``dims`` holds the value of every symbol, ``activation`` the shared type of the activations,
    ``output_shape`` and ``output_dtype`` the result's metadata.
    """

    dims: dict[str, Any]
    activation: torch.dtype
    device: torch.device
    output_shape: tuple[Any, ...]
    output_dtype: torch.dtype


def validate(operator: Operator, values: dict[str, Any], output: Tensor | None = None) -> Facts:
    """Hold a call against the contract and return its facts.

    Args:
        operator: the contract.
        values: every argument by name (optional ones may be None).
        output: the caller's output tensor for the ``out`` overload.

    Raises:
        ContractError: a shape, stride, device, alignment or scalar is illegal.
        DtypeError: an argument has a dtype that the contract does not accept.
    """
    for argument in operator.tensors:
        _check_is_tensor(operator, argument, values[argument.name])
    dims = _bind(operator, values)
    first = operator.tensors[0]
    activation, device = values[first.name].dtype, values[first.name].device
    check = _Check(operator, dims, activation, device)
    for argument in operator.arguments:
        value = values[argument.name]
        if isinstance(argument, ScalarArg):
            check.scalar(argument, value)
        elif value is not None:
            check.tensor(argument, value)
    check.rows_fit(values)
    shape = tuple(extent.value(dims) for extent in operator.output.extents)
    dtype = values.get("output_dtype") or activation
    if output is not None:
        check.output(output, shape)
        dtype = output.dtype
    return Facts(dims, activation, device, shape, dtype)


def _check_is_tensor(operator: Operator, argument: TensorArg, value: object) -> None:
    """Refuse what is no tensor, and None where a tensor is required."""
    if value is None and argument.optional:
        return
    rule = "a tensor or None" if argument.optional else "a tensor"
    if not isinstance(value, Tensor):
        raise DtypeError(operator.name, argument.name, rule, type(value).__name__)
    if value.layout is not torch.strided:
        raise ContractError(operator.name, argument.name, "a dense strided tensor", f"{value.layout}")


def _bind(operator: Operator, values: dict[str, Any]) -> dict[str, Any]:
    """Read the value of every symbol off the argument that fixes it."""
    dims: dict[str, Any] = {}
    for symbol, (name, _, minimum) in operator.dims.items():
        argument, tensor = operator.tensor(name), values[name]
        extents = argument.extents[0]
        if tensor.dim() != len(extents):
            raise ContractError(
                operator.name, name, f"[{argument.shapes[0]}]", _shape(tensor.shape)
            )
        axis = next(i for i, extent in enumerate(extents) if extent.text == symbol)
        dims[symbol] = tensor.shape[axis]
        if minimum and dims[symbol] < minimum:
            rule = f"[{argument.shapes[0]}] with {symbol} >= {minimum}"
            raise ContractError(operator.name, name, rule, _shape(tensor.shape))
    return dims


class _Check:
    """The checks of one call, once its symbols are known."""

    def __init__(
        self,
        operator: Operator,
        dims: dict[str, Any],
        activation: torch.dtype,
        device: torch.device,
    ) -> None:
        """Keep what all checks of the call share."""
        self.operator = operator
        self.dims = dims
        self.activation = activation
        self.device = device

    def tensor(self, argument: TensorArg, tensor: Tensor) -> None:
        """Check shape, dtype, device and layout of one tensor."""
        extents = self._shape_of(argument, tensor)
        self._dtype_of(argument, tensor)
        self._device_of(argument.name, tensor)
        self._layout_of(argument, tensor, extents)

    def output(self, tensor: Tensor, shape: tuple[Any, ...]) -> None:
        """Check the caller's output tensor."""
        spec = self.operator.output
        if not isinstance(tensor, Tensor):
            raise DtypeError(self.operator.name, spec.name, "a tensor", type(tensor).__name__)
        if tuple(tensor.shape) != shape:
            rule = f"[{spec.shape}] = {_shape(shape)}"
            self._refuse(spec.name, rule, _shape(tensor.shape), self._source((spec.extents,)))
        self._dtype_of(spec, tensor)
        self._device_of(spec.name, tensor)
        if not tensor.is_contiguous():
            self._refuse(spec.name, spec.layout.value, f"strides {_shape(tensor.stride())}")

    def scalar(self, argument: ScalarArg, value: Any) -> None:  # noqa: ANN401
        """Check one scalar against its rule."""
        rule = argument.rule
        if value is None:
            if not argument.optional:
                raise DtypeError(self.operator.name, argument.name, _rule(argument), "None")
            return
        if isinstance(value, bool) or not isinstance(
            value, (*_SCALAR_TYPES[argument.type], torch.SymInt, torch.SymFloat)
        ):
            fact = f"{value!r} of type {type(value).__name__}"
            raise DtypeError(self.operator.name, argument.name, _rule(argument), fact)
        legal = {
            Rule.FINITE: lambda: math.isfinite(value),
            Rule.NEGATIVE: lambda: math.isfinite(value) and value < 0,
            Rule.NON_NEGATIVE: lambda: math.isfinite(value) and value >= 0,
            Rule.FIRST_SLOT: lambda: value >= 0,
            Rule.CHOICE: lambda: value in argument.choices,
            Rule.OUTPUT_DTYPE: lambda: value in (self.activation, torch.float32),
        }[rule]()
        if not legal:
            error = DtypeError if rule is Rule.OUTPUT_DTYPE else ContractError
            raise error(self.operator.name, argument.name, _rule(argument), f"{value!r}")

    def rows_fit(self, values: dict[str, Any]) -> None:
        """Without indices row i uses slot i, so there must be a slot for every row."""
        if not self.operator.rows_need_slots or values["state_indices"] is not None:
            return
        if self.dims["B"] > self.dims["S"]:
            rule = f"a tensor when there are more rows than slots ({self.dims['B']} > {self.dims['S']})"
            self._refuse("state_indices", rule, "None", self._source((("B", "S"),)))

    def _shape_of(self, argument: TensorArg, tensor: Tensor) -> tuple[Extent, ...]:
        """Return the spelling of the shape that the tensor has."""
        if argument.any_shape:
            count = argument.extents[0][0].value(self.dims)
            if tensor.numel() != count:
                rule = f"any shape of {argument.shapes[0]} = {count} elements"
                self._refuse(
                    argument.name, rule, _shape(tensor.shape), self._source(argument.extents)
                )
            return argument.extents[0]
        wanted = [tuple(e.value(self.dims) for e in extents) for extents in argument.extents]
        for extents, shape in zip(argument.extents, wanted, strict=True):
            if tensor.dim() == len(shape) and tuple(tensor.shape) == shape:
                return extents
        rule = " or ".join(
            f"[{text}] = {_shape(shape)}"
            for text, shape in zip(argument.shapes, wanted, strict=True)
        )
        self._refuse(argument.name, rule, _shape(tensor.shape), self._source(argument.extents))

    def _dtype_of(self, argument: TensorArg | Output, tensor: Tensor) -> None:
        """Check the dtype against the accepted ones."""
        shared = _name(self.activation)
        first = self.operator.tensors[0].name
        if argument.name == first:
            accepted, source = ACTIVATION, ""
        else:
            accepted = tuple(
                dict.fromkeys(shared if d == "activation" else d for d in argument.dtypes)
            )
            source = f"activation type from {first}" if "activation" in argument.dtypes else ""
        if _name(tensor.dtype) not in accepted:
            rule = " or ".join(accepted)
            raise DtypeError(
                self.operator.name, argument.name, rule, _name(tensor.dtype), source
            )

    def _device_of(self, name: str, tensor: Tensor) -> None:
        """All tensors of a call live on one device."""
        if tensor.device != self.device:
            source = f"from {self.operator.tensors[0].name}"
            self._refuse(name, f"on {self.device}", f"{tensor.device}", source)

    def _layout_of(
        self, argument: TensorArg, tensor: Tensor, extents: tuple[Extent, ...]
    ) -> None:
        """Check strides and alignment against the layout's word."""
        layout = argument.layout
        if layout is Layout.STRIDED:
            return
        if layout is Layout.COMPACT:
            legal = tensor.is_contiguous()
        elif layout is Layout.TAPS:
            channels = tensor.shape[2]
            legal = _strides(tensor, (4 * channels, channels, 1)) or _strides(
                tensor, (4 * channels, 1, 4)
            )
        elif layout is Layout.WINDOW:
            slot = tensor.stride(0)
            channels, columns = tensor.shape[1], tensor.shape[2]
            legal = _strides(tensor, (slot, 1, channels)) or _strides(tensor, (slot, columns, 1))
            legal = legal and self._outer(tensor, 0, channels * columns)
        else:
            row = next(i for i, e in enumerate(extents) if e.symbol in ("B", "R", "S"))
            inner = _compact(tensor.shape[row + 1 :])
            legal = _strides(tensor, (*tensor.stride()[: row + 1], *inner))
            if layout is not Layout.READ_ROWS:
                extent = math.prod(tensor.shape[row + 1 :])
                legal = legal and self._outer(tensor, row, extent)
        if not legal:
            fact = f"strides {_shape(tensor.stride())} for shape {_shape(tensor.shape)}"
            self._refuse(argument.name, layout.value, fact)
        if argument.role is Role.UPDATE:
            self._aligned(argument, tensor)

    @staticmethod
    def _outer(tensor: Tensor, axis: int, extent: Any) -> bool:  # noqa: ANN401
        """Rows or slots along ``axis`` do not overlap."""
        return bool(tensor.shape[axis] <= 1 or tensor.stride(axis) >= extent)

    def _aligned(self, argument: TensorArg, tensor: Tensor) -> None:
        """Every slot starts at a multiple of the layout's alignment."""
        unit = _ALIGNMENT[argument.layout]
        if tensor.shape[0] > 1 and (tensor.stride(0) * tensor.element_size()) % unit != 0:
            fact = f"a slot stride of {tensor.stride(0)} elements of {tensor.element_size()} bytes"
            self._refuse(argument.name, argument.layout.value, fact)
        if _has_storage(tensor) and tensor.data_ptr() % unit != 0:
            fact = f"a pool that starts {tensor.data_ptr() % unit} bytes past a multiple of {unit}"
            self._refuse(argument.name, argument.layout.value, fact)

    def _source(self, spellings: tuple[tuple[Extent | str, ...], ...]) -> str:
        """Say which argument fixed each symbol of a shape."""
        symbols = {e if isinstance(e, str) else e.symbol for extents in spellings for e in extents}
        return ", ".join(
            f"{symbol} = {self.dims[symbol]} from {name}"
            for symbol, (name, _, _) in self.operator.dims.items()
            if symbol in symbols
        )

    def _refuse(self, name: str, rule: str, fact: str, source: str = "") -> Any:  # noqa: ANN401
        """Raise the contract's error."""
        raise ContractError(self.operator.name, name, rule, fact, source)


def _rule(argument: ScalarArg) -> str:
    """Return the sentence of a scalar's rule."""
    if argument.rule is Rule.CHOICE:
        return " or ".join(repr(choice) for choice in argument.choices)
    return argument.rule.value


def _shape(sizes: Any) -> str:  # noqa: ANN401
    """Print sizes or strides."""
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def _name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the package."""
    return str(dtype).removeprefix("torch.")


def _compact(sizes: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the strides of a contiguous tensor of these sizes."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def _strides(tensor: Tensor, wanted: tuple[Any, ...]) -> bool:
    """Compare strides, where an axis of one element has none that matters."""
    return all(
        size <= 1 or have == want
        for size, have, want in zip(tensor.shape, tensor.stride(), wanted, strict=True)
    )


def _has_storage(tensor: Tensor) -> bool:
    """Tell whether a tensor has an address (fake and meta tensors have none)."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta"

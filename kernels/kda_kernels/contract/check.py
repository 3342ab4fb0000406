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

from kda_kernels.contract.layout import lies_as, misalignment, number
from kda_kernels.contract.spec import (
    ACTIVATION,
    Extent,
    Operator,
    Output,
    Role,
    Rule,
    ScalarArg,
    TensorArg,
)
from kda_kernels.errors import ContractError, DtypeError

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
    for tensor in operator.tensors:
        _check_is_tensor(operator, tensor, values[tensor.name])
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
    check.no_gradient(values, output)
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
        raise ContractError(
            operator.name, argument.name, "a dense strided tensor", f"{value.layout}"
        )


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
            raise self._illegal(
                spec.name, rule, _shape(tensor.shape), self._source((spec.extents,))
            )
        self._dtype_of(spec, tensor)
        self._device_of(spec.name, tensor)
        if not tensor.is_contiguous():
            raise self._illegal(spec.name, spec.layout.value, f"strides {_shape(tensor.stride())}")

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
        if not self._legal(argument, value):
            error = DtypeError if rule is Rule.OUTPUT_DTYPE else ContractError
            raise error(self.operator.name, argument.name, _rule(argument), f"{value!r}")

    def _legal(self, argument: ScalarArg, value: Any) -> bool:  # noqa: ANN401
        """Tell whether a scalar of the right type obeys its rule."""
        if argument.rule is Rule.CHOICE:
            return value in argument.choices
        if argument.rule is Rule.OUTPUT_DTYPE:
            return value in (self.activation, torch.float32)
        if argument.rule is Rule.FIRST_SLOT:
            return bool(value >= 0)
        if not math.isfinite(value):
            return False
        if argument.rule is Rule.NEGATIVE:
            return bool(value < 0)
        return argument.rule is Rule.FINITE or bool(value >= 0)

    def rows_fit(self, values: dict[str, Any]) -> None:
        """Without indices row i uses slot i, so there must be a slot for every row."""
        if not self.operator.rows_need_slots or values["state_indices"] is not None:
            return
        rows, slots = self.dims["B"], self.dims["S"]
        if rows > slots:
            more = f"{number(rows)} > {number(slots)}"
            rule = f"a tensor when there are more rows than slots ({more})"
            raise self._illegal("state_indices", rule, "None", self._source((("B", "S"),)))

    def no_gradient(self, values: dict[str, Any], output: Tensor | None) -> None:
        """Refuse what autograd would expect a gradient of: there is none."""
        if not torch.is_grad_enabled():
            return
        for name, value in (*values.items(), (self.operator.output.name, output)):
            if isinstance(value, Tensor) and value.requires_grad:
                rule = "a tensor without requires_grad (or the call under torch.no_grad())"
                fact = "one that requires grad: the operator is for decoding and has no gradient"
                raise self._illegal(name, rule, fact)

    def _shape_of(self, argument: TensorArg, tensor: Tensor) -> tuple[Extent, ...]:
        """Return the spelling of the shape that the tensor has."""
        if argument.any_shape:
            count = argument.extents[0][0].value(self.dims)
            if tensor.numel() != count:
                rule = f"any shape of {argument.shapes[0]} = {number(count)} elements"
                raise self._illegal(
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
        raise self._illegal(
            argument.name, rule, _shape(tensor.shape), self._source(argument.extents)
        )

    def _dtype_of(self, argument: TensorArg | Output, tensor: Tensor) -> None:
        """Check the dtype against the accepted ones."""
        shared = _name(self.activation)
        first = self.operator.tensors[0].name
        accepted: tuple[str, ...]
        if argument.name == first:
            accepted, source = tuple(ACTIVATION), ""
        else:
            accepted = tuple(
                dict.fromkeys(shared if d == "activation" else d for d in argument.dtypes)
            )
            source = f"activation type from {first}" if "activation" in argument.dtypes else ""
        if _name(tensor.dtype) not in accepted:
            rule = " or ".join(accepted)
            raise DtypeError(self.operator.name, argument.name, rule, _name(tensor.dtype), source)

    def _device_of(self, name: str, tensor: Tensor) -> None:
        """All tensors of a call live on one device."""
        if tensor.device != self.device:
            source = f"from {self.operator.tensors[0].name}"
            raise self._illegal(name, f"on {self.device}", f"{tensor.device}", source)

    def _layout_of(self, argument: TensorArg, tensor: Tensor, extents: tuple[Extent, ...]) -> None:
        """Check strides and alignment against the layout's word."""
        rule = argument.layout.value
        if not lies_as(argument.layout, tensor, extents):
            fact = f"strides {_shape(tensor.stride())} for shape {_shape(tensor.shape)}"
            raise self._illegal(argument.name, rule, fact)
        if argument.role is Role.UPDATE:
            fact = misalignment(argument.layout, tensor)
            if fact:
                raise self._illegal(argument.name, rule, fact)

    def _source(self, spellings: tuple[tuple[Extent | str, ...], ...]) -> str:
        """Say which argument fixed each symbol of a shape."""
        symbols = {e if isinstance(e, str) else e.symbol for extents in spellings for e in extents}
        return ", ".join(
            f"{symbol} = {number(self.dims[symbol])} from {name}"
            for symbol, (name, _, _) in self.operator.dims.items()
            if symbol in symbols
        )

    def _illegal(self, name: str, rule: str, fact: str, source: str = "") -> ContractError:
        """Return the contract's error."""
        return ContractError(self.operator.name, name, rule, fact, source)


def _rule(argument: ScalarArg) -> str:
    """Return the sentence of a scalar's rule."""
    if argument.rule is Rule.CHOICE:
        return " or ".join(repr(choice) for choice in argument.choices)
    return argument.rule.value


def _shape(sizes: Any) -> str:  # noqa: ANN401
    """Print sizes or strides."""
    return "[" + ", ".join(number(size) for size in sizes) + "]"


def _name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the package."""
    return str(dtype).removeprefix("torch.")

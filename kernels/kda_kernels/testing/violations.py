"""One illegal call per rule of a contract, drawn from the declaration.

Lives here: for every tensor a wrong shape, dtype, device, layout and alignment, for every scalar a
wrong value and type. Not here: the sentences they should produce (tests hold those).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.spec import Layout, Operator, Role, Rule, ScalarArg, TensorArg
from kda_kernels.errors import ContractError, DtypeError
from kda_kernels.testing.cases import Case, clone, draw

_BAD_SCALARS: dict[Rule, tuple[Any, ...]] = {
    Rule.FINITE: (math.nan, math.inf),
    Rule.NEGATIVE: (0.0, 1.0, math.nan, -math.inf),
    Rule.NON_NEGATIVE: (-1e-5, math.nan, math.inf),
    Rule.FIRST_SLOT: (-1,),
    Rule.CHOICE: ("kx",),
    Rule.OUTPUT_DTYPE: (),
}


@dataclass(frozen=True)
class Violation:
    """An illegal call: what was done to which argument, and the error it must raise."""

    argument: str
    deed: str
    values: dict[str, Any]
    error: type[Exception]


def violations(operator: Operator, case: Case) -> Iterator[Violation]:
    """Yield one illegal call per rule; every other argument is legal."""
    legal = draw(operator, case)
    for argument in operator.arguments:
        for deed, value, error in _misdeeds(argument, legal[argument.name]):
            values = clone(legal)
            values[argument.name] = value
            yield Violation(argument.name, deed, values, error)


def _misdeeds(
    argument: TensorArg | ScalarArg,
    value: Any,  # noqa: ANN401
) -> Iterator[tuple[str, Any, type[Exception]]]:
    """Yield (what was done, the illegal value, the error) for one argument."""
    if isinstance(argument, ScalarArg):
        for bad in _BAD_SCALARS[argument.rule]:
            yield f"is {bad}", bad, ContractError
        if argument.rule is Rule.OUTPUT_DTYPE:
            yield "is int32", torch.int32, DtypeError
        if not argument.optional:
            yield "is None", None, DtypeError
        return
    if not argument.optional:
        yield "is None", None, DtypeError
    if value is None:
        return
    yield "lost its last element", value[..., :-1].clone(), ContractError
    yield "has int16 elements", value.to(torch.int16), DtypeError
    yield "is on another device", value.to("meta"), ContractError
    yield from _strides(argument, value)


def _strides(argument: TensorArg, value: Tensor) -> Iterator[tuple[str, Tensor, type[Exception]]]:
    """Yield the illegal layouts of one tensor."""
    if argument.layout is Layout.STRIDED or (argument.any_shape and value.dim() == 0):
        return
    shape, stride = list(value.shape), list(value.stride())
    gaps = torch.zeros(2 * math.prod(shape), dtype=value.dtype)
    if shape[-1] > 1:
        doubled = [2 * step for step in torch.empty(shape).stride()]
        yield "has gaps between elements", gaps.as_strided(shape, doubled), ContractError
    if argument.layout is Layout.ROWS and shape[0] > 1:
        squeezed = [shape[-1] - 1, 1]
        yield "has overlapping rows", gaps.as_strided(shape, squeezed), ContractError
    if argument.role is not Role.UPDATE:
        return
    yield "is expanded", value[:1].expand(shape), ContractError
    inner = math.prod(shape[1:])
    unit = 16 if argument.layout is Layout.SLOTS else 8
    loose = torch.zeros((inner + 1) * shape[0] + unit, dtype=value.dtype)
    apart = [inner + 1, *stride[1:]]
    yield "has misaligned slots", loose.as_strided(shape, apart), ContractError
    packed = [inner, *stride[1:]]
    yield "starts off its alignment", loose.as_strided(shape, packed, 1), ContractError

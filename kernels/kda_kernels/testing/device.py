"""Calls drawn on the CPU, run on another device and held against their references.

Lives here: copies that keep strides, offsets and padding, one launch, and the comparison with
float64 that every backend must pass. Not here: inputs (cases.py) and budgets (compare.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.spec import Operator, Role
from kda_kernels.plan import launcher, reference
from kda_kernels.testing.cases import clone, exact, output_of
from kda_kernels.testing.compare import (
    assert_same_bits,
    assert_storage_untouched,
    assert_untouched,
    assert_within_budget,
)
from kda_kernels.testing.liveness import footprint
from kda_kernels.testing.ties import step_off_ties

Values = dict[str, Any]


def moved(tensor: Tensor, device: str) -> Tensor:
    """Copy a tensor's whole storage to a device, so that padding and offsets come along."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole = whole.set_(tensor.untyped_storage()).to(device, copy=True)
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(
        whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def on(device: str, values: Values) -> Values:
    """Copy a call to a device; tensors that share memory share its copy."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage().data_ptr()
        if memory not in copies:
            copies[memory] = moved(tensor, device)
        whole = copies[memory]
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return empty.set_(whole.untyped_storage(), *place)

    return {k: copy(v) if isinstance(v, Tensor) else v for k, v in values.items()}


def launch(operator: Operator, values: Values, output: Tensor) -> Tensor:
    """Run a call in place where its tensors are, validated and planned; return the output."""
    positional = [values[a.name] for a in operator.abi if not a.keyword]
    keywords = {a.name: values[a.name] for a in operator.abi if a.keyword}
    launcher(operator.name).write(*positional, **keywords, output=output)
    return output


def run_on(
    device: str, operator: Operator, values: Values, dtype: torch.dtype | None = None
) -> Tensor:
    """Run a call of the CPU on a device, in place on its pools; return the output."""
    output = output_of(operator, values, dtype)
    run_there(device, operator, values, output)
    return output


def run_there(device: str, operator: Operator, values: Values, output: Tensor) -> None:
    """Run a call of the CPU on a device, and bring all bytes back that it may have written.

    Padding comes back too, so what may not be written can be held against what was there.
    """
    name = operator.output.name
    there = on(device, values | {name: output})
    launch(operator, there, there[name])
    here = {pool: values[pool] for pool in _pools(operator)} | {name: output}
    for written, tensor in here.items():
        tensor.untyped_storage().copy_(there[written].untyped_storage())


def assert_right_on(
    device: str, operator: Operator, values: Values, dtype: torch.dtype | None = None
) -> None:
    """Raise AssertionError unless a call is right on a device and touches nothing else there."""
    step_off_ties(operator, values)
    before, planned = clone(values), clone(values)
    wanted = output_of(operator, planned, dtype)
    reference(operator.name)(*[planned[a.name] for a in operator.abi], wanted)
    exact_output, exact_state = exact(operator, values)
    output = run_on(device, operator, values, dtype)
    slots = footprint(operator, values).state_slots
    assert_within_budget(output, wanted, exact_output, "output")
    assert_within_budget(
        values["state"][slots], planned["state"][slots], exact_state[slots], "state"
    )
    assert_untouched(values["state"], before["state"], slots, "state")
    for name in _pools(operator):
        assert_storage_untouched(values[name], before[name], name)
        if name != "state":
            # A window is moved, not computed.
            assert_same_bits(values[name], planned[name], name)


def _pools(operator: Operator) -> list[str]:
    return [a.name for a in operator.tensors if a.role is Role.UPDATE]

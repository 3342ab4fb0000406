"""From a call to a compiled function: signature, validation on a miss, and the plan that is kept.

Lives here: one Launcher per operator, the dictionary of plans and the choice of the backend's
compiled function. Not here: registration in torch (kda_ops.library) and how a backend compiles.
Backends are imported on the first miss, so importing this module builds and initialises nothing.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.check import Facts, validate
from kda_kernels.contract.signature import signature_function
from kda_kernels.contract.spec import Operator
from kda_kernels.errors import UnsupportedError
from kda_kernels.fused_decode.contract import CONTRACT as FUSED_DECODE
from kda_kernels.packed_decode.contract import CONTRACT as PACKED_DECODE
from kda_kernels.packed_fused_decode.contract import CONTRACT as PACKED_FUSED_DECODE

CONTRACTS = (PACKED_DECODE, FUSED_DECODE, PACKED_FUSED_DECODE)
"""The contracts of all operators, in the order of documentation."""

Kernel = Callable[..., None]

_MAX_PLANS = 4096


@dataclass(frozen=True)
class Plan:
    """What a known signature leads to: the kernel and the metadata of its result."""

    kernel: Kernel
    output_shape: tuple[int, ...]
    output_dtype: torch.dtype
    device: torch.device


class Launcher:
    """Runs one operator: a dictionary hit leads straight to the compiled function."""

    def __init__(self, operator: Operator) -> None:
        """Prepare the signatures of both overloads; nothing is compiled yet."""
        self.operator = operator
        self._abi = len(operator.abi)
        self._allocating: dict[Hashable, Plan] = {}
        self._out: dict[Hashable, Plan] = {}
        self._signature = signature_function(operator, out=False)
        self._out_signature = signature_function(operator, out=True)

    def allocate(self, *arguments: Any) -> Tensor:  # noqa: ANN401 - the contract's arguments
        """Run the operator on the contract's arguments and return a new output tensor."""
        try:
            plan = self._allocating.get(self._signature(*arguments))
        except (AttributeError, TypeError):
            plan = None
        if plan is None:
            plan = self._plan(arguments)
        output = torch.empty(plan.output_shape, dtype=plan.output_dtype, device=plan.device)
        plan.kernel(*arguments[: self._abi], output)
        return output

    def write(self, *arguments: Any) -> None:  # noqa: ANN401 - the kernel's arguments
        """Run the operator on the kernel's arguments, the output tensor last."""
        try:
            plan = self._out.get(self._out_signature(*arguments))
        except (AttributeError, TypeError):
            plan = None
        if plan is None:
            plan = self._plan_out(arguments)
        plan.kernel(*arguments)

    def facts(self, *arguments: Any, output: Tensor | None = None) -> Facts:  # noqa: ANN401
        """Validate the contract's arguments and return the facts (used by fake implementations)."""
        names = [argument.name for argument in self.operator.arguments]
        given = dict(zip(names, arguments, strict=False))
        return validate(self.operator, dict.fromkeys(names) | given, output)

    def forget(self) -> None:
        """Drop every plan, so that the next call looks for its kernel again."""
        self._allocating.clear()
        self._out.clear()

    def _plan(self, arguments: tuple[Any, ...]) -> Plan:
        """Validate a new signature and keep its plan."""
        plan = self._choose(self.facts(*arguments))
        _keep(self._allocating, self._signature(*arguments), plan)
        return plan

    def _plan_out(self, arguments: tuple[Any, ...]) -> Plan:
        """Validate a new signature of the out overload and keep its plan."""
        plan = self._choose(self.facts(*arguments[:-1], output=arguments[-1]))
        _keep(self._out, self._out_signature(*arguments), plan)
        return plan

    def _choose(self, facts: Facts) -> Plan:
        """Find the kernel for a legal call."""
        shape = tuple(int(size) for size in facts.output_shape)
        if facts.device.type != "cpu":
            first = self.operator.tensors[0].name
            raise UnsupportedError(
                self.operator.name,
                first,
                "on cpu (this version has no CUDA kernels)",
                str(facts.device),
            )
        kernel = cpu_kernel(self.operator.name) if facts.dims[self.operator.rows] else _nothing
        if os.environ.get("KDA_CHECK") == "1":
            kernel = _checked(self.operator, kernel)
        return Plan(kernel, shape, facts.output_dtype, facts.device)


_LAUNCHERS = {contract.name: Launcher(contract) for contract in CONTRACTS}


def launcher(name: str) -> Launcher:
    """Return the launcher of an operator by its name without namespace."""
    return _LAUNCHERS[name]


def cpu_kernel(name: str) -> Kernel:
    """Return the CPU function of an operator: compiled, or its reference with one warning."""
    from kda_kernels._cpu import build  # noqa: PLC0415 - backends are imported on a miss

    try:
        kernel: Kernel = build.load(name)
    except build.CompilerMissing as missing:
        _warn_once(f"KDA operators run as their slow PyTorch references: {missing}")
        return reference(name)
    return kernel


def reference(name: str) -> Kernel:
    """Return the eager PyTorch reference of an operator, called like a kernel."""
    module = importlib.import_module(f"kda_kernels.{name}.reference")
    kernel: Kernel = getattr(module, name)
    return kernel


@functools.cache
def _warn_once(message: str) -> None:
    """Warn the first time a message comes up."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _keep(plans: dict[Hashable, Plan], key: Hashable, plan: Plan) -> None:
    """Remember a plan; an odd caller with endless signatures must not grow memory for ever."""
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[key] = plan


def _nothing(*arguments: Any) -> None:  # noqa: ANN401
    """Serve an empty call: there is nothing to launch."""


def _checked(operator: Operator, kernel: Kernel) -> Kernel:
    """Wrap a kernel with the check of what is otherwise the caller's promise."""
    from kda_kernels import promises  # noqa: PLC0415 - only under KDA_CHECK=1

    def run(*arguments: Any) -> None:  # noqa: ANN401
        promises.check(operator, arguments)
        kernel(*arguments)

    return run

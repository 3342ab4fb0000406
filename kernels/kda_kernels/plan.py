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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_kernels.contract.check import Facts, validate
from kda_kernels.contract.signature import key, overload_arguments, parameters
from kda_kernels.contract.spec import Operator, Role, TensorArg
from kda_kernels.errors import UnsupportedError
from kda_kernels.fused_decode.contract import CONTRACT as FUSED_DECODE
from kda_kernels.packed_decode.contract import CONTRACT as PACKED_DECODE
from kda_kernels.packed_fused_decode.contract import CONTRACT as PACKED_FUSED_DECODE

CONTRACTS = (PACKED_DECODE, FUSED_DECODE, PACKED_FUSED_DECODE)
"""The contracts of all operators, in the order of documentation."""

Kernel = Callable[..., None]

MAX_PLANS = 4096
"""Signatures that one overload remembers."""


class Plan(NamedTuple):
    """What a known signature leads to: the kernel and the metadata of its result."""

    kernel: Kernel
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Launcher:
    """Runs one operator: a dictionary hit leads straight to the compiled function.

    ``allocate`` and ``write`` are the operator's two overloads under the schema's parameter
    lists. Both are written out as straight-line source, because at every call a loop over the
    arguments costs more than a small kernel. ``allocate_on_cpu`` and ``write_on_cpu`` do the same
    for callers that know every tensor to be on the CPU, as torch's dispatcher does, and look up no
    device (14 look-ups of 0.12 microseconds on a Zen 3).
    """

    def __init__(self, operator: Operator) -> None:
        """Write both overloads; nothing is compiled yet."""
        self.operator = operator
        self._plans: tuple[dict[Hashable, Plan], dict[Hashable, Plan]] = ({}, {})
        self.allocate: Callable[..., Tensor] = self._overload(out=False)
        self.write: Callable[..., None] = self._overload(out=True)
        self.allocate_on_cpu: Callable[..., Tensor] = self._overload(out=False, cpu_only=True)
        self.write_on_cpu: Callable[..., None] = self._overload(out=True, cpu_only=True)

    def _overload(self, *, out: bool, cpu_only: bool = False) -> Callable[..., Any]:
        """Compile the function of one overload."""
        namespace: dict[str, Any] = {
            "find": self._plans[out].get,
            "choose": functools.partial(self._choose, out),
            "grad_enabled": torch.is_grad_enabled,
            "inference_enabled": torch.is_inference_mode_enabled,
            "written": torch.autograd.graph.increment_version,
            "empty": torch.empty_strided,
        }
        name = self.operator.name
        source = _source(self.operator, out=out, cpu_only=cpu_only)
        exec(compile(source, f"<kda::{name}>", "exec"), namespace)
        function: Callable[..., Any] = namespace[name]
        return function

    def facts(self, *arguments: Any, output: Tensor | None = None) -> Facts:  # noqa: ANN401
        """Validate the contract's arguments and return the facts (used by fake implementations)."""
        names = [argument.name for argument in self.operator.arguments]
        given = dict(zip(names, arguments, strict=False))
        return validate(self.operator, dict.fromkeys(names) | given, output)

    def forget(self) -> None:
        """Drop every plan, so that the next call looks for its kernel again."""
        for plans in self._plans:
            plans.clear()

    def _choose(self, out: bool, key: Hashable, *arguments: Any) -> Plan:  # noqa: ANN401
        """Validate a new signature, find its kernel and keep the plan."""
        given, output = (arguments[:-1], arguments[-1]) if out else (arguments, None)
        facts = self.facts(*given, output=output)
        _writable(self.operator, given)
        kernel = self._kernel(given, facts) if facts.dims[self.operator.rows] else _nothing
        if os.environ.get("KDA_CHECK") == "1":
            kernel = _checked(self.operator, kernel)
        shape = tuple(int(size) for size in facts.output_shape)
        stride = torch.empty(shape, device="meta").stride()
        plan = Plan(kernel, shape, stride, facts.output_dtype, facts.device)
        plans = self._plans[out]
        if len(plans) >= MAX_PLANS:
            # An odd caller with endless signatures must not grow memory for ever.
            plans.clear()
        plans[key] = plan
        return plan

    def _kernel(self, arguments: tuple[Any, ...], facts: Facts) -> Kernel:
        """Find the kernel of the call's device; no backend stands in for another."""
        if facts.device.type == "cpu":
            return cpu_kernel(self.operator.name)
        if facts.device.type == "cuda":
            names = [argument.name for argument in self.operator.arguments]
            given = dict(zip(names, arguments, strict=False))
            return cuda_kernel(self.operator, dict.fromkeys(names) | given, facts)
        first = self.operator.tensors[0].name
        raise UnsupportedError(self.operator.name, first, "on cpu or cuda", str(facts.device))


def _writable(operator: Operator, arguments: tuple[Any, ...]) -> None:
    """Let torch raise its own error where a pool made in inference mode is used outside of it."""
    if torch.is_inference_mode_enabled():
        return
    for argument, value in zip(operator.arguments, arguments, strict=False):
        if isinstance(argument, TensorArg) and argument.role is Role.UPDATE:
            if value.is_inference():
                value[:0].zero_()


def _source(operator: Operator, *, out: bool, cpu_only: bool) -> str:
    """Return the source of an overload: key, plan, output, kernel.

    Versions of what is written are counted up, as torch's own in-place operators do, so that
    autograd notices a saved tensor that has changed.
    """
    passed = ", ".join(argument.name for argument in overload_arguments(operator, out=out))
    kernel = ", ".join([argument.name for argument in operator.abi] + [operator.output.name])
    written = [a.name for a in operator.tensors if a.role is Role.UPDATE]
    allocation = f"    {operator.output.name} = empty(shape, stride, dtype=dtype, device=device)\n"
    if out:
        passed += f", {operator.output.name}"
        written.append(operator.output.name)
    return (
        f"def {operator.name}({parameters(operator, out=out)}):\n"
        f"    try:\n"
        f"        key = {key(operator, out=out, cpu_only=cpu_only)}\n"
        f"        plan = find(key)\n"
        f"    except (AttributeError, TypeError):\n"
        f"        key = plan = None\n"
        f"    if plan is None:\n"
        f"        plan = choose(key, {passed})\n"
        f"    kernel, shape, stride, dtype, device = plan\n"
        f"    written(({', '.join(written)},))\n"
        f"{'' if out else allocation}"
        f"    kernel({kernel})\n"
        f"{'' if out else f'    return {operator.output.name}' + chr(10)}"
    )


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
        _warn_once(f"kda::{name} runs as its slow PyTorch reference: {missing}")
        return reference(name)
    return kernel


def cuda_kernel(operator: Operator, values: dict[str, Any], facts: Facts) -> Kernel:
    """Return the CUDA function that serves a validated call and takes the contract's arguments.

    Args:
        operator: the contract.
        values: the call's arguments by name; what is chosen depends on nothing but its signature.
        facts: what the validator found.

    Raises:
        UnsupportedError: no CUDA kernel serves the call, the device is none that kernels are
            compiled for, CuTe DSL is missing or broken, or a first use falls into stream capture.
    """
    name, first = operator.name, operator.tensors[0].name
    from kda_kernels._cute import compile as backend  # noqa: PLC0415 - imported on a miss
    from kda_kernels._cute.parallel import launch_of  # noqa: PLC0415

    target = backend.target_for(name, first, facts.device)
    backend.require(name, first, facts.device)
    processors = torch.cuda.get_device_properties(facts.device).multi_processor_count
    launch = launch_of(name)
    variant = launch.variant_of(values, facts.output_dtype, processors, overlap=target.can_overlap)
    # The stream that may be being captured is the one of the call's device.
    with torch.cuda.device(facts.device):
        function = backend.load(name, variant, target, launch.trace, launch.SOURCES)
    kernel: Kernel = launch.adapter(function, values)
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


def _nothing(*arguments: Any) -> None:  # noqa: ANN401
    """Serve an empty call: there is nothing to launch."""


def _checked(operator: Operator, kernel: Kernel) -> Kernel:
    """Wrap a kernel with the check of what is otherwise the caller's promise."""
    from kda_kernels import promises  # noqa: PLC0415 - only under KDA_CHECK=1

    def run(*arguments: Any) -> None:  # noqa: ANN401
        promises.check(operator, arguments)
        kernel(*arguments)

    return run

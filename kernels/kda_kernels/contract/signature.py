"""The signature of a call: what the validator's verdict depends on, as source of a hashable key.

Lives here: the key and the parameter list of an operator, as Python source from which plan.py
writes one straight-line function per overload. The key holds shapes, strides, dtypes, devices,
alignment of pools (on GPUs of every tensor), scalars and whether a gradient is asked for, never
values. Not here: the dictionary of plans that it looks up (plan.py).
"""

from __future__ import annotations

from kda_kernels.contract.spec import Layout, Operator, Role, ScalarArg, TensorArg


def overload_arguments(operator: Operator, *, out: bool) -> tuple[TensorArg | ScalarArg, ...]:
    """Return the arguments of an overload in order; ``out`` is followed by the output tensor."""
    return operator.abi if out else operator.arguments


def parameters(operator: Operator, *, out: bool) -> str:
    """Return an overload's parameter list as its schema has it: names, defaults, keyword-only."""
    arguments = overload_arguments(operator, out=out)
    positional = [_parameter(argument) for argument in arguments if not argument.keyword]
    keywords = [_parameter(argument) for argument in arguments if argument.keyword]
    return ", ".join([*positional, "*", *keywords, *([operator.output.name] if out else [])])


def key(operator: Operator, *, out: bool, cpu_only: bool = False) -> str:
    """Return the tuple expression of a call's key over the overload's parameter names.

    With ``cpu_only`` the key leaves out devices and what only GPUs ask for: torch's dispatcher
    sends a call to the CPU implementation only when all of its tensors live there.
    """
    arguments = overload_arguments(operator, out=out)
    parts = [_facts(a, cpu_only) if isinstance(a, TensorArg) else a.name for a in arguments]
    wanted = [f"{operator.output.name}.requires_grad"] if out else []
    output = operator.output
    parts += [_metadata(output.name, output.layout, cpu_only)] if out else []
    parts += [] if cpu_only else [_alignments(operator)]
    pools = [a.name for a in operator.tensors if a.role is Role.UPDATE]
    parts.append(_objections([*filter(None, map(_wants_gradient, arguments)), *wanted], pools))
    return f"({', '.join(parts)})"


def _parameter(argument: TensorArg | ScalarArg) -> str:
    """Write one parameter."""
    if isinstance(argument, ScalarArg):
        return f"{argument.name}={argument.default!r}"
    return f"{argument.name}=None" if argument.optional and argument.keyword else argument.name


def _metadata(name: str, layout: Layout, cpu_only: bool) -> str:
    """Write what the validator reads of a tensor: of its strides no more than the layout asks.

    An index stands for the device, which costs half as much; tensors of kinds without an index
    (meta, fake) are sent elsewhere by the dispatcher.
    """
    strides = {Layout.STRIDED: "", Layout.COMPACT: f"{name}.is_contiguous(), "}
    asked = strides.get(layout, f"{name}.stride(), ")
    device = "" if cpu_only else f", {name}.get_device()"
    return f"{name}.shape, {asked}{name}.dtype{device}"


def _facts(argument: TensorArg, cpu_only: bool) -> str:
    """Write the part of the key that one tensor contributes."""
    name = argument.name
    if argument.optional:
        return f"None if {name} is None else ({_metadata(name, argument.layout, cpu_only)})"
    aligned = f", {name}.data_ptr() & 15" if argument.role is Role.UPDATE else ""
    return _metadata(name, argument.layout, cpu_only) + aligned


def _alignments(operator: Operator) -> str:
    """Write where rows and parameters start within 16 bytes: on GPUs it decides how to read them.

    CPU kernels read every address alike, so the key of the CPU leaves this out.
    """
    names = [
        a.name
        for a in operator.tensors
        if a.role is not Role.UPDATE and not a.optional and a.layout is not Layout.STRIDED
    ]
    starts = ", ".join(f"{name}.data_ptr() & 15" for name in names)
    return f"{operator.tensors[0].name}.is_cuda and ({starts})"


def _wants_gradient(argument: TensorArg | ScalarArg) -> str:
    """Write the question whether an argument requires grad; scalars and indices never do."""
    if isinstance(argument, ScalarArg) or all(d.startswith("int") for d in argument.dtypes):
        return ""
    asked = f"{argument.name}.requires_grad"
    return f"({argument.name} is not None and {asked})" if argument.optional else asked


def _objections(wants: list[str], pools: list[str]) -> str:
    """Write the question whether autograd objects: a key that answers yes is never kept.

    It does to an argument that requires grad under grad mode, and to writing a pool that was made
    in inference mode outside of it.
    """
    inference = " or ".join(f"{pool}.is_inference()" for pool in pools)
    return (
        f"(grad_enabled() and ({' or '.join(wants)})) "
        f"or (({inference}) and not inference_enabled())"
    )

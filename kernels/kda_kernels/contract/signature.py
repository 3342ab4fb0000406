"""The signature of a call: what the validator's verdict depends on, as a hashable key.

Lives here: a generator that writes one straight-line function per operator. The key holds shapes,
strides, dtypes, devices, alignment of pools and scalars, never values. Not here: the dictionary of
plans that it looks up (plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kda_kernels.contract.spec import Operator, Role, TensorArg


def key_expression(argument: TensorArg, name: str) -> str:
    """Return Python source that evaluates to the part of the key one tensor contributes."""
    facts = [f"{name}.shape", f"{name}.stride()", f"{name}.dtype", f"{name}.device"]
    if argument.role is Role.UPDATE:
        facts.append(f"{name}.data_ptr() & 15")
    parts = ", ".join(facts)
    return f"None if {name} is None else ({parts})" if argument.optional else parts


def signature_source(operator: Operator, *, out: bool) -> str:
    """Return the source of ``signature(*arguments[, output])``."""
    names = [
        argument.name for argument in operator.arguments if not out or argument in operator.abi
    ]
    parts = [
        key_expression(argument, argument.name)
        if isinstance(argument, TensorArg)
        else argument.name
        for argument in operator.arguments
        if argument.name in names
    ]
    if out:
        names.append("output")
        parts.append("output.shape, output.stride(), output.dtype, output.device")
    body = ",\n        ".join(parts)
    return f"def signature({', '.join(names)}):\n    return (\n        {body},\n    )\n"


def signature_function(operator: Operator, *, out: bool) -> Callable[..., Hashable]:
    """Compile the signature function of an operator's allocating or out overload.

    The function raises AttributeError where a tensor argument is no tensor, and gives an
    unhashable or unknown key where a scalar is odd: both lead to the validator.
    """
    namespace: dict[str, Any] = {}
    source = signature_source(operator, out=out)
    exec(compile(source, f"<kda signature of {operator.name}>", "exec"), namespace)
    function: Callable[..., Hashable] = namespace["signature"]
    return function

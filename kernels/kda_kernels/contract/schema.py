"""The torch schema of an operator's two overloads, written from its contract.

Lives here: text in torch's schema language. Not here: registration (kda_ops.library).
"""

from __future__ import annotations

from kda_kernels.contract.spec import Operator, Role, ScalarArg, TensorArg

_TYPES = {"float": "float", "int": "int", "str": "str", "dtype": "ScalarType"}


def schema(operator: Operator, *, out: bool) -> str:
    """Return the schema of the allocating overload or of the ``out`` overload.

    Every pool is annotated as mutated under an alias letter of its own. The ``out`` overload
    returns nothing: an operator that returns a tensor it was given would break functionalisation.
    """
    arguments = operator.abi if out else operator.arguments
    letters = iter("abcdefg")
    declared = {argument.name: _declare(argument, letters) for argument in arguments}
    positional = [declared[a.name] for a in arguments if not a.keyword]
    keywords = [declared[a.name] for a in arguments if a.keyword]
    if out:
        keywords.append(f"Tensor({next(letters)}!) {operator.output.name}")
    name = f"{operator.name}.out" if out else operator.name
    parts = ", ".join([*positional, "*", *keywords])
    return f"{name}({parts}) -> {'()' if out else 'Tensor'}"


def _declare(argument: TensorArg | ScalarArg, letters: object) -> str:
    """Write one argument."""
    if isinstance(argument, TensorArg):
        alias = f"({next(letters)}!)" if argument.role is Role.UPDATE else ""  # type: ignore[call-overload]
        optional = "?" if argument.optional else ""
        default = "=None" if argument.optional and argument.keyword else ""
        return f"Tensor{alias}{optional} {argument.name}{default}"
    optional = "?" if argument.optional else ""
    default = "None" if argument.default is None else repr(argument.default).replace("'", '"')
    return f"{_TYPES[argument.type]}{optional} {argument.name}={default}"

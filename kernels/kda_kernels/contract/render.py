"""Documentation tables written from the contracts.

Lives here: docs/operators.md as a function of the contracts. ``python -m
kda_kernels.contract.render > docs/operators.md`` renews the page; a test keeps it up to date.
Not here: prose about how to use the operators.
"""

from __future__ import annotations

import sys

from kda_kernels.contract.schema import schema
from kda_kernels.contract.spec import Operator, Rule, ScalarArg, TensorArg

_INTRODUCTION = """# Operators

This page is written from the contracts in `kernels/kda_kernels/<operator>/contract.py` by
`python -m kda_kernels.contract.render`; edit those, not this.

D = 128 is the width of a key head and of a value head. *activation* stands for one of bfloat16,
float16 and float32, the same for all activation arguments of a call. A row is **live** when
`first_slot <= index < S` (with `first_slot=None`: `-S <= index < S`, negative indices count from
the end); any other index makes it a **null** row: its output is +0 and no pool byte is read into a
result or written, whatever the row's inputs hold.

Every illegal call raises before anything is written:
`kda::<operator>: <argument> must be <rule>, got <fact>`, as ValueError (ContractError), TypeError
(DtypeError) for a wrong dtype, or NotImplementedError (UnsupportedError) for a legal call that no
kernel serves.
"""


def operators_page() -> str:
    """Return the text of docs/operators.md."""
    from kda_kernels.plan import CONTRACTS  # noqa: PLC0415 - render is below plan

    return "\n".join([_INTRODUCTION, *(section(contract) for contract in CONTRACTS)])


def section(operator: Operator) -> str:
    """Return one operator's section."""
    lines = [
        f"## kda::{operator.name}",
        "",
        f"`kda_ops.{operator.public_name}`. {operator.summary}",
        "",
        "```",
        f"kda::{schema(operator, out=False)}",
        f"kda::{schema(operator, out=True)}",
        "```",
        "",
        "| dimension | meaning | at least | read from |",
        "|---|---|---|---|",
    ]
    for symbol, (source, meaning, minimum) in operator.dims.items():
        lines.append(f"| {symbol} | {meaning} | {minimum} | `{source}` |")
    lines += ["", "| argument | shape | dtype | layout | meaning |", "|---|---|---|---|---|"]
    lines += [_tensor_row(argument) for argument in operator.tensors]
    output = operator.output
    lines.append(
        f"| `{output.name}` (`out` overload; written) | [{output.shape}] "
        f"| {' or '.join(output.dtypes)} | {output.layout.value} | {output.doc} |"
    )
    lines += ["", "| keyword | type | default | must be | meaning |", "|---|---|---|---|---|"]
    lines += [_scalar_row(argument) for argument in operator.scalars]
    return "\n".join([*lines, ""])


def _tensor_row(argument: TensorArg) -> str:
    """Return a tensor's line."""
    notes = [argument.role.value] if argument.role.value != "read" else []
    if argument.optional:
        notes.append("or None")
    note = f" ({', '.join(notes)})" if notes else ""
    if argument.any_shape:
        shape = f"any with {argument.shapes[0]} elements"
    else:
        shape = " or ".join(f"[{text}]" for text in argument.shapes)
    dtypes = " or ".join(argument.dtypes)
    doc = argument.doc.replace("|", "\\|")
    return f"| `{argument.name}`{note} | {shape} | {dtypes} | {argument.layout.value} | {doc} |"


def _scalar_row(argument: ScalarArg) -> str:
    """Return a scalar's line."""
    kind = f"{argument.type} or None" if argument.optional else argument.type
    rule = argument.rule.value
    if argument.rule is Rule.CHOICE:
        rule = " or ".join(f'"{choice}"' for choice in argument.choices)
    return f"| `{argument.name}` | {kind} | {argument.default} | {rule} | {argument.doc} |"


if __name__ == "__main__":
    sys.stdout.write(operators_page())

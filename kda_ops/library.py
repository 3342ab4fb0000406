"""The torch library ``kda``: every operator defined, implemented and faked from its contract.

Lives here: the one ``torch.library.Library``, a loop over the contracts, and the overload handles
that public functions call. Not here: names for users (ops.py) and everything a launch does
(kda_kernels.plan).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.schema import schema
from kda_kernels.contract.spec import Operator, ScalarArg
from kda_kernels.plan import CONTRACTS, Launcher, launcher

LIBRARY = torch.library.Library("kda", "DEF")
"""The library that owns ``torch.ops.kda``."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _fake(operator: Operator, run: Launcher, *, out: bool) -> Callable[..., Any]:
    """Return the fake implementation: the validator and the output's metadata."""
    arguments = operator.abi if out else operator.arguments
    defaults = {a.name: a.default for a in arguments if isinstance(a, ScalarArg)}
    positional = [a.name for a in arguments if not a.keyword]

    def fake(*given: Any, **keywords: Any) -> Tensor | None:  # noqa: ANN401
        values = {**defaults, **dict(zip(positional, given, strict=False)), **keywords}
        ordered = tuple(values.get(a.name) for a in arguments)
        if out:
            run.facts(*ordered, output=values["output"])
            return None
        facts = run.facts(*ordered)
        return torch.empty(facts.output_shape, dtype=facts.output_dtype, device=facts.device)

    return fake


def _register(operator: Operator) -> None:
    """Define, implement and fake both overloads of one operator."""
    run = launcher(operator.name)
    for out in (False, True):
        LIBRARY.define(schema(operator, out=out), tags=_TAGS)
        name = f"{operator.name}.out" if out else operator.name
        LIBRARY.impl(name, run.write_on_cpu if out else run.allocate_on_cpu, "CPU")
        LIBRARY.impl(name, run.write if out else run.allocate, "CUDA")
        torch.library.register_fake(
            f"kda::{name}", _fake(operator, run, out=out), lib=LIBRARY, allow_override=False
        )


for _contract in CONTRACTS:
    _register(_contract)

packed_decode = torch.ops.kda.packed_decode.default
packed_decode_out = torch.ops.kda.packed_decode.out
fused_decode = torch.ops.kda.fused_decode.default
fused_decode_out = torch.ops.kda.fused_decode.out
packed_fused_decode = torch.ops.kda.packed_fused_decode.default
packed_fused_decode_out = torch.ops.kda.packed_fused_decode.out

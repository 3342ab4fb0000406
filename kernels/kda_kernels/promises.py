"""What a caller promises about values, checked only when KDA_CHECK=1 (the check synchronises).

Lives here: distinct live destinations, and query_start_loc that does not decrease. Not here:
anything that metadata tells (contract/check.py).
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from kda_kernels.contract.spec import Operator
from kda_kernels.errors import ContractError


def check(operator: Operator, arguments: tuple[Any, ...]) -> None:
    """Raise ContractError where the values of a kernel's arguments break a promise.

    Args:
        operator: the contract.
        arguments: what the kernel is about to receive, in the contract's order.
    """
    values = dict(zip((argument.name for argument in operator.abi), arguments, strict=False))
    slots, first_slot = values["state"].shape[0], values["first_slot"]
    names = ["state_indices"]
    if "query_start_loc" in values:
        starts = values["query_start_loc"].tolist()
        if starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)):
            rule = "non-decreasing from 0"
            raise ContractError(operator.name, "query_start_loc", rule, f"{starts}")
        if values["state_indices"].shape[1] == 1 and values["t1_state_indices"] is not None:
            names = ["t1_state_indices"]
    for name in names:
        _distinct(operator.name, name, values[name], slots, first_slot)


def _distinct(
    operator: str, name: str, indices: Tensor | None, slots: int, first_slot: int | None
) -> None:
    """Refuse a slot that is a live destination twice."""
    if indices is None:
        return
    seen: set[int] = set()
    for index in indices.flatten().tolist():
        slot = index + slots if first_slot is None and index < 0 else index
        if not (first_slot or 0) <= slot < slots:
            continue
        if slot in seen:
            raise ContractError(operator, name, "distinct where live", f"slot {slot} twice")
        seen.add(slot)

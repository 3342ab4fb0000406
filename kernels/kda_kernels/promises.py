"""What a caller promises about values, checked only when KDA_CHECK=1 (the check synchronises).

Lives here: distinct live destinations, and query_start_loc that does not decrease. Not here:
anything that metadata tells (contract/check.py).
"""

from __future__ import annotations

import itertools
from typing import Any

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
    if "query_start_loc" in values:
        starts = values["query_start_loc"].tolist()
        if starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)):
            rule = "non-decreasing from 0"
            raise ContractError(operator.name, "query_start_loc", rule, f"{starts}")
        name, indices = _of_tokens(values)
    else:
        name, given = "state_indices", values["state_indices"]
        indices = [] if given is None else given.tolist()
    seen: set[int] = set()
    for index in indices:
        slot = _live(index, slots, first_slot)
        if slot is not None and slot in seen:
            rule = "distinct where live"
            raise ContractError(operator.name, name, rule, f"slot {slot} twice")
        seen.add(-1 if slot is None else slot)


def _of_tokens(values: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the destinations of ragged sequences and the argument that names them.

    Columns past a sequence's length and rows past the last sequence may hold anything.
    """
    table = values["state_indices"].tolist()
    starts, tokens = values["query_start_loc"].tolist(), values["state_indices"].shape[1]
    if tokens == 1 and values["t1_state_indices"] is not None:
        return "t1_state_indices", values["t1_state_indices"].tolist()[: starts[-1]]
    slots, first_slot = values["state"].shape[0], values["first_slot"]
    accepted = values["num_accepted_tokens"].clamp(1, tokens).tolist()
    found: list[int] = []
    for line, count, (start, end) in zip(table, accepted, itertools.pairwise(starts), strict=True):
        needed = (line[0], line[count - 1])
        if all(_live(index, slots, first_slot) is not None for index in needed):
            found += line[: end - start]
    return "state_indices", found


def _live(index: int, slots: int, first_slot: int | None) -> int | None:
    """Return the slot that an index names, None where it is null."""
    slot = index + slots if first_slot is None and index < 0 else index
    return slot if (first_slot or 0) <= slot < slots else None

"""Small calls for a sanitizer to watch: ``python -m kda_kernels.testing.small_calls cuda NAME``.

Lives here: calls of one operator that together take every schedule of a device with 132 processors,
null and live rows, padding, offsets and cut sequences, in seconds each even where every access is
checked. Not here: whether results are right (compare.py and the tests).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch

from kda_kernels.contract.spec import Operator
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw, output_of
from kda_kernels.testing.device import Values, launch, moved, on

ROWS = ((1, 1), (3, 2), (20, 3), (50, 3), (50, 6), (140, 3), (450, 3), (155, 12))
"""Rows and heads of the operators with one token a row."""
SEQUENCES = (
    *((1, 1, 1), (3, 1, 2), (100, 2, 3), (40, 3, 4)),
    *((5, 4, 6), (8, 7, 3), (1, 16, 2), (100, 2, 20)),
)
"""Sequences, tokens of each and heads."""
BEYOND = 2**31 - 1
"""An index that no pool has."""


def calls(operator: Operator) -> Iterator[Values]:
    """Yield calls of an operator on the CPU: both layouts and types of the state, every size."""
    several = "query_start_loc" in {argument.name for argument in operator.abi}
    states = (torch.float32, torch.bfloat16)
    for layout, state in itertools.product(("vk", "kv"), states):
        for n, sizes in enumerate(SEQUENCES if several else ROWS):
            case = Case(
                sizes=_sequences(*sizes) if several else _rows(*sizes),
                window="DS" if n % 2 else "SD",
                state_dtype=state,
                slot_padding=8,
                row_padding=3,
                row_offset=1,
                scalars={"state_layout": layout, "lower_bound": -5.0 if n % 3 else None},
            )
            yield _with_nulls(draw(operator, case), several=several)


def _rows(rows: int, heads: int) -> dict[str, int]:
    return {"B": rows, "H": heads, "S": rows + 1, "L": 3}


def _sequences(count: int, tokens: int, heads: int) -> dict[str, int]:
    rows = count * tokens
    return {"N": count, "T": tokens, "R": rows + 3, "H": heads, "S": rows + 4}


def _with_nulls(values: Values, *, several: bool) -> Values:
    """Make an index or two null, and cut the last sequence short."""
    indices = values["state_indices"]
    if len(indices) > 1 and several:
        indices[1, -1] = BEYOND
        values["query_start_loc"][-1] -= 1
    elif len(indices) > 1:
        indices[0], indices[1] = -1, BEYOND
    return values


def run(device: str, operator: Operator) -> int:
    """Run an operator's calls on a device; return how many there were."""
    count = 0
    for values in calls(operator):
        launch(operator, on(device, values), moved(output_of(operator, values), device))
        if device != "cpu":
            torch.cuda.synchronize()
        count += 1
    return count


if __name__ == "__main__":
    _, where, name = sys.argv
    print(run(where, next(c for c in CONTRACTS if c.name == name)), "calls")

"""Which rows and slots a call may touch, worked out one Python integer at a time.

Lives here: the contract's slot rule and the ragged-sequence rules as a plain loop, so that tests
know what must stay bitwise untouched without asking an implementation. Not here: arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kda_kernels.contract.spec import Operator


@dataclass
class Footprint:
    """What one call may write.

    ``live_rows`` are output rows that hold a result (all others must be +0), ``state_slots`` and
    ``window_slots`` the slots of the two pools that are written, ``source_slots`` the slots of the
    state pool that are read. ``read_rows`` are the rows whose inputs reach a result: the live ones
    and, within a live sequence, tokens without a slot of their own. Lists are in the order of rows
    or tokens.
    """

    read_rows: list[int] = field(default_factory=list)
    live_rows: list[int] = field(default_factory=list)
    state_slots: list[int] = field(default_factory=list)
    window_slots: list[int] = field(default_factory=list)
    source_slots: list[int] = field(default_factory=list)


def live_slot(index: int, slots: int, first_slot: int | None) -> int | None:
    """Return the slot an index names, None where the index is null."""
    if first_slot is None and -slots <= index < 0:
        return index + slots
    return index if (first_slot or 0) <= index < slots else None


def footprint(operator: Operator, values: dict[str, Any]) -> Footprint:
    """Return what a call of an operator may write; ``values`` are its arguments by name."""
    slots, first_slot = values["state"].shape[0], values["first_slot"]
    found = Footprint()
    if "query_start_loc" in values:
        for start, length, indices, source in sequences(values):
            line = [live_slot(index, slots, first_slot) for index in indices]
            window, state = line[0], line[source]
            if length <= 0 or window is None or state is None:
                continue
            found.window_slots.append(window)
            found.source_slots.append(state)
            found.read_rows.extend(range(start, start + length))
            for t, slot in enumerate(line[:length]):
                if slot is not None:
                    found.live_rows.append(start + t)
                    found.state_slots.append(slot)
        return found
    rows = values[operator.tensors[0].name].shape[0]
    indices = values["state_indices"]
    named = range(rows) if indices is None else indices.tolist()
    for row, index in enumerate(named):
        slot = index if indices is None else live_slot(index, slots, first_slot)
        if slot is not None:
            found.live_rows.append(row)
            found.state_slots.append(slot)
    found.read_rows = list(found.live_rows)
    found.source_slots = list(found.state_slots)
    found.window_slots = list(found.state_slots) if "conv_state" in values else []
    return found


def sequences(values: dict[str, Any]) -> list[tuple[int, int, list[int], int]]:
    """Return (first row, tokens, slot indices, column of the source) of every sequence."""
    rows = values["x"].shape[0]
    bounds = [min(max(bound, 0), rows) for bound in values["query_start_loc"].tolist()]
    table, tokens = values["state_indices"].tolist(), values["state_indices"].shape[1]
    by_row = values["t1_state_indices"]
    if tokens == 1 and by_row is not None:
        return [(row, 1, [index], 0) for row, index in enumerate(by_row.tolist()[: bounds[-1]])]
    accepted = values["num_accepted_tokens"].tolist()
    return [
        (bounds[n], min(bounds[n + 1] - bounds[n], tokens), line, min(max(count, 1), tokens) - 1)
        for n, (line, count) in enumerate(zip(table, accepted, strict=True))
    ]

"""What the stack of layers is meant to reach on one H200, and whether a report's lines reach it.

Lives here: every goal as a number. Not here: how lines are measured (bench_model.py).

A line is a dictionary with ``state``, ``heads``, ``rows``, ``way``, ``us``, ``host_us`` and
``parts``, the fields of model_timeline.Parts or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from goals import Verdict

Line = Mapping[str, Any]
Size = tuple[str, int, int]

LEAST_ROWS = 32
TIMES_FASTER = {"f32": 3.0, "bf16": 5.0}


def verdicts(lines: Iterable[Line], layers: int) -> list[Verdict]:
    """Judge every goal of which the report has the lines.

    Args:
        lines: of the report.
        layers: of the stack.
    """
    by_way: dict[str, dict[Size, Line]] = {}
    for line in lines:
        if line["parts"] is not None:
            size = (line["state"], line["heads"], line["rows"])
            by_way.setdefault(line["way"], {})[size] = line
    found = []
    for state, times in TIMES_FASTER.items():
        faster = {
            size: other / max(mine, 1e-9)
            for size, (other, mine) in _pairs(by_way, "Inductor", "pass", "kda").items()
            if size[0] == state and size[2] >= LEAST_ROWS
        }
        goal = f"KDA part, {state}, rows >= {LEAST_ROWS}, over Inductor alone, least"
        found += _extreme(goal, faster, times, at_least=True)
    for way in ("pass", "operator"):
        kernels = {
            size: line["parts"]["kda_kernels"] / layers
            for size, line in by_way.get(way, {}).items()
        }
        goal = f"{way}: kernels between the projections and o_proj, per layer, most"
        found += _extreme(goal, kernels, 1.0, at_least=False)
    gaps = {
        size: mine / max(other, 1e-9)
        for size, (other, mine) in _pairs(
            by_way, "Inductor, captured", "pass, captured", "gaps"
        ).items()
    }
    found += _extreme("gaps of a replay over those without the pass", gaps, 1.0, at_least=False)
    host = {
        size: line["host_us"] / line["us"]
        for size, line in by_way.get("pass, captured", {}).items()
    }
    found += _extreme("host's share of a replayed step, most", host, 0.1, at_least=False)
    return found


def _pairs(
    by_way: Mapping[str, Mapping[Size, Line]], one: str, other: str, part: str
) -> dict[Size, tuple[float, float]]:
    """Return a part's figure of two ways at every size that both were measured at."""
    first, second = by_way.get(one, {}), by_way.get(other, {})
    return {
        size: (first[size]["parts"][part], second[size]["parts"][part])
        for size in first
        if size in second
    }


def _extreme(
    goal: str, figures: Mapping[Size, float], target: float, *, at_least: bool
) -> list[Verdict]:
    if not figures:
        return []
    choose = min if at_least else max
    size, value = choose(figures.items(), key=lambda figure: figure[1])
    state, heads, rows = size
    return [Verdict(goal, target, value, at_least, f"{state}, H {heads}, {rows} rows")]

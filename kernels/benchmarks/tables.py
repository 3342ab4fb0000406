"""Prints a GPU benchmark's report as Markdown: ``python kernels/benchmarks/tables.py decode.json``.

Lives here: the tables of docs/benchmarks.md. Works on what bench_decode.py --device cuda,
bench_model.py, bench_speculative.py and bench_parallel.py wrote, where that was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peers

Report = Mapping[str, Any]
Line = Mapping[str, Any]


def decode_tables(report: Report) -> Iterator[str]:
    """Yield the lines of a table for each operator: microseconds, share and ratio to a peer."""
    lines = report["lines"]
    for operator in sorted({x["operator"] for x in lines}, reverse=True):
        mine = [x for x in lines if x["operator"] == operator]
        rows = sorted({x["rows"] for x in mine if x["heads"] == max(y["heads"] for y in mine)})
        windows = any(x["window"] for x in mine)
        yield f"\n`{operator}`: us, (share of `mul_`), times faster than the first peer\n"
        named = ["state", "layout", *(["window"] if windows else []), "H"]
        yield from _head([*named, *(f"{count} row{'s' * (count > 1)}" for count in rows)])
        places = {(x["state"], x["layout"], x["window"], x["heads"]) for x in mine}
        order = lambda p: (p[0] != "f32", p[1] != "vk", p[2] != "SD", p[3])  # noqa: E731
        for place in sorted(places, key=order):
            cells = {x["rows"]: x for x in mine if _place(x) == place}
            words = [str(part) for part in place if part != ""]
            yield _row([*words, *(_figure(cells.get(count)) for count in rows)])


def _place(line: Line) -> tuple[str, str, str, int]:
    return (line["state"], line["layout"], line["window"], line["heads"])


def _figure(line: Line | None) -> str:
    if line is None:
        return ""
    text = f"{line['us']:.1f} ({line['share']:.2f})"
    over = [line["over"][peer.name] for peer in peers.PEERS if peer.name in line["over"]]
    return f"{text} {over[0]:.2f}×" if over else text


def model_table(report: Report) -> Iterator[str]:
    """Yield the lines of the table of ways."""
    names = (
        "tokens/s",
        "us a step",
        "host us",
        "projections",
        "KDA",
        "rest",
        "kernels",
        "KDA/layer",
    )
    yield from _head(["state", "H", "rows", "way", *names])
    for line in report["lines"]:
        parts, numbers = line["parts"], [f"{line['tokens_per_second']:.0f}"]
        numbers += [f"{line[name]:.0f}" for name in ("us", "host_us")]
        if parts is not None:
            numbers += [f"{parts[name]:.0f}" for name in ("projections", "kda", "rest", "kernels")]
            numbers.append(f"{parts['kda_kernels'] / report['layers']:.0f}")
        numbers += [""] * (len(names) - len(numbers))
        yield _row([line["state"], str(line["heads"]), str(line["rows"]), line["way"], *numbers])


def parallel_table(report: Report) -> Iterator[str]:
    """Yield the lines of the table of ranks: speed, and what keeps them from a multiple of one."""
    ranks, parts = report["ranks"], ("sums", "projections", "kda", "rest", "other")
    shared = [f"{ranks} ranks: tokens/s", "us a step", "times faster"]
    lost = [f"lost to {part}" for part in parts]
    yield from _head(["state", "rows", "1 rank: tokens/s", "us a step", *shared, *lost])
    for line in report["lines"]:
        speed = line["tokens_per_second"]
        numbers = [f"{speed['alone']:.0f}", f"{line['alone']:.0f}", f"{speed['shared']:.0f}"]
        numbers += [f"{line['shared']:.0f}", f"{line['speedup']:.2f}"]
        numbers += [f"{line['lost'][part]:.0f}" if part in line["lost"] else "" for part in parts]
        yield _row([line["state"], str(line["rows"]), *numbers])


def speculative_table(report: Report) -> Iterator[str]:
    """Yield the lines of the table of drafted tokens: microseconds, share of mul_, steps' worth.

    Behind them how many times longer Triton kernels take, with checkpoints / without.
    """
    tokens = sorted({line["tokens"] for line in report["lines"]})
    named = [f"T = {count}" for count in tokens]
    yield from _head(["state", "layout", "H", "sequences", "one step", *named])
    places: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in report["lines"]:
        place = (line["state"], line["layout"], line["heads"], line["sequences"])
        places.setdefault(place, {})[line["tokens"]] = line
    for place, found in places.items():
        one = next(iter(found.values()))["one_token_us"]
        yield _row([*map(str, place), f"{one:.1f}", *(_verified(found[t]) for t in tokens)])


def _verified(line: Line) -> str:
    text = f"{line['us']:.1f} ({line['share']:.2f}) {line['steps']:.1f} steps"
    both = (line["over_triton"], line["over_triton_one_state"])
    if not any(both):
        return text
    return f"{text}, {' / '.join(f'{ratio:.1f}' if ratio else '-' for ratio in both)}×"


def goal_table(report: Report) -> Iterator[str]:
    """Yield the lines of the table of goals."""
    yield from _head(["goal", "number", "measured", "", "where"])
    for goal in report["goals"]:
        sign = "≥" if goal["at_least"] else "≤"
        short = abs(goal["value"] / goal["target"] - 1)
        verdict = "met" if goal["met"] else f"missed by {short:.1%}"
        number = f"{sign} {goal['target']:g}"
        yield _row([goal["goal"], number, f"{goal['value']:.3g}", verdict, goal["where"]])


def _head(names: Sequence[str]) -> Iterator[str]:
    yield _row(names)
    yield "|---" * len(names) + "|"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read a report and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path, help="what a benchmark wrote with --json")
    report = json.loads(parser.parse_args().report.read_text(encoding="utf-8"))
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    print(f"{machine}\n")
    kinds = {"ranks": parallel_table, "speculative": speculative_table, "layers": model_table}
    table = next((kinds[name] for name in kinds if name in report), decode_tables)
    print(*table(report), "", sep="\n")
    if "goals" in report:
        print(*goal_table(report), sep="\n")


if __name__ == "__main__":
    main()

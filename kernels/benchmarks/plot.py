"""Draws a GPU benchmark's report: ``python kernels/benchmarks/plot.py decode.json --out x.svg``.

Needs matplotlib (the extra ``bench``). Works on what bench_decode.py --device cuda and
bench_model.py wrote, where that was: a report holds everything that is drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

import peers

Report = Mapping[str, Any]
Line = Mapping[str, Any]

INK, FAINT = "#1f2430", "#c9ced6"
# From light to dark with the heads: more heads, more work.
HEADS = ("#7fb3d9", "#3f8fc9", "#1c639c", "#0b3558")
PEER = "#d9822b"
PARTS = (("projections", "#b7bec9"), ("kda", "#1c639c"), ("rest", "#e3c58a"))

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kda_ops",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#eceff3",
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw_decode(report: Report) -> Any:  # noqa: ANN401 - matplotlib has no types
    """Draw shares of the ceiling over rows: one panel for each operator and state type."""
    lines = [x for x in report["lines"] if x["layout"] == "vk" and x["window"] in ("", "SD")]
    # Reversed: packed_decode first, f32 first.
    kinds = sorted({(x["operator"], x["state"]) for x in lines}, reverse=True)
    heads = sorted({x["heads"] for x in lines})
    colour = dict(zip(heads, HEADS[-len(heads) :], strict=True))
    figure, grid = plt.subplots(
        -(-len(kinds) // 2), min(2, len(kinds)), figsize=(9, 6.4), squeeze=False, sharey=True
    )
    for panel, (operator, state) in zip(grid.flat, kinds, strict=False):
        cells = [x for x in lines if (x["operator"], x["state"]) == (operator, state)]
        for count in heads:
            mine = sorted((x["rows"], x) for x in cells if x["heads"] == count)
            _share_line(panel, [x for _, x in mine], colour[count], f"H {count}")
        _decorate(panel, f"{operator}, {state} state", sorted({x["rows"] for x in cells}))
    for panel in grid[:, 0]:
        panel.set_ylabel("share of in-place mul_")
    for panel in grid[-1]:
        panel.set_xlabel("rows")
    grid.flat[0].plot([], [], "o", color=PEER, markersize=4, mfc="none", label="a peer, same H")
    grid.flat[0].legend(loc="lower right")
    _title(figure, report, f"ceiling {report['ceiling'] / 1e12:.2f} TB/s")
    return figure


def _share_line(panel: Any, cells: Sequence[Line], colour: str, label: str) -> None:  # noqa: ANN401
    """Draw our shares as a line and those of the first peer that has the cell as rings."""
    panel.plot([x["rows"] for x in cells], [x["share"] for x in cells], "-o", color=colour,
               markersize=3.5, linewidth=1.6, label=label)  # fmt: skip
    for cell in cells:
        names = [peer.name for peer in peers.PEERS if peer.name in cell["over"]]
        if names:
            share = cell["share"] / cell["over"][names[0]]
            panel.plot(cell["rows"], share, "o", color=PEER, markersize=4.5, mfc="none")
            panel.vlines(cell["rows"], *sorted((share, cell["share"])), color=FAINT, linewidth=1)


def _decorate(panel: Any, title: str, rows: Sequence[int]) -> None:  # noqa: ANN401
    panel.set_title(title)
    panel.set_xscale("log", base=2)
    panel.set_xticks(rows, [str(row) if row != 31 else "" for row in rows])
    panel.minorticks_off()
    panel.set_ylim(0, 1.02)


def draw_model(report: Report) -> Any:  # noqa: ANN401
    """Draw the time of a step by its parts, way by way: a panel for each state type and H."""
    lines = [x for x in report["lines"] if x["parts"] is not None]
    kinds = sorted({(x["heads"], x["state"]) for x in lines}, key=lambda k: (k[0], k[1] != "f32"))
    rows = sorted({x["rows"] for x in lines})
    size = (2.6 * len(rows) + 1.8, 2.0 * len(kinds) + 0.8)
    figure, grid = plt.subplots(len(kinds), len(rows), figsize=size, squeeze=False)
    for line_of_panels, (heads, state) in zip(grid, kinds, strict=True):
        for panel, count in zip(line_of_panels, rows, strict=True):
            place = (heads, state, count)
            cells = [x for x in lines if (x["heads"], x["state"], x["rows"]) == place]
            _bars(panel, cells, first=count == rows[0])
            panel.set_title(f"H {heads}, {state}, {count} rows")
    for panel in grid[-1]:
        panel.set_xlabel("ms a step")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    _title(figure, report, f"{report['layers']} layers, hidden {report['hidden']}")
    return figure


def _bars(panel: Any, cells: Sequence[Line], *, first: bool) -> None:  # noqa: ANN401
    """Draw one stacked bar a way; a tick marks the time of a step on the host's clock."""
    places = range(len(cells))
    left = [0.0] * len(cells)
    for part, colour in PARTS:
        widths = [x["parts"][part] / 1e3 for x in cells]
        panel.barh(places, widths, left=left, color=colour, height=0.7, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    wall = [x["us"] / 1e3 for x in cells]
    panel.plot(wall, places, "|", color=INK, markersize=9, label="on the clock")
    panel.set_yticks(places, [x["way"] for x in cells] if first else [""] * len(cells))
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)


def _title(figure: Any, report: Report, more: str) -> None:  # noqa: ANN401
    machine = report["machine"]
    device = machine.get("device") or machine.get("processor")
    figure.suptitle(f"{device}, torch {machine['torch']}, {more}", x=0.01, ha="left", fontsize=9)


def main() -> None:
    """Read a report and write its plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path, help="what a benchmark wrote with --json")
    parser.add_argument("--out", type=Path, help="SVG to write; default: beside the report")
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    with mpl.rc_context(STYLE):
        figure = (draw_model if "layers" in report else draw_decode)(report)
        figure.set_layout_engine("constrained")
        out = options.out or options.report.with_suffix(".svg")
        # Without a date the same report gives the same file.
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "matplotlib"})
    print(out)


if __name__ == "__main__":
    main()

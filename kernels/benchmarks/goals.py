"""What the decode kernels are meant to reach on one H200, and whether a report's lines reach it.

Lives here: every goal as a number, with the cells it speaks of. Not here: how lines are measured
(cuda_decode.py) and the peers' figures (peers.py).

A line is a dictionary with the fields of decode_calls.Cell and: ``us`` and ``graph_us`` (direct
and CUDA-graph launches), ``share`` (of the ceiling, all bytes that must move) and ``over`` (how
many times faster than each peer's scaled figure). Goals about peers and shares are judged where the
peers were measured, in layout vk with window SD; the other layouts are held against that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import peers

Line = Mapping[str, Any]
Figures = Sequence[tuple[float, Line]]


@dataclass(frozen=True)
class Verdict:
    """One goal: what it says, the number, what was measured and in which cell.

    Attributes:
        goal: in words.
        target: the number.
        value: what was measured: a mean, or the worst cell.
        at_least: the value must not be below the target; else not above it.
        where: the cell that decides, or how many cells a mean is over.
    """

    goal: str
    target: float
    value: float
    at_least: bool
    where: str

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def sentence(self) -> str:
        """The verdict in one line; a miss says by how much."""
        sign = ">=" if self.at_least else "<="
        short = abs(self.value / self.target - 1)
        verdict = "met" if self.met else f"missed by {short:.1%}"
        return f"{self.goal} {sign} {self.target:g}: {self.value:.3f}, {verdict} ({self.where})"


def verdicts(lines: Iterable[Line]) -> list[Verdict]:
    """Judge every goal of which the report has a cell."""
    lines = list(lines)
    home = [line for line in lines if line["layout"] == "vk" and line["window"] in ("", "SD")]
    found: list[Verdict | None] = []
    fused, packed = (_of(home, operator=name) for name in ("fused_decode", "packed_decode"))
    for state, mean, share in (("f32", 1.08, 0.97), ("bf16", 1.15, 0.95)):
        figures = _over(_of(fused, state=state), peers.FLASHINFER_FUSED)
        name = f"fused {state} over FlashInfer's fused"
        found.append(_mean(f"{name}, geometric mean", figures, mean))
        if state == "f32":
            found.append(_least(f"{name}, least", figures, 0.98))
        for short, cells in (("fused", fused), ("packed", packed)):
            large = [x for x in _of(cells, state=state) if x["rows"] >= 128 and x["heads"] >= 32]
            shares = [(line["share"], line) for line in large]
            found.append(_least(f"{short} {state}, rows >= 128, H >= 32, share", shares, share))
    narrow = _of(packed, state="bf16", heads=12)
    figures = _over(narrow, peers.FLASHINFER_PACKED)
    found.append(_least("packed bf16 H 12 over FlashInfer's packed, least", figures, 1.0))
    figures = _over(narrow, peers.SGLANG_PACKED)
    found.append(_mean("packed bf16 H 12 over SGLang's Triton, geometric mean", figures, 1.25))
    figures = _over(_of(packed, state="f32"), peers.SGLANG_PACKED)
    found.append(_least("packed f32 over SGLang's Triton, least", figures, 1.05))
    for short, cells, limit in (("fused", fused, 3.4), ("packed", packed, 2.5)):
        few = [(x["us"], x) for x in cells if x["rows"] == 1 and x["heads"] <= 16]
        found.append(_most(f"{short}, 1 row, H <= 16, us", few, limit))
    found += _layouts(lines)
    return [verdict for verdict in found if verdict is not None]


def host_verdict(name: str, us: float) -> Verdict:
    """Judge what an eager public call costs the host beyond an empty TVM-FFI call."""
    return Verdict(f"{name}, host us beyond an empty TVM-FFI call", 20, us, False, "eager")


def _layouts(lines: Sequence[Line]) -> list[Verdict | None]:
    """Judge DS against SD, and kv against vk, cell by cell."""
    return [
        _most("DS over SD, us", ratios(lines, "window", "DS", "SD"), 1.02),
        _most("kv over vk, us", ratios(lines, "layout", "kv", "vk"), 1.08),
    ]


def ratios(lines: Iterable[Line], axis: str, one: str, other: str) -> list[tuple[float, Line]]:
    """Return how many times longer each cell takes with one choice on an axis than with another."""
    rest = [n for n in ("operator", "layout", "window", "state", "heads", "rows") if n != axis]
    times: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        times.setdefault(tuple(line[name] for name in rest), {})[line[axis]] = line
    pairs = [pair for pair in times.values() if one in pair and other in pair]
    return [(pair[one]["us"] / pair[other]["us"], pair[one]) for pair in pairs]


def _of(lines: Iterable[Line], **fields: Any) -> list[Line]:  # noqa: ANN401
    return [line for line in lines if all(line[k] == v for k, v in fields.items())]


def _over(lines: Iterable[Line], peer: peers.Peer) -> list[tuple[float, Line]]:
    return [(line["over"][peer.name], line) for line in lines if peer.name in line["over"]]


def _mean(goal: str, figures: Figures, target: float) -> Verdict | None:
    if not figures:
        return None
    value = harness.geometric_mean(value for value, _ in figures)
    return Verdict(goal, target, value, True, f"{len(figures)} cells")


def _least(goal: str, figures: Figures, target: float) -> Verdict | None:
    return _extreme(goal, figures, target, min)


def _most(goal: str, figures: Figures, target: float) -> Verdict | None:
    return _extreme(goal, figures, target, max)


def _extreme(
    goal: str, figures: Figures, target: float, choose: Callable[..., tuple[float, Line]]
) -> Verdict | None:
    if not figures:
        return None
    value, line = choose(figures, key=lambda figure: figure[0])
    return Verdict(goal, target, value, choose is min, place(line))


def place(line: Line) -> str:
    """Return a cell in words."""
    names = (line["operator"], line["state"], line["layout"], line["window"])
    words = " ".join(name for name in names if name)
    return f"{words}, H {line['heads']}, {line['rows']} rows"

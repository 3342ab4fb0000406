"""What the pass found in a graph, as records: counted, logged, printed by others.

Lives here: findings, counters, the log, the model's line that a node came from. Not here: deciding
(manager.py), graph code (regions.py) and printing reports (explanation.py, page.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from torch._dynamo.utils import counters
from torch.fx import Node

from kda_ops.passes.reasons import Reason

log = logging.getLogger("kda_ops.passes")


@dataclass(frozen=True)
class Line:
    """A node of a graph as people read it: its name, type and call, and the model's line."""

    name: str
    text: str
    source: str


@dataclass(frozen=True)
class Left:
    """A part around a step that was left as it is, why, and the node where reading it stopped."""

    part: str
    reason: Reason
    detail: str
    node: str


@dataclass(frozen=True)
class Finding:
    """One place that looks like a delta-rule step.

    ``operator`` is what it was fused into, with ``arguments`` for people; otherwise ``reason`` and
    ``detail`` say why not. ``left`` says which parts around it were left as they are, and
    ``roundings`` names the nodes whose rounding is gone. ``node`` is where it is or stopped,
    ``source`` the model's line. ``before`` and ``after`` are the graph code of the place, kept
    where somebody observes the pass.
    """

    node: str
    source: str
    pool: str
    operator: str | None = None
    arguments: dict[str, str] = field(default_factory=dict)
    reason: Reason | None = None
    detail: str = ""
    left: tuple[Left, ...] = ()
    roundings: tuple[str, ...] = ()
    pool_shapes: tuple[tuple[int, ...], ...] = ()
    before: tuple[Line, ...] = ()
    after: tuple[Line, ...] = ()


def report(finding: Finding) -> None:
    """Count and log one finding."""
    counters["kda"]["candidates"] += 1
    for part in finding.left:
        counters["kda"][f"left {part.reason.name}"] += 1
    if finding.reason is None:
        counters["kda"]["matches"] += 1
        counters["kda"][f"matched {finding.operator}"] += 1
        log.info("%s: fused into %s", finding.source or finding.node, finding.operator)
        return
    counters["kda"]["refusals"] += 1
    counters["kda"][f"refused {finding.reason.name}"] += 1
    detail = f" ({finding.detail})" if finding.detail else ""
    log.info(
        "%s: not fused, %s: %s%s at node %s",
        finding.source or finding.node,
        finding.reason.name,
        finding.reason.sentence,
        detail,
        finding.node,
    )


def shape_of(pool: Node) -> tuple[int, ...]:
    """Return a pool's shape, -1 for sizes that are symbols."""
    return tuple(s if isinstance(s, int) else -1 for s in pool.meta["val"].shape)


def source_line(node: Node) -> str:
    """Return "file:line: code" of the model's line that a node came from, or ""."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith("File "):
            pieces = lines[at].split('"')
            number = lines[at].split("line ")[-1].split(",")[0]
            code = lines[at + 1] if at + 1 < len(lines) else ""
            return f"{pieces[1] if len(pieces) > 1 else '?'}:{number}: {code}".rstrip(": ")
    return ""

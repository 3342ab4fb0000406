"""Compiles a step and finds out what became of it: nodes folded, operator calls, copies of pools.

Lives here: the first call of a compiled function, with a look at its graph before and behind the
pass and at the code that Inductor wrote. Not here: the pass itself (kda_ops.passes), printing
(report.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, Node

from kda_ops.passes import Finding, observing


@dataclass(frozen=True)
class Operation:
    """One node of a graph: name, what it computes, from what, and the model's line behind it."""

    name: str
    target: str
    inputs: tuple[str, ...]
    file: str
    line: int
    code: str

    @classmethod
    def of(cls, node: Node) -> Operation:
        """Read a node and the innermost line of its stack trace."""
        named = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", None)
        target = str(named or node.target)
        inputs = tuple(source.name for source in node.all_input_nodes)
        trace = node.meta.get("stack_trace") or ""
        frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', trace)
        file, line, code = frames[-1] if frames else ("", "0", "")
        return cls(node.name, target, inputs, Path(file).name, int(line), code.strip())


class Recorder(CustomGraphPass):
    """Notes the operations of every graph as they are before the pass.

    It has no uuid, so the graph caches are bypassed: whoever looks on wants to see it happen.
    """

    def __init__(self) -> None:
        self.before: list[Operation] = []

    def __call__(self, graph: Graph) -> None:
        """Note the nodes and change nothing."""
        self.before += [Operation.of(node) for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> Any:  # noqa: ANN401 - torch's own signature
        """Return None: not for the cache."""
        return None


@dataclass(frozen=True)
class Compilation:
    """What the first call of a compiled function showed.

    `before` are the operations of the graph in front of the pass, `kept` the names of those still
    there behind it; `code` is what Inductor wrote; `seconds` is how long the call took.
    """

    seconds: float
    findings: tuple[Finding, ...] = ()
    before: tuple[Operation, ...] = ()
    kept: frozenset[str] = field(default_factory=frozenset)
    code: tuple[str, ...] = ()

    @property
    def rewritten(self) -> int:
        """How many steps were fused into an operator."""
        return sum(finding.operator is not None for finding in self.findings)

    @property
    def folded(self) -> tuple[Operation, ...]:
        """The operations that the pass took out of the graph, in the graph's order."""
        return tuple(operation for operation in self.before if operation.name not in self.kept)

    @property
    def folded_by_step(self) -> tuple[tuple[Operation, ...], ...]:
        """The same, by step: operations that are connected through others that were taken out."""
        steps: list[list[Operation]] = []
        for operation in self.folded:
            names = set(operation.inputs)
            joined = [step for step in steps if any(other.name in names for other in step)]
            steps = [step for step in steps if step not in joined]
            steps.append([*(other for step in joined for other in step), operation])
        place = {operation.name: at for at, operation in enumerate(self.before)}
        ordered = [tuple(sorted(step, key=lambda other: place[other.name])) for step in steps]
        return tuple(sorted(ordered, key=lambda step: place[step[0].name]))

    @property
    def operator_calls(self) -> int:
        """Calls of kda operators in the generated code."""
        return sum(len(re.findall(r"torch\.ops\.kda\.\w+\.\w+\(", code)) for code in self.code)

    def copied(self, pools: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Names of pools for which the generated code allocates as much memory again."""
        return tuple(name for name, pool in pools.items() if self._allocates(pool))

    def _allocates(self, pool: Tensor) -> bool:
        shape = re.escape(", ".join(map(str, pool.shape)))
        allocation = re.compile(rf"empty_strided\w*\(\({shape},?\)")
        return any(allocation.search(code) for code in self.code)


def first_call(step: Callable[..., Any], *inputs: Any) -> Compilation:  # noqa: ANN401
    """Call a step once, which compiles it if it is a compiled function, and look on.

    Args:
        step: the function.
        *inputs: its inputs; what it mutates is mutated.
    """
    recorder = Recorder()
    findings: list[Finding] = []
    kept: set[str] = set()

    def observe(graph: Graph, found: list[Finding]) -> None:
        findings.extend(found)
        kept.update(node.name for node in graph.nodes)

    started = time.perf_counter()
    with inductor_config.patch(post_grad_custom_pre_pass=recorder), observing(observe):
        _, code = run_and_get_code(step, *inputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    before = recorder.before if kept else []
    return Compilation(seconds, tuple(findings), tuple(before), frozenset(kept), tuple(code))

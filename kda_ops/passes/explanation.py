"""``kda_ops.explain``: what the pass makes of a model, and why, as text and as data.

Lives here: compiling a model once on copies of its inputs with an observer in the pass, and reading
the generated code for copies of pools. Not here: any decision, and the page (page.py).
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._inductor.graph import GraphLowering
from torch.fx import Graph

from kda_ops.passes.backend import kda
from kda_ops.passes.findings import Finding
from kda_ops.passes.manager import is_static, observing
from kda_ops.passes.page import page

_ALLOCATION = re.compile(r"empty_strided\w*\(\(([\d, ]+)\)")


@dataclass
class Report:
    """What :func:`explain` found.

    Attributes:
        findings: one :class:`kda_ops.passes.Finding` for every place that looks like a step.
        graphs: how many graphs Dynamo made of the model.
        cloned_pools: shapes of pools that the generated code allocates again, or None where no code
            was seen.
        cuda_graph_skips: inputs, by node and shape, that keep CUDA graphs from capturing: they are
            updated in place, by a step or by anything else, and are not at a fixed address.
        code: the generated code, one text a graph.
    """

    findings: list[Finding] = field(default_factory=list)
    graphs: int = 0
    cloned_pools: list[tuple[int, ...]] | None = None
    cuda_graph_skips: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    @property
    def fused(self) -> list[Finding]:
        """The steps that were fused."""
        return [finding for finding in self.findings if finding.reason is None]

    @property
    def refused(self) -> list[Finding]:
        """The places that were left as they are."""
        return [finding for finding in self.findings if finding.reason is not None]

    def __str__(self) -> str:
        lines = [self._head()]
        for number, finding in enumerate(self.findings, 1):
            lines += ["", *described(number, finding)]
        return "\n".join([*lines, *([""] if self.findings else []), *self._foot()])

    def html(self) -> str:
        """Return the report as one self-contained page.

        For every place it shows what the text says and the graph code before and after, side by
        side; where a place was refused, the node where reading it stopped is marked.
        """
        numbered = enumerate(self.findings, 1)
        texts = [(finding, "\n".join(described(n, finding))) for n, finding in numbered]
        return page(self._head(), texts, "\n".join(self._foot()))

    def _head(self) -> str:
        """Say how many places there are."""
        places = f"{len(self.findings)} place{'s' * (len(self.findings) != 1)}"
        graphs = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        return f"{places} in {graphs}: {len(self.fused)} fused, {len(self.refused)} refused"

    def _foot(self) -> list[str]:
        """Say what concerns all places."""
        lines = [self._pools()] if self.findings else []
        if not self.findings:
            lines.append("Nothing here reads a state, applies it and writes it back.")
        return lines + (self._graphs() if self.findings or self.cuda_graph_skips else [])

    def _pools(self) -> str:
        """Say what happens to the pools outside of the steps."""
        if self.cloned_pools is None:
            return "pools: no generated code to look at"
        if self.cloned_pools:
            shapes = ", ".join(str(list(shape)) for shape in self.cloned_pools)
            return f"pools: Inductor allocates {shapes} again, a copy of a whole pool"
        return "pools: updated in place, none is copied"

    def _graphs(self) -> list[str]:
        """Say whether CUDA graphs would capture the model."""
        if not self.cuda_graph_skips:
            return ["CUDA graphs: no pool stands in their way"]
        lines = ["CUDA graphs: skipped (mutated inputs). Updated in place, not at a fixed address:"]
        lines += [f"  {name}" for name in self.cuda_graph_skips]
        advice = "make it a buffer of the module, take the pools of a kda_ops.StateCache, or call"
        return [
            *lines,
            f"  {advice}",
            "  kda_ops.mark_state_static on the very tensor that you pass",
        ]


def described(number: int, finding: Finding) -> list[str]:
    """Return one finding as lines."""
    place = finding.source or f"node {finding.node}"
    if finding.reason is None:
        lines = [f"[{number}] fused into {finding.operator}", f"    at      {place}"]
        arguments = ", ".join(f"{k}={v}" for k, v in finding.arguments.items())
        wrapped = textwrap.wrap(arguments, 88)
        lines += [("    with    " if not i else "            ") + w for i, w in enumerate(wrapped)]
        for part in finding.left:
            detail = f" ({part.detail})" if part.detail else ""
            lines.append(f"    left    the {part.part}, {part.reason.name} at {part.node}:")
            lines.append(f"            {part.reason.sentence}{detail}")
        if finding.roundings:
            lines.append(f"    rounds  less often: not at {', '.join(finding.roundings)}")
        return lines
    detail = f" ({finding.detail})" if finding.detail else ""
    return [
        f"[{number}] not fused: {finding.reason.name}",
        f"    at      {place}",
        f"    node    {finding.node}, state {finding.pool}",
        f"    why     {finding.reason.sentence}{detail}",
        f"    change  {finding.reason.advice}",
    ]


def explain(model: Callable[..., Any], *inputs: Any, **keywords: Any) -> Report:
    """Compile a model once and say what the pass did with each place that looks like a step.

    The model is compiled without caches, and the compiled code runs on copies of all tensors, so
    no state advances.

    Args:
        model: a module or function, as one would give it to ``torch.compile``.
        *inputs: arguments of one decode step.
        **keywords: keyword arguments of it.

    Returns:
        A report: ``str(report)`` to read, ``report.html()`` for a page with graph code,
        ``report.findings`` and the other attributes to use.
    """
    report = Report()

    def observe(graph: Graph, findings: list[Finding]) -> None:
        report.findings += findings
        report.cuda_graph_skips += movable(graph)

    def compile_on_copies(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
        report.graphs += 1
        compiled = kda(graph, example)
        return lambda *arguments: compiled(*(copied(a) for a in arguments))

    keep = GraphLowering.save_output_code

    def save(code: str) -> None:
        report.code.append(code)
        if keep is not None:
            keep(code)

    with contextlib.ExitStack() as block:
        # A hit in a cache would skip the pass.
        block.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        block.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        block.enter_context(mock.patch.object(GraphLowering, "save_output_code", save))
        block.enter_context(observing(observe))
        block.enter_context(torch.no_grad())
        torch.compile(model, backend=compile_on_copies)(*inputs, **keywords)
    report.cloned_pools = clones(report)
    return report


def movable(graph: Graph) -> list[str]:
    """Return the inputs that a graph updates in place and whose address may change."""
    copies = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    updated = [node.args[0] for node in copies if node.args[0].op == "placeholder"]
    return [
        f"{node.name} {list(node.meta['val'].shape)}"
        for node in updated
        if is_static(graph, node) is False
    ]


def copied(argument: Any) -> Any:
    """Return a copy of a tensor, with its strides."""
    if not isinstance(argument, torch.Tensor):
        return argument
    copy = torch.empty_strided(
        argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device
    )
    return copy.copy_(argument)


def clones(report: Report) -> list[tuple[int, ...]] | None:
    """Return the pools' shapes that generated code allocates."""
    if not report.code:
        return None
    pools = {shape for finding in report.findings for shape in finding.pool_shapes}
    allocated = {
        tuple(int(size) for size in found.split(",") if size.strip())
        for code in report.code
        for found in _ALLOCATION.findall(code)
    }
    return sorted(pools & allocated)

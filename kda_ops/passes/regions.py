"""Graph code of a place as text, and which nodes a place has that was refused.

Lives here: nodes as lines for people. Not here: what a fused step consists of (step.py), and how
lines are put on a page (page.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from kda_ops.passes.candidates import WRITES, flows, sources_of
from kda_ops.passes.core import belongs, local
from kda_ops.passes.findings import Line, source_line
from kda_ops.passes.nodes import operands
from kda_ops.passes.step import Step

SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def code(nodes: Iterable[Node]) -> tuple[Line, ...]:
    """Return those nodes that are still in their graph as lines, in graph order."""
    standing = sorted(node for node in nodes if not node._erased)
    return tuple(Line(node.name, text_of(node), source_line(node)) for node in standing)


def text_of(node: Node) -> str:
    """Return "name: type[shape] = target(arguments)"."""
    value = node.meta.get("val")
    kind = ""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        letters = name.rstrip("0123456789")
        kind = f": {SHORT.get(letters, letters)}{name[len(letters) :]}{list(value.shape)}"
    if node.op != "call_function":
        return f"{node.name}{kind}"
    shown = [str(argument) for argument in operands(node)]
    shown += [f"{key}={argument}" for key, argument in node.kwargs.items()]
    return f"{node.name}{kind} = {named(node)}({', '.join(shown)})"


def named(node: Node) -> str:
    """Return an operator with its overload, and a function by its own name."""
    is_operator = isinstance(node.target, torch._ops.OperatorBase)
    return str(node.target) if is_operator else str(getattr(node.target, "__name__", node.target))


def nodes_of(step: Step) -> set[Node]:
    """Return every node of a matched step, those around its pools included."""
    return {*step.region, *(node for found in step.pools.values() for node in found.touching)}


def around(write: Node) -> set[Node]:
    """Return the nodes around a write that may belong to a step: what was looked at, or near it."""
    flow = {node for node in flows(sources_of(operands(write)[0])) if belongs(node)}
    nodes = local({write, *flow})
    return {node for node in {*nodes, *stores(nodes)} if node.op == "call_function"}


def stores(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the writes of what some nodes compute."""
    for node in nodes:
        yield from (user for user in node.users if user.target in WRITES)

"""Puts the operator in the place of a matched step.

Lives here: new nodes with their metadata, where they go, the redirection of every use, and removal
of what became dead. Not here: any decision whether to (step.py, certificate.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from kda_ops.passes.anchors import functionalized
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.step import Step

aten = torch.ops.aten


@dataclass
class Inserter:
    """Emits operations as nodes of a graph, with the metadata that Inductor reads."""

    graph: Graph
    rows: int
    source: Node
    made: list[Node] = field(default_factory=list)

    def input(self, node: Node) -> Node:
        """Return the node itself."""
        return node

    def value(self, item: Node) -> torch.Tensor:
        """Return the fake tensor of a node."""
        return item.meta["val"]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a node and compute its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        self.made.append(node)
        node.meta["val"] = fake(target, args, kwargs)
        return self.describe(node)

    def describe(self, node: Node) -> Node:
        """Copy where the code came from."""
        for key in ("stack_trace", "source_fn_stack", "nn_module_stack", "from_node"):
            if key in self.source.meta:
                node.meta[key] = self.source.meta[key]
        return node


def fake(target: Any, args: Any, kwargs: Any) -> Any:
    """Call a target on the fake values of its arguments."""
    values, named = values_of((args, kwargs))
    tensors = (v for v in [*args, *kwargs.values()] if isinstance(v, Node))
    mode = next((v.meta["val"].fake_mode for v in tensors), None)
    if mode is None:
        mode = torch._guards.detect_fake_mode() or torch._subclasses.FakeTensorMode()
    with mode:
        return target(*values, **named)


def values_of(arguments: Any) -> Any:
    """Return arguments with nodes replaced by their values."""
    return tree_map_only(Node, lambda node: node.meta["val"], arguments)


def splice(step: Step, graph: Graph) -> Node:
    """Replace a step by ``kda::packed_decode`` and return the new node.

    Raises RefusalError, with the graph as it was, where the operator refuses its arguments or an
    input of the step comes after its results.
    """
    late = dependents(graph, (step.output, step.anchor.write))
    for leaf in step.arguments.leaves:
        if leaf in late:
            raise RefusalError(Reason.ORDER, leaf)
    rows = step.anchor.value.meta["val"].shape[0]
    inserter = Inserter(graph, rows if isinstance(rows, int) else -1, step.output)
    with graph.inserting_before(insertion_point(graph, step.arguments.leaves)):
        try:
            results = insert(step, inserter)
        except RefusalError:
            erase(graph, inserter.made)
            raise
    redirect(step, *results, graph=graph)
    sink(graph, inserter.made)
    erase(graph, (*step.region, *step.anchor.casts))
    return results[2]


def insert(step: Step, emit: Inserter) -> tuple[Node, Node, Node]:
    """Add the operator's nodes; return its output, the new pool and the operator's node."""
    arguments = step.arguments.emit(emit)
    dtype = None if step.output_dtype is step.activation else step.output_dtype
    arguments["output_dtype"] = dtype
    target = torch.ops.kda.packed_decode.default
    try:
        output_value = fake(target, (), arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise RefusalError(Reason.CONTRACT, step.output, str(error)) from error
    state = arguments.pop("state")
    node = emit.graph.call_function(
        functionalized, (target,), {**arguments, "_state_base_index": 0, "_all_bases": [state]}
    )
    emit.made.append(emit.describe(node))
    node.meta["val"] = (output_value, state.meta["val"])
    # Inductor reads the exact strides that the operator is to see from here.
    node.meta["eager_input_vals"] = values_of((node.args, dict(node.kwargs)))
    output = emit.graph.call_function(operator.getitem, (node, 0))
    pool = emit.graph.call_function(operator.getitem, (node, 1))
    for item, value in ((output, output_value), (pool, state.meta["val"])):
        item.meta["val"] = value
        emit.made.append(emit.describe(item))
    shape = [s if isinstance(s, int) else -1 for s in step.output.meta["val"].shape]
    return emit.call(aten.reshape.default, output, shape), pool, node


def redirect(step: Step, output: Node, pool: Node, node: Node, graph: Graph) -> None:
    """Give every user of the step's results the operator's results."""
    step.output.replace_all_uses_with(output)
    if step.anchor.write is step.anchor.back:
        step.anchor.back.args = (step.anchor.pool, pool)
    else:
        step.anchor.write.replace_all_uses_with(pool)


def insertion_point(graph: Graph, leaves: Iterable[Node]) -> Node:
    """Return the first node after every leaf and every input of the graph."""
    wanted = set(leaves)
    last = next(iter(graph.nodes))
    for node in graph.nodes:
        if node in wanted or node.op == "placeholder":
            last = node
    return last.next


def dependents(graph: Graph, starts: Iterable[Node]) -> set[Node]:
    """Return every node that is computed from some nodes, epilogues included."""
    reached, pending = set(), list(starts)
    while pending:
        for user in pending.pop().users:
            if user not in reached:
                reached.add(user)
                pending.append(user)
    return reached


def sink(graph: Graph, made: list[Node]) -> None:
    """Move users of the new nodes that stand before them behind them, in their order."""
    late = dependents(graph, made)
    first, place = made[0], made[-1]
    for node in list(graph.nodes):
        if node is first:
            return
        if node in late:
            place.append(node)
            place = node


def erase(graph: Graph, nodes: Iterable[Node]) -> None:
    """Remove those nodes that nothing uses any more, and what only they used."""
    pending = [node for node in reversed(list(nodes)) if not node.users]
    while pending:
        node = pending.pop(0)
        if node.graph is not graph or node._erased or node.users or node.op != "call_function":
            continue
        if node.target is aten.copy_.default:
            continue
        sources = list(node.all_input_nodes)
        graph.erase_node(node)
        pending += [s for s in sources if not s.users]

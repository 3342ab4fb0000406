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

from kda_ops.passes.anchors import Anchor
from kda_ops.passes.pools import functionalized, seen
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
        node.meta["val"] = fake(self.source, target, args, kwargs)
        return self.describe(node)

    def describe(self, node: Node) -> Node:
        """Copy where the code came from."""
        for key in ("stack_trace", "source_fn_stack", "nn_module_stack", "from_node"):
            if key in self.source.meta:
                node.meta[key] = self.source.meta[key]
        return node


def fake(source: Node, target: Any, args: Any, kwargs: Any) -> Any:
    """Call a target on the fake values of its arguments, in the mode of a node that was there."""
    values, named = values_of((args, kwargs))
    with source.meta["val"].fake_mode:
        return target(*values, **named)


def values_of(arguments: Any) -> Any:
    """Return arguments with nodes replaced by their values."""
    return tree_map_only(Node, lambda node: node.meta["val"], arguments)


def splice(step: Step, graph: Graph) -> list[Node]:
    """Replace a step by its operator and return the new nodes.

    Raises RefusalError, with the graph as it was, where the operator refuses its arguments or an
    input of the step comes after its results.
    """
    leaves = step.arguments.leaves
    late = dependents(step.ends, max(leaves))
    for leaf in leaves:
        if leaf in late:
            raise RefusalError(Reason.ORDER, leaf)
    rows = step.anchor.value.meta["val"].shape[0]
    inserter = Inserter(graph, rows if isinstance(rows, int) else -1, step.output)
    with graph.inserting_before(insertion_point(graph, leaves)):
        try:
            results = insert(step, inserter)
        except Exception:
            erase(graph, inserter.made)
            raise
    redirect(step, *results)
    sink(inserter.made)
    pools = step.pools.values()
    erase(graph, (*step.region, *(node for found in pools for node in found.touching)))
    return inserter.made


def insert(step: Step, emit: Inserter) -> tuple[Node, dict[str, Node]]:
    """Add the operator's nodes; return its output, and the new pools by argument."""
    arguments = step.arguments.emit(emit)
    if step.operator == "packed_decode":
        same = step.output_dtype is step.activation
        arguments["output_dtype"] = None if same else step.output_dtype
    target = getattr(torch.ops.kda, step.operator).default
    try:
        pools = {name: seen(found.place, found.order) for name, found in step.pools.items()}
        output_value = fake(step.output, target, (), {**arguments, **pools})
    except (ValueError, TypeError, NotImplementedError) as error:
        raise RefusalError(Reason.CONTRACT, step.output, str(error)) from error
    bases = [found.place.base for found in step.pools.values()]
    for number, (name, found) in enumerate(step.pools.items()):
        arguments |= named(name, number, found)
    node = emit.graph.call_function(functionalized, (target,), {**arguments, "_all_bases": bases})
    emit.made.append(emit.describe(node))
    values = [output_value, *(base.meta["val"] for base in bases)]
    node.meta["val"] = tuple(values)
    # Inductor reads the exact strides that the operator is to see from here.
    node.meta["eager_input_vals"] = values_of((node.args, dict(node.kwargs)))
    items = []
    for number, value in enumerate(values):
        item = emit.graph.call_function(operator.getitem, (node, number))
        item.meta["val"] = value
        emit.made.append(emit.describe(item))
        items.append(item)
    shape = [s if isinstance(s, int) else -1 for s in step.output.meta["val"].shape]
    output = emit.call(aten.reshape.default, items[0], shape)
    return output, dict(zip(step.pools, items[1:], strict=True))


def named(name: str, number: int, found: Anchor) -> dict[str, Any]:
    """Return how the functional form of an operator names a pool, or a view of a base."""
    place: dict[str, Any] = {f"_{name}_base_index": number}
    if not found.place.views and found.order == tuple(range(len(found.order))):
        return place
    view = seen(found.place, found.order)
    sizes, strides = tuple(view.shape), tuple(view.stride())
    if not all(isinstance(size, int) for size in (*sizes, *strides)):
        raise RefusalError(Reason.DYNAMIC_SHAPE, found.pool, f"shape {sizes}")
    offset = view.storage_offset()
    return place | {
        f"_{name}_size": sizes,
        f"_{name}_stride": strides,
        f"_{name}_storage_offset": offset,
    }


def redirect(step: Step, output: Node, pools: dict[str, Node]) -> None:
    """Give every user of the step's results the operator's results."""
    step.output.replace_all_uses_with(output)
    for name, found in step.pools.items():
        if found.write is found.back:
            found.back.args = (found.pool, pools[name])
        else:
            found.result.replace_all_uses_with(pools[name])


def insertion_point(graph: Graph, leaves: Iterable[Node]) -> Node:
    """Return the first node after every leaf and every input of the graph."""
    last = max(leaves)
    first = next(iter(graph.nodes))
    while first.next.op == "placeholder":
        first = first.next
    return max(last, first).next


def dependents(starts: Iterable[Node], last: Node) -> set[Node]:
    """Return every node up to ``last`` that is computed from some nodes."""
    reached, pending = set(), list(starts)
    while pending:
        for user in pending.pop().users:
            if user not in reached and not last < user:
                reached.add(user)
                pending.append(user)
    return reached


def sink(made: list[Node]) -> None:
    """Move users of the new nodes that stand before them behind them, in their order."""
    place = made[-1]
    for node in sorted(dependents(made, made[0])):
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

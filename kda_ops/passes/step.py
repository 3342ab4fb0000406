"""One matched step: from an anchor in a graph to an operator's arguments.

Lives here: the order in which the parts are read, and which nodes of the region the rest of the
graph may not look at. Not here: changing the graph (rewrite.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from kda_ops.passes.affine import Index
from kda_ops.passes.anchors import Anchor, flows
from kda_ops.passes.arguments import Access, Arguments, D, access, check_dtypes, common_dtype
from kda_ops.passes.delta_rule import (
    HEAD,
    Output,
    Update,
    output_index,
    read_output,
    read_update,
    state_index,
)
from kda_ops.passes.expression import PRODUCTS, Reader
from kda_ops.passes.gates import Gate, read_beta, read_gate
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import CASTS, ROW, Term, Window, is_view, operands

aten = torch.ops.aten


@dataclass(frozen=True)
class Step:
    """A step that the operator can take over.

    ``output`` is the node that becomes the operator's result, of type ``output_dtype``; ``region``
    are the nodes between the arguments' leaves and the two results, in graph order.
    """

    anchor: Anchor
    arguments: Arguments
    window: Window
    output: Node
    output_dtype: torch.dtype
    activation: torch.dtype
    region: tuple[Node, ...]


def match(found: Anchor, graph: Graph, same: dict[Node, Node]) -> Step:
    """Match the code around an anchor, or raise RefusalError."""
    window = Window(same=same)
    rows = row_count(window, found)
    index = state_index(window, found.pool, rows)
    reader = make_reader(window, found, graph)
    written = stored_value(found)
    update = read_update(reader, written, index)
    gate = read_gate(reader, update.decay, update.key_axis)
    beta = read_beta(reader, update.beta, written)
    output = find_output(reader, found, update, index, graph)
    arguments = lay_out(window, found, update, gate, beta, output)
    node, dtype, activation = result(output.node, arguments)
    if (position := output_index(window, node, update, index)) is not None:
        window.resolve(node, position)
    region = region_of(graph, window, arguments, (node, found.write))
    check_users(region, node, found, arguments)
    return Step(found, arguments, window, node, dtype, activation, region)


def row_count(window: Window, found: Anchor) -> int:
    """Return the number of rows, which indices, state and written value have to agree on."""
    rows = window.shape(found.index if found.index is not None else found.pool)[0]
    if rows == 0:
        raise RefusalError(Reason.NO_ROWS, found.value)
    shape = window.shape(found.value)
    expected = (rows, *window.shape(found.pool)[1:])
    dropped = len(expected) - len(shape)  # a setitem of one row drops its dimension
    if shape != expected[dropped:] or any(size != 1 for size in expected[:dropped]):
        sizes = tuple(found.value.meta["val"].shape)
        raise RefusalError(Reason.ROWS_MISMATCH, found.value, f"the written value is {sizes}")
    return rows


def make_reader(window: Window, found: Anchor, graph: Graph) -> Reader:
    """Set up the algebra for the region of an anchor."""
    dependents = flows(found.reads)
    return Reader(
        window,
        {read: lambda index: index for read in found.reads},
        dependents,
        stops=norm_bases(window, graph.nodes, dependents),
    )


def norm_bases(window: Window, nodes: Iterable[Node], dependents: set[Node]) -> set[Node]:
    """Return the nodes whose squares are summed: q and k are taken whole there."""
    bases = set()
    for node in nodes:
        if node.target is not aten.sum.dim_IntList or node in dependents:
            continue
        square = operands(node)[0]
        index = tuple(window.fresh(size)[1] for size in window.shape(square))
        term = window.resolve(square, index)
        square, factors = term.node, operands(term.node)[:2]
        squared = square.target in PRODUCTS and factors[0] is factors[1]
        squared = squared or (square.target is aten.pow.Tensor_Scalar and factors[1] == 2)
        if squared and isinstance(factors[0], Node):
            bases.add(window.resolve(factors[0], term.index).node)
    return bases


def stored_value(found: Anchor) -> Node:
    """Return the new state before it is rounded to the pool's type, the one rounding allowed."""
    value = found.value
    if value.target in CASTS and value.meta["val"].dtype == found.pool.meta["val"].dtype:
        source = value.args[0]
        if isinstance(source, Node) and source.meta["val"].dtype is torch.float32:
            return source
    return value


def find_output(
    reader: Reader, found: Anchor, update: Update, index: Index, graph: Graph
) -> Output:
    """Find the node that is the new state applied to q, as far along its users as it stays so."""
    ancestors = inputs_of(found.value)
    size = index_size(reader.window)
    refusal = RefusalError(Reason.OUTPUT_NOT_FOUND, found.write)
    for node in graph.nodes:
        if node not in reader.dependents or node in ancestors or node is found.write:
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            continue
        if node_size(reader.window, node) != size:
            continue
        try:
            output = read_output(reader, node, update, index)
        except RefusalError as error:
            refusal = error if refusal.reason is Reason.OUTPUT_NOT_FOUND else refusal
            continue
        if output is not None:
            return furthest(reader, output, update, index)
    raise refusal


def index_size(window: Window) -> int:
    """Return how many elements an output has."""
    return window.sizes[ROW] * window.sizes[HEAD] * D


def node_size(window: Window, node: Node) -> int:
    """Return how many elements a node's value has."""
    total = 1
    for size in window.shape(node):
        total *= size
    return total


def furthest(reader: Reader, output: Output, update: Update, index: Index) -> Output:
    """Follow an output through views and constant factors that nothing else looks into."""
    while len(output.node.users) == 1:
        (user,) = output.node.users
        value = user.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return output
        scaled = user.target in {aten.mul.Tensor, aten.div.Tensor}
        if not (is_view(user) or scaled) or user.target is aten.cat.default:
            return output
        if node_size(reader.window, user) != index_size(reader.window):
            return output
        try:
            further = read_output(reader, user, update, index)
        except RefusalError:
            return output
        if further is None:
            return output
        output = further
    return output


def lay_out(
    window: Window, found: Anchor, update: Update, gate: Gate, beta: Term, output: Output
) -> Arguments:
    """Find every argument in memory."""
    along, across = update.key_axis, update.value_axis
    query = Term(output.query.node, output.query.index)
    key = Term(update.key.node, update.key.index)
    parts = (
        access(window, query, along),
        access(window, key, along),
        access(window, update.value, across),
    )
    logits, bias = gate.logits, bias_access(window, gate, along)
    if bias is None and gate.bias is not None:
        raise RefusalError(Reason.ARGUMENT_LAYOUT, gate.bias.node, "the gate's bias")
    a_log = access(window, gate.a_log, None, rows=False)
    if a_log.head_stride != 1:
        raise RefusalError(Reason.ARGUMENT_LAYOUT, a_log.node, "A_log is strided")
    arguments = Arguments(
        parts=parts,
        gate=access(window, logits, along),
        beta=access(window, beta, None),
        a_log=a_log,
        bias=bias,
        pool=found.pool,
        index=found.index,
        heads=window.sizes[HEAD],
        scale=output.scale,
        lower_bound=gate.lower_bound,
        layout=update.layout,
    )
    check_dtypes((*parts, arguments.gate, arguments.beta))
    return arguments


def bias_access(window: Window, gate: Gate, along: str) -> Access | None:
    """Return where the gate's bias lies, or None where it is not one number per channel."""
    if gate.bias is None:
        return None
    try:
        bias = access(window, gate.bias, along, rows=False)
    except RefusalError:
        return None
    return bias if bias.head_stride == D else None


def result(output: Node, arguments: Arguments) -> tuple[Node, torch.dtype, torch.dtype]:
    """Return the node to replace: the cast to the activation type, if that is all that follows."""
    items = (*arguments.parts, arguments.gate, arguments.beta)
    activation = common_dtype([item.node.meta["val"].dtype for item in items])
    node = output
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in CASTS and user.meta["val"].dtype is activation:
            return user, activation, activation
        if not is_view(user) or user.target in {aten.cat.default, aten.slice.Tensor}:
            break
        if user.meta["val"].numel() != node.meta["val"].numel() or user.target in CASTS:
            break
        node = user
    return output, torch.float32, activation


def inputs_of(*nodes: Node) -> set[Node]:
    """Return nodes and everything that they are computed from."""
    reached, pending = set(nodes), list(nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in reached:
                reached.add(source)
                pending.append(source)
    return reached


def region_of(
    graph: Graph, window: Window, arguments: Arguments, ends: tuple[Node, ...]
) -> tuple[Node, ...]:
    """Return the nodes from the arguments' leaves to the results, in graph order."""
    stop = set(arguments.leaves)
    reached, pending = set(ends), list(ends)
    while pending:
        for source in pending.pop().all_input_nodes:
            leaf = window.same.get(source, source) in stop
            if source not in reached and not leaf and source.op == "call_function":
                reached.add(source)
                pending.append(source)
    return tuple(node for node in graph.nodes if node in reached)


def check_users(
    region: tuple[Node, ...], output: Node, found: Anchor, arguments: Arguments
) -> None:
    """Refuse where something outside needs a value that the operator keeps to itself."""
    inside = set(region)
    rows = from_rows(region, arguments)
    for node in region:
        if node is output or node is found.write or node not in rows:
            continue
        for user in node.users:
            if user not in inside and user is not found.back:
                raise RefusalError(Reason.INTERMEDIATE_USED, node, f"used by {user.name}")


def from_rows(region: tuple[Node, ...], arguments: Arguments) -> set[Node]:
    """Return the nodes of a region that compute something from a row's inputs or its state."""
    parameters = {arguments.a_log.node, arguments.bias.node if arguments.bias else None}
    parameters.add(arguments.index)
    leaves = set(arguments.leaves) - parameters
    moved = set(leaves)
    computed: set[Node] = set()
    for node in region:
        sources = set(node.all_input_nodes)
        if is_view(node) and not sources & computed and sources & moved:
            moved.add(node)
        elif sources & (moved | computed):
            computed.add(node)
    return computed

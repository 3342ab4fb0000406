"""The recurrence around one anchor, read as mathematics: update, gate, beta, output.

Lives here: the order in which the parts are read, and finding the output. Not here: how they are
laid out for an operator, and what else the graph does with them (step.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from kda_kernels.contract.spec import HEAD_DIM as D
from kda_ops.passes.affine import Index
from kda_ops.passes.anchors import Anchor
from kda_ops.passes.candidates import flows, written
from kda_ops.passes.delta_rule import (
    HEAD,
    Output,
    Update,
    output_index,
    read_output,
    read_update,
    state_index,
)
from kda_ops.passes.expression import PRODUCTS, SUMS, Reader
from kda_ops.passes.functions import is_pointwise
from kda_ops.passes.gates import Gate, read_beta, read_gate
from kda_ops.passes.masks import Mask, masked, unmasked
from kda_ops.passes.nodes import CASTS, CONTRACTIONS, is_projection, is_view, operands
from kda_ops.passes.pools import seen
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import ROW, Scope, Term

aten = torch.ops.aten
PUTS = frozenset(
    {
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.copy.default,
        aten.index.Tensor,
    }
)


@dataclass(frozen=True)
class Core:
    """The parts of one step of the delta rule.

    ``mask`` is there where rows may be padding; ``stored`` are the nodes that hold the new state in
    the pool's type.
    """

    anchor: Anchor
    reader: Reader
    index: Index
    update: Update
    gate: Gate
    beta: Term
    output: Output
    mask: Mask | None
    stored: frozenset[Node]

    @property
    def scope(self) -> Scope:
        """The sizes that the step talks about."""
        return self.reader.scope

    def position(self, node: Node) -> Index | None:
        """Return the index of an output's element in a node that has them in order, or None."""
        if node_size(self.scope, node) != index_size(self.scope):
            return None
        return output_index(self.scope, node, self.update, self.index)

    def element(self, node: Node) -> Term | None:
        """Return the element of a node that has the output's elements in order, or None."""
        position = self.position(node)
        return None if position is None else self.scope.resolve(node, position)

    def on_valid_rows(self, node: Node) -> Node:
        """Return a result with zeros on padding rows, or refuse where the graph keeps others."""
        if self.mask is None:
            return node
        element = self.element(node)
        found = None
        if element is not None:
            found = masked(self.scope, node, element, self.mask, self.position)
        if found is None:
            fact = f"padding rows of {node.name} are not set to zero"
            raise RefusalError(Reason.MASKED_ROWS, node, fact)
        return found


def read_core(found: Anchor, same: dict[Node, Node]) -> Core:
    """Read the code around an anchor, or raise RefusalError."""
    scope = Scope(same=same)
    found = replace(found, order=memory_order(found))
    rows = row_count(scope, found)
    index = state_index(scope, found.pool, rows)
    found.mark_rows(scope)
    reader = make_reader(scope, found)
    place = found.from_memory(index)
    new, at, mask = unmasked(scope, found, place)
    written = stored_value(found, new)
    update = read_update(reader, written, at, index)
    gate = read_gate(reader, update.decay, update.key_axis)
    beta = read_beta(reader, update.beta, written)
    output = find_output(reader, found, update, index)
    held = scope.resolve(found.value, found.value_index(scope, place)).node
    stored = frozenset({found.value, held, new})
    return Core(found, reader, index, update, gate, beta, output, mask, stored)


def memory_order(found: Anchor) -> tuple[int, ...]:
    """Return the order of a state's dimensions in memory: a transposed view is turned back."""
    strides = seen(found.place, (0, 1, 2, 3)).stride()
    return (0, 1, 3, 2) if strides[2] == 1 and strides[3] != 1 else (0, 1, 2, 3)


def row_count(scope: Scope, found: Anchor) -> int:
    """Return the number of rows, which indices, state and written value have to agree on."""
    rows = scope.shape(found.index if found.index is not None else found.pool)[0]
    if rows == 0:
        raise RefusalError(Reason.NO_ROWS, found.value)
    shape = scope.shape(found.value)
    expected = (rows, *scope.shape(operands(found.write)[0])[1:])
    dropped = len(expected) - len(shape)  # a setitem of one row drops its dimension
    if shape != expected[dropped:] or any(size != 1 for size in expected[:dropped]):
        sizes = tuple(found.value.meta["val"].shape)
        raise RefusalError(Reason.ROWS_MISMATCH, found.value, f"the written value is {sizes}")
    return rows


def make_reader(scope: Scope, found: Anchor) -> Reader:
    """Set up the algebra for the region of an anchor."""
    dependents = flows(found.reads)
    return Reader(
        scope,
        reads_of(scope, found.reads, found.read_index, found.to_memory),
        dependents,
        stops=norm_bases(scope, local({*dependents, found.value}), dependents),
    )


def reads_of(
    scope: Scope,
    reads: Iterable[Node],
    place: Callable[[Scope, Node, Index], Index],
    order: Callable[[Index], Index] = tuple,
) -> dict[Node, Callable[[Index], Index]]:
    """Return the function from each read's index to the pool's, in an order of its dimensions."""

    def mapped(read: Node) -> Callable[[Index], Index]:
        return lambda index: order(place(scope, read, index))

    return {read: mapped(read) for read in reads}


def norm_bases(scope: Scope, nodes: Iterable[Node], dependents: set[Node]) -> set[Node]:
    """Return the nodes whose squares are summed: q and k are taken whole there."""
    bases = set()
    for node in nodes:
        if node.target is not aten.sum.dim_IntList or node in dependents:
            continue
        square = operands(node)[0]
        index = tuple(scope.fresh(size)[1] for size in scope.shape(square))
        term = scope.resolve(square, index)
        square, factors = term.node, operands(term.node)[:2]
        squared = square.target in PRODUCTS and factors[0] is factors[1]
        squared = squared or (square.target is aten.pow.Tensor_Scalar and factors[1] == 2)
        if squared and isinstance(factors[0], Node):
            bases.add(scope.resolve(factors[0], term.index).node)
    return bases


def stored_value(found: Anchor, value: Node) -> Node:
    """Return the new state before it is rounded to the pool's type, the one rounding allowed."""
    if value.target in CASTS and value.meta["val"].dtype == found.pool.meta["val"].dtype:
        source = value.args[0]
        if isinstance(source, Node) and source.meta["val"].dtype is torch.float32:
            return source
    return value


def find_output(reader: Reader, found: Anchor, update: Update, index: Index) -> Output:
    """Find the node that is the new state applied to q, as far along its users as it stays so."""
    ancestors = local({found.value})
    size = index_size(reader.scope)
    refusal = RefusalError(Reason.OUTPUT_NOT_FOUND, found.write)
    for node in sorted(reader.dependents):
        if node in ancestors or node is found.write:
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            continue
        if node_size(reader.scope, node) != size:
            continue
        try:
            output = read_output(reader, node, update, index)
        except RefusalError as error:
            refusal = error if refusal.reason is Reason.OUTPUT_NOT_FOUND else refusal
            continue
        if output is not None:
            return furthest(reader, output, update, index)
    raise refusal


def index_size(scope: Scope) -> int:
    """Return how many elements an output has."""
    return scope.sizes[ROW] * scope.sizes[HEAD] * D


def node_size(scope: Scope, node: Node) -> int:
    """Return how many elements a node's value has."""
    total = 1
    for size in scope.shape(node):
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
        if node_size(reader.scope, user) != index_size(reader.scope):
            return output
        try:
            further = read_output(reader, user, update, index)
        except RefusalError:
            return output
        if further is None:
            return output
        output = further
    return output


def local(ends: Iterable[Node]) -> set[Node]:
    """Return nodes and what they are computed from, as far as it may belong to a step.

    What comes before a projection, a look-up or an input of the graph does not.
    """
    reached = set(ends)
    pending = list(reached)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in reached and belongs(source):
                reached.add(source)
                pending.append(source)
    return reached


def belongs(node: Node) -> bool:
    """Whether a node may be one of a step's own."""
    if is_view(node) or is_pointwise(node) or node.target in SUMS | PUTS:
        return True
    return node.target in CONTRACTIONS and not is_projection(node)


def undecided(write: Node) -> RefusalError | None:
    """Return the reason why a step cannot be read: a size that is a symbol of no rows or slots."""
    pool, value = operands(write)[0], written(write)
    known = free_symbols([*pool.meta["val"].shape[:1], *value.meta["val"].shape[:1]])
    for node in sorted(local([value])):
        seen_as = node.meta.get("val")
        if isinstance(seen_as, torch.Tensor) and free_symbols(seen_as.shape) - known:
            return RefusalError(Reason.DYNAMIC_SHAPE, node, f"shape {tuple(seen_as.shape)}")
    return None

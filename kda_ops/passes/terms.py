"""Elements of tensors in a graph: a node and an index, looked through views and exact casts.

Lives here: what every view, split and exact upcast does to an index, so that two spellings of one
element become the same term. Not here: arithmetic (algebra.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from kda_ops.passes.affine import ZERO, Affine, Index, axis, constant, flatten, split
from kda_ops.passes.nodes import (
    CASTS,
    RESHAPES,
    SPLITS,
    constant_row,
    is_exact_cast,
    is_same,
    operands,
)

aten = torch.ops.aten

ROW = "b"  # the axis of rows: the first of a step's axes
# A symbolic size is stood in for by a large prime: what divides or bounds it then does so for no
# accidental reason, and one symbol always gets one prime.
_PRIMES = tuple(n for n in range(1_000_001, 1_001_000, 2) if all(n % d for d in range(3, 1001, 2)))


@dataclass(frozen=True)
class Term:
    """One element of a node's tensor, as a function of the axes in ``index``."""

    node: Node
    index: Index


@dataclass
class Scope:
    """Sizes of the tensors and axes that one attempt at a match talks about.

    ``rows_in`` keeps which dimensions of each visited node run over the rows of the step, so that
    the certificate can run the same nodes with fewer rows. ``same`` maps a node that repeats
    another (see :func:`repeats`) to the first of them.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    symbols: dict[Any, int] = field(default_factory=dict)
    rows_in: dict[Node, set[int]] = field(default_factory=dict)
    same: dict[Node, Node] = field(default_factory=dict)
    _shapes: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    _fresh: int = 0

    def number(self, size: int | torch.SymInt) -> int:
        """Return a size as an integer, with primes for symbols."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            self.symbols.setdefault(symbol, _PRIMES[len(self.symbols) % len(_PRIMES)])
        return int(expression.subs(self.symbols))

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a node's value."""
        if node not in self._shapes:
            self._shapes[node] = tuple(self.number(s) for s in node.meta["val"].shape)
        return self._shapes[node]

    def named(self, name: str, size: int) -> Affine:
        """Declare an axis; one of size 1 is the constant 0."""
        self.sizes[name] = size
        return ZERO if size == 1 else axis(name)

    def fresh(self, size: int) -> tuple[str, Affine]:
        """Declare an axis that nothing else uses."""
        self._fresh += 1
        name = f"${self._fresh}"
        return name, self.named(name, size)

    def resolve(
        self, node: Node, index: Index, until: Callable[[Node], bool] | None = None
    ) -> Term:
        """Look through views and exact casts to the node that computes the element.

        Looking ends earlier at a node that ``until`` accepts.
        """
        step: tuple[Node, Index] | None = (node, index)
        while step is not None:
            node, index = step
            dims = {d for d, entry in enumerate(index) if ROW in entry.axes}
            self.rows_in.setdefault(node, set()).update(dims)
            node = self.same.get(node, node)
            self.rows_in.setdefault(node, set()).update(dims)
            step = None if until is not None and until(node) else self._through(node, index)
        return Term(node, index)

    def broadcast(self, node: Node, index: Index) -> Index:
        """Return the index of an operand whose result is indexed by ``index``."""
        shape = self.shape(node)
        aligned = index[len(index) - len(shape) :]
        return tuple(ZERO if size == 1 else e for e, size in zip(aligned, shape, strict=True))

    def _through(self, node: Node, index: Index) -> tuple[Node, Index] | None:
        if node.op != "call_function" or not operands(node):
            return None
        source, target = operands(node)[0], node.target
        if target is operator.getitem:
            return self._piece(node, index)
        if target is aten.cat.default:
            return self._concatenated(node, index)
        if target in {aten.select_scatter.default, aten.slice_scatter.default}:
            return self._scattered(node, index)
        if target is aten.index.Tensor:
            return self._shuffled(node, index)
        if target is aten.copy.default:
            source = operands(node)[1]
            return (source, self.broadcast(source, index)) if is_exact_cast(node, 1) else None
        if not isinstance(source, Node):
            return None
        if is_same(node):
            return source, index
        if target in CASTS:
            return (source, index) if is_exact_cast(node) else None
        if target in RESHAPES:
            position = flatten(index, self.shape(node))
            moved = split(position, self.shape(source), self.sizes)
            return None if moved is None else (source, moved)
        moved = self._moved(node, source, index)
        return None if moved is None else (source, moved)

    def _moved(self, node: Node, source: Node, index: Index) -> Index | None:
        """Return the index in the source of a view that moves, adds or drops dimensions."""
        target, shape = node.target, self.shape(source)
        rank = len(shape)
        arguments = operands(node)[1:]
        if target is aten.expand.default:
            return self.broadcast(source, index)
        if target is aten.repeat.default:
            last = slice(len(index) - rank, None)
            sizes = zip(shape, arguments[0][last], strict=True)
            plain = all(size == 1 or count == 1 for size, count in sizes)
            return self.broadcast(source, index) if plain else None
        if target is aten.permute.default:
            order = [d % rank for d in arguments[0]]
            return tuple(index[order.index(d)] for d in range(rank))
        if target in {aten.transpose.int, aten.t.default}:
            a, b = (d % rank for d in (arguments or ((0, 1) if rank > 1 else (0, 0))))
            moved = list(index)
            moved[a], moved[b] = moved[b], moved[a]
            return tuple(moved)
        if target is aten.unsqueeze.default:
            position = arguments[0] % (rank + 1)
            return index[:position] + index[position + 1 :]
        if target in {aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}:
            dims = arguments[0] if arguments else list(range(rank))
            dims = [dims] if isinstance(dims, int) else dims
            gone = {d % rank for d in dims if shape[d % rank] == 1}
            rest = iter(index)
            return tuple(ZERO if d in gone else next(rest) for d in range(rank))
        if target is aten.select.int:
            return self._selected(arguments, index, shape)
        if target is aten.slice.Tensor:
            return self._sliced(arguments, index, shape)
        return None

    def _selected(
        self, arguments: tuple[Any, ...], index: Index, shape: tuple[int, ...]
    ) -> Index | None:
        dim, position = arguments[0] % len(shape), arguments[1]
        if not isinstance(position, int):
            return None
        return (*index[:dim], constant(position % shape[dim]), *index[dim:])

    def _sliced(
        self, arguments: tuple[Any, ...], index: Index, shape: tuple[int, ...]
    ) -> Index | None:
        dim = (arguments[0] if arguments else 0) % len(shape)
        start = arguments[1] if len(arguments) > 1 and arguments[1] is not None else 0
        step = arguments[3] if len(arguments) > 3 else 1
        if not isinstance(start, int) or not isinstance(step, int):
            return None
        start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
        entry = index[dim].scaled(step) + constant(start)
        return (*index[:dim], entry, *index[dim + 1 :])

    def _piece(self, node: Node, index: Index) -> tuple[Node, Index] | None:
        """Look through one result of split, split_with_sizes or unbind."""
        parent, which = operands(node)
        if not isinstance(parent, Node) or parent.target not in SPLITS:
            return None
        source = operands(parent)[0]
        if not isinstance(source, Node) or not isinstance(which, int):
            return None
        shape = self.shape(source)
        sizes = operands(parent)[1] if len(operands(parent)) > 1 else 0
        if parent.target is aten.unbind.int:
            dim = sizes % len(shape)
            return source, (*index[:dim], constant(which % shape[dim]), *index[dim:])
        dim = (operands(parent)[2] if len(operands(parent)) > 2 else 0) % len(shape)
        values = parent.meta["val"]
        which %= len(values)
        start = sum(self.number(v.shape[dim]) for v in values[:which])
        return source, (*index[:dim], index[dim] + constant(start), *index[dim + 1 :])

    def _shuffled(self, node: Node, index: Index) -> tuple[Node, Index] | None:
        """Look through an index by constants along one dimension, as torch.roll becomes one."""
        source, indices = operands(node)
        dims = [dim for dim, item in enumerate(indices) if item is not None]
        if len(dims) != 1 or len(index) != len(self.shape(source)) or index[dims[0]].axes:
            return None
        (dim,) = dims
        row = constant_row(indices[dim])
        position = index[dim].constant
        if row is None or position >= len(row):
            return None
        entry = constant(row[position] % self.shape(source)[dim])
        return source, (*index[:dim], entry, *index[dim + 1 :])

    def _scattered(self, node: Node, index: Index) -> tuple[Node, Index] | None:
        """Look into what was put into a tensor, or past it, where the index is on one side."""
        base, part, *rest = operands(node)
        shape = self.shape(base)
        dim, start = (rest[0] if rest else 0) % len(shape), rest[1] if len(rest) > 1 else 0
        selects = node.target is aten.select_scatter.default
        start = 0 if start is None else start
        if not isinstance(start, int) or (len(rest) > 3 and rest[3] != 1):
            return None
        start = max(start + shape[dim], 0) if start < 0 else start
        end = start + (1 if selects else self.shape(part)[dim])
        low, high = index[dim].bounds(self.sizes)
        if high < start or low >= end:
            return base, index
        if low < start or high >= end:
            return None
        inside = () if selects else (index[dim] + constant(-start),)
        return part, (*index[:dim], *inside, *index[dim + 1 :])

    def _concatenated(self, node: Node, index: Index) -> tuple[Node, Index] | None:
        """Look into the one piece of a concatenation that the index stays within, if it does."""
        dim = (operands(node)[1] if len(operands(node)) > 1 else 0) % len(index)
        low, high = index[dim].bounds(self.sizes)
        start = 0
        for piece in operands(node)[0]:
            end = start + self.shape(piece)[dim]
            if start <= low and high < end:
                entry = index[dim] + constant(-start)
                return piece, (*index[:dim], entry, *index[dim + 1 :])
            start = end
        return None

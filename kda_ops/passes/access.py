"""Where elements lie in memory, and the views that lead there.

Lives here: reading elements as rows of a node, and cutting, joining and casting those rows: built
once as data and then emitted both into the graph and, for the certificate, on real tensors. Not
here: which element is which argument (arguments.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from kda_kernels.contract.spec import HEAD_DIM as D
from kda_ops.passes.affine import flatten
from kda_ops.passes.delta_rule import HEAD
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import ROW, Scope, Term

aten = torch.ops.aten
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


class Emitter(Protocol):
    """Calls operations: as new nodes of a graph, or at once on tensors."""

    rows: int  # number of rows to write into shapes, -1 for "whatever fits"

    def input(self, node: Node) -> Any:
        """Return what stands for a node of the graph."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an operation."""

    def value(self, item: Any) -> torch.Tensor:
        """Return the tensor, or fake tensor, behind an item."""


@dataclass(frozen=True)
class Access:
    """Where elements over (row, head, width) lie in a node's rows.

    The node, with dimension ``batch`` moved to the front, is read as [rows, width]; an element is
    at ``offset + head * head_stride + position * stride``. ``width`` is that of the node's rows.
    """

    node: Node
    batch: int | None
    width: int
    offset: int
    head_stride: int
    stride: int

    def same_rows(self, other: Access) -> bool:
        """Whether two accesses read the same rows in the same order."""
        mine = (self.node, self.batch, self.width, self.head_stride, self.stride)
        return mine == (other.node, other.batch, other.width, other.head_stride, other.stride)


def access(
    scope: Scope, term: Term, along: str | None, rows: bool = True, per_head: bool = True
) -> Access:
    """Describe where a term over the step's axes lies, or refuse."""
    shape, index = scope.shape(term.node), term.index
    batch = None
    position = flatten(index, shape)
    total = 1
    for size in shape:
        total *= size
    count = scope.sizes[ROW] if rows else 1
    if rows and count > 1 and position.coefficient(ROW) * count != total:
        batch = next((i for i, e in enumerate(index) if e.terms == ((ROW, 1),)), None)
        if batch is None or index[batch].constant:
            raise RefusalError(Reason.ARGUMENT_LAYOUT, term.node)
        shape = (shape[batch], *shape[:batch], *shape[batch + 1 :])
        position = flatten((index[batch], *index[:batch], *index[batch + 1 :]), shape)
    if position.axes - ({ROW, HEAD} | ({along} if along else set())) or total % count:
        raise RefusalError(Reason.ARGUMENT_LAYOUT, term.node)
    if not rows and ROW in position.axes:
        raise RefusalError(Reason.ARGUMENT_LAYOUT, term.node)
    stride = position.coefficient(along) if along else 0
    heads = position.coefficient(HEAD) or (D if along else 1)
    missing = scope.sizes[HEAD] > 1 and bool(position.coefficient(HEAD)) is not per_head
    if missing or (along and stride != 1):
        raise RefusalError(Reason.ARGUMENT_LAYOUT, term.node, "not one value for each")
    return Access(term.node, batch, total // count, position.constant, heads, stride)


def row_view(emit: Emitter, item: Access) -> Any:
    """Return a node as [rows, width]."""
    node = emit.input(item.node)
    rank = emit.value(node).dim()
    if item.batch not in {None, 0}:
        order = [item.batch, *(d for d in range(rank) if d != item.batch)]
        node = emit.call(aten.permute.default, node, order)
    if rank == 2 and item.batch in {None, 0} and emit.value(node).shape[1] == item.width:
        return node
    return emit.call(aten.reshape.default, node, [emit.rows, item.width])


def columns(emit: Emitter, rows: Any, start: int, length: int, width: int) -> Any:
    """Return columns of a [rows, width] item."""
    if (start, length) == (0, width):
        return rows
    return emit.call(aten.slice.Tensor, rows, 1, start, start + length)


def by_channel(emit: Emitter, item: Access, heads: int) -> Any:
    """Return [rows, heads * D]."""
    rows = row_view(emit, item)
    if item.head_stride == D:
        return columns(emit, rows, item.offset, heads * D, item.width)
    start, first = item.offset % item.head_stride, item.offset // item.head_stride
    if item.width % item.head_stride or start + D > item.head_stride:
        raise RefusalError(Reason.ARGUMENT_LAYOUT, item.node, "channels of a head are apart")
    groups = item.width // item.head_stride
    apart = emit.call(aten.reshape.default, rows, [emit.rows, groups, item.head_stride])
    apart = emit.call(aten.slice.Tensor, apart, 2, start, start + D)
    if (first, heads) != (0, groups):
        apart = emit.call(aten.slice.Tensor, apart, 1, first, first + heads)
    return emit.call(aten.reshape.default, apart, [emit.rows, heads * D])


def by_head(emit: Emitter, item: Access, heads: int) -> Any:
    """Return [rows, heads]."""
    rows = row_view(emit, item)
    if item.head_stride == 1 or heads == 1:
        return columns(emit, rows, item.offset, heads, item.width)
    if item.width % item.head_stride:
        raise RefusalError(Reason.ARGUMENT_LAYOUT, item.node, "heads are at an uneven stride")
    groups = item.width // item.head_stride
    first, start = divmod(item.offset, item.head_stride)
    apart = emit.call(aten.reshape.default, rows, [emit.rows, groups, item.head_stride])
    apart = emit.call(aten.select.int, apart, 2, start)
    return columns(emit, apart, first, heads, groups)


def packed(emit: Emitter, parts: tuple[Access, Access, Access], heads: int) -> Any:
    """Return [rows, 3 * heads * D], as a view where q, k and v already lie so."""
    q, k, v = parts
    width = heads * D
    together = q.same_rows(k) and q.same_rows(v) and q.head_stride == D
    if together and (k.offset - q.offset, v.offset - k.offset) == (width, width):
        return columns(emit, row_view(emit, q), q.offset, 3 * width, q.width)
    pieces = [by_channel(emit, part, heads) for part in parts]
    dtype = common_dtype([emit.value(p).dtype for p in pieces])
    return emit.call(aten.cat.default, [cast(emit, p, dtype) for p in pieces], 1)


def parameter(emit: Emitter, item: Access, length: int) -> Any:
    """Return a parameter [length], in float32 unless it is bfloat16."""
    node = emit.input(item.node)
    value = emit.value(node)
    if value.dim() != 1 or not value.is_contiguous():
        node = emit.call(aten.reshape.default, node, [item.width])
    if (item.offset, length) != (0, item.width):
        node = emit.call(aten.slice.Tensor, node, 0, item.offset, item.offset + length)
    return node if value.dtype is torch.bfloat16 else cast(emit, node, torch.float32)


def cast(emit: Emitter, item: Any, dtype: torch.dtype) -> Any:
    """Return an item in a type that holds all its values."""
    if emit.value(item).dtype is dtype:
        return item
    return emit.call(torch.ops.prims.convert_element_type.default, item, dtype)


def unit_stride(emit: Emitter, item: Any) -> Any:
    """Return an item whose last dimension is contiguous and whose rows do not overlap."""
    value = emit.value(item)
    rows, width = value.stride()
    apart = rows >= value.shape[1] if isinstance(rows, int) else True
    if (width == 1 or value.shape[1] == 1) and apart:
        return item
    return emit.call(aten.clone.default, item, memory_format=torch.contiguous_format)


def common_dtype(dtypes: list[torch.dtype]) -> torch.dtype:
    """Return the one type of all activations, float32 where they differ."""
    return dtypes[0] if len(set(dtypes)) == 1 else torch.float32


def check_dtypes(items: tuple[Access, ...]) -> None:
    """Refuse activations of a type that no kernel reads."""
    for item in items:
        dtype = item.node.meta["val"].dtype
        if dtype not in ACTIVATIONS:
            raise RefusalError(Reason.ACTIVATION_DTYPE, item.node, str(dtype))

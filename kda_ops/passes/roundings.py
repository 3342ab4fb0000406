"""Keeps a model's roundings in the graph until the steps in it are matched.

Inductor's joint-graph passes remove a cast to a narrower type and back in torch 2.11 (in 2.13 they
do not), and with it a rounding that the operators do as well. Every rounding is marked before those
passes run, and put back after them in graphs that have a step to match: before Inductor computes
the key of its cache. Those that no operator has taken over are removed again, so that the rest of
the graph compiles as without us.

Lives here: marking, putting back, and removing. Not here: which roundings an operator does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from kda_ops.passes.candidates import candidates
from kda_ops.passes.composition import ComposedPass

CAST: Any = torch.ops.prims.convert_element_type.default
MARK = "kda_ops_rounded_to"
PUT_BACK = "kda_ops_put_back"


class MarkRoundings(ComposedPass):
    """Runs before Inductor's joint-graph passes."""

    def run(self, graph: Graph) -> None:
        """Mark every cast to a wider type, where values had been rounded to a narrower one."""
        mark_roundings(graph)


class PutBackRoundings(ComposedPass):
    """Runs after Inductor's joint-graph passes."""

    def run(self, graph: Graph) -> None:
        """Put back what they removed, in inference graphs that may have a step."""
        # In a training graph the partitioner would weigh casts that are gone again later.
        trains = any("tangents" in node.name for node in graph.nodes if node.op == "placeholder")
        if not trains and next(candidates(graph), None) is not None:
            put_back_roundings(graph)


def mark_roundings(graph: Graph) -> None:
    """Note at every cast to a wider type from which type it is.

    Inductor hands the metadata of such a cast on to the one that it puts in the place of two.
    """
    for node in graph.nodes:
        if node.target is CAST and dtype_of(node.args[0]).itemsize < dtype_of(node).itemsize:
            node.meta[MARK] = dtype_of(node.args[0])


def put_back_roundings(graph: Graph) -> None:
    """Round again what is cast from another type than the one that was marked."""
    for node in list(graph.nodes):
        dtype = node.meta.get(MARK)
        if node.target is not CAST or dtype in {None, dtype_of(node.args[0])}:
            continue
        with graph.inserting_before(node):
            rounded = graph.call_function(CAST, (node.args[0], dtype))
        rounded.meta = {**node.meta, "val": node.args[0].meta["val"].to(dtype), PUT_BACK: True}
        del rounded.meta[MARK]
        node.args = (rounded, node.args[1])


def remove_roundings(graph: Graph) -> None:
    """Remove those roundings that were put back and that no operator has taken over."""
    for node in list(graph.nodes):
        if PUT_BACK not in node.meta:
            continue
        for cast in [user for user in node.users if user.target is CAST]:
            cast.args = (node.args[0], *cast.args[1:])
        if not node.users:
            graph.erase_node(node)


def dtype_of(node: Any) -> torch.dtype:
    """Return the type of a node's value."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype

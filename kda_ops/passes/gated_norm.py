"""Recognises the gated RMSNorm behind a step: o / rms(o) * weight * sigmoid(gate).

Lives here: finding the node that is that function of the output. Not here: the output itself
(core.py), and laying the parts out as arguments (fused_arguments.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from kda_ops.passes.algebra import Product, Value
from kda_ops.passes.core import Core, D, index_size, node_size
from kda_ops.passes.delta_rule import INNER, squared_norm
from kda_ops.passes.expression import Reader
from kda_ops.passes.functions import argument_of, sigmoid
from kda_ops.passes.masks import users_of
from kda_ops.passes.nodes import CASTS, is_view
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import Term


@dataclass(frozen=True)
class GatedNorm:
    """The norm of one step: ``node`` is its result, ``weight`` is None where there is none.

    ``valid`` is the result with zeros on padding rows, the same node where there are none.

    ``base`` is the output that is normalised, ``rounded`` are the casts of it that the operator
    makes too.
    """

    node: Node
    valid: Node
    weight: Term | None
    gate: Term
    eps: float
    base: Node
    rounded: frozenset[Node]


def read_norm(core: Core, activation: torch.dtype) -> GatedNorm:
    """Find the gated norm of a step's output in the activations' type, or raise RefusalError.

    Padding rows are zero after the norm if they are before it.
    """
    if core.mask is None:
        return norm_of(core, activation)
    try:
        before = core.on_valid_rows(core.output.node)
    except RefusalError:
        found = norm_of(core, activation)
        return replace(found, valid=core.on_valid_rows(found.node))
    return norm_of(replace(core, output=replace(core.output, node=before)), activation)


def norm_of(core: Core, activation: torch.dtype) -> GatedNorm:
    """Find the gated norm behind the node of an output."""
    output = core.element(core.output.node)
    if output is None:
        raise RefusalError(Reason.OUTPUT_NORM, core.output.node)
    behind = list(users_of(core.output.node))
    rounded = frozenset(node for node in behind if is_rounded(core, node, output, activation))
    bases = rounded
    if core.output.node.meta["val"].dtype is activation:
        bases |= {output.node}
    reader = Reader(core.scope, {}, set(), stops={output.node, *rounded})
    refusal = RefusalError(Reason.OUTPUT_NORM, core.output.node)
    for node in behind:
        if node.meta["val"].dtype is not activation or node in rounded or is_view(node):
            continue
        if node_size(core.scope, node) != index_size(core.scope):
            continue
        try:
            found = norm_at(core, reader, node, rounded)
        except RefusalError as error:
            refusal = error
            continue
        if found is None:
            continue
        if found.base not in bases:
            fact = "the operator rounds its output before the norm, the graph does not"
            raise RefusalError(Reason.ROUNDING, node, fact)
        return found
    raise refusal


def is_rounded(core: Core, node: Node, output: Term, activation: torch.dtype) -> bool:
    """Whether a node is the output rounded to the activations' type."""
    if node.target not in CASTS or node.meta["val"].dtype is not activation:
        return False
    element = core.element(node)
    if element is None or element.node is not node:
        return False
    return core.scope.resolve(node.all_input_nodes[0], element.index) == output


def norm_at(core: Core, reader: Reader, node: Node, rounded: frozenset[Node]) -> GatedNorm | None:
    """Read a node as the gated norm, or return None where it is something else."""
    element = core.element(node)
    if element is None or element.node is not node:
        return None
    coefficient, factors = reader.factors(node, element.index)
    base = next((f for f, p in factors if p == 1.0 and f in bases_of(core, reader)), None)
    if base is None:
        return None
    for factor, power in factors:
        found = squared_norm(reader, factor) if isinstance(factor, Value) else None
        if found is None or power != -0.5:
            continue
        value, eps, share = found
        if value != base.renamed(core.update.value_axis, INNER):
            continue
        width = share * D
        if not math.isclose(coefficient * width**-0.5, 1.0, rel_tol=1e-6):
            raise RefusalError(Reason.OUTPUT_NORM, node, f"multiplied by {coefficient:g}")
        rest = factors - {(base, 1.0), (factor, power)}
        weight, gate = weight_and_gate(core, reader, rest, node)
        return GatedNorm(node, node, weight, gate, exactly(eps / width), base.node, rounded)
    return None


def bases_of(core: Core, reader: Reader) -> set[Value]:
    """Return the output's element, as it is and rounded."""
    elements = (core.element(node) for node in reader.stops)
    return {Value(e.node, e.index) for e in elements if e is not None}


def weight_and_gate(
    core: Core, reader: Reader, rest: Product, at: Node
) -> tuple[Term | None, Term]:
    """Read what the normalised output is multiplied by."""
    gate = argument_of(core.scope, rest, sigmoid)
    if gate is not None:
        return None, gate
    for factor, power in rest:
        if power != 1.0 or factor.axes - {core.update.value_axis} or not isinstance(factor, Value):
            continue
        gate = argument_of(core.scope, rest - {(factor, power)}, sigmoid)
        if gate is not None:
            return Term(factor.node, factor.index), gate
    names = ", ".join(sorted(f.node.name for f, _ in rest if isinstance(f, Value)))
    raise RefusalError(Reason.OUTPUT_NORM, at, f"multiplied by {names or 'nothing'}")


def exactly(eps: float) -> float:
    """Return the decimal number that a quotient of one stands for."""
    return float(f"{eps:.12g}")

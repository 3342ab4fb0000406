"""Recognises the decay gate and beta: which logits, which A_log, which bias, which bound.

Lives here: how the functions of functions.py are put together to a gate. Not here: the recurrence
(delta_rule.py), and turning elements into arguments (arguments.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kda_ops.passes.algebra import RELATIVE, Product, Value
from kda_ops.passes.delta_rule import HEAD
from kda_ops.passes.expression import Reader
from kda_ops.passes.functions import argument_of, sigmoid, softplus
from kda_ops.passes.nodes import operands
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import ROW, Term

aten = torch.ops.aten


@dataclass(frozen=True)
class Gate:
    """g of a step: ``logits`` plus ``bias`` (or None), exp of ``a_log``, the bound (or None)."""

    logits: Term
    bias: Term | None
    a_log: Term
    lower_bound: float | None


def below(reader: Reader, node: Any, value: Value | Term) -> Term:
    """Return the element of an elementwise operand, looked through views."""
    return reader.scope.resolve(node, reader.scope.broadcast(node, value.index))


def read_beta(reader: Reader, factors: Product, at: Node) -> Term:
    """Return the logits of beta."""
    logits = argument_of(reader.scope, factors, sigmoid)
    if logits is None:
        names = ", ".join(sorted(f.node.name for f, _ in factors if isinstance(f, Value)))
        raise RefusalError(Reason.BETA_FORM, at, f"beta is the product of {names or 'nothing'}")
    return logits


def read_gate(reader: Reader, decay: Value, key_axis: str) -> Gate:
    """Read g = log(decay) as one of the two gates."""
    if decay.node.target not in {aten.exp.default, aten.exp2.default}:
        raise RefusalError(Reason.GATE_FORM, decay.node, f"the decay is {decay.node.target}")
    coefficient, factors = reader.factors(operands(decay.node)[0], decay.index)
    if decay.node.target is aten.exp2.default:
        coefficient *= math.log(2.0)
    logits = argument_of(reader.scope, factors, sigmoid)
    if logits is not None:
        return bounded_gate(reader, logits, coefficient, key_axis)
    rate, rest = split_rate(reader, factors)
    argument = argument_of(reader.scope, rest, softplus)
    if rate is None or argument is None or not math.isclose(coefficient, -1.0, rel_tol=1e-6):
        raise RefusalError(Reason.GATE_FORM, decay.node)
    raw, bias = split_bias(reader, argument, key_axis)
    return Gate(raw, bias, rate, None)


def bounded_gate(reader: Reader, logits: Term, bound: float, key_axis: str) -> Gate:
    """Read bound * sigmoid(exp(A_log) * a)."""
    if not (math.isfinite(bound) and bound < 0):
        raise RefusalError(Reason.BOUND_RANGE, logits.node, f"{bound:g}")
    coefficient, factors = reader.factors(logits.node, logits.index)
    rate, rest = split_rate(reader, factors)
    argument = reader.whole.get(rest)
    if rate is None or argument is None or coefficient != 1.0:
        raise RefusalError(Reason.GATE_FORM, logits.node)
    raw, bias = split_bias(reader, argument, key_axis)
    bound = round(bound, 6) if math.isclose(bound, round(bound, 6), rel_tol=1e-9) else bound
    return Gate(raw, bias, rate, bound)


def split_rate(reader: Reader, factors: Product) -> tuple[Term | None, Product]:
    """Split exp(A_log), the one exponential that runs over heads only, from a product."""
    for factor, power in factors:
        if not isinstance(factor, Value) or power != 1.0 or factor.axes - {HEAD}:
            continue
        rest = factors - {(factor, power)}
        if factor.node.target is aten.exp.default:
            return below(reader, operands(factor.node)[0], factor), rest
        if factor.node.target is aten.exp2.default:
            coefficient, exponent = reader.factors(operands(factor.node)[0], factor.index)
            a_log = reader.whole.get(exponent)
            if a_log is not None and math.isclose(coefficient, 1 / math.log(2.0), rel_tol=RELATIVE):
                return a_log, rest
    return None, factors


def split_bias(reader: Reader, argument: Term, key_axis: str) -> tuple[Term, Term | None]:
    """Split logits + bias where the bias does not depend on the row; else all are logits."""
    node = argument.node
    if node.target is not aten.add.Tensor or node.kwargs:
        return argument, None
    left, right = operands(node)[:2]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return argument, None
    if node.meta["val"].dtype is not torch.float32:
        return argument, None
    for raw, bias in ((left, right), (right, left)):
        element = below(reader, bias, argument)
        axes = frozenset().union(*(entry.axes for entry in element.index))
        parameter = element.node.op in {"placeholder", "get_attr"}
        alone = reader.scope.sizes[ROW] == 1 and not parameter
        if ROW not in axes and key_axis in axes and not alone:
            return below(reader, raw, argument), element
    return argument, None

"""Recognises the decay gate and beta: which logits, which A_log, which bias, which bound.

Lives here: sigmoid and softplus in the forms they decompose to. Not here: the recurrence
(delta_rule.py), and turning elements into arguments (arguments.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kda_ops.passes.algebra import Product, Value
from kda_ops.passes.delta_rule import HEAD
from kda_ops.passes.expression import Reader
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import ROW, Term, operands

aten = torch.ops.aten
SOFTPLUS_THRESHOLD = 20.0


@dataclass(frozen=True)
class Gate:
    """g of a step: ``logits`` plus ``bias`` (or None), exp of ``a_log``, the bound (or None)."""

    logits: Term
    bias: Term | None
    a_log: Term
    lower_bound: float | None


def operand(reader: Reader, value: Value, position: int = 0) -> Term:
    """Return an operand of an elementwise node at the element of a value."""
    return below(reader, operands(value.node)[position], value)


def below(reader: Reader, node: Any, value: Value | Term) -> Term:
    """Return the element of an elementwise operand, looked through views."""
    return reader.window.resolve(node, reader.window.broadcast(node, value.index))


def unrounded(value: Value) -> Value:
    """Refuse a gate or beta that is computed in less than float32."""
    dtype = value.node.meta["val"].dtype
    if dtype in {torch.bfloat16, torch.float16}:
        name = str(dtype).removeprefix("torch.")
        raise RefusalError(Reason.ROUNDING, value.node, f"{value.node.name} is {name}")
    return value


def sigmoid_of(reader: Reader, factors: Product) -> Term | None:
    """Return x when a product is sigmoid(x), as sigmoid or as 1 / (1 + exp(-x))."""
    ((factor, power),) = factors if len(factors) == 1 else ((None, 0.0),)
    if not isinstance(factor, Value):
        return None
    if power == 1.0 and factor.node.target is aten.sigmoid.default:
        return operand(reader, unrounded(factor))
    if power != -1.0 or factor.node.target not in {aten.add.Tensor, aten.add.Scalar}:
        return None
    exponential = other_than(factor.node, 1)
    if exponential is None:
        return None
    term = below(reader, exponential, factor)
    if term.node.target is not aten.exp.default:
        return None
    negated = below(reader, operands(term.node)[0], term)
    if negated.node.target is not aten.neg.default:
        return None
    unrounded(factor)
    return below(reader, operands(negated.node)[0], negated)


def other_than(node: Node, number: float) -> Node | None:
    """Return the tensor operand of ``tensor + number`` in either order."""
    left, right = operands(node)[:2]
    if node.kwargs:
        return None
    if isinstance(left, Node) and right == number:
        return left
    return right if isinstance(right, Node) and left == number else None


def read_beta(reader: Reader, factors: Product, at: Node) -> Term:
    """Return the logits of beta."""
    logits = sigmoid_of(reader, factors)
    if logits is None:
        names = ", ".join(sorted(f.node.name for f, _ in factors if isinstance(f, Value)))
        raise RefusalError(Reason.BETA_FORM, at, f"beta is the product of {names or 'nothing'}")
    return logits


def read_gate(reader: Reader, decay: Value, key_axis: str) -> Gate:
    """Read g = log(decay) as one of the two gates."""
    if decay.node.target not in {aten.exp.default, aten.exp2.default}:
        raise RefusalError(Reason.GATE_FORM, decay.node, f"the decay is {decay.node.target}")
    unrounded(decay)
    coefficient, factors = reader.factors(operands(decay.node)[0], decay.index)
    if decay.node.target is aten.exp2.default:
        coefficient *= math.log(2.0)
    logits = sigmoid_of(reader, factors)
    if logits is not None:
        return bounded_gate(reader, logits, coefficient, key_axis)
    rate, rest = split_rate(reader, factors)
    softplus = softplus_of(reader, rest)
    if rate is None or softplus is None or not math.isclose(coefficient, -1.0, rel_tol=1e-6):
        raise RefusalError(Reason.GATE_FORM, decay.node)
    raw, bias = split_bias(reader, softplus, key_axis)
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
        if factor.node.target is aten.exp.default:
            return operand(reader, unrounded(factor)), factors - {(factor, power)}
    return None, factors


def softplus_of(reader: Reader, factors: Product) -> Term | None:
    """Return a when a product is softplus(a) with PyTorch's threshold."""
    ((factor, power),) = factors if len(factors) == 1 else ((None, 0.0),)
    if not isinstance(factor, Value) or power != 1.0:
        return None
    unrounded(factor)
    if factor.node.target is aten.softplus.default and len(operands(factor.node)) == 1:
        return operand(reader, factor)
    if factor.node.target is not aten.where.self:
        return None
    condition, yes, no = (operand(reader, factor, i) for i in range(3))
    large = {aten.gt.Scalar: True, aten.ge.Scalar: True, aten.le.Scalar: False}
    large |= {aten.lt.Scalar: False}
    if condition.node.target not in large or operands(condition.node)[1] != SOFTPLUS_THRESHOLD:
        return None
    linear, curved = (yes, no) if large[condition.node.target] else (no, yes)
    compared = below(reader, operands(condition.node)[0], condition)
    return linear if linear == compared == log1p_exp(reader, curved) else None


def log1p_exp(reader: Reader, term: Term) -> Term | None:
    """Return x when a term is log(1 + exp(x))."""
    inner = None
    if term.node.target is aten.log1p.default:
        inner = below(reader, operands(term.node)[0], term)
    elif term.node.target is aten.log.default:
        total = below(reader, operands(term.node)[0], term)
        if total.node.target in {aten.add.Tensor, aten.add.Scalar}:
            exponential = other_than(total.node, 1)
            inner = None if exponential is None else below(reader, exponential, total)
    if inner is None or inner.node.target is not aten.exp.default:
        return None
    return below(reader, operands(inner.node)[0], inner)


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
        alone = reader.window.sizes[ROW] == 1 and not parameter
        if ROW not in axes and key_axis in axes and not alone:
            return below(reader, raw, argument), element
    return argument, None

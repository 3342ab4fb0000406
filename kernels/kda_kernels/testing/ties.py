"""Inputs whose convolution does not land on a rounding tie, so that error budgets measure errors.

The fused operators round the convolution's output to the activation type. Where the exact number
lies within float32's error of the middle between two neighbours, two correct implementations may
round apart, and a whole unit of bf16 goes through the recurrence: thousands of float32 units in the
state. That happens to about one element in 20,000, so tests step off such places first.
Not here: the budgets (compare.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kda_kernels.contract.spec import Operator
from kda_kernels.testing.liveness import live_slot, sequences

_MARGIN = 16 * 2.0**-24
"""How near a tie is too near, as a share of the sum of magnitudes: four roundings of float32, its
exp and its division stay below half of this."""

_DIGITS = {torch.bfloat16: 8, torch.float16: 11}
_TRIES = 50


def step_off_ties(operator: Operator, values: dict[str, Any]) -> None:
    """Draw those elements of x anew, in place, whose convolution lies on a tie; others stay.

    Raises:
        RuntimeError: ties remain after many tries (inputs that are no random numbers).
    """
    if "conv_state" not in values or values["x"].dtype not in _DIGITS:
        return
    generator = torch.Generator().manual_seed(0)
    for _ in range(_TRIES):
        moved = 0
        for row, history in _histories(values):
            near = _near_tie(history, values["x"][row], values["weight"], values["conv_bias"])
            count = int(near.sum())
            values["x"][row, near] = torch.randn(count, generator=generator).to(values["x"].dtype)
            moved += count
        if not moved:
            return
    raise RuntimeError(f"{operator.name}: {moved} elements of x stay on ties")


def _near_tie(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Tell for each channel whether silu of the convolution lies near a tie of x's type."""
    taps = weight.transpose(1, 2).reshape(-1, 4).double()
    products = torch.cat([history, x.unsqueeze(1)], 1).double() * taps
    z, size = products.sum(1), products.abs().sum(1)
    if bias is not None:
        z, size = z + bias.double(), size + bias.double().abs()
    m = torch.nn.functional.silu(z)
    lowest = -133 if x.dtype is torch.bfloat16 else -24
    exponent = torch.frexp(m).exponent
    unit = torch.exp2((exponent - _DIGITS[x.dtype]).clamp_min(lowest).double())
    from_tie = ((m / unit - 0.5) - (m / unit - 0.5).round()).abs() * unit
    # A unit as small as float32's own error harms no budget.
    return (from_tie < _MARGIN * size) & (unit > 4 * _MARGIN * size)


def _histories(values: dict[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield every row that is computed and the three columns [C, 3] before its token."""
    slots, first_slot, pool = values["state"].shape[0], values["first_slot"], values["conv_state"]
    if "query_start_loc" not in values:
        indices = values["state_indices"]
        for row in range(values["x"].shape[0]):
            slot = row if indices is None else live_slot(int(indices[row]), slots, first_slot)
            if slot is not None:
                yield row, pool[slot][:, -3:]
        return
    for start, length, line, source in sequences(values):
        slot = live_slot(line[0], slots, first_slot)
        if slot is None:
            continue
        columns = list(pool[slot][:, source : source + 3].unbind(1))
        for row in range(start, start + length):
            yield row, torch.stack(columns[-3:], 1)
            columns.append(values["x"][row])

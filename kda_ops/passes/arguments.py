"""Lays the recurrence out as the operators' arguments.

Lives here: which element becomes which argument, finding that q, k and v are three parts of one
packed row, or making it so. Not here: deciding what is q (delta_rule.py), and the views themselves
(access.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kda_ops.passes.access import (
    Access,
    D,
    Emitter,
    by_channel,
    by_head,
    cast,
    common_dtype,
    packed,
    parameter,
    row_view,
    unit_stride,
)

aten = torch.ops.aten
NULL = -(2**31)  # outside of every pool, from the front and from the end


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``kda::packed_decode`` for one step.

    Where ``valid`` is there, rows on which it is not ``live`` are padding.
    """

    parts: tuple[Access, Access, Access]
    gate: Access
    beta: Access
    a_log: Access
    bias: Access | None
    pool: Node
    index: Node | None
    heads: int
    scale: float
    lower_bound: float | None
    layout: str
    first_slot: int | None = None
    valid: Access | None = None
    live: bool = True

    @property
    def activation(self) -> torch.dtype:
        """The one type of all activations."""
        items = (*self.parts, self.gate, self.beta)
        return common_dtype([item.node.meta["val"].dtype for item in items])

    @property
    def places(self) -> tuple[Access | None, ...]:
        """Where every argument lies."""
        return (*self.parts, self.gate, self.beta, self.a_log, self.bias, self.valid)

    @property
    def constants(self) -> tuple[Any, ...]:
        """The arguments that are no tensors."""
        return (self.scale, self.lower_bound, self.layout, self.first_slot, self.live)

    @property
    def leaves(self) -> dict[Node, str]:
        """Every node that an argument is made of, with the argument's name."""
        named = [(part.node, "mixed_qkv") for part in self.parts]
        named += [(self.gate.node, "raw_gate"), (self.beta.node, "raw_beta")]
        named += [(self.a_log.node, "A_log")]
        named += [(self.bias.node, "dt_bias")] if self.bias else []
        named += [(self.index, "state_indices")] if self.index is not None else []
        named += [(self.valid.node, "valid")] if self.valid else []
        named += [(self.pool, "state")]
        return dict(reversed(named))

    def emit(self, emit: Emitter) -> dict[str, Any]:
        """Emit the views and casts, and return the keyword arguments that are no pools."""
        heads = self.heads
        mixed = packed(emit, self.parts, heads)
        mixed = unit_stride(emit, cast(emit, mixed, self.activation))
        return {"mixed_qkv": mixed, **self.gates(emit, self.activation)}

    def gates(self, emit: Emitter, dtype: torch.dtype) -> dict[str, Any]:
        """Emit all but q, k, v and the state."""
        heads = self.heads
        gate = unit_stride(emit, cast(emit, by_channel(emit, self.gate, heads), dtype))
        beta = unit_stride(emit, cast(emit, by_head(emit, self.beta, heads), dtype))
        if self.bias is None:
            device = emit.value(emit.input(self.pool)).device
            bias = emit.call(
                aten.full.default, [heads * D], 0.0, dtype=torch.float32, device=device
            )
        else:
            bias = parameter(emit, self.bias, heads * D)
        return {
            "raw_gate": gate,
            "raw_beta": beta,
            "A_log": parameter(emit, self.a_log, heads),
            "dt_bias": bias,
            "state_indices": self._slots(emit),
            "scale": self.scale,
            "lower_bound": self.lower_bound,
            "first_slot": self.first_slot,
            "state_layout": self.layout,
        }

    def _slots(self, emit: Emitter) -> Any:
        """Emit the slots, out of every pool's range on rows that are padding."""
        if self.index is None:
            return None
        index = emit.input(self.index)
        if self.valid is None:
            return index
        valid = emit.call(aten.reshape.default, row_view(emit, self.valid), [emit.rows])
        value = emit.value(index)
        null = emit.call(aten.full.default, [], NULL, dtype=value.dtype, device=value.device)
        pair = (index, null) if self.live else (null, index)
        return emit.call(aten.where.self, valid, *pair)

    def described(self) -> dict[str, str]:
        """Return the arguments for people."""
        q, k, v = (part.node.name for part in self.parts)
        return {"mixed_qkv": q if q == k == v else f"cat({q}, {k}, {v})", **self.described_gates()}

    def _described_slots(self) -> str:
        slots = "None" if self.index is None else self.index.name
        if self.valid is None:
            return slots
        valid = self.valid.node.name
        return f"where({valid}, {slots}, null)" if self.live else f"where({valid}, null, {slots})"

    def described_gates(self) -> dict[str, str]:
        """Return all but q, k and v for people."""
        gate = "softplus" if self.lower_bound is None else f"{self.lower_bound:g}"
        return {
            "raw_gate": self.gate.node.name,
            "raw_beta": self.beta.node.name,
            "A_log": self.a_log.node.name,
            "dt_bias": self.bias.node.name if self.bias else "zeros",
            "state": self.pool.name,
            "state_indices": self._described_slots(),
            "scale": f"{self.scale:.6g}",
            "lower_bound": gate,
            "first_slot": str(self.first_slot),
            "state_layout": self.layout,
        }

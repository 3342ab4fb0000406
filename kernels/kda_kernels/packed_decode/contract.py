"""What packed_decode accepts and promises; everything else about its interface follows."""

from __future__ import annotations

from dataclasses import replace

from kda_kernels.contract import shared
from kda_kernels.contract.spec import (
    Layout,
    Operator,
    Output,
    Rule,
    ScalarArg,
    TensorArg,
)

CONTRACT = Operator(
    name="packed_decode",
    public_name="packed_kda_decode",
    summary="Gates, delta-rule update of the state and its output for one token a row, from the "
    "packed row that the convolution has produced.",
    dims={
        "B": ("mixed_qkv", "rows, one token each", 0),
        "H": ("state", "heads", 1),
        "S": ("state", "slots in the pool", 0),
    },
    arguments=(
        TensorArg(
            "mixed_qkv",
            ("B, 3*H*D",),
            ("activation",),
            Layout.ROWS,
            "packed q | k | v after convolution and SiLU",
            reads="B, 3*H*D",
        ),
        *shared.gates("B", flat=True),
        shared.A_LOG,
        shared.DT_BIAS,
        replace(shared.STATE, reads="B, H, D, D", writes="B, H, D, D"),
        shared.STATE_INDICES,
        shared.SCALE,
        shared.LOWER_BOUND,
        shared.first_slot(0),
        shared.STATE_LAYOUT,
        ScalarArg(
            "output_dtype",
            "dtype",
            None,
            Rule.OUTPUT_DTYPE,
            "type of the allocated output; None means the activation type",
            optional=True,
            abi=False,
        ),
    ),
    output=Output("B, 1, H, D", ("activation", "float32"), "o of every row, +0 on null rows"),
    rows="B",
)
"""The contract of ``kda::packed_decode``."""

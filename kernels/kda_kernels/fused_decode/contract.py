"""What fused_decode accepts and promises; everything else about its interface follows."""

from __future__ import annotations

from kda_kernels.contract import shared
from kda_kernels.contract.spec import Operator, Output

CONTRACT = Operator(
    name="fused_decode",
    public_name="fused_kda_decode",
    summary="Short convolution, gates, delta-rule update of the state and gated RMSNorm for one "
    "token a row.",
    dims={
        "B": ("x", "rows, one token each", 0),
        "H": ("state", "heads", 1),
        "S": ("state", "slots in both pools", 0),
        "L": ("conv_state", "columns of a window; history is the last three", 3),
    },
    arguments=(
        *shared.fused_arguments("B", "L"),
        *shared.LOWER_BOUND_AND_EPS,
        shared.CONV_BIAS,
        shared.SCALE,
        shared.first_slot(1),
        shared.STATE_LAYOUT,
    ),
    output=Output(
        "1, B, H, D", ("activation",), "gated and normalised output of every row, +0 on null rows"
    ),
    rows="B",
)
"""The contract of ``kda::fused_decode``."""

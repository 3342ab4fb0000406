"""What packed_fused_decode accepts and promises; everything else about its interface follows."""

from __future__ import annotations

from dataclasses import replace

from kda_kernels.contract import shared
from kda_kernels.contract.spec import Layout, Operator, Output, TensorArg

_BY_TOKEN = replace(
    shared.STATE_INDICES,
    shapes=("N, T",),
    optional=False,
    doc="slots of each sequence: column t takes the checkpoint of token t, column 0 names the "
    "window, column num_accepted_tokens - 1 the source state",
    reads="N, T",
)

CONTRACT = Operator(
    name="packed_fused_decode",
    public_name="packed_fused_kda_decode",
    summary="fused_decode over up to T ragged tokens a sequence, with one state checkpoint per "
    "token (speculative decoding).",
    dims={
        "R": ("x", "packed rows, one token each", 0),
        "N": ("state_indices", "sequences", 0),
        "T": ("state_indices", "longest sequence of the call", 1),
        "H": ("state", "heads", 1),
        "S": ("state", "slots in both pools", 0),
    },
    arguments=(
        *(
            _BY_TOKEN if argument.name == "state_indices" else argument
            for argument in shared.fused_arguments("R", "T+2")
        ),
        TensorArg(
            "query_start_loc",
            ("N+1",),
            ("int32",),
            Layout.STRIDED,
            "first packed row of each sequence and, last, the number of rows in use; "
            "non-decreasing from 0",
            reads="N+1",
        ),
        TensorArg(
            "num_accepted_tokens",
            ("N",),
            ("int32",),
            Layout.STRIDED,
            "tokens of the previous call that were accepted, clamped to [1, T]",
            reads="N",
        ),
        *shared.LOWER_BOUND_AND_EPS,
        TensorArg(
            "t1_state_indices",
            ("R",),
            shared.INDEX,
            Layout.STRIDED,
            "slot of each packed row, used in place of state_indices when T = 1",
            optional=True,
            keyword=True,
        ),
        shared.CONV_BIAS,
        shared.SCALE,
        shared.first_slot(1),
        shared.STATE_LAYOUT,
    ),
    output=Output(
        "1, R, H, D", ("activation",), "gated and normalised output of every row, +0 on null rows"
    ),
    rows="R",
    rows_need_slots=False,
)
"""The contract of ``kda::packed_fused_decode``."""

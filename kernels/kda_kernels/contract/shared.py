"""Arguments that more than one operator takes, declared once.

Lives here: the declarations of gates, pools, indices and keywords with the meaning they have
everywhere. Not here: what only one operator takes.
"""

from __future__ import annotations

from dataclasses import replace

from kda_kernels.contract.spec import Layout, Role, Rule, ScalarArg, TensorArg

INDEX = ("int32", "int64")
PARAMETER = ("float32", "bfloat16")
WIDE = ("float32", "activation")


def channel_rows(rows: str) -> tuple[str, ...]:
    """Return the accepted shapes of one value per row and channel."""
    return (f"1, {rows}, H, D", f"{rows}, H, D", f"{rows}, H*D")


def gates(rows: str, *, flat: bool = False) -> tuple[TensorArg, TensorArg]:
    """Declare raw_gate and raw_beta for rows counted by ``rows``; flat: two axes come first."""
    step = -1 if flat else 1
    return (
        TensorArg(
            "raw_gate",
            channel_rows(rows)[::step],
            ("activation",),
            Layout.READ_ROWS,
            "decay gate before bias, A_log and activation",
            reads=f"{rows}, H*D",
        ),
        TensorArg(
            "raw_beta",
            (f"1, {rows}, H", f"{rows}, H")[::step],
            ("activation",),
            Layout.READ_ROWS,
            "logits of beta; the operator applies the sigmoid, once",
            reads=f"{rows}, H",
        ),
    )


A_LOG = TensorArg(
    "A_log",
    ("H",),
    PARAMETER,
    Layout.COMPACT,
    "logarithm of the decay rate",
    any_shape=True,
    reads="H",
)
DT_BIAS = TensorArg(
    "dt_bias",
    ("H*D",),
    PARAMETER,
    Layout.COMPACT,
    "bias of the decay gate",
    any_shape=True,
    reads="H*D",
)
STATE = TensorArg(
    "state",
    ("S, H, D, D",),
    ("float32", "bfloat16"),
    Layout.SLOTS,
    "pool of recurrent states",
    role=Role.UPDATE,
)
STATE_INDICES = TensorArg(
    "state_indices",
    ("B",),
    INDEX,
    Layout.STRIDED,
    "slot of each row; None: row i uses slot i and every row is live",
    optional=True,
    reads="B",
)

SCALE = ScalarArg(
    "scale", "float", None, Rule.FINITE, "factor of q; None means D**-0.5", optional=True
)
LOWER_BOUND = ScalarArg(
    "lower_bound",
    "float",
    -5.0,
    Rule.NEGATIVE,
    "bound of the lower-bound gate; None selects the softplus gate",
    optional=True,
)
STATE_LAYOUT = ScalarArg(
    "state_layout",
    "str",
    "vk",
    Rule.CHOICE,
    "order of the last two axes of state: vk (FlashInfer, vLLM, SGLang) or kv (Hugging Face, "
    "flash-linear-attention)",
    choices=("vk", "kv"),
)


def first_slot(default: int) -> ScalarArg:
    """Declare first_slot with the operator's own default."""
    return ScalarArg(
        "first_slot",
        "int",
        default,
        Rule.FIRST_SLOT,
        "an index is live when first_slot <= index < S; None: -S <= index < S, negative indices "
        "count from the end",
        optional=True,
    )


def conv_state(window: str, moved: str) -> TensorArg:
    """Declare the pool of convolution windows: their width, and how many of them a call moves."""
    return TensorArg(
        "conv_state",
        (f"S, 3*H*D, {window}",),
        ("activation",),
        Layout.WINDOW,
        "pool of convolution windows, oldest column first",
        role=Role.UPDATE,
        reads=f"{moved}, 3*H*D, 3",
        writes=f"{moved}, 3*H*D, {window}",
    )


def fused_arguments(rows: str, window: str) -> tuple[TensorArg, ...]:
    """Declare the tensors that both fused operators must be given."""
    state_slots = "B" if rows == "B" else "N"
    written = f"{state_slots}, H, D, D" if rows == "B" else "N, T, H*D, D"
    return (
        TensorArg(
            "x",
            (f"{rows}, 3*H*D",),
            ("activation",),
            Layout.ROWS,
            "packed q | k | v projections before the convolution",
            reads=f"{rows}, 3*H*D",
        ),
        TensorArg(
            "weight",
            ("3, 4, H*D",),
            WIDE,
            Layout.TAPS,
            "depthwise convolution weights (part, tap, channel); tap 3 multiplies the current "
            "token",
            reads="3, 4, H*D",
        ),
        conv_state(window, state_slots),
        *gates(rows),
        A_LOG,
        DT_BIAS,
        STATE_INDICES,
        replace(STATE, reads=f"{state_slots}, H, D, D", writes=written),
        TensorArg(
            "output_gate",
            channel_rows(rows),
            ("activation",),
            Layout.READ_ROWS,
            "logits of the gate behind the norm",
            reads=f"{rows}, H*D",
        ),
        TensorArg(
            "norm_weight", ("D",), ("float32",), Layout.COMPACT, "weight of the RMSNorm", reads="D"
        ),
    )


LOWER_BOUND_AND_EPS = (
    replace(LOWER_BOUND, keyword=False),
    ScalarArg(
        "norm_eps",
        "float",
        1e-5,
        Rule.NON_NEGATIVE,
        "added to the mean square in the RMSNorm",
        keyword=False,
    ),
)
"""What both fused operators take as their last positional arguments."""

CONV_BIAS = TensorArg(
    "conv_bias",
    ("3*H*D",),
    ("float32",),
    Layout.COMPACT,
    "bias of the convolution",
    optional=True,
    keyword=True,
    reads="3*H*D",
)

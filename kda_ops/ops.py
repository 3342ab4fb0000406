"""The public functions, drop-in for FlashInfer's functions of the same names.

Lives here: argument names, order and defaults as users know them, and the caller's ``output``.
Not here: validation and allocation, which the operators do themselves (library.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_kernels.errors import DtypeError, UnsupportedError
from kda_ops import library

_BACKENDS = ("auto", "cute-dsl")
_INDEX_MODES = ("unique_or_null", "positive_unique")


def _accept(operator: str, backend: str, state_indices_mode: str = _INDEX_MODES[0]) -> None:
    """Refuse the choices of FlashInfer that have no counterpart here."""
    if backend not in _BACKENDS:
        raise UnsupportedError(operator, "backend", "'auto' or 'cute-dsl'", repr(backend))
    if state_indices_mode not in _INDEX_MODES:
        rule = "'unique_or_null' or 'positive_unique'"
        raise UnsupportedError(operator, "state_indices_mode", rule, repr(state_indices_mode))


def _chosen(
    lower_bound: float | None,
    scale: float | None,
    first_slot: int | None,
    state_layout: str,
    *,
    usual_first_slot: int,
    norm_eps: float = 1e-5,
    conv_bias: Tensor | None = None,
) -> dict[str, Any]:
    """Return the optional arguments that are not at their defaults.

    The dispatcher takes up to a microsecond for each keyword it is given.
    """
    keywords: dict[str, Any] = {}
    if lower_bound != -5.0:
        keywords["lower_bound"] = lower_bound
    if scale is not None:
        keywords["scale"] = scale
    # By identity: a float or a bool that equals the default is the dispatcher's to judge.
    if first_slot is not usual_first_slot:
        keywords["first_slot"] = first_slot
    if state_layout != "vk":
        keywords["state_layout"] = state_layout
    if norm_eps != 1e-5:
        keywords["norm_eps"] = norm_eps
    if conv_bias is not None:
        keywords["conv_bias"] = conv_bias
    return keywords


def packed_kda_decode(
    mixed_qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    output: Tensor | None = None,
    *,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    first_slot: int | None = 0,
    state_layout: str = "vk",
    output_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Advance the recurrent state by one token a row, from the packed row after the convolution.

    Per row and head, with ``S`` the row's slot of ``state`` seen as [V, K] and everything in
    float32 (Kimi Linear, arXiv 2510.26692, and FlashInfer's ``packed_kda_decode``)::

        q = scale * l2norm(q);  k = l2norm(k);  beta = sigmoid(raw_beta)
        g = lower_bound * sigmoid(exp(A_log) * (raw_gate + dt_bias))      (lower_bound given)
        g = -exp(A_log) * softplus(raw_gate + dt_bias)                    (lower_bound None)
        S = S * exp(g);  S = S + (beta * (v - S k)) k^T;  o = S q

    Args:
        mixed_qkv: [B, 3*H*128] activation type (bfloat16, float16 or float32), q | k | v; rows at
            any stride.
        raw_gate: [B, H*128] (or [B, H, 128]) activation type.
        raw_beta: [B, H] activation type, logits.
        A_log: H elements, float32 or bfloat16.
        dt_bias: H*128 elements, float32 or bfloat16.
        state: [S, H, 128, 128] float32 or bfloat16 pool, **updated in place**; slots at any
            16-byte aligned stride.
        state_indices: [B] int32 or int64 slot of each row, at any stride, or None (row i uses
            slot i). An index outside ``first_slot <= index < S`` makes a null row: its output is
            zero and no slot is touched. Live indices must be distinct (checked only under
            ``KDA_CHECK=1``).
        output: [B, 1, H, 128] activation type or float32, contiguous; written and returned.
        scale: factor of q; None means 128**-0.5.
        lower_bound: finite and < 0, or None for the softplus gate.
        first_slot: 0 (default; -1 is padding), 1 (slot 0 is reserved) or None (PyTorch's negative
            indices count from the end).
        state_layout: ``"vk"`` (FlashInfer, vLLM, SGLang) or ``"kv"`` (Hugging Face,
            flash-linear-attention). The two have the same shape, so name the right one.
        output_dtype: type of the allocated output: the activation type (default) or float32.
        backend: accepted for compatibility: ``"auto"`` or ``"cute-dsl"``.

    Returns:
        ``output``, or a new [B, 1, H, 128] tensor.

    Raises:
        ContractError: (ValueError) an illegal shape, stride, device, alignment or scalar, or an
            input that requires grad under grad mode; nothing was written.
        DtypeError: (TypeError) an illegal dtype.
        UnsupportedError: (NotImplementedError) a legal call that no kernel serves.
    """
    if backend != "auto":
        _accept("packed_decode", backend)
    tensors = (mixed_qkv, raw_gate, raw_beta, A_log, dt_bias, state, state_indices)
    keywords = _chosen(lower_bound, scale, first_slot, state_layout, usual_first_slot=0)
    if output is None:
        if output_dtype is not None:
            keywords["output_dtype"] = output_dtype
        return library.packed_decode(*tensors, **keywords)
    if output_dtype is not None and output.dtype is not output_dtype:
        fact = f"{output_dtype} beside an output of {output.dtype}"
        raise DtypeError("packed_decode", "output_dtype", "None or the type of output", fact)
    library.packed_decode_out(*tensors, **keywords, output=output)
    return output


def fused_kda_decode(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor | None,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    output: Tensor | None = None,
    *,
    backend: str = "auto",
    state_indices_mode: str = "unique_or_null",
    conv_bias: Tensor | None = None,
    scale: float | None = None,
    first_slot: int | None = 1,
    state_layout: str = "vk",
) -> Tensor:
    """Run short convolution, recurrence and gated RMSNorm of one token a row.

    The convolution is depthwise of width 4 over the last three columns of the row's window and the
    token, with SiLU, rounded to the activation type; the window moves left by one column. The
    recurrence is that of :func:`packed_kda_decode`. Its output ``o``, rounded to the activation
    type, becomes ``o * rsqrt(mean(o**2) + norm_eps) * norm_weight * sigmoid(output_gate)``.

    Args:
        x: [B, 3*H*128] activation type (bfloat16, float16 or float32), q | k | v before the
            convolution; rows at any stride.
        weight: [3, 4, H*128] (part, tap, channel), float32 or activation type; tap-major, or
            channel-major as a view of a Conv1d weight [3*H*128, 1, 4].
        conv_state: [S, 3*H*128, L] activation type, L >= 3, **updated in place**; SD (strides
            [slot, 1, 3*H*128]) or DS (strides [slot, L, 1]), slots 8-byte aligned.
        raw_gate: [1, B, H, 128] activation type.
        raw_beta: [1, B, H] activation type, logits.
        A_log: H elements, float32 or bfloat16.
        dt_bias: H*128 elements, float32 or bfloat16.
        state_indices: [B] int32 or int64 slot of each row in both pools, or None (row i uses slot
            i, every row is live).
        state: [S, H, 128, 128] float32 or bfloat16, **updated in place**.
        output_gate: [B, H, 128] or [1, B, H, 128] activation type, logits.
        norm_weight: [128] float32.
        lower_bound: finite and < 0, or None for the softplus gate.
        norm_eps: finite and >= 0.
        output: [1, B, H, 128] activation type, contiguous; written and returned.
        backend: accepted for compatibility: ``"auto"`` or ``"cute-dsl"``.
        state_indices_mode: accepted for compatibility: ``"unique_or_null"`` or
            ``"positive_unique"``.
        conv_bias: [3*H*128] float32 or None.
        scale: factor of q; None means 128**-0.5.
        first_slot: 1 (default: slot 0 is reserved), 0 or None, as in :func:`packed_kda_decode`.
        state_layout: ``"vk"`` or ``"kv"``.

    Returns:
        ``output``, or a new [1, B, H, 128] tensor.

    Raises:
        ContractError, DtypeError, UnsupportedError: as :func:`packed_kda_decode`.
    """
    if backend != "auto" or state_indices_mode != "unique_or_null":
        _accept("fused_decode", backend, state_indices_mode)
    tensors = (x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state)
    norm = (output_gate, norm_weight)
    keywords = _chosen(
        lower_bound,
        scale,
        first_slot,
        state_layout,
        usual_first_slot=1,
        norm_eps=norm_eps,
        conv_bias=conv_bias,
    )
    if output is None:
        return library.fused_decode(*tensors, *norm, **keywords)
    library.fused_decode_out(*tensors, *norm, **keywords, output=output)
    return output


def packed_fused_kda_decode(  # noqa: D417 - the shared keywords are documented above
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    output: Tensor | None = None,
    *,
    query_start_loc: Tensor,
    num_accepted_tokens: Tensor,
    t1_state_indices: Tensor | None = None,
    backend: str = "auto",
    state_indices_mode: str = "unique_or_null",
    conv_bias: Tensor | None = None,
    scale: float | None = None,
    first_slot: int | None = 1,
    state_layout: str = "vk",
) -> Tensor:
    """Run :func:`fused_kda_decode` over up to T ragged tokens a sequence (speculative decoding).

    Sequence n owns the packed rows ``query_start_loc[n]:query_start_loc[n+1]``. With
    ``a = clamp(num_accepted_tokens[n], 1, T) - 1`` its source state is slot
    ``state_indices[n, a]`` and its history the columns a, a+1, a+2 of the window in slot
    ``state_indices[n, 0]``. Token t writes its state checkpoint to slot ``state_indices[n, t]``
    while the recurrence goes on from float32. Afterwards columns 0 and 1 of the window hold the
    two newest history values and column t+2 holds token t. Rows that belong to no sequence are
    null rows: their output is zero. Keywords not listed are those of :func:`fused_kda_decode`.

    Args:
        x: [R, 3*H*128] packed rows, activation type.
        weight: as :func:`fused_kda_decode`.
        conv_state: [S, 3*H*128, T+2] activation type, SD or DS, **updated in place**.
        raw_gate: [1, R, H, 128] activation type.
        raw_beta: [1, R, H] activation type, logits.
        A_log: H elements, float32 or bfloat16.
        dt_bias: H*128 elements, float32 or bfloat16.
        state_indices: [N, T] int32 or int64 slots.
        state: [S, H, 128, 128] float32 or bfloat16, **updated in place**.
        output_gate: [R, H, 128] or [1, R, H, 128] activation type, logits.
        norm_weight: [128] float32.
        lower_bound: finite and < 0, or None for the softplus gate.
        norm_eps: finite and >= 0.
        output: [1, R, H, 128] activation type, contiguous; written and returned.
        query_start_loc: [N+1] int32, non-decreasing from 0.
        num_accepted_tokens: [N] int32, clamped to [1, T].
        t1_state_indices: [R] int32 or int64 slot of each packed row, used when T = 1.

    Returns:
        ``output``, or a new [1, R, H, 128] tensor.

    Raises:
        ContractError, DtypeError, UnsupportedError: as :func:`packed_kda_decode`.
    """
    if backend != "auto" or state_indices_mode != "unique_or_null":
        _accept("packed_fused_decode", backend, state_indices_mode)
    tensors = (x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state)
    rest = (output_gate, norm_weight, query_start_loc, num_accepted_tokens)
    keywords = _chosen(
        lower_bound,
        scale,
        first_slot,
        state_layout,
        usual_first_slot=1,
        norm_eps=norm_eps,
        conv_bias=conv_bias,
    )
    if t1_state_indices is not None:
        keywords["t1_state_indices"] = t1_state_indices
    if output is None:
        return library.packed_fused_decode(*tensors, *rest, **keywords)
    library.packed_fused_decode_out(*tensors, *rest, **keywords, output=output)
    return output

"""packed_fused_decode in eager PyTorch, written to be read: a loop over sequences and tokens.

Lives here: which slots a sequence reads and writes, and when. The arithmetic of a token is
fused_decode's. Not here: anything fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_kernels.fused_decode.reference import convolve, gated_norm
from kda_kernels.packed_decode.reference import HEAD_DIM, decay, live_slots, recur


def sequences(
    query_start_loc: Tensor,
    state_indices: Tensor,
    t1_state_indices: Tensor | None,
    rows: int,
    slots: int,
    first_slot: int | None,
) -> list[tuple[int, int, list[int]]]:
    """Return (first row, length, slots of the tokens) of every sequence of the call.

    Lengths are cut at T; boundaries are clamped to the packed rows. With T = 1 and
    t1_state_indices every packed row in use is a sequence of its own.
    """
    bounds = query_start_loc.clamp(0, rows).tolist()
    tokens = state_indices.shape[1]
    if tokens == 1 and t1_state_indices is not None:
        by_row = live_slots(t1_state_indices, rows, slots, first_slot).tolist()
        return [(row, 1, [by_row[row]]) for row in range(bounds[-1])]
    table = live_slots(state_indices, 0, slots, first_slot).tolist()
    return [
        (start, min(end - start, tokens), line)
        for start, end, line in zip(bounds, bounds[1:], table, strict=False)
    ]


def packed_fused_decode(
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
    query_start_loc: Tensor,
    num_accepted_tokens: Tensor,
    lower_bound: float | None,
    norm_eps: float,
    t1_state_indices: Tensor | None,
    conv_bias: Tensor | None,
    scale: float | None,
    first_slot: int | None,
    state_layout: str,
    output: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Advance every live sequence by its tokens, write checkpoints and window, fill ``output``.

    Shapes and types as in the contract; with ``dtype`` float64 the state pool and the output may
    be float64 too.
    """
    rows, (slots, heads), tokens = x.shape[0], state.shape[:2], state_indices.shape[1]
    per_head = (rows, heads, HEAD_DIM)
    # Contiguous first: torch's exp differs in the last bit between vectors and strided elements.
    d = decay(raw_gate.reshape(per_head).contiguous(), A_log, dt_bias, lower_bound, dtype)
    beta = torch.sigmoid(raw_beta.reshape(rows, heads).contiguous().to(dtype))
    gate = output_gate.reshape(per_head)
    accepted = (num_accepted_tokens.clamp(1, tokens) - 1).tolist()
    output.zero_()
    calls = sequences(query_start_loc, state_indices, t1_state_indices, rows, slots, first_slot)
    for n, (start, length, line) in enumerate(calls):
        a = accepted[n] if tokens > 1 else 0
        if length <= 0 or line[0] < 0 or line[a] < 0:
            continue
        window = conv_state[line[0]].clone()
        columns = torch.cat([window[:, a : a + 3], x[start : start + length].T], -1)
        S = state[line[a]].to(dtype)
        S = S if state_layout == "vk" else S.mT
        for t in range(length):
            row = start + t
            mixed = convolve(columns[:, t : t + 3], x[row], weight, conv_bias, dtype)
            o, S = recur(mixed.view(3, heads, HEAD_DIM), d[row], beta[row], S, scale)
            if line[t] < 0:
                continue
            state[line[t]] = (S if state_layout == "vk" else S.mT).to(state.dtype)
            y = gated_norm(o, gate[row], norm_weight, norm_eps, x.dtype, dtype)
            output[0, row] = y.to(output.dtype)
        conv_state[line[0], :, : length + 2] = columns[:, 1:]

"""Faults of memory layouts that users of such operators reported: N07, N08, N09, N10."""

import pytest
import torch

from kda_kernels.errors import ContractError
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import assert_same_bits

PACKED, FUSED, SPECULATIVE = CONTRACTS


@pytest.mark.parametrize("window", ["SD", "DS"])
def test_n07_pools_that_are_views_of_pages_equal_dense_pools(operator, run, call, window):
    page, state_at, slots = 135744, 4608, 5
    dense = call(operator, B=3, N=3, T=1, R=3, H=2, L=3, S=slots, window=window)
    paged = clone(dense)
    memory = torch.arange(page * slots, dtype=torch.int64).to(torch.uint8)
    floats, halves = memory.view(torch.float32), memory.view(torch.bfloat16)
    paged["state"] = floats.as_strided((5, 2, 128, 128), (33936, 16384, 128, 1), state_at // 4)
    if "conv_state" in dense:
        strides = (67872, 1, 768) if window == "SD" else (67872, 3, 1)
        paged["conv_state"] = halves.as_strided((5, 768, 3), strides)
    pools = [name for name in ("state", "conv_state") if name in dense]
    own = torch.zeros(page, dtype=torch.bool)
    for name in pools:
        paged[name].copy_(dense[name])
        start = state_at if name == "state" else 0
        own[start : start + dense[name][0].nbytes] = True
    before, addresses = memory.clone(), [paged[name].data_ptr() for name in pools]
    assert_same_bits(run(operator, paged), run(operator, dense), "output")
    assert [paged[name].data_ptr() for name in pools] == addresses
    for name in pools:
        assert_same_bits(paged[name], dense[name], name)
    pages, old = memory.view(slots, page), before.view(slots, page)
    assert torch.equal(pages[:, ~own], old[:, ~own])
    untouched = sorted(set(range(slots)) - set(dense["state_indices"].flatten().tolist()))
    assert torch.equal(pages[untouched], old[untouched])


@pytest.mark.parametrize("rows", [1, 5])
def test_n08_inputs_may_be_slices_of_one_projection_that_break_every_alignment(
    operator, run, call, rows
):
    values = call(operator, B=rows, N=rows, T=1, R=rows, H=3, L=3, S=8, spelling=1)
    projection = torch.randn(rows, 1924, generator=torch.Generator().manual_seed(1)).bfloat16()
    x, gate, beta, out_gate, _ = projection.split([1152, 384, 3, 384, 1], 1)
    assert out_gate.storage_offset() == 1539
    if operator is not PACKED:
        values["output_gate"] = out_gate.unflatten(1, (3, 128))
    values[operator.tensors[0].name] = x
    values["raw_gate"] = gate.unflatten(1, (3, 128))
    values["raw_beta"] = beta if operator is not PACKED else beta.unsqueeze(0)
    copies = {
        name: value.contiguous()
        if name in ("mixed_qkv", "x", "raw_gate", "raw_beta", "output_gate")
        else value
        for name, value in clone(values).items()
    }
    assert_same_bits(run(operator, values), run(operator, copies), "output")
    for name in ("state", "conv_state"):
        if name in values:
            assert_same_bits(values[name], copies[name], name)


def test_n09_ds_windows_shift_along_the_right_axis_for_every_accepted_number(run, call):
    for accepted in (1, 2, 3):
        sd = call(SPECULATIVE, N=1, T=3, R=3, H=3, S=4, window="SD", first_slot=1)
        sd["num_accepted_tokens"].fill_(accepted)
        ds = clone(sd)
        ds["conv_state"] = sd["conv_state"].contiguous()
        assert tuple(ds["conv_state"].shape) == (4, 1152, 5)
        assert ds["conv_state"].stride()[1:] == (5, 1)
        assert sd["conv_state"].stride()[1:] == (1, 1152)
        assert_same_bits(run(SPECULATIVE, ds), run(SPECULATIVE, sd), f"output, {accepted}")
        assert_same_bits(ds["conv_state"], sd["conv_state"], f"window, {accepted}")
        assert_same_bits(ds["state"], sd["state"], f"state, {accepted}")


def test_n09_a_window_as_long_as_it_has_channels_is_read_by_its_strides(run, call):
    sd = call(FUSED, H=1, L=384, B=2, S=4, window="SD")
    ds = call(FUSED, H=1, L=384, B=2, S=4, window="DS")
    assert sd["conv_state"].shape == ds["conv_state"].shape == (4, 384, 384)
    assert sd["conv_state"].stride() == (384 * 384, 1, 384)
    assert ds["conv_state"].stride() == (384 * 384, 384, 1)
    assert torch.equal(sd["conv_state"], ds["conv_state"])
    assert_same_bits(run(FUSED, sd), run(FUSED, ds), "output")
    assert_same_bits(sd["conv_state"], ds["conv_state"], "window")


def test_n09_strides_of_neither_layout_are_an_error(fused, runners, call):
    values = call(fused, T=3)
    slots, channels, columns = values["conv_state"].shape
    size = channels * columns
    for strides in ((2 * size, 2, 2 * channels), (2 * size, 2 * columns, 2), (size, 1, 1)):
        wrong = clone(values)
        wrong["conv_state"] = torch.zeros(2 * slots * size, dtype=torch.bfloat16).as_strided(
            (slots, channels, columns), strides
        )
        before = wrong["state"].clone()
        with pytest.raises(ContractError, match="conv_state must be slots at any stride"):
            runners["operator"](fused, wrong)
        assert torch.equal(wrong["state"], before) and not wrong["conv_state"].any()


def one_head_step(S, row, gate, beta, bias, A, bound=-5.0):
    """The mathematics for S [H, V, K] in float64, with sums written as einsum."""
    q, k, v = row
    q = 128**-0.5 * q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    S = S * torch.exp(bound * torch.sigmoid(A.exp().unsqueeze(1) * (gate + bias))).unsqueeze(1)
    u = v - torch.einsum("hvk,hk->hv", S, k)
    S = S + torch.einsum("h,hv,hk->hvk", torch.sigmoid(beta), u, k)
    return S, torch.einsum("hvk,hk->hv", S, q)


def as_numbers(values, heads):
    """The row inputs of a packed call in float64."""
    return (
        values["mixed_qkv"].double().view(-1, 3, heads, 128),
        values["raw_gate"].double().reshape(-1, heads, 128),
        values["raw_beta"].double().reshape(-1, heads),
        values["dt_bias"].double().view(heads, 128),
        values["A_log"].double(),
    )


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_n10_the_pools_axes_are_the_documented_ones(run, call, state_layout):
    values = call(PACKED, B=1, H=2, activation=torch.float32, state_layout=state_layout)
    slot = int(values["state_indices"][0])
    rows, gates, betas, bias, A = as_numbers(values, 2)
    S = values["state"][slot].double()
    swapped, _ = one_head_step(
        S.mT if state_layout == "vk" else S, rows[0], gates[0], betas[0], bias, A
    )
    S = S if state_layout == "vk" else S.mT
    expected, o = one_head_step(S, rows[0], gates[0], betas[0], bias, A)
    output = run(PACKED, values).double().view(2, 128)
    stored = values["state"][slot].double()
    stored = stored if state_layout == "vk" else stored.mT
    torch.testing.assert_close(stored, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output, o, rtol=1e-5, atol=1e-6)
    assert float((stored.mT - swapped).norm() / stored.norm()) > 0.1, "a swap would be noticed"


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_n10_a_state_from_prefill_is_continued_in_its_own_layout(run, call, state_layout):
    heads, prompt = 2, 6
    values = call(
        PACKED, B=prompt + 2, H=heads, S=12, activation=torch.float32, state_layout=state_layout
    )
    rows, gates, betas, bias, A = as_numbers(values, heads)
    S = torch.zeros(heads, 128, 128, dtype=torch.float64)
    for t in range(prompt):
        S, _ = one_head_step(S, rows[t], gates[t], betas[t], bias, A)
    handed = S if state_layout == "vk" else S.mT  # as flash-linear-attention's [K, V]
    values["state"][3] = handed.float()
    for t in (prompt, prompt + 1):
        S, o = one_head_step(S, rows[t], gates[t], betas[t], bias, A)
        step = dict(values)
        for name in ("mixed_qkv", "raw_gate", "raw_beta"):
            step[name] = values[name][t : t + 1]
        step["state_indices"] = torch.tensor([3])
        output = run(PACKED, step).double().view(heads, 128)
        torch.testing.assert_close(output, o, rtol=1e-4, atol=1e-6)
    stored = values["state"][3].double()
    stored = stored if state_layout == "vk" else stored.mT
    torch.testing.assert_close(stored, S, rtol=1e-4, atol=1e-6)

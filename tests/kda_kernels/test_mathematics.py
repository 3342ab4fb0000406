"""The contract's formulas read off single numbers: decay, beta, norms, scale, rounding points.

With q = k = v = 0 a step is S'' = S * d, which shows the decay alone; with k one-hot and S = 0 it
is beta * v, which shows beta and v alone.
"""

import math

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import assert_same_bits

PACKED = CONTRACTS[0]
BIG = 32.0  # silu(32) is 32 in every activation type


def silent(call, operator, **changes):
    """One head, one row or token, float32 pool, and q = k = v = 0."""
    changes = {"B": 1, "R": 1, "N": 1, "T": 1, "H": 1, "L": 3, "S": 3} | changes
    values = call(operator, **changes)
    if "weight" in values:
        values["weight"].zero_()
        values["weight"][:, 3] = 1
    values[operator.tensors[0].name].zero_()
    values["dt_bias"].zero_()
    values["A_log"].zero_()
    return values


def packed_rows(operator, values):
    """Rows as [rows, 3, H, D]; what is written here is q, k, v (after SiLU where there is one)."""
    return values[operator.tensors[0].name].unflatten(-1, (3, -1, 128))


def slot_of(values):
    return int(values["state_indices"].flatten()[0])


def decay_of(run, operator, values):
    """The decay of every key channel of head 0."""
    slot = slot_of(values)
    values["state"][slot] = 1
    run(operator, values)
    state = values["state"][slot, 0]
    assert torch.equal(state, state[:1].expand_as(state))
    return state[0].double()


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z))


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float32])
def test_the_bounded_gate_is_lower_bound_times_sigmoid_of_rate_times_gate_plus_bias(
    operator, run, call, activation
):
    for lower_bound, raw, A_log, bias in [
        (-5.0, -1.0, 0.0, 0.0),
        (-5.0, -1.0, math.log(4), 0.5),
        (-0.5, 2.0, -1.0, -0.25),
        (-20.0, 0.0, 0.0, 0.0),
        (-5.0, 3e38, 2.0, 0.0),
        (-5.0, -3e38, 2.0, 0.0),
        (-5.0, 1.0, 80.0, 0.0),
    ]:
        values = silent(call, operator, lower_bound=lower_bound, activation=activation)
        values["raw_gate"].fill_(raw)
        values["A_log"].fill_(A_log)
        values["dt_bias"].fill_(bias)
        given = float(values["raw_gate"].flatten()[0])
        rate = math.exp(float(values["A_log"][0]))
        product = max(min(rate * (given + bias), 700.0), -700.0)
        expected = math.exp(lower_bound * sigmoid(product))
        torch.testing.assert_close(
            decay_of(run, operator, values),
            torch.full((128,), expected, dtype=torch.float64),
            rtol=3e-6,
            atol=0,
        )


def test_every_key_channel_has_its_own_decay_and_every_head_its_own_rate(operator, run, call):
    for state_layout in ("vk", "kv"):
        values = silent(call, operator, H=2, state_layout=state_layout, activation=torch.float32)
        gates = torch.linspace(-3, 3, 256).view(2, 128)
        values["raw_gate"].copy_(gates.reshape(values["raw_gate"].shape))
        values["A_log"].copy_(torch.tensor([0.0, 1.0]))
        values["dt_bias"].fill_(0.125)
        slot = slot_of(values)
        before = values["state"][slot].clone()
        run(operator, values)
        rate = torch.tensor([[1.0], [math.e]], dtype=torch.float64)
        d = torch.exp(-5 * torch.sigmoid(rate * (gates.double() + 0.125)))
        expected = before.double() * (d.unsqueeze(1) if state_layout == "vk" else d.unsqueeze(2))
        torch.testing.assert_close(values["state"][slot].double(), expected, rtol=3e-6, atol=1e-12)


def test_a_silent_step_decays_the_state_and_gives_zero_in_fused_and_plain_operators(
    operator, run, call
):
    values = silent(call, operator)
    output = run(operator, values)
    assert torch.equal(output, torch.zeros_like(output))


def test_beta_is_one_sigmoid_in_float32_and_is_never_rounded_to_bf16(operator, run, call):
    for activation in (torch.bfloat16, torch.float16, torch.float32):
        for raw in (2.0, -2.0, 0.0, 100.0, -100.0):
            values = silent(call, operator, activation=activation)
            values["raw_beta"].fill_(raw)
            row = packed_rows(operator, values)
            row[:, 1, 0, 0] = BIG
            row[:, 2] = BIG
            slot = slot_of(values)
            values["state"][slot] = 0
            run(operator, values)
            beta = values["state"][slot, 0, :, 0].double() / BIG
            expected = torch.full_like(beta, sigmoid(raw))
            # bf16 would be off by 1e-3.
            torch.testing.assert_close(beta, expected, rtol=1e-6, atol=1e-30)
            assert torch.equal(values["state"][slot, 0, :, 1:], torch.zeros(128, 127))


def test_q_and_k_are_divided_by_their_norm_with_1e_minus_6_inside_the_root(run, call):
    tiny = 1e-4  # 128 of them: a sum of squares of 1.28e-6, as large as the epsilon
    values = silent(call, PACKED, activation=torch.float32, scale=1.0)
    values["raw_beta"].fill_(100.0)
    values["raw_gate"].fill_(-3e38)
    row = packed_rows(PACKED, values)
    row[:, :2] = tiny
    row[:, 2] = 1.0
    slot = slot_of(values)
    values["state"][slot] = 0
    output = run(PACKED, values)
    k_hat = tiny / math.sqrt(128 * tiny**2 + 1e-6)
    state = values["state"][slot].double()
    torch.testing.assert_close(state, torch.full_like(state, k_hat), rtol=1e-6, atol=0)
    expected = torch.full_like(output.double(), 128 * k_hat**2)
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=0)


def test_scale_multiplies_q_and_none_means_one_over_the_root_of_the_width(run, call):
    plain = call(PACKED, scale=None)
    named, twice = clone(plain), clone(plain)
    named["scale"], twice["scale"] = 128**-0.5, 2 * 128**-0.5
    output = run(PACKED, plain)
    assert_same_bits(run(PACKED, named), output, "scale given")
    assert_same_bits(run(PACKED, twice), output * 2, "scale doubled")
    zero = call(PACKED, scale=0.0)
    assert torch.equal(run(PACKED, zero), torch.zeros_like(output))


def test_scale_reaches_the_norm(fused, run, call):
    plain = call(fused, scale=128**-0.5, norm_eps=1e-3)
    none, twice = clone(plain), clone(plain)
    none["scale"], twice["scale"] = None, 2 * 128**-0.5
    output = run(fused, plain)
    assert_same_bits(run(fused, none), output, "no scale")
    other = run(fused, clone(twice))
    assert not torch.equal(other, output)
    twice["norm_eps"] = 4e-3  # o doubled: the same ratio to the epsilon
    torch.testing.assert_close(run(fused, twice), output, rtol=0.008, atol=1e-6)


def test_a_live_rows_nan_stays_in_its_own_slot_and_head(operator, run, call):
    for state_dtype in (torch.float32, torch.bfloat16):
        values = call(operator, B=2, N=2, R=2, T=1, L=3, H=2, state_dtype=state_dtype)
        packed_rows(operator, values)[0, 2, 1, 5] = math.nan  # v of row 0, head 1, channel 5
        first, second = values["state_indices"].flatten().tolist()
        output = run(operator, values)
        rows = output.view(2, 2, 128)
        assert torch.isnan(rows[0, 1]).any()
        assert torch.isfinite(rows[0, 0]).all() and torch.isfinite(rows[1]).all()
        assert torch.isnan(values["state"][first, 1, 5]).all()
        assert torch.isfinite(values["state"][first, 1, 6:]).all()
        assert torch.isfinite(values["state"][second]).all()


def test_infinite_gates_give_no_nan(operator, run, call):
    for lower_bound in (-5.0, None):
        for raw in (math.inf, -math.inf):
            values = silent(call, operator, lower_bound=lower_bound)
            values["raw_gate"].fill_(raw)
            got = decay_of(run, operator, values)
            limit = {(-5.0, math.inf): math.exp(-5), (None, math.inf): 0.0}
            expected = torch.full_like(got, limit.get((lower_bound, raw), 1.0))
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)

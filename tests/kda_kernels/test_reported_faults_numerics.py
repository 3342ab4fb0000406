"""Faults of gates and betas that users of such operators reported: N01, N02, N03."""

import math

import pytest
import torch

from kda_kernels.errors import ContractError
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone, exact, run_reference
from kda_kernels.testing.compare import assert_within_budget
from kda_kernels.testing.ties import step_off_ties

PACKED = CONTRACTS[0]


def decays(run, operator, values):
    """The decay of every head and key, read off a step with q = k = v = 0."""
    values[operator.tensors[0].name].zero_()
    if "weight" in values:
        values["weight"].zero_()
    slot = int(values["state_indices"].flatten()[0])
    before = values["state"][slot].double()
    run(operator, values)
    return values["state"][slot].double() / before


def gated(call, operator, raw, A_log, bias, **changes):
    values = call(operator, B=1, R=1, N=1, T=1, L=3, H=2, **changes)
    values["raw_gate"].fill_(raw)
    values["A_log"].fill_(A_log)
    values["dt_bias"].fill_(bias)
    return values


def assert_decay(run, operator, values, expected):
    got = decays(run, operator, values)
    torch.testing.assert_close(got, torch.full_like(got, expected), rtol=2e-6, atol=0)


def test_n01_softplus_of_a_large_gate_is_linear_and_never_nan(operator, run, call):
    A_log = math.log(1e-3)
    values = gated(call, operator, 100.0, A_log, 0.0, lower_bound=None)
    assert_decay(run, operator, values, 0.904837418)
    for activation in (torch.bfloat16, torch.float32):
        for raw in (-200, -20, 0, 19.9, 20, 20.1, 88, 89, 100, 3e38):
            values = gated(call, operator, raw, A_log, 0.0, lower_bound=None, activation=activation)
            a = float(values["raw_gate"].flatten()[0])
            softplus = a if a > 20 else math.log1p(math.exp(a))
            assert_decay(run, operator, values, math.exp(-1e-3 * softplus))


def test_n01_a_whole_step_with_extreme_gates_stays_within_budget(operator, run, call):
    for raw in (-200, 20, 89, 100, 3e38):
        values = call(operator, lower_bound=None, T=1, N=3, R=3, L=3)
        values["raw_gate"][..., :64] = raw
        values["A_log"].fill_(math.log(1e-3))
        step_off_ties(operator, values)
        (output, state), like = exact(operator, values), clone(values)
        reference = run_reference(operator, like)
        assert_within_budget(run(operator, values), reference, output, f"output, {raw}")
        assert_within_budget(values["state"], like["state"], state, f"state, {raw}")


def test_n02_the_bounded_gate_is_the_sigmoid_form_and_the_bias_comes_before_the_rate(
    operator, run, call
):
    for raw, A_log, bias, expected, wrong in (
        (-1.0, 0.0, 0.0, 0.2606, 0.7311),
        (-1.0, math.log(4), 0.5, 0.5510, 0.8637),
    ):
        values = gated(call, operator, raw, A_log, bias, lower_bound=-5.0)
        exactly = math.exp(-5 / (1 + math.exp(-math.exp(A_log) * (raw + bias))))
        assert abs(exactly - expected) < 1e-4 < abs(exactly - wrong)
        assert_decay(run, operator, values, exactly)
    softplus = gated(call, operator, -1.0, 0.0, 0.0, lower_bound=None)
    assert_decay(run, operator, softplus, math.exp(-math.log1p(math.exp(-1.0))))


@pytest.mark.parametrize("bound", [0.0, 5.0, math.nan, -math.inf, math.inf])
def test_n02_a_bound_that_is_not_finite_and_negative_is_an_error(operator, runners, call, bound):
    values = call(operator, lower_bound=bound)
    before = clone(values)
    with pytest.raises(ContractError, match="lower_bound must be finite and < 0") as caught:
        runners["operator"](operator, values)
    assert isinstance(caught.value, ValueError)
    assert torch.equal(values["state"], before["state"])


def test_n03_beta_gets_exactly_one_sigmoid(operator, run, call):
    values = call(operator, B=1, R=1, N=1, T=1, L=3, H=2)
    values["raw_beta"].copy_(torch.tensor([2.0, -2.0]).view(values["raw_beta"].shape))
    step_off_ties(operator, values)
    twice = clone(values)
    twice["raw_beta"] = torch.sigmoid(values["raw_beta"])
    (output, state), like = exact(operator, values), clone(values)
    slot = int(values["state_indices"].flatten()[0])
    reference = run_reference(operator, like)
    assert_within_budget(run(operator, values), reference, output, "output")
    assert_within_budget(values["state"], like["state"], state, "state")
    run_reference(operator, twice)
    off = (twice["state"][slot] - values["state"][slot]).norm() / values["state"][slot].norm()
    assert float(off) > 0.02, "a second sigmoid would be noticed"


def test_n03_the_state_after_one_step_is_the_formula_with_one_sigmoid(run, call):
    values = call(PACKED, B=1, H=2, activation=torch.float32)
    values["raw_beta"].copy_(torch.tensor([[2.0, -2.0]]))
    slot = int(values["state_indices"][0])
    S = values["state"][slot].double()
    q, k, v = values["mixed_qkv"].double().view(3, 2, 128)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    a = values["raw_gate"].double().view(2, 128) + values["dt_bias"].double().view(2, 128)
    d = torch.exp(-5 * torch.sigmoid(values["A_log"].double().exp().view(2, 1) * a))
    beta = torch.tensor([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))], dtype=torch.float64)
    S = S * d.unsqueeze(1)
    u = v - torch.einsum("hvk,hk->hv", S, k)
    S = S + torch.einsum("h,hv,hk->hvk", beta, u, k)
    q = 128**-0.5 * q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    output = run(PACKED, values)
    torch.testing.assert_close(values["state"][slot].double(), S, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        output.double().view(2, 128), torch.einsum("hvk,hk->hv", S, q), rtol=1e-5, atol=1e-6
    )

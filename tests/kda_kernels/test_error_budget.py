"""CPU kernel, reference and float64 agree within the budget of numerics.py, over a matrix."""

import itertools

import pytest
import torch

from kda_kernels.plan import CONTRACTS, cpu_kernel
from kda_kernels.testing.cases import clone, exact, output_of, run_reference
from kda_kernels.testing.compare import assert_same_bits, assert_within_budget, error
from kda_kernels.testing.ties import step_off_ties

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
POOLS = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("heads", [1, 3, 6, 8, 12])
def test_the_kernels_error_against_float64_is_a_small_factor_of_the_references(
    operator, runners, call, heads, state_layout, lower_bound
):
    for activation, pool in itertools.product(ACTIVATIONS, POOLS):
        values = call(
            operator,
            B=2,
            N=1,
            T=2,
            R=2,
            S=4,
            H=heads,
            activation=activation,
            state_dtype=pool,
            lower_bound=lower_bound,
            state_layout=state_layout,
        )
        step_off_ties(operator, values)
        true_output, true_state = exact(operator, values)
        by_reference = clone(values)
        reference = run_reference(operator, by_reference)
        output = runners["kernel"](operator, values)
        what = f"{activation} activations, {pool} pool"
        assert_within_budget(output, reference, true_output, f"output, {what}")
        assert_within_budget(values["state"], by_reference["state"], true_state, f"state, {what}")
        if "conv_state" in values:
            assert_same_bits(values["conv_state"], by_reference["conv_state"], f"window, {what}")


def test_the_operator_calls_the_kernel_and_adds_nothing(operator, runners, call):
    for changes in ({}, {"state_dtype": torch.bfloat16, "state_layout": "kv"}):
        one = call(operator, **changes)
        other = clone(one)
        output = output_of(operator, other)
        cpu_kernel(operator.name)(*[other[a.name] for a in operator.abi], output)
        assert_same_bits(runners["operator"](operator, one), output, "output")
        assert_same_bits(one["state"], other["state"], "state")


@pytest.mark.parametrize("contract", CONTRACTS[:2], ids=lambda c: c.name)
@pytest.mark.parametrize("pool", POOLS, ids=["f32", "bf16"])
def test_512_steps_do_not_drift_from_float64_more_than_the_reference_does(
    runners, call, contract, pool
):
    generator = torch.Generator().manual_seed(7)
    # Slow decay: errors of early steps stay in the state.
    kernel = call(contract, B=2, H=1, S=3, L=3, state_dtype=pool, activation=torch.float32)
    kernel["raw_gate"].fill_(-4.0)
    reference = clone(kernel)
    truth = clone(kernel)
    truth["state"] = truth["state"].double()
    errors = {"kernel": [], "reference": []}
    packed = contract.tensors[0].name
    for step in range(512):
        row = torch.randn(kernel[packed].shape, generator=generator)
        for values in (kernel, reference, truth):
            values[packed] = row
        expected = run_reference(contract, truth, torch.float64)
        outputs = {
            "kernel": runners["kernel"](contract, kernel),
            "reference": run_reference(contract, reference),
        }
        if step % 32 == 31:
            for name, output in outputs.items():
                errors[name].append(error(output, expected)[0])
    assert_within_budget(kernel["state"], reference["state"], truth["state"], "state after 512")
    mine, theirs = (sum(errors[name][8:]) / 8 for name in ("kernel", "reference"))
    assert mine <= 1.5 * theirs, f"{mine:.3g} against the reference's {theirs:.3g}"
    # And the error has stopped growing: the second half is no worse than twice the first.
    assert mine <= 2 * sum(errors["kernel"][:8]) / 8


def test_sixty_four_speculative_rounds_do_not_drift_more_than_the_reference_does(runners, call):
    contract = CONTRACTS[2]
    generator = torch.Generator().manual_seed(7)
    for pool in POOLS:
        kernel = call(contract, T=4, N=1, R=4, H=1, S=6, state_dtype=pool, activation=torch.float32)
        reference, truth = clone(kernel), clone(kernel)
        truth["state"] = truth["state"].double()
        for step in range(64):
            row = torch.randn(kernel["x"].shape, generator=generator)
            for values in (kernel, reference, truth):
                values["x"] = row
                values["num_accepted_tokens"][:] = 1 + step % 4
            runners["kernel"](contract, kernel)
            run_reference(contract, reference)
            run_reference(contract, truth, torch.float64)
        slots = kernel["state_indices"].flatten().long()
        assert_within_budget(
            kernel["state"][slots], reference["state"][slots], truth["state"][slots], f"{pool}"
        )

"""Which roundings may go: those to the activations' type, of what is no state, as in Inductor."""

import copy

import pytest
import torch


def unit_rounded(x):
    return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).bfloat16().float()


def unit_in_bfloat16(x):
    x = x.bfloat16()
    return (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)).float()


def unit_in_float16(x):
    return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).half().float()


def gate_rounded(a, rate):
    return (-rate * torch.nn.functional.softplus(a)).bfloat16().float()


def beta_in_bfloat16(beta):
    return beta.sigmoid().float()


DROPPED = {
    "unit": [unit_rounded, unit_in_bfloat16],
    "gate": [gate_rounded],
    "logits": [beta_in_bfloat16],
}
CASES = [
    pytest.param({part: spelling}, id=spelling.__name__)
    for part, spellings in DROPPED.items()
    for spelling in spellings
]


def captured_and_eager(step, changes):
    spelling = step.Spelling(**changes)
    eager = step.StepLayer(spelling)
    layer = copy.deepcopy(eager)
    x = step.inputs(spelling)
    with torch.no_grad():
        expected = eager(*x)
    return step.capture(layer, *x), layer, eager, expected


@pytest.mark.parametrize("changes", CASES)
def test_a_rounding_of_an_input_to_the_activation_type_is_dropped(step, changes):
    captured, layer, eager, expected = captured_and_eager(step, changes)
    assert (captured.matches, captured.reasons) == (1, [])
    step.compare(captured.output, expected, step.ROUNDING[torch.bfloat16])
    step.compare(layer.pool, eager.pool, step.ROUNDING[torch.bfloat16])


def test_dropped_roundings_are_named(step):
    captured, *_ = captured_and_eager(step, {"logits": beta_in_bfloat16})
    (node,) = captured.findings[0].roundings
    assert node in captured.before


def test_without_them_the_result_is_closer_to_the_step_without_roundings(step):
    captured, layer, eager, _ = captured_and_eager(step, {"unit": unit_in_bfloat16})
    exact = step.StepLayer(step.Spelling())
    with torch.no_grad():
        exact(*step.inputs(step.Spelling()))
    assert captured.matches == 1
    errors = [(pool - exact.pool).abs().max() for pool in (layer.pool, eager.pool)]
    assert errors[0] < 0.01 * errors[1]


@pytest.mark.parametrize("changes", CASES[1:])
def test_where_inductor_is_told_to_keep_roundings_they_are_kept(step, changes):
    with torch._inductor.config.patch(emulate_precision_casts=True):
        captured, *_ = captured_and_eager(step, changes)
    assert captured.reasons == ["ROUNDING"]


def test_a_rounding_to_another_type_than_that_of_the_activations_is_kept(step):
    captured, *_ = captured_and_eager(step, {"unit": unit_in_float16})
    assert captured.reasons == ["ROUNDING"]

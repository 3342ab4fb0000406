"""Gradients are asked for: one clear error; parameters without gradients: the plain result."""

import pytest
import torch

from kda_kernels.testing.cases import clone, output_of
from kda_kernels.testing.compare import assert_same_bits

PARAMETERS = ("A_log", "dt_bias", "weight", "norm_weight", "conv_bias")


@pytest.fixture(autouse=True)
def _quiet(caplog):
    # torch logs every error that a fake implementation raises.
    caplog.set_level("CRITICAL", logger="torch")


def with_parameters(values):
    """The call with its weights as a module holds them."""
    return {
        k: torch.nn.Parameter(v) if k in PARAMETERS and v is not None else v
        for k, v in values.items()
    }


def refusal(operator, name):
    return (
        f"kda::{operator.name}: {name} must be a tensor without requires_grad (or the call under "
        "torch.no_grad()), got one that requires grad"
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_give_the_plain_result_without_gradients(function, call, mode):
    values = call(absent=frozenset({"t1_state_indices"}))
    again = with_parameters(clone(values))
    expected = function(**values)
    with mode():
        output = function(**again)
    assert_same_bits(output, expected, "output")
    assert_same_bits(again["state"], values["state"], "state")
    assert not output.requires_grad


def test_every_argument_that_requires_grad_is_refused_under_grad_mode(operator, function, call):
    # The same call without gradients comes first: its plan must not serve the call with them.
    values = call(absent=frozenset({"t1_state_indices"}))
    function(**values)
    before = clone(values)
    floating = [k for k, v in values.items() if torch.is_tensor(v) and v.is_floating_point()]
    for name in floating:
        wants = {**values, name: values[name].detach().requires_grad_()}
        with torch.enable_grad(), pytest.raises(ValueError) as caught:
            function(**wants)
        assert str(caught.value).startswith(refusal(operator, name))
    assert_same_bits(values["state"], before["state"], "state")


def test_an_output_that_requires_grad_is_refused_under_grad_mode(operator, function, call):
    values = call()
    output = output_of(operator, values).requires_grad_()
    with torch.enable_grad(), pytest.raises(ValueError) as caught:
        function(**values, output=output)
    assert str(caught.value).startswith(refusal(operator, "output"))


def test_grad_mode_alone_is_no_reason_to_refuse(function, call):
    values = call()
    again = clone(values)
    with torch.enable_grad():
        output = function(**values)
    assert not output.requires_grad
    assert_same_bits(output, function(**again), "output")


def test_a_result_can_be_part_of_a_graph_that_needs_gradients_elsewhere(function, call):
    scale = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        output = function(**call())
        (output.float() * scale).sum().backward()
    assert_same_bits(scale.grad, output.float().sum().reshape(1), "gradient")


def test_compiled_calls_refuse_gradients_with_the_eager_sentence(operator, function, call):
    values = with_parameters(call())
    first = next(a.name for a in operator.tensors if isinstance(values[a.name], torch.nn.Parameter))
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    before = values["state"].clone()
    with torch.enable_grad(), pytest.raises(Exception) as caught:
        compiled(**values)
    assert refusal(operator, first) in str(caught.value)
    assert_same_bits(values["state"], before, "state")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_calls_take_parameters_without_gradients(function, call, mode):
    values = call()
    again = with_parameters(clone(values))
    expected = function(**values)
    torch._dynamo.reset()
    with mode():
        output = torch.compile(function, fullgraph=True, backend="aot_eager")(**again)
    assert_same_bits(output, expected, "output")
    assert_same_bits(again["state"], values["state"], "state")


def test_pools_made_in_inference_mode_work_inside_it(function, call):
    values = call()
    with torch.inference_mode():
        again = clone(values)
        assert again["state"].is_inference()
        assert_same_bits(function(**again), function(**values), "output")
        assert_same_bits(again["state"], values["state"], "state")


def test_pools_made_in_inference_mode_raise_torchs_own_error_outside_it(function, call):
    values = call()
    function(**values)
    with torch.inference_mode():
        values["state"] = values["state"].clone()
        before = values["state"].clone()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
        function(**values)
    assert_same_bits(values["state"], before, "state")


def test_autograd_notices_that_a_saved_pool_has_changed(function, call):
    values = call()
    factor = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        product = (values["state"] * factor).sum()
        function(**values)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

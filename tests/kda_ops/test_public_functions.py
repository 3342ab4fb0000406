"""Names, order and defaults of the public functions, the caller's output, FlashInfer's switches."""

import inspect

import pytest
import torch

import kda_ops
from kda_kernels.packed_decode.contract import CONTRACT as PACKED_DECODE
from kda_kernels.testing.cases import Case, clone, draw, output_of
from kda_kernels.testing.compare import assert_same_bits

# Argument lists of FlashInfer's functions, as `name` or `name=default`.
FUSED = (
    "x weight conv_state raw_gate raw_beta A_log dt_bias state_indices state output_gate "
    "norm_weight lower_bound=-5.0 norm_eps=1e-05 output=None"
)
POSITIONAL = {
    "packed_kda_decode": "mixed_qkv raw_gate raw_beta A_log dt_bias state state_indices "
    "output=None",
    "fused_kda_decode": FUSED,
    "packed_fused_kda_decode": FUSED,
}
KEYWORDS = {
    "packed_kda_decode": "",
    "fused_kda_decode": "backend='auto' state_indices_mode='unique_or_null'",
    "packed_fused_kda_decode": "query_start_loc num_accepted_tokens t1_state_indices=None",
}


def spelled(function, kind):
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is kind]
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]


def test_positional_arguments_are_those_of_flashinfer(operator, function):
    names = POSITIONAL[operator.public_name].split()
    assert spelled(function, inspect.Parameter.POSITIONAL_OR_KEYWORD) == names


def test_keywords_of_flashinfer_come_first_and_what_is_beyond_has_a_default(operator, function):
    names = spelled(function, inspect.Parameter.KEYWORD_ONLY)
    first = KEYWORDS[operator.public_name].split()
    assert names[: len(first)] == first
    assert all("=" in name for name in names[len(first) :])


def test_argument_names_and_defaults_are_those_of_the_contract(operator, function):
    parameters = inspect.signature(function).parameters
    compatibility = {"output", "backend", "state_indices_mode"}
    assert parameters.keys() - compatibility == {a.name for a in operator.arguments}
    assert {a.name: parameters[a.name].default for a in operator.scalars} == {
        a.name: a.default for a in operator.scalars
    }


def test_every_argument_is_described_in_a_docstring(operator, function):
    described = kda_ops.fused_kda_decode.__doc__ + kda_ops.packed_kda_decode.__doc__
    text = function.__doc__ + described
    assert not [name for name in inspect.signature(function).parameters if f"{name}:" not in text]


def test_positional_and_keyword_calls_agree(operator, function, call):
    values = call()
    again = clone(values)
    expected = function(**values)
    order = [name for name in inspect.signature(function).parameters if name in values]
    positional = {
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    }
    actual = function(
        *[again[name] for name in order if name in positional],
        **{name: again[name] for name in order if name not in positional},
    )
    assert_same_bits(actual, expected, "output")


def test_output_is_written_and_returned_as_the_same_object(operator, function, call):
    values = call()
    again = clone(values)
    output = output_of(operator, values)
    assert function(**values, output=output) is output
    assert_same_bits(output, function(**again), "output")
    assert_same_bits(values["state"], again["state"], "state")


def test_output_is_a_new_tensor_every_time(function, call):
    values = call()
    first, second = function(**values), function(**values)
    assert first.data_ptr() != second.data_ptr()
    assert first.is_contiguous()


@pytest.mark.parametrize("backend", ["auto", "cute-dsl"])
@pytest.mark.parametrize("mode", ["unique_or_null", "positive_unique"])
def test_known_backends_and_index_modes_change_nothing(operator, function, call, backend, mode):
    values = call()
    again = clone(values)
    modes = {} if operator.name == "packed_decode" else {"state_indices_mode": mode}
    assert_same_bits(
        function(**values, backend=backend, **modes), function(**again), f"{backend}, {mode}"
    )


@pytest.mark.parametrize(
    "switch",
    [{"backend": "cake"}, {"state_indices_mode": "repeated_positive"}, {"backend": "triton"}],
    ids=str,
)
def test_switches_without_counterpart_are_unsupported_and_nothing_is_written(
    operator, function, call, switch
):
    if operator.name == "packed_decode" and "state_indices_mode" in switch:
        switch = {"backend": "cake"}
    values = call()
    before = clone(values)
    with pytest.raises(NotImplementedError) as caught:
        function(**values, **switch)
    (name, value), *_ = switch.items()
    assert isinstance(caught.value, kda_ops.UnsupportedError)
    supported = {
        "backend": "'auto' or 'cute-dsl'",
        "state_indices_mode": "'unique_or_null' or 'positive_unique'",
    }[name]
    sentence = f"kda::{operator.name}: {name} must be {supported}, got {value!r}"
    assert str(caught.value) == sentence
    assert_same_bits(values["state"], before["state"], "state")


def packed_call():
    values = draw(PACKED_DECODE, Case({"B": 3, "H": 2, "S": 7}))
    values.pop("output_dtype")
    return values


def test_packed_output_can_be_float32_by_dtype_or_by_the_output_given():
    values = packed_call()
    again, third = clone(values), clone(values)
    wide = kda_ops.packed_kda_decode(**values, output_dtype=torch.float32)
    given = torch.empty(3, 1, 2, 128)
    kda_ops.packed_kda_decode(**again, output=given)
    assert wide.dtype is torch.float32
    assert_same_bits(wide, given, "output")
    assert_same_bits(wide.bfloat16(), kda_ops.packed_kda_decode(**third), "rounded output")


def test_packed_output_dtype_beside_another_output_is_a_type_error():
    output = torch.empty(3, 1, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="output_dtype must be None or the type of output"):
        kda_ops.packed_kda_decode(**packed_call(), output=output, output_dtype=torch.float32)


@pytest.mark.parametrize("first_slot", [0.0, 1.0, 2.0])
def test_a_first_slot_that_is_no_integer_is_refused_also_where_it_equals_the_default(
    operator, function, first_slot
):
    values = draw(operator, Case({"B": 3, "R": 3, "N": 3, "T": 1, "H": 2, "S": 7, "L": 3}))
    values.pop("output_dtype", None)
    with pytest.raises(RuntimeError, match="for argument 'first_slot' but instead found"):
        function(**{**values, "first_slot": first_slot})

"""One sentence per illegal call, whether the call is eager, fake, on meta tensors or compiled."""

import expecttest
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kda_ops
from kda_kernels.fused_decode.contract import CONTRACT as FUSED_DECODE
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, clone, draw, output_of
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.violations import violations

# Scalars that torch itself refuses, because they fit no argument of the schema.
SCHEMA_REFUSES = {("state_layout", "is None"), ("norm_eps", "is None")}

WITH_CONVOLUTION = pytest.mark.parametrize(
    "operator", CONTRACTS[1:], ids=lambda contract: contract.name, indirect=True
)

# For torch.compile: one illegal call of each kind, by argument and deed. A compilation that fails
# costs a second, so not every one is tried.
COMPILED = (
    ("raw_gate", "lost its last element"),
    ("A_log", "has int16 elements"),
    ("raw_beta", "is on another device"),
    ("state", "has misaligned slots"),
    ("lower_bound", "is 0.0"),
    ("state_layout", "is kx"),
)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    # torch logs every error that a fake implementation raises.
    caplog.set_level("CRITICAL", logger="torch")


@pytest.fixture(scope="module")
def illegal(operator):
    """Every illegal call of the operator that reaches it, one per rule."""
    sizes = {"B": 3, "R": 6, "N": 2, "T": 3, "H": 2, "S": 7, "L": 3}
    return [
        violation
        for violation in violations(operator, Case(sizes, absent=frozenset()))
        if (violation.argument, violation.deed) not in SCHEMA_REFUSES
    ]


def refusal(function, values):
    """Type and sentence of the error that a call raises."""
    with pytest.raises(Exception) as caught:
        function(**values)
    return type(caught.value), str(caught.value)


def faked(mode, values):
    return {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def pools(values):
    return {name: values[name] for name in ("state", "conv_state") if name in values}


def test_eager_and_fake_calls_refuse_with_one_sentence(operator, function, illegal):
    for violation in illegal:
        eager = refusal(function, violation.values)
        with FakeTensorMode() as mode:
            assert refusal(function, faked(mode, violation.values)) == eager
        assert issubclass(eager[0], violation.error), eager
        assert eager[1].startswith(f"kda::{operator.name}: "), eager


def test_an_illegal_call_after_a_legal_one_is_refused(function, illegal, call):
    # A plan that is found must be the plan of the same facts.
    function(**call(absent=frozenset()))
    for violation in illegal:
        assert issubclass(refusal(function, violation.values)[0], violation.error)


def test_refused_calls_leave_pools_and_output_as_they_were(operator, function, illegal, call):
    output = output_of(operator, call())
    untouched = output.clone()
    for violation in illegal:
        before = clone(violation.values)
        given = {k: v for k, v in violation.values.items() if k != "output_dtype"}
        if violation.argument != "output_dtype":
            refusal(function, {**given, "output": output})
        for name, pool in pools(violation.values).items():
            if isinstance(pool, torch.Tensor) and pool.device.type == "cpu":
                assert_same_bits(pool, before[name], f"{violation.argument} {violation.deed}")
        assert_same_bits(output, untouched, "output")


def test_compiled_calls_refuse_with_the_sentence_of_eager_calls(function, illegal):
    tried = 0
    for violation in illegal:
        if (violation.argument, violation.deed) not in COMPILED:
            continue
        tried += 1
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        _, sentence = refusal(function, violation.values)
        before = clone(violation.values)
        _, said = refusal(compiled, violation.values)
        assert sentence in said
        for name, pool in pools(violation.values).items():
            assert_same_bits(pool, before[name], f"{violation.argument} {violation.deed}")
    assert tried == len(COMPILED)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_symbolic_sizes_are_named_by_their_numbers(function, call, backend):
    values = call()
    values["dt_bias"] = values["dt_bias"][:-1].clone()
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    _, sentence = refusal(function, values)
    assert "H*D = 256 elements, got [255] (H = 2 from state)" in sentence
    assert sentence in refusal(compiled, values)[1]


@pytest.mark.parametrize(
    ("deed", "rule"),
    [
        (lambda output: output[..., :-1].clone(), "= ["),
        (lambda output: output.to(torch.float64), "must be bfloat16"),
        (lambda output: output.to("meta"), "must be on cpu"),
        (lambda output: output.mT.contiguous().mT, "must be contiguous"),
    ],
    ids=["shape", "dtype", "device", "strides"],
)
def test_a_wrong_output_is_refused_before_anything_is_written(operator, function, call, deed, rule):
    values = call({"H": 2})
    before = clone(values)
    output = deed(output_of(operator, values))
    kind, sentence = refusal(function, {**values, "output": output})
    assert issubclass(kind, kda_ops.OperatorError)
    assert sentence.startswith(f"kda::{operator.name}: output must be") and rule in sentence
    assert_same_bits(values["state"], before["state"], "state")
    if output.device.type == "cpu":
        with FakeTensorMode() as mode:
            fakes = faked(mode, {**values, "output": output})
            assert refusal(function, fakes) == (kind, sentence)


def test_meta_tensors_give_metadata_and_are_checked(operator, function, call):
    values = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call().items()}
    output = function(**values)
    expected = function(**call())
    assert output.device.type == "meta"
    assert (output.shape, output.dtype, output.stride()) == (
        expected.shape,
        expected.dtype,
        expected.stride(),
    )
    values["dt_bias"] = values["dt_bias"][:-1]
    assert "dt_bias must be any shape of H*D = 256" in refusal(function, values)[1]


@pytest.mark.parametrize("name", ["first", "state", "state_indices", "A_log"])
def test_tensors_on_different_devices_are_a_value_error(operator, function, call, name):
    name = operator.tensors[0].name if name == "first" else name
    values = call()
    before = clone(values)
    values[name] = values[name].to("meta")
    kind, sentence = refusal(function, values)
    assert issubclass(kind, ValueError) and " must be on " in sentence
    if name != "state":
        assert_same_bits(values["state"], before["state"], "state")


@WITH_CONVOLUTION
def test_pools_of_different_slot_counts_are_refused(operator, function, call):
    values = call()
    values["conv_state"] = values["conv_state"][:-1]
    kind, sentence = refusal(function, values)
    assert issubclass(kind, ValueError)
    assert "conv_state must be" in sentence and "S = 7 from state" in sentence


def test_another_head_width_is_refused_with_the_supported_one(operator, function, call):
    kind, sentence = refusal(function, {**call(), "state": torch.zeros(7, 2, 64, 64)})
    assert issubclass(kind, ValueError)
    rule = "[S, H, D, D] = [7, 2, 128, 128], got [7, 2, 64, 64]"
    assert f"kda::{operator.name}: state must be {rule}" in sentence


@WITH_CONVOLUTION
def test_another_convolution_width_is_refused_with_the_supported_one(operator, function, call):
    kind, sentence = refusal(function, {**call(), "weight": torch.zeros(3, 3, 256)})
    assert issubclass(kind, ValueError)
    rule = "[3, 4, H*D] = [3, 4, 256], got [3, 3, 256]"
    assert f"kda::{operator.name}: weight must be {rule}" in sentence


class Sentences(expecttest.TestCase):
    """One operator stands for the form of all sentences."""

    def test_sentences_name_operator_argument_rule_fact_and_where_numbers_come_from(self):
        values = draw(FUSED_DECODE, Case({"B": 3, "H": 2, "S": 7, "L": 3}))
        cases = [
            {"dt_bias": values["dt_bias"][:-1]},
            {"x": values["x"].int()},
            {"state": values["state"][:, :, :64]},
            {"raw_beta": values["raw_beta"].float()},
            {"norm_eps": -1.0},
            {"state_layout": "kk"},
            {"weight": values["weight"].to("meta")},
        ]
        with torch.no_grad():
            said = [refusal(kda_ops.fused_kda_decode, {**values, **case})[1] for case in cases]
        self.assertExpectedInline(
            "\n".join(said),
            """\
kda::fused_decode: dt_bias must be any shape of H*D = 256 elements, got [255] (H = 2 from state)
kda::fused_decode: x must be bfloat16 or float16 or float32, got int32
kda::fused_decode: state must be [S, H, D, D] = [7, 2, 128, 128], got [7, 2, 64, 128] (H = 2 from state, S = 7 from state)
kda::fused_decode: raw_beta must be bfloat16, got float32 (activation type from x)
kda::fused_decode: norm_eps must be finite and >= 0, got -1.0
kda::fused_decode: state_layout must be 'vk' or 'kv', got 'kk'
kda::fused_decode: weight must be on cpu, got meta (from x)""",  # noqa: E501
        )

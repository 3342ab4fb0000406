"""No rows, no sequences, sequences without tokens: an empty or zero result and pools untouched."""

import pytest
import torch

import kda_ops
from kda_kernels.packed_fused_decode.contract import CONTRACT as PACKED_FUSED_DECODE
from kda_kernels.testing.cases import Case, clone, draw, output_of
from kda_kernels.testing.compare import assert_same_bits

EMPTY = {"B": 0, "R": 0, "N": 0}


def expected_shape(operator):
    return (0, 1, 2, 128) if operator.name == "packed_decode" else (1, 0, 2, 128)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_an_empty_batch_gives_an_empty_output_and_touches_no_pool(
    operator, function, call, backend
):
    values = call(EMPTY)
    before = clone(values)
    torch._dynamo.reset()
    run = torch.compile(function, fullgraph=True, backend=backend) if backend else function
    output = run(**values)
    assert output.shape == expected_shape(operator)
    assert output.dtype is torch.bfloat16
    assert_same_bits(values["state"], before["state"], "state")


def test_an_empty_output_is_returned_as_the_same_object(operator, function, call):
    values = call(EMPTY)
    output = output_of(operator, values)
    assert function(**values, output=output) is output


def test_a_call_after_an_empty_one_runs(function, call):
    function(**call(EMPTY))
    values = call()
    before = values["state"].clone()
    assert torch.isfinite(function(**values)).all()
    assert not torch.equal(values["state"], before)


def test_a_pool_without_slots_makes_every_row_null(operator, function, call):
    values = call()
    for name in ("state", "conv_state"):
        if name in values:
            values[name] = values[name][:0]
    assert function(**values).count_nonzero() == 0


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("rows", [0, 4])
def test_sequences_without_tokens_are_null(rows, backend):
    values = draw(PACKED_FUSED_DECODE, Case({"R": rows, "N": 2, "T": 3, "H": 2, "S": 7}))
    values["query_start_loc"].zero_()
    before = clone(values)
    torch._dynamo.reset()
    function = kda_ops.packed_fused_kda_decode
    run = torch.compile(function, fullgraph=True, backend=backend) if backend else function
    output = run(**values)
    assert_same_bits(output, torch.zeros(1, rows, 2, 128, dtype=torch.bfloat16), "output")
    for pool in ("state", "conv_state"):
        assert_same_bits(values[pool], before[pool], pool)

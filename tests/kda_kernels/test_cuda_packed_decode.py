"""packed_decode on a GPU, through its launcher: results, against float64 and bit for bit.

Inputs are drawn on the CPU and copied with their strides, offsets and padding; references run on
the CPU. Streams, graphs, huge pools and errors: test_cuda_launches.py.
"""

import math

import pytest
import torch

from kda_kernels.packed_decode.contract import CONTRACT
from kda_kernels.testing.cases import Case, clone, draw, output_of, run_reference, strided
from kda_kernels.testing.compare import (
    assert_same_bits,
    assert_storage_untouched,
    assert_untouched,
    assert_within_budget,
)
from kda_kernels.testing.device import assert_right_on, launch, moved, on, run_on
from kda_kernels.testing.liveness import footprint

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT32 = (-1, 0, -(2**31), 2**31 - 1)
INT64 = (*INT32, 2**40, -(2**40), 2**31, 2**32 + 2, -(2**63), 2**63 - 1)
POOLS = [(F32, "vk"), (BF16, "vk"), (F32, "kv"), (BF16, "kv")]
POOL_IDS = ["f32-vk", "bf16-vk", "f32-kv", "bf16-kv"]


def case(rows, heads, slots=None, *, scalars=None, **fields):
    """A case of packed_decode; by default with as many slots as are needed and two more."""
    sizes = {"B": rows, "H": heads, "S": rows + 2 if slots is None else slots}
    return Case(sizes=sizes, scalars=scalars or {}, **fields)


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(
    ("rows", "heads"), [(1, 1), (5, 3), (1, 12), (33, 12), (5, 64), (512, 3), (64, 24), (2, 96)]
)
def test_results_are_within_the_budget_and_nothing_else_is_touched(
    state, layout, lower_bound, rows, heads
):
    scalars = {"state_layout": layout, "lower_bound": lower_bound}
    padding = 8 if rows * heads < 100 else 0
    assert_right_on(
        "cuda",
        CONTRACT,
        draw(CONTRACT, case(rows, heads, state_dtype=state, slot_padding=padding, scalars=scalars)),
    )


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("activation", [F16, F32])
def test_activations_parameters_indices_and_outputs_may_have_other_types(state, layout, activation):
    fields = {"activation": activation, "state_dtype": state, "slot_padding": 16}
    scalars = {"state_layout": layout, "scale": 0.3, "first_slot": 1}
    values = draw(
        CONTRACT,
        case(4, 3, 9, index_dtype=torch.int64, parameter_dtype=BF16, scalars=scalars, **fields),
    )
    assert_right_on("cuda", CONTRACT, values, F32)
    assert_right_on(
        "cuda",
        CONTRACT,
        draw(CONTRACT, case(4, 3, 9, spelling=1, scalars=scalars, seed=1, **fields)),
    )


@pytest.mark.parametrize("heads", [6, 8, 16, 24, 32, 48])
def test_every_head_count_is_served(heads):
    for state, layout in POOLS:
        assert_right_on(
            "cuda",
            CONTRACT,
            draw(CONTRACT, case(3, heads, state_dtype=state, scalars={"state_layout": layout})),
        )


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("first_slot", [0, 1, 2, None])
def test_a_row_is_live_exactly_when_its_index_names_a_slot(state, layout, first_slot):
    slots = 6
    for dtype, strange in ((torch.int32, INT32), (torch.int64, INT64)):
        indices = [*strange, slots, slots + 1, -slots - 1, 1, 3, 5, 2]
        if first_slot is None:
            indices = [-1 if i == 5 else i for i in indices if i not in (0, -1)] + [-slots]
        count = len(indices)
        scalars = {"first_slot": first_slot, "state_layout": layout}
        values = draw(
            CONTRACT, case(count, 2, count + 3, state_dtype=state, slot_padding=8, scalars=scalars)
        )
        pool = values["state"]
        values["state"] = pool.as_strided((slots, *pool.shape[1:]), pool.stride())
        values["state_indices"] = torch.tensor(indices, dtype=dtype)
        found = footprint(CONTRACT, values)
        null = sorted(set(range(count)) - set(found.live_rows))
        for number, row in enumerate(null):
            for name in ("mixed_qkv", "raw_gate", "raw_beta"):
                values[name][row] = (math.nan, math.inf, -math.inf)[number % 3]
        before, expected = clone(values), clone(values)
        wanted = run_reference(CONTRACT, expected)
        output = run_on("cuda", CONTRACT, values)
        assert_same_bits(output[null], torch.zeros_like(output[null]), "null rows")
        torch.testing.assert_close(output, wanted, rtol=0.02, atol=1e-3)
        assert_untouched(values["state"], before["state"], found.state_slots, "state")
        assert_storage_untouched(values["state"], before["state"], "state")
        for slot in found.state_slots:
            assert not torch.equal(values["state"][slot], before["state"][slot])


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_without_indices_row_i_uses_slot_i(state, layout):
    scalars = {"state_layout": layout, "first_slot": 2}
    absent = frozenset({"state_indices"})
    values = draw(CONTRACT, case(5, 3, 7, state_dtype=state, absent=absent, scalars=scalars))
    same = clone(values) | {"state_indices": torch.arange(5, dtype=torch.int32), "first_slot": 0}
    assert_right_on("cuda", CONTRACT, clone(values))
    assert_same_bits(run_on("cuda", CONTRACT, values), run_on("cuda", CONTRACT, same), "output")
    assert_same_bits(values["state"], same["state"], "state")


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("activation", [BF16, F32])
def test_strided_and_misaligned_rows_equal_their_contiguous_copies_bitwise(
    state, layout, activation
):
    compact = draw(
        CONTRACT,
        case(5, 3, 9, state_dtype=state, activation=activation, scalars={"state_layout": layout}),
    )
    wanted = clone(compact)
    output = run_on("cuda", CONTRACT, wanted)
    for spelling, padding, offset in ((0, 8, 0), (1, 1, 1), (2, 5, 3), (0, 16, 8)):
        values = clone(compact)
        values["mixed_qkv"] = strided(compact["mixed_qkv"], 0, padding, offset)
        gate, beta = compact["raw_gate"], compact["raw_beta"]
        if spelling:
            gate = gate.view(5, 3, 128)[(None,) * (spelling - 1)]
        if spelling == 2:
            beta = beta[None]
        values["raw_gate"] = strided(gate, gate.dim() - 3 if spelling else 0, padding, offset)
        values["raw_beta"] = strided(beta, beta.dim() - 2, padding, offset)
        values["dt_bias"] = strided(compact["dt_bias"].view(3, 128), 0, 0, offset)
        values["A_log"] = compact["A_log"].view(1, 1, 3, 1)
        table = torch.full((5, 3), 10**6, dtype=torch.int32)
        table[:, 0] = compact["state_indices"]
        values["state_indices"] = table[:, 0]
        values["state"] = strided(compact["state"], 0, 16)
        assert_same_bits(run_on("cuda", CONTRACT, values), output, f"output, offset {offset}")
        assert_same_bits(values["state"].contiguous(), wanted["state"], f"state, offset {offset}")


def test_one_row_of_one_head_may_have_any_stride_and_shape():
    values = draw(CONTRACT, case(1, 1, 3))
    wanted = clone(values)
    output = run_on("cuda", CONTRACT, wanted)
    odd = clone(values)
    odd["mixed_qkv"] = values["mixed_qkv"].as_strided((1, 384), (385, 1))
    odd["raw_gate"] = values["raw_gate"].as_strided((1, 1, 128), (7, 3, 1))
    odd["raw_beta"] = values["raw_beta"].as_strided((1, 1), (5, 9))
    odd["A_log"] = values["A_log"].view(())
    odd["state_indices"] = values["state_indices"].as_strided((1,), (6,))
    assert_same_bits(run_on("cuda", CONTRACT, odd), output, "output")
    assert_same_bits(odd["state"], wanted["state"], "state")


def test_a_misaligned_row_after_an_aligned_one_of_equal_strides_is_read_right():
    values = on("cuda", draw(CONTRACT, case(1, 2, 3)))
    output = torch.empty(1, 1, 2, 128, dtype=BF16, device="cuda")
    start = values["state"].clone()
    expected = launch(CONTRACT, values, output).clone()
    for name in ("mixed_qkv", "raw_gate", "dt_bias"):
        loose = torch.empty(values[name].numel() + 1, dtype=values[name].dtype, device="cuda")[1:]
        odd = values | {name: loose.view(values[name].shape).copy_(values[name])}
        values["state"].copy_(start)
        assert_same_bits(launch(CONTRACT, odd, output), expected, f"misaligned {name}")


def test_a_caller_s_output_may_start_at_any_element():
    values = on("cuda", draw(CONTRACT, case(2, 3, 5)))
    again = values | {"state": values["state"].clone()}
    output = launch(CONTRACT, values, torch.empty(2, 1, 3, 128, dtype=BF16, device="cuda"))
    flat = torch.full((2 * 3 * 128 + 2,), 7.0, dtype=BF16, device="cuda")
    launch(CONTRACT, again, flat[1:-1].view(2, 1, 3, 128))
    assert_same_bits(flat[1:-1].view(2, 1, 3, 128), output, "output")
    assert flat[0] == flat[-1] == 7.0


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extreme_gates_are_finite_and_right(lower_bound):
    gates = [-3e38, -200, -88, -20, -1, 0, 1, 19.9, 20, 20.1, 88, 89, 100, 3e38]
    values = draw(CONTRACT, case(len(gates), 2, scalars={"lower_bound": lower_bound}))
    values["raw_gate"][:] = torch.tensor(gates).to(BF16)[:, None]
    values["A_log"].fill_(math.log(1e-3))
    assert_right_on("cuda", CONTRACT, values)


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_512_steps_drift_from_float64_no_more_than_the_reference(state, layout):
    sizes = case(2, 1, 3, state_dtype=state, scalars={"state_layout": layout})
    values = draw(CONTRACT, sizes)
    there, reference, wide = on("cuda", values), clone(values), clone(values)
    wide["state"] = wide["state"].double()
    output = moved(output_of(CONTRACT, values), "cuda")
    for step in range(512):
        fresh = draw(CONTRACT, case(2, 1, 3, seed=step + 1))
        token = {name: fresh[name] for name in ("mixed_qkv", "raw_gate", "raw_beta")}
        launch(CONTRACT, there | on("cuda", token), output)
        wanted = run_reference(CONTRACT, reference | token)
        right = run_reference(CONTRACT, wide | token, torch.float64)
    assert_within_budget(output.cpu(), wanted, right, "last output")
    live = values["state_indices"].tolist()
    assert_within_budget(
        there["state"].cpu()[live], reference["state"][live], wide["state"][live], "last state"
    )

"""fused_decode on a GPU, through its launcher: results, against float64 and bit for bit.

Inputs are drawn on the CPU and copied with their strides, offsets and padding; references run on
the CPU.
"""

import math

import pytest
import torch

from kda_kernels.fused_decode.contract import CONTRACT
from kda_kernels.testing.cases import Case, clone, draw, output_of, run_reference, strided
from kda_kernels.testing.compare import (
    assert_same_bits,
    assert_storage_untouched,
    assert_untouched,
    assert_within_budget,
)
from kda_kernels.testing.device import assert_right_on, launch, moved, on, run_on
from kda_kernels.testing.liveness import footprint
from kda_kernels.testing.ties import step_off_ties

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT32 = (-1, 0, -(2**31), 2**31 - 1)
INT64 = (*INT32, 2**40, -(2**40), 2**31, 2**32 + 2, -(2**63), 2**63 - 1)
POOLS = [(F32, "vk"), (BF16, "vk"), (F32, "kv"), (BF16, "kv")]
POOL_IDS = ["f32-vk", "bf16-vk", "f32-kv", "bf16-kv"]


def case(rows, heads, slots=None, columns=3, *, scalars=None, **fields):
    """A case of fused_decode; by default with as many slots as are needed and three more."""
    sizes = {"B": rows, "H": heads, "S": rows + 3 if slots is None else slots, "L": columns}
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
    window = "DS" if rows % 2 else "SD"
    assert_right_on(
        "cuda",
        CONTRACT,
        draw(
            CONTRACT,
            case(
                rows, heads, state_dtype=state, window=window, slot_padding=padding, scalars=scalars
            ),
        ),
    )


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("activation", [BF16, F16, F32])
@pytest.mark.parametrize("window", ["SD", "DS"])
@pytest.mark.parametrize("columns", [3, 4, 7])
def test_every_window_type_and_weight_is_served(state, layout, activation, window, columns):
    fields = {"activation": activation, "state_dtype": state, "window": window, "slot_padding": 16}
    scalars = {"state_layout": layout, "scale": 0.3, "first_slot": 0, "norm_eps": 1e-3}
    biased = frozenset({"t1_state_indices"})
    more = {"index_dtype": torch.int64, "parameter_dtype": BF16, "absent": biased}
    other = {"taps": "channel-major", "weight_dtype": activation, "spelling": 1, "seed": 1}
    for kinds in (more, other):
        assert_right_on(
            "cuda",
            CONTRACT,
            draw(CONTRACT, case(4, 3, 9, columns, scalars=scalars, **fields, **kinds)),
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
@pytest.mark.parametrize("rows", [2, 70])
def test_windows_and_weights_in_either_order_give_the_same_bits(state, layout, rows):
    heads = 12
    first = draw(CONTRACT, case(rows, heads, state_dtype=state, scalars={"state_layout": layout}))
    wanted = clone(first)
    output = run_on("cuda", CONTRACT, wanted)
    windows = first["conv_state"]
    for by_channel, taps_last in ((True, False), (False, True), (True, True)):
        values = clone(first)
        if by_channel:
            values["conv_state"] = windows.contiguous()
        if taps_last:
            values["weight"] = first["weight"].transpose(1, 2).contiguous().transpose(1, 2)
        assert_same_bits(run_on("cuda", CONTRACT, values), output, "output")
        for pool in ("state", "conv_state"):
            assert_same_bits(values[pool].contiguous(), wanted[pool].contiguous(), pool)


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
        drawn = case(count, 2, count + 3, state_dtype=state, slot_padding=8, scalars=scalars)
        values = draw(CONTRACT, drawn)
        for name in ("state", "conv_state"):
            pool = values[name]
            values[name] = pool.as_strided((slots, *pool.shape[1:]), pool.stride())
        values["state_indices"] = torch.tensor(indices, dtype=dtype)
        found = footprint(CONTRACT, values)
        null = sorted(set(range(count)) - set(found.live_rows))
        for number, row in enumerate(null):
            poison = (math.nan, math.inf, -math.inf)[number % 3]
            for name in ("x", "output_gate"):
                values[name].view(-1, *values[name].shape[-2:] if name != "x" else (768,))[row] = (
                    poison
                )
            for name in ("raw_gate", "raw_beta"):
                values[name][0, row] = poison
        before, expected = clone(values), clone(values)
        wanted = run_reference(CONTRACT, expected)
        output = run_on("cuda", CONTRACT, values)
        zeros = torch.zeros_like(output[0, null])
        assert_same_bits(output[0, null], zeros, "null rows")
        torch.testing.assert_close(output, wanted, rtol=0.03, atol=2e-2)
        for name in ("state", "conv_state"):
            assert_untouched(values[name], before[name], found.state_slots, name)
            assert_storage_untouched(values[name], before[name], name)
            for slot in found.state_slots:
                assert not torch.equal(values[name][slot], before[name][slot])


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_without_indices_row_i_uses_slot_i(state, layout):
    scalars = {"state_layout": layout, "first_slot": 2}
    absent = frozenset({"state_indices", "conv_bias"})
    values = draw(CONTRACT, case(5, 3, 7, state_dtype=state, absent=absent, scalars=scalars))
    same = clone(values) | {"state_indices": torch.arange(5, dtype=torch.int32), "first_slot": 0}
    assert_right_on("cuda", CONTRACT, clone(values))
    assert_same_bits(run_on("cuda", CONTRACT, values), run_on("cuda", CONTRACT, same), "output")
    assert_same_bits(values["state"], same["state"], "state")
    assert_same_bits(values["conv_state"], same["conv_state"], "windows")


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("activation", [BF16, F32])
def test_strided_and_misaligned_inputs_equal_their_contiguous_copies_bitwise(
    state, layout, activation
):
    compact = draw(
        CONTRACT,
        case(5, 3, 9, state_dtype=state, activation=activation, scalars={"state_layout": layout}),
    )
    wanted = clone(compact)
    output = run_on("cuda", CONTRACT, wanted)
    for padding, offset in ((8, 0), (1, 1), (5, 3), (16, 8)):
        values = clone(compact)
        values["x"] = strided(compact["x"], 0, padding, offset)
        for name in ("raw_gate", "raw_beta", "output_gate"):
            axis = 0 if name == "output_gate" and compact[name].dim() == 3 else 1
            values[name] = strided(compact[name], axis, padding, offset)
        for name in ("dt_bias", "norm_weight"):
            values[name] = strided(compact[name].view(-1, 128), 0, 0, offset).view(
                compact[name].shape
            )
        values["A_log"] = compact["A_log"].view(1, 1, 3, 1)
        table = torch.full((5, 3), 10**6, dtype=torch.int32)
        table[:, 0] = compact["state_indices"]
        values["state_indices"] = table[:, 0]
        values["state"] = strided(compact["state"], 0, 16)
        assert_same_bits(run_on("cuda", CONTRACT, values), output, f"output, offset {offset}")
        assert_same_bits(values["state"].contiguous(), wanted["state"], f"state, offset {offset}")
        assert_same_bits(
            values["conv_state"].contiguous(), wanted["conv_state"].contiguous(), "windows"
        )


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_slots_beyond_two_to_the_31_elements_are_reached(state, layout):
    small = draw(CONTRACT, case(2, 1, 3, state_dtype=state, scalars={"state_layout": layout}))
    small["state_indices"] = torch.tensor([2, -1], dtype=torch.int32)
    there = on("cuda", small)
    output = launch(CONTRACT, there, torch.empty(1, 2, 1, 128, dtype=BF16, device="cuda"))
    step = 2**30 + 64
    huge = torch.empty(2 * step + 128 * 128, dtype=state, device="cuda")
    pool = huge.as_strided((3, 1, 128, 128), (step, 128 * 128, 128, 1))
    pool.copy_(small["state"])
    wide = torch.empty(2 * step + 384 * 3, dtype=BF16, device="cuda")
    windows = wide.as_strided((3, 384, 3), (step, 1, 384))
    windows.copy_(small["conv_state"])
    pools = {"state": pool, "conv_state": windows}
    again = launch(CONTRACT, on("cuda", small) | pools, torch.empty_like(output))
    assert_same_bits(again, output, "output")
    assert_same_bits(pool.cpu(), there["state"].cpu(), "state")
    assert_same_bits(windows.cpu(), there["conv_state"].cpu(), "windows")


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_a_graph_s_replay_equals_the_eager_call_bitwise_and_follows_new_inputs(state, layout):
    scalars = {"state_layout": layout}
    first = draw(CONTRACT, case(4, 3, 9, state_dtype=state, scalars=scalars))
    second = draw(CONTRACT, case(4, 3, 9, state_dtype=state, scalars=scalars, seed=7))
    first["state_indices"] = torch.tensor([2, -1, 0, 99], dtype=torch.int32)
    second["state_indices"] = torch.tensor([5, 2, 0, 7], dtype=torch.int32)
    there, eager = on("cuda", first), on("cuda", first)
    output = moved(output_of(CONTRACT, first), "cuda")
    launch(CONTRACT, there, output)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(CONTRACT, there, output)
    for values in (there, eager):
        for name in ("state", "conv_state"):
            values[name].copy_(first[name])
    for values in (first, second, second, first):
        for name in ("x", "raw_gate", "raw_beta", "state_indices", "output_gate"):
            there[name].copy_(values[name])
            eager[name].copy_(values[name])
        output.fill_(math.nan)
        graph.replay()
        expected = launch(CONTRACT, eager, torch.empty_like(output))
        assert_same_bits(output, expected, "output")
        for name in ("state", "conv_state"):
            assert_same_bits(there[name], eager[name], name)


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_512_steps_drift_from_float64_no_more_than_the_reference(state, layout):
    sizes = case(2, 1, 4, state_dtype=state, scalars={"state_layout": layout})
    values = draw(CONTRACT, sizes)
    there, reference, wide = on("cuda", values), clone(values), clone(values)
    wide["state"] = wide["state"].double()
    output = moved(output_of(CONTRACT, values), "cuda")
    for step in range(512):
        fresh = draw(CONTRACT, case(2, 1, 4, seed=step + 1))
        token = {name: fresh[name] for name in ("x", "raw_gate", "raw_beta", "output_gate")}
        step_off_ties(CONTRACT, reference | token)
        launch(CONTRACT, there | on("cuda", token), output)
        wanted = run_reference(CONTRACT, reference | token)
        right = run_reference(CONTRACT, wide | token, torch.float64)
    assert_within_budget(output.cpu(), wanted, right, "last output")
    live = values["state_indices"].tolist()
    assert_within_budget(
        there["state"].cpu()[live], reference["state"][live], wide["state"][live], "last state"
    )
    assert_same_bits(there["conv_state"].cpu(), reference["conv_state"], "windows")

"""packed_fused_decode on a GPU, through its launcher: results, against float64 and bit for bit.

Ragged lengths, clamped values and null rows are stated once for every backend in
test_speculative_steps.py and test_random_calls.py, which run here too.
"""

import math
import random

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, clone, draw, output_of, run_reference, strided
from kda_kernels.testing.compare import assert_same_bits, assert_within_budget
from kda_kernels.testing.device import assert_right_on, launch, moved, on, run_on
from kda_kernels.testing.ties import step_off_ties

pytestmark = pytest.mark.gpu

FUSED, CONTRACT = CONTRACTS[1:]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
POOLS = [(F32, "vk"), (BF16, "vk"), (F32, "kv"), (BF16, "kv")]
POOL_IDS = ["f32-vk", "bf16-vk", "f32-kv", "bf16-kv"]


def case(sequences, tokens, heads, *, rows=None, scalars=None, **fields):
    """A case whose sequences fill the rows, with three slots more than are listed."""
    rows = sequences * tokens if rows is None else rows
    slots = max(sequences * tokens, rows) + 3
    sizes = {"N": sequences, "T": tokens, "R": rows, "H": heads, "S": slots}
    return Case(sizes=sizes, scalars=scalars or {}, **fields)


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 16])
def test_results_are_within_the_budget_and_nothing_else_is_touched(
    state, layout, lower_bound, tokens
):
    scalars = {"state_layout": layout, "lower_bound": lower_bound}
    for sequences, heads, padding in ((1, 1, 8), (3, 12, 8), (40, 6, 0)):
        window = "DS" if (tokens + sequences) % 2 else "SD"
        fields = {"state_dtype": state, "window": window, "slot_padding": padding}
        sizes = case(sequences, tokens, heads, scalars=scalars, **fields)
        assert_right_on("cuda", CONTRACT, draw(CONTRACT, sizes))


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("activation", [BF16, F16, F32])
@pytest.mark.parametrize("window", ["SD", "DS"])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_every_type_and_weight_is_served(state, layout, activation, window, tokens):
    fields = {"activation": activation, "state_dtype": state, "window": window, "slot_padding": 16}
    scalars = {"state_layout": layout, "scale": 0.3, "first_slot": 0, "norm_eps": 1e-3}
    biased = frozenset({"t1_state_indices"})
    more = {"index_dtype": torch.int64, "parameter_dtype": BF16, "absent": biased}
    other = {"taps": "channel-major", "weight_dtype": activation, "spelling": 1, "seed": 1}
    for kinds in (more, other):
        sizes = case(2, tokens, 3, scalars=scalars, **fields, **kinds)
        assert_right_on("cuda", CONTRACT, draw(CONTRACT, sizes))


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("rows", [1, 5, 40, 200])
def test_one_token_a_sequence_equals_fused_decode_bit_for_bit_in_every_schedule(
    state, layout, rows
):
    for heads in (1, 12, 64):
        for window in ("SD", "DS"):
            fields = {"state_dtype": state, "window": window, "scalars": {"state_layout": layout}}
            absent = frozenset({"t1_state_indices", "conv_bias"})
            values = draw(CONTRACT, case(rows, 1, heads, absent=absent, **fields))
            fused = {a.name: clone(values)[a.name] for a in FUSED.arguments}
            fused["state_indices"] = values["state_indices"][:, 0]
            by_row = clone(values)
            by_row["t1_state_indices"] = values["state_indices"][:, 0].clone()
            wanted = run_on("cuda", FUSED, fused)
            for one, what in ((values, "by sequence"), (by_row, "by row")):
                assert_same_bits(run_on("cuda", CONTRACT, one), wanted, what)
                for name in ("state", "conv_state"):
                    assert_same_bits(one[name], fused[name], f"{name}, {what}")


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
@pytest.mark.parametrize("tokens", [2, 4, 7])
def test_window_layouts_give_the_same_bits(state, layout, tokens):
    fields = {"state_dtype": state, "scalars": {"state_layout": layout}}
    one = draw(CONTRACT, case(3, tokens, 3, window="SD", **fields))
    other = draw(CONTRACT, case(3, tokens, 3, window="DS", **fields))
    output = run_on("cuda", CONTRACT, one)
    assert_same_bits(run_on("cuda", CONTRACT, other), output, "output")
    for name in ("state", "conv_state"):
        assert_same_bits(other[name].contiguous(), one[name].contiguous(), name)


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_strided_and_misaligned_inputs_equal_their_contiguous_copies_bitwise(state, layout):
    compact = draw(CONTRACT, case(2, 3, 3, state_dtype=state, scalars={"state_layout": layout}))
    wanted = clone(compact)
    output = run_on("cuda", CONTRACT, wanted)
    for padding, offset in ((8, 0), (1, 1), (5, 3)):
        values = clone(compact)
        values["x"] = strided(compact["x"], 0, padding, offset)
        for name in ("raw_gate", "raw_beta", "output_gate"):
            axis = 0 if name == "output_gate" and compact[name].dim() == 3 else 1
            values[name] = strided(compact[name], axis, padding, offset)
        for name, width in (
            ("state_indices", 3),
            ("query_start_loc", 1),
            ("num_accepted_tokens", 1),
        ):
            flat = compact[name].reshape(-1, width)
            table = torch.full((len(flat), width + 2), 10**6, dtype=torch.int32)
            table[:, :width] = flat
            values[name] = table[:, :width] if width > 1 else table[:, 0]
        values["state"] = strided(compact["state"], 0, 16)
        assert_same_bits(run_on("cuda", CONTRACT, values), output, f"output, offset {offset}")
        assert_same_bits(values["state"].contiguous(), wanted["state"], f"state, offset {offset}")


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_many_rounds_of_random_acceptance_follow_sequential_decoding(state, layout):
    # Sequences of a random engine: every round drafts up to T tokens, some are accepted; one token
    # at a time over the accepted ones is the truth, in float64 and in float32.
    dice = random.Random(5)
    tokens, count, heads = 4, 5, 2
    scalars = {"state_layout": layout, "first_slot": 0}
    fields = {"state_dtype": F32, "scalars": scalars, "window": "DS"}
    absent = frozenset({"t1_state_indices", "conv_bias"})
    first = draw(CONTRACT, case(count, tokens, heads, absent=absent, **fields))
    first["state"] = first["state"].to(state)
    first["num_accepted_tokens"][:] = 1
    there = on("cuda", first)
    plain = {a.name: clone(first)[a.name] for a in FUSED.arguments}
    home = first["state_indices"][:, 0].long()
    plain["state"] = plain["state"].float()[home].contiguous()
    plain["conv_state"] = plain["conv_state"][home][..., :3].contiguous()
    plain["state_indices"] = torch.arange(count, dtype=torch.int32)
    wide = clone(plain)
    wide["state"] = wide["state"].double()
    accepted = [1] * count
    for round_ in range(24):
        lengths = [dice.choice([0, 1, 2, 3, 4, 4]) for _ in range(count)]
        bounds = torch.tensor([sum(lengths[:n]) for n in range(count + 1)], dtype=torch.int32)
        fresh = draw(CONTRACT, case(count, tokens, heads, absent=absent, seed=round_ + 1, **fields))
        rows = {name: fresh[name] for name in ("x", "raw_gate", "raw_beta", "output_gate")}
        told = torch.tensor(accepted, dtype=torch.int32)
        ragged = {"query_start_loc": bounds, "num_accepted_tokens": told}
        output = moved(output_of(CONTRACT, first), "cuda")
        launch(CONTRACT, there | on("cuda", rows | ragged), output)
        for n, length in enumerate(lengths):
            if not length:
                continue
            accepted[n] = dice.randint(1, length)
            for t in range(accepted[n]):
                row = int(bounds[n]) + t
                token = {
                    "x": rows["x"][row : row + 1],
                    **{k: v[..., row : row + 1, :] for k, v in rows.items() if k == "raw_beta"},
                    **{
                        k: rows[k].reshape(1, -1, heads, 128)[:, row : row + 1]
                        for k in ("raw_gate", "output_gate")
                    },
                    "state_indices": torch.tensor([n], dtype=torch.int32),
                }
                wanted = run_reference(FUSED, plain | token)
                right = run_reference(FUSED, wide | token, torch.float64)
                if state is F32:
                    assert_within_budget(output[:, row].cpu(), wanted[:, 0], right[:, 0], f"{row}")
                else:
                    torch.testing.assert_close(
                        output[:, row].cpu(), wanted[:, 0], rtol=0.05, atol=0.02
                    )
    table = first["state_indices"].long()
    last = torch.stack([table[n, a - 1] for n, a in enumerate(accepted)])
    found = there["state"].cpu()[last].float()
    if state is F32:
        assert_within_budget(found, plain["state"], wide["state"], "states")
    else:
        torch.testing.assert_close(found, plain["state"], rtol=0.05, atol=0.02)


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_a_graph_s_replay_equals_the_eager_call_bitwise_and_follows_new_inputs(state, layout):
    fields = {"state_dtype": state, "scalars": {"state_layout": layout}}
    first = draw(CONTRACT, case(3, 4, 3, **fields))
    second = draw(CONTRACT, case(3, 4, 3, seed=7, **fields))
    second["query_start_loc"] = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    second["state_indices"][1] = -1
    third = clone(second)
    third["query_start_loc"] = torch.tensor([0, 0, 4, 12], dtype=torch.int32)
    third["state_indices"] = first["state_indices"].flip(0).contiguous()
    there, eager = on("cuda", first), on("cuda", first)
    output = moved(output_of(CONTRACT, first), "cuda")
    launch(CONTRACT, there, output)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(CONTRACT, there, output)
    for values in (there, eager):
        for name in ("state", "conv_state"):
            values[name].copy_(first[name])
    changing = ("x", "raw_gate", "raw_beta", "state_indices", "output_gate")
    for values in (first, second, third, second, first):
        for name in (*changing, "query_start_loc", "num_accepted_tokens"):
            there[name].copy_(values[name])
            eager[name].copy_(values[name])
        output.fill_(math.nan)
        graph.replay()
        expected = launch(CONTRACT, eager, torch.empty_like(output))
        assert_same_bits(output, expected, "output")
        for name in ("state", "conv_state"):
            assert_same_bits(there[name], eager[name], name)


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_slots_beyond_two_to_the_31_elements_are_reached(state, layout):
    scalars = {"state_layout": layout}
    small = draw(CONTRACT, case(1, 2, 1, state_dtype=state, scalars=scalars))
    small["state_indices"] = torch.tensor([[4, 3]], dtype=torch.int32)
    small["num_accepted_tokens"][:] = 2
    there = on("cuda", small)
    output = launch(CONTRACT, there, moved(output_of(CONTRACT, small), "cuda"))
    step = 2**29 + 64
    huge = torch.empty(4 * step + 128 * 128, dtype=state, device="cuda")
    pool = huge.as_strided((5, 1, 128, 128), (step, 128 * 128, 128, 1))
    pool.copy_(small["state"])
    wide = torch.empty(4 * step + 384 * 4, dtype=BF16, device="cuda")
    windows = wide.as_strided((5, 384, 4), (step, 1, 384))
    windows.copy_(small["conv_state"])
    pools = {"state": pool, "conv_state": windows}
    again = launch(CONTRACT, on("cuda", small) | pools, torch.empty_like(output))
    assert_same_bits(again, output, "output")
    assert_same_bits(pool.cpu(), there["state"].cpu(), "state")
    assert_same_bits(windows.cpu(), there["conv_state"].cpu(), "windows")


def test_sequences_without_a_row_and_calls_without_a_sequence_give_zeros():
    for sequences, rows in ((0, 3), (2, 5)):
        values = draw(CONTRACT, case(sequences, 2, 3, rows=rows))
        values["query_start_loc"].zero_()
        before = clone(values)
        output = run_on("cuda", CONTRACT, values)
        assert_same_bits(output, torch.zeros_like(output), "output")
        for name in ("state", "conv_state"):
            assert_same_bits(values[name], before[name], name)


def test_rows_behind_the_last_sequence_are_zero_however_many_there_are():
    values = draw(CONTRACT, case(3, 2, 5, rows=3000))
    step_off_ties(CONTRACT, values)
    values["x"][6:] = math.nan
    output = run_on("cuda", CONTRACT, values)
    assert_same_bits(output[0, 6:], torch.zeros_like(output[0, 6:]), "rows of nobody")
    assert output[0, :6].isfinite().all()

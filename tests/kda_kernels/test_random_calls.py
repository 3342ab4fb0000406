"""A few dozen random calls per operator: everything the contract promises of each of them.

Plain seeded randomness over layouts, types, indices and ragged lengths. Whatever a call must not
read is NaN before it: null rows, unlisted slots, padding, destinations that are no source.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, clone, draw, exact, run_reference
from kda_kernels.testing.compare import (
    assert_same_bits,
    assert_storage_untouched,
    assert_untouched,
    assert_within_budget,
)
from kda_kernels.testing.liveness import footprint
from kda_kernels.testing.ties import step_off_ties

NULLS = (-1, -(2**31), 2**31 - 1)
ROW_INPUTS = ("mixed_qkv", "x", "raw_gate", "raw_beta", "output_gate")


def random_case(operator, dice):
    tokens, count = dice.randint(1, 4), dice.randint(0, 3)
    rows = dice.randint(0, 4)
    sizes = {
        "B": rows,
        "N": count,
        "T": tokens,
        "R": dice.randint(0, count * tokens + 2),
        "H": dice.choice([1, 1, 2, 3, 5]),
        "S": max(rows, count * tokens) + dice.randint(1, 3),
        "L": dice.randint(3, 6),
    }
    sizes["S"] = max(sizes["S"], sizes["R"] + 1)
    optional = {"conv_bias", "t1_state_indices", "state_indices"}
    scalars = {
        "scale": dice.choice([None, 0.25]),
        "lower_bound": dice.choice([None, -5.0, -0.5]),
        "first_slot": dice.choice([None, 0, 1]),
        "state_layout": dice.choice(["vk", "kv"]),
    }
    if operator.name != "packed_decode":
        scalars["norm_eps"] = dice.choice([1e-5, 1e-2])
    return Case(
        sizes=sizes,
        activation=dice.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
        state_dtype=dice.choice([torch.float32, torch.bfloat16]),
        weight_dtype=torch.float32,
        parameter_dtype=dice.choice([torch.float32, torch.bfloat16]),
        index_dtype=dice.choice([torch.int32, torch.int64]),
        window=dice.choice(["SD", "DS"]),
        taps=dice.choice(["tap-major", "channel-major"]),
        spelling=dice.randint(0, 2),
        row_padding=dice.choice([0, 1, 8]),
        row_offset=dice.choice([0, 1, 3]),
        slot_padding=dice.choice([0, 8, 24]),
        absent=frozenset(name for name in optional if dice.random() < 0.5),
        scalars=scalars,
        seed=dice.randrange(2**31),
    )


def disturb_indices(values, dice):
    """Make some indices null, count some from the end, cut sequences short."""
    slots, first_slot = values["state"].shape[0], values["first_slot"]
    for name in ("state_indices", "t1_state_indices"):
        indices = values.get(name)
        if indices is None:
            continue
        flat = indices.view(-1)
        for i in range(flat.numel()):
            if dice.random() < 0.2:
                flat[i] = dice.choice([slots, 2**31 - 1, -(2**31), -slots - 1])
            elif first_slot is None and dice.random() < 0.5:
                flat[i] -= slots
    if "query_start_loc" in values:
        tokens, rows = values["state_indices"].shape[1], values["x"].shape[0]
        bounds = [0]
        for _ in values["num_accepted_tokens"]:
            bounds.append(min(bounds[-1] + dice.randint(0, tokens), rows))
        values["query_start_loc"] = torch.tensor(bounds, dtype=torch.int32)
        for n in range(len(bounds) - 1):
            values["num_accepted_tokens"][n] = dice.randint(-3, tokens + 3)


def poison(operator, values):
    """Fill what the call must not read with NaN."""
    print_of = footprint(operator, values)
    for name in ROW_INPUTS:
        if name in values:
            rows = values[name]
            axis = 1 if rows.dim() == 4 or (name == "raw_beta" and rows.dim() == 3) else 0
            for row in set(range(rows.shape[axis])) - set(print_of.read_rows):
                rows.select(axis, row).fill_(math.nan)
    for slot in set(range(values["state"].shape[0])) - set(print_of.source_slots):
        values["state"][slot] = math.nan
    if "conv_state" in values:
        for slot in set(range(values["state"].shape[0])) - set(print_of.window_slots):
            values["conv_state"][slot] = math.nan
    return print_of


def assert_promises_kept(operator, values, run):
    print_of = poison(operator, values)
    step_off_ties(operator, values)
    before, for_reference = clone(values), clone(values)
    exact_output, exact_state = exact(operator, values)
    reference_output = run_reference(operator, for_reference)
    output = run(operator, values)
    rows = output.transpose(0, 1) if output.shape[0] == 1 and "x" in values else output
    live = print_of.live_rows
    null = [row for row in range(rows.shape[0]) if row not in live]
    assert_same_bits(rows[null], torch.zeros_like(rows[null]), "null rows")
    what = operator.name
    assert_untouched(values["state"], before["state"], print_of.state_slots, "state")
    assert_storage_untouched(values["state"], before["state"], "state")
    if "conv_state" in values:
        window = values["conv_state"]
        assert_untouched(window, before["conv_state"], print_of.window_slots, "conv_state")
        assert_storage_untouched(window, before["conv_state"], "conv_state")
        assert_same_bits(window, for_reference["conv_state"], "windows")
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and name not in ("state", "conv_state"):
            assert_same_bits(value, before[name], f"{name}, which is only read")
    if live:
        reference_rows, exact_rows = (
            (t.transpose(0, 1) if rows is not output else t)[live]
            for t in (reference_output, exact_output)
        )
        assert_within_budget(rows[live], reference_rows, exact_rows, f"{what} output")
        slots = sorted(set(print_of.state_slots))
        assert_within_budget(
            values["state"][slots],
            for_reference["state"][slots],
            exact_state[slots],
            f"{what} state",
        )


@pytest.mark.parametrize("start", range(0, 48, 12))
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_every_promise_holds_for_random_calls(runners, contract, start):
    for seed in range(start, start + 12):
        dice = random.Random(f"{contract.name} {seed}")
        values = draw(contract, random_case(contract, dice))
        disturb_indices(values, dice)
        run = runners[["kernel", "operator", "kernel", "reference"][seed % 4]]
        try:
            assert_promises_kept(contract, values, run)
        except AssertionError as failure:
            raise AssertionError(f"draw {seed}: {failure}") from failure


def test_a_random_call_that_reads_poison_is_noticed(runners):
    # The test of the test: an implementation that ignores the null rule fails it.
    contract = CONTRACTS[0]
    values = draw(contract, replace(random_case(contract, random.Random(3)), absent=frozenset()))
    values["state_indices"] = torch.tensor([-1] * values["mixed_qkv"].shape[0])
    values["first_slot"] = 0

    def careless(operator, call):
        return runners["reference"](operator, call | {"state_indices": None})

    with pytest.raises(AssertionError):
        assert_promises_kept(contract, values, careless)

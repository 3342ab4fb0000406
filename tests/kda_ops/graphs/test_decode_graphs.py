"""DecodeGraphs: padded and replayed steps equal eager ones. N04, N05, N20, N27.

What only a GPU has (streams, memory, capture errors) is in test_decode_graphs_cuda.py, errors are
in test_decode_graphs_refusals.py.
"""

import math

import torch

import kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.compare import assert_same_bits
from kda_ops import DecodeGraphs

SPECULATIVE = CONTRACTS[2]


def test_calls_of_any_number_of_rows_equal_eager_steps_bit_for_bit(loop, device, operator):
    cache, twin = loop.random_cache(device), loop.random_cache(device)
    graphs, eager = (
        DecodeGraphs(loop.step_of(cache, operator), [4, 2]),
        loop.step_of(twin, operator),
    )
    for seed, slots in enumerate(loop.CALLS):
        rows, values = len(slots), loop.inputs(len(slots), seed, device)
        size = 2 if rows <= 2 else 4 if rows <= 4 else rows
        result = graphs(cache.indices(slots), *values)
        expected = loop.padded_eagerly(eager, size, twin.indices(slots), values)
        loop.assert_results_equal(result, expected)
        loop.assert_caches_equal(cache, twin)
    report = graphs.report
    assert report.padded_calls == {2: 4, 4: 3}
    assert report.eager_calls == 1
    assert report.captured == ((2, 4) if device == "cuda" else ())


def test_padding_changes_no_bit_of_a_row_on_cpu(loop, operator):
    cache, twin = loop.random_cache("cpu"), loop.random_cache("cpu")
    graphs, eager = DecodeGraphs(loop.step_of(cache, operator), [8]), loop.step_of(twin, operator)
    for seed, slots in enumerate(loop.CALLS):
        values = loop.inputs(len(slots), seed)
        with torch.no_grad():
            expected = eager(twin.indices(slots), *values)
        loop.assert_results_equal(graphs(cache.indices(slots), *values), expected)
    loop.assert_caches_equal(cache, twin)


def test_warm_up_and_capture_move_no_slot(loop, device, operator):
    cache, twin = loop.random_cache(device), loop.random_cache(device)
    graphs = DecodeGraphs(loop.step_of(cache, operator), [1, 3])
    graphs.capture(cache.indices([2, 5]), *loop.inputs(2, 0, device))
    loop.assert_caches_equal(cache, twin)
    assert graphs.report.padded_calls == {1: 0, 3: 0}
    graphs(cache.indices([5]), *loop.inputs(1, 1, device))
    untouched = [1, 2, 3, 4, 6, 7, 8]
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert_same_bits(layer.state[untouched].cpu(), other.state[untouched].cpu(), "state")
        assert not torch.equal(layer.state[5], other.state[5])


def test_n04_null_rows_with_nan_inputs_are_zero_and_disturb_nobody(loop, device, operator):
    cache, twin = loop.random_cache(device), loop.random_cache(device)
    graphs, eager = DecodeGraphs(loop.step_of(cache, operator), [4]), loop.step_of(twin, operator)
    values = loop.inputs(4, 0, device)
    for value in values:
        value[1:3] = math.nan
    slots = cache.indices([3, 5], 4)[[0, 2, 3, 1]]
    mine = graphs(slots, *values)
    assert not mine["o"][1:3].any()
    clean = loop.inputs(4, 0, device)
    with torch.no_grad():
        expected = eager(slots, *clean)
    live = [0, 3]
    assert_same_bits(mine["o"][live].cpu(), expected["o"][live].cpu(), "o")
    loop.assert_caches_equal(cache, twin)
    # Rows that become padding in a later call leave no NaN behind.
    again = graphs(cache.indices([7]), *loop.inputs(1, 1, device))
    expected = loop.padded_eagerly(eager, 4, twin.indices([7]), loop.inputs(1, 1, device))
    loop.assert_results_equal(again, expected)
    loop.assert_caches_equal(cache, twin)


def test_n20_replays_follow_new_slots_and_never_old_ones(loop, device, operator):
    cache = loop.random_cache(device)
    graphs = DecodeGraphs(loop.step_of(cache, operator), [4])
    graphs(cache.indices([1, 2, 3, 4]), *loop.inputs(4, 0, device))
    before = [pool.clone() for layer in cache.layers for pool in layer[:2]]
    graphs(cache.indices([8, 6]), *loop.inputs(2, 1, device))
    others = [0, 1, 2, 3, 4, 5, 7]
    after = [pool for layer in cache.layers for pool in layer[:2]]
    for pool, old in zip(after, before, strict=True):
        assert_same_bits(pool[others].cpu(), old[others].cpu(), "slots that are not listed")


def test_results_belong_to_the_caller(loop, device):
    cache = loop.random_cache(device)
    graphs = DecodeGraphs(loop.step_of(cache, "packed"), [2])
    first = graphs(cache.indices([1, 2]), *loop.inputs(2, 0, device))
    kept = {"o": first["o"].clone(), "x": [first["x"][0].clone()]}
    graphs(cache.indices([3, 4]), *loop.inputs(2, 1, device))
    loop.assert_results_equal(first, kept)


def test_padding_is_zero_and_null_whatever_earlier_calls_held(device):

    def sums_over_the_batch(slots, x):
        return slots.sum().expand(len(slots)), x.sum(0).expand(len(x), -1)

    graphs = DecodeGraphs(sums_over_the_batch, [2, 4], null_index=-7)
    for rows in (3, 4, 1, 2, 1):
        slots, x = torch.ones(rows).int().to(device), torch.full((rows, 2), 5.0, device=device)
        padding = (2 if rows <= 2 else 4) - rows
        of_slots, of_x = graphs(slots, x)
        assert of_slots.tolist() == [rows - 7 * padding] * rows
        assert of_x.tolist() == [[5.0 * rows] * 2] * rows


def test_two_models_share_one_cache(loop, device):
    cache, twin = loop.random_cache(device), loop.random_cache(device)
    mine = [DecodeGraphs(loop.step_of(cache, kind), [2, 4]) for kind in ("fused", "packed")]
    theirs = [loop.step_of(twin, kind) for kind in ("fused", "packed")]
    for seed, slots in enumerate(loop.CALLS[1:3] * 2):
        for graphs, eager in zip(mine, theirs, strict=True):
            values = loop.inputs(len(slots), seed, device)
            size = 2 if len(slots) <= 2 else 4
            result = graphs(cache.indices(slots), *values)
            expected = loop.padded_eagerly(eager, size, twin.indices(slots), values)
            loop.assert_results_equal(result, expected)
        loop.assert_caches_equal(cache, twin)


def test_n20_speculative_steps_follow_slots_lengths_and_accepted_counts(loop):
    """Tables [n, T] are padded too; sequence starts are computed inside the step."""
    tokens = 3
    drawn = draw(SPECULATIVE, Case({"R": 12, "N": 4, "T": tokens, "H": loop.HEADS, "S": 13}))
    del drawn["num_accepted_tokens"]

    def step_of(cache):
        def step(table, lengths, accepted, x):
            starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            # Ragged rows go to the front, in order; the rest is at or beyond the last start.
            place = torch.arange(tokens) < lengths[:, None]
            order = (~place).flatten().int().argsort(stable=True)
            rows = x.flatten(0, 1)[order]
            names = ("raw_gate", "raw_beta", "output_gate")
            values = drawn | {n: drawn[n][:, : len(rows)] for n in names} | {"x": rows}
            values |= {"state": cache.layers[0].state, "conv_state": cache.layers[0].window}
            values |= {"state_indices": table, "query_start_loc": starts}
            output = kda_ops.packed_fused_kda_decode(**values, num_accepted_tokens=accepted)
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            return output[0, back].view(len(table), tokens, -1)

        return step

    def call(n, seed):
        generator = torch.Generator().manual_seed(seed)
        table = (torch.randperm(12, generator=generator) + 1)[: n * tokens].view(n, tokens)
        counts = torch.randint(1, tokens + 1, (2, n), generator=generator).int()
        x = torch.randn(n, tokens, 3 * loop.HEADS * 128, generator=generator).bfloat16()
        return cache.indices(table.tolist()), counts[0], counts[1], x

    cache, twin = loop.random_cache("cpu", 13, tokens), loop.random_cache("cpu", 13, tokens)
    graphs, eager = DecodeGraphs(step_of(cache), [4]), step_of(twin)
    for seed, n in enumerate((3, 1, 4, 2)):
        values = call(n, seed)
        result, expected = graphs(*values), eager(*values)
        for row, length in enumerate(values[1].tolist()):
            assert_same_bits(result[row, :length], expected[row, :length], "output")
            assert not result[row, length:].any()
        loop.assert_caches_equal(cache, twin)


def test_a_compiled_step_of_plain_pytorch_is_served_and_pads_with_the_reserved_slot(loop, device):
    cache = loop.random_cache(device)
    twin = [layer.state.clone() for layer in cache.layers]

    def step(slots, x):
        for layer in cache.layers:
            state = layer.state[slots] * 0.5 + x[:, None, None, None]
            layer.state[slots] = state
            x = x + state.mean((1, 2, 3))
        return x

    graphs = DecodeGraphs(torch.compile(step, fullgraph=True), [4], null_index=0)
    for seed, slots in enumerate(([3, 5, 1], [2], [8, 7, 5, 3])):
        x = torch.randn(len(slots), generator=torch.Generator().manual_seed(seed)).to(device)
        result = graphs(cache.indices(slots), x)
        for state in twin:
            state[slots] = state[slots] * 0.5 + x[:, None, None, None]
            x = x + state[slots].mean((1, 2, 3))
        torch.testing.assert_close(result, x)
    for layer, state in zip(cache.layers, twin, strict=True):
        torch.testing.assert_close(layer.state[1:], state[1:])


def test_after_clear_new_shapes_are_captured(device):
    graphs = DecodeGraphs(lambda slots, x: x + 1, [2])
    slots = torch.tensor([1], device=device)
    assert graphs(slots, torch.zeros(1, 3, device=device)).shape == (1, 3)
    graphs.clear()
    assert graphs(slots, torch.zeros(1, 5, device=device)).shape == (1, 5)
    assert graphs.report.padded_calls == {2: 1}


def test_a_step_of_slots_alone_runs_where_the_slots_are(device):
    graphs = DecodeGraphs(lambda slots: slots * 2, [4])
    assert graphs(torch.tensor([3, 5], device=device)).tolist() == [6, 10]
    assert graphs.device.type == device


def test_inputs_may_come_from_the_host(loop, device):
    cache, twin = loop.random_cache(device), loop.random_cache(device)
    graphs = DecodeGraphs(loop.step_of(cache, "packed"), [4], device=device)
    eager = loop.step_of(twin, "packed")
    for seed, slots in enumerate(loop.CALLS):
        values = loop.inputs(len(slots), seed)
        there = [value.to(device) for value in values]
        size = max(4, len(slots))
        expected = loop.padded_eagerly(eager, size, twin.indices(slots), there)
        loop.assert_results_equal(graphs(cache.indices(slots).cpu(), *values), expected)
    loop.assert_caches_equal(cache, twin)

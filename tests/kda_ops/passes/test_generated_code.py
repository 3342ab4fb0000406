"""What Inductor makes of a rewritten graph: one call on the pool's own memory, and nothing else."""

import copy
import logging
import re

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics, counters
from torch._inductor.utils import run_and_get_code

import kda_ops

CALL = "torch.ops.kda.packed_decode.default("


class Stack(torch.nn.Module):
    """Layers with a pool each, the last one's pool given as an argument."""

    def __init__(self, step, layers, spelling):
        super().__init__()
        self.layers = torch.nn.ModuleList(step.StepLayer(spelling) for _ in range(layers))

    def forward(self, mixed, gate, beta, slots, pool=None):
        outputs = []
        for layer in self.layers:
            if pool is not None and layer is self.layers[-1]:
                layer.pool = pool
            outputs.append(layer(mixed, gate, beta, slots))
            mixed = mixed + outputs[-1].flatten(1).repeat(1, 3)
        return outputs


@pytest.fixture(scope="module")
def compiled(step):
    """Four layers compiled with backend="kda": results, pools, code and counters."""
    spelling = step.Spelling()
    eager = Stack(step, 4, spelling)
    model = copy.deepcopy(eager)
    x = step.inputs(spelling)
    torch._dynamo.reset()
    counters.clear()
    compilation_time_metrics.clear()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        expected = eager(*x)
        found, code = run_and_get_code(torch.compile(model, backend="kda"), *x)
    return {
        "outputs": list(zip(found, expected, strict=True)),
        "pools": [(m.pool, e.pool) for m, e in zip(model.layers, eager.layers, strict=True)],
        "code": "\n".join(code),
        "counters": dict(counters["kda"]),
        "seconds": {name: sum(spent) for name, spent in compilation_time_metrics.items()},
    }


def test_four_layers_are_four_matches(compiled):
    assert compiled["counters"]["matches"] == 4
    assert compiled["counters"]["matched kda::packed_decode"] == 4
    assert "refusals" not in compiled["counters"]


def test_the_pass_takes_at_most_a_twentieth_of_compiling_four_layers(compiled):
    seconds = compiled["seconds"]
    assert 0 < seconds["kda_ops.passes"] <= 0.05 * seconds["_compile.compile_inner"]


def test_compiled_layers_agree_with_eager_ones(compiled, step):
    for found, expected in compiled["outputs"]:
        step.compare(found, expected, 2**-6)
    for found, expected in compiled["pools"]:
        step.compare(found, expected, 2e-2)


def test_each_step_is_one_call_on_the_pools_own_pointer(compiled):
    calls = [line for line in compiled["code"].splitlines() if CALL in line]
    assert len(calls) == 4
    pools = [re.search(r"default\((.*)\)", call).group(1).split(", ")[5] for call in calls]
    assert len(set(pools)) == 4
    assert all(re.fullmatch(r"arg\d+_1", pool) for pool in pools)


def test_no_pool_is_allocated_copied_or_scattered(compiled):
    code = compiled["code"]
    assert "index_put" not in code
    assert not re.search(r"empty_strided\w*\(\(7, 2, 128, 128\)", code)
    assert not re.search(r"empty_strided\w*\(\(4, 2, 128, 128\)", code)


def test_a_pool_given_as_an_argument_is_updated_in_place(step):
    spelling = step.Spelling(gate=step.bounded_gate, recur=step.recur_vk)
    layer = step.StepLayer(spelling)

    def run(pool, *x):
        layer.pool = pool
        return step.StepLayer.forward(layer, *x)

    pool, x = layer.pool.clone(), step.inputs(spelling)
    with torch.no_grad():
        expected = layer(*x)
        updated = layer.pool.clone()
    report = kda_ops.explain(run, pool.clone(), *x)
    assert [f.operator for f in report.findings] == ["kda::packed_decode"]
    assert report.cloned_pools == []
    assert len(report.cuda_graph_skips) == 1
    assert "mark_state_static" in str(report)
    del expected, updated


def test_two_steps_on_one_pool_share_its_memory(step):
    spelling = step.Spelling()
    layer = step.StepLayer(spelling)

    def run(*x):
        return layer(*x), layer(*x)

    report = kda_ops.explain(run, *step.inputs(spelling))
    assert [f.operator for f in report.findings] == ["kda::packed_decode"] * 2
    assert report.cloned_pools == []


def test_a_sequence_of_batch_sizes_costs_four_graphs_and_stays_right(step):
    spelling = step.Spelling()
    eager = step.StepLayer(spelling)
    layer = copy.deepcopy(eager)
    torch._dynamo.reset()
    counters.clear()
    function = torch.compile(layer, backend="kda")
    # A graph that another test left in the cache would be no match here.
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        for number, rows in enumerate((4, 3, 1, 0, 2, 7)):
            x = step.inputs(spelling, rows, seed=number)
            found, expected = function(*x), eager(*x)
            assert found.shape == expected.shape
            if rows:
                step.compare(found, expected, 2**-6)
            step.compare(layer.pool, eager.pool, 1e-5)
    assert counters["stats"]["unique_graphs"] <= 4
    assert counters["kda"]["matches"] == 3
    assert counters["kda"]["refused NO_ROWS"] == 1


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 12, 16])
def test_every_head_count_gives_one_match_a_layer(step, heads):
    captured = step.check_step(step.Spelling(heads=heads, activation=torch.float32), rows=2)
    assert captured.matches == 1


def test_a_refusal_is_logged_and_counted_by_its_code(step, caplog):
    counters.clear()
    spelling = step.Spelling(scale_output=True, unit=lambda x: x)
    with caplog.at_level(logging.INFO, "kda_ops.passes"):
        step.capture(step.StepLayer(spelling), *step.inputs(spelling))
    assert counters["kda"]["refused NORM_MISSING"] == 1
    assert "not fused, NORM_MISSING" in caplog.text

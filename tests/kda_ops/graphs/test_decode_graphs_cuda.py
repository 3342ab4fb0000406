"""DecodeGraphs on a GPU: streams, memory, captures that cannot be. N19.

That replays equal eager steps is in test_decode_graphs.py.
"""

import subprocess
import sys
import threading
import warnings

import pytest
import torch

from kda_kernels.testing.compare import assert_same_bits
from kda_ops import DecodeGraphs
from kda_ops.passes.backend import kda

pytestmark = pytest.mark.gpu

_LONG = 200_000  # clock cycles that a stream sleeps before it writes an input


def output_of_process(program):
    run = [sys.executable, "-c", program]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout


def test_n19_replays_advance_the_pools_once_each_and_no_graph_is_empty(loop, operator):
    cache, twin = loop.random_cache("cuda"), loop.random_cache("cuda")
    graphs, eager = DecodeGraphs(loop.step_of(cache, operator), [2]), loop.step_of(twin, operator)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Gg]raph is empty")
        graphs.capture(cache.indices([2, 5]), *loop.inputs(2, 0, "cuda"))
    for seed in range(3):
        values = loop.inputs(2, seed, "cuda")
        expected = loop.padded_eagerly(eager, 2, twin.indices([2, 5]), values)
        loop.assert_results_equal(graphs(cache.indices([2, 5]), *values), expected)
        loop.assert_caches_equal(cache, twin)


def test_n19_a_hundred_calls_on_a_side_stream_see_what_that_stream_wrote(loop, operator):
    cache, twin = loop.random_cache("cuda"), loop.random_cache("cuda")
    graphs, eager = DecodeGraphs(loop.step_of(cache, operator), [4]), loop.step_of(twin, operator)
    slots = cache.indices([6, 1, 3])
    new = [loop.inputs(3, seed, "cuda") for seed in range(100)]
    expected = [loop.padded_eagerly(eager, 4, slots, values)["o"] for values in new]
    graphs.capture(slots, *new[0])
    x, gate, beta = (torch.zeros_like(value) for value in new[0])
    torch.cuda.synchronize()
    side, results = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        for values in new:
            torch.cuda._sleep(_LONG)
            for buffer, value in zip((x, gate, beta), values, strict=True):
                buffer.copy_(value)
            results.append(graphs(slots, x, gate, beta)["o"])
    side.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result.cpu(), wanted.cpu(), "output")
    loop.assert_caches_equal(cache, twin)


def test_calls_that_alternate_between_streams_run_one_after_the_other(loop, operator):
    cache, twin = loop.random_cache("cuda"), loop.random_cache("cuda")
    graphs, eager = (
        DecodeGraphs(loop.step_of(cache, operator), [2, 4]),
        loop.step_of(twin, operator),
    )
    calls = [[6, 1, 3], [2], [1, 2, 3, 4, 5], [7, 6], [5, 4, 3, 2]] * 20
    new = [loop.inputs(len(slots), seed, "cuda") for seed, slots in enumerate(calls)]
    indices = [cache.indices(slots) for slots in calls]
    sizes = [2 if len(slots) <= 2 else 4 if len(slots) <= 4 else len(slots) for slots in calls]
    expected = [
        loop.padded_eagerly(eager, size, index, values)["o"]
        for size, index, values in zip(sizes, indices, new, strict=True)
    ]
    graphs.capture(indices[0], *new[0])
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for number, (index, values) in enumerate(zip(indices, new, strict=True)):
        with torch.cuda.stream(streams[number % 3]):
            if number % 2:
                torch.cuda._sleep(_LONG)
            results.append(graphs(index, *values)["o"])
    torch.cuda.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result.cpu(), wanted.cpu(), "output")
    loop.assert_caches_equal(cache, twin)


def test_calls_from_several_threads_run_one_after_the_other(loop):
    """The order of threads is open; each works on a slot of its own, so results are not."""
    cache, twin = loop.random_cache("cuda"), loop.random_cache("cuda")
    step, eager = loop.step_of(cache, "packed"), loop.step_of(twin, "packed")
    graphs, results = DecodeGraphs(step, [1]), {}
    graphs.capture(cache.indices([1]), *loop.inputs(1, 0, "cuda"))

    def work(slot):
        with torch.cuda.stream(torch.cuda.Stream()):
            index, values = cache.indices([slot]), loop.inputs(1, slot, "cuda")
            results[slot] = [graphs(index, *values)["o"] for _ in range(20)]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(slot,)) for slot in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for slot in (1, 2, 3, 4):
        index, values = twin.indices([slot]), loop.inputs(1, slot, "cuda")
        for result in results[slot]:
            expected = loop.padded_eagerly(eager, 1, index, values)["o"]
            assert_same_bits(result.cpu(), expected.cpu(), f"slot {slot}")


def test_ten_thousand_replays_hold_no_more_memory_than_ten(loop, operator):
    cache = loop.random_cache("cuda")
    graphs = DecodeGraphs(loop.step_of(cache, operator), [4, 2])
    calls = [(cache.indices(s), loop.inputs(len(s), 0, "cuda")) for s in ([1, 2, 3], [4, 5])]

    def held():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    for number in range(10_000):
        index, values = calls[number % 2]
        graphs(index, *values)
        if number == 10:
            start = held()
    assert held() == start
    assert graphs.report.padded_calls == {2: 5000, 4: 5000}


def test_graphs_share_one_pool_and_say_how_large_it_is(loop, operator):
    cache = loop.random_cache("cuda")
    one, three = (DecodeGraphs(loop.step_of(cache, operator), s) for s in ([512], [512, 256, 1]))
    for graphs in (one, three):
        graphs.capture(cache.indices([1]), *loop.inputs(1, 0, "cuda"))
    assert three.report.captured == (1, 256, 512)
    assert 0 < one.report.pool_bytes <= three.report.pool_bytes < 3 * one.report.pool_bytes
    rows = [value.nbytes for value in loop.inputs(512, 0)]
    assert one.report.input_bytes == three.report.input_bytes == 512 * 4 + sum(rows)


def test_a_compiled_step_is_captured_and_equals_its_eager_calls(loop, operator):
    cache, twin = loop.random_cache("cuda"), loop.random_cache("cuda")
    step = torch.compile(loop.step_of(cache, operator), fullgraph=True, backend=kda)
    other = torch.compile(loop.step_of(twin, operator), fullgraph=True, backend=kda)
    graphs = DecodeGraphs(step, [4, 2])
    for seed, slots in enumerate(loop.CALLS[:4]):
        size, values = (2 if len(slots) <= 2 else 4), loop.inputs(len(slots), seed, "cuda")
        expected = loop.padded_eagerly(other, size, twin.indices(slots), values)
        loop.assert_results_equal(graphs(cache.indices(slots), *values), expected)
        loop.assert_caches_equal(cache, twin)
    assert graphs.report.captured == (2, 4)


def test_a_step_that_reads_values_on_the_host_is_explained_and_nothing_is_kept():
    """In a process of its own: torch's allocator does not get over a capture that broke off."""
    program = (
        "import torch, kda_ops\n"
        "graphs = kda_ops.DecodeGraphs(lambda slots, x: x * float(x.sum()), [2])\n"
        "slots, x = torch.ones(2, device='cuda').int(), torch.ones(2, 3, device='cuda')\n"
        "for act in (lambda: graphs(slots, x), lambda: graphs.report):\n"
        "    try: act()\n"
        "    except RuntimeError as error: print('refused:', error)\n"
    )
    printed = output_of_process(program)
    assert "refused: DecodeGraphs: the step cannot be captured for 2 rows" in printed
    assert "a captured step may not read values on the host" in printed
    assert "refused: DecodeGraphs: nothing has been captured yet" in printed


def test_calls_inside_somebody_elses_capture_are_refused(loop):
    graphs = DecodeGraphs(lambda slots, x: x * 2, [2])
    slots, x = torch.tensor([1, 2], device="cuda"), torch.ones(2, 3, device="cuda")
    for capture_first in (False, True):
        if capture_first:
            graphs(slots, x)
        with pytest.raises(RuntimeError, match="cannot be called while a graph is captured"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                graphs(slots, x)
        torch.cuda.synchronize()
    assert graphs(slots, x).tolist() == [[2.0] * 3] * 2


def test_a_fresh_process_that_captures_without_a_warm_up_gets_a_clear_error():
    program = (
        "import torch, kda_ops\n"
        "cache = kda_ops.StateCache(kda_ops.StateSpec(1, 2), 4, 'cuda')\n"
        "x = [torch.zeros(2, n, device='cuda').bfloat16() for n in (768, 256, 2)]\n"
        "fixed = [torch.zeros(n, device='cuda') for n in (2, 256)]\n"
        "slots = cache.indices(cache.allocate(2))\n"
        "try:\n"
        "    with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "        kda_ops.packed_kda_decode(*x, *fixed, cache.layers[0].state, slots)\n"
        "except kda_ops.UnsupportedError as error:\n"
        "    print('refused:', error)\n"
        "def step(slots, *x):\n"
        "    state = cache.layers[0].state\n"
        "    return kda_ops.packed_kda_decode(*x, *fixed, state, slots)\n"
        "print('helper:', kda_ops.DecodeGraphs(step, [2])(slots, *x).shape)\n"
    )
    printed = output_of_process(program)
    assert "call the operator once outside of the capture" in printed
    assert "helper: torch.Size([2, 1, 2, 128])" in printed


@pytest.mark.multigpu
def test_a_device_that_is_not_current_is_served_and_the_current_one_stays(loop, operator):
    cache, twin = loop.random_cache("cuda:1"), loop.random_cache("cuda:1")
    graphs, eager = DecodeGraphs(loop.step_of(cache, operator), [2]), loop.step_of(twin, operator)
    with torch.cuda.device(0):
        values = loop.inputs(2, 0, "cuda:1")
        result = graphs(cache.indices([1, 2]), *values)
        assert torch.cuda.current_device() == 0
    expected = loop.padded_eagerly(eager, 2, twin.indices([1, 2]), values)
    loop.assert_results_equal(result, expected)

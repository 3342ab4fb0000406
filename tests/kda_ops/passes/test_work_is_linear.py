"""The pass does as much for each layer of a large graph as for one of a small graph."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import kda_ops.passes
from kda_ops.passes import rewrite_graph

HEADS, WIDTH = 2, 256
PASS = str(Path(kda_ops.passes.__file__).parent)


@contextmanager
def bytecodes():
    """Count the bytecodes that the pass's own code executes: work, not seconds."""
    count, before = [0], sys.gettrace()

    def inside(frame, event, _):
        count[0] += event == "opcode"
        return inside

    def entered(frame, *_):
        if not frame.f_code.co_filename.startswith(PASS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    sys.settrace(entered)
    try:
        yield count
    finally:
        sys.settrace(before)


def layers_in_a_row(step, number, stacked):
    """Return the graph of layers with projections around a step, each with a pool of its own.

    The pools are graph inputs, or all of them one input.
    """

    def run(h, slots, rate, bias, pools, *weights):
        for layer, (inner, outer) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
            mixed, gate, beta = (h @ inner).split([3 * WIDTH, WIDTH, HEADS], -1)
            q, k, v = step.split_chunk(mixed, HEADS)
            q, k = step.unit_rsqrt(q) * 128**-0.5, step.unit_rsqrt(k)
            a = gate.view(-1, HEADS, 128) + bias.view(HEADS, 128)
            d = step.softplus_gate(a, rate.exp()[:, None]).exp()
            o, state = step.recur_kv(pools[layer][slots], q, k, v, d, step.sigmoid(beta))
            pools[layer][slots] = state
            h = h + o.flatten(1) @ outer
        return h

    pools = torch.randn(number, 7, HEADS, 128, 128)
    shapes = [(WIDTH, 4 * WIDTH + HEADS), (WIDTH, WIDTH)] * number
    inputs = (
        torch.randn(4, WIDTH),
        torch.arange(4),
        torch.randn(HEADS),
        torch.randn(WIDTH),
        pools if stacked else list(pools.clone().unbind()),
        *(torch.randn(shape) for shape in shapes),
    )
    functional = torch.func.functionalize(run, remove="mutations")
    with torch.no_grad():
        module = make_fx(
            functional, decomposition_table=select_decomp_table(), tracing_mode="fake"
        )(*inputs)
    module.graph.eliminate_dead_code()
    return module.graph


def work(step, number, stacked):
    graph = layers_in_a_row(step, number, stacked)
    with bytecodes() as count:
        findings = rewrite_graph(graph)
    assert [finding.operator for finding in findings] == ["kda::packed_decode"] * number
    return count[0]


@pytest.mark.parametrize("stacked", [False, True], ids=["a pool a layer", "one stack of pools"])
def test_work_grows_at_most_linearly_with_the_number_of_layers(step, stacked):
    work(step, 1, stacked)  # the certificate, which layers that are written alike share
    one, four, sixteen = (work(step, number, stacked) for number in (1, 4, 16))
    layer = (four - one) / 3
    assert layer > 10_000
    assert four <= 4.4 * one
    assert (sixteen - four) / 12 <= 1.1 * layer

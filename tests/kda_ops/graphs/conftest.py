"""Decode steps whose rows are independent bit for bit, caches to run them on, and comparisons.

The fixture ``loop`` holds the names of this file. ``device`` makes a test run on CPU, where a
padded step is eager, and on CUDA, where it is a graph.
"""

from types import SimpleNamespace

import pytest
import torch

import kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.device import on
from kda_ops import StateCache, StateSpec

FUSED = CONTRACTS[1]
HEADS = 2


@pytest.fixture(params=["packed", "fused"])
def operator(request):
    return request.param


def random_cache(device, slots=9, tokens=1, seed=0):
    """A cache of random contents with every slot in use."""
    generator = torch.Generator().manual_seed(seed)
    cache = StateCache(StateSpec(2, HEADS, tokens=tokens), slots, device)
    cache.allocate(cache.free)
    for layer in cache.layers:
        for pool in layer[:2]:
            pool.copy_(torch.randn(pool.shape, generator=generator))
    return cache


def step_of(cache, operator):
    """A decode step of two layers without matrix products, whose rows are independent bitwise."""
    drawn = draw(FUSED, Case({"B": 1, "H": HEADS, "S": 2, "L": 3}))
    fixed = ("weight", "A_log", "dt_bias", "norm_weight")
    weight, a_log, bias, norm = (on(str(cache.device), drawn)[name] for name in fixed)

    def step(slots, x, gate, beta):
        for state, window, _ in cache.layers:
            if operator == "packed":
                o = kda_ops.packed_kda_decode(x, gate, beta, a_log, bias, state, slots)[:, 0]
            else:
                rows = gate.view(-1, HEADS, 128)
                o = kda_ops.fused_kda_decode(
                    x, weight, window, rows, beta[None], a_log, bias, slots, state, rows, norm
                )[0]
            x = x + o.flatten(1).repeat(1, 3)
        return {"o": o, "x": [x]}

    return step


def inputs(rows, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, 3 * HEADS * 128), (rows, HEADS * 128), (rows, HEADS)]
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [value.to(device) for value in drawn]


def padded_eagerly(step, size, slots, values):
    """What the step returns for these rows padded to ``size``, without DecodeGraphs."""
    rows = len(slots)
    more = [torch.cat([v, v.new_zeros(size - rows, *v.shape[1:])]) for v in (slots, *values)]
    more[0][rows:] = -1
    with torch.no_grad():
        result = step(*more)
    return {"o": result["o"][:rows], "x": [result["x"][0][:rows]]}


def assert_results_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert_same_bits(mine["o"].cpu(), theirs["o"].cpu(), "o")
    assert_same_bits(mine["x"][0].cpu(), theirs["x"][0].cpu(), "x")


def assert_caches_equal(mine, theirs):
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        assert_same_bits(layer.state.cpu(), other.state.cpu(), "state")
        assert_same_bits(layer.window.cpu(), other.window.cpu(), "window")


CALLS = [[3], [8, 1, 5, 2], [4, 7], [], [1, 2, 3, 4, 5], [6, 2, 8], [2], [5, 4, 3, 2]]


@pytest.fixture(scope="session")
def loop():
    """The names of this file, for tests that cannot import it."""
    return SimpleNamespace(**globals())

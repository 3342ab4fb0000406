"""mode="reduce-overhead": which pools are captured, and one advance of the state a call. N21, N23.

On CPU torch makes no graphs; there the tests look at what explain says of each kind of pool. The
tests on CUDA turn every skip of a graph into an error.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.device import on
from kda_ops import StateCache, StateSpec, doctor, mark_state_static

PACKED, FUSED = CONTRACTS[:2]
HEADS, SLOTS, ROWS = 2, 6, 3
SLOTS_OF_CALLS = ([1, 2, 3], [5, 4, 1], [2, 0, 0], [3, 5, 0], [1, 2, 3], [4, 0, 0])


@contextlib.contextmanager
def no_caches():
    """Compile in earnest: a hit in a cache would skip the pass and its counters."""
    with inductor_config.patch(fx_graph_cache=False):
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield


def unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class Plain(torch.nn.Module):
    """A step that knows nothing of this package: [slot, head, key, value], padding on slot 0."""

    operator, padding, layout = "packed_decode", 0, "kv"

    def __init__(self):
        super().__init__()
        self.register_buffer("A_log", torch.zeros(HEADS))
        self.register_buffer("dt_bias", torch.zeros(HEADS * 128))

    def forward(self, state, window, slots, qkv, gate, beta):
        q, k, v = (part.view(-1, HEADS, 128) for part in qkv.float().chunk(3, dim=-1))
        q, k = unit(q) * 128**-0.5, unit(k)
        a = (gate.float() + self.dt_bias).view(-1, HEADS, 128)
        S = state[slots] * torch.exp(-self.A_log.exp()[:, None] * F.softplus(a))[..., None]
        u = torch.sigmoid(beta.float())[..., None] * (v - (S * k[..., None]).sum(-2))
        S = S + k[..., None] * u[..., None, :]
        state[slots] = S
        return (S * q[..., None]).sum(-2)


class Operator(torch.nn.Module):
    """A step that calls the operator itself: null rows, both pools."""

    operator, padding, layout = "fused_decode", -1, "vk"

    def __init__(self):
        super().__init__()
        drawn = draw(FUSED, Case({"B": 1, "H": HEADS, "S": 2, "L": 3}))
        for name in ("weight", "A_log", "dt_bias", "norm_weight"):
            self.register_buffer(name, drawn[name])

    def forward(self, state, window, slots, qkv, gate, beta):
        rows = gate.view(-1, HEADS, 128)
        pools = (slots, state, rows, self.norm_weight)
        return kda_ops.fused_kda_decode(
            qkv, self.weight, window, rows, beta[None], self.A_log, self.dt_bias, *pools
        )[0]


class WithBuffers(torch.nn.Module):
    """A step and its pools as buffers."""

    def __init__(self, step, state, window):
        super().__init__()
        self.step = step
        self.register_buffer("state", state)
        self.register_buffer("window", window)

    def forward(self, *row_inputs):
        return self.step(self.state, self.window, *row_inputs)


def random_cache(device, layout):
    cache = StateCache(StateSpec(1, HEADS, state_layout=layout), SLOTS, device)
    generator = torch.Generator().manual_seed(0)
    for pool in cache.layers[0][:2]:
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return cache


def row_inputs(call, padding, device):
    drawn = draw(PACKED, Case({"B": ROWS, "H": HEADS, "S": SLOTS}, seed=call))
    slots = [slot or padding for slot in SLOTS_OF_CALLS[call]]
    values = {"slots": torch.tensor(slots, dtype=torch.int32)}
    values |= {name: drawn[name] for name in ("mixed_qkv", "raw_gate", "raw_beta")}
    return list(on(device, values).values())


def bound(kind, step, cache):
    """The step with its pools: buffers, marked tensors, those of a cache, or plain arguments."""
    if kind == "cache":
        return step, cache.layers[0][:2]
    state, window = (pool.clone() for pool in cache.layers[0][:2])
    if kind == "buffers":
        module = WithBuffers(step, state, window)
        return module, (module.state, module.window)
    if kind == "marked":
        mark_state_static(state, window)
    return step, (state, window)


def runs(kind, step, cache, mode, device):
    """Six calls of the compiled step: outputs of live rows, and the pools behind them."""
    torch._dynamo.reset()
    counters.clear()
    function, pools = bound(kind, step, cache)
    compiled, outputs = torch.compile(function, fullgraph=True, mode=mode), []
    with torch.no_grad(), kda_ops.enabled(), no_caches():
        for call, slots in enumerate(SLOTS_OF_CALLS):
            values = row_inputs(call, step.padding, device)
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(*(() if kind == "buffers" else pools), *values)
            outputs.append(result[: sum(slot > 0 for slot in slots)].clone())
    return outputs, [pool[1:].clone() for pool in pools]


def assert_runs_equal(mine, theirs):
    for outputs, others in zip(mine, theirs, strict=True):
        for call, (a, b) in enumerate(zip(outputs, others, strict=True)):
            assert_same_bits(a.cpu(), b.cpu(), f"tensor {call}")


@pytest.fixture
def recordings(monkeypatch):
    """Every recording of a CUDA graph by torch.compile."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    seen, record = [], CUDAGraphTreeManager.record_function

    def counted(self, *arguments):
        seen.append(arguments[-1])
        return record(self, *arguments)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", counted)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["buffers", "marked", "cache"])
@pytest.mark.parametrize("spelling", [Plain, Operator])
def test_pools_at_fixed_addresses_are_captured_and_advance_once_a_call(spelling, kind, recordings):
    step = spelling().cuda()
    expected = runs("plain", step, random_cache("cuda", step.layout), None, "cuda")
    with inductor_config.patch({"triton.cudagraph_or_error": True}):
        cache = random_cache("cuda", step.layout)
        captured = runs(kind, step, cache, "reduce-overhead", "cuda")
    assert_runs_equal(captured, expected)
    found = counters["inductor"]
    assert (found["cudagraph_skips"], found["cudagraph_partitions"]) == (0, 0)
    # One call warms up, one records, four replay; slots and activations are copied in.
    assert len(recordings) == 1
    assert found["cudagraph_recorded_non_static_inputs"] == 4
    if spelling is Plain:
        assert counters["kda"]["matches"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("spelling", [Plain, Operator])
def test_a_pool_that_is_a_plain_argument_is_right_and_not_captured(spelling, recordings):
    step = spelling().cuda()
    cache = random_cache("cuda", step.layout)
    expected = runs("plain", step, cache, None, "cuda")
    mine = runs("plain", step, cache, "reduce-overhead", "cuda")
    assert_runs_equal(mine, expected)
    assert counters["inductor"]["cudagraph_skips"] >= 1
    assert not recordings


def test_on_cpu_the_state_advances_once_a_call_too():
    step = Plain()
    mine = runs("buffers", step, random_cache("cpu", "kv"), "reduce-overhead", "cpu")
    outputs, (state, _) = mine
    cache = random_cache("cpu", "kv")
    for call, (slots, output) in enumerate(zip(SLOTS_OF_CALLS, outputs, strict=True)):
        with torch.no_grad():
            eager = step(*cache.layers[0][:2], *row_inputs(call, 0, "cpu"))
        torch.testing.assert_close(output, eager[: sum(slot > 0 for slot in slots)])
    torch.testing.assert_close(state, cache.layers[0].state[1:])


@pytest.fixture(scope="module")
def report():
    """What explain says of a pool of every kind; the number of slots tells them apart."""
    module, cache = torch.nn.Module(), StateCache(StateSpec(1, 1, page_bytes=67840 + 64), 7)
    module.register_buffer("pool", torch.zeros(3, 1, 128, 128))
    stacked = torch.zeros(2, 4, 1, 128, 128)
    mark_state_static(stacked)
    view = torch.zeros(2, 5, 1, 128, 128)[1]
    mark_state_static(view)
    drawn = draw(PACKED, Case({"B": 2, "H": 1, "S": 8}))
    values = [drawn[name] for name in PACKED_ROWS]

    def step(plain, view_of_marked, marked_view, page, *values):
        for pool in (plain, view_of_marked, marked_view, page, module.pool):
            kda_ops.packed_kda_decode(*values[:5], pool, values[5])
        return values[0] * 2

    plain = torch.zeros(8, 1, 128, 128)
    return kda_ops.explain(step, plain, stacked[1], view, cache.layers[0].state, *values)


PACKED_ROWS = ("mixed_qkv", "raw_gate", "raw_beta", "A_log", "dt_bias", "state_indices")


def test_explain_names_the_pools_that_are_not_at_fixed_addresses(report):
    shapes = sorted(name.split(" ", 1)[1] for name in report.cuda_graph_skips)
    assert shapes == ["[4, 1, 128, 128]", "[8, 1, 128, 128]"]


def test_explain_says_what_to_write_instead(report):
    text = str(report)
    assert "CUDA graphs: skipped (mutated inputs)" in text
    assert "a buffer of the module" in text
    assert "kda_ops.StateCache" in text
    assert "kda_ops.mark_state_static on the very tensor that you pass" in text


def test_the_doctor_says_which_pools_are_captured_where_there_is_a_gpu(monkeypatch):
    gpu = SimpleNamespace(name="a GPU", major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    text = doctor.report([doctor._cuda("CUDA")])
    assert "a GPU (sm_90)" in text
    for words in ("'mutated inputs'", "buffers", "StateCache", "mark_state_static"):
        assert words in text

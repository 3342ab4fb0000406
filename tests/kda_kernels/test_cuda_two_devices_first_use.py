"""Two GPUs in one process that has used neither: one compile, one load, serve both.

Each test runs a process of its own, because what is asked is what a fresh one does.
"""

import pytest

from kda_kernels import artifacts
from kda_kernels.testing.process import report_of

pytestmark = pytest.mark.multigpu

COMMON = """
import hashlib, json, sys
import torch, tvm_ffi
import kda_ops
from kda_kernels._cute import compile as backend

rows, heads = 3, 4
facts = {"compiled": 0, "loaded": 0}

def counted(name, function):
    def count(*arguments, **keywords):
        facts[name] += 1
        return function(*arguments, **keywords)
    return count

backend.compile_variant = counted("compiled", backend.compile_variant)
tvm_ffi.load_module = counted("loaded", tvm_ffi.load_module)

def inputs(device):
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=make)
    return [
        *(draw(rows, n).bfloat16().to(device) for n in (3 * heads * 128, heads * 128, heads)),
        draw(heads).to(device), draw(heads * 128).to(device),
        draw(rows + 2, heads, 128, 128).to(device),
        torch.tensor([4, -1, 0], dtype=torch.int32, device=device),
    ]

def digest(device, *tensors):
    torch.cuda.synchronize(device)
    raw = b"".join(t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in tensors)
    return hashlib.sha256(raw).hexdigest()

def held():
    return [torch.cuda.memory_allocated(n) for n in (0, 1)]
"""
BOTH = """
facts["results"], facts["current"] = [], []
for device in (int(name) for name in sys.argv[1]):
    values = inputs(device)
    facts["results"].append(digest(device, kda_ops.packed_kda_decode(*values), values[5]))
    facts["current"].append(torch.cuda.current_device())
print(json.dumps(facts))
"""
WARMED = """
for device in (0, 1):
    torch.zeros(1, device=device)
before = held()
warmed = kda_ops.warmup("packed_decode", heads=heads, rows=rows, device="cuda:0")
facts["left"] = [now - then for now, then in zip(held(), before)]
values = inputs(1)
output = torch.zeros(rows, 1, heads, 128, dtype=torch.bfloat16, device=1)
torch.cuda.synchronize(1)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
    kda_ops.packed_kda_decode(*values, output)
facts["current"] = [torch.cuda.current_device()]
graph.replay()
facts["results"] = [digest(1, output, values[5])]
print(json.dumps(facts))
"""
WARMED_ELSEWHERE = """
for device in (0, 1):
    torch.zeros(1, device=device)
before = held()
kda_ops.warmup("packed_decode", heads=heads, rows=rows, device="cuda:1")
facts["left"] = [now - then for now, then in zip(held(), before)]
facts["current"] = [torch.cuda.current_device()]
print(json.dumps(facts))
"""


def run(code, *arguments, **environment):
    """What a fresh process reports."""
    return report_of(COMMON + code, *arguments, **environment)


@pytest.fixture(scope="module")
def expected():
    """What a call gives in a process that uses the first device alone."""
    return run(BOTH, "0", KDA_BUNDLE=None, CUDA_VISIBLE_DEVICES="0")["results"][0]


@pytest.mark.parametrize("order", ["10", "01", "1"])
def test_one_compile_and_one_load_serve_both_devices_whichever_comes_first(
    order, expected, tmp_path
):
    cache = {artifacts.ENVIRONMENT_VARIABLE: str(tmp_path / "cache"), "KDA_BUNDLE": None}
    for compiled in (1, 0):  # the second process finds the object in the cache
        facts = run(BOTH, order, **cache)
        assert facts["results"] == [expected] * len(order)
        assert facts["current"] == [0] * len(order)
        assert (facts["compiled"], facts["loaded"]) == (compiled, 1)


@pytest.mark.parametrize("order", ["10", "01", "1"])
def test_a_bundle_is_loaded_once_for_both_devices_and_nothing_compiles(
    order, bundle, expected, tmp_path
):
    cache = {artifacts.ENVIRONMENT_VARIABLE: str(tmp_path / "cache"), "KDA_BUNDLE": str(bundle)}
    facts = run(BOTH, order, **cache)
    assert facts["results"] == [expected] * len(order)
    assert facts["current"] == [0] * len(order)
    assert (facts["compiled"], facts["loaded"]) == (0, 1)
    assert not (tmp_path / "cache").exists()


def test_after_a_warm_up_on_one_device_a_captured_first_call_on_the_other_is_right(expected):
    facts = run(WARMED)
    assert facts["results"] == [expected]
    assert facts["left"] == [0, 0] and facts["current"] == [0]


def test_a_warm_up_of_the_second_device_leaves_nothing_behind_and_the_first_current():
    facts = run(WARMED_ELSEWHERE)
    assert facts["left"] == [0, 0] and facts["current"] == [0]

"""First calls on a GPU: captured after a warm-up, or without one; from a bundle without CuTe DSL.

Each runs a process of its own, because what is asked is what a fresh one does.
"""

import pytest

import kda_ops
from kda_kernels import artifacts
from kda_kernels.testing.process import WITHOUT_CUTE_DSL, report_of

pytestmark = pytest.mark.gpu

COMMON = """
import hashlib, json, os, sys
import torch, kda_ops
from kda_kernels._cute import compile as backend

rows, heads = 3, 4

def inputs(seed=0):
    make = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, device="cuda", generator=make)
    return [
        *(draw(rows, n).bfloat16() for n in (3 * heads * 128, heads * 128, heads)),
        draw(heads), draw(heads * 128), draw(rows + 2, heads, 128, 128),
        torch.tensor([4, -1, 0], dtype=torch.int32, device="cuda"),
    ]

def digest(*tensors):
    torch.cuda.synchronize()
    raw = b"".join(t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in tensors)
    return hashlib.sha256(raw).hexdigest()

facts = {}
"""
EAGER = """
values = inputs()
facts["result"] = digest(kda_ops.packed_kda_decode(*values), values[5])
facts["cutlass"] = any(name.split(".")[0] == "cutlass" for name in sys.modules)
print(json.dumps(facts))
"""
CAPTURED = """
values, output = inputs(), torch.zeros(rows, 1, heads, 128, dtype=torch.bfloat16, device="cuda")
before = values[5].clone()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        kda_ops.packed_kda_decode(*values, output)
except kda_ops.UnsupportedError as error:
    facts["error"] = str(error)
torch.cuda.synchronize()
facts["untouched"] = bool(torch.equal(values[5], before))
if "error" not in facts:
    graph.replay()
    facts["result"] = digest(output, values[5])
print(json.dumps(facts))
"""
WARM = """
torch.zeros(1, device="cuda")
allocated = torch.cuda.memory_allocated()
facts["warmed"] = [one.built for one in kda_ops.warmup(
    "packed_decode", heads=heads, rows=rows, device="cuda")]
facts["left"] = torch.cuda.memory_allocated() - allocated
"""
WARM_BY_FUNCTION = """
values = inputs()
before = values[5].clone()
facts["warmed"] = [one.built for one in kda_ops.warmup(kda_ops.packed_kda_decode, *values)]
facts["left"] = 0 if torch.equal(values[5], before) else 1
"""


def run(code, **environment):
    """What a fresh process reports."""
    return report_of(COMMON + code, **environment)


@pytest.fixture(scope="module")
def expected():
    """What an eager call gives whose kernel is compiled just in time."""
    return run(EAGER, KDA_BUNDLE=None)["result"]


def test_a_bundle_serves_where_cute_dsl_cannot_be_imported_and_nothing_links(
    bundle, expected, tmp_path
):
    empty = {"KDA_CACHE_DIR": str(tmp_path / "cache"), "PATH": str(tmp_path), "CC": ""}
    facts = run(WITHOUT_CUTE_DSL + EAGER, KDA_BUNDLE=str(bundle), **empty)
    assert facts == {"result": expected, "cutlass": False}
    assert not (tmp_path / "cache").exists()


def test_what_a_bundle_lacks_is_named_where_cute_dsl_cannot_be_imported(bundle, tmp_path):
    code = """
values = inputs()
try:
    kda_ops.packed_kda_decode(*values, lower_bound=None)
except kda_ops.UnsupportedError as error:
    facts["error"] = str(error)
print(json.dumps(facts))
"""
    facts = run(
        WITHOUT_CUTE_DSL + code,
        KDA_BUNDLE=str(bundle),
        KDA_CACHE_DIR=str(tmp_path),
        PATH=str(tmp_path),
    )
    assert "softplus=True" in facts["error"]
    assert "kda_ops.warmup('packed_decode', ..., arch=" in facts["error"]


@pytest.mark.parametrize("warm", [WARM, WARM_BY_FUNCTION], ids=["described", "by function"])
def test_after_a_warm_up_the_first_call_may_be_captured(warm, expected, tmp_path):
    cache = {artifacts.ENVIRONMENT_VARIABLE: str(tmp_path / "cache"), "KDA_BUNDLE": None}
    for built in (True, False):  # the second process finds the object in the cache
        facts = run(warm + CAPTURED, **cache)
        assert facts == {"warmed": [built], "left": 0, "untouched": True, "result": expected}


def test_after_a_warm_up_from_a_bundle_the_first_call_may_be_captured(bundle, expected, tmp_path):
    cache = {artifacts.ENVIRONMENT_VARIABLE: str(tmp_path / "cache"), "PATH": str(tmp_path)}
    facts = run(WITHOUT_CUTE_DSL + WARM + CAPTURED, KDA_BUNDLE=str(bundle), CC="", **cache)
    assert facts == {"warmed": [False], "left": 0, "untouched": True, "result": expected}


@pytest.mark.parametrize("source", ["nothing", "cache", "bundle"])
def test_without_a_warm_up_a_captured_first_call_names_it_and_writes_nothing(
    source, bundle, expected, tmp_path
):
    # A kernel that is compiled but not loaded yet is no better than one that is not compiled.
    place = {"KDA_BUNDLE": str(bundle) if source == "bundle" else None}
    if source == "nothing":
        place[artifacts.ENVIRONMENT_VARIABLE] = str(tmp_path / "cache")
    facts = run(CAPTURED, **place)
    assert "kda_ops.warmup(...)" in facts["error"] and "capture" in facts["error"]
    assert facts["untouched"]


def test_a_bundle_for_another_architecture_is_refused(tmp_path):
    kda_ops.warmup("packed_decode", heads=4, rows=3, arch="sm_80", bundle=tmp_path)
    code = """
try:
    kda_ops.packed_kda_decode(*inputs())
except kda_ops.ContractError as error:
    facts["error"] = str(error)
print(json.dumps(facts))
"""
    assert "got one for sm_80 (from KDA_BUNDLE)" in run(code, KDA_BUNDLE=str(tmp_path))["error"]

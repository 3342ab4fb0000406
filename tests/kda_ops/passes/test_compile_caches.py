"""A second process finds the rewritten code in Inductor's and AOTAutograd's caches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kda_ops

PROGRAM = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("spelled", sys.argv[1])
spelled = importlib.util.module_from_spec(spec)
sys.modules["spelled"] = spelled
spec.loader.exec_module(spelled)
import torch
from torch._dynamo.utils import counters
import kda_ops
layer = spelled.StepLayer(spelled.Spelling())
eager = spelled.StepLayer(spelled.Spelling())
x = spelled.inputs(spelled.Spelling())
with torch.no_grad():
    found, expected = torch.compile(layer, backend="kda")(*x), eager(*x)
spelled.compare(found, expected, 2**-6)
spelled.compare(layer.pool, eager.pool, 1e-5)
print(json.dumps({
    "fx": counters["inductor"]["fxgraph_cache_hit"],
    "bypass": counters["inductor"]["fxgraph_cache_bypass"],
    "aot": counters["aot_autograd"]["autograd_cache_hit"],
    "graphs": counters["kda"]["graphs"],
    "matches": counters["kda"]["matches"],
}))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The counters of two processes with one cache directory."""
    cache = tmp_path_factory.mktemp("caches")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).with_name("conftest.py"))]
    found = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def test_the_first_process_matches_and_bypasses_no_cache(runs):
    assert (runs[0]["matches"], runs[0]["bypass"], runs[0]["aot"]) == (1, 0, 0)


def test_the_second_process_hits_both_caches_and_stays_right(runs):
    assert (runs[1]["fx"], runs[1]["aot"], runs[1]["graphs"]) == (1, 1, 0)


def test_a_test_captures_its_graph_though_another_has_left_it_compiled(step):
    spelling = step.Spelling()
    layer, inputs = step.StepLayer(spelling), step.inputs(spelling)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layer, options=kda_ops.inductor_options())(*inputs)
    assert step.capture(step.StepLayer(spelling), *step.inputs(spelling)).findings

"""Calls in turn whose launches overlap (KDA_PDL=1) leave the bits that they leave one by one."""

import pytest
import torch

from kda_kernels import plan
from kda_kernels.testing.cases import Case, clone, draw, output_of
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.device import launch, moved, on

pytestmark = pytest.mark.gpu

SIZES = {
    "packed_decode": {"B": 40, "H": 12, "S": 41},
    "fused_decode": {"B": 40, "H": 12, "S": 41, "L": 3},
    "packed_fused_decode": {"R": 120, "N": 40, "T": 3, "H": 12, "S": 121},
}
FEW = {"B": 1, "N": 1, "R": 3}
TURNS = 20


def outputs_in_turn(contract, values, *, signals):
    """Capture calls that each read what the call before wrote, replay them, return all outputs.

    With ``signals`` nothing but calls follow each other; otherwise a kernel without signal writes
    the rows of each.
    """
    there = on("cuda", values)
    first = contract.tensors[0].name
    rows = there[first].clone()
    outputs = [moved(output_of(contract, values), "cuda") for _ in range(TURNS)]
    launch(contract, there | {"state": there["state"].clone()} | windows(there), outputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn, output in enumerate(outputs):
            if not signals:
                torch.mul(rows, 1 + turn / TURNS, out=there[first])
            launch(contract, there, output)
    graph.replay()
    torch.cuda.synchronize()
    return torch.stack(outputs), {name: there[name] for name in ("state", *windows(there))}


def windows(values):
    """A copy of the pool of windows, where the operator has one."""
    return {"conv_state": values["conv_state"].clone()} if "conv_state" in values else {}


@pytest.mark.parametrize("signals", [True, False], ids=["calls alone", "others between"])
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("name", SIZES)
def test_calls_that_overlap_leave_the_bits_of_calls_one_by_one(
    name, layout, state, few, signals, monkeypatch
):
    launcher = plan.launcher(name)
    sizes = {k: FEW.get(k, n) if few else n for k, n in SIZES[name].items()}
    scalars = {"state_layout": layout, "lower_bound": -5.0}
    values = draw(launcher.operator, Case(sizes=sizes, state_dtype=state, scalars=scalars))
    results = []
    for asked in ("0", "1"):
        monkeypatch.setenv("KDA_PDL", asked)
        launcher.forget()
        results.append(outputs_in_turn(launcher.operator, clone(values), signals=signals))
    launcher.forget()
    (expected, pools), (outputs, overlapping) = results
    assert_same_bits(outputs, expected, "outputs")
    assert pools.keys() == overlapping.keys()
    for pool in pools:
        assert_same_bits(overlapping[pool], pools[pool], pool)

"""bench_parallel: two tiny ranks on the CPU, and what is lost, from figures written by hand."""

import json
import re
from dataclasses import replace

import pytest
import torch

import bench_parallel
import tables
from bench_parallel import Line
from model_timeline import Parts
from parallel_stack import keep_part
from stack import Sizes, Stack


def test_two_tiny_ranks_agree_with_one_and_are_measured_and_reported(tmp_path):
    path = tmp_path / "parallel.json"
    bench_parallel.main(["--tiny", "--device", "cpu", "--steps", "2", "--json", str(path)])
    report = json.loads(path.read_text("utf-8"))
    assert (report["ranks"], report["heads"], report["layers"]) == (2, 4, 2)
    (line,) = report["lines"]
    assert line["speedup"] == line["alone"] / line["shared"]
    lost = line["shared"] - line["alone"] / 2
    assert line["lost"]["sums"] + line["lost"]["other"] == pytest.approx(lost)
    assert len(re.findall("f32", "".join(tables.parallel_table(report)))) == 1


def test_what_is_lost_adds_up_to_what_a_step_takes_beyond_its_share():
    whole = Parts(projections=60, kda=30, rest=6, kernels=5, kda_kernels=1, gaps=4)
    half = Parts(projections=32, kda=16, rest=5, kernels=5, kda_kernels=1, gaps=4)
    line = Line("f32", 8, 2, 100.0, 70.0, 58.0, whole, half)
    assert line.lost == {"sums": 12, "projections": 2, "kda": 1, "rest": 2, "other": 3}
    assert sum(line.lost.values()) == line.shared - line.alone / 2


def summed_over_ranks(stack):
    """What a stack's one layer hands to the sum."""
    handed = []
    stack.layers[0].with_operator(stack.x, stack.slots, lambda x: handed.append(x) or x)
    return handed[0].float()


def test_what_ranks_add_to_a_layer_s_input_adds_up_to_what_the_whole_layer_adds():
    sizes = Sizes(1, 4, 3, hidden=256, rank=16, device="cpu")
    with torch.no_grad():
        whole, added = Stack(sizes), torch.zeros(3, 256)
        whole.reset()
        parts = [Stack(replace(sizes, heads=2)) for _ in range(2)]
        for rank, part in enumerate(parts):
            keep_part(whole, part, rank)
            added += summed_over_ranks(part)
        torch.testing.assert_close(added, summed_over_ranks(whole), rtol=0.02, atol=0.01)
    states = torch.cat([part.layers[0].state for part in parts], 1)
    torch.testing.assert_close(states, whole.layers[0].state, rtol=0.02, atol=0.01)


def test_heads_that_cannot_be_shared_out_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_parallel.main(["--device", "cpu", "--heads", "5"])
    assert "5 heads cannot be shared out over 2 ranks" in capsys.readouterr().err

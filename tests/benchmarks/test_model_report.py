"""bench_model: the tiny stack on the CPU, and timelines and goals written by hand."""

import json
import re
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import bench_model
import kda_ops
import model_goals
import model_timeline
import model_ways
from gpu_timing import Launch
from model_timeline import Parts
from stack import Layer, Sizes, Stack


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def stack():
    return Stack(Sizes(2, 2, 3, torch.bfloat16, hidden=256, rank=16, device="cpu"))


def test_the_tiny_stack_is_measured_and_reported(monkeypatch, tmp_path, capsys):
    command = ["bench_model.py", "--tiny", "--device", "cpu", "--states", "f32", "--json"]
    ways = ["--ways", model_ways.EAGER, model_ways.OPERATOR]  # the others compile: see below
    monkeypatch.setattr(sys, "argv", [*command, str(tmp_path / "model.json"), *ways])
    bench_model.main()
    report = json.loads((tmp_path / "model.json").read_text("utf-8"))
    assert [line["way"] for line in report["lines"]] == ways[1:]  # none was refused as wrong
    assert all(line["parts"] is None for line in report["lines"])
    assert all(line["tokens_per_second"] > 0 for line in report["lines"])
    assert "eager" in capsys.readouterr().out


def test_a_way_with_another_result_is_not_timed(monkeypatch, capsys):
    def wrong(layer, x, slots):
        return Layer.forward(layer, x, slots) * 1.2

    monkeypatch.setattr(model_ways, "layer_of", lambda way: wrong)
    sizes = Sizes(1, 1, 2, hidden=256, rank=16, device="cpu")
    assert bench_model.table(sizes, (model_ways.EAGER,), 1) == []
    assert "not timed" in capsys.readouterr().err


def test_a_step_moves_the_pools_from_the_same_start_after_a_reset(stack):
    step = model_ways.step_of(stack, Layer.with_operator)
    stack.reset()
    first = step(), stack.layers[1].state.clone()
    step()
    stack.reset()
    assert torch.equal(step(), first[0])
    assert torch.equal(stack.layers[1].state, first[1])


def test_one_compiled_layer_serves_all_and_the_pass_makes_one_operator_of_its_step(stack):
    stack.reset()
    torch._dynamo.reset()
    run = model_ways.layer_of(model_ways.PASS)
    with kda_ops.enabled(), torch._dynamo.config.patch(error_on_recompile=True):
        _, (code,) = run_and_get_code(model_ways.step_of(stack, run))
    # One kernel between the projections and the way out of the heads.
    calls = re.findall(r"torch\.ops\.kda\.(\w+)\.\w+\(", code)
    assert calls == ["fused_decode"]


def launches(*names):
    return [Launch(name, 10.0 * i, 8.0) for i, name in enumerate(names)]


def test_kernels_between_a_layer_s_first_and_last_product_are_the_kda_part():
    layer = (
        "triton_red_fused_mm_rms_norm_0",
        "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16>",
        "triton_poi_fused_conv_1",
        "void gemvNSP_kernel<__nv_bfloat16>",
        "kernel_cutlass_fused_value_rows",
        "ampere_bf16_s16816gemm_bf16_64x64",
        "triton_poi_fused_add_2",
    )
    parts = model_timeline.read(launches(*layer, *layer), layers=2)
    assert parts == Parts(
        projections=64.0, kda=32.0, rest=32.0, kernels=16, kda_kernels=4, gaps=30.0
    )


def test_a_copy_right_before_a_product_is_what_the_product_adds_to():
    copy = "Memcpy DtoD (Device -> Device)"
    layer = ("some_gemm", copy, "kernel_cutlass_fused_value_rows", copy, "some_gemm")
    parts = model_timeline.read(launches(*layer, *layer), layers=2)
    assert (parts.projections, parts.kda, parts.kda_kernels) == (48.0, 32.0, 4)


def test_products_that_cannot_be_dealt_to_the_layers_are_refused_by_name():
    with pytest.raises(ValueError, match=r"1 products in 2 layers.*mysterious"):
        model_timeline.read(launches("some_gemm", "mysterious"), layers=2)


def test_kernels_that_overlap_leave_no_gap():
    overlapping = [Launch("gemm", 0, 10), Launch("b", 2, 3), Launch("gemm", 9, 3)]
    assert model_timeline.read(overlapping, layers=1).gaps == 0.0


def test_goals_compare_the_kda_part_with_inductor_alone_at_enough_rows():
    def line(way, rows, kda, kernels=2.0):
        parts = {"kda": kda, "kda_kernels": kernels, "gaps": 1.0}
        size = {"state": "bf16", "heads": 12, "rows": rows}
        return size | {"way": way, "us": 100.0, "host_us": 5.0, "parts": parts}

    lines = [
        line("Inductor", 8, 10.0),
        line("pass", 8, 10.0),
        line("Inductor", 32, 60.0),
        line("pass", 32, 20.0, kernels=4.0),
        line("pass, captured", 32, 20.0),
    ]
    found = {v.goal: v for v in model_goals.verdicts(lines, layers=2)}
    faster = found["KDA part, bf16, rows >= 32, over Inductor alone, least"]
    assert (faster.value, faster.met, faster.where) == (3.0, False, "bf16, H 12, 32 rows")
    kernels = found["pass: kernels between the projections and o_proj, per layer, most"]
    assert (kernels.value, kernels.met) == (2.0, False)
    assert found["host's share of a replayed step, most"].met

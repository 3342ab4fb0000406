"""Launches on a GPU: graphs, streams, huge offsets, first uses, errors, the public function.

Results as such: test_cuda_packed_decode.py.
"""

import math

import pytest
import torch

import kda_ops
from kda_kernels import plan
from kda_kernels._cute import compile as backend
from kda_kernels.errors import UnsupportedError
from kda_kernels.packed_decode.contract import CONTRACT
from kda_kernels.testing.cases import Case, clone, draw, output_of
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.device import launch, moved, on, run_on

pytestmark = pytest.mark.gpu

F32, BF16 = torch.float32, torch.bfloat16
POOLS = [(F32, "vk"), (BF16, "vk"), (F32, "kv"), (BF16, "kv")]
POOL_IDS = ["f32-vk", "bf16-vk", "f32-kv", "bf16-kv"]


def case(rows, heads, slots=None, *, scalars=None, **fields):
    """A case of packed_decode; by default with as many slots as are needed and two more."""
    sizes = {"B": rows, "H": heads, "S": rows + 2 if slots is None else slots}
    return Case(sizes=sizes, scalars=scalars or {}, **fields)


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_a_graph_s_replay_equals_the_eager_call_bitwise_and_follows_new_inputs(state, layout):
    scalars = {"state_layout": layout, "first_slot": 1}
    first = draw(CONTRACT, case(4, 3, 9, state_dtype=state, scalars=scalars))
    second = draw(CONTRACT, case(4, 3, 9, state_dtype=state, scalars=scalars, seed=7))
    second["state"] = first["state"]
    first["state_indices"] = torch.tensor([2, -1, 0, 99], dtype=torch.int32)
    second["state_indices"] = torch.tensor([5, 2, 0, 7], dtype=torch.int32)
    there = on("cuda", first)
    output = moved(output_of(CONTRACT, first), "cuda")
    launch(CONTRACT, there, output)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(CONTRACT, there, output)
    eager = on("cuda", first)
    for values in (first, second, second, first):
        for name in ("mixed_qkv", "raw_gate", "raw_beta", "state_indices"):
            there[name].copy_(values[name])
            eager[name].copy_(values[name])
        if values is first:
            there["state"].copy_(first["state"])
            eager["state"].copy_(first["state"])
        output.fill_(math.nan)
        graph.replay()
        expected = launch(CONTRACT, eager, torch.empty_like(output))
        assert_same_bits(output, expected, "output")
        assert_same_bits(there["state"], eager["state"], "state")


def test_a_side_stream_s_calls_see_what_that_stream_wrote():
    there = on("cuda", draw(CONTRACT, case(3, 4, 6)))
    rows = torch.randn(100, *there["mixed_qkv"].shape, device="cuda").to(BF16)
    start = there["state"].clone()
    expected = torch.empty(100, 3, 1, 4, 128, dtype=BF16, device="cuda")
    for x, output in zip(rows, expected, strict=True):
        launch(CONTRACT, there | {"mixed_qkv": x}, output)
    end = there["state"].clone()
    there["state"].copy_(start)
    outputs, x = torch.empty_like(expected), there["mixed_qkv"]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(100):
            torch.cuda._sleep(20_000)
            x.copy_(rows[i])
            launch(CONTRACT, there, outputs[i])
    side.synchronize()
    assert_same_bits(outputs, expected, "outputs")
    assert_same_bits(there["state"], end, "state")


@pytest.mark.parametrize(("state", "layout"), POOLS, ids=POOL_IDS)
def test_slots_and_rows_beyond_two_to_the_31_elements_are_reached(state, layout):
    small = draw(CONTRACT, case(2, 1, 3, state_dtype=state, scalars={"state_layout": layout}))
    small["state_indices"] = torch.tensor([2, -1], dtype=torch.int32)
    there = on("cuda", small)
    output = launch(CONTRACT, there, torch.empty(2, 1, 1, 128, dtype=BF16, device="cuda"))
    step = 2**30 + 64
    huge = torch.empty(2 * step + 128 * 128, dtype=state, device="cuda")
    pool = huge.as_strided((3, 1, 128, 128), (step, 128 * 128, 128, 1))
    pool.copy_(small["state"])
    again = launch(CONTRACT, on("cuda", small) | {"state": pool}, torch.empty_like(output))
    assert_same_bits(again, output, "output")
    assert_same_bits(pool.cpu(), there["state"].cpu(), "state")


def test_rows_whose_stride_overflows_32_bits_are_reached():
    small = draw(CONTRACT, case(3, 1, 4))
    there = on("cuda", small)
    output = launch(CONTRACT, there, torch.empty(3, 1, 1, 128, dtype=BF16, device="cuda"))
    step = 2**30 + 8
    huge = torch.empty(2 * step + 384, dtype=BF16, device="cuda")
    rows = huge.as_strided((3, 384), (step, 1))
    rows.copy_(small["mixed_qkv"])
    again = launch(CONTRACT, on("cuda", small) | {"mixed_qkv": rows}, torch.empty_like(output))
    assert_same_bits(again, output, "output")


def test_more_rows_than_a_grid_has_in_one_direction_are_served():
    rows = 65537 + 3
    small = draw(CONTRACT, case(2, 1, 3, state_dtype=BF16))
    expected = run_on("cuda", CONTRACT, small | {"state": small["state"].clone()})
    values = on("cuda", small)
    for name in ("mixed_qkv", "raw_gate", "raw_beta"):
        many = torch.zeros(rows, small[name].shape[1], dtype=BF16, device="cuda")
        many[[0, -1]] = values[name]
        values[name] = many
    indices = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    indices[[0, -1]] = values["state_indices"]
    values["state_indices"] = indices
    output = launch(
        CONTRACT, values, torch.full((rows, 1, 1, 128), math.nan, dtype=BF16, device="cuda")
    )
    assert_same_bits(output[[0, -1]].cpu(), expected, "live rows")
    assert bool((output[1:-1] == 0).all())


def test_a_first_use_during_capture_says_what_to_do(monkeypatch):
    there = on("cuda", draw(CONTRACT, case(1, 2, 3, scalars={"scale": 0.7})))
    output = torch.zeros(1, 1, 2, 128, dtype=BF16, device="cuda")
    before = there["state"].clone()
    monkeypatch.setattr(backend, "_LOADED", {})
    with pytest.raises(UnsupportedError, match=r"kda_ops\.warmup\(\.\.\.\) for these shapes"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            launch(CONTRACT, there, output)
    torch.cuda.synchronize()
    assert_same_bits(there["state"], before, "state")
    launch(CONTRACT, there, output)
    assert bool(output.any())


def test_without_a_linker_kernels_are_compiled_for_this_process_only(monkeypatch):
    values = draw(CONTRACT, case(2, 1, 4))
    expected = run_on("cuda", CONTRACT, clone(values))
    monkeypatch.setattr(backend, "_LOADED", {})
    monkeypatch.delenv("KDA_BUNDLE", raising=False)
    monkeypatch.setattr(backend, "find_linker", lambda: None)
    backend._warn_that_nothing_is_kept.cache_clear()
    plan.launcher("packed_decode").forget()
    with pytest.warns(RuntimeWarning, match="compiled again in every process"):
        assert_same_bits(run_on("cuda", CONTRACT, values), expected, "output")
    plan.launcher("packed_decode").forget()


def test_empty_calls_launch_nothing_and_what_follows_works():
    there = on("cuda", draw(CONTRACT, case(0, 2, 3)))
    assert (
        launch(CONTRACT, there, torch.empty(0, 1, 2, 128, dtype=BF16, device="cuda")).shape[0] == 0
    )
    assert bool((torch.ones(4, device="cuda") + 1 == 2).all())


def test_more_tokens_a_sequence_than_there_is_room_for_are_refused_with_the_limit():
    contract = plan.launcher("packed_fused_decode").operator
    sizes = {"R": 17, "N": 1, "T": 17, "H": 1, "S": 20}
    values = on("cuda", draw(contract, Case(sizes=sizes)))
    before = values["state"].clone()
    arguments = [values[a.name] for a in contract.arguments if not a.keyword]
    keywords = {a.name: values[a.name] for a in contract.arguments if a.keyword}
    with pytest.raises(UnsupportedError, match="T of at most 16 tokens on cuda, got T = 17"):
        torch.ops.kda.packed_fused_decode(*arguments, **keywords)
    assert_same_bits(values["state"], before, "state")


def test_the_public_function_and_a_compiled_call_equal_the_operator_bitwise():
    values = draw(CONTRACT, case(3, 2, 6))
    names = [a.name for a in CONTRACT.tensors]
    there, again, third = (on("cuda", values) for _ in range(3))
    expected = launch(CONTRACT, there, torch.empty(3, 1, 2, 128, dtype=BF16, device="cuda"))
    assert_same_bits(kda_ops.packed_kda_decode(*[again[n] for n in names]), expected, "eager")
    assert_same_bits(again["state"], there["state"], "state")
    compiled = torch.compile(kda_ops.packed_kda_decode, fullgraph=True)
    assert_same_bits(compiled(*[third[n] for n in names]), expected, "compiled")
    assert_same_bits(third["state"], there["state"], "state")

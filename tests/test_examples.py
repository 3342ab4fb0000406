"""The programs in examples/ do what their first lines say, run as the documentation runs them.

Two processes of tensor parallel decode talk over gloo on CPU; the same test on two GPUs, over
NCCL, is marked multigpu.
"""

import importlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.device import on
from kda_ops import StateCache, StateSpec

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
FUSED = CONTRACTS[1]


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_every_example_is_in_the_documentation_with_its_command():
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    programs = [path for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text("utf-8")]
    assert len(programs) == 5
    for path in programs:
        command = f"python examples/{path.name}"
        assert command in pages
        assert command in path.read_text("utf-8")


def test_requests_that_share_batches_say_what_they_say_alone(capsys):
    batching = importlib.import_module("continuous_batching")
    requests = batching.main(["--device", "cpu", "--requests", "9"])
    assert re.search(r"9 requests, \d+ tokens in \d+ steps on cpu", capsys.readouterr().out)
    spec = StateSpec(layers=2, heads=2, window_dtype=torch.float32)
    cache = StateCache(spec, slots=2)
    model = batching.DeltaModel(batching.VOCABULARY, batching.HIDDEN, spec)
    step = model.greedy(cache)
    for request in requests:
        assert len(request.generated) == request.wanted
        alone = batching.Request(0, request.prompt, request.wanted)
        slots = cache.indices(cache.allocate())
        while not alone.done:
            alone.accept(int(step(slots, torch.tensor([alone.next_token()]))))
        cache.release(cache.live)
        assert request.generated == alone.generated


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_speculation_says_what_plain_decoding_says_in_fewer_calls(tokens, device, capsys):
    speculation = importlib.import_module("speculative_decoding")
    arguments = ["--sequences", "3", "--wanted", "11", "--tokens", str(tokens)]
    texts = speculation.main([*arguments, "--device", device])
    assert re.search(rf"33 tokens in \d+ rounds of {tokens}", capsys.readouterr().out)
    spec = StateSpec(layers=3, heads=2, window_dtype=torch.float32)
    model = speculation.models(spec)[0].to(device)
    cache = StateCache(spec, slots=2, device=device)
    step = model.greedy(cache)
    for text in texts:
        slots = cache.indices(cache.allocate())
        said = []
        for n in range(len(text.prompt) + text.wanted - 1):
            token = text.prompt[n] if n < len(text.prompt) else said[-1]
            said.append(int(step(slots, torch.tensor([token], device=device))))
        assert text.generated == said[len(text.prompt) - 1 :]
        cache.release(cache.live)
    rounds = sum(text.rounds for text in texts)
    assert rounds == 30 if tokens == 1 else rounds < 30


@pytest.mark.gpu
def test_continuous_batching_replays_graphs_on_a_gpu(capsys):
    batching = importlib.import_module("continuous_batching")
    requests = batching.main(["--device", "cuda"])
    assert all(request.done for request in requests)
    assert "steps on cuda:0" in capsys.readouterr().out


def test_the_compiled_model_in_plain_pytorch_is_rewritten_and_agrees_with_eager(capsys):
    furthest, states = importlib.import_module("reduce_overhead").main(["--device", "cpu"])
    assert max(furthest, states) < 1e-5
    printed = capsys.readouterr().out
    assert "fused into kda::packed_decode" in printed
    assert "CUDA graphs: no pool stands in their way" in printed


@pytest.mark.gpu
def test_the_compiled_model_in_plain_pytorch_is_captured_on_a_gpu(capsys):
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
        furthest, states = importlib.import_module("reduce_overhead").main(["--device", "cuda"])
    assert max(furthest, states) < 1e-3
    assert "graphs skipped by torch: 0" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kimi_linear_generates_the_same_text_with_its_layer_rewritten(device):
    pytest.importorskip("transformers", minversion="5.17")
    example = importlib.import_module("kimi_linear_generate")
    eager, text, rewritten = example.main(["--device", device, "--tokens", "5"])
    assert eager.tolist() == text.tolist()
    # A second graph may be compiled after the first step, and the layer is in it too.
    assert rewritten >= 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_ranks_decode_what_one_process_decodes(device):
    command = [sys.executable, str(EXAMPLES / "tensor_parallel.py"), "--ranks", "2"]
    there = {"NCCL_NVLS_ENABLE": "0"} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | there
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert "2 ranks with 2 of 4 heads each" in run.stdout
    (error,) = re.findall(r"logits: (\S+) from one process", run.stdout)
    assert float(error) < 1e-4
    assert "tokens: equal to one process" in run.stdout


RANK_PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
sys.path.insert(0, sys.argv[1])
import kda_model, tensor_parallel
from kda_ops import StateCache, StateSpec

device, heads, steps = sys.argv[2], 4, 3
if device == "cuda":
    torch.cuda.set_device(int(os.environ["RANK"]))
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
layer = kda_model.DeltaLayer(64, heads, dtype).requires_grad_(False)
for name in ("qkv", "decay", "gate", "beta"):
    # Eighths times quarters: sums of 64 products are exact in any order, however heads are shared.
    weight = getattr(layer, name)
    weight.copy_((weight.float() * 16).round().clamp(-8, 8) / 8)
xs = (torch.randn(steps, 3, 64) * 2).round().clamp(-4, 4).to(dtype).div(4).to(device)
layer.to(device)


def decode(attention, cache):
    slots = cache.indices(cache.allocate(3))
    with torch.no_grad():
        outputs = [attention(x, slots, cache.layers[0]) for x in xs]
    return [t.cpu() for t in (torch.stack(outputs), *cache.layers[0][:2])]


def cache_of(heads):
    return StateCache(StateSpec(1, heads, window_dtype=dtype), 4, device)


def alone(x, slots, pools):
    return kda_model.delta_attention(x, layer.weights, slots, pools)


single = decode(alone, cache_of(heads))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),))
parallel = tensor_parallel.ParallelLayer(layer, mesh)


def shared(x, slots, pools):
    everywhere = DTensor.from_local(x.to(device), mesh, [Replicate()])
    return parallel.attention(slots, pools)(everywhere, *layer.weights).to_local()


mine = decode(shared, cache_of(heads // dist.get_world_size()))
torch.save([mine, single], sys.argv[3] + str(dist.get_rank()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_two_ranks_hold_the_heads_of_one_process_bit_for_bit(device, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, "-c", RANK_PROGRAM, str(EXAMPLES), device, f"{tmp_path}/rank"]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    errors = [rank.communicate()[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    for rank in (0, 1):
        mine, single = torch.load(tmp_path / f"rank{rank}")
        heads = slice(2 * rank, 2 * rank + 2)
        outputs = single[0].unflatten(-1, (4, 128))[:, :, heads].flatten(2)
        assert_same_bits(mine[0], outputs, f"outputs of rank {rank}")
        assert_same_bits(mine[1], single[1][:, heads], f"states of rank {rank}")
        windows = single[2].unflatten(1, (3, 4, 128))[:, :, heads].flatten(1, 3)
        assert_same_bits(mine[2], windows, f"windows of rank {rank}")


@pytest.mark.parametrize("per_rank", [32, 16, 8])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_64_heads_shared_out_over_ranks_keep_every_bit(per_rank, device):
    heads, slots = 64, 3
    values = on(device, draw(FUSED, Case({"B": 2, "H": heads, "S": slots, "L": 3})))
    whole = StateCache(StateSpec(1, heads), slots, device)
    values["state_indices"] = whole.indices(whole.allocate(2))
    start = values["state"]
    state, window = whole.layers[0][:2]
    state.copy_(start)
    window.copy_(values["conv_state"])
    parts = []
    for first in range(0, heads, per_rank):
        cut, shard = (
            slice(first, first + per_rank),
            StateCache(StateSpec(1, per_rank), slots, device),
        )
        shard.layers[0].state.copy_(state[:, cut])
        shard.layers[0].window.copy_(by_head(window, 1)[:, :, cut].flatten(1, 3))
        mine = values | {"state": shard.layers[0].state, "conv_state": shard.layers[0].window}
        mine |= {n: values[n][:, :, cut] for n in ("raw_gate", "raw_beta", "output_gate")}
        mine["x"] = by_head(values["x"], 1)[:, :, cut].flatten(1)
        mine["weight"] = (
            values["weight"].unflatten(2, (heads, 128))[:, :, cut].flatten(2).contiguous()
        )
        mine["A_log"] = values["A_log"][cut].contiguous()
        mine["dt_bias"] = values["dt_bias"].view(heads, 128)[cut].flatten()
        parts.append((kda_ops.fused_kda_decode(**mine), shard.layers[0]))
    output = kda_ops.fused_kda_decode(**values | {"state": state, "conv_state": window})
    assert_same_bits(torch.cat([o for o, _ in parts], 2).cpu(), output.cpu(), "output")
    assert_same_bits(torch.cat([p.state for _, p in parts], 1).cpu(), state.cpu(), "state")
    windows = torch.cat([p.window.unflatten(1, (3, per_rank, 128)) for _, p in parts], 2)
    assert_same_bits(windows.flatten(1, 3).cpu(), window.cpu(), "window")


def by_head(tensor, axis):
    """Split an axis of q | k | v channels into part, head and channel."""
    return tensor.unflatten(axis, (3, -1, 128))

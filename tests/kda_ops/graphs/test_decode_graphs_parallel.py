"""DecodeGraphs on every rank of a tensor-parallel model, the sum over ranks inside the graphs.

Two processes talk over gloo on CPU, where steps run eagerly on padded buffers; the same test on two
GPUs, over NCCL with graphs, is marked multigpu.
"""

import os
import socket
import subprocess
import sys

import pytest
import torch

from kda_kernels.testing.compare import assert_same_bits

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import kda_ops

kind, rank, heads, steps = sys.argv[1], int(os.environ["RANK"]), 4, 5
device = f"cuda:{rank}" if kind == "cuda" else "cpu"
if kind == "cuda":
    torch.cuda.set_device(rank)
make = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(shape, generator=make)
A_log, bias = draw(heads), draw(heads, 128)
inputs = [
    (draw(n, 3, heads, 128).bfloat16(), draw(n, heads, 128).bfloat16(), draw(n, heads).bfloat16())
    for n in (3, 1, 4, 2, 3)
]
state = draw(7, heads, 128, 128)
slots = [[4, 1, 6], [2], [1, 2, 3, 6], [6, 5], [1, 4, 2]]


def decode(mine, total):
    cache = kda_ops.StateCache(kda_ops.StateSpec(1, len(range(heads)[mine])), 7, device)
    cache.allocate(6)
    cache.layers[0].state.copy_(state[:, mine])
    rate, bent = A_log[mine].to(device), bias[mine].flatten().to(device)

    def step(slots, qkv, gate, beta):
        o = kda_ops.packed_kda_decode(
            qkv, gate, beta, rate, bent, cache.layers[0].state, slots, first_slot=1
        )
        # Sixteenths below 2**7: their sums are exact in any order.
        exact = (o.float().clamp(-64, 64) * 16).round() / 16
        return o.flatten(1), total(exact.sum(2).flatten(1))

    graphs, results = kda_ops.DecodeGraphs(step, [2, 4]), []
    for rows, (qkv, gate, beta) in zip(slots, inputs):
        given = (qkv[:, :, mine].flatten(1), gate[:, mine].flatten(1), beta[:, mine])
        result = graphs(cache.indices(rows), *(x.contiguous().to(device) for x in given))
        results.append([x.cpu() for x in result])
    captured = graphs.report.captured
    return results, cache.layers[0].state.cpu(), captured


def summed(x):
    dist.all_reduce(x)
    return x


dist.init_process_group("nccl" if kind == "cuda" else "gloo")
alone = decode(slice(None), lambda x: x)
shared = decode(slice(2 * rank, 2 * rank + 2), summed)
torch.save([alone, shared], sys.argv[2] + str(rank))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_graphs_of_two_ranks_sum_inside_and_hold_one_rank_s_heads_bit_for_bit(device, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, "-c", PROGRAM, device, f"{tmp_path}/rank"]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    for rank in (0, 1):
        alone, shared = torch.load(tmp_path / f"rank{rank}")
        assert alone[2] == shared[2] == ((2, 4) if device == "cuda" else ())
        for call, ((o, total), (mine, sums)) in enumerate(zip(alone[0], shared[0], strict=True)):
            assert bool(total.any())
            assert_same_bits(sums, total, f"sums of call {call} on rank {rank}")
            heads = o.unflatten(1, (4, 128))[:, 2 * rank : 2 * rank + 2].flatten(1)
            assert_same_bits(mine, heads, f"outputs of call {call} on rank {rank}")
        assert_same_bits(shared[1], alone[1][:, 2 * rank : 2 * rank + 2], f"states of rank {rank}")

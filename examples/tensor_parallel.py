"""Tensor parallel decode: every rank keeps its own heads, states and windows included.

    python examples/tensor_parallel.py --ranks 2                    (starts the ranks itself)
    torchrun --nproc-per-node 2 examples/tensor_parallel.py         (gloo on CPU, NCCL on GPUs)

Weights are DTensors sharded over heads; the operator runs on local tensors under local_map, and
what it returns is sharded over heads again. The only communication is the all-reduce behind the
output projection. Pools never leave their rank: they are plain tensors of H / ranks heads.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from kda_model import Attention, DeltaLayer, DeltaModel, Weights, delta_attention
from kda_ops import LayerPools, StateCache, StateSpec

VOCABULARY, HIDDEN, ROWS, STEPS = 256, 64, 3, 4

Results = MutableMapping[int, dict[str, Any]]

HEAD_AXES: dict[str, int | None] = {
    **{"qkv": 1, "decay": 0, "gate": 0, "beta": 0, "conv": 2, "A_log": 0, "dt_bias": 0},
    "norm": None,
}
"""The axis of each weight that counts heads; the norm is one for all heads."""


def shard(layer: DeltaLayer, mesh: DeviceMesh) -> None:
    """Share a layer's heads out over the ranks; every rank has the whole weights before."""
    for name, axis in {**HEAD_AXES, "out": 1}.items():
        weight = distribute_tensor(getattr(layer, name).detach(), mesh, placements(axis))
        setattr(layer, name, nn.Parameter(weight, requires_grad=False))


def placements(axis: int | None) -> list[Placement]:
    """Shard an axis over the ranks, or give all of them everything."""
    return [Replicate()] if axis is None else [Shard(axis)]


class ParallelLayer(nn.Module):
    """A sharded layer: x [B, hidden], equal on all ranks -> [B, hidden], equal on all ranks."""

    def __init__(self, layer: DeltaLayer, mesh: DeviceMesh) -> None:
        super().__init__()
        shard(layer, mesh)
        self.layer = layer
        self.mesh = mesh

    def attention(
        self, slots: Tensor, pools: LayerPools, attend: Attention = delta_attention
    ) -> Callable[..., DTensor]:
        """Return the operator on DTensors: its heads on the last axis, sharded like the weights."""

        def local(x: Tensor, *weights: Tensor) -> Tensor:
            return attend(x, Weights(*weights), slots, pools)

        sharded = [placements(HEAD_AXES[name]) for name in Weights._fields]
        return local_map(
            local,
            out_placements=[Shard(1)],
            in_placements=([Replicate()], *sharded),
            device_mesh=self.mesh,
        )

    def forward(self, x: Tensor, slots: Tensor, pools: LayerPools, attend: Attention) -> Tensor:
        """Move the rows' slots on by one token."""
        everywhere = DTensor.from_local(self.layer.norm_in(x), self.mesh, [Replicate()])
        heads = self.attention(slots, pools, attend)(everywhere, *self.layer.weights)
        # Partial sums over heads; redistributing them is the all-reduce.
        partial = cast(DTensor, F.linear(heads, self.layer.out))
        return x + partial.redistribute(placements=[Replicate()]).to_local()


def decode(model: DeltaModel, cache: StateCache) -> dict[str, Any]:
    """Decode a few tokens greedily; return logits of the last step, tokens and pools."""
    slots = cache.indices(cache.allocate(ROWS))
    tokens = torch.arange(1, ROWS + 1, device=cache.device)
    chosen = []
    for _ in range(STEPS):
        logits = model(slots, tokens, cache)
        tokens = logits.argmax(-1)
        chosen.append(tokens.tolist())
    pools = [(layer.state.cpu(), layer.window.cpu()) for layer in cache.layers]
    return {"logits": logits.float().cpu(), "tokens": chosen, "pools": pools}


def rank_main(heads: int) -> dict[str, Any]:
    """Decode on one rank of an initialised process group."""
    ranks, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    mesh = init_device_mesh(device, (ranks,))
    # All ranks draw the same weights from one seed and keep their part of them.
    model = DeltaModel(VOCABULARY, HIDDEN, spec_of(heads)).to(device)
    model.layers = nn.ModuleList(
        ParallelLayer(cast(DeltaLayer, layer), mesh) for layer in model.layers
    )
    return decode(model, StateCache(spec_of(heads // ranks), slots=1 + ROWS, device=device))


def spec_of(heads: int) -> StateSpec:
    """Two layers of so many heads; in float32, so that greedy tokens show whether ranks agree."""
    return StateSpec(layers=2, heads=heads, window_dtype=torch.float32)


def alone(heads: int) -> dict[str, Any]:
    """Decode in one process, for comparison."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DeltaModel(VOCABULARY, HIDDEN, spec_of(heads)).to(device)
    return decode(model, StateCache(spec_of(heads), slots=1 + ROWS, device=device))


def _worker(rank: int, ranks: int, port: int, heads: int, results: Results) -> None:
    """Run one rank that :func:`spawned` has started."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
    try:
        results[rank] = rank_main(heads)
    finally:
        dist.destroy_process_group()


def spawned(ranks: int, heads: int) -> list[dict[str, Any]]:
    """Start the ranks on this machine and return what each has decoded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_worker, (ranks, port, heads, results), nprocs=ranks)
        return [results[rank] for rank in range(ranks)]


def report(results: Sequence[dict[str, Any]], single: dict[str, Any], heads: int) -> None:
    """Say how ranks and the single process compare."""
    per_rank = heads // len(results)
    same = all(result["tokens"] == single["tokens"] for result in results)
    print(f"{len(results)} ranks with {per_rank} of {heads} heads each, {STEPS} steps")
    print(f"tokens: {'equal to' if same else 'different from'} one process, {single['tokens'][-1]}")
    error = max(float((result["logits"] - single["logits"]).abs().max()) for result in results)
    print(f"logits: {error:.1e} from one process (the all-reduce adds in another order)")


def main(arguments: list[str] | None = None) -> None:
    """Run as one rank under torchrun, else start the ranks, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        report(spawned(options.ranks, options.heads), alone(options.heads), options.heads)
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mine: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(mine, rank_main(options.heads))
    if dist.get_rank() == 0:
        report(mine, alone(options.heads), options.heads)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

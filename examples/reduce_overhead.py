"""torch.compile(mode="reduce-overhead") of a model in plain PyTorch: torch captures the graphs.

    python examples/reduce_overhead.py [--device cuda]

The model knows nothing of kda_ops. Its pool is a buffer, so torch may take its address as fixed,
and under kda_ops.enabled() its recurrence becomes kda::packed_decode on the pool itself. On CPU
torch makes no graphs and the program does the same without them.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import kda_ops

D = 128


def unit(x: Tensor) -> Tensor:
    """Scale the vectors of x to length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class DeltaRule(nn.Module):
    """One layer, one token a row: x [B, hidden], slots [B] -> [B, hidden]."""

    pool: Tensor

    def __init__(self, hidden: int, heads: int, slots: int) -> None:
        super().__init__()
        self.heads = heads
        self.sizes = (3 * heads * D, heads * D, heads)
        self.project = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(heads * D, hidden, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.full((heads * D,), -4.0))
        # A buffer: torch's CUDA graphs leave it where it is. A pool that is an argument of forward
        # would have to be marked: kda_ops.mark_state_static(pool).
        self.register_buffer("pool", torch.zeros(slots, heads, D, D))  # [slot, head, key, value]

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """Move the rows' slots on by one token."""
        qkv, gate, beta = self.project(x).split(self.sizes, dim=-1)
        q, k, v = (part.view(-1, self.heads, D) for part in qkv.chunk(3, dim=-1))
        q, k = unit(q) * D**-0.5, unit(k)
        a = (gate + self.dt_bias).view(-1, self.heads, D)
        S = self.pool[slots] * torch.exp(-self.A_log.exp()[:, None] * F.softplus(a))[..., None]
        u = torch.sigmoid(beta)[..., None] * (v - (S * k[..., None]).sum(-2))
        S = S + k[..., None] * u[..., None, :]
        self.pool[slots] = S
        return x + self.out((S * q[..., None]).sum(-2).flatten(1))


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Decode eagerly and compiled, and return how far outputs and pools are apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    hidden, rows, slots = 64, 4, 9
    models = [DeltaRule(hidden, 2, slots).to(options.device).requires_grad_(False) for _ in "ab"]
    eager, model = models
    model.load_state_dict(eager.state_dict())
    inputs = torch.randn(8, rows, hidden, device=options.device)
    index = torch.tensor([5, 2, 7, 3], device=options.device)

    compiled = torch.compile(model, mode="reduce-overhead")
    furthest = 0.0
    with torch.no_grad(), kda_ops.enabled():  # around the first call: compilation is lazy
        for x in inputs:
            output = compiled(x, index)  # warms up, then records, then replays
            # The next call overwrites what a replay returned: use it now, or clone it.
            furthest = max(furthest, float((output - eager(x, index)).abs().max()))
    states = float((model.pool - eager.pool).abs().max())

    print(f"steps rewritten: {counters['kda']['matches']}")
    print(f"graphs skipped by torch: {counters['inductor']['cudagraph_skips']} (all, on CPU)")
    print(f"from eager: outputs {furthest:.1e}, pools {states:.1e}")
    with torch.no_grad():
        print(kda_ops.explain(model, inputs[0], index))
    return furthest, states


if __name__ == "__main__":
    main()

"""A delta-rule step in many spellings, and post-grad graphs of it without code generation."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from kda_ops.passes import Finding, Options, inductor_options, rewrite_graph

D = 128
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


def unit_rsqrt(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def softplus_gate(a: Tensor, rate: Tensor) -> Tensor:
    return -rate * F.softplus(a)


def bounded_gate(a: Tensor, rate: Tensor) -> Tensor:
    return -5.0 * torch.sigmoid(rate * a)


def sigmoid(beta: Tensor) -> Tensor:
    return torch.sigmoid(beta.float())


def split_chunk(mixed: Tensor, heads: int) -> tuple[Tensor, ...]:
    return tuple(p.view(-1, heads, D).float() for p in mixed.chunk(3, -1))


def recur_kv(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, beta: Tensor) -> Any:
    S = S * d[..., None]
    u = (v - (S * k[..., None]).sum(-2)) * beta[..., None]
    S = S + k[..., None] * u[..., None, :]
    return (S * q[..., None]).sum(-2), S


def recur_vk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, beta: Tensor) -> Any:
    S = S * d[..., None, :]
    u = (v - (S * k[..., None, :]).sum(-1)) * beta[..., None]
    S = S + u[..., None] * k[..., None, :]
    return (S * q[..., None, :]).sum(-1), S


def read_index(pool: Tensor, slots: Tensor) -> Tensor:
    return pool[slots]


def write_setitem(pool: Tensor, slots: Tensor, state: Tensor) -> None:
    pool[slots] = state


@dataclass(frozen=True)
class Spelling:
    """The choices that an author of a step makes; every one is a function of plain PyTorch."""

    split: Callable[..., Any] = split_chunk
    unit: Callable[[Tensor], Tensor] = unit_rsqrt
    gate: Callable[[Tensor, Tensor], Tensor] = softplus_gate
    logits: Callable[[Tensor], Tensor] = sigmoid
    recur: Callable[..., Any] = recur_kv
    read: Callable[[Tensor, Tensor], Tensor] = read_index
    write: Callable[[Tensor, Tensor, Tensor], None] = write_setitem
    scale: float = D**-0.5
    scale_output: bool = False
    cast: bool = True
    heads: int = 2
    activation: torch.dtype = torch.bfloat16
    pool: torch.dtype = torch.float32


class StepLayer(nn.Module):
    """One layer: mixed [B, 3HD], gate [B, HD], beta [B, H], slots [B] -> [B, H, D]."""

    pool: Tensor

    def __init__(self, spelling: Spelling, slots: int = 7) -> None:
        super().__init__()
        heads, generator = spelling.heads, torch.Generator().manual_seed(1)
        self.spelling = spelling
        self.A_log = nn.Parameter(torch.randn(heads, generator=generator) * 0.5)
        self.dt_bias = nn.Parameter(torch.randn(heads * D, generator=generator))
        pool = torch.randn(slots, heads, D, D, generator=generator)
        self.register_buffer("pool", pool.to(spelling.pool))

    def forward(self, mixed: Tensor, gate: Tensor, beta: Tensor, slots: Tensor) -> Tensor:
        s = self.spelling
        q, k, v = s.split(mixed, s.heads)
        q, k = s.unit(q), s.unit(k)
        if not s.scale_output:
            q = q * s.scale
        a = gate.float().view(-1, s.heads, D) + self.dt_bias.view(s.heads, D)
        g = s.gate(a, self.A_log.float().exp()[:, None])
        S = s.read(self.pool, slots).float()
        o, S = s.recur(S, q, k, v, g.exp(), s.logits(beta))
        s.write(self.pool, slots, S.to(self.pool.dtype))
        if s.scale_output:
            o = o * s.scale
        return o.to(mixed.dtype) if s.cast else o


def inputs(
    spelling: Spelling, rows: int = 4, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Draw one call's inputs, with a negative slot among the slots; equal on every device."""
    generator = torch.Generator().manual_seed(seed)
    heads, dtype = spelling.heads, spelling.activation

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    slots = torch.randperm(7, generator=generator)[:rows]
    if rows > 1:
        slots[1] -= 7
    drawn = draw(rows, 3 * heads * D), draw(rows, heads * D) * 3, draw(rows, heads), slots
    return tuple(x.to(device) for x in drawn)


@dataclass
class Captured:
    """A post-grad graph, what the pass did to it, and how the two compare when run."""

    module: torch.fx.GraphModule
    before: str
    findings: list[Finding] = field(default_factory=list)
    output: Any = None

    @property
    def after(self) -> str:
        """The graph as it is now."""
        return listing(self.module.graph)

    @property
    def targets(self) -> list[str]:
        """What the graph calls."""
        return targets(self.module.graph)

    @property
    def reasons(self) -> list[str]:
        """The codes of all refusals."""
        return [f.reason.name for f in self.findings if f.reason]

    @property
    def matches(self) -> int:
        """How many steps were fused."""
        return sum(f.operator is not None for f in self.findings)


def targets(graph: torch.fx.Graph) -> list[str]:
    """Return what a graph calls."""
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def listing(graph: torch.fx.Graph) -> str:
    """Return a graph as readable lines, one node a line."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        kind = ""
        if isinstance(value, Tensor):
            name = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int64: "i64"}
            kind = f": {name.get(value.dtype, value.dtype)}{list(value.shape)}"
        target = str(node.target).removeprefix("<built-in function ").removesuffix(">")
        if node.op == "placeholder":
            lines.append(f"{node.name}{kind}")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
        else:
            shown = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
            line = f"{node.name}{kind} = {target}({', '.join(shown)})"
            lines += textwrap.wrap(line, 96, subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def capture(
    function: Callable[..., Any], *arguments: Any, options: Options | None = None
) -> Captured:
    """Compile up to the post-grad graph, run the pass on it, and run the rewritten graph once."""
    seen: list[Captured] = []

    def inner(module: torch.fx.GraphModule, _: Any, **__: Any) -> Any:
        captured = Captured(module, listing(module.graph))
        captured.findings = rewrite_graph(module.graph, options)
        module.recompile()
        seen.append(captured)
        return make_boxed_func(module.forward)

    def backend(module: torch.fx.GraphModule, example: Any) -> Any:
        patches = inductor_options()
        return compile_fx(module, example, inner_compile=inner, config_patches=patches)

    torch._dynamo.reset()
    # Another test may have left the same graph in AOTAutograd's cache, compiled to the end.
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        seen[-1].output = torch.compile(function, backend=backend)(*arguments)
    return seen[-1]


def check_step(
    spelling: Spelling, rows: int = 4, dynamic: bool = False, device: str = "cpu", **changes: Any
) -> Captured:
    """Rewrite one layer's graph, and compare outputs and pools with eager PyTorch.

    Tolerances are a rounding of the types involved: what a bf16 or f16 round trip may differ by.
    """
    spelling = replace(spelling, **changes)
    eager = StepLayer(spelling).to(device)
    layer = copy.deepcopy(eager)
    arguments = inputs(spelling, rows, device=device)
    with torch.no_grad():
        expected = eager(*arguments)
    if dynamic:
        for argument in arguments:
            torch._dynamo.mark_dynamic(argument, 0)
    captured = capture(layer, *arguments)
    compare(captured.output, expected, ROUNDING[expected.dtype])
    compare(layer.pool, eager.pool, ROUNDING[spelling.pool])
    return captured


def compare(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare against the largest element."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    scale = max(expected.float().abs().max().item(), 1e-3)
    worst = (found.float() - expected.float()).abs().max().item()
    assert math.isfinite(worst) and worst <= tolerance * scale


@dataclass
class Traced:
    """What the pass did to a graph, and the largest difference to eager, in tolerances.

    ``source`` and ``targets`` are what the graph called before and after.
    """

    findings: list[Finding]
    difference: float
    source: list[str]
    targets: list[str]


def trace(
    tensors: dict[str, Any],
    function: Callable[[dict[str, Any]], Tensor],
    tolerance: dict[torch.dtype, float],
    device: str = "cpu",
    whole: Collection[Any] = (),
) -> Traced:
    """Trace a function as AOTAutograd does (without Dynamo), rewrite it, and run it next to eager.

    All tensors are compared: what the function returns and what it has updated in place. Operations
    that are to stay ``whole`` are not decomposed.
    """
    names, values = zip(*tensors.items(), strict=True)

    def call(*given: Any) -> Tensor:
        return function(dict(zip(names, given, strict=True)))

    def copies() -> list[Any]:
        return [v.to(device, copy=True) if isinstance(v, Tensor) else v for v in values]

    functional = torch.func.functionalize(call, remove="mutations")
    table = {op: d for op, d in select_decomp_table().items() if op not in whole}
    eager, rewritten = copies(), copies()
    with torch.no_grad():
        module = make_fx(functional, decomposition_table=table, tracing_mode="fake")(*copies())
        module.graph.eliminate_dead_code()
        before = targets(module.graph)
        findings = rewrite_graph(module.graph)
        module.recompile()
        pairs = [(module(*rewritten), call(*eager)), *zip(rewritten, eager, strict=True)]
    worst = 0.0
    for found, wanted in (pair for pair in pairs if isinstance(pair[0], Tensor)):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        scale = tolerance.get(wanted.dtype, 0.0) * (1 + wanted.float().abs().max()) + 1e-30
        worst = max(worst, ((found.float() - wanted.float()).abs().max() / scale).item())
    return Traced(findings, worst, before, targets(module.graph))


@pytest.fixture(scope="session")
def step() -> Any:
    """The names of this file, for tests that cannot import it."""
    return SimpleNamespace(**globals())

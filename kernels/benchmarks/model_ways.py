"""The ways to run a stack of layers: eager, compiled, with the pass, captured by hand.

Lives here: from a way's name to a step that is compiled and captured. Not here: the model
(stack.py), measuring (bench_model.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

import kda_ops
from stack import Layer, Stack

Step = Callable[[], Tensor]
RunLayer = Callable[[Layer, Tensor, Tensor], Tensor]

EAGER, INDUCTOR, PASS, REDUCED = "eager", "Inductor", "pass", "pass, reduce-overhead"
OPERATOR, CAPTURED = "operator", ", captured"
WAYS = (
    EAGER,
    INDUCTOR,
    INDUCTOR + CAPTURED,
    PASS,
    REDUCED,
    PASS + CAPTURED,
    OPERATOR,
    OPERATOR + CAPTURED,
)


def layer_of(way: str) -> RunLayer:
    """Return how a way runs one layer."""
    run: RunLayer = Layer.with_operator if way == OPERATOR else Layer.forward
    if way in (EAGER, OPERATOR):
        return run
    mode = "reduce-overhead" if way == REDUCED else None

    def plain_layer(layer: Layer, x: Tensor, slots: Tensor) -> Tensor:
        return run(layer, x, slots)

    return torch.compile(plain_layer, dynamic=False, fullgraph=True, mode=mode)


def switched(way: str) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a way is compiled: with the pass, or without."""
    return kda_ops.enabled() if way in (PASS, REDUCED) else contextlib.nullcontext()


def step_of(stack: Stack, run: RunLayer) -> Step:
    """Return a step of the whole stack."""

    def step() -> Tensor:
        # Outputs of a graph tree's earlier step are not read any more.
        torch.compiler.cudagraph_mark_step_begin()
        x = stack.x
        for layer in stack.layers:
            x = run(cast(Layer, layer), x, stack.slots)
        return x

    return step


def steps(stack: Stack, ways: tuple[str, ...]) -> Iterator[tuple[str, Step]]:
    """Yield each way with its step, compiled and captured; what cannot be done is said."""
    for base in dict.fromkeys(way.removesuffix(CAPTURED) for way in ways):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        step = step_of(stack, layer_of(base))
        try:
            with switched(base):
                for _ in range(4):  # compile; a graph tree: warm up, record, replay
                    step()
            if skips := torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]:
                print(f"# {base}: {skips} graphs run without CUDA graphs", file=sys.stderr)
            if base in ways:
                yield base, step
            if base + CAPTURED in ways and stack.x.is_cuda:
                yield base + CAPTURED, capture(step)
        except Exception as error:  # one way that fails must not cost the others' figures
            print(f"# {base}: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr)


def capture(step: Step) -> Step:
    """Capture a step, made before, in a CUDA graph; return the replay."""
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        outputs.append(step())

    def replay() -> Tensor:
        graph.replay()
        return outputs[0]

    return replay

"""A stack of layers whose heads are shared out over ranks: its parts, its sums, its steps.

Lives here: what a rank keeps of a whole stack, a step with the sums over ranks in it, and the check
that the ranks' result is one rank's. Not here: the model (stack.py), what is compared with what
(bench_parallel.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from bench_model import TOLERANCE, synchronize
from model_ways import Step, capture
from stack import D, Layer, Sizes, Stack

ROUNDS = 5


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum in place over all ranks."""
    dist.all_reduce(x)
    return x


def step_of(stack: Stack, total: Callable[[Tensor], Tensor] | None) -> Step:
    """Return a step of the whole stack around the operator."""

    def step() -> Tensor:
        x = stack.x
        for layer in stack.layers:
            x = cast(Layer, layer).with_operator(x, stack.slots, total)
        return x

    return step


def ready(stack: Stack, total: Callable[[Tensor], Tensor] | None) -> Step:
    """Return a step that has run: on a GPU the replay of a graph."""
    step = step_of(stack, total)
    for _ in range(2):
        step()
    synchronize(stack)
    return capture(step) if stack.x.is_cuda else step


def timed(stack: Stack, step: Step, count: int, meet: Callable[[], object]) -> float:
    """Return microseconds a step, back to back; median over the rounds.

    Args:
        stack: that the step moves on.
        step: called before.
        count: steps a round.
        meet: what every round begins with, so that ranks start together.
    """
    rounds = []
    for _ in range(ROUNDS):
        meet()
        step()
        synchronize(stack)
        started = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(stack)
        rounds.append((time.perf_counter() - started) / count * 1e6)
    return statistics.median(rounds)


def keep_part(whole: Stack, part: Stack, rank: int) -> None:
    """Copy a rank's heads of every weight and pool, and the inputs, from a stack that has all."""
    part.x.copy_(whole.x)
    part.slots.copy_(whole.slots)
    for one, other in zip(whole.layers, part.layers, strict=True):
        source, target = cast(Layer, one), cast(Layer, other)
        mine = slice(rank * target.heads, (rank + 1) * target.heads)
        heads = (source.heads, D)
        qkv, gate, decay, beta = source.project.weight.split(source.sizes)
        qkv = qkv.unflatten(0, (3, *heads))[:, mine].flatten(0, 2)
        gate = gate.unflatten(0, heads)[mine].flatten(0, 1)
        target.project.weight.copy_(torch.cat([qkv, gate, decay, beta[mine]]))
        target.decay.weight.copy_(source.decay.weight.unflatten(0, heads)[mine].flatten(0, 1))
        target.out.weight.copy_(source.out.weight.unflatten(1, heads)[:, mine].flatten(1))
        target.taps.copy_(source.taps.unflatten(1, heads)[:, mine].flatten(1, 2))
        target.dt_bias.copy_(source.dt_bias.unflatten(0, heads)[mine].flatten())
        target.A_log.copy_(source.A_log[mine])
        target.state.copy_(source.state[:, mine])
        windows = source.window.unflatten(1, (3, *heads))[:, :, mine]
        target.window.copy_(windows.flatten(1, 3))


def check(sizes: Sizes, ranks: int) -> None:
    """Raise unless two steps of two layers over ranks give what one rank gives.

    Raises:
        RuntimeError: they do not.
    """
    whole = Stack(replace(sizes, layers=2, rows=8))
    part = Stack(replace(sizes, layers=2, rows=8, heads=sizes.heads // ranks))
    whole.reset()
    keep_part(whole, part, dist.get_rank())
    alone, shared = step_of(whole, None), step_of(part, sum_over_ranks)
    for _ in range(2):
        wanted, found = alone().float(), shared().float()
        away = float((found - wanted).norm() / (wanted - whole.x.float()).norm())
        if not away <= TOLERANCE:
            raise RuntimeError(f"rank {dist.get_rank()} is {away:.2g} away from one rank's result")


def filled(sizes: Sizes) -> Stack:
    """Return a stack with numbers in its pools."""
    stack = Stack(sizes)
    stack.reset()
    return stack

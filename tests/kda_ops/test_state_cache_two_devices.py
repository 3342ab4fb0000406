"""Slots that move from one GPU to the other, as prefill hands them over to decode."""

from dataclasses import replace

import pytest
import torch

import kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.device import on
from kda_ops import StateCache, StateSpec

pytestmark = pytest.mark.multigpu

FUSED = CONTRACTS[1]
SPECS = [
    StateSpec(2, 3),
    StateSpec(2, 3, state_dtype=torch.bfloat16, window_layout="DS", page_bytes=105600),
    StateSpec(2, 3, state_layout="kv", page_bytes=203520),
]
SOME_WORK = 200_000_000  # clock cycles that a stream is busy


@pytest.fixture(params=SPECS, ids=["pools", "bf16-DS-pages", "kv-pages"])
def spec(request):
    return request.param


def random_cache(spec, device, slots=6):
    """A cache with something in every slot, also in those that nobody has."""
    cache = StateCache(spec, slots, device)
    make = torch.Generator(device).manual_seed(0)
    for layer in cache.layers:
        layer.state.copy_(torch.randn(layer.state.shape, generator=make, device=device))
        layer.window.copy_(torch.randn(layer.window.shape, generator=make, device=device))
    return cache


def step(spec, layer, slots, seed):
    """Run one token of two rows on one layer; return the output."""
    sizes = {"B": 2, "H": spec.heads, "S": 6, "L": 3}
    fields = {"state_dtype": spec.state_dtype, "window": spec.window_layout, "seed": seed}
    values = draw(FUSED, Case(sizes, scalars={"state_layout": spec.state_layout}, **fields))
    values = on(str(layer.state.device), values)
    pools = {"state": layer.state, "conv_state": layer.window, "state_indices": slots}
    return kda_ops.fused_kda_decode(**values | pools)


@pytest.mark.parametrize("there", [0, 1])
def test_slots_move_between_gpus_bit_for_bit_into_any_layout(spec, there):
    source = StateCache(spec, 6, f"cuda:{1 - there}")
    slots = source.allocate(3)
    other = replace(spec, state_layout="kv", window_layout="SD", page_bytes=None)
    for layer in source.layers:
        layer.state.copy_(torch.randn_like(layer.state))
        layer.window.copy_(torch.randn_like(layer.window))
    wanted = source.snapshot(slots)
    for target in (spec, other):
        cache = random_cache(target, f"cuda:{there}")
        kept = cache.allocate(1)
        before = cache.snapshot(kept)
        moved = cache.adopt(source.snapshot(slots))
        back = StateCache(spec, 6, f"cuda:{1 - there}")
        found = back.snapshot(cache.move(moved, back))
        for got, expected in zip(found.states, wanted.states, strict=True):
            assert_same_bits(got.cpu(), expected.cpu(), "state")
        for got, expected in zip(found.windows, wanted.windows, strict=True):
            assert_same_bits(got.cpu(), expected.cpu(), "window")
        for got, expected in zip(cache.snapshot(kept).states, before.states, strict=True):
            assert_same_bits(got.cpu(), expected.cpu(), "a slot that did not move")
    assert torch.cuda.current_device() == 0


def test_prefill_on_one_gpu_and_decode_on_the_other_is_what_one_gpu_gives(spec):
    alone, prefill, decode = (
        StateCache(spec, 6, device) for device in ("cuda:0", "cuda:0", "cuda:1")
    )
    outputs = {0: [], 1: []}
    slots = alone.allocate(2)
    for seed in range(6):
        for layer in alone.layers:
            outputs[0].append(step(spec, layer, alone.indices(slots), seed))
    here, cache = prefill.allocate(2), prefill
    for seed in range(6):
        if seed == 3:
            here, cache = prefill.move(here, decode), decode
            assert prefill.live == []
        for layer in cache.layers:
            outputs[1].append(step(spec, layer, cache.indices(here), seed))
    for got, expected in zip(outputs[1], outputs[0], strict=True):
        assert_same_bits(got.cpu(), expected.cpu(), "output")
    found, wanted = decode.snapshot(here), alone.snapshot(slots)
    for got, expected in zip(
        (*found.states, *found.windows), (*wanted.states, *wanted.windows), strict=True
    ):
        assert_same_bits(got.cpu(), expected.cpu(), "pools")


def test_a_move_waits_for_what_streams_of_both_gpus_still_write(spec):
    source, target = StateCache(spec, 6, "cuda:0"), random_cache(spec, "cuda:1")
    slots = source.allocate(2)
    new = [torch.randn_like(layer.state) for layer in source.layers]
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    sides = [torch.cuda.Stream(device) for device in (0, 1)]
    with torch.cuda.stream(sides[1]), torch.cuda.stream(sides[0]):
        torch.cuda._sleep(SOME_WORK)
        for layer, state in zip(source.layers, new, strict=True):
            layer.state.copy_(state)
        moved = source.move(slots, target)
        found = target.snapshot(moved)
        states = [state.cpu() for state in found.states]
    for got, expected in zip(states, new, strict=True):
        assert_same_bits(got, expected[slots].cpu(), "state")

"""Copies of slots: fork, snapshot and rollback, moves between caches, files.

The end of the file is about code under torch.compile that copies a pool before a step updates it.
"""

import dataclasses
import subprocess
import sys

import pytest
import torch

import kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, clone, draw
from kda_kernels.testing.compare import assert_same_bits, assert_untouched
from kda_ops import StateCache, StateSpec

FUSED, SPECULATIVE = CONTRACTS[1:]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPEC = StateSpec(2, 1)
GEOMETRIES = [
    SPEC,
    StateSpec(2, 1, window_layout="DS", page_bytes=67840 + 48),
    StateSpec(2, 1, state_layout="kv", page_bytes=67840),
]


def filled(spec, slots=6, device="cpu", seed=0):
    """A cache of random contents, every slot in use."""
    generator = torch.Generator().manual_seed(seed)
    cache = StateCache(spec, slots, device)
    cache.allocate(cache.free)
    for layer in cache.layers:
        for pool in layer[:2]:
            pool.copy_(torch.randn(pool.shape, generator=generator))
    return cache


def logical(cache, slot):
    """Copies of what a slot holds, layout aside: states [V, K] and windows, on the CPU."""
    states = [layer.state[slot].cpu().clone() for layer in cache.layers]
    if cache.spec.state_layout == "kv":
        states = [state.mT for state in states]
    return [*states, *(layer.window[slot].cpu().clone() for layer in cache.layers)]


def assert_slots_equal(mine, theirs):
    for kind, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert_same_bits(a, b, f"pool {kind}")


def pools(cache):
    return [pool.clone() for layer in cache.layers for pool in layer[:2]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", GEOMETRIES)
def test_a_fork_equals_its_origin_and_goes_on_independently(spec, device):
    cache = filled(spec, device=device)
    cache.release([2, 5])
    before, origin = pools(cache), logical(cache, 3)
    forks = cache.fork(3, 2)
    assert sorted(forks) == [2, 5]
    for fork in forks:
        assert_slots_equal(logical(cache, fork), origin)
    for pool, old in zip(pools(cache), before, strict=True):
        assert_untouched(pool.cpu(), old.cpu(), forks, "pool")
    cache.reset([3])
    assert_slots_equal(logical(cache, forks[0]), origin)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", GEOMETRIES)
def test_a_rollback_brings_back_its_slots_and_touches_no_others(spec, device):
    cache = filled(spec, device=device)
    saved = {slot: logical(cache, slot) for slot in (2, 4)}
    snapshot = cache.snapshot([4, 2])
    for _ in range(2):
        for layer in cache.layers:
            layer.state.mul_(3)
            layer.window.add_(1)
        before = pools(cache)
        cache.rollback(snapshot)
        for slot in (2, 4):
            assert_slots_equal(logical(cache, slot), saved[slot])
        for pool, old in zip(pools(cache), before, strict=True):
            assert_untouched(pool.cpu(), old.cpu(), [2, 4], "pool")
    assert snapshot.nbytes == 2 * cache.spec.slot_bytes - 2 * cache.spec.padding_bytes


def test_a_rollback_of_some_slots_leaves_the_snapshot_s_other_slots():
    cache = filled(SPEC)
    saved, snapshot = logical(cache, 2), cache.snapshot([1, 2, 4])
    for layer in cache.layers:
        layer.state.zero_()
        layer.window.zero_()
    cache.rollback(snapshot, [2])
    assert_slots_equal(logical(cache, 2), saved)
    assert not any(tensor.any() for slot in (1, 4) for tensor in logical(cache, slot))


def test_snapshots_that_no_longer_fit_are_refused_and_nothing_changes():
    cache = filled(SPEC)
    snapshot = cache.snapshot([1, 2])
    before = pools(cache)
    for act, words in (
        (lambda: filled(SPEC).rollback(snapshot), "of another cache"),
        (lambda: cache.rollback(snapshot, [3]), "slot 3 is not in the snapshot"),
        (lambda: cache.rollback(snapshot, [1, 1]), "slot 1 is named twice"),
    ):
        with pytest.raises(ValueError, match=words):
            act()
    for pool, old in zip(pools(cache), before, strict=True):
        assert_same_bits(pool, old, "pool")
    cache.release([2])
    with pytest.raises(ValueError, match="slot 2 is not in use"):
        cache.rollback(snapshot)
    cache.allocate()
    with pytest.raises(ValueError, match="slot 2 was released after the snapshot"):
        cache.rollback(snapshot)
    assert not any(tensor.any() for tensor in logical(cache, 2))


@pytest.mark.parametrize("there", GEOMETRIES)
@pytest.mark.parametrize("here", GEOMETRIES)
def test_slots_move_between_caches_of_any_layout_bit_for_bit(there, here):
    prefill, decode = filled(there), filled(here, slots=5, seed=1)
    decode.release([1, 3])
    before = pools(decode)
    origin = {slot: logical(prefill, slot) for slot in (5, 2)}
    moved = prefill.move([5, 2], decode)
    assert (prefill.live, decode.live) == ([1, 3, 4], [1, 2, 3, 4])
    for slot, old in zip(moved, (5, 2), strict=True):
        assert_slots_equal(logical(decode, slot), origin[old])
    for pool, old in zip(pools(decode), before, strict=True):
        assert_untouched(pool, old, moved, "pool")


@pytest.mark.gpu
def test_slots_move_between_host_and_device_bit_for_bit():
    host, device = filled(GEOMETRIES[1]), StateCache(GEOMETRIES[2], 4, "cuda")
    origin = logical(host, 3)
    [slot] = host.move([3], device)
    assert_slots_equal(logical(device, slot), origin)
    [back] = device.move([slot], host)
    assert_slots_equal(logical(host, back), origin)


@pytest.mark.parametrize(
    "facts",
    [
        {"layers": 3},
        {"heads": 2},
        {"windows": False},
        {"state_dtype": torch.bfloat16},
        {"window_dtype": torch.float32},
        {"tokens": 2},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_slots_of_another_geometry_are_refused_and_nothing_changes(facts):
    there = StateSpec(2, 1, tokens=3)
    cache, other = filled(there), StateCache(dataclasses.replace(there, **facts), 6)
    with pytest.raises(ValueError, match=f"StateCache.adopt: {next(iter(facts))} must be equal"):
        cache.move([1, 2], other)
    assert (len(cache.live), other.live) == (5, [])
    assert not any(pool.any() for pool in pools(other))


def test_a_window_for_one_token_becomes_one_for_speculative_steps():
    """A prefilled sequence goes on in a speculative step of T = 3 as it does token by token."""
    prefill = filled(StateSpec(1, 2), slots=3)
    decode = StateCache(StateSpec(1, 2, tokens=3), 5)
    [first] = decode.adopt(prefill.snapshot([2]))
    slots = [first, *decode.allocate(2)]
    values = draw(SPECULATIVE, Case({"R": 3, "N": 1, "T": 3, "H": 2, "S": 5}))
    single = {a.name: clone(values)[a.name] for a in FUSED.arguments}
    values["state"], values["conv_state"] = decode.layers[0].state, decode.layers[0].window
    values["state_indices"] = decode.indices([slots])
    values["num_accepted_tokens"] = torch.tensor([1], dtype=torch.int32)
    drafted = kda_ops.packed_fused_kda_decode(**values)
    for t in range(3):
        token = single | {"x": values["x"][t : t + 1], "state_indices": prefill.indices([2])}
        for name in ("raw_gate", "raw_beta", "output_gate"):
            token[name] = values[name][:, t : t + 1]
        token["state"], token["conv_state"] = prefill.layers[0].state, prefill.layers[0].window
        torch.testing.assert_close(
            drafted[:, t], kda_ops.fused_kda_decode(**token)[:, 0], rtol=0.01, atol=1e-4
        )
        torch.testing.assert_close(
            decode.layers[0].state[slots[t]], prefill.layers[0].state[2], rtol=1e-5, atol=1e-6
        )


def test_saved_slots_come_back_bit_for_bit_in_a_cache_of_another_layout(tmp_path):
    cache, other = filled(GEOMETRIES[1]), filled(GEOMETRIES[2], seed=3)
    cache.layers[1].state[4, 0, 0, 0] = float("nan")
    other.release([2, 4])
    cache.save(tmp_path / "two.safetensors", [4, 1])
    loaded = other.load(tmp_path / "two.safetensors")
    assert sorted(loaded) == [2, 4]
    for slot, old in zip(loaded, (4, 1), strict=True):
        assert_slots_equal(logical(other, slot), logical(cache, old))


def test_files_that_hold_no_slots_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    cache = StateCache(SPEC, 4)
    cache.save(tmp_path / "good", cache.allocate(1))
    tensors = load_file(tmp_path / "good")
    spec = {"format": "kda_ops.StateCache 1", "spec": SPEC.to_json()}
    state = "layers.1.state"
    short = {k: v for k, v in tensors.items() if k != state}
    for name, held, metadata in (
        ("no slots", tensors, None),
        ("another format", tensors, spec | {"format": "2"}),
        ("no spec", tensors, {"format": spec["format"]}),
        ("an unknown spec", tensors, spec | {"spec": '{"lions": 3}'}),
        ("a layer short", short, spec),
        ("another shape", short | {state: tensors[state][:, :, 1:]}, spec),
        ("another type", short | {state: tensors[state].bfloat16()}, spec),
    ):
        save_file({k: v.contiguous() for k, v in held.items()}, tmp_path / name, metadata)
        with pytest.raises(ValueError, match=r"StateCache\.load|StateSpec"):
            cache.load(tmp_path / name)
    assert cache.live == [1]


def test_without_safetensors_only_files_are_missing():
    program = (
        "import sys; sys.modules['safetensors'] = None\n"
        "import kda_ops\n"
        "cache = kda_ops.StateCache(kda_ops.StateSpec(1, 1), 3)\n"
        "slots = cache.fork(*cache.allocate())\n"
        "try: cache.save('nowhere', slots)\n"
        "except ImportError as error: print(error)\n"
    )
    run = [sys.executable, "-c", program]
    printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert "pip install 'kda-ops[safetensors]'" in printed


def test_copies_of_the_pool_taken_in_compiled_code_hold_the_state_before_the_step():
    """Speculative rollback inside compiled code: these three spellings are safe.

    ``save[:] = pool[:]`` is not: Inductor may move it behind the operator (pytorch #198131).
    """
    values = draw(CONTRACTS[0], Case({"B": 2, "H": 1, "S": 4}))
    pool, save, slots = values["state"], torch.zeros_like(values["state"]), values["state_indices"]
    start, expected = pool.clone(), clone(values)
    arguments = {k: v for k, v in values.items() if k != "state"}

    def step(pool, save, slots):
        save.copy_(pool)
        whole, chosen = pool.clone(), pool.index_select(0, slots)
        return kda_ops.packed_kda_decode(**arguments, state=pool), whole, chosen

    output, whole, chosen = torch.compile(step, fullgraph=True)(pool, save, slots)
    assert_same_bits(output, kda_ops.packed_kda_decode(**expected), "output")
    assert_same_bits(pool, expected["state"], "state")
    assert_same_bits(save, start, "copy_")
    assert_same_bits(whole, start, "clone")
    assert_same_bits(chosen, start[slots], "index_select")

"""StateCache: slots come and go, errors change nothing, pools lie as asked. N05, N06, N07.

Copies of slots are in test_state_cache_copies.py, random lives of many sequences in
test_state_cache_sequences.py.
"""

import dataclasses
import math
import pickle
import re
from importlib.util import find_spec

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.torch_version import TorchVersion

import kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.compare import assert_same_bits, assert_untouched
from kda_kernels.testing.device import moved, on
from kda_ops import OutOfSlotsError, StateCache, StateSpec

PACKED, FUSED, SPECULATIVE = CONTRACTS
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GEOMETRIES = [
    StateSpec(2, 2),
    StateSpec(2, 2, window_layout="DS", state_dtype=torch.bfloat16),
    StateSpec(2, 2, tokens=3, window_layout="DS", state_layout="kv"),
    StateSpec(2, 2, page_bytes=135744),
    StateSpec(2, 2, page_bytes=135744 + 16, window_layout="DS"),
    StateSpec(2, 2, windows=False),
]
GEOMETRY_IDS = ["SD", "DS-bf16", "DS-T3-kv", "pages", "pages-DS", "no-windows"]


def scribbled(spec, slots=6, device="cpu"):
    """A cache whose every byte is a sentinel, padding and slot 0 included; all slots in use."""
    cache = StateCache(spec, slots, device)
    cache.allocate(cache.free)
    for layer in cache.layers:
        if layer.page is not None:
            layer.page.view(torch.uint8).fill_(0x5A)
        layer.state.copy_(torch.randn(layer.state.shape))
        layer.window.copy_(torch.randn(layer.window.shape))
    return cache


def contents(cache):
    """Copies of every byte of a cache."""
    storages = [pool.untyped_storage().cpu() for layer in cache.layers for pool in layer[:2]]
    return [torch.empty(0, dtype=torch.uint8).set_(storage).clone() for storage in storages]


def assert_unchanged(cache, before):
    for now, then in zip(contents(cache), before, strict=True):
        assert torch.equal(now, then)


def step_on(cache, slots, rows, seed=0, device="cpu"):
    """Run one fused step of ``rows`` rows on layer 0; rows past the slots are padding."""
    spec = cache.spec
    sizes = {"B": rows, "H": spec.heads, "S": cache.slots, "L": 3}
    values = on(device, draw(FUSED, Case(sizes, seed=seed)))
    values["state"], values["conv_state"] = cache.layers[0].state, cache.layers[0].window
    values["state_indices"] = cache.indices(slots, rows)
    values["state_layout"] = spec.state_layout
    return kda_ops.fused_kda_decode(**values)


def test_slots_are_handed_out_once_and_never_slot_zero():
    cache = StateCache(StateSpec(1, 1), 5)
    assert cache.allocate(4) == [1, 2, 3, 4]
    assert (cache.free, cache.live) == (0, [1, 2, 3, 4])
    cache.release([3, 1])
    assert cache.live == [2, 4]
    assert sorted(cache.allocate(2)) == [1, 3]


def test_no_slots_are_a_legal_number_of_slots():
    cache = StateCache(StateSpec(1, 1), 3)
    assert cache.allocate(0) == []
    cache.release([])
    cache.reset([])
    assert cache.indices([]).shape == (0,)
    assert cache.indices([], 2).tolist() == [-1, -1]
    assert cache.adopt(cache.snapshot([])) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", GEOMETRIES, ids=GEOMETRY_IDS)
def test_n06_a_slot_handed_out_again_equals_a_fresh_one_and_neighbours_stay(spec, device):
    cache, fresh = scribbled(spec, device=device), StateCache(spec, 6, device)
    for layer in cache.layers:
        layer.state[4], layer.window[4] = math.nan, 1e38
    before = [(layer.state.clone(), layer.window.clone()) for layer in cache.layers]
    for act in ("reset", "reallocate"):
        if act == "reset":
            cache.reset([4])
        else:
            for layer in cache.layers:
                layer.state[4] = -0.0
            cache.release([4])
            assert cache.allocate() == [4]
        for layer, new, (state, window) in zip(cache.layers, fresh.layers, before, strict=True):
            assert_same_bits(layer.state[4].cpu(), new.state[4].cpu(), "state")
            assert_same_bits(layer.window[4].cpu(), new.window[4].cpu(), "window")
            assert_untouched(layer.state.cpu(), state.cpu(), [4], "state")
            assert_untouched(layer.window.cpu(), window.cpu(), [4], "window")


def test_n06_decoding_in_a_reused_slot_equals_decoding_in_a_fresh_cache():
    cache, fresh = scribbled(StateSpec(1, 2)), StateCache(StateSpec(1, 2), 6)
    fresh.allocate(5)
    cache.layers[0].state[4] = math.nan
    cache.reset([4])
    for seed in range(3):
        mine, new = step_on(cache, [4], 1, seed), step_on(fresh, [4], 1, seed)
        assert_same_bits(mine, new, "output")
    assert_same_bits(cache.layers[0].state[4], fresh.layers[0].state[4], "state")


@pytest.mark.parametrize("device", DEVICES)
def test_n07_pages_give_the_bits_of_separate_pools_and_their_padding_stays(device):
    paged = scribbled(StateSpec(1, 2, page_bytes=135744), device=device)
    plain = StateCache(StateSpec(1, 2), 6, device)
    plain.allocate(5)
    plain.layers[0].state.copy_(paged.layers[0].state)
    plain.layers[0].window.copy_(paged.layers[0].window)
    page, state, window = paged.layers[0].page, paged.layers[0].state, paged.layers[0].window
    assert (state.stride(0), window.stride(0)) == (33936, 67872)
    assert state.untyped_storage().data_ptr() == page.data_ptr() == window.data_ptr()
    addresses = state.data_ptr(), window.data_ptr()
    for seed in range(3):
        outputs = [step_on(cache, [5, 2], 3, seed, device) for cache in (paged, plain)]
        assert_same_bits(outputs[0].cpu(), outputs[1].cpu(), "output")
    assert_same_bits(state.cpu(), plain.layers[0].state.cpu(), "state")
    assert_same_bits(window.cpu(), plain.layers[0].window.cpu(), "window")
    assert bool((page.view(torch.uint8)[:, 4608 + 131072 :] == 0x5A).all())
    assert addresses == (state.data_ptr(), window.data_ptr())


@pytest.mark.xfail(
    TorchVersion(torch.__version__) < (2, 13),
    reason="torch 2.11 loses one of two updates of one allocation through different types",
)
def test_n23_compiled_code_cuts_pages_inside_and_updates_them_in_place():
    spec = StateSpec(1, 2, page_bytes=135744)
    cache, twin = scribbled(spec), scribbled(spec)
    for pool, other in zip(cache.layers[0][:2], twin.layers[0][:2], strict=True):
        other.copy_(pool)
    values = draw(FUSED, Case({"B": 2, "H": 2, "S": 6, "L": 3}))
    values["state_indices"] = cache.indices([5, 2])

    def step(page):
        state, window = spec.cut(page)
        return kda_ops.fused_kda_decode(**values | {"state": state, "conv_state": window})

    compiled = torch.compile(step, fullgraph=True)
    output, (code, *_) = run_and_get_code(compiled, cache.layers[0].page)
    assert_same_bits(output, step(twin.layers[0].page), "output")
    assert_same_bits(cache.layers[0].page, twin.layers[0].page, "pages")
    assert not re.findall(r"empty_strided_cpu\(", code)


@pytest.mark.parametrize("device", DEVICES)
def test_n05_one_padding_index_is_null_for_every_operator_by_default(device):
    cache = scribbled(StateSpec(1, 2), device=device)
    before = contents(cache)
    state, window = cache.layers[0].state, cache.layers[0].window
    padding = torch.full((3,), cache.null_index, dtype=torch.int32)
    for contract, changes in (
        (PACKED, {}),
        (FUSED, {"conv_state": window}),
        (SPECULATIVE, {"conv_state": window, "state_indices": padding[:, None]}),
    ):
        if device == "cuda" and find_spec(f"kda_kernels.{contract.name}.cute") is None:
            continue
        sizes = {"B": 3, "R": 3, "N": 3, "T": 1, "H": 2, "S": 6, "L": 3}
        values = draw(contract, Case(sizes)) | {"state_indices": padding}
        values = on(device, {k: v for k, v in values.items() if k != "first_slot"})
        values |= {"state": state} | {k: v for k, v in changes.items() if k == "conv_state"}
        if "state_indices" in changes:
            values["state_indices"] = moved(changes["state_indices"], device)
        assert not getattr(kda_ops, contract.public_name)(**values).any()
    assert_unchanged(cache, before)


def test_indices_are_int32_and_padded_with_null_rows():
    cache = StateCache(StateSpec(1, 1, tokens=3), 9)
    cache.allocate(7)
    assert cache.indices([5, 2]).tolist() == [5, 2]
    assert cache.indices([5, 2], 4).tolist() == [5, 2, -1, -1]
    table = cache.indices([[1, 2, 3], [7, 6, 5]], 3)
    assert table.tolist() == [[1, 2, 3], [7, 6, 5], [-1, -1, -1]]
    assert table.dtype == torch.int32


@pytest.mark.parametrize("slots", [[4], [0], [-1], [6], [2, 2], [1, 5, 1], ["1"], [None]])
@pytest.mark.parametrize("method", ["release", "reset", "snapshot", "indices", "move", "save"])
def test_slots_that_are_not_in_use_are_refused_and_nothing_changes(method, slots, tmp_path):
    cache = scribbled(StateSpec(1, 1))
    cache.release([4])
    other = StateCache(cache.spec, 6)
    more = {"move": [other], "save": None}.get(method, [])
    before = contents(cache)
    with pytest.raises(ValueError, match=f"StateCache.{method}|StateCache.snapshot") as caught:
        if more is None:
            cache.save(tmp_path / "file", slots)
        else:
            getattr(cache, method)(slots, *more)
    assert "slot" in str(caught.value)
    assert (cache.live, cache.free, other.live) == ([1, 2, 3, 5], 1, [])
    assert not list(tmp_path.iterdir())
    assert_unchanged(cache, before)


@pytest.mark.parametrize(
    ("slot", "words"),
    [
        (4, "slot 4 is not in use: released already"),
        (0, "slot 0 is reserved for padding"),
        (9, "slot 9 is none of this cache, whose slots are 1 to 5"),
    ],
)
def test_errors_say_what_became_of_a_slot(slot, words):
    cache = scribbled(StateSpec(1, 1))
    cache.release([4])
    with pytest.raises(ValueError, match=words):
        cache.release([slot])


def test_running_out_of_slots_is_an_error_of_its_own_and_changes_nothing():
    cache = scribbled(StateSpec(1, 1))
    cache.release([2, 4])
    before, small = contents(cache), StateCache(cache.spec, 2)
    for act in (
        lambda: cache.allocate(3),
        lambda: cache.fork(1, 3),
        lambda: cache.adopt(cache.snapshot([1, 3, 5])),
        lambda: cache.move([1, 3], small),
    ):
        with pytest.raises(OutOfSlotsError, match="free; release sequences"):
            act()
        assert (cache.live, cache.free, small.free) == ([1, 3, 5], 2, 1)
    assert_unchanged(cache, before)
    with pytest.raises(OutOfSlotsError) as caught:
        cache.allocate(3)
    assert (caught.value.wanted, caught.value.free) == (3, 2)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_memory_is_accounted_for_to_the_byte():
    cache = StateCache(StateSpec(3, 2, page_bytes=135744), 5)
    cache.allocate(3)
    slot = 3 * 135744
    assert dataclasses.astuple(cache.memory) == (5 * slot, slot, 3 * slot, slot, slot, 5 * 3 * 64)
    held = sum(layer.page.untyped_storage().nbytes() for layer in cache.layers)
    assert held == cache.memory.total
    plain = StateCache(StateSpec(3, 2), 5)
    tensors = [pool for layer in plain.layers for pool in layer[:2]]
    assert sum(pool.untyped_storage().nbytes() for pool in tensors) == plain.memory.total
    assert plain.memory.padding == 0
    assert plain.spec.slot_bytes * 5 == plain.memory.total


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"layers": 0}, "layers must be >= 1"),
        ({"heads": 0}, "heads must be >= 1"),
        ({"tokens": 0}, "tokens must be >= 1"),
        ({"state_layout": "VK"}, "state_layout must be 'vk' or 'kv', got 'VK'"),
        ({"window_layout": "sd"}, "window_layout must be 'SD' or 'DS'"),
        ({"state_dtype": torch.float16}, "state_dtype must be torch.float32 or torch.bfloat16"),
        ({"window_dtype": torch.int8}, "window_dtype must be"),
        ({"page_bytes": 67840 - 16}, "page_bytes must be a multiple of 16 and >= 67840"),
        ({"page_bytes": 67840 + 8}, "page_bytes must be a multiple of 16"),
    ],
)
def test_impossible_geometries_are_refused(facts, words):
    with pytest.raises(ValueError, match=words):
        StateSpec(**{"layers": 1, "heads": 1} | facts)


def test_a_cache_needs_a_slot_beside_the_reserved_one():
    with pytest.raises(ValueError, match="slots must be >= 2"):
        StateCache(StateSpec(1, 1), 1)


def test_a_cache_made_in_inference_mode_can_be_used_outside_of_it():
    with torch.inference_mode():
        cache = StateCache(StateSpec(1, 2), 6)
        cache.allocate(2)
        inside = step_on(cache, [1], 1)
    cache.reset([1])
    assert_same_bits(step_on(cache, [1], 1), inside.clone(), "output")

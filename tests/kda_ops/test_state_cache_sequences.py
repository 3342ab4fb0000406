"""Random lives of sequences in a StateCache against a dictionary of sequences on their own.

Every sequence of the dictionary owns its tensors and is advanced alone. Whatever is allocated,
stepped in batches with padding, forked, rolled back, moved and released in between, each slot must
hold the bits of its sequence, and free slots must not matter.
"""

import pytest
import torch

import kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.compare import assert_same_bits
from kda_ops import OutOfSlotsError, StateCache, StateSpec

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

FUSED = CONTRACTS[1]
SPECS = [
    StateSpec(2, 1),
    StateSpec(2, 1, state_dtype=torch.bfloat16, window_layout="DS", page_bytes=35200),
    StateSpec(2, 1, state_layout="kv", page_bytes=67840 + 16),
]
SLOTS = 6


class Lives(RuleBasedStateMachine):
    """Sequences by name; ``alone`` holds their own tensors, ``slot_of`` where they live."""

    sequences = Bundle("sequences")
    snapshots = Bundle("snapshots")

    @initialize(spec=st.sampled_from(SPECS))
    def start(self, spec):
        self.cache = StateCache(spec, SLOTS)
        for layer in self.cache.layers:
            # Free slots hold what nobody may see.
            layer.state.fill_(float("nan"))
            layer.window.fill_(float("nan"))
        self.spec, self.alone, self.slot_of, self.names = spec, {}, {}, iter(range(10**6))

    def _named(self, slot, contents):
        name = next(self.names)
        self.slot_of[name], self.alone[name] = slot, contents
        return name

    @rule(target=sequences)
    def allocate(self):
        if not self.cache.free:
            with pytest.raises(OutOfSlotsError):
                self.cache.allocate()
            return hypothesis.stateful.multiple()
        empty = StateCache(self.spec, 2)
        return self._named(*self.cache.allocate(), [[p[1:] for p in x[:2]] for x in empty.layers])

    @rule(name=consumes(sequences))
    def release(self, name):
        slot = self.slot_of.pop(name)
        del self.alone[name]
        self.cache.release([slot])
        with pytest.raises(ValueError, match="released already"):
            self.cache.release([slot])

    @rule(name=sequences)
    def reset(self, name):
        self.cache.reset([self.slot_of[name]])
        for pool in (pool for layer in self.alone[name] for pool in layer):
            pool.zero_()

    @rule(target=sequences, name=sequences)
    def fork(self, name):
        if not self.cache.free:
            return hypothesis.stateful.multiple()
        [slot] = self.cache.fork(self.slot_of[name])
        return self._named(slot, _copied(self.alone[name]))

    @rule(target=snapshots, data=st.data())
    def snapshot(self, data):
        names = data.draw(st.lists(st.sampled_from([*self.alone, None]), unique=True))
        names = [name for name in names if name is not None]
        snapshot = self.cache.snapshot([self.slot_of[name] for name in names])
        return snapshot, {name: _copied(self.alone[name]) for name in names}

    @rule(saved=snapshots)
    def rollback(self, saved):
        snapshot, then = saved
        alive = {name: contents for name, contents in then.items() if name in self.alone}
        if len(alive) < len(then):
            with pytest.raises(ValueError, match=r"not in use|released after"):
                self.cache.rollback(snapshot)
        self.cache.rollback(snapshot, [self.slot_of[name] for name in alive])
        self.alone |= {name: _copied(contents) for name, contents in alive.items()}

    @rule(target=sequences, name=consumes(sequences))
    def move_there_and_back(self, name):
        """The same contents under a new name: earlier snapshots are of a slot that was released."""
        other = StateCache(StateSpec(2, 1, state_dtype=self.spec.state_dtype), 3)
        slot = self.slot_of.pop(name)
        slots = self.cache.move([slot], other)
        assert slot not in self.cache.live
        [slot] = other.move(slots, self.cache)
        return self._named(slot, self.alone.pop(name))

    @rule(data=st.data(), padding=st.integers(0, 2), seed=st.integers(0, 10**6))
    def step(self, data, padding, seed):
        names = data.draw(st.permutations(sorted(self.alone)))
        names = names[: data.draw(st.integers(0, len(names)))]
        rows = len(names) + padding
        sizes = {"B": max(rows, 1), "H": 1, "S": SLOTS, "L": 3}
        values = draw(
            FUSED, Case(sizes, seed=seed, scalars={"state_layout": self.spec.state_layout})
        )
        values = {k: _rows(v, k, slice(0, rows)) for k, v in values.items()}
        values["state_indices"] = self.cache.indices([self.slot_of[n] for n in names], rows)
        for number, layer in enumerate(self.cache.layers):
            batch = kda_ops.fused_kda_decode(
                **values | {"state": layer.state, "conv_state": layer.window}
            )
            assert not batch[:, len(names) :].any()
            for row, name in enumerate(names):
                state, window = self.alone[name][number]
                own = {k: _rows(v, k, slice(row, row + 1)) for k, v in values.items()}
                own |= {"state": state, "conv_state": window, "state_indices": None}
                single = kda_ops.fused_kda_decode(**own)
                assert_same_bits(batch[:, row], single[:, 0], "output")

    @invariant()
    def slots_hold_their_sequences(self):
        cache = getattr(self, "cache", None)
        if cache is None:
            return
        assert cache.live == sorted(self.slot_of.values())
        assert cache.free == SLOTS - 1 - len(self.slot_of)
        for name, slot in self.slot_of.items():
            for layer, alone in zip(cache.layers, self.alone[name], strict=True):
                assert_same_bits(layer.state[slot], alone[0][0], f"state of {name}")
                assert_same_bits(layer.window[slot], alone[1][0], f"window of {name}")


def _copied(contents):
    return [[pool.clone() for pool in layer] for layer in contents]


def _rows(value, name, rows):
    """The rows of one input; everything else as it is."""
    if name == "x":
        return value[rows]
    return value[:, rows] if name in ("raw_gate", "raw_beta", "output_gate") else value


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, database=None, derandomize=True
)

"""Ways to switch the pass on, alone and beside passes that are there already."""

import subprocess
import sys

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import kda_ops
from kda_ops.passes import KdaPass, Options
from kda_ops.passes.roundings import MarkRoundings, PutBackRoundings
from kda_ops.passes.switch import SLOT, SLOTS, composed

LISTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


class Recording(CustomGraphPass):
    """A user's pass that says when it ran and what the graph looked like."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def __call__(self, graph):
        self.seen.append((self.name, any("auto_functionalized" in n.name for n in graph.nodes)))

    def uuid(self):
        return self.name


@pytest.fixture(autouse=True)
def _slots_as_before():
    before = {name: slot(name) for name in SLOTS}
    yield
    for name, value in before.items():
        setattr(inductor_config, name, value)


def slot(name=SLOT):
    return getattr(inductor_config, name)


def holds_ours(name):
    return isinstance(slot(name), SLOTS[name])


def test_importing_changes_nothing():
    program = (
        "import torch._inductor.config as c, kda_ops, kda_ops.passes.backend, sys;"
        f"assert not any(getattr(c, slot) for slot in {list(SLOTS)});"
        "assert 'cutlass' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", SLOTS)
def test_enable_and_disable_leave_every_slot_as_it_was(name):
    kda_ops.enable()
    assert holds_ours(name)
    kda_ops.disable()
    assert slot(name) is None
    kda_ops.disable()
    assert slot(name) is None


def test_enabling_twice_is_an_error():
    kda_ops.enable()
    with pytest.raises(RuntimeError, match="already enabled"):
        kda_ops.enable()
    with pytest.raises(RuntimeError, match="already enabled"), kda_ops.enabled():
        pass


@pytest.mark.parametrize("name", SLOTS)
def test_a_users_pass_comes_back_when_the_pass_is_disabled(name):
    mine = Recording("mine", [])
    setattr(inductor_config, name, mine)
    kda_ops.enable()
    assert slot(name).first == (mine,)
    kda_ops.disable()
    assert slot(name) is mine


@pytest.mark.parametrize("name", SLOTS)
def test_enabled_lasts_for_the_block(name):
    with kda_ops.enabled():
        assert holds_ours(name)
    assert slot(name) is None


@pytest.mark.parametrize("name", SLOTS)
def test_inductor_options_compose_with_the_pass_in_the_slot(name):
    mine = Recording("mine", [])
    setattr(inductor_config, name, mine)
    options = kda_ops.inductor_options()
    assert list(options) == list(SLOTS)
    assert options[name].first == (mine,)
    kda_ops.enable()
    assert kda_ops.inductor_options()[name] is slot(name)


def test_the_uuid_covers_options_and_other_passes():
    uuids = {
        repr(made.uuid())
        for made in (
            KdaPass(),
            KdaPass(Options(rewrite=False)),
            KdaPass(Options(certify=False)),
            KdaPass(first=(Recording("a", []),)),
            KdaPass(first=(Recording("b", []),)),
            MarkRoundings(),
            PutBackRoundings(),
        )
    }
    assert len(uuids) == 7
    assert torch.__version__ in repr(KdaPass().uuid())


def test_a_bare_callable_before_it_leaves_the_uuid_undecided():
    assert KdaPass(first=(lambda graph: None,)).uuid() is None


def test_two_users_passes_run_first_and_in_their_order(step):
    seen = []
    first, second = Recording("first", seen), Recording("second", seen)

    def observe(graph, findings):
        seen.append(("ours", any("auto_functionalized" in n.name for n in graph.nodes)))

    with inductor_config.patch({SLOT: [first, second] if LISTS else first}):
        ours = composed(SLOT)
    if not LISTS:
        ours.first = (first, second)
    ours.observers = (observe,)
    spelling = step.Spelling(cast=False)
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch({SLOT: ours, "fx_graph_cache": False}):
        torch.compile(step.StepLayer(spelling))(*step.inputs(spelling))
    assert seen == [("first", False), ("second", False), ("ours", True)]


def test_options_may_look_without_rewriting(step):
    spelling = step.Spelling()
    captured = step.capture(
        step.StepLayer(spelling), *step.inputs(spelling), options=Options(rewrite=False)
    )
    assert captured.matches == 1
    assert captured.after == captured.before


def test_a_users_options_and_mode_reach_inductor_through_the_backend(step):
    seen = []
    spelling = step.Spelling(scale=0.25)
    torch._dynamo.reset()
    counters.clear()
    options = {name: Recording(name, seen) for name in SLOTS} | {"fx_graph_cache": False}
    with torch.no_grad():
        torch.compile(step.StepLayer(spelling), backend="kda", options=options)(
            *step.inputs(spelling)
        )
    assert seen == [(name, False) for name in SLOTS]
    assert counters["kda"]["matches"] == 1

"""Layers that hypothesis puts together: one meaning is one operator, another one never is."""

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # a failing layer is small enough to be read
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# Rewrites of one value that keep it, bit for bit.
KEEPING = {
    "view": lambda x: x.reshape(-1).view(x.shape),
    "transpose": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "double negation": lambda x: x.neg().neg(),
    "twice and half": lambda x: (x * 2) * 0.5,
    "expand": lambda x: x[None].expand(1, *x.shape)[0],
}
# Changes of one value that it does not survive.
CHANGING = {
    "scaled": lambda x: x * 1.01,
    "shifted": lambda x: x + 0.1,
    "negated": lambda x: -x,
    "rolled": lambda x: x.roll(1, -1),
    "rows swapped": lambda x: x.flip(0),
    "absolute": lambda x: x.abs(),
    "clamped": lambda x: x.clamp(-0.5, 0.5),
}
PLACES = ["unit", "gate", "beta", "norm", "out", "silu"]


def at(function, change):
    """Return a part with something done to its first argument's value before."""
    return lambda first, *rest: function(change(first), *rest)


@SETTINGS
@given(data=st.data())
def test_rewrites_that_keep_the_meaning_are_still_matched(layers, data):
    chosen = layers.chosen(lambda _, options: data.draw(st.sampled_from(options)))
    for place in data.draw(st.lists(st.sampled_from(PLACES), max_size=2, unique=True)):
        kept = data.draw(st.sampled_from(sorted(KEEPING)))
        setattr(chosen, place, at(getattr(chosen, place), KEEPING[kept]))
    traced = layers.trace(chosen)
    assert [f.operator for f in traced.findings] == ["kda::fused_decode"]
    assert traced.difference < 1


@SETTINGS
@given(data=st.data())
def test_changes_of_the_meaning_are_never_lost(layers, data):
    chosen = layers.chosen(lambda _, options: data.draw(st.sampled_from(options)))
    place = data.draw(st.sampled_from(PLACES))
    changed = data.draw(st.sampled_from(sorted(CHANGING)))
    setattr(chosen, place, at(getattr(chosen, place), CHANGING[changed]))
    assert layers.trace(chosen).difference < 1

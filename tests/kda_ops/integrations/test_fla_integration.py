"""flash-linear-attention's layers decode through the operator, and everything else stays theirs.

The layer is a stand-in (see conftest.py), also where the library is installed: its own needs a GPU.
"""

import copy
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kda_ops.integrations.fla import Windows, use_fused_decode

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("options", "dtype", "rows"),
    [
        ({}, F32, 2),
        ({"lower_bound": -5.0}, F32, 1),
        ({"bias": True, "lower_bound": -3.0}, F32, 3),
        ({"bias": True}, BF16, 2),
    ],
)
def test_a_layer_decodes_as_its_own_code_does_and_prefills_by_it(fla, options, dtype, rows):
    fla.compare(fla.KimiDeltaAttention(**options).eval().to(dtype), rows)


@pytest.fixture(scope="session")
def naive():
    """The library's function in PyTorch; imported before a stand-in is in its layer's place."""
    reason = "flash-linear-attention (or Triton, which it imports) is not installed"
    module = pytest.importorskip("fla.ops.kda.naive", reason=reason, exc_type=ImportError)
    return module.naive_recurrent_kda


def test_it_agrees_with_the_library_s_naive_recurrence(naive, fla):
    recurrent = partial(fla.fused_recurrent_kda, naive=naive)
    parts = SimpleNamespace(**(vars(fla.PARTS) | {"recurrent": recurrent}))
    fla.compare(fla.KimiDeltaAttention(parts).eval())


@pytest.fixture
def decoding(fla):
    """An exchanged layer and a cache after a prompt of two rows."""
    layer = fla.KimiDeltaAttention().eval()
    exchange = use_fused_decode(layer)
    cache = fla.Cache()
    prompt, x = torch.randn(2, 3, fla.HIDDEN), torch.randn(2, 1, fla.HIDDEN)
    with torch.no_grad():
        layer(prompt, past_key_values=cache, use_cache=True)
    step = partial(layer, x, past_key_values=cache, use_cache=True)
    return SimpleNamespace(layer=layer, exchange=exchange, cache=cache, step=step)


def test_states_are_updated_where_they_are(decoding):
    before = dict(decoding.cache[0])
    values = copy.deepcopy(before)
    assert values["conv_state"][1]._base is values["conv_state"].joined
    with torch.no_grad():
        decoding.step()
    after = decoding.cache[0]
    assert after["recurrent_state"] is before["recurrent_state"]
    assert after["conv_state"] is before["conv_state"]
    assert not torch.equal(after["recurrent_state"], values["recurrent_state"])
    assert isinstance(after["conv_state"], Windows)
    for new, old in zip(after["conv_state"], values["conv_state"], strict=True):
        assert torch.equal(new[..., :3], old[..., 1:])


def test_padding_rows_are_zero_and_keep_their_states(decoding):
    other, plain = copy.deepcopy(decoding.cache), decoding.step
    with torch.no_grad():
        wanted = plain()[0]
        before = copy.deepcopy(other[0])
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
        found = plain(past_key_values=other, attention_mask=mask)[0]
    assert torch.equal(found[0], wanted[0]) and not found[1].any()
    for name in ("recurrent_state", "conv_state"):
        new, old = (
            torch.cat(tuple(x), 1) if name == "conv_state" else x
            for x in (other[0][name], before[name])
        )
        assert torch.equal(new[1], old[1]) and not torch.equal(new[0], old[0])


def test_windows_that_a_cache_has_reordered_are_joined_again(decoding):
    order = torch.tensor([1, 0])
    other = copy.deepcopy(decoding.cache)
    other.states[0] = {
        "recurrent_state": other[0]["recurrent_state"][order],
        "conv_state": tuple(window[order] for window in other[0]["conv_state"]),
    }
    x = torch.randn(2, 1, 64)
    with torch.no_grad():
        wanted = decoding.layer(x, past_key_values=decoding.cache, use_cache=True)[0]
        found = decoding.layer(x[order], past_key_values=other, use_cache=True)[0]
    assert torch.equal(found, wanted[order])


@pytest.mark.parametrize("case", ["gradients", "training", "no cache", "packed", "first token"])
def test_calls_that_are_no_decode_stay_with_the_layer(decoding, fla, case):
    decoding.layer.train(case == "training")
    changes = {
        "no cache": {"past_key_values": None},
        "packed": {"cu_seqlens": torch.tensor([0, 1])},
        "first token": {"past_key_values": fla.Cache()},
    }
    calls = decoding.layer.calls
    with torch.set_grad_enabled(case == "gradients"):
        decoding.step(**changes.get(case, {}))
    assert decoding.layer.calls == calls + 1


def test_weights_are_read_again_at_every_prefill(decoding, fla):
    layer, fresh = decoding.layer, fla.KimiDeltaAttention().eval()
    layer.load_state_dict(fresh.state_dict())
    caches = fla.Cache(), fla.Cache()
    with torch.no_grad():
        for length in (2, 1):
            x = torch.randn(2, length, fla.HIDDEN)
            pairs = zip((fresh, layer), caches, strict=True)
            wanted, found = (m(x, past_key_values=c, use_cache=True)[0] for m, c in pairs)
    fla.close(found, wanted)


def test_a_compiled_decode_is_one_graph_with_one_operator(decoding, fla):
    targets = []

    def backend(module, _):
        targets.extend(str(n.target) for n in module.graph.nodes)
        return module

    other = copy.deepcopy(decoding.cache)
    with torch.no_grad():
        wanted = decoding.step()[0]
        compiled = torch.compile(decoding.layer, fullgraph=True, backend=backend)
        arguments = decoding.step.args, decoding.step.keywords | {"past_key_values": other}
        found = compiled(*arguments[0], **arguments[1])[0]
    fla.close(found, wanted)
    assert torch.equal(other[0]["recurrent_state"], decoding.cache[0]["recurrent_state"])
    assert sum("fused_decode" in target for target in targets) == 1


def test_undoing_gives_the_layer_its_own_forward_back(fla):
    model = torch.nn.Sequential(fla.KimiDeltaAttention(), fla.KimiDeltaAttention())
    with use_fused_decode(model) as exchange:
        assert exchange.layers == tuple(model)
        assert all("forward" in vars(layer) for layer in model)
    exchange.undo()
    assert not any("forward" in vars(layer) for layer in model)


REFUSED = {
    "4 value heads on 2 of q and k": {"num_v_heads": 4},
    "heads are 128 by 256; it serves 128 by 128": {"head_v_dim": 256},
    "no short convolutions": {"use_short_conv": False},
    "another activation than SiLU": {
        "v_conv1d": SimpleNamespace(kernel_size=(4,), activation=None)
    },
    "beta is doubled": {"allow_neg_eigval": True},
    "lower bound is 0.0; it has to be below 0": {"lower_bound": 0.0},
    "no A_log": {"A_log": None},
}


@pytest.mark.parametrize(("sentence", "changes"), REFUSED.items())
def test_a_layer_that_the_operator_does_not_serve_is_refused_and_nothing_changes(
    fla, sentence, changes
):
    model = torch.nn.Sequential(fla.KimiDeltaAttention(), fla.KimiDeltaAttention())
    for name, value in changes.items():
        if name in model[1]._modules:
            delattr(model[1], name)
        setattr(model[1], name, value)
    with pytest.raises(ValueError, match=f"1 cannot decode fused: .*{sentence}"):
        use_fused_decode(model)
    assert "forward" not in vars(model[0])


def test_other_widths_gates_and_versions_are_refused(fla, monkeypatch):
    for options, sentence in (
        ({"conv_size": 3}, "convolutions are 3 wide"),
        ({"output": "swish"}, "output gate is swish"),
    ):
        with pytest.raises(ValueError, match=sentence):
            use_fused_decode(fla.KimiDeltaAttention(**options))
    layer = fla.KimiDeltaAttention()
    old = SimpleNamespace(fused_recurrent_kda=lambda q, k, v: None)
    monkeypatch.setitem(sys.modules, "fla.layers.kda", old)
    with pytest.raises(ValueError, match=r"flash-linear-attention 0\.5\.1 or newer"):
        use_fused_decode(layer)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no KimiDeltaAttention layer"):
        use_fused_decode(torch.nn.Linear(2, 2))

"""live_peer.py and speculative_peer.py without a GPU: PyTorch functions in the peer's place."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import bench_speculative
import decode_calls
import kda_ops
import live_peer
import speculative_peer

CELLS = [bench_speculative.Cell("f32", layout, "SD", 2, 3, 4) for layout in ("vk", "kv")]


def causal_conv1d(x, weight, initial_state, output_final_state, activation):
    """[B, T, D] by [D, 4] taps, behind the last four columns of before."""
    assert output_final_state and activation == "silu" and x.is_contiguous()
    columns = torch.cat([initial_state, x.mT], -1)
    y = F.conv1d(columns[:, :, 1:].float(), weight[:, None].float(), groups=x.shape[2])
    return F.silu(y).mT.contiguous().to(x.dtype), columns[:, :, -4:]


def tokens(q, k, v, S, *, g, beta, A_log, dt_bias, lower_bound, state_v_first=False, **flags):
    """Yield the output [H, V] and the state [H, V, K] behind each token of one sequence."""
    assert all(flags.values())
    for t in range(len(q)):
        rate = A_log.exp()[:, None]
        decay = lower_bound * torch.sigmoid(rate * (g[t] + dt_bias.view(g[t].shape)))
        unit_q, unit_k = (F.normalize(part[t].float(), dim=-1, eps=1e-3) for part in (q, k))
        S = S.float() if state_v_first else S.float().mT
        S = S * decay.exp()[:, None]
        u = beta[t].float().sigmoid()[:, None] * (v[t] - (S @ unit_k[..., None])[..., 0])
        S = S + u[..., None] * unit_k[:, None]
        o = (S @ unit_q[..., None])[..., 0] * 128**-0.5
        S = S if state_v_first else S.mT
        yield o.to(q.dtype), S


def fused_recurrent_kda(q, k, v, initial_state, output_final_state, g, beta, **options):
    """Every sequence from its own state."""
    assert output_final_state
    outputs = []
    for n in range(len(q)):
        steps = tokens(q[n], k[n], v[n], initial_state[n], g=g[n], beta=beta[n], **options)
        outputs.append(torch.stack([o for o, _ in steps]))
    return torch.stack(outputs), None


def fused_recurrent_kda_fwd(
    q, k, v, initial_state, inplace_final_state, ssm_state_indices, num_accepted_tokens, **options
):
    """Every sequence from the state of its last accepted token; all states to the pool."""
    assert inplace_final_state
    outputs, g, beta = [], options.pop("g"), options.pop("beta")
    for n, slots in enumerate(ssm_state_indices.tolist()):
        source = initial_state[slots[num_accepted_tokens[n] - 1]].clone()
        steps = list(tokens(q[n], k[n], v[n], source, g=g[n], beta=beta[n], **options))
        outputs.append(torch.stack([o for o, _ in steps]))
        for slot, (_, S) in zip(slots, steps, strict=True):
            initial_state[slot] = S.to(initial_state.dtype)
    return torch.stack(outputs), initial_state


def rms_norm_gated(x, g, weight, bias, activation, eps):
    assert bias is None and activation == "sigmoid"
    return (F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps) * g.sigmoid()).to(x.dtype)


@pytest.fixture
def peer(monkeypatch):
    """Install the functions under the peer's names."""
    monkeypatch.setattr(live_peer, "name", lambda: "the peer")
    of_module = {
        "fla": (),
        "fla.modules": (),
        "fla.modules.convolution": (causal_conv1d,),
        "fla.modules.fused_norm_gate": (rms_norm_gated,),
        "fla.ops": (),
        "fla.ops.kda": (fused_recurrent_kda,),
        "fla.ops.kda.fused_recurrent": (fused_recurrent_kda_fwd,),
    }
    for name, functions in of_module.items():
        module = ModuleType(name)
        module.__dict__.update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)


def ours(values):
    return kda_ops.packed_fused_kda_decode(**values)


def test_one_step_computes_what_packed_decode_does(peer, monkeypatch, capsys):
    cell = decode_calls.Cell("packed_decode", "kv", "f32", 2, 3)
    values = decode_calls.values_of(cell, "cpu")
    assert live_peer.call(cell, values) is not None, capsys.readouterr().out
    monkeypatch.setattr(sys.modules["fla.ops.kda"], "fused_recurrent_kda", lambda q, *_, **__: (q,))
    assert live_peer.call(cell, values) is None
    assert "another result than ours" in capsys.readouterr().out


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_both_ways_take_the_tokens_that_we_take(peer, cell, capsys):
    values = bench_speculative.values_of(cell, "cpu")
    before = {name: values[name].clone() for name in ("state", "conv_state")}
    assert len(set(values["num_accepted_tokens"].tolist())) > 1
    found = speculative_peer.calls(cell.layout, values, ours)
    assert list(found) == ["one state", "checkpoints"], capsys.readouterr().out
    for name, tensor in before.items():
        torch.testing.assert_close(values[name], tensor, rtol=0, atol=0)


def test_a_way_that_computes_something_else_is_named_and_not_timed(peer, monkeypatch, capsys):
    values = bench_speculative.values_of(CELLS[0], "cpu")
    module = sys.modules["fla.ops.kda.fused_recurrent"]
    monkeypatch.setattr(module, "fused_recurrent_kda_fwd", lambda q, *_, **__: (-q, None))
    assert list(speculative_peer.calls("vk", values, ours)) == ["one state"]
    said = capsys.readouterr().out
    assert "the peer, checkpoints: relative difference" in said and "not timed" in said


def test_checkpoints_that_are_not_written_are_noticed(peer, monkeypatch, capsys):
    values = bench_speculative.values_of(CELLS[1], "cpu")
    module, whole = sys.modules["fla.ops.kda.fused_recurrent"], fused_recurrent_kda_fwd

    def forgetful(q, k, v, initial_state, **options):
        return whole(q, k, v, initial_state=initial_state.clone(), **options)

    monkeypatch.setattr(module, "fused_recurrent_kda_fwd", forgetful)
    assert list(speculative_peer.calls("kv", values, ours)) == ["one state"]
    assert "the peer, checkpoints: relative difference" in capsys.readouterr().out


def test_checkpoints_without_a_value_are_noticed(peer, monkeypatch, capsys):
    values = bench_speculative.values_of(CELLS[0], "cpu")
    module, whole = sys.modules["fla.ops.kda.fused_recurrent"], fused_recurrent_kda_fwd

    def broken(q, k, v, initial_state, **options):
        output, pool = whole(q, k, v, initial_state=initial_state, **options)
        return output, pool.fill_(torch.nan)

    monkeypatch.setattr(module, "fused_recurrent_kda_fwd", broken)
    assert list(speculative_peer.calls("vk", values, ours)) == ["one state"]
    assert "nan" in capsys.readouterr().out


def test_without_the_peer_there_is_nothing_to_time(monkeypatch):
    monkeypatch.setattr(live_peer, "name", lambda: None)
    assert speculative_peer.calls("vk", {}, ours) == {}

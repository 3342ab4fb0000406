"""Three ways of decoding agree, and whatever does not agree is a fault with exit status 1."""

import argparse
import dataclasses
import json
import re

import expecttest
import pytest
import torch

from kda_ops.demo import command, comparison, report
from kda_ops.demo.comparison import EAGER, PLAIN, REWRITTEN, Setting, Sizes
from kda_ops.demo.decode import budget, difference

SIZES = Sizes(layers=2, heads=1, hidden=32, rows=3, steps=8, seed=3)


@pytest.fixture(scope="module")
def compared():
    # A second graph for the same step would make the figures those of compiling.
    with torch._dynamo.config.patch(error_on_recompile=True):
        return comparison.compare(Setting.of(SIZES))


def arguments(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def run(monkeypatch, compared, *words):
    """The command, given a comparison that has been made already."""
    monkeypatch.setattr(command, "compare", lambda setting, finished: compared)
    return command.run(arguments("--layers", "2", "--heads", "1", "--batch", "3", *words))


def with_decoded(compared, name, **changes):
    decoded = dict(compared.decoded)
    decoded[name] = dataclasses.replace(decoded[name], **changes)
    return dataclasses.replace(compared, decoded=decoded)


def with_compiled(compared, **changes):
    compiled = dict(compared.compiled)
    compiled[REWRITTEN] = dataclasses.replace(compiled[REWRITTEN], **changes)
    return dataclasses.replace(compared, compiled=compiled)


def test_three_ways_agree_and_every_layer_is_rewritten(compared):
    assert compared.faults() == []
    assert compared.compiled[REWRITTEN].rewritten == SIZES.layers
    assert compared.compiled[REWRITTEN].operator_calls == SIZES.layers
    assert compared.compiled[PLAIN].operator_calls == 0
    assert not torch.equal(*compared.decoded[EAGER].tokens[-2:]), "the text goes in a circle"


def test_what_was_folded_is_sorted_by_layer(compared):
    first, second = compared.compiled[REWRITTEN].folded_by_step
    assert [o.target for o in first] == [o.target for o in second]
    assert {"index", "index_put", "rsqrt", "sigmoid"} <= {o.target for o in first}


def test_status_is_zero_when_all_is_well_and_figures_are_written(compared, monkeypatch, tmp_path):
    assert run(monkeypatch, compared, "--json", str(tmp_path / "figures.json")) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["rewritten"] == 2
    assert set(figures["ways"]) == {EAGER, PLAIN, REWRITTEN}


def _other_tokens(compared):
    tokens = compared.decoded[REWRITTEN].tokens.clone()
    tokens[-1, 0] += 1
    return with_decoded(compared, REWRITTEN, tokens=tokens)


def _pool_off(compared):
    pools = {name: pool.clone() for name, pool in compared.decoded[REWRITTEN].pools.items()}
    slot = compared.setting.batch.slots[0]
    pools["layers.0.attention.state"][slot, 0, 0, 0] += 1e-3
    return with_decoded(compared, REWRITTEN, pools=pools)


def _nan(compared):
    logits = compared.decoded[PLAIN].logits.clone()
    logits[0, 0, 0] = float("nan")
    return with_decoded(compared, PLAIN, logits=logits)


def _idle_slot(compared):
    pools = {name: pool.clone() for name, pool in compared.decoded[REWRITTEN].pools.items()}
    idle = next(s for s in range(SIZES.slots) if s not in compared.setting.batch.slots)
    pools["layers.1.attention.window"][idle, 0, 0] = -pools["layers.1.attention.window"][idle, 0, 0]
    return with_decoded(compared, REWRITTEN, pools=pools)


def _layer_left(compared):
    return with_compiled(compared, findings=compared.compiled[REWRITTEN].findings[:1])


def _pool_copied(compared):
    line = "buf0 = empty_strided_cpu((6, 1, 128, 128), (16384, 16384, 128, 1), torch.float32)"
    return with_compiled(compared, code=(*compared.compiled[REWRITTEN].code, line))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (_other_tokens, "greedy tokens differ"),
        (_pool_off, "than the budget allows"),
        (_nan, "torch.compile: further from float64"),
        (_idle_slot, "a slot that no row lives in was written"),
        (_layer_left, "1 of 2 layers were rewritten"),
        (_pool_copied, "still copies the pool layers.0.attention.state"),
    ],
)
def test_status_is_one_and_the_fault_is_named(compared, monkeypatch, capsys, wrong, sentence):
    assert run(monkeypatch, wrong(compared), "--quiet") == 1
    assert sentence in capsys.readouterr().out


def test_the_report_of_the_rewrite_reads_like_this(compared):
    text = "\n".join(report.rewrite(compared.compiled[REWRITTEN], SIZES.layers))
    # Line numbers move with the model's comments; the tool that accepts snapshots is for ASCII.
    text = re.sub(r"^ +\d+  ", "      ", text, flags=re.M).replace("×", "x").replace("…", "~")
    expecttest.assert_expected_inline(
        re.sub(r" {2,}(?=[a-z])", "  ", text),
        """\
Rewritten: 2 of 2 layers

  before  72 operations, from model.py:
  return torch.rms_norm(input, normalized_shape, weight, eps)  pow, mean, add, rsqrt, mul x2
  taps = torch.cat([self.window[slots], qkv.unsqueeze(-1)], dim=-1)  index, cat
  self.window[slots] = taps[..., 1:]  index_put
  q, k, v = F.silu((taps * self.conv).sum(-1)).chunk(3, dim=-1)  mul, sum, neg, exp, add, div
  q = unit(q.view(heads)) * D**-0.5  mul
  a = (decay + self.dt_bias).view(heads)  add
  keep = torch.exp(-self.A_log.exp()[:, None] * F.softplus(a))  exp x3, neg, gt, log1p, where, mul
  beta = torch.sigmoid(beta)  sigmoid
      S = self.state[slots].to(v.dtype) * keep[..., None]  index, mul
  u = beta[..., None] * (v - (S * k[..., None]).sum(-2))  mul x2, sum, sub
      S = S + k[..., None] * u[..., None, :]  mul, add
  o = (S * q[..., None]).sum(-2)  mul, sum
  self.state[slots] = S.to(self.state.dtype)  index_put
  o = F.rms_norm(o, (D,), self.norm, 1e-5) * torch.sigmoid(gate.res~  sigmoid, mul
  return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)  mul x4, sum x2, add x2, rsqrt x2

  after   1 operation:
  kda::fused_decode(
  x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state,
  state_indices, output_gate, norm_weight,
  scale=0.0883883, norm_eps=1e-05, lower_bound=None, first_slot=None,
  state_layout="kv")
  on the pools themselves: each is read once and written once, in place
  (shown: the first layer; --verbose shows all 2)""",
    )


def test_a_layer_left_alone_is_reported_with_reason_and_advice(compared):
    from kda_ops.passes import Finding, Reason

    left = Finding("sum_3", "model.py:9: x", "pool", reason=Reason.NORM_EPS, detail="eps = 1e-12")
    lines = list(report.rewrite(with_compiled(compared, findings=(left,)).compiled[REWRITTEN], 2))
    assert lines[0] == "Rewritten: 0 of 2 layers"
    assert "NORM_EPS" in lines[1] and "eps = 1e-12" in lines[1]
    assert "model.py:9: x" in lines[2]
    assert Reason.NORM_EPS.advice in lines[3]


def test_a_gpu_without_kernels_is_named_and_the_cpu_is_used(monkeypatch):
    from kda_ops import UnsupportedError

    def no_kernel(device):
        raise UnsupportedError("packed_decode", "mixed_qkv", "on cpu", "cuda:0")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_probe", no_kernel)
    device, why = command.choose_device(None)
    assert device.type == "cpu"
    assert why.startswith("not the GPU: kda::packed_decode: mixed_qkv must be on cpu")
    assert command.choose_device("cpu") == (torch.device("cpu"), "asked for")


def test_states_in_bfloat16_stay_within_their_budget():
    setting = Setting.of(dataclasses.replace(SIZES, layers=1, state_dtype=torch.bfloat16))
    with torch.no_grad():
        eager = setting.run(EAGER, setting.model)
        rewritten = setting.run(REWRITTEN, torch.compile(setting.model, backend="kda"))
        exact = setting.exactly(eager.tokens)
    assert torch.equal(eager.tokens, rewritten.tokens)
    assert difference(rewritten, exact).within(budget(eager, exact))


def test_numbers_below_one_are_refused(capsys):
    with pytest.raises(SystemExit):
        arguments("--layers", "0")
    assert "must be at least 1, got 0" in capsys.readouterr().err

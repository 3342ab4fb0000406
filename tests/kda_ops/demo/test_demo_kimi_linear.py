"""The demo on transformers' own KimiLinear."""

import sys

import pytest
import torch

from kda_ops.demo import kimi_linear
from kda_ops.demo.comparison import REWRITTEN, Sizes

SIZES = Sizes(layers=1, heads=1, hidden=32, rows=2, steps=8)


def test_transformers_decodes_the_same_with_the_pass(monkeypatch, capsys):
    pytest.importorskip("transformers.models.kimi_linear")
    compiled = torch.compile
    # Inductor alone is not what is tested, and costs as much again: eager stands in for it.
    monkeypatch.setattr(torch, "compile", lambda f, **k: compiled(f, **k) if k else f)
    assert kimi_linear.run(SIZES, "in a test", quiet=False) == 0
    out = capsys.readouterr().out
    assert "of 1 layers of delta attention" in out
    assert "  layer 0: " in out
    assert f"{REWRITTEN:<26}logits" in out
    assert "OK: 16 greedy tokens equal in all three" in out


def test_without_transformers_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert kimi_linear.run(SIZES, "in a test", quiet=False) == 1
    assert capsys.readouterr().err.strip() == kimi_linear.MISSING

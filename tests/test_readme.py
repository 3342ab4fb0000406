"""The examples of README.md run as they stand there."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text("utf-8")
OPERATORS, COMPILE, LOOP = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run(source):
    names = {}
    exec(compile(source, "README.md", "exec"), names)
    return names


def test_the_operator_example_updates_live_slots_and_no_others():
    names = run(OPERATORS)
    touched = names["state"].flatten(1).any(1).nonzero().flatten().tolist()
    assert touched == [2, 5]
    assert names["o"].shape == (3, 1, 4, 128)
    assert not names["o"][2].any()


def test_the_compile_example_is_rewritten_and_agrees_with_eager(capsys):
    import torch

    names = run(COMPILE)
    compiled, after_one = names["o"], names["pool"].clone()
    eager_pool = torch.zeros_like(after_one)
    eager = names["step"](eager_pool, *names["inputs"], *names["weights"])
    assert compiled.flatten().tolist() == pytest.approx(eager.flatten().tolist(), abs=1e-5)
    torch.testing.assert_close(after_one, eager_pool, atol=1e-5, rtol=1e-5)
    assert "packed_decode" in capsys.readouterr().out


def test_the_decode_loop_example_reuses_slots():
    names = run(LOOP)
    assert names["output"][0, :2].isfinite().all()
    assert not names["output"][0, 2].any()
    assert not names["state"][0].any()
    assert len(names["free"]) == 14


def test_the_example_of_decode_loops_runs():
    page = Path(__file__).resolve().parents[1] / "docs" / "decode-loops.md"
    [program] = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.M)
    names = {}
    exec(compile(program, page.name, "exec"), names)
    assert names["x"].shape == (2, 1536)
    assert names["graphs"].report.padded_calls == {1: 0, 2: 1, 4: 1, 8: 0}

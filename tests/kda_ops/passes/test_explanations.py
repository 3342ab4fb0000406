"""kda_ops.explain says where, what and why, changes no state, and docs list every reason."""

from pathlib import Path

import pytest
import torch

import kda_ops
from kda_ops.passes import Reason

DOCS = Path(__file__).parents[3] / "docs" / "pass.md"


@pytest.fixture(scope="module")
def reports(step):
    """A report on a step that is fused, and on one that is not; the pools before and after."""
    good, bad = step.Spelling(), step.Spelling(unit=lambda x: x / x.norm(dim=-1, keepdim=True))
    layers = [step.StepLayer(spelling) for spelling in (good, bad)]
    before = [layer.pool.clone() for layer in layers]
    made = [kda_ops.explain(layer, *step.inputs(good)) for layer in layers]
    return made, list(zip(before, (layer.pool for layer in layers), strict=True))


def test_explaining_advances_no_state(reports):
    for before, after in reports[1]:
        assert torch.equal(before, after)


def test_a_fused_step_is_reported_with_its_arguments_and_line(reports):
    report = reports[0][0]
    (finding,) = report.fused
    assert finding.operator == "kda::packed_decode"
    assert finding.arguments["state_layout"] == "kv"
    assert finding.arguments["lower_bound"] == "softplus"
    assert "conftest.py:" in finding.source
    text = str(report)
    assert text.startswith("1 place in 1 graph: 1 fused, 0 refused")
    assert "pools: updated in place, none is copied" in text
    assert "CUDA graphs: no pool stands in their way" in text


def test_a_refused_step_is_reported_with_reason_node_line_and_advice(reports):
    report = reports[0][1]
    (finding,) = report.refused
    assert finding.reason is Reason.NORM_MISSING
    text = str(report)
    assert "not fused: NORM_MISSING" in text
    assert finding.node in text
    assert Reason.NORM_MISSING.advice in text


def test_a_model_without_a_step_is_said_to_have_none():
    report = kda_ops.explain(torch.nn.Linear(4, 4), torch.ones(2, 4))
    assert report.findings == []
    assert "Nothing here reads a state" in str(report)


def test_every_reason_is_in_the_docs_word_for_word():
    text = DOCS.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{r.name}` | {r.sentence} | {r.advice} |" for r in Reason]


def test_every_reason_has_a_sentence_and_advice_of_its_own():
    assert len({reason.sentence for reason in Reason}) == len(Reason)
    assert all(reason.advice for reason in Reason)

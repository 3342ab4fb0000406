"""kda_ops.explain says where, what and why, changes no state, and docs list every reason."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import kda_ops
from kda_ops.passes import Reason

DOCS = Path(__file__).parents[3] / "docs" / "pass.md"


@pytest.fixture(scope="module")
def reports(step):
    """A report on a step that is fused, and on one that is not; the pools before and after."""
    good, bad = step.Spelling(), step.Spelling(unit=lambda x: x)
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
    assert "Nothing here reads a state" in report.html()


def test_a_part_that_stays_outside_of_the_operator_is_reported_with_its_reason(reports):
    assert [part.part for part in reports[0][0].findings[0].left] == ["convolution", "norm"]
    for text in (str(reports[0][0]), reports[0][0].html()):
        assert "    left    the convolution, CONV_MISSING at arg" in text
        assert "    left    the norm, OUTPUT_NORM at sum" in text


def test_a_fused_step_has_its_graph_code_before_and_after(reports):
    (finding,) = reports[0][0].fused
    before, after = (
        "\n".join(line.text for line in side) for side in (finding.before, finding.after)
    )
    assert "aten.index.Tensor(arg" in before and "aten.index_put.default(arg" in before
    assert "kda.packed_decode" not in before
    assert "kda.packed_decode.default" in after and "aten.copy_.default(arg" in after
    assert "aten.index" not in after and "aten.rsqrt" not in after
    assert any("conftest.py:" in line.source for line in finding.before)


def test_a_refused_step_has_its_graph_code_with_the_node_where_reading_stopped(reports):
    (finding,) = reports[0][1].refused
    assert finding.node in {line.name for line in finding.before}
    assert {"aten.index.Tensor", "aten.index_put.default"} <= {
        line.text.split(" = ")[1].split("(")[0] for line in finding.before
    }
    assert finding.after == ()


class Page(HTMLParser):
    """Text by element, and a check that what is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in {"src", "href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append((self.open[-1] if self.open else "", text))

    def of(self, tag):
        return [text for found, text in self.texts if found == tag]


def test_the_page_of_a_fused_step_shows_both_sides_and_needs_no_other_file(reports):
    report = reports[0][0]
    (finding,) = report.fused
    page = Page(report.html())
    assert page.open == [] and page.links == []
    assert page.of("h1") == ["1 place in 1 graph: 1 fused, 0 refused"]
    assert page.of("h2") == ["[1] fused into kda::packed_decode"]
    sides = [
        f"{when}: {len(lines)} operations"
        for when, lines in (("before", finding.before), ("after", finding.after))
    ]
    assert page.of("h3") == sides
    assert {line.text for line in (*finding.before, *finding.after)} <= {
        *page.of("pre"),
        *page.of("mark"),
    }
    assert any(text == finding.before[0].source for text in page.of("span"))


def test_the_page_of_a_refused_step_gives_reason_line_and_advice_and_marks_the_node(reports):
    report = reports[0][1]
    (finding,) = report.refused
    page = Page(report.html())
    assert page.open == []
    assert page.of("h3")[1] == "left as it is"
    facts = page.of("dd")
    assert "NORM_MISSING" in facts and Reason.NORM_MISSING.advice in facts
    assert finding.source in facts
    (marked,) = page.of("mark")
    assert marked.startswith(f"{finding.node}:")


def test_nothing_is_listed_where_nobody_looks(step):
    spelling = step.Spelling()
    (finding,) = step.capture(step.StepLayer(spelling), *step.inputs(spelling)).findings
    assert finding.operator and (finding.before, finding.after) == ((), ())


def test_every_reason_is_in_the_docs_word_for_word():
    text = DOCS.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{r.name}` | {r.sentence} | {r.advice} |" for r in Reason]


def test_every_reason_has_a_sentence_and_advice_of_its_own():
    assert len({reason.sentence for reason in Reason}) == len(Reason)
    assert all(reason.advice for reason in Reason)

"""A report as one HTML page that needs nothing else: every place before and after, side by side.

Lives here: the markup. Not here: the text of a report (explanation.py) and graph code (regions.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kda_ops.passes.findings import Finding, Line

STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.4 }
body { margin: 1.5rem auto; max-width: 110rem; padding: 0 1rem }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; padding-left: .6rem; border-left: .4rem solid }
.fused h2 { border-color: #1e8e3e }
.refused h2 { border-color: #c5221f }
h3 { font-size: .9rem; font-weight: 600; margin: .5rem 0 }
pre { font-size: .78rem; margin: 0; overflow-x: auto; white-space: pre-wrap }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
.sides > div { border: 1px solid #8886; border-radius: .3rem; padding: .2rem .8rem .8rem }
.code pre { padding-left: 2em; text-indent: -2em }
.source { opacity: .65; font-style: italic; display: block; padding-top: .5em }
@media (max-width: 60rem) { .sides { grid-template-columns: 1fr } }
"""


def page(head: str, places: Sequence[tuple[Finding, str]], foot: str) -> str:
    """Return a page: a first line, every finding with its text, and what is said of all of them."""
    body = "\n".join(section(finding, text) for finding, text in places)
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>kda-ops explain: {escape(head)}</title>
<style>{STYLE}</style>
<h1>{escape(head)}</h1>
{body}
<pre>{escape(foot)}</pre>
</html>
"""


def section(finding: Finding, text: str) -> str:
    """Return one place: what became of it, and its graph code before and after."""
    title, _, rest = text.partition("\n")
    kind = "refused" if finding.reason else "fused"
    after = "left as it is" if finding.reason else counted("after", finding.after)
    right = refusal(finding) if finding.reason else listing(finding.after)
    at = finding.node if finding.reason else ""
    return f"""<section class="{kind}">
<h2>{escape(title)}</h2>
<pre>{escape(rest)}</pre>
<div class="sides">
<div class="code"><h3>{counted("before", finding.before)}</h3>
{listing(finding.before, at)}</div>
<div class="{"why" if finding.reason else "code"}"><h3>{after}</h3>
{right}</div>
</div>
</section>"""


def counted(when: str, lines: Sequence[Line]) -> str:
    """Return a heading with a number of operations."""
    return f"{when}: {len(lines)} operation{'s' * (len(lines) != 1)}"


def listing(lines: Sequence[Line], at: str = "") -> str:
    """Return graph code below the model's lines that it came from; node ``at`` stands out."""
    shown, source = [], ""
    for line in lines:
        if line.source and line.source != source:
            shown.append(f'<span class="source">{escape(line.source)}</span>')
            source = line.source
        text = escape(line.text)
        shown.append(f"<mark>{text}</mark>" if line.name == at else text)
    return "\n".join(f"<pre>{line}</pre>" for line in shown)


def refusal(finding: Finding) -> str:
    """Return why a place was left alone and what to change."""
    if finding.reason is None:
        return ""
    detail = f" ({finding.detail})" if finding.detail else ""
    facts = {
        "reason": finding.reason.name,
        "why": finding.reason.sentence + detail,
        "change": finding.reason.advice,
        "stopped at": f"{finding.node}, marked",
        "line": finding.source or "not known",
    }
    rows = "".join(f"<dt>{name}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
    return f"<dl>{rows}</dl>"

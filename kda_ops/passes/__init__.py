"""The graph pass: finds delta-rule decode steps in compiled plain PyTorch and fuses them.

Importing changes nothing: see :func:`enable`, :func:`enabled`, :func:`inductor_options` and
``torch.compile(model, backend="kda")``. The matching is laid out bottom-up: affine (indices), terms
(views), algebra and expression (values), delta_rule and gates (the mathematics), arguments, step,
certificate, rewrite, manager; what was found is findings, regions, explanation and page. Beside it,
composition and roundings are what it takes to sit in Inductor.
"""

from __future__ import annotations

from kda_ops.passes.explanation import Report, explain
from kda_ops.passes.findings import Finding, Left
from kda_ops.passes.manager import KdaPass, Options, observing, rewrite_graph
from kda_ops.passes.reasons import Reason
from kda_ops.passes.switch import disable, enable, enabled, inductor_options

__all__ = [
    "Finding",
    "KdaPass",
    "Left",
    "Options",
    "Reason",
    "Report",
    "disable",
    "enable",
    "enabled",
    "explain",
    "inductor_options",
    "observing",
    "rewrite_graph",
]

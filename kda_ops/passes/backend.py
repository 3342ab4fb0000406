"""``torch.compile(model, backend="kda")``: Inductor with the passes in their slots.

Lives here: the function behind the entry point in group torch_dynamo_backends. Not here: the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx

from kda_ops.passes.switch import SLOTS, inductor_options


def kda(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """Compile a graph with Inductor and the kda_ops pass.

    Works beside the passes in Inductor's configuration, and takes ``options`` and ``mode`` as
    Inductor's own backend does.

    Args:
        graph: what Dynamo captured.
        example_inputs: its inputs.
        **kwargs: ``options`` (Inductor settings) and ``mode`` (the name of a preset).

    Returns:
        The compiled function.
    """
    settings: dict[str, Any] = {}
    if mode := kwargs.get("mode"):
        settings.update(torch._inductor.list_mode_options(mode))
    settings.update(kwargs.get("options") or {})
    patches = {**settings, **inductor_options_over(settings)}
    compiled: Any = compile_fx(graph, list(example_inputs), config_patches=patches)
    return compiled


def inductor_options_over(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the passes, in front of them those that the user gave in the options."""
    given = {slot: settings[slot] for slot in SLOTS if slot in settings}
    with torch._inductor.config.patch(given):
        return inductor_options()

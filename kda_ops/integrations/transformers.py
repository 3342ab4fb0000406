"""transformers' KDA models decode through code that the graph pass can read.

Lives here: the exchange of the functions that transformers takes from flash-linear-attention and
causal-conv1d, where they are installed, for its own PyTorch of the same mathematics. Theirs are
hidden from torch.compile, so each is a break of the graph and the pass sees no step; with
transformers' own a layer's decode becomes one operator. Not here: prefill, which stays with them.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from torch import nn

from kda_ops.integrations.exchange import Exchange

DECODE_FUNCTIONS = ("causal_conv1d_update", "recurrent_kimi_delta_attention")
"""What a decode step calls, by the names that transformers' modelling files share."""


class PlainDecode(Exchange):
    """The exchange that :func:`use_plain_decode` made."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modelling files that have changed, in order."""
        return tuple(dict.fromkeys(module.__name__ for module, _, _ in self._before))


def use_plain_decode(model: nn.Module) -> PlainDecode:
    """Let every KDA layer of a model's kind decode through transformers' own PyTorch.

    The functions belong to the modelling file and not to the model, so other models of the same
    architecture in this process change with it. Where no other library's functions are in use,
    nothing changes but the warning that transformers prints about it.

    Args:
        model: a model of transformers (5.17 or newer) with KDA layers, such as
            KimiLinearForCausalLM or Glm5NextForCausalLM, or a part of one.

    Returns:
        The exchange, to undo or to use in a ``with`` block around compiling and decoding.

    Raises:
        ValueError: no layer of the model is one of transformers' KDA layers, or this version
            keeps the functions in a form that is not known here; nothing has changed.
    """
    found: list[tuple[Any, str, Any]] = []
    for module in _modelling_files(model):
        for name in DECODE_FUNCTIONS:
            function = getattr(module, name)
            plain = inspect.unwrap(function)
            if plain is function or plain.__module__ != module.__name__:
                raise ValueError(f"{module.__name__}.{name} hides no PyTorch function of its own")
            found.append((module, name, plain))
    if not found:
        raise ValueError(f"{type(model).__name__} has no KDA layer of transformers")
    return PlainDecode(found)


def _modelling_files(model: nn.Module) -> list[ModuleType]:
    """Return the modules whose classes are in the model and which have all decode functions."""
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    modules = [sys.modules[name] for name in names if name.startswith("transformers.")]
    return [m for m in modules if all(hasattr(m, name) for name in DECODE_FUNCTIONS)]

"""Kimi Delta Attention decode for PyTorch: operators, graph pass, command line.

Importing registers ``torch.ops.kda.*`` and nothing else: no kernel is built, no pass is switched
on, CUDA is not initialised. The graph pass is loaded when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kda_kernels.errors import ContractError, DtypeError, OperatorError, UnsupportedError
from kda_ops.ops import fused_kda_decode, packed_fused_kda_decode, packed_kda_decode

if TYPE_CHECKING:
    from kda_ops.passes import disable, enable, enabled, explain, inductor_options

__version__ = "0.1.0"

_PASS_NAMES = ("disable", "enable", "enabled", "explain", "inductor_options")

__all__ = [
    "ContractError",
    "DtypeError",
    "OperatorError",
    "UnsupportedError",
    "disable",
    "enable",
    "enabled",
    "explain",
    "fused_kda_decode",
    "inductor_options",
    "packed_fused_kda_decode",
    "packed_kda_decode",
]


def __getattr__(name: str) -> object:
    """Load the graph pass when one of its names is asked for."""
    if name in _PASS_NAMES:
        return getattr(importlib.import_module("kda_ops.passes"), name)
    raise AttributeError(f"module 'kda_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_PASS_NAMES})

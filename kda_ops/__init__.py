"""Kimi Delta Attention decode for PyTorch: operators, graph pass, command line.

Importing registers ``torch.ops.kda.*`` and nothing else: no kernel is built, no pass is switched
on, CUDA is not initialised. The graph pass, caches, graphs and warm-up are loaded when one of their
names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kda_kernels.errors import ContractError, DtypeError, OperatorError, UnsupportedError
from kda_ops.ops import fused_kda_decode, packed_fused_kda_decode, packed_kda_decode

if TYPE_CHECKING:
    from kda_kernels._cute.bundle import load_bundle
    from kda_ops.cache import Memory, StateCache
    from kda_ops.graphs import DecodeGraphs
    from kda_ops.passes import disable, enable, enabled, explain, inductor_options
    from kda_ops.pools import LayerPools, StateSpec, mark_state_static
    from kda_ops.slots import OutOfSlotsError
    from kda_ops.snapshot import Snapshot
    from kda_ops.warming import warmup

__version__ = "0.1.0"

_LAZY = {
    **dict.fromkeys(("Memory", "StateCache"), "kda_ops.cache"),
    **dict.fromkeys(("DecodeGraphs",), "kda_ops.graphs"),
    **dict.fromkeys(
        ("disable", "enable", "enabled", "explain", "inductor_options"), "kda_ops.passes"
    ),
    **dict.fromkeys(("LayerPools", "StateSpec", "mark_state_static"), "kda_ops.pools"),
    **dict.fromkeys(("OutOfSlotsError",), "kda_ops.slots"),
    **dict.fromkeys(("Snapshot",), "kda_ops.snapshot"),
    "load_bundle": "kda_kernels._cute.bundle",
    "warmup": "kda_ops.warming",
}

__all__ = [
    "ContractError",
    "DecodeGraphs",
    "DtypeError",
    "LayerPools",
    "Memory",
    "OperatorError",
    "OutOfSlotsError",
    "Snapshot",
    "StateCache",
    "StateSpec",
    "UnsupportedError",
    "disable",
    "enable",
    "enabled",
    "explain",
    "fused_kda_decode",
    "inductor_options",
    "load_bundle",
    "mark_state_static",
    "packed_fused_kda_decode",
    "packed_kda_decode",
    "warmup",
]


def __getattr__(name: str) -> object:
    """Load what is asked for."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kda_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_LAZY})

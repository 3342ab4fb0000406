"""Switching the pass on: for the process, for a block, or for one compile.

Lives here: enable, disable, enabled and inductor_options. Not here: the pass (manager.py) and the
backend for torch.compile (backend.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._inductor.config as inductor_config

from kda_ops.passes.manager import KdaPass, Options

SLOT = "post_grad_custom_pre_pass"


def installed(value: Any) -> tuple[Callable[..., None], ...]:
    """Return the passes in Inductor's slot: None, one pass, or (from torch 2.13) several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def composed(value: Any, options: Options | None = None) -> KdaPass:
    """Return one pass that runs what is in the slot and then ours.

    Raises:
        RuntimeError: ours is in the slot already.
    """
    present = installed(value)
    if any(isinstance(item, KdaPass) for item in present):
        raise RuntimeError("the kda_ops pass is already enabled; call kda_ops.disable() first")
    return KdaPass(options, first=present)


def enable(options: Options | None = None) -> None:
    """Switch the pass on for every torch.compile of this process from now on.

    A pass in ``torch._inductor.config.post_grad_custom_pre_pass`` keeps running, before ours.
    Compilation is lazy: what was compiled before stays as it is.

    Args:
        options: what the pass may do; None for all of it.

    Raises:
        RuntimeError: the pass is already enabled.
    """
    setattr(inductor_config, SLOT, composed(getattr(inductor_config, SLOT), options))


def disable() -> None:
    """Switch the pass off again and leave what was there before; nothing happens if it is off."""
    ours = getattr(inductor_config, SLOT)
    if not isinstance(ours, KdaPass):
        return
    before = ours.first
    setattr(inductor_config, SLOT, before[0] if len(before) == 1 else (list(before) or None))


@contextmanager
def enabled(options: Options | None = None) -> Iterator[None]:
    """Switch the pass on in a block.

    The block has to surround the first call of the compiled function, where compilation happens.

    Raises:
        RuntimeError: the pass is already enabled.
    """
    ours = composed(getattr(inductor_config, SLOT), options)
    with inductor_config.patch({SLOT: ours}):
        yield


def inductor_options(options: Options | None = None) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=...)`` with the pass in them.

    A pass that is in Inductor's configuration at this moment keeps running, before ours; merge
    your own options with ``{**kda_ops.inductor_options(), ...}``.
    """
    present = installed(getattr(inductor_config, SLOT))
    ours = next((item for item in present if isinstance(item, KdaPass)), None)
    return {SLOT: ours or composed(present or None, options)}

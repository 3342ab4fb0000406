"""Switching the pass on: for the process, for a block, or for one compile.

Lives here: enable, disable, enabled and inductor_options. Not here: the passes (manager.py,
roundings.py) and the backend for torch.compile (backend.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._inductor.config as inductor_config

from kda_ops.passes.composition import ComposedPass
from kda_ops.passes.manager import KdaPass, Options
from kda_ops.passes.roundings import MarkRoundings, PutBackRoundings

SLOT = "post_grad_custom_pre_pass"
# In every slot of Inductor's configuration, one pass of ours.
SLOTS: dict[str, type[ComposedPass]] = {
    "joint_custom_pre_pass": MarkRoundings,
    "joint_custom_post_pass": PutBackRoundings,
    SLOT: KdaPass,
}


def installed(value: Any) -> tuple[Callable[..., None], ...]:
    """Return the passes in a slot: none, one, or (from torch 2.13) several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def ours_in(value: Any) -> ComposedPass | None:
    """Return the pass of ours in a slot."""
    return next((item for item in installed(value) if isinstance(item, ComposedPass)), None)


def composed(slot: str, options: Options | None = None) -> ComposedPass:
    """Return one pass that runs what is in a slot and then ours."""
    first = installed(getattr(inductor_config, slot))
    return KdaPass(options, first=first) if slot == SLOT else SLOTS[slot](first)


def all_composed(options: Options | None = None) -> dict[str, ComposedPass]:
    """Return what is to be in every slot.

    Raises:
        RuntimeError: ours is in a slot already.
    """
    if any(ours_in(getattr(inductor_config, slot)) for slot in SLOTS):
        raise RuntimeError("the kda_ops pass is already enabled; call kda_ops.disable() first")
    return {slot: composed(slot, options) for slot in SLOTS}


def enable(options: Options | None = None) -> None:
    """Switch the pass on for every torch.compile of this process from now on.

    Passes in ``post_grad_custom_pre_pass``, ``joint_custom_pre_pass`` and
    ``joint_custom_post_pass`` of ``torch._inductor.config`` keep running, before ours. Compilation
    is lazy: what was compiled before stays as it is.

    Args:
        options: what the pass may do; None for all of it.

    Raises:
        RuntimeError: the pass is already enabled.
    """
    for slot, ours in all_composed(options).items():
        setattr(inductor_config, slot, ours)


def disable() -> None:
    """Switch the pass off again and leave what was there before; nothing happens if it is off."""
    for slot in SLOTS:
        ours = getattr(inductor_config, slot)
        if isinstance(ours, ComposedPass):
            before = ours.first
            setattr(inductor_config, slot, before[0] if len(before) == 1 else list(before) or None)


@contextmanager
def enabled(options: Options | None = None) -> Iterator[None]:
    """Switch the pass on in a block.

    The block has to surround the first call of the compiled function, where compilation happens.

    Raises:
        RuntimeError: the pass is already enabled.
    """
    with inductor_config.patch(all_composed(options)):
        yield


def inductor_options(options: Options | None = None) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=...)`` with the pass in them.

    Passes that are in these slots of Inductor's configuration at this moment keep running, before
    ours; merge your own options with ``{**kda_ops.inductor_options(), ...}``.
    """
    return {
        slot: ours_in(getattr(inductor_config, slot)) or composed(slot, options) for slot in SLOTS
    }

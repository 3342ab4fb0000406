"""Attributes of other libraries' objects, set for a while and put back.

Lives here: remembering what stood where. Not here: which attributes those are (one module for each
library).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

Self = TypeVar("Self", bound="Exchange")
_MISSING = object()


class Exchange:
    """Attributes that were set on objects; ``undo`` takes it back.

    As a context manager it is undone at the end of the block. Graphs that were compiled meanwhile
    are compiled again when they are called afterwards.
    """

    def __init__(self, changes: list[tuple[Any, str, Any]]) -> None:
        """Set every (object, name, value), remembering what stood there."""
        self._before = [
            (owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in changes
        ]
        for owner, name, value in changes:
            setattr(owner, name, value)

    def undo(self) -> None:
        """Put back what was there; a second call does nothing."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def __enter__(self: Self) -> Self:
        """Return the exchange."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Undo it."""
        self.undo()

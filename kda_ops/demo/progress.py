"""A progress bar of one line, drawn only where somebody is looking.

On a terminal the bar is redrawn in place and wiped out at the end; in a pipe or a log nothing is
written at all. What a run has to say when it has ended is report.py's business.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

_CELLS = 32
_SECONDS_BETWEEN_FRAMES = 0.05


class Progress:
    """Counts steps and draws them: ``with Progress("eager", 64) as progress: progress.step()``.

    Args:
        label: what is running, shown in front of the bar.
        total: number of steps; 0 where they cannot be counted: then only the label is shown.
        stream: where to draw; nothing is drawn unless it is a terminal.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self.stream = sys.stderr if stream is None else stream
        self.visible = self.stream.isatty()
        self._drawn_at = 0.0

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def step(self) -> None:
        """Count one step."""
        self.done += 1
        if self.visible and time.monotonic() - self._drawn_at > _SECONDS_BETWEEN_FRAMES:
            self._draw()

    def __exit__(self, *exc: object) -> None:
        if self.visible:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _draw(self) -> None:
        if not self.visible:
            return
        self._drawn_at = time.monotonic()
        text = f"  {self.label} …"
        if self.total:
            cells = _CELLS * self.done // self.total
            bar = "█" * cells + "░" * (_CELLS - cells)
            text = f"  {self.label:<26} {bar} {self.done}/{self.total}"
        self.stream.write(f"\r\x1b[K{text}")
        self.stream.flush()

"""The progress bar draws on terminals and nowhere else."""

import io

from kda_ops.demo.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_nothing_is_written_into_a_pipe():
    pipe = io.StringIO()
    with Progress("eager", 2, pipe) as progress:
        progress.step()
    assert pipe.getvalue() == ""


def test_a_terminal_sees_a_bar_that_is_wiped_out_at_the_end():
    terminal = Terminal()
    with Progress("eager", 2, terminal) as progress:
        progress._drawn_at = -1.0
        progress.step()
    assert "1/2" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert "\n" not in terminal.getvalue()

"""Progress line of a long command: one line that disappears at the end, on a terminal only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Column

from normcheck.reports._text import text_of

REDRAW_SECONDS = 0.1


class Line:
    """The last line of a terminal while something runs."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._drawn = -math.inf

    def draw(self, words: str) -> None:
        """Show ``words`` instead of the present ones, cut off at the width of the terminal."""
        shown = text_of(self._progress.console, words).plain
        self._progress.update(self._task, description=shown, refresh=True)

    def due(self, now: float) -> bool:
        """Whether to draw frequent news at ``now`` (of time.monotonic): a few times a second."""
        if now - self._drawn < REDRAW_SECONDS:
            return False
        self._drawn = now
        return True


@contextmanager
def progress_line(console: Console) -> Iterator[Line | None]:
    """The progress line while the block runs; None if ``console`` is no terminal, or one that cannot erase.

    Only ``Line.draw`` draws: a thread that draws would take time from what ``bench`` measures.
    """
    if not console.is_interactive or not console.file.isatty():
        yield None
        return
    words = TextColumn(
        "{task.description}", style="cyan", markup=False, table_column=Column(no_wrap=True, overflow="crop")
    )
    with Progress(
        words, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        yield Line(progress)

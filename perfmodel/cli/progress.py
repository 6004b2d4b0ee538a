"""Progress of a measurement: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfmodel.errors import printable
from perfmodel.units import Seconds, format_duration

if TYPE_CHECKING:
    from calibrate.campaign import Progress as Counted

#: Without a terminal one line is printed at most this often.
_LINE_INTERVAL_S = 15.0
#: Fewer finished tasks than this say nothing about the pace.
_MINIMUM_FINISHED = 5


@dataclass(slots=True)
class _Lines:
    """Writes a line now and then, with the time left."""

    title: str
    started_s: Seconds | None = None
    first_done: int = 0
    last_line_s: Seconds = float("-inf")

    def __call__(self, progress: "Counted") -> None:
        now_s = time.monotonic()
        if progress.is_waiting:
            self.started_s = None
        elif self.started_s is None:
            # Neither starting the workers nor waiting says anything about the pace of the tasks.
            self.started_s, self.first_done = now_s, progress.done
        if now_s - self.last_line_s < _LINE_INTERVAL_S and progress.done < progress.total:
            return
        self.last_line_s = now_s
        sys.stderr.write(
            f"{self.title}: {progress.done}/{progress.total}{self._left(progress, now_s)} "
            f"({printable(progress.task)})\n"
        )
        sys.stderr.flush()

    def _left(self, progress: "Counted", now_s: Seconds) -> str:
        finished = progress.done - self.first_done
        if self.started_s is None or finished < _MINIMUM_FINISHED:
            return ""
        left_s = (progress.total - progress.done) * (now_s - self.started_s) / finished
        return f", about {format_duration(left_s)} left"


@contextmanager
def measurement(title: str) -> Iterator[Callable[["Counted"], None]]:
    """Show progress; what ends a process politely ends the measurement as Ctrl-C does."""
    from calibrate.processes import terminate_as_interrupt

    with terminate_as_interrupt(), _shown(title) as on_progress:
        yield on_progress


@contextmanager
def _shown(title: str) -> Iterator[Callable[["Counted"], None]]:
    """Show progress on standard error for as long as the block lasts."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        *(rich.TextColumn(title), rich.BarColumn()),
        *(rich.MofNCompleteColumn(), rich.TimeRemainingColumn()),
        rich.TextColumn("{task.description}", markup=False),  # of folders, ranks
    )
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task("starting workers", total=None)

        def show(progress: "Counted") -> None:
            bar.update(
                row,
                # the pace is read off the times of what was completed
                completed=None if progress.is_waiting else progress.done,
                total=progress.total,
                description=progress.task,
            )

        yield show

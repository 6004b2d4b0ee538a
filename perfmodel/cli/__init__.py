"""What commands print, and how a verdict ends them."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import typer

from perfmodel.errors import OutOfTolerance, printable
from perfmodel.units import Seconds, format_duration

if TYPE_CHECKING:
    from calibrate.campaign import Progress as Counted
    from perfmodel.documents.verdicts import Gate
    from perfmodel.report import Table


class Printing(NamedTuple):
    """How the command that runs prints its answer, as its options say that ``app`` adds to it."""

    as_json: bool = False
    """As one JSON object."""
    verbose: bool | None = None
    """All caveats, in full; None: its answers have none."""
    output: Path | None = None
    """Where the answer, a document, is to be written, too."""


printing: Final[ContextVar[Printing]] = ContextVar("printing", default=Printing())  # noqa: B039 - immutable


def show(*tables: "Table") -> None:
    """Print tables as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    for table in tables:
        typer.echo(table.text(width))


def show_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Print sentences, none wider than the terminal, or than 80 columns without one."""
    from perfmodel.report import wrapped

    width = shutil.get_terminal_size().columns
    for line in map(printable, lines):
        typer.echo(wrapped(line, width), err=err)


def show_progress(line: str) -> None:
    """Print what a measurement says of itself; beside JSON on standard error."""
    show_lines([line], err=printing.get().as_json)


def show_verdict(line: str, *, is_good: bool) -> None:
    """Print a verdict; on a terminal in colour, unless NO_COLOR is set."""
    from perfmodel.report import wrapped

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    colour = (typer.colors.GREEN if is_good else typer.colors.RED) if coloured else None
    typer.secho(wrapped(printable(line), shutil.get_terminal_size().columns), fg=colour)


def show_answer(
    found: object,
    shown: object = None,
    *,
    tables: "Sequence[Table]" = (),
    lines: Iterable[str] = (),
    written: "Mapping[str, Path | str]" = MappingProxyType({}),
) -> None:
    """Print an answer: as tables and sentences, or with ``--json`` as one JSON object.

    A document is printed as its file holds it, anything else with a ``schema_version``. Files that were
    ``written`` are named by kind; beside JSON on standard error, so that output stays one object.
    ``shown``: What tables and sentences are made of; None: the answer itself. ``tables``, ``lines``: instead of it.
    """
    from pydantic_core import to_json

    from perfmodel.documents import Document, made_from

    as_json, verbose, output = printing.get()
    if output is not None:
        assert isinstance(found, Document)
        found.write(output)
    if as_json and isinstance(found, Document):
        typer.echo(found.text())
    elif as_json:  # SI units, and the edited files that it was made from
        assert isinstance(found, Mapping)
        typer.echo(to_json({"schema_version": 1, **found, **made_from()}, indent=1).decode())
    else:
        subject = found if shown is None else shown
        if not (tables or lines or isinstance(subject, Mapping)):
            from perfmodel.report import shown as as_shown

            more = {} if verbose is None else {"verbose": verbose}
            tables, lines = as_shown(subject, **more)
        show(*tables)
        show_lines(lines)
    show_lines([f"{kind}: {path}" for kind, path in written.items()], err=as_json)


def refuse_failed_gates(
    command: str, gates: Iterable["Gate"], *, see: str = "the table for where"
) -> None:
    """End a command whose verdict is printed and written."""
    failed = [gate.name for gate in gates if not gate.passed]
    if failed:
        raise OutOfTolerance(f"{command}: out of tolerance: {', '.join(failed)}; see {see}")


#: Quicker commands show nothing while they compute. [s]
_SILENT_S = 1.0


@contextmanager
def working(title: str) -> Iterator[None]:
    """On a terminal, show what is computed and for how long, if it takes more than a second."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    shown = threading.Thread(target=_spin, args=(title, ended), daemon=True)
    shown.start()
    try:
        yield
    finally:
        ended.set()
        shown.join()


def _spin(title: str, ended: threading.Event) -> None:
    """A bar without an end; it is gone when the answer comes."""
    if ended.wait(_SILENT_S):
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.TextColumn(title), rich.BarColumn(), rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(title, total=None)
        ended.wait()


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

"""perfmodel serve: the what-if page, on this machine alone or as one file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.errors import PerfModelError, UsageError

if TYPE_CHECKING:
    from perfmodel.page.answers import Answers

DEFAULT_PORT: Final = 8765
_HIGHEST_PORT: Final = 65_535

_PROFILE = typer.Option(
    help="Profile from perfmodel calibrate, also --from-runs; repeatable. Default: "
    f"{DEFAULT_PROFILE}."
)
_WORKLOAD = typer.Option(
    help="Workload file from perfmodel trace, whose memory is then known; repeatable. Calibrated "
    "workloads are always there."
)
_CLUSTER = typer.Option(
    help="Cluster file, whose links between devices can then be chosen; repeatable."
)
_VALIDATION = typer.Option(help="A validation, whose errors widen the intervals of its machine.")
_BUDGET = typer.Option(help="Budget file, as for perfmodel cost: its prices can be chosen.")
_PORT = typer.Option(help="Port on 127.0.0.1; 0 takes any that is free.")
_EXPORT = typer.Option(
    help="Write the page as one file and end: devices, batch and bandwidth move among answers "
    "that are computed now."
)
_ASK = typer.Option(
    help="With --export: what is chosen, as the page keeps it behind # in its address."
)


def serve(  # noqa: PLR0913 - one parameter per flag
    *,
    profile: Annotated[list[Path] | None, _PROFILE] = None,
    workload: Annotated[list[Path] | None, _WORKLOAD] = None,
    cluster: Annotated[list[Path] | None, _CLUSTER] = None,
    validation: Annotated[Path | None, _VALIDATION] = None,
    budget: Annotated[Path | None, _BUDGET] = None,
    port: Annotated[int, _PORT] = DEFAULT_PORT,
    export: Annotated[Path | None, _EXPORT] = None,
    ask: Annotated[str | None, _ASK] = None,
) -> None:
    """Open a page on this machine: move devices, batch, bandwidth, layout; see what happens."""
    if not 0 <= port <= _HIGHEST_PORT:
        raise UsageError(f"--port: must be from 0 to {_HIGHEST_PORT}, got {port}")
    if ask is not None and export is None:
        raise UsageError("--ask: must come with --export, got it alone")
    from perfmodel.cli.page_inputs import read_desk  # noqa: PLC0415 - keeps --help fast
    from perfmodel.page.answers import Answers  # noqa: PLC0415

    desk = read_desk(
        profile or [DEFAULT_PROFILE],
        workload or [],
        validation=validation,
        budget=budget,
        clusters=cluster or [],
    )
    answers = Answers(desk)
    if export is not None:
        _export(answers, ask, export)
        return
    _serve(answers, port)


def _export(answers: "Answers", ask: str | None, path: Path) -> None:
    from perfmodel.documents.base import write_atomically  # noqa: PLC0415 - keeps --help fast
    from perfmodel.page.export import export_html  # noqa: PLC0415
    from perfmodel.page.start import question_of, start  # noqa: PLC0415

    question = start(answers.catalogue) if ask is None else question_of(ask)
    write_atomically(path, export_html(answers, question))
    typer.echo(f"page: {path}")


def _serve(answers: "Answers", port: int) -> None:
    try:
        from perfmodel.page.server import HOST, listening  # noqa: PLC0415 - an extra
        from perfmodel.page.server import serve as run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise PerfModelError(
            f"serve: must have starlette and uvicorn, got no {error.name}; pip install "
            "'perfmodel[page]', or use --export"
        ) from error
    from perfmodel.page.start import start  # noqa: PLC0415 - keeps --help fast

    on = listening(port)
    answers.answer(start(answers.catalogue))  # so that the first page does not wait for it
    typer.echo(f"http://{HOST}:{on.getsockname()[1]}/ (Ctrl-C ends)")
    try:
        run(answers, on)
    except KeyboardInterrupt:
        typer.echo("ended", err=True)

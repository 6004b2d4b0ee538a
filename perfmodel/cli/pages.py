"""perfmodel serve: the what-if page, on this machine alone or as one file."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import device_counts, names
from perfmodel.cli.predict import DEFAULT_DEVICES
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
    from perfmodel.cli.page_inputs import read_desk
    from perfmodel.page.answers import Answers

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
    from perfmodel.documents.base import write_atomically
    from perfmodel.page.export import (
        export_html,
        question_of,
        start,
    )

    question = start(answers.catalogue) if ask is None else question_of(ask)
    write_atomically(path, export_html(answers, question))
    typer.echo(f"page: {path}")


def _serve(answers: "Answers", port: int) -> None:
    try:
        from perfmodel.page.server import HOST, listening
        from perfmodel.page.server import serve as run
    except ModuleNotFoundError as error:
        raise PerfModelError(
            f"serve: must have starlette and uvicorn, got no {error.name}; pip install "
            "'perfmodel[page]', or use --export"
        ) from error
    from perfmodel.page.export import start

    on = listening(port)
    answers.answer(start(answers.catalogue))  # so that the first page does not wait for it
    typer.echo(f"http://{HOST}:{on.getsockname()[1]}/ (Ctrl-C ends)")
    try:
        run(answers, on)
    except KeyboardInterrupt:
        typer.echo("ended", err=True)


def report(
    *,
    profile: Annotated[Path, typer.Option(help="Profile of the machine.")] = DEFAULT_PROFILE,
    validation: Annotated[Path | None, typer.Option(help="Validation to include.")] = None,
    workloads: Annotated[
        str, typer.Option(help="Workloads to predict, separated by commas; default: all.")
    ] = "",
    devices: Annotated[str, typer.Option(help="Device counts, separated by commas.")] = (
        DEFAULT_DEVICES
    ),
    out: Annotated[Path, typer.Option(help="Folder for report.html and figures/.")] = Path(
        "runs/report"
    ),
) -> None:
    """Write one self-contained HTML report, and every plot as SVG and PNG."""
    from perfmodel.documents.base import write_atomically, write_bytes_atomically
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.documents.verdicts import ValidationDocument
    from perfmodel.predictor import (
        Forecast,
        Predictor,
        forecast,
        open_workload,
    )
    from perfmodel.report.figures import figure_bytes, report_figures
    from perfmodel.report.html import report_html

    document = ProfileDocument.read(profile)
    machine = document.machine
    verdict = None if validation is None else ValidationDocument.read(validation)
    predictor = Predictor(machine, validation=verdict)
    chosen = names(workloads) or [entry.workload.name for entry in machine.workloads]
    request = Forecast(world_sizes=device_counts(devices), scaling="weak")
    predictions = [
        forecast(predictor, opened.profile, request, argv=sys.argv)[0]
        for opened in (open_workload(predictor, name, where="--workloads") for name in chosen)
    ]
    write_atomically(
        out / "report.html", report_html(document, predictions=predictions, validation=verdict)
    )
    for name, figure in report_figures(
        machine, predictions=predictions, validation=verdict
    ).items():
        path = out / "figures" / name
        write_bytes_atomically(path.with_suffix(".svg"), figure_bytes(figure, format="svg"))
        write_bytes_atomically(path.with_suffix(".png"), figure_bytes(figure, format="png"))
    typer.echo(f"report: {out / 'report.html'}")

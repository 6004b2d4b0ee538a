"""Pages: serve, the what-if page on this machine alone; report, one HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from perfmodel.cli import options as opt
from perfmodel.cli import show_answer, working

DEFAULT_PORT: Final = 8765

_PROFILES = opt.machine(
    f"Profile, or a name of perfmodel machines; repeatable. Default: {opt.DEFAULT_PROFILE}, or "
    "these machines where there is none."
)
_WORKLOADS = typer.Option(
    "--workload",
    help="Workload file from perfmodel trace, whose memory is then known; on perfmodel machines also a "
    "model, such as torchvision:resnet50; repeatable. Calibrated workloads are always there.",
)
_CLUSTERS = opt.file("--cluster", "Cluster file, whose links can then be chosen; repeatable.")
_PORT = opt.bounded(0, 65_535)("--port", "Port on 127.0.0.1; 0 takes any that is free.")


def serve(
    *,
    profile: Annotated[list[Path] | None, _PROFILES] = None,
    workload: Annotated[list[str] | None, _WORKLOADS] = None,
    cluster: Annotated[list[Path] | None, _CLUSTERS] = None,
    validation: opt.Validation = None,
    port: Annotated[int, _PORT] = DEFAULT_PORT,
) -> None:
    """Open a page on this machine: move devices, batch, bandwidth, layout; see what happens."""
    from perfmodel.page import read_machines, unmeasured_machines
    from perfmodel.page.answers import Answers
    from perfmodel.page.server import HOST, listening, start
    from perfmodel.page.server import serve as run

    if not profile and not opt.DEFAULT_PROFILE.exists():
        profile = unmeasured_machines()
        typer.echo(f"no {opt.DEFAULT_PROFILE}: machines inferred from steps of others", err=True)
    machines = read_machines(
        profile or [opt.DEFAULT_PROFILE],
        workload or [],
        validation=validation,
        clusters=cluster or [],
    )
    answers, on = Answers(machines), listening(port)
    first = start(answers.catalogue)
    with working("first answer"):
        answers.answer(first)  # so that the first page does not wait for it
        answers.detail(first)
    typer.echo(f"http://{HOST}:{on.getsockname()[1]}/ (Ctrl-C ends)")
    try:
        run(answers, on)
    except KeyboardInterrupt:
        typer.echo("ended", err=True)


_NAMES = opt.names("--workloads", "Workloads to predict, separated by commas; default: all.")


def report(
    *,
    profile: opt.Profile = opt.DEFAULT_PROFILE,
    validation: opt.Validation = None,
    workloads: Annotated[Sequence[str], _NAMES] = (),
    devices: opt.DeviceCounts = opt.DEFAULT_DEVICES,
    out: opt.Folder = Path("runs/report"),
) -> None:
    """Write one self-contained HTML report, and every plot as SVG."""
    from perfmodel.answer import Forecast, open_question, table
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.documents.verdicts import ValidationDocument
    from perfmodel.files import write_atomically
    from perfmodel.report.html import report_html

    document = ProfileDocument.read(profile)
    machine = document.machine
    judged = None if validation is None else ValidationDocument.read(validation)
    chosen = workloads or [entry.workload.name for entry in machine.workloads]
    request = Forecast(world_sizes=tuple(devices), scaling="weak")
    with working("report"):
        predictions = [
            table(open_question(machine, name, validation=judged, where="--workloads"), request)[0]
            for name in chosen
        ]
        page, pictures = report_html(document, predictions=predictions, judged=judged)
        write_atomically(out / "report.html", page)
        figures = {out / "figures" / f"{each.name}.svg": each.svg_file for each in pictures}
        for path, content in figures.items():
            write_atomically(path, content)
    found = {"figures": [*map(str, figures)], "predictions": predictions}
    show_answer(found, written={"report": out / "report.html"})

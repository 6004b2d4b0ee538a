"""The command that writes the report."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import device_counts, names
from perfmodel.cli.predict import DEFAULT_DEVICES


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
    from perfmodel.documents.base import write_atomically, write_bytes_atomically  # noqa: PLC0415
    from perfmodel.documents.profile import ProfileDocument  # noqa: PLC0415
    from perfmodel.documents.validation import ValidationDocument  # noqa: PLC0415
    from perfmodel.forecast import Forecast, forecast, open_workload  # noqa: PLC0415
    from perfmodel.predictor import Predictor  # noqa: PLC0415
    from perfmodel.report.figures import figure_bytes, report_figures  # noqa: PLC0415
    from perfmodel.report.html import report_html  # noqa: PLC0415

    machine = ProfileDocument.read(profile)
    verdict = None if validation is None else ValidationDocument.read(validation)
    predictor = Predictor(machine, validation=verdict)
    chosen = names(workloads) or [entry.workload.name for entry in machine.workloads]
    request = Forecast(world_sizes=device_counts(devices), scaling="weak")
    predictions = [
        forecast(predictor, opened.profile, request, argv=sys.argv)[0]
        for opened in (open_workload(predictor, name, where="--workloads") for name in chosen)
    ]
    write_atomically(
        out / "report.html", report_html(machine, predictions=predictions, validation=verdict)
    )
    for name, figure in report_figures(
        machine, predictions=predictions, validation=verdict
    ).items():
        path = out / "figures" / name
        write_bytes_atomically(path.with_suffix(".svg"), figure_bytes(figure, format="svg"))
        write_bytes_atomically(path.with_suffix(".png"), figure_bytes(figure, format="png"))
    typer.echo(f"report: {out / 'report.html'}")

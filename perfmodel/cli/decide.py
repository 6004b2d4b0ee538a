"""Commands that end in a decision; they need no profile and start fast."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from perfmodel.plan.goodput import Request

_CAUSE = typer.Option(
    help="NAME=DEVICE_HOURS between failures of one cause, for example gpu=140000; with ,replace "
    "behind it, each takes a node out. Repeat it for every cause."
)
_INTERVAL = typer.Option(help="Work between two checkpoints; default: the best by the formula.")
_STOPS = typer.Option(help="From how many stops the mean times were estimated: widens the answer.")
_SPARES = typer.Option(help="Idle nodes at the start; default: a replacement is always at hand.")
_MAINTENANCE = typer.Option(help="Period of planned stops, by the calendar.")


def goodput(  # noqa: PLR0913 - one parameter per flag
    *,
    devices: Annotated[int, typer.Option(help="Devices of the job; any failure stops all.")],
    work_days: Annotated[float, typer.Option(help="Days of training without any stop.")],
    mtbf_device_hours: Annotated[
        float | None, typer.Option(help="Device hours between two failures, all causes together.")
    ] = None,
    cause: Annotated[list[str] | None, _CAUSE] = None,
    mtbf_stops: Annotated[int | None, _STOPS] = None,
    checkpoint_s: Annotated[float, typer.Option(help="Training stands still for one write.")] = 0,
    checkpoint_interval_s: Annotated[float | None, _INTERVAL] = None,
    detection_s: Annotated[float, typer.Option(help="From a failure to the end of the job.")] = 0,
    restart_s: Annotated[float, typer.Option(help="Start, read the checkpoint, warm up.")] = 0,
    spares: Annotated[int | None, _SPARES] = None,
    replacement_hours: Annotated[
        float, typer.Option(help="Until a failed node is back as a spare.")
    ] = 0,
    maintenance_every_days: Annotated[float | None, _MAINTENANCE] = None,
    maintenance_hours: Annotated[float, typer.Option(help="Length of a planned stop.")] = 0,
    deadline_days: Annotated[float | None, typer.Option(help="Print the chance to make it.")] = (
        None
    ),
    best_interval: Annotated[
        bool, typer.Option("--best-interval", help="Search the best interval by simulation too.")
    ] = False,
    replicas: Annotated[int, typer.Option(help="Simulated courses.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the failures.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the goodput document.")] = False,
) -> None:
    """Simulate weeks of a job that fails: when it ends, and how often to write checkpoints."""
    from perfmodel.cli.job_flags import JobFlags, days  # noqa: PLC0415 - keeps --help fast
    from perfmodel.plan.goodput import Request  # noqa: PLC0415

    flags = JobFlags(
        devices=devices,
        work_days=work_days,
        mtbf_device_hours=mtbf_device_hours,
        causes=cause or (),
        checkpoint_s=checkpoint_s,
        checkpoint_interval_s=checkpoint_interval_s,
        detection_s=detection_s,
        restart_s=restart_s,
        spares=spares,
        replacement_hours=replacement_hours,
        maintenance_every_days=maintenance_every_days,
        maintenance_hours=maintenance_hours,
    )
    request = Request(
        job=flags.job(),
        replicas=replicas,
        seed=seed,
        mtbf_stops=mtbf_stops,
        deadline_s=days(deadline_days),
        is_search=best_interval,
    )
    _show_goodput(request, as_json=as_json)


def _show_goodput(request: "Request", *, as_json: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import

    from perfmodel.plan.goodput import goodput as use_case  # noqa: PLC0415
    from perfmodel.report.goodput import goodput_grid, goodput_lines  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415

    document = use_case(request, argv=sys.argv)
    if as_json:
        typer.echo(document.model_dump_json(indent=1))
        return
    Console().print(rich_table(goodput_grid(document)))
    for line in goodput_lines(document):
        typer.echo(line)

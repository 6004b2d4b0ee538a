"""Commands that end in a decision; they need no profile and start fast."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import day
from perfmodel.cli.terminal import show_document

if TYPE_CHECKING:
    from perfmodel.plan.goodput import Request

_CAUSE = typer.Option(
    help="NAME=DEVICE_HOURS between failures of one cause, for example gpu=140000; with ,replace "
    "behind it, each takes a node out. Repeat it for every cause."
)
_MTBF = typer.Option(
    help="Device hours between two failures, all causes together; inf: nothing ever fails."
)
_INTERVAL = typer.Option(
    help="Work between two checkpoints; default: the best by the formula, which needs --checkpoint-s."
)
_WRITE = typer.Option(help="Training stands still for one write; default: see --checkpoint-size.")
_SIZE = typer.Option(
    help="Size of all parts, such as 980GB: its write and read take what the calibration timed."
)
_WRITERS = typer.Option(help="Processes that write an equal part of it each, at the same time.")
_RESTART = typer.Option(
    help="Start, read the checkpoint, warm up; default: reading alone, if its size is given."
)
_STOPS = typer.Option(help="From how many stops the mean times were estimated: widens the answer.")
_SPARES = typer.Option(help="Idle nodes at the start; default: a replacement is always at hand.")
_REPLACEMENT = typer.Option(help="Until a failed node is back as a spare.")
_DEADLINE = typer.Option(help="Print the chance to make it.")
_BEST = typer.Option("--best-interval", help="Search the best interval by simulation too.")
_MAINTENANCE = typer.Option(help="Period of planned stops, by the calendar.")


def goodput(  # noqa: PLR0913 - one parameter per flag
    *,
    devices: Annotated[int, typer.Option(help="Devices of the job; any failure stops all.")],
    work_days: Annotated[float, typer.Option(help="Days of training without any stop.")],
    mtbf_device_hours: Annotated[float | None, _MTBF] = None,
    cause: Annotated[list[str] | None, _CAUSE] = None,
    mtbf_stops: Annotated[int | None, _STOPS] = None,
    checkpoint_s: Annotated[float | None, _WRITE] = None,
    checkpoint_size: Annotated[str | None, _SIZE] = None,
    checkpoint_writers: Annotated[int, _WRITERS] = 1,
    profile: Annotated[Path, typer.Option(help="With --checkpoint-size.")] = DEFAULT_PROFILE,
    checkpoint_interval_s: Annotated[float | None, _INTERVAL] = None,
    detection_s: Annotated[float, typer.Option(help="From a failure to the end of the job.")] = 0,
    restart_s: Annotated[float | None, _RESTART] = None,
    spares: Annotated[int | None, _SPARES] = None,
    replacement_hours: Annotated[float, _REPLACEMENT] = 0,
    maintenance_every_days: Annotated[float | None, _MAINTENANCE] = None,
    maintenance_hours: Annotated[float, typer.Option(help="Length of a planned stop.")] = 0,
    deadline_days: Annotated[float | None, _DEADLINE] = None,
    best_interval: Annotated[bool, _BEST] = False,
    replicas: Annotated[int, typer.Option(help="Simulated courses.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the failures.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the goodput document.")] = False,
) -> None:
    """Simulate weeks of a job that fails: when it ends, and how often to write checkpoints."""
    from perfmodel.cli.job_flags import (  # noqa: PLC0415 - keeps --help fast
        JobFlags,
        Storage,
        check_courses,
        days,
    )
    from perfmodel.plan.goodput import Request  # noqa: PLC0415

    check_courses(replicas, seed=seed, mtbf_stops=mtbf_stops, deadline_days=deadline_days)
    sized = Storage(profile=profile, size=checkpoint_size, writers=checkpoint_writers)
    checkpoint = sized.cost(write_s=checkpoint_s, restart_s=restart_s)
    flags = JobFlags(
        devices=devices,
        work_days=work_days,
        mtbf_device_hours=mtbf_device_hours,
        causes=cause or (),
        checkpoint_s=checkpoint.write_s,
        checkpoint_interval_s=checkpoint_interval_s,
        detection_s=detection_s,
        restart_s=checkpoint.restart_s,
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
        notes=checkpoint.notes,
    )
    _show_goodput(request, as_json=as_json)


def _show_goodput(request: "Request", *, as_json: bool) -> None:
    from perfmodel.plan.goodput import goodput as use_case  # noqa: PLC0415 - keeps --help fast
    from perfmodel.report.goodput import goodput_grid, goodput_lines  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415

    document = use_case(request, argv=sys.argv)
    table = rich_table(goodput_grid(document))
    show_document(document, table, goodput_lines(document), as_json=as_json)


def cost(
    budget: Annotated[Path, typer.Argument(help="Budget in TOML: what is bought and rented.")],
    *,
    prices: Annotated[Path | None, typer.Option(help="CSV of prices, used by name.")] = None,
    today: Annotated[str, typer.Option(help="YYYY-MM-DD, for the age of prices.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Compare buying with renting: cost of a useful device-hour, and where they cross."""
    from perfmodel.documents.budget import read_budget  # noqa: PLC0415 - keeps --help fast
    from perfmodel.plan.cost import compare_costs  # noqa: PLC0415
    from perfmodel.report.cost import cost_grid, cost_lines  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415

    on = day("--today", today)
    document = compare_costs(read_budget(budget, today=on, prices=prices), today=on, argv=sys.argv)
    table = rich_table(cost_grid(document))
    show_document(document, table, cost_lines(document), as_json=as_json)

"""Commands that end in a decision; they need no profile and start fast."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import day
from perfmodel.cli.output import show, show_document, show_lines
from perfmodel.errors import NotFeasible, OutOfTolerance

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
    from perfmodel.cli.job_flags import JobFlags, Storage, check_courses, days
    from perfmodel.plan.goodput import Request

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
    from perfmodel.plan.goodput import goodput as use_case
    from perfmodel.report.plan import goodput_grid, goodput_lines
    from perfmodel.report.tables import rich_table

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
    from perfmodel.documents.budget import read_budget
    from perfmodel.plan.cost import compare_costs
    from perfmodel.report.plan import cost_grid, cost_lines
    from perfmodel.report.tables import rich_table

    on = day("--today", today)
    document = compare_costs(read_budget(budget, today=on, prices=prices), today=on, argv=sys.argv)
    table = rich_table(cost_grid(document))
    show_document(document, table, cost_lines(document), as_json=as_json)


_REPORT = typer.Option(help="Write one HTML file for the person who signs, such as decision.html.")


def options(
    plan: Annotated[Path, typer.Argument(help="Plan in TOML: work, limits, options with prices.")],
    *,
    prices: Annotated[Path | None, typer.Option(help="CSV of prices, used by name.")] = None,
    today: Annotated[str, typer.Option(help="YYYY-MM-DD, for the age of prices.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write the plan document.")] = None,
    report: Annotated[Path | None, _REPORT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Rank the options of a plan by cost, with the chance to meet its deadline."""
    from perfmodel.api import plan_options
    from perfmodel.cli.layout_inputs import read_model
    from perfmodel.report.plan import infeasible_line, plan_grid, plan_lines
    from perfmodel.report.tables import rich_table

    document = plan_options(
        plan,
        prices=prices,
        today=day("--today", today),
        open_model=lambda name, sequence: read_model(name, sequence=sequence),
        argv=sys.argv,
    )
    if output is not None:
        document.write(output)
    if report is not None:
        from perfmodel.documents.base import write_atomically
        from perfmodel.report.plan import decision_html

        write_atomically(report, decision_html(document))
    show_document(document, rich_table(plan_grid(document)), plan_lines(document), as_json=as_json)
    if not document.ranked:
        raise NotFeasible(infeasible_line(document))


DEFAULT_CLAUSES = Path("clauses.toml")

_OLD = typer.Argument(help="Profile before, such as with the old driver.")
_NEW = typer.Argument(help="Profile after.")
_CLAUSES = typer.Argument(help="Clauses in TOML, from perfmodel acceptance write.")
_STEPS = typer.Option(
    "--workload", help="Calibrated workload whose step is a clause; repeatable. Default: all."
)
_OBSERVATIONS = typer.Option(
    help="Raw times of the delivered machine, which name a slow rank; default: beside the profile."
)
_GOODPUT = typer.Option(
    help="From perfmodel goodput --json for the job that is meant: adds a clause on its useful time."
)
_DELIVERED_GOODPUT = typer.Option(
    help="From perfmodel goodput --json with the stops that the delivered machine showed (--mtbf-stops)."
)


def diff(
    old: Annotated[Path, _OLD],
    new: Annotated[Path, _NEW],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Compare two profiles: what changed beyond noise, and which predictions move."""
    from perfmodel.api import compare_profiles, read_profile
    from perfmodel.report.profile import diff_lines, difference_grid, moved_grid
    from perfmodel.report.tables import rich_table

    document = compare_profiles(read_profile(old), read_profile(new), argv=sys.argv)
    if not as_json:
        show(rich_table(difference_grid(document)))
    table = rich_table(moved_grid(document))
    show_document(document, table, diff_lines(document), as_json=as_json)


def acceptance_write(
    *,
    profile: Annotated[Path, typer.Option(help="Profile of the reference machine.")],
    workload: Annotated[list[str] | None, _STEPS] = None,
    confidence: Annotated[
        float, typer.Option(help="With which a machine as good passes each clause.")
    ] = 0.95,
    goodput: Annotated[Path | None, _GOODPUT] = None,
    out: Annotated[Path, typer.Option(help="Where to write the clauses.")] = DEFAULT_CLAUSES,
) -> None:
    """Write clauses for a contract: what a machine like the one of the profile does."""
    from perfmodel.api import acceptance_terms, read_profile
    from perfmodel.documents.base import write_atomically
    from perfmodel.documents.goodput import GoodputDocument
    from perfmodel.report.batch import terms_grid, terms_lines
    from perfmodel.report.tables import rich_table

    terms = acceptance_terms(
        read_profile(profile),
        workload,
        confidence=confidence,
        goodput=None if goodput is None else GoodputDocument.read(goodput),
    )
    write_atomically(out, terms.toml())
    show(rich_table(terms_grid(terms)))
    show_lines(terms_lines(terms))
    typer.echo(f"written: {out}")


def acceptance_judge(
    clauses: Annotated[Path, _CLAUSES],
    *,
    profile: Annotated[Path, typer.Option(help="Profile of the delivered machine.")],
    observations: Annotated[Path | None, _OBSERVATIONS] = None,
    goodput: Annotated[Path | None, _DELIVERED_GOODPUT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Judge a delivered machine by the clauses of a contract."""
    from perfmodel.api import judge, read_profile
    from perfmodel.documents.acceptance import AcceptanceTerms, Verdict
    from perfmodel.documents.goodput import GoodputDocument
    from perfmodel.documents.observation import read_observations
    from perfmodel.report.batch import judgement_grid, judgement_lines
    from perfmodel.report.tables import rich_table

    beside = profile.with_name("observations.jsonl")
    source = observations or (beside if beside.is_file() else None)
    document = judge(
        AcceptanceTerms.read_toml(clauses),
        read_profile(profile),
        observations=() if source is None else read_observations(source),
        goodput=None if goodput is None else GoodputDocument.read(goodput),
        argv=sys.argv,
    )
    table = rich_table(judgement_grid(document))
    show_document(document, table, judgement_lines(document), as_json=as_json)
    broken = [
        f"{verdict}: {'; '.join(names)}"
        for verdict in (Verdict.FAILED, Verdict.NOT_MEASURED)
        if (names := document.having(verdict))
    ]
    if broken:
        raise OutOfTolerance(f"acceptance: {'; '.join(broken)}")

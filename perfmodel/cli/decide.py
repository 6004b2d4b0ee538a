"""Commands that end in a decision: goodput, cost, plan options, batch, acceptance; they start fast."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perfmodel.cli import options as opt
from perfmodel.cli import show_answer, working
from perfmodel.errors import NotFeasible, OutOfTolerance, UsageError
from perfmodel.units import DAY_S, HOUR_S, Seconds

if TYPE_CHECKING:
    from perfmodel.documents.observation import Observation
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.engine.job import FailureCause

#: More courses take long and say nothing more.
MOST_REPLICAS: Final = 100_000

_CAUSE = typer.Option(
    help="NAME=DEVICE_HOURS between failures of one cause, for example gpu=140000; with ,replace "
    "behind it, each takes a node out. Repeat it for every cause."
)
_MTBF = opt.number(
    "--mtbf-device-hours",
    "Device hours between two failures, all causes together; inf: nothing ever fails.",
)
_INTERVAL = opt.positive(
    "--checkpoint-interval-s", "Work between two checkpoints; default: the best by the formula."
)
_WRITE = opt.non_negative("--checkpoint-s", "Training stands still for one write.")
_RESTART = opt.non_negative("--restart-s", "Start, read the checkpoint, warm up.")
_STOPS = opt.count("--mtbf-stops", "Stops that the mean times were estimated from.")
_SPARES = opt.bounded(0)(
    "--spares", "Idle nodes at the start; default: a replacement is always at hand."
)
_REPLICAS = opt.bounded(2, MOST_REPLICAS)("--replicas", "Simulated courses.")
_REPLACEMENT = opt.non_negative("--replacement-hours", "Until a failed node is back as a spare.")
_DETECTION = opt.non_negative("--detection-s", "From a failure to the end of the job.")
_DEADLINE = opt.positive("--deadline-days", "Print the chance to make it.")


def goodput(
    context: typer.Context,
    *,
    devices: opt.Devices,
    work_days: Annotated[float, opt.positive("--work-days", "Days of training without any stop.")],
    mtbf_device_hours: Annotated[float | None, _MTBF] = None,
    cause: Annotated[list[str] | None, _CAUSE] = None,
    mtbf_stops: Annotated[int | None, _STOPS] = None,
    checkpoint_s: Annotated[Seconds, _WRITE] = 0,
    checkpoint_interval_s: Annotated[Seconds | None, _INTERVAL] = None,
    detection_s: Annotated[Seconds, _DETECTION] = 0,
    restart_s: Annotated[Seconds, _RESTART] = 0,
    spares: Annotated[int | None, _SPARES] = None,
    replacement_hours: Annotated[float, _REPLACEMENT] = 0,
    deadline_days: Annotated[float | None, _DEADLINE] = None,
    replicas: Annotated[int, _REPLICAS] = 200,
    seed: opt.Seed = 0,
) -> None:
    """Simulate weeks of a job that fails: when it ends, and how often to write checkpoints."""
    if replacement_hours and spares is None:
        raise UsageError("--replacement-hours: means nothing without --spares; give both")
    from perfmodel.engine.job import Job
    from perfmodel.plan.goodput import best_interval_of
    from perfmodel.plan.goodput import goodput as use_case

    causes = _causes(cause or (), mtbf_device_hours, takes_node=spares is not None)
    if causes and not checkpoint_s and checkpoint_interval_s is None:
        raise UsageError(
            "--checkpoint-s: must be > 0 for a best interval, got 0: what costs nothing is best done "
            "all the time; give the time of one write, or --checkpoint-interval-s"
        )
    job = opt.asked(
        Job,
        context,
        work_s=work_days * DAY_S,
        checkpoint_interval_s=checkpoint_interval_s or work_days * DAY_S,
        checkpoint_write_s=checkpoint_s,
        causes=causes,
        replacement_s=replacement_hours * HOUR_S,
    )
    if checkpoint_interval_s is None:
        # The whole job where saving never pays.
        best_s = min(best_interval_of(job) or math.inf, job.work_s)
        job = replace(job, checkpoint_interval_s=best_s)
    with working("goodput"):
        deadline_s = None if deadline_days is None else deadline_days * DAY_S
        document = opt.asked(use_case, context, job=job, deadline_s=deadline_s)
    show_answer(document)


def _causes(
    texts: Sequence[str], mtbf_hours: float | None, *, takes_node: bool
) -> "tuple[FailureCause, ...]":
    from perfmodel.engine.job import FailureCause

    if texts and mtbf_hours is not None:
        raise UsageError("--cause: excludes --mtbf-device-hours; give one of the two")
    if texts:
        return tuple(map(_cause, texts))
    if mtbf_hours is None:
        raise UsageError(
            "--mtbf-device-hours: must be given, or --cause for each kind of failure, got neither; "
            "inf says that nothing ever fails"
        )
    if not mtbf_hours > 0:
        raise UsageError(
            f"--mtbf-device-hours: must be > 0, or inf if nothing ever fails, got {mtbf_hours}"
        )
    if mtbf_hours == math.inf:
        return ()
    return (FailureCause(name="any", mtbf_device_s=mtbf_hours * HOUR_S, takes_node=takes_node),)


def _cause(text: str) -> "FailureCause":
    from perfmodel.engine.job import FailureCause

    name, _, rest = text.partition("=")
    hours, _, what = rest.partition(",")
    try:
        device_hours = float(hours)
    except ValueError:
        device_hours = -1
    if not name.strip() or not device_hours > 0 or what not in ("", "replace"):
        raise UsageError(
            f"--cause: must look like gpu=140000 or gpu=140000,replace (device hours > 0), got {text!r}"
        )
    return FailureCause(
        name=name.strip(), mtbf_device_s=device_hours * HOUR_S, takes_node=what == "replace"
    )


def cost(
    budget_file: Annotated[Path, opt.file("BUDGET_FILE", "What is bought and rented (TOML).")],
    *,
    today: opt.Today = None,
) -> None:
    """Compare buying with renting: cost of a useful device-hour, and where they cross."""
    from perfmodel.plan.goodput import compare_costs

    show_answer(compare_costs(budget_file, today=today))


_EXPORT = opt.task(
    "--export", "Write what was chosen for SkyPilot: task.yaml, or task.py with a time_estimator."
)
_REPORT = opt.file(
    "--report", "Write one HTML file for the person who signs, such as decision.html."
)


def plan_options(
    plan: Annotated[Path, opt.file("PLAN", "Plan in TOML: work, limits, options with prices.")],
    *,
    today: opt.Today = None,
    report: Annotated[Path | None, _REPORT] = None,
    export: Annotated[Path | None, _EXPORT] = None,
) -> None:
    """Rank the options of a plan by cost, with the chance to meet its deadline."""
    from perfmodel.api import plan_options as use_case
    from perfmodel.report.plan import infeasible_line

    with working("plan options"):
        document = use_case(plan, today=today)
    if report is not None:
        from perfmodel.files import write_atomically
        from perfmodel.report.html import decision_html

        write_atomically(report, decision_html(document))
    if export is not None and document.ranked:
        from perfmodel.files import write_atomically
        from perfmodel.report.plan import skypilot_text

        write_atomically(export, skypilot_text(document, export))
    show_answer(document)
    if not document.ranked:
        raise NotFeasible(infeasible_line(document))


_POINTS = opt.pairs(
    "--points",
    "BATCH=SAMPLES to the target for at least two batch sizes, such as 1024=7.5e7,2048=7.2e7. "
    "With --samples-per-unit, epochs or tokens instead of samples.",
)
_RATES = opt.pairs("--samples-per-s", "BATCH=SAMPLES per second, as predicted or timed.")
_UNIT = opt.positive("--samples-per-unit", "Samples per unit of --points, such as an epoch.")
_TRAINED = typer.Option(help="With --devices: the workload whose samples per second are predicted.")
_FURTHER = opt.numbers("--batches", "Further batches, separated by commas.")


def batch(
    *,
    points: Annotated[Mapping[float, float] | None, _POINTS] = None,
    batches: Annotated[Sequence[float], _FURTHER] = (),
    samples_per_s: Annotated[Mapping[float, float] | None, _RATES] = None,
    samples_per_unit: Annotated[float, _UNIT] = 1,
    workload: Annotated[str | None, _TRAINED] = None,
    profile: opt.Machine = opt.DEFAULT_PROFILE,
    devices: opt.OptionalDeviceCounts = None,
    micro_batch: opt.MicroBatch = None,
) -> None:
    """From runs of some batch sizes, the time to the target with others."""
    if (workload is None) is not (devices is None):
        alone, other = ("devices", "workload") if workload is None else ("workload", "devices")
        raise UsageError(f"--{alone}: must come with --{other}, got it alone")
    if devices is None and micro_batch is not None:
        raise UsageError("--micro-batch: must come with --devices, got it alone")
    from perfmodel.plan.batch import BatchPoint, batch_outlook

    points = points or {}
    if len(points) < 2:
        told = ",".join(f"{size:g}={units:g}" for size, units in points.items())
        raise UsageError(f"--points: must name at least two batches, got {told or 'none'}")
    rates = dict(samples_per_s or {})
    if workload is not None and devices is not None:
        from perfmodel.answer import open_question
        from perfmodel.answer.answer import Forecast, table

        request = Forecast(world_sizes=tuple(devices), scaling="weak", batch=micro_batch)
        predicted, _ = table(open_question(opt.profiled(profile), workload), request)
        own = {float(p.setting.global_batch): p.samples_per_s.nominal for p in predicted.points}
        rates = own | rates
    known = [
        BatchPoint(batch=size, samples=units * samples_per_unit) for size, units in points.items()
    ]
    if any(each.samples < 1 for each in known):
        raise UsageError(
            "--points: must be at least one sample each; --samples-per-unit says what an epoch has"
        )
    with working("batch"):
        document = batch_outlook(known, batches=batches, samples_per_s=rates)
    show_answer(document)


DEFAULT_CLAUSES: Final = Path("clauses.toml")

_REFERENCE = opt.machine("Profile of the reference machine, or a name of perfmodel machines.")
_STEPS = typer.Option(
    "--workload",
    help="Calibrated workload whose step is a clause; repeatable. Default: all. With --layout: what is "
    "trained, as perfmodel diagnose takes it.",
)
_CONFIDENCE = opt.number("--confidence", "With which a machine as good passes all clauses.")
_OBSERVED = typer.Option(
    help="A run of the job: '64 GPUs 8 nodes 0.48 s'; repeatable, three are meant. To write: on a part of such "
    "a machine."
)
_LOGS = opt.file("--log", "nccl-tests log; repeatable. To write: of a part of such a machine.")
_RUNS = opt.file("--run", "Folder of pm.write_run, with every rank; repeatable.")
_PARTS = opt.text(
    "--part",
    "The job on one of equal parts: 'node 3, 8 GPUs: 0.52 s'; repeatable. Finds the slow one.",
)
_GOODPUT = opt.file("--goodput", "From perfmodel goodput --json: adds a clause on useful time.")


def acceptance_write(
    context: typer.Context,
    *,
    profile: Annotated[Path, _REFERENCE],
    workload: Annotated[list[str] | None, _STEPS] = None,
    layout: opt.LayoutText = None,
    cluster: opt.ClusterFile = None,
    nodes_like: opt.NodesLike = None,
    observed: Annotated[list[str] | None, _OBSERVED] = None,
    log: Annotated[list[Path] | None, _LOGS] = None,
    confidence: Annotated[float, _CONFIDENCE] = 0.95,
    goodput: Annotated[Path | None, _GOODPUT] = None,
    output: Annotated[Path, opt.file("--output", "File of clauses to write (TOML).")] = (
        DEFAULT_CLAUSES
    ),
) -> None:
    """Write clauses for a contract: what a machine like the reference does, or what a job takes on a new one."""
    if layout is None:
        only = dict.fromkeys(("cluster", "nodes_like", "observed", "log"), "give --layout")
        opt.refuse_typed(context, only, beside="clauses of a calibration")
    from perfmodel.api import acceptance_terms, with_nodes_of
    from perfmodel.documents.budget import GoodputDocument
    from perfmodel.files import write_atomically

    machine = profile if nodes_like is None else with_nodes_of(profile, nodes_like)
    with working("acceptance"):
        terms = opt.asked(
            acceptance_terms,
            context,
            machine=machine,
            workloads=workload or None,
            observed=observed or (),
            logs=log or (),
            goodput=None if goodput is None else GoodputDocument.read(goodput),
        )
    write_atomically(output, terms.toml())
    show_answer(terms, written={"written": output})


def acceptance_judge(
    clauses: Annotated[Path, opt.file("CLAUSES", "Clauses, from perfmodel acceptance write.")],
    *,
    profile: Annotated[
        Path | None, opt.file("--profile", "Profile of the delivered machine.")
    ] = None,
    observed: Annotated[list[str] | None, _OBSERVED] = None,
    run: Annotated[list[Path] | None, _RUNS] = None,
    part: Annotated[list[str] | None, _PARTS] = None,
    log: Annotated[list[Path] | None, _LOGS] = None,
    goodput: Annotated[Path | None, _GOODPUT] = None,
) -> None:
    """Judge a delivered machine by the clauses of a contract."""
    from perfmodel.api import judge
    from perfmodel.documents.acceptance import AcceptanceTerms, Verdict
    from perfmodel.documents.budget import GoodputDocument
    from perfmodel.documents.profile import ProfileDocument

    terms = AcceptanceTerms.read(clauses)
    delivered = None if profile is None else ProfileDocument.read(profile)
    document = judge(
        terms,
        None if delivered is None else delivered.machine,
        observations=_observations_of(delivered, profile),
        observed=observed or (),
        runs=run or (),
        parts=part or (),
        logs=log or (),
        goodput=None if goodput is None else GoodputDocument.read(goodput),
    )
    show_answer(document)
    broken = [
        f"{verdict}: {'; '.join(names)}"
        for verdict in (Verdict.FAILED, Verdict.NOT_MEASURED)
        if (names := document.having(verdict))
    ]
    if broken:
        raise OutOfTolerance(f"acceptance: {'; '.join(broken)}")


def _observations_of(
    delivered: "ProfileDocument | None", profile: Path | None
) -> "list[Observation]":
    """Raw times beside a profile, which name a slow rank; others than it was fitted from are refused."""
    if delivered is None or profile is None:
        return []
    source = profile.with_name("observations.jsonl")
    if not source.is_file():
        return []
    from perfmodel.documents import file_sha256
    from perfmodel.documents.observation import read_observations
    from perfmodel.errors import InvalidDocument

    found = read_observations(source)
    if file_sha256(source) != delivered.observations_sha256:
        raise InvalidDocument(
            f"{source}: must be what the profile was fitted from, got edited or other observations; "
            "judge with those of the same calibration, or fit it again"
        )
    return found

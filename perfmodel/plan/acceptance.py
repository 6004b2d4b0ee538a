"""Use cases: clauses for a contract from a profile or a prediction, and the judgement of a delivered machine.

All m clauses together raise a false alarm with probability 1 - C at most, so each has the confidence
``c = 1 - (1 - C) / m`` (Bonferroni), and ``z`` is its normal quantile. The reference has the error ``e`` in log, what
the delivered machine will show ``d``. A limit lies ``z (sqrt(e² + d²) + d)`` beyond the reference: a machine that is
as good passes a clause with probability ``c``. A measurement passes if its true value keeps the limit with
probability ``c``, fails if it breaks it with that probability, and is too close to call between. The power of a
clause is the chance that a machine that lost a share L does not pass:

    power  =  Phi( -ln(1 - L) / sqrt(e² + d²)  -  z )

A calibrated reference is compared with a calibration that is as good: ``d = e``. A prediction of a new machine has a
large ``e``. It shrinks to that of a ratio when the job, or the collective, was run on a part of such a machine:

    reference  =  measured on k devices  *  predicted (n devices) / predicted (k devices)
"""

import datetime as dt
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist
from typing import Any, Final

from perfmodel.answer import Question
from perfmodel.answer.answer import answer, step_ratio
from perfmodel.answer.measured import cost_model
from perfmodel.cost import Samples
from perfmodel.cost.network import KINDS, Group, groups
from perfmodel.documents import asked_by
from perfmodel.documents.acceptance import (
    UNITS,
    AcceptanceDocument,
    AcceptanceTerms,
    Clause,
    ClauseKind,
    JudgedClause,
    Verdict,
)
from perfmodel.documents.budget import GoodputDocument
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.layout import Layout, scaled_layouts
from perfmodel.machine.measured import MeasuredCollective, MeasuredMachine, MeasuredWorkload
from perfmodel.plan.delivered import (
    RUNS,
    Delivery,
    JobRun,
    Quantity,
    all_reduces,
    as_busbw,
    covers_all,
    drawn,
    mean_of_runs,
    quantity,
    suspects,
    time_of_logs,
    unmeasured,
)
from perfmodel.statistics import expected_largest_over_median
from perfmodel.step import Cause, gradient_buckets
from perfmodel.units import GIB, KIB, Bytes, format_bytes
from perfmodel.workload.transformer import HALF_BYTES, NamedTransformer, feed_forward_parameters

#: How runs of one job on one quiet GPU cluster scatter, and how far devices of one kind are apart, both in log:
#: assumed where nothing was measured. The latter may be off by half.
_RUN_ERROR: Final = 0.03
_RANK_SPREAD: Final = 0.02
_UNCERTAINTY_OF_SPREAD: Final = 0.5
#: What makes a clause strong where no part of a machine does.
CALIBRATE: Final = "calibrate such a machine (--profile)"
#: Messages whose time is bandwidth alone, where such were measured.
LARGE_BYTES: Final[Bytes] = GIB
#: Messages whose time is latency.
SMALL_BYTES: Final[Bytes] = 32 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A clause without its limit, and what the limit rests on."""

    clause: Clause
    found: Quantity
    remedy: str = ""
    """What makes the clause strong, with ``{devices}`` where it is measured on a part; empty: more rounds."""
    parts: tuple[int, ...] = ()
    """Devices that such a part may have, the fewest first."""
    error_of_part: Callable[[int], float] = lambda _: math.inf
    """Error of the reference that a measurement on a number of devices leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoughtJob:
    """The job that a machine is bought for, and what is known of a part of such a machine."""

    question: Question
    links: MeasuredMachine | None = None
    """Whose collectives are known; None: those of the question."""
    reference: Delivery = field(default_factory=Delivery)
    """Runs of the job, and nccl-tests logs, of a part of a machine like the one that is bought."""


def machine_promises(profile: MeasuredMachine, workloads: Sequence[str]) -> Iterator[Promise]:
    """What a calibrated machine did, and another as good does."""
    for clause in _machine_clauses(profile, workloads):
        if found := quantity(Delivery(machine=profile), clause):
            yield Promise(clause=_measured_alike(clause, found), found=found)


def goodput_promises(goodput: GoodputDocument | None) -> Iterator[Promise]:
    """The share of useful time of a job, if that is asked."""
    if goodput is not None:
        name = f"effective training time on {goodput.job.devices} devices"
        clause = _clause(ClauseKind.GOODPUT, name)
        if found := quantity(Delivery(goodput=goodput), clause):
            remedy = (
                "estimate its rates of failure from more stops (perfmodel goodput --mtbf-stops)"
            )
            yield Promise(clause=_measured_alike(clause, found), found=found, remedy=remedy)


def _measured_alike(clause: Clause, found: Quantity) -> Clause:
    return clause.model_copy(update={"delivered_error": found.log_error})


def job_promises(job: BoughtJob) -> Iterator[Promise]:
    """The step of a job, its collectives, and its slowest rank, as predicted."""
    yield _step(job)
    yield from _collectives(job)
    if job.question.layout.world_size > 1:
        yield _spread(job.question)


def _step(job: BoughtJob) -> Promise:
    """By prediction, or by runs on a part of such a machine and the predicted ratio. [s]"""
    question, layout = job.question, job.question.layout
    error = _error_of_runs(question)
    clause = _clause(
        ClauseKind.STEP,
        f"step of {question.workload_name}, {str(layout) or 'dp=1'}",
        workload=question.workload_name,
        world_size=layout.world_size,
        layout=str(layout) or "dp=1",
        delivered_error=error,
    )
    counts = {run.world_size or layout.world_size for run in job.reference.runs}
    if len(counts) > 1:
        raise UsageError(f"--observed: runs must be of one number of devices, got {sorted(counts)}")
    measured = mean_of_runs([run.step_s for run in job.reference.runs], clause)
    if measured is None:
        found = drawn(answer(question).step_s)
    else:
        found = _scaled(measured, *step_ratio(question, _on_a_part(layout, *counts)))

    def error_of_part(devices: int) -> float:
        return math.hypot(step_ratio(question, _on_a_part(layout, devices))[1], error)

    known, replica = max(counts, default=0), layout.world_size // layout.dp
    larger = [n for n in _parts(question) if known < n and n % replica == 0]
    # As many devices as are bought, where no part tells more.
    parts = tuple(larger[:-1] or larger)
    told = f"run it {RUNS} times on {{devices}} such devices (--observed '{{devices}} GPUs ... s')"
    return Promise(
        clause=clause,
        found=found,
        remedy=told if parts else CALIBRATE,
        parts=parts,
        error_of_part=error_of_part,
    )


def _collectives(job: BoughtJob) -> Iterator[Promise]:
    """The largest of each kind that the job sends, over as many ranks; by logs of a part, if there are some."""
    question, links, network = job.question, job.links, None
    if links is None:
        return
    cluster, error = question.cluster or links.cluster, _error_of_runs(question)
    for (kind, ranks), size_bytes in _exchanges(question).items():
        network = network or cost_model(links, cluster, question.num_draws).network
        clause = _clause(
            ClauseKind.BUSBW,
            f"{kind.replace('_', '-')} busbw at {format_bytes(size_bytes)}, {ranks} ranks",
            collective=kind,
            world_size=ranks,
            size_bytes=size_bytes,
            delivered_error=error,
        )
        times_s = partial(network.time_s, kind, size_bytes)
        found, on = _of_logs(job.reference.collectives, clause)
        found = (
            _scaled(found, *_ratio(times_s, ranks, on)) if found else drawn(times_s(Group(ranks)))
        )
        parts = tuple(n for n in _parts(question) if on < n <= ranks)
        told = f"give {RUNS} nccl-tests logs of {{devices}} such devices (--log)"
        yield Promise(
            clause=clause,
            found=as_busbw(found, clause),
            remedy=told if parts else "give more nccl-tests logs (--log)",
            parts=parts,
            error_of_part=partial(_error_of_logs, times_s, ranks, error),
        )


def _ratio(times_s: Callable[[Group], Samples], ranks: int, part: int) -> tuple[float, float]:
    """A collective of ``ranks`` ranks over that of ``part`` of them, and its standard error in log."""
    found = drawn(times_s(Group(ranks)) / times_s(Group(part)))
    return found.value, found.log_error


def _error_of_logs(
    times_s: Callable[[Group], Samples], ranks: int, error: float, part: int
) -> float:
    return math.hypot(_ratio(times_s, ranks, part)[1], error)


def _of_logs(logs: Sequence[MeasuredCollective], clause: Clause) -> tuple[Quantity | None, int]:
    """Time of a collective by logs of the most ranks that reach its size, and their number. [s]"""
    sizes = {log.world_size for log in logs if log.world_size <= (clause.world_size or 0)}
    for part in sorted(sizes, reverse=True):
        of_part = clause.model_copy(update={"world_size": part})
        if found := time_of_logs(logs, of_part):
            return found, part
    return None, 0


def _exchanges(question: Question) -> dict[tuple[str, int], Bytes]:
    """The largest array of each kind of collective and number of ranks. [B]

    Ranks of a group that stand apart share their links with the groups between them: all devices then stand
    for the group.
    """
    if not isinstance(question.machine, MeasuredMachine):
        return _exchanges_by_shape(question)
    found: dict[tuple[str, int], Bytes] = {}
    members = groups(question.layout)
    for operation in answer(question).program.operations:
        cause = operation.cause
        if operation.size_bytes and cause in KINDS and cause not in _NOT_PROMISED:
            group = members[cause]
            ranks = group.size if group.stride == 1 else question.layout.world_size
            if group.size > 1:
                key = (KINDS[cause], ranks)
                found[key] = max(found.get(key, 0), operation.size_bytes)
    return found


def _exchanges_by_shape(question: Question) -> dict[tuple[str, int], Bytes]:
    """The same of a large model, whose layers are equal: gradients of a layer, activations of a micro-batch."""
    layout, model = question.layout, question.workload
    assert isinstance(model, NamedTransformer), model
    found: dict[tuple[str, int], Bytes] = {}
    if layout.replicas > 1:
        shape, held = model.shape, model.shape.layer_parameters
        ranks = layout.replicas if layout.tp * layout.cp * layout.pp == 1 else layout.world_size
        if layout.ep > 1:  # ranks with other experts share the rest alone
            one = feed_forward_parameters(shape.hidden, shape.feed_forward, float(shape.gated))
            held -= shape.experts * float(one)
        kinds = ("all_gather", "reduce_scatter") if layout.zero else ("all_reduce",)
        found |= {(kind, ranks): int(held / layout.tp * HALF_BYTES) for kind in kinds}
    if layout.tp > 1:
        tokens = layout.micro_batch * model.sequence // layout.cp
        found["all_reduce", layout.tp] = int(tokens * model.shape.hidden * HALF_BYTES)
    return found


def _spread(question: Question) -> Promise:
    """Slowest rank over the median rank, as devices of one kind differ."""
    ranks, workload = question.layout.world_size, question.workload
    measured = workload.rank_spread if isinstance(workload, MeasuredWorkload) else 0.0
    away = (measured or _RANK_SPREAD) * expected_largest_over_median(ranks)
    error = _error_of_runs(question)
    clause = _clause(
        ClauseKind.SPREAD,
        f"slowest of {ranks} ranks over the median rank",
        world_size=ranks,
        delivered_error=error,
    )
    found = Quantity(
        value=math.exp(away), log_error=_UNCERTAINTY_OF_SPREAD * away, source="predicted"
    )
    return Promise(
        clause=clause, found=found, remedy="calibrate such a machine with all its ranks (--profile)"
    )


def _scaled(measured: Quantity, ratio: float, log_error: float) -> Quantity:
    return Quantity(
        value=measured.value * ratio,
        log_error=math.hypot(measured.log_error, log_error),
        source="predicted",
    )


def _error_of_runs(question: Question) -> float:
    """Standard error, in log, of the mean of the runs that a machine is judged by."""
    machine, scatter = question.machine, 0.0
    if isinstance(machine, MeasuredMachine):
        scatter = machine.repeatability.run_of(question.layout.world_size)
    return (scatter or _RUN_ERROR) / math.sqrt(RUNS)


def _parts(question: Question) -> tuple[int, ...]:
    """One node, two, four ... and all. [devices]"""
    cluster, machine, ranks = question.cluster, question.machine, question.layout.world_size
    inside = None if cluster is None else cluster.devices_per_node
    if inside is None and isinstance(machine, MeasuredMachine):
        inside = machine.devices_per_node
    inside = inside or question.devices_per_node
    return (*(inside * 2**k for k in range(20) if inside * 2**k < ranks), ranks)


def _on_a_part(layout: Layout, devices: int) -> Layout:
    """The layout with fewer replicas."""
    replica = layout.world_size // layout.dp
    if devices % replica:
        raise UsageError(
            f"--observed: devices must be a multiple of the {replica} of a replica of {layout}, got {devices}"
        )
    return replace(layout, dp=devices // replica)


#: Buffers, and sends between stages: too small, or no collective that nccl-tests times.
_NOT_PROMISED: Final = (Cause.BROADCAST, Cause.P2P)


def _machine_clauses(profile: MeasuredMachine, workloads: Sequence[str]) -> Iterator[Clause]:
    """What can be asked of this machine; limits follow."""
    ordered = sorted(profile.rates, key=lambda rate: math.prod(rate.shape))
    largest = {rate.dtype: rate.shape for rate in ordered if rate.probe == "matmul"}
    for dtype, shape in largest.items():
        size = "x".join(map(str, shape))
        yield _clause(ClauseKind.GEMM, f"matrix product {dtype} {size}", dtype=dtype, shape=shape)
    if reduces := all_reduces(profile):
        widest = max(reduces, key=lambda entry: entry.world_size)
        measured, layout = sorted(int(p.at) for p in widest.points), Layout(dp=widest.world_size)
        buckets = (
            gradient_buckets(_calibrated(profile, name).workload, layout) for name in workloads
        )
        # The largest bucket of each, as far as it was measured; without one, 1 GiB or the next size to it.
        large = {min(max(b.size_bytes for b in each), measured[-1]) for each in buckets}
        large = large or {next((s for s in measured if s >= LARGE_BYTES), measured[-1])}
        sizes = [(ClauseKind.BUSBW, size) for size in sorted(large)]
        for kind, size_bytes in (*sizes, (ClauseKind.LATENCY, SMALL_BYTES)):
            where = f"{format_bytes(size_bytes)}, {widest.world_size} ranks"
            yield _clause(
                kind,
                f"all-reduce {kind} at {where}",
                collective="all_reduce",
                world_size=widest.world_size,
                size_bytes=size_bytes,
            )
    if profile.max_world_size > 1:
        yield _clause(ClauseKind.SPREAD, "slowest rank over the median rank")
    for name in workloads:
        entry = _calibrated(profile, name)
        batches = sorted(int(point.at) for point in entry.phases[0].forward)
        batch = batches[len(batches) // 2]
        for world_size in sorted({1, profile.max_world_size}):
            [layout] = scaled_layouts([world_size], scaling="weak", batch=batch)
            yield _clause(
                ClauseKind.STEP,
                f"step of {name}, {world_size} x {batch}",
                workload=name,
                world_size=world_size,
                layout=str(layout) or "dp=1",
            )


def _calibrated(profile: MeasuredMachine, name: str) -> MeasuredWorkload:
    entry = profile.workload(name)
    if entry is None:
        known = ", ".join(e.workload.name for e in profile.workloads) or "none"
        raise UsageError(
            f"--workload: must be calibrated on the machine ({known}) or come with --layout, got {name!r}"
        )
    return entry


def _clause(kind: ClauseKind, name: str, **where: Any) -> Clause:
    # a clause needs a limit to be one: 1 stands there until the reference is known
    limit = "at_least" if UNITS[kind][1] else "at_most"
    more: dict[str, Any] = {limit: 1.0, "delivered_error": 0.0, **where}
    return Clause(kind=kind, name=name, reference=1.0, reference_error=0.0, **more)


#: A loss that every clause should find, and with which chance.
LOSS: Final = 0.2
STRONG: Final = 0.8


def terms_of(
    promises: Sequence[Promise], *, confidence: float, device_name: str, digest: str
) -> AcceptanceTerms:
    """Promises with their limits; ``confidence``: of all together, between 0.5 and 1."""
    if not 0.5 < confidence < 1:
        raise UsageError(f"--confidence: must be > 0.5 and < 1, got {confidence:g}")
    if not promises:
        raise CalibrationUnavailable(
            "acceptance: the profile holds nothing to write a clause about; --layout writes clauses of a "
            "predicted job"
        )
    each = 1 - (1 - confidence) / len(promises)
    return AcceptanceTerms(
        confidence=confidence,
        device_name=device_name,
        profile_digest=digest,
        created_utc=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        clause=tuple(_with_limit(promise, each) for promise in promises),
    )


def judge(terms: AcceptanceTerms, delivery: Delivery) -> AcceptanceDocument:
    """Judge every clause with the uncertainty of what was measured of the delivered machine.

    A run of the job says nothing of its model: ``UsageError`` if it is about no step, or about several.
    """
    for run in delivery.runs:
        _refuse_unclear(run, terms)
    judged = []
    for clause in terms.clause:
        found = quantity(delivery, clause)
        kept = None if found is None else probability_kept(clause, found)
        verdict = Verdict.CLOSE
        if kept is None:
            verdict = Verdict.NOT_MEASURED
        elif kept >= terms.each_confidence:
            # What was left out may be the slow one.
            is_whole = covers_all(delivery, clause)
            verdict = Verdict.PASSED if is_whole else Verdict.NOT_MEASURED
        elif kept <= 1 - terms.each_confidence:
            verdict = Verdict.FAILED
        is_open = verdict in {Verdict.CLOSE, Verdict.FAILED}
        judged.append(
            JudgedClause(
                clause=clause,
                delivered=None if found is None else found.value,
                delivered_error=0.0 if found is None else found.log_error,
                source="" if found is None else found.source,
                probability_kept=kept,
                verdict=verdict,
                suspects=suspects(clause, delivery) if is_open else (),
            )
        )
    machine = delivery.machine
    return AcceptanceDocument(
        command_line=asked_by(),
        terms=terms,
        delivered_digest=None if machine is None else machine.digest,
        delivered_name=terms.device_name if machine is None else machine.device_name,
        judged=tuple(judged),
        unmeasured=tuple(unmeasured(delivery, terms.clause)),
    )


def _refuse_unclear(run: JobRun, terms: AcceptanceTerms) -> None:
    steps = [clause for clause in terms.clause if clause.kind is ClauseKind.STEP]
    told = [clause.name for clause in steps if run.world_size in (None, clause.world_size)]
    where, or_name = f"a run on {run.world_size} devices", ""
    if run.world_size is None:
        where, or_name = "a run", "name its devices, or "
    if not told:
        counts = ", ".join(str(clause.world_size) for clause in steps) or "none"
        raise UsageError(
            f"--observed, --run: must be of the devices of a clause of a step ({counts}), got {where}"
        )
    if len(told) > 1:
        raise UsageError(
            f"--observed: must be about one clause, but {where} may be about {', '.join(told)}; "
            f"{or_name}judge by --profile"
        )


def probability_kept(clause: Clause, found: Quantity) -> float:
    """That the true value keeps the limit, with a normal error in log."""
    margin = math.log(found.value / clause.limit) * (1 if clause.more_is_better else -1)
    if found.log_error == 0:
        return 1.0 if margin >= 0 else 0.0
    return NormalDist().cdf(margin / found.log_error)


def power(clause: Clause, *, confidence: float) -> float:
    """Chance that a machine worse by ``LOSS`` does not pass, measured as the limit takes it."""
    return _power(math.hypot(clause.reference_error, clause.delivered_error), confidence)


def _power(error: float, confidence: float) -> float:
    normal = NormalDist()
    if error == 0:
        return 1.0
    return normal.cdf(-math.log(1 - LOSS) / error - normal.inv_cdf(confidence))


def strong_error(*, confidence: float) -> float:
    """Largest error of a difference that finds ``LOSS`` with ``STRONG``; a standard error in log."""
    normal = NormalDist()
    return -math.log(1 - LOSS) / (normal.inv_cdf(STRONG) + normal.inv_cdf(confidence))


def _with_limit(promise: Promise, confidence: float) -> Clause:
    clause, found, delivered = promise.clause, promise.found, promise.clause.delivered_error
    both = math.hypot(found.log_error, delivered)
    allowance = NormalDist().inv_cdf(confidence) * (both + delivered)
    limit = found.value * math.exp(-allowance if clause.more_is_better else allowance)
    return clause.model_copy(
        update={
            "reference": found.value,
            "reference_error": found.log_error,
            "remedy": _remedy(promise, both, confidence),
            "at_least" if clause.more_is_better else "at_most": limit,
        }
    )


def _remedy(promise: Promise, both: float, confidence: float) -> str | None:
    """What makes a clause strong that is too weak; None if it is strong."""
    today = _power(both, confidence)
    if today >= STRONG:
        return None
    if not promise.remedy:
        rounds = math.ceil((both / strong_error(confidence=confidence)) ** 2)
        return f"calibrate {rounds} times as many rounds"
    for devices in promise.parts:
        after = _power(
            math.hypot(promise.error_of_part(devices), promise.clause.delivered_error), confidence
        )
        if after >= STRONG or (devices == promise.parts[-1] and after > today):
            return (
                f"{promise.remedy.format(devices=devices)}: finds it with {100 * after:.0f} % then"
            )
    return CALIBRATE if promise.parts else promise.remedy

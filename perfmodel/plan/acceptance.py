"""Use cases: clauses for a contract from a profile, and the judgement of a delivered machine.

All m clauses together raise a false alarm with probability 1 - C at most, so each has the confidence
``c = 1 - (1 - C) / m`` (Bonferroni), and ``z`` is its normal quantile. A limit lies ``z (sqrt(e² + e²) + e)`` in
log beyond the reference, whose error is ``e``: a machine that is as good, measured as well, passes a clause with
probability ``c``. A measurement passes if its true value keeps the limit with probability ``c``, fails if it
breaks it with that probability, and is too close to call between. The power of a clause is the chance that a
machine that lost a share L, measured as well, does not pass:

    power  =  Phi( -ln(1 - L) / (sqrt(2) e)  -  z )
"""

import datetime as dt
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Final, Literal

import numpy as np

from perfmodel.answer import Question
from perfmodel.answer.answer import answer
from perfmodel.cost import CurveDraws
from perfmodel.cost.collectives import bus_factor
from perfmodel.documents import command_line
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
from perfmodel.documents.observation import Observation, StepObservation
from perfmodel.engine.stragglers import expected_largest_deviate
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.layout import Layout, Synchronisation, scaled_layouts
from perfmodel.machine.measured import CollectiveProfile, MeasuredMachine, MeasuredWorkload
from perfmodel.step.stages import gradient_buckets
from perfmodel.units import GIB, KIB, Bytes, format_bytes, format_rate

_NUM_DRAWS: Final = 400
#: Spreads of ranks below this are not told apart from none.
_SMALLEST_SPREAD: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A positive value in SI units."""

    value: float
    log_error: float
    source: Literal["measured", "interpolated", "predicted"]


def quantity(
    profile: MeasuredMachine, clause: Clause, *, goodput: GoodputDocument | None = None
) -> Quantity | None:
    """What the machine does about a clause; None if nothing was measured about it.

    ``goodput`` is of a job on that machine, at its rates of failures.
    """
    if clause.kind is ClauseKind.GOODPUT:
        return None if goodput is None else _goodput(goodput)
    return _QUANTITIES[clause.kind](profile, clause)


def _kernel(profile: MeasuredMachine, clause: Clause) -> Quantity | None:
    """Kernels have no error of their own: they carry that of one run."""
    for rate in profile.rates:
        if (rate.probe, rate.dtype, rate.shape) == ("matmul", clause.dtype, clause.shape):
            return Quantity(
                value=rate.flop_per_s, log_error=profile.repeatability.run_of(1), source="measured"
            )
    return None


def _all_reduce(profile: MeasuredMachine, clause: Clause) -> Quantity | None:
    """Time of an all-reduce of the size, in the group of that size. [s]"""
    assert clause.size_bytes is not None
    for entry in _all_reduces(profile):
        if entry.world_size == clause.world_size:
            curve = CurveDraws.sample(
                entry.points, num_draws=_NUM_DRAWS, rng=np.random.default_rng(0)
            )
            draws_s = curve.read(clause.size_bytes)
            return Quantity(
                value=float(draws_s[0]),
                log_error=float(np.log(draws_s[1:]).std()),
                source="measured" if clause.size_bytes in curve.at else "interpolated",
            )
    return None


def _busbw(profile: MeasuredMachine, clause: Clause) -> Quantity | None:
    found = _all_reduce(profile, clause)
    if found is None:
        return None
    assert clause.size_bytes is not None
    assert clause.world_size is not None
    factor = bus_factor("all_reduce", clause.world_size)
    return Quantity(
        value=clause.size_bytes * factor / found.value,
        log_error=found.log_error,
        source=found.source,
    )


def _spread(profile: MeasuredMachine, _clause: Clause) -> Quantity | None:
    """Slowest of all ranks over the median rank, of the workload that shows it most.

    The standard deviation of n ranks is itself uncertain by ``1 / sqrt(2 (n - 1))``.
    """
    ranks = profile.max_world_size
    if ranks == 1 or not profile.workloads:
        return None
    spread = max(workload.rank_spread for workload in profile.workloads)
    deviate = expected_largest_deviate(ranks)
    error = max(spread, _SMALLEST_SPREAD) / math.sqrt(2 * (ranks - 1))
    return Quantity(value=math.exp(spread * deviate), log_error=error * deviate, source="measured")


def _goodput(goodput: GoodputDocument) -> Quantity:
    """Half of the 90 % interval is 1.645 standard errors, which hold the uncertainty of the failure rates."""
    share = goodput.effective_fraction
    return Quantity(
        value=share.nominal,
        log_error=math.log(share.p95 / share.p5) / (2 * NormalDist().inv_cdf(0.95)),
        source="predicted",
    )


def _all_reduces(profile: MeasuredMachine) -> list[CollectiveProfile]:
    return [entry for entry in profile.collectives if entry.collective == "all_reduce"]


def _step(profile: MeasuredMachine, clause: Clause) -> Quantity | None:
    """As it ran, or as the model has it, which needs an all-reduce for several ranks. [s]"""
    assert clause.workload is not None
    assert clause.world_size is not None
    assert clause.micro_batch is not None
    workload = profile.workload(clause.workload)
    if workload is None:
        return None
    [layout] = scaled_layouts([clause.world_size], scaling="weak", batch=clause.micro_batch)
    for step in profile.steps:
        known = (step.workload, step.world_size, step.micro_batch, step.synchronisation)
        asked = (clause.workload, layout.world_size, layout.micro_batch)
        if known == (*asked, layout.synchronisation.value) and step.bucket_cap_mb is None:
            error = math.hypot(
                step.relative_error, profile.repeatability.known_round(profile.num_rounds)
            )
            return Quantity(value=step.step_s, log_error=error, source="measured")
    if layout.synchronisation is Synchronisation.DDP and not _all_reduces(profile):
        return None
    draws_s = answer(Question(machine=profile, workload=workload, layout=layout)).step_s
    return Quantity(
        value=float(draws_s[0]), log_error=float(np.log(draws_s[1:]).std()), source="predicted"
    )


_QUANTITIES: Final[Mapping[ClauseKind, Callable[[MeasuredMachine, Clause], Quantity | None]]] = {
    ClauseKind.GEMM: _kernel,
    ClauseKind.BUSBW: _busbw,
    ClauseKind.LATENCY: _all_reduce,
    ClauseKind.SPREAD: _spread,
    ClauseKind.STEP: _step,
}
#: A rank is named if its steps are longer than those of the median rank by more than this.
_SLOW_RATIO: Final = 1.02


def suspects(
    clause: Clause, profile: MeasuredMachine, observations: Sequence[Observation]
) -> tuple[str, ...]:
    """Sentences about ranks, devices and links that may explain a clause; none if nothing points anywhere."""
    kind = clause.kind
    found: list[str] = []
    if kind in {ClauseKind.SPREAD, ClauseKind.STEP, ClauseKind.GEMM}:
        found += _slow_ranks(profile, observations)
    if kind is ClauseKind.GEMM:
        found.append(f"device: {profile.device_name}")
    if kind in {ClauseKind.BUSBW, ClauseKind.LATENCY}:
        found += _groups(profile)
    return tuple(found)


def unmeasured_links(profile: MeasuredMachine) -> tuple[str, ...]:
    """Links that no measured all-reduce crossed, in sentences."""
    sizes = [entry.world_size for entry in _all_reduces(profile)]
    if not sizes:
        return ("no all-reduce was measured: nothing is said about any link",)
    found = []
    if max(sizes) <= profile.ranks_per_node:
        found.append("no group crossed nodes: nothing is said about the network between them")
    if max(sizes) < profile.max_world_size:
        found.append(
            f"the largest group had {max(sizes)} of {profile.max_world_size} ranks: the links of the "
            "others are in no collective"
        )
    return tuple(found)


def rank_ratios(observations: Sequence[Observation]) -> dict[int, float]:
    """Time of each rank over the median rank, in steps in which nobody waits for anybody.

    Ranks are compared within a repetition, so that the machine's speed at that moment cancels; what
    counts is the median over repetitions.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for observation in observations:
        if isinstance(observation, StepObservation) and _is_local(observation.setting.layout):
            steps_s = {rank.rank: median(rank.step_s) for rank in observation.ranks}
            middle_s = median(steps_s.values())
            for rank, step_s in steps_s.items():
                found[rank].append(step_s / middle_s)
    return {rank: median(ratios) for rank, ratios in sorted(found.items())}


def _is_local(layout: Layout) -> bool:
    """Many ranks at work, none of which waits for another."""
    return layout.world_size > 1 and layout.synchronisation is Synchronisation.NO_SYNC


def _slow_ranks(profile: MeasuredMachine, observations: Sequence[Observation]) -> Iterator[str]:
    slow = {rank: ratio for rank, ratio in rank_ratios(observations).items() if ratio > _SLOW_RATIO}
    for rank, ratio in sorted(slow.items(), key=lambda item: -item[1]):
        node, local_rank = divmod(rank, profile.ranks_per_node)
        yield (
            f"rank {rank} (node {node}, {_device(profile.environment, local_rank)}) takes "
            f"{ratio:.2f} times as long as the median rank"
        )


def _device(environment: Mapping[str, object], local_rank: int) -> str:
    gpus = environment.get("gpus")
    if isinstance(gpus, list) and local_rank < len(gpus) and isinstance(gpus[local_rank], dict):
        return f"device {local_rank}: {gpus[local_rank].get('uuid') or 'without a name'}"
    return f"device {local_rank}"


def _groups(profile: MeasuredMachine) -> Iterator[str]:
    """Bandwidth by group size: where it drops is where the slow link is."""
    found = {}
    for entry in _all_reduces(profile):
        factor = bus_factor("all_reduce", entry.world_size)
        if factor and entry.points:
            last = max(entry.points, key=lambda point: point.at)
            found[entry.world_size] = last.at * factor / last.time_s
    if found:
        rates = ", ".join(
            f"{n} ranks {format_rate(rate, 'B')}" for n, rate in sorted(found.items())
        )
        yield f"link: busbw of the largest all-reduce by group: {rates}"
    inside = [rate for n, rate in found.items() if n <= profile.ranks_per_node]
    across = [rate for n, rate in found.items() if n > profile.ranks_per_node]
    if inside and across and min(across) < min(inside) / 2:
        yield "link: it drops where a group leaves its node, the network between nodes is the slow one"


#: Messages whose time is bandwidth alone, where such were measured.
LARGE_BYTES: Final[Bytes] = GIB
#: Messages whose time is latency.
SMALL_BYTES: Final[Bytes] = 32 * KIB


def acceptance_terms(
    profile: MeasuredMachine,
    workloads: Sequence[str],
    *,
    confidence: float,
    goodput: GoodputDocument | None = None,
) -> AcceptanceTerms:
    """Clauses that a machine like the one of the profile keeps.

    ``workloads``: calibrated ones whose step is a clause, on all ranks that were measured together.
    ``confidence``: of all clauses together, between 0.5 and 1, see the head of this module.
    ``goodput``: of the job that the machine is for; its share of useful time becomes a clause.
    """
    if not 0.5 < confidence < 1:
        raise UsageError(f"--confidence: must be > 0.5 and < 1, got {confidence:g}")
    wanted = list(_wanted(profile, workloads))
    if goodput is not None:
        name = f"effective training time on {goodput.job.devices} devices"
        wanted.append(_clause(ClauseKind.GOODPUT, name))
    known = [(clause, quantity(profile, clause, goodput=goodput)) for clause in wanted]
    promised = [(clause, found) for clause, found in known if found]
    if not promised:
        raise CalibrationUnavailable(
            "acceptance: the profile holds nothing to write a clause about"
        )
    each = 1 - (1 - confidence) / len(promised)
    clauses = [_with_limit(clause, found, each) for clause, found in promised]
    return AcceptanceTerms(
        confidence=confidence,
        device_name=profile.device_name,
        profile_digest=profile.digest,
        created_utc=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        clause=tuple(clauses),
    )


def judge(
    terms: AcceptanceTerms,
    delivered: MeasuredMachine,
    *,
    observations: Sequence[Observation] = (),
    goodput: GoodputDocument | None = None,
    argv: Sequence[str] = ("perfmodel.judge",),
) -> AcceptanceDocument:
    """Judge every clause with the uncertainty of the delivered machine's measurement.

    ``observations`` are raw times of the delivered machine, which say which rank is slow; ``goodput`` is of
    the same job at the rates of failures that the delivered machine showed.
    """
    judged = []
    for clause in terms.clause:
        found = quantity(delivered, clause, goodput=goodput)
        kept = None if found is None else probability_kept(clause, found)
        verdict = Verdict.CLOSE
        if kept is None:
            verdict = Verdict.NOT_MEASURED
        elif kept >= terms.each_confidence:
            verdict = Verdict.PASSED
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
                suspects=suspects(clause, delivered, observations) if is_open else (),
            )
        )
    return AcceptanceDocument(
        command_line=command_line(argv),
        terms=terms,
        delivered_digest=delivered.digest,
        delivered_name=delivered.device_name,
        judged=tuple(judged),
        unmeasured_links=unmeasured_links(delivered),
    )


def probability_kept(clause: Clause, found: Quantity) -> float:
    """That the true value keeps the limit, with a normal error in log."""
    margin = math.log(found.value / clause.limit) * (1 if clause.more_is_better else -1)
    if found.log_error == 0:
        return 1.0 if margin >= 0 else 0.0
    return NormalDist().cdf(margin / found.log_error)


#: A loss that every clause should find, and with which chance.
LOSS: Final = 0.2
STRONG: Final = 0.8


def power(clause: Clause, *, confidence: float) -> float:
    """Chance that a machine worse by ``LOSS``, measured as well as the reference, does not pass."""
    if clause.reference_error == 0:
        return 1.0
    normal = NormalDist()
    lost = -math.log(1 - LOSS) / (math.sqrt(2) * clause.reference_error)
    return normal.cdf(lost - normal.inv_cdf(confidence))


def strong_error(*, confidence: float) -> float:
    """Largest error of a reference whose clause finds ``LOSS`` with ``STRONG``; a standard error in log."""
    normal = NormalDist()
    needed = normal.inv_cdf(STRONG) + normal.inv_cdf(confidence)
    return -math.log(1 - LOSS) / (math.sqrt(2) * needed)


def _with_limit(clause: Clause, found: Quantity, confidence: float) -> Clause:
    quantile = NormalDist().inv_cdf(confidence)
    allowance = quantile * (math.sqrt(2) + 1) * found.log_error
    limit = found.value * math.exp(-allowance if clause.more_is_better else allowance)
    return clause.model_copy(
        update={
            "reference": found.value,
            "reference_error": found.log_error,
            "at_least" if clause.more_is_better else "at_most": limit,
        }
    )


def _wanted(profile: MeasuredMachine, workloads: Sequence[str]) -> Iterator[Clause]:
    """What can be asked of this machine; limits follow."""
    ordered = sorted(profile.rates, key=lambda rate: math.prod(rate.shape))
    largest = {rate.dtype: rate.shape for rate in ordered if rate.probe == "matmul"}
    for dtype, shape in largest.items():
        size = "x".join(map(str, shape))
        yield _clause(ClauseKind.GEMM, f"matrix product {dtype} {size}", dtype=dtype, shape=shape)
    if reduces := _all_reduces(profile):
        widest = max(reduces, key=lambda entry: entry.world_size)
        large = {largest_bucket(profile, name, widest) for name in workloads} or {
            large_size(widest)
        }
        sizes = [(ClauseKind.BUSBW, size) for size in sorted(large)]
        for kind, size_bytes in (*sizes, (ClauseKind.LATENCY, SMALL_BYTES)):
            where = f"{format_bytes(size_bytes)}, {widest.world_size} ranks"
            yield _clause(
                kind,
                f"all-reduce {kind} at {where}",
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
            yield _clause(
                ClauseKind.STEP,
                f"step of {name}, {world_size} x {batch}",
                workload=name,
                world_size=world_size,
                micro_batch=batch,
            )


def _calibrated(profile: MeasuredMachine, name: str) -> MeasuredWorkload:
    entry = profile.workload(name)
    if entry is None:
        known = ", ".join(e.workload.name for e in profile.workloads)
        raise UsageError(f"--workload: must be in the profile ({known}), got {name!r}")
    return entry


def largest_bucket(profile: MeasuredMachine, name: str, entry: CollectiveProfile) -> Bytes:
    """Largest gradient bucket of a workload under DDP, no larger than what was measured. [B]"""
    buckets = gradient_buckets(_calibrated(profile, name).workload, Layout(dp=entry.world_size))
    measured = max(int(point.at) for point in entry.points)
    return min(max(piece.size_bytes for piece in buckets), measured)


def large_size(entry: CollectiveProfile) -> Bytes:
    """Smallest measured size of at least 1 GiB, or the largest one. [B]"""
    sizes = sorted(int(point.at) for point in entry.points)
    return next((size for size in sizes if size >= LARGE_BYTES), sizes[-1])


def _clause(kind: ClauseKind, name: str, **where: object) -> Clause:
    # a clause needs a limit to be one: 1 stands there until the reference is known
    limit = "at_least" if UNITS[kind][1] else "at_most"
    return Clause.model_validate(
        {"kind": kind, "name": name, "reference": 1.0, "reference_error": 0.0, limit: 1.0, **where}
    )

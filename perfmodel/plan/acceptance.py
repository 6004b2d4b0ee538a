"""Use cases: clauses for a contract from a profile, and the judgement of a delivered machine.

With one-sided confidence ``c`` and ``z`` its normal quantile, a limit lies
``z (sqrt(e² + e²) + e)`` in log beyond the reference, whose error is ``e``: a machine that is as good,
measured as well, passes with probability ``c``. A measurement passes if its true value keeps the limit
with probability ``c``, fails if it breaks it with that probability, and is too close to call between.
"""

import datetime as dt
import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Final

from perfmodel.documents.acceptance import (
    UNITS,
    AcceptanceDocument,
    AcceptanceTerms,
    Clause,
    ClauseKind,
    JudgedClause,
    Verdict,
)
from perfmodel.documents.base import command_line
from perfmodel.documents.goodput import GoodputDocument
from perfmodel.documents.observation import Observation
from perfmodel.documents.profile import CollectiveProfile, ProfileDocument
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.plan.culprits import culprits, unmeasured_links
from perfmodel.plan.quantities import Quantity, quantity
from perfmodel.units import GIB, KIB, Bytes, format_bytes

#: Messages whose time is bandwidth alone, where such were measured.
LARGE_BYTES: Final[Bytes] = GIB
#: Messages whose time is latency.
SMALL_BYTES: Final[Bytes] = 32 * KIB


def acceptance_terms(
    profile: ProfileDocument,
    workloads: Sequence[str],
    *,
    confidence: float,
    goodput: GoodputDocument | None = None,
) -> AcceptanceTerms:
    """Clauses that a machine like the one of the profile keeps.

    Parameters
    ----------
    workloads
        Calibrated workloads whose step is a clause, on all ranks that were measured together.
    confidence
        Between 0.5 and 1: see the head of this module.
    goodput
        Of the job that the machine is for: its share of useful time becomes a clause.

    Raises
    ------
    UsageError
        If a workload is unknown, or the confidence is not between 0.5 and 1.
    CalibrationUnavailable
        If the profile holds nothing that a clause could be about.
    """
    if not 0.5 < confidence < 1:
        raise UsageError(f"--confidence: must be > 0.5 and < 1, got {confidence:g}")
    clauses = []
    wanted = list(_wanted(profile, workloads))
    if goodput is not None:
        wanted.append(
            _clause(ClauseKind.GOODPUT, f"effective training time on {goodput.job.devices} devices")
        )
    for clause in wanted:
        found = quantity(profile, clause, goodput=goodput)
        if found is not None:
            clauses.append(_with_limit(clause, found, confidence))
    if not clauses:
        raise CalibrationUnavailable(
            "acceptance: the profile holds nothing to write a clause about"
        )
    return AcceptanceTerms(
        schema_version=AcceptanceTerms.current_version,
        confidence=confidence,
        device_name=profile.device_name,
        profile_digest=profile.digest,
        created_utc=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        clause=tuple(clauses),
    )


def judge(
    terms: AcceptanceTerms,
    delivered: ProfileDocument,
    *,
    observations: Sequence[Observation] = (),
    goodput: GoodputDocument | None = None,
    argv: Sequence[str] = ("perfmodel.judge",),
) -> AcceptanceDocument:
    """Judge every clause with the doubt of the delivered machine's measurement.

    Parameters
    ----------
    observations
        Raw times of the delivered machine, which say which rank is slow.
    goodput
        The same job at the rates of failures that the delivered machine showed.
    """
    return AcceptanceDocument(
        schema_version=AcceptanceDocument.current_version,
        command_line=command_line(argv),
        terms=terms,
        delivered_digest=delivered.digest,
        delivered_name=delivered.device_name,
        judged=tuple(
            _judged(clause, delivered, goodput, terms.confidence, observations)
            for clause in terms.clause
        ),
        unmeasured_links=unmeasured_links(delivered),
    )


def _judged(
    clause: Clause,
    delivered: ProfileDocument,
    goodput: GoodputDocument | None,
    confidence: float,
    observations: Sequence[Observation],
) -> JudgedClause:
    found = quantity(delivered, clause, goodput=goodput)
    if found is None:
        return JudgedClause(
            clause=clause,
            delivered=None,
            delivered_error=0.0,
            source="",
            probability_kept=None,
            verdict=Verdict.NOT_MEASURED,
            culprits=(),
        )
    kept = probability_kept(clause, found)
    verdict = Verdict.CLOSE
    if kept >= confidence:
        verdict = Verdict.PASSED
    elif kept <= 1 - confidence:
        verdict = Verdict.FAILED
    return JudgedClause(
        clause=clause,
        delivered=found.value,
        delivered_error=found.log_error,
        source=found.source,
        probability_kept=kept,
        verdict=verdict,
        culprits=() if verdict is Verdict.PASSED else culprits(clause, delivered, observations),
    )


def probability_kept(clause: Clause, found: Quantity) -> float:
    """That the true value keeps the limit, with a normal error in log."""
    margin = math.log(found.value / clause.limit) * (1 if clause.more_is_better else -1)
    if found.log_error == 0:
        return 1.0 if margin >= 0 else 0.0
    return NormalDist().cdf(margin / found.log_error)


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


def _wanted(profile: ProfileDocument, workloads: Sequence[str]) -> Iterator[Clause]:
    """What can be asked of this machine; limits follow."""
    yield from _kernels(profile)
    yield from _network(profile)
    if profile.max_world_size > 1:
        yield _clause(ClauseKind.SPREAD, "slowest rank over the median rank")
    for name in workloads:
        entry = profile.workload(name)
        if entry is None:
            known = ", ".join(e.workload.name for e in profile.workloads)
            raise UsageError(f"--workload: must be in the profile ({known}), got {name!r}")
        batches = sorted(int(point.at) for point in entry.phases[0].forward)
        for world_size in sorted({1, profile.max_world_size}):
            batch = batches[len(batches) // 2]
            yield _clause(
                ClauseKind.STEP,
                f"step of {name}, {world_size} x {batch}",
                workload=name,
                world_size=world_size,
                micro_batch=batch,
            )


def _kernels(profile: ProfileDocument) -> Iterator[Clause]:
    largest = {
        rate.dtype: rate.shape
        for rate in sorted(profile.rates, key=lambda rate: math.prod(rate.shape))
        if rate.probe == "matmul"
    }
    for dtype, shape in largest.items():
        size = "x".join(map(str, shape))
        yield _clause(ClauseKind.GEMM, f"matrix product {dtype} {size}", dtype=dtype, shape=shape)


def _network(profile: ProfileDocument) -> Iterator[Clause]:
    reduces = [entry for entry in profile.collectives if entry.collective == "all_reduce"]
    if not reduces:
        return
    widest = max(reduces, key=lambda entry: entry.world_size)
    for kind, size_bytes in (
        (ClauseKind.BUSBW, large_size(widest)),
        (ClauseKind.LATENCY, SMALL_BYTES),
    ):
        yield _clause(
            kind,
            f"all-reduce {kind} at {format_bytes(size_bytes)}, {widest.world_size} ranks",
            world_size=widest.world_size,
            size_bytes=size_bytes,
        )


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

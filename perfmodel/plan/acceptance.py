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
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

from perfmodel.documents import asked_by
from perfmodel.documents.acceptance import (
    AcceptanceDocument,
    AcceptanceTerms,
    Clause,
    ClauseKind,
    JudgedClause,
    Verdict,
)
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.plan.delivered import (
    Delivery,
    JobRun,
    Quantity,
    covers_all,
    quantity,
    suspects,
    unmeasured,
)
from perfmodel.plan.promises import CALIBRATE, Promise

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

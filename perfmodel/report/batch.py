"""The law of the batch, and clauses of an acceptance, as tables and sentences."""

from collections.abc import Callable, Iterator
from typing import Final

from perfmodel.documents.acceptance import (
    AcceptanceDocument,
    AcceptanceTerms,
    Clause,
    ClauseKind,
    Verdict,
)
from perfmodel.documents.budget import BatchDocument
from perfmodel.plan.acceptance import LARGE_BYTES, LOSS, power
from perfmodel.report import Table, caveat_lines, count_interval, number, one_line, percent, table
from perfmodel.units import format_bytes, format_duration, format_rate


def batch_table(document: BatchDocument) -> Table:
    """One row per batch size; readable on 80 columns."""
    return table(
        "Batch size and time to target",
        document.outlooks,
        {
            "Batch": "batch:g",
            "Samples\nto target": "samples:k",
            "Steps": lambda entry: count_interval(entry.steps).partition("\n")[0],
            "Samples/s": "samples_per_s:number",
            "Samples/s\nspeed-up": "throughput_speedup:number",
            "Target\nspeed-up": "target_speedup",
            "Time to\ntarget": "time_to_target_s",
        },
        caption=f"Speed-ups against batch {document.reference_batch:g}; [p5-p95].",
    )


def batch_lines(document: BatchDocument, *, verbose: bool = False) -> Iterator[str]:
    """The critical batch and what must be known before acting."""
    critical = one_line(count_interval(document.critical_batch))
    rates = ", ".join(
        f"{entry.batch:g} x{number(entry.learning_rate_factor)}"
        for entry in document.outlooks
        if entry.batch != document.reference_batch
    )
    yield f"Critical batch (twice the samples of a tiny one): {critical}"
    against = f"against batch {document.reference_batch:g}: {rates}"
    yield f"Learning rate of SGD {against} (Adam: the square roots)"
    yield from caveat_lines(document.caveats, verbose=verbose)


def terms_table(terms: AcceptanceTerms) -> Table:
    """The clauses, as they stand in the file."""
    count = len(terms.clause)
    whole = f"all {count} clauses" if count > 1 else "its clause"
    return table(
        f"Acceptance: like {terms.device_name}",
        terms.clause,
        {
            "<Clause": "name",
            "Reference": lambda clause: clause_value(clause, clause.reference),
            "Un-\ncertainty": "reference_error:%",
            "Limit": _limit,
            f"Finds a loss\nof {percent(LOSS)}": lambda clause: percent(
                power(clause, confidence=terms.each_confidence)
            ),
        },
        caption=f"A machine as good as the reference, measured as well, passes {whole} "
        f"with {percent(terms.confidence)} at least: false alarm at most {percent(1 - terms.confidence)}. "
        "Uncertainty: standard error.",
    )


def terms_lines(terms: AcceptanceTerms) -> Iterator[str]:
    """What the person who signs must know of the clauses: which are too weak, and what would make them strong."""
    each = terms.each_confidence
    for clause in terms.clause:
        if clause.remedy:
            found = f"{percent(LOSS)} with {percent(power(clause, confidence=each))}"
            yield f"too weak: {clause.name}: finds a loss of {found}; {clause.remedy}"
    sizes = [clause.size_bytes for clause in terms.clause if clause.kind is ClauseKind.BUSBW]
    largest = max((size for size in sizes if size is not None), default=LARGE_BYTES)
    has_job = any(clause.kind is ClauseKind.STEP for clause in terms.clause)
    if largest < LARGE_BYTES and not has_job:
        yield (
            f"caveat: no all-reduce of {format_bytes(LARGE_BYTES)} was measured: its bandwidth is "
            f"promised at {format_bytes(largest)}"
        )
    kinds = {clause.kind for clause in terms.clause}
    if ClauseKind.STEP in kinds:
        kinds.add(ClauseKind.GEMM)  # the step holds them
    if absent := [words for kind, words in _PROMISES.items() if kind not in kinds]:
        yield (
            f"caveat: nothing is promised about {', '.join(absent)}: the profile holds none; calibrate a "
            "reference"
        )


#: What a contract should speak of; a goodput is asked for apart.
_PROMISES: Final = {
    ClauseKind.GEMM: "matrix products",
    ClauseKind.BUSBW: "collectives",
    ClauseKind.SPREAD: "stragglers",
    ClauseKind.STEP: "steps",
}


def judgement_table(document: AcceptanceDocument) -> Table:
    """Every clause beside what was delivered."""
    return table(
        f"Acceptance of {document.delivered_name}",
        document.judged,
        {
            "<Clause": "clause.name",
            "Limit": lambda entry: _limit(entry.clause),
            "Delivered": lambda entry: (
                "-" if entry.delivered is None else clause_value(entry.clause, entry.delivered)
            ),
            "Uncertainty": lambda entry: (
                "-" if entry.delivered is None else percent(entry.delivered_error)
            ),
            "P(kept)": "probability_kept:%",
            "<Verdict": "verdict.value",
        },
        caption=f"Passed or failed: with {percent(document.terms.each_confidence)} confidence each, which makes "
        f"{percent(document.terms.confidence)} for all. Uncertainty: standard error of what was delivered.",
    )


def judgement_lines(document: AcceptanceDocument) -> Iterator[str]:
    """Who is to blame, and what to do where uncertainty is too large."""
    for entry in document.judged:
        yield from (f"{entry.clause.name}: {suspect}" for suspect in entry.suspects)
    if close := document.having(Verdict.CLOSE):
        was_calibrated = document.delivered_digest is not None
        longer = "calibrate with a larger --budget" if was_calibrated else "run it more often"
        yield f"too close to call: {', '.join(close)}; {longer}"
    if missing := document.having(Verdict.NOT_MEASURED):
        yield f"not measured, so not accepted: {', '.join(missing)}"
    weak = [
        entry.clause.name
        for entry in document.judged
        if entry.verdict is Verdict.PASSED and entry.clause.remedy
    ]
    if weak:
        yield (
            f"passed, but too weak to find a loss of {percent(LOSS)}: {', '.join(weak)}; the clauses say what "
            "makes them strong"
        )
    yield from (f"unmeasured: {sentence}" for sentence in document.unmeasured)


_UNITS: Final[dict[str, Callable[[float], str]]] = {
    "s": format_duration,
    "share": percent,
    "ratio": lambda value: f"{number(value)} x",
}


def clause_value(clause: Clause, value: float) -> str:
    """Text of a value in the unit of its clause."""
    show = _UNITS.get(clause.unit)
    return show(value) if show else format_rate(value, clause.unit.removesuffix("/s"))


def _limit(clause: Clause) -> str:
    rule = "at least" if clause.more_is_better else "at most"
    return f"{rule} {clause_value(clause, clause.limit)}"

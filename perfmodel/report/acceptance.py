"""Clauses and judgements as tables and sentences."""

from perfmodel.documents.acceptance import (
    AcceptanceDocument,
    AcceptanceTerms,
    Clause,
    ClauseKind,
    Verdict,
)
from perfmodel.plan.acceptance import LARGE_BYTES
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import number, percent
from perfmodel.units import format_bytes, format_duration, format_rate


def terms_grid(terms: AcceptanceTerms) -> Grid:
    """The clauses, as they stand in the file."""
    return grid(
        f"Acceptance: like {terms.device_name}",
        text=("Clause",),
        numbers=("Reference", "Doubt", "Limit"),
        rows=[
            (
                clause.name,
                clause_value(clause, clause.reference),
                percent(clause.reference_error),
                _limit(clause),
            )
            for clause in terms.clause
        ],
        caption=f"A machine as good as the reference, measured as well, passes each clause with "
        f"{percent(terms.confidence)} probability. Doubt: standard error.",
    )


def terms_lines(terms: AcceptanceTerms) -> list[str]:
    """What the person who signs must know of the clauses."""
    sizes = [clause.size_bytes for clause in terms.clause if clause.kind is ClauseKind.BUSBW]
    largest = max((size for size in sizes if size is not None), default=None)
    if largest is None or largest >= LARGE_BYTES:
        return []
    size = format_bytes(LARGE_BYTES)
    return [
        f"caveat: no all-reduce of {size} was measured: its bandwidth is promised at {format_bytes(largest)}"
    ]


def judgement_grid(document: AcceptanceDocument) -> Grid:
    """Every clause beside what was delivered."""
    return grid(
        f"Acceptance of {document.delivered_name}",
        text=("Clause",),
        numbers=("Limit", "Delivered", "Doubt", "P(kept)"),
        notes=("Verdict",),
        rows=[
            (
                entry.clause.name,
                _limit(entry.clause),
                "-" if entry.delivered is None else clause_value(entry.clause, entry.delivered),
                "-" if entry.delivered is None else percent(entry.delivered_error),
                "-" if entry.probability_kept is None else percent(entry.probability_kept),
                entry.verdict.value,
            )
            for entry in document.judged
        ],
        caption=f"Passed or failed: with {percent(document.terms.confidence)} confidence. Doubt: standard "
        "error of what was delivered.",
    )


def judgement_lines(document: AcceptanceDocument) -> list[str]:
    """Who is to blame, and what to do where doubt is too large."""
    lines = [
        f"{entry.clause.name}: {culprit}" for entry in document.judged for culprit in entry.culprits
    ]
    close = document.having(Verdict.CLOSE)
    if close:
        lines.append(f"too close to call: {', '.join(close)}; calibrate with a larger --budget")
    missing = document.having(Verdict.NOT_MEASURED)
    if missing:
        lines.append(f"not measured, so not accepted: {', '.join(missing)}")
    return lines + [f"unmeasured links: {sentence}" for sentence in document.unmeasured_links]


def clause_value(clause: Clause, value: float) -> str:
    """Text of a value in the unit of its clause."""
    match clause.unit:
        case "s":
            return format_duration(value)
        case "share":
            return percent(value)
        case "ratio":
            return f"{number(value)} x"
        case unit:
            return format_rate(value, unit.removesuffix("/s"))


def _limit(clause: Clause) -> str:
    rule = "at least" if clause.more_is_better else "at most"
    return f"{rule} {clause_value(clause, clause.limit)}"

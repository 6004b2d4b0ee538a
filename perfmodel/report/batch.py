"""The law of the batch as a table and sentences."""

from perfmodel.documents.acceptance import (
    AcceptanceDocument,
    AcceptanceTerms,
    Clause,
    ClauseKind,
    Verdict,
)
from perfmodel.documents.goodput import BatchDocument, BatchOutlook
from perfmodel.documents.verdicts import BatchValidationDocument, JudgedBatch
from perfmodel.plan.acceptance import LARGE_BYTES
from perfmodel.report.wording import (
    Grid,
    count_interval,
    duration_interval,
    errors,
    grid,
    interval,
    number,
    one_line,
    percent,
)
from perfmodel.units import format_bytes, format_duration, format_rate


def batch_grid(document: BatchDocument) -> Grid:
    """One row per batch size; readable on 80 columns."""
    return grid(
        "Batch size and time to target",
        numbers=(
            "Batch",
            "Samples\nto target",
            "Steps",
            "Samples/s",
            "Samples/s\nspeed-up",
            "Target\nspeed-up",
            "Time to\ntarget",
        ),
        rows=[_row(entry) for entry in document.outlooks],
        caption=f"Speed-ups against batch {document.reference_batch:g}; [p5-p95].",
    )


def batch_lines(document: BatchDocument) -> list[str]:
    """The critical batch and what must be known before acting."""
    return [
        (
            f"Critical batch (twice the samples of a tiny one): "
            f"{one_line(count_interval(document.critical_batch))}"
        ),
        *(
            [f"Gradient noise scale: {number(document.noise_scale)} samples"]
            if document.noise_scale
            else []
        ),
        f"Learning rate of SGD against batch {document.reference_batch:g}: "
        + ", ".join(
            f"{entry.batch:g} x{number(entry.learning_rate_factor)}"
            for entry in document.outlooks
            if entry.batch != document.reference_batch
        )
        + " (Adam: the square roots)",
        *(f"caveat: {caveat}" for caveat in document.caveats),
    ]


def _row(entry: BatchOutlook) -> tuple[str, ...]:
    return (
        f"{entry.batch:g}",
        count_interval(entry.samples),
        count_interval(entry.steps).partition("\n")[0],
        "-" if entry.samples_per_s is None else number(entry.samples_per_s),
        "-" if entry.throughput_speedup is None else number(entry.throughput_speedup),
        "-" if entry.target_speedup is None else interval(entry.target_speedup),
        "-" if entry.time_to_target_s is None else duration_interval(entry.time_to_target_s),
    )


def judged_grid(document: BatchValidationDocument) -> Grid:
    """One row per batch that was trained; readable on 80 columns."""
    return grid(
        f"{document.workload} to its target, predicted from batch {document.reference_batch}",
        numbers=(
            "Batch",
            "Learning\nrate",
            "Steps\nmeasured",
            "Of each\nstart",
            "Steps\npredicted",
        ),
        notes=("Error",),
        rows=[_judged(row, document.reference_batch) for row in document.batches],
        caption="Learning rate: the best that was tried. Measured: the median; a start that did not reach "
        "the target counts as longest. Error: predicted over measured minus 1.",
    )


def judged_lines(document: BatchValidationDocument) -> list[str]:
    """Errors of the law beside those of plain rules, and how often intervals held."""
    edges = [str(row.batch) for row in document.batches if row.is_rate_at_edge]
    lines = [
        (
            f"Noise scale as calibrated: {number(document.noise_scale)} samples; critical batch of the "
            f"measured steps: {one_line(count_interval(document.measured_critical_batch))}"
        ),
        f"Law of the noise scale: {errors(document.summary)}",
        *_from_own_reference(document),
        f"As many samples at any batch: {errors(document.same_samples)}",
        f"As many steps at any batch: {errors(document.same_steps)}",
        f"Coverage: {percent(document.coverage)} inside the 90 % interval",
    ]
    if edges:
        lines.append(f"caveat: the best rate was the highest or lowest tried at {', '.join(edges)}")
    if document.not_reached:
        lines.append(f"caveat: target not reached at {', '.join(map(str, document.not_reached))}")
    return lines


def _from_own_reference(document: BatchValidationDocument) -> list[str]:
    if document.from_own_reference is None:
        return []
    found = errors(document.from_own_reference)
    return [f"From the steps of this campaign at batch {document.reference_batch}: {found}"]


def _judged(row: JudgedBatch, reference: int) -> tuple[str, ...]:
    return (
        f"{row.batch}",
        f"{row.learning_rate:.3g}",
        number(row.measured_steps),
        " ".join(map(str, row.steps)),
        count_interval(row.predicted_steps),
        "reference" if row.batch == reference else percent(row.signed_error, signed=True),
    )


def terms_grid(terms: AcceptanceTerms) -> Grid:
    """The clauses, as they stand in the file."""
    return grid(
        f"Acceptance: like {terms.device_name}",
        text=("Clause",),
        numbers=("Reference", "Uncertainty", "Limit"),
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
        f"{percent(terms.confidence)} probability. Uncertainty: standard error.",
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
        numbers=("Limit", "Delivered", "Uncertainty", "P(kept)"),
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
        caption=f"Passed or failed: with {percent(document.terms.confidence)} confidence. Uncertainty: standard "
        "error of what was delivered.",
    )


def judgement_lines(document: AcceptanceDocument) -> list[str]:
    """Who is to blame, and what to do where uncertainty is too large."""
    lines = [
        f"{entry.clause.name}: {suspect}" for entry in document.judged for suspect in entry.suspects
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

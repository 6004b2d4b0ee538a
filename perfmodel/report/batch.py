"""The law of the batch as a table and sentences."""

from perfmodel.documents.batch import BatchDocument, BatchOutlook
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import count_interval, duration_interval, interval, number, one_line


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

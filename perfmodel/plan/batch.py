"""Use case: runs of some batch sizes to a target -> what other batch sizes would take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perfmodel.checks import positive
from perfmodel.convergence import (
    FEWEST_STEPS,
    BatchPoint,
    Convergence,
    CriticalBatch,
    GradientNorms,
    fit_convergence,
)
from perfmodel.documents import command_line
from perfmodel.documents.budget import BatchDocument, BatchOutlook
from perfmodel.errors import InvalidDocument, reading
from perfmodel.files import read_table
from perfmodel.units import decimal, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked about a task."""

    points: Sequence[BatchPoint]
    """Samples to the target of at least two batches, with a critical batch of one."""
    critical: CriticalBatch | None = None
    """What a gradient noise scale says of it."""
    source: str = ""
    """Where that, and what was not typed, comes from."""
    batches: Sequence[float] = ()
    """Further batches to look at; those that were run are always shown."""
    samples_per_s: Mapping[float, float] = field(default_factory=dict)
    """Batch to samples per second, measured or predicted."""

    def __post_init__(self) -> None:
        for batch in self.batches:
            positive("batch", batch)
        for batch, rate in self.samples_per_s.items():
            positive("batch", batch)
            positive(f"samples_per_s of batch {batch:g}", rate)


def batch_outlook(request: Request, *, argv: Sequence[str]) -> BatchDocument:
    """Fit the law of the batch and apply it.

    Ratios are against the smallest batch that was run. Raises ``ValueError`` with fewer than two points.
    """
    run = {point.batch: point.samples for point in request.points}
    law = fit_convergence(request.points, critical=request.critical)
    batches = sorted({*run, *request.batches, *request.samples_per_s})
    outlooks = tuple(_outlook(law, batch, request, run) for batch in batches)
    return BatchDocument(
        command_line=command_line(argv),
        points=run,
        reference_batch=min(run),
        noise_scale=None if request.critical is None else request.critical.batch,
        critical_batch=law.critical_batch,
        outlooks=outlooks,
        caveats=tuple(_caveats(outlooks, request, largest=max(run))),
    )


def _outlook(
    law: Convergence, batch: float, request: Request, run: Mapping[float, float]
) -> BatchOutlook:
    reference = min(run)
    samples = law.samples(batch)
    ratio = law.samples_ratio(batch, reference=reference)
    rate = request.samples_per_s.get(batch)
    reference_rate = request.samples_per_s.get(reference)
    faster = rate / reference_rate if rate and reference_rate else None
    return BatchOutlook(
        batch=batch,
        samples=samples,
        steps=samples / batch,
        samples_ratio=ratio,
        samples_per_s=rate,
        throughput_speedup=faster,
        target_speedup=None if faster is None else faster / ratio,
        learning_rate_factor=_learning_rate(law, batch) / _learning_rate(law, reference),
        time_to_target_s=None if rate is None else samples / rate,
        is_beyond_critical=batch > law.critical_batch.nominal,
        is_extrapolated=batch > max(run),
    )


def _learning_rate(law: Convergence, batch: float) -> float:
    """Best rate of SGD over that of an endless batch [McCandlish et al., arXiv 1812.06162, section 2.2]."""
    return 1 / (1 + law.critical_batch.nominal / batch)


def _caveats(outlooks: Sequence[BatchOutlook], request: Request, *, largest: float) -> list[str]:
    caveats = [request.source] if request.source else []
    beyond = [f"{entry.batch:g}" for entry in outlooks if entry.is_beyond_critical]
    if beyond:
        caveats.append(f"beyond the critical batch, devices add little: {', '.join(beyond)}")
    if len(request.points) == 2 and request.critical is None:
        caveats.append("two batches cannot tell the law; the answer is mostly the prior's")
    unseen = [f"{entry.batch:g}" for entry in outlooks if entry.is_extrapolated]
    if unseen:
        caveats.append(f"beyond the largest batch that was run ({largest:g}): {', '.join(unseen)}")
    caveats.append(
        "every batch is assumed to be tuned: learning rate scaled (nearly linearly for SGD below the "
        "critical batch, by the square root of that for Adam) and warmed up"
    )
    return caveats


COLUMNS: Final = ("ranks", "local_batch", "mean_square", "square_of_mean")


def read_gradient_norms(path: Path) -> list[GradientNorms]:
    """Steps in the order of the file; further columns are left alone."""
    with reading(path, "gradient norms"):
        rows = read_table(path, columns=COLUMNS)
    steps = [_step(row, f"{path}: line {line}") for line, row in rows]
    if len(steps) < FEWEST_STEPS:
        raise InvalidDocument(
            f"{path}: must hold at least {FEWEST_STEPS} steps, got {len(steps)}; record more"
        )
    kinds = {(step.ranks, step.local_batch) for step in steps}
    if len(kinds) > 1:
        raise InvalidDocument(
            f"{path}: ranks and local_batch must stay the same, got {len(kinds)} pairs of them; "
            "give each part of the training a file of its own"
        )
    return steps


def _step(row: Mapping[str, str], where: str) -> GradientNorms:
    try:
        return GradientNorms(
            ranks=whole(row["ranks"]),
            local_batch=whole(row["local_batch"]),
            mean_square=decimal(row["mean_square"]),
            square_of_mean=decimal(row["square_of_mean"]),
        )
    except ValueError as error:
        raise InvalidDocument(f"{where}: {error}") from error

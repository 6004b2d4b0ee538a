"""Use case: runs of some batch sizes to a target -> what other batch sizes would take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfmodel.checks import positive
from perfmodel.convergence import BatchPoint, Convergence, fit_convergence
from perfmodel.documents import command_line
from perfmodel.documents.budget import BatchDocument, BatchOutlook


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked about a task."""

    points: Sequence[BatchPoint]
    """Samples to the target of at least two batches."""
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
    law = fit_convergence(request.points)
    batches = sorted({*run, *request.batches, *request.samples_per_s})
    outlooks = tuple(_outlook(law, batch, request, run) for batch in batches)
    return BatchDocument(
        command_line=command_line(argv),
        points=run,
        reference_batch=min(run),
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
    caveats = []
    beyond = [f"{entry.batch:g}" for entry in outlooks if entry.is_beyond_critical]
    if beyond:
        caveats.append(f"beyond the critical batch, devices add little: {', '.join(beyond)}")
    if len(request.points) == 2:
        caveats.append("two batches cannot tell the law; the answer is mostly the prior's")
    unseen = [f"{entry.batch:g}" for entry in outlooks if entry.is_extrapolated]
    if unseen:
        caveats.append(f"beyond the largest batch that was run ({largest:g}): {', '.join(unseen)}")
    caveats.append(
        "every batch is assumed to be tuned: learning rate scaled (nearly linearly for SGD below the "
        "critical batch, by the square root of that for Adam) and warmed up"
    )
    return caveats

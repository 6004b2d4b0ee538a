"""Use case: runs of some batch sizes to a target -> what other batch sizes would take."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from perfmodel.checks import positive
from perfmodel.convergence import BatchPoint, Convergence, fit_convergence
from perfmodel.documents import asked_by
from perfmodel.documents.budget import BatchDocument, BatchOutlook


def batch_outlook(
    points: Sequence[BatchPoint],
    *,
    batches: Sequence[float] = (),
    samples_per_s: Mapping[float, float] = MappingProxyType({}),
) -> BatchDocument:
    """Fit the law of the batch and apply it; ratios are against the smallest batch that was run.

    ``points``: Samples to the target of at least two batches; ``ValueError`` with fewer.
    ``batches``: Further ones to look at; those that were run are always shown.
    ``samples_per_s``: By batch, measured or predicted.
    """
    for batch in batches:
        positive("batch", batch)
    for batch, rate in samples_per_s.items():
        positive("batch", batch)
        positive(f"samples_per_s of batch {batch:g}", rate)
    run = {point.batch: point.samples for point in points}
    law = fit_convergence(points)
    outlooks = tuple(
        _outlook(law, batch, samples_per_s, run)
        for batch in sorted({*run, *batches, *samples_per_s})
    )
    return BatchDocument(
        command_line=asked_by(),
        points=run,
        reference_batch=min(run),
        critical_batch=law.critical_batch,
        outlooks=outlooks,
        caveats=tuple(_caveats(outlooks, run)),
    )


def _outlook(
    law: Convergence, batch: float, rates: Mapping[float, float], run: Mapping[float, float]
) -> BatchOutlook:
    reference = min(run)
    samples = law.samples(batch)
    ratio = law.samples_ratio(batch, reference=reference)
    rate = rates.get(batch)
    reference_rate = rates.get(reference)
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


def _caveats(outlooks: Sequence[BatchOutlook], run: Mapping[float, float]) -> Iterator[str]:
    beyond = [f"{entry.batch:g}" for entry in outlooks if entry.is_beyond_critical]
    if beyond:
        yield f"beyond the critical batch, devices add little: {', '.join(beyond)}"
    if len(run) == 2:
        yield "two batches cannot tell the law; the answer is mostly the prior's"
    unseen = [f"{entry.batch:g}" for entry in outlooks if entry.is_extrapolated]
    if unseen:
        yield f"beyond the largest batch that was run ({max(run):g}): {', '.join(unseen)}"
    yield (
        "every batch is assumed to be tuned: learning rate scaled (nearly linearly for SGD below the "
        "critical batch, by the square root of that for Adam) and warmed up"
    )

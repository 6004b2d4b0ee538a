"""Published throughput of any source: calibrate on the fewest devices, predict more.

Steps take ``1 / throughput`` per sample and device, so that weak scaling reads as a step that grows with
the devices. One and two devices predict the others, or one alone; of sources that begin with more the
two smallest counts predict the others, or the smallest one alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.statistics.normal import DEVIATE_90
from validate.published.errors import compare_predictors
from validate.published.series import Series, read_series

SOURCE: Final = "scaling"
Growth: TypeAlias = tuple[FloatArray, FloatArray, FloatArray]
"""Step over that of the fewest devices: 5 %, most probable, 95 %."""

NOISE: Final = 0.02
"""Scatter of one published number; a loss below it is not told from none."""
_LOSS_PRIOR: Final = (float(np.log(0.04)), 0.7)
"""What two devices lose, log median and spread, unless enough series tell."""
_OTHER_SYSTEM: Final = 1.0
"""More spread of that loss, log, for a series of which two devices were never measured."""
_GROWTH: Final = 0.45
"""Uncertainty of the exponent with which the loss grows with the devices of a node: a host that serves its
devices in turn, instead of a ring whose work per device hardly grows, is at the end of the interval."""
_PER_DOUBLING: Final = 0.01
"""Loss per doubling of the nodes, unless enough series tell."""
_BETWEEN_NODES: Final = 0.05
"""Its uncertainty: nothing measured inside a node tells of the network between them."""
_LEAST_UNCERTAINTY: Final = 0.005
_FEWEST: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What is fitted of a series."""

    name: str
    fitted: str
    known: int
    """Smallest counts of the devices that are fitted."""


_BOTH: Final = Split(name="1 and 2 devices", fitted="1 and 2 devices", known=2)
_ALONE: Final = Split(name="one device alone", fitted="1 device", known=1)
TWO_COUNTS: Final = Split(name="two smallest counts", fitted="the two smallest counts", known=2)
ONE_COUNT: Final = Split(name="smallest count alone", fitted="the smallest count", known=1)


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Verdict per source and kind of calibration."""
    groups, skipped = read_series(folder)
    everything = loss_prior([one for found in groups.values() for one in found], _LOSS_PRIOR)
    verdicts = []
    for source, series in groups.items():
        prior = loss_prior(series, everything)
        slope = slope_prior([one for one in series if _protocol(one) is TWO_COUNTS])
        laws: dict[Split, Callable[[Series], Growth]] = {
            _BOTH: partial(predict_growth, prior=prior),
            _ALONE: partial(predict_growth, prior=prior),
            TWO_COUNTS: partial(predict_from_several, prior=prior, slope=slope),
            ONE_COUNT: partial(predict_from_several, prior=prior, slope=slope),
        }
        for protocol, law in laws.items():
            chosen = [one for one in series if _protocol(one) is protocol]
            if chosen:
                verdicts.append(judge_series(SOURCE, source, protocol, chosen, law))
    if not groups:
        skipped.append("scaling: no series with few devices and more")
    return verdicts, skipped


def _protocol(one: Series) -> Split:
    if one.gpus[0] == 1.0:
        return _BOTH if 2.0 in one.gpus else _ALONE
    return TWO_COUNTS if len(one.gpus) > 2 else ONE_COUNT


def judge_series(
    source: str,
    name: str,
    protocol: Split,
    series: Sequence[Series],
    law: Callable[[Series], Growth],
) -> PublishedSeries:
    """Verdict on series of one kind, beside linear scaling and contention alone."""
    measured, ours, linear, usl, covered = [], [], [], [], []
    for one in series:
        low, middle, high = law(one)
        base = one.step[0]
        later = slice(protocol.known, None)
        measured.append(one.step[later])
        ours.append(base * middle[later])
        linear.append(np.full(len(one.step[later]), base))
        usl.append(base * _usl_growth(one, protocol.known)[later])
        covered.append((base * low <= one.step)[later] & (one.step <= base * high)[later])
    return PublishedSeries(
        source=source,
        name=f"{name}, {protocol.name}{_worst(series, measured, ours)}",
        fitted=protocol.fitted,
        predicted="all larger counts",
        num_fitted=len(series),
        num_predicted=sum(len(one) for one in measured),
        errors=compare_predictors(
            np.concatenate(measured),
            {
                "perfmodel": np.concatenate(ours),
                "linear scaling": np.concatenate(linear),
                "USL": np.concatenate(usl),
            },
            covered=np.concatenate(covered).astype(float),
        ),
    )


def _worst(
    series: Sequence[Series], measured: Sequence[FloatArray], predicted: Sequence[FloatArray]
) -> str:
    """Which series misses by most, and how far off the others are without it."""
    if len(series) < 3:
        return ""
    errors = [np.abs(ours / theirs - 1) for ours, theirs in zip(predicted, measured, strict=True)]
    worst = int(np.argmax([each.mean() for each in errors]))
    others = np.concatenate([each for index, each in enumerate(errors) if index != worst])
    return (
        f"; worst {series[worst].name} {errors[worst].mean():.1%}, all others {others.mean():.1%}"
    )


def loss_prior(
    series: Sequence[Series], otherwise: tuple[float, float] = _LOSS_PRIOR
) -> tuple[float, float]:
    """Log median and spread of what two devices lose, over all series that measured it, if enough did."""
    measured = [one for one in series if {1.0, 2.0} <= set(one.gpus)]
    logs = [np.log(max(_seen(one), NOISE / 2)) for one in measured]
    if len(logs) < _FEWEST:
        return otherwise
    return float(np.median(logs)), max(_spread(logs), 0.3)


def slope_prior(series: Sequence[Series]) -> tuple[float, float]:
    """Median and spread of what a doubling of the nodes costs between the two smallest counts."""
    slopes = [
        float(one.step[1] / one.step[0] - 1) / float(doublings)
        for one in series
        for doublings in np.diff(_doublings(one)[:2])
        if doublings > 0
    ]
    if len(slopes) < _FEWEST:
        return _PER_DOUBLING, _BETWEEN_NODES
    return float(np.median(slopes)), max(_spread(slopes), _LEAST_UNCERTAINTY)


def predict_growth(series: Series, prior: tuple[float, float] = _LOSS_PRIOR) -> Growth:
    """Growth from one device, or from one and two.

    A ring's work per device grows as (n-1)/n, so what two devices lose is half of what many lose. The
    loss seen at two devices is drawn to that of all series by the scatter of one published number.
    """
    n = series.gpus
    log_median, spread = prior
    lost = float(np.exp(log_median))
    if 2.0 in n:
        uncertainty = spread * lost
        trust = uncertainty**2 / (uncertainty**2 + NOISE**2)
        lost = max(trust * _seen(series) + (1 - trust) * lost, 0.0)
        wide = np.sqrt(trust) * NOISE / max(lost, NOISE)
    else:
        wide = float(np.hypot(spread, _OTHER_SYSTEM))
    inside = np.minimum(n, series.per_node)
    beyond = _doublings(series)
    ring = 2 * (n - 1) / n
    excess = lost * ring + _PER_DOUBLING * beyond
    # What two devices seem to lose nothing of may still be as much as the scatter hides.
    hidden = max(NOISE - lost, 0.0) * ring
    log_width = DEVIATE_90 * np.hypot(wide, _GROWTH * np.log(np.maximum(inside - 1, 1)))
    more = DEVIATE_90 * np.hypot(NOISE, _BETWEEN_NODES * beyond)
    low = 1 + excess * np.exp(-log_width) - more
    return low, 1 + excess, 1 + (excess + hidden) * np.exp(log_width) + more


def predict_from_several(
    series: Series, prior: tuple[float, float], slope: tuple[float, float]
) -> Growth:
    """Growth from several devices, or from the two smallest counts of them.

    The second count moves what a ring inside the node loses and what a doubling of the nodes costs, as
    far as their priors allow.
    """
    lost = float(np.exp(prior[0]))
    is_seen = len(series.gpus) > 2
    spread = prior[1] if is_seen else float(np.hypot(prior[1], _OTHER_SYSTEM))
    mean, uncertainty = (
        np.array([lost, slope[0], 0.0]),
        np.diag([spread * lost, slope[1], 0.0]) ** 2,
    )
    return grow_linearly(series, *conditioned(series, mean, uncertainty))


def growth_terms(series: Series) -> FloatArray:
    """What the growth of a step per sample is linear in; shape ``(num_counts, 3)``, 0 at the fewest devices.

    A ring inside the node, doublings of the nodes, and what a step costs however small its batch, which a
    smaller batch per device pays more often per sample.
    """
    ring = 2 * (1 - 1 / np.minimum(series.gpus, series.per_node))
    steps = np.ones_like(ring) if series.batch is None else series.batch[0] / series.batch
    terms = np.stack([ring, _doublings(series), steps], axis=1)
    return np.asarray(terms - terms[0])


def conditioned(
    series: Series, mean: FloatArray, uncertainty: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Coefficients of ``growth_terms`` and their covariance, told by the second count of a longer series.

    It moves them as far as the scatter of published numbers allows (Gaussian conditioning).
    """
    if len(series.gpus) <= TWO_COUNTS.known:
        return mean, uncertainty
    seen = growth_terms(series)[1]
    gain = uncertainty @ seen / (seen @ uncertainty @ seen + NOISE**2)
    surprise = float(series.step[1] / series.step[0] - 1 - seen @ mean)
    return mean + gain * surprise, uncertainty - np.outer(gain, seen @ uncertainty)


def grow_linearly(series: Series, mean: FloatArray, uncertainty: FloatArray) -> Growth:
    """Growth with coefficients of ``growth_terms`` in units of the first step, and their covariance."""
    terms = growth_terms(series)
    variance = np.einsum("ij,jk,ik->i", terms, uncertainty, terms) + NOISE**2
    middle, half = 1 + terms @ mean, DEVIATE_90 * np.sqrt(variance)
    return middle - half, middle, middle + half


def _doublings(series: Series) -> FloatArray:
    """Doublings of the nodes."""
    return np.asarray(np.log2(np.maximum(series.gpus / series.per_node, 1)))


def _spread(values: Sequence[float]) -> float:
    """Standard deviation of a normal distribution with these quartiles."""
    return float(np.quantile(values, 0.75) - np.quantile(values, 0.25)) / 1.35


def _seen(series: Series) -> float:
    """Loss of two devices over one, fraction of the step."""
    return float(series.step[series.gpus == 2.0][0] / series.step[0]) - 1


def _usl_growth(one: Series, known: int) -> FloatArray:
    """Contention alone: one point does not decide coherency as well."""
    times = one.gpus / one.gpus[0]
    lost = float(one.step[1] / one.step[0] - 1) / float(times[1] - 1) if known > 1 else 0.0
    return np.asarray(1 + max(lost, 0.0) * (times - 1))

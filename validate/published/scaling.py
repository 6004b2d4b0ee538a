"""Published throughput of small models: calibrate on one and two devices, predict more.

A series is everything that the source kept constant; steps take ``1 / throughput`` per sample and
device, so that weak scaling reads as a step that grows with the devices.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.documents.published import PublishedSeries
from perfmodel.statistics.normal import DEVIATE_90
from validate.published.errors import compare_predictors
from validate.published.rows import number, read_rows

FloatArray = NDArray[np.float64]
SOURCES: Final = ("tensorflow/tensorflow", "apache/mxnet", "NVIDIA/DeepLearningExamples")
_CONVOLUTIONAL: Final = ("Classification", "Detection", "Segmentation")
_CONSTANT: Final = (
    *("path", "table", "hardware", "gpu", "framework", "model", "precision"),
    *("micro_batch", "seq_len", "scaling_kind", "throughput_unit"),
)
_NOISE: Final = 0.02
"""Scatter of one published number; a loss below it is not told from none."""
_LOSS_PRIOR: Final = (float(np.log(0.04)), 0.7)
"""What two devices lose, log median and spread, unless enough series tell."""
_OTHER_SYSTEM: Final = 1.0
"""More spread of that loss, log, for a series of which two devices were never measured."""
_GROWTH: Final = 0.45
"""Doubt of the exponent with which the loss grows with the devices of a node: a host that serves its
devices in turn, instead of a ring whose work per device hardly grows, is at the end of the interval."""
_BETWEEN_NODES: Final = 0.05
"""Doubt per doubling of the nodes: nothing measured inside a node tells of the network between them."""
_FEWEST: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    gpus: FloatArray
    per_node: float
    step: FloatArray
    """Device-seconds per sample, any constant unit."""


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Verdict per source: one and two devices predict the others; so does one device alone."""
    groups = _read(folder)
    prior = loss_prior([one for found in groups.values() for one in found])
    verdicts, skipped = [], []
    for source in SOURCES:
        series = [one for name, found in groups.items() if source in name for one in found]
        if not series:
            skipped.append(f"scaling: {source} has no series with one device and more")
            continue
        both = [one for one in series if 2.0 in one.gpus]
        alone = [one for one in series if 2.0 not in one.gpus]
        verdicts += [_judge(source, chosen, prior) for chosen in (both, alone) if chosen]
    return verdicts, skipped


def _read(folder: Path) -> dict[str, list[_Series]]:
    rows = read_rows(folder / "throughput.csv", columns=("source", "gpus", *_CONSTANT))
    series: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    nodes: dict[tuple[str, ...], float] = {}
    for row in rows:
        if not any(source in row["source"] for source in SOURCES) or row["kind"] != "measured":
            continue
        gpus, total = number(row, "gpus"), number(row, "throughput")
        if gpus is None or total is None:
            continue
        if "DeepLearning" in row["source"] and not row["model"].startswith(_CONVOLUTIONAL):
            continue
        key = (row["source"], *(row[name] for name in _CONSTANT))
        series[key][gpus].append(gpus / total)
        nodes[key] = max(nodes.get(key, 1.0), number(row, "gpus_per_node") or gpus)
    found: dict[str, list[_Series]] = defaultdict(list)
    for key, steps in series.items():
        if 1.0 in steps and len(steps) > 1 and max(steps) > 2:
            gpus_sorted = np.array(sorted(steps))
            found[key[0]].append(
                _Series(
                    gpus=gpus_sorted,
                    per_node=nodes[key],
                    step=np.array([float(np.median(steps[g])) for g in gpus_sorted]),
                )
            )
    return found


def _judge(source: str, series: list[_Series], prior: tuple[float, float]) -> PublishedSeries:
    measured, ours, linear, law, covered = [], [], [], [], []
    for one in series:
        later = one.gpus > 2
        low, middle, high = predict_growth(one, prior)
        base = one.step[0]
        measured.append(one.step[later])
        ours.append(base * middle[later])
        linear.append(np.full(int(later.sum()), base))
        law.append(base * _usl_growth(one)[later])
        covered.append((base * low <= one.step)[later] & (one.step <= base * high)[later])
    both = 2.0 in series[0].gpus
    return PublishedSeries(
        source="scaling",
        name=f"{source}, {'1 and 2 devices' if both else 'one device alone'}",
        fitted="1 and 2 devices" if both else "1 device",
        predicted="all larger counts",
        num_fitted=len(series),
        num_predicted=sum(len(one) for one in measured),
        errors=compare_predictors(
            np.concatenate(measured),
            {
                "perfmodel": np.concatenate(ours),
                "linear scaling": np.concatenate(linear),
                "USL": np.concatenate(law),
            },
            covered=np.concatenate(covered).astype(float),
        ),
    )


def loss_prior(series: list[_Series]) -> tuple[float, float]:
    """Log median and spread of what two devices lose, over all series that measured it."""
    logs = [np.log(max(_seen(one), _NOISE / 2)) for one in series if 2.0 in one.gpus]
    if len(logs) < _FEWEST:
        return _LOSS_PRIOR
    spread = float(np.quantile(logs, 0.75) - np.quantile(logs, 0.25)) / 1.35
    return float(np.median(logs)), max(spread, 0.3)


def predict_growth(
    series: _Series, prior: tuple[float, float] = _LOSS_PRIOR
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Step over that of one device: 5 %, most probable, 95 %.

    A ring's work per device grows as (n-1)/n, so what two devices lose is half of what many lose. The
    loss seen at two devices is drawn to that of all series by the scatter of one published number.
    """
    n = series.gpus
    log_median, spread = prior
    lost = float(np.exp(log_median))
    if 2.0 in n:
        doubt = spread * lost
        trust = doubt**2 / (doubt**2 + _NOISE**2)
        lost = max(trust * _seen(series) + (1 - trust) * lost, 0.0)
        wide = np.sqrt(trust) * _NOISE / max(lost, _NOISE)
    else:
        wide = float(np.hypot(spread, _OTHER_SYSTEM))
    inside = np.minimum(n, series.per_node)
    beyond = np.log2(np.maximum(n / series.per_node, 1))
    excess = lost * 2 * (n - 1) / n + 0.01 * beyond
    log_width = DEVIATE_90 * np.hypot(wide, _GROWTH * np.log(np.maximum(inside - 1, 1)))
    more = DEVIATE_90 * np.hypot(_NOISE, _BETWEEN_NODES * beyond)
    low = 1 + excess * np.exp(-log_width) - more
    return low, 1 + excess, 1 + excess * np.exp(log_width) + more


def _seen(series: _Series) -> float:
    """Loss of two devices over one, fraction of the step."""
    return float(series.step[series.gpus == 2.0][0] / series.step[0]) - 1


def _usl_growth(series: _Series) -> FloatArray:
    """Contention alone: one point does not decide coherency as well."""
    known = series.gpus == 2
    lost = float(series.step[known][0] / series.step[0]) - 1 if known.any() else 0.0
    return np.asarray(1 + max(lost, 0.0) * (series.gpus - 1))

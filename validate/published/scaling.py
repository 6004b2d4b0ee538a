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
from validate.published.errors import compare_predictors
from validate.published.rows import number, read_rows

FloatArray = NDArray[np.float64]
SOURCES: Final = ("tensorflow/tensorflow", "apache/mxnet", "NVIDIA/DeepLearningExamples", "d2l-ai")
_CONVOLUTIONAL: Final = ("Classification", "Detection", "Segmentation")
_CONSTANT: Final = (
    *("path", "table", "hardware", "gpu", "framework", "model", "precision"),
    *("micro_batch", "seq_len", "scaling_kind", "throughput_unit"),
)
_PER_DOUBLING: Final = 0.02
"""Prior loss of the step per doubling of devices in a node, and its doubt."""
_SPREAD_FLOOR: Final = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    gpus: FloatArray
    per_node: float
    step: FloatArray
    """Device-seconds per sample, any constant unit."""


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Verdict per source: one and two devices predict the others."""
    groups = _read(folder)
    verdicts, skipped = [], []
    for source in SOURCES:
        series = [one for name, found in groups.items() if source in name for one in found]
        if not series:
            skipped.append(f"scaling: {source} has no series with one device and more")
            continue
        verdicts.append(_judge(source, series))
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


def _judge(source: str, series: list[_Series]) -> PublishedSeries:
    measured, ours, linear, law, covered = [], [], [], [], []
    for one in series:
        later = one.gpus > 2
        low, middle, high = predict_growth(one)
        base = one.step[0]
        measured.append(one.step[later])
        ours.append(base * middle[later])
        linear.append(np.full(int(later.sum()), base))
        law.append(base * _usl_growth(one)[later])
        covered.append((base * low <= one.step)[later] & (one.step <= base * high)[later])
    return PublishedSeries(
        source="scaling",
        name=source,
        fitted="1 and, where there is one, 2 devices",
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


def predict_growth(series: _Series) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Step over that of one device: 5 %, most probable, 95 %.

    A ring's work per device grows as (n-1)/n, so what two devices lose is half of what many lose; the
    exposed share at two devices is drawn to a prior of 2 % by the scatter of one published number.
    """
    n = series.gpus
    prior, doubt = _PER_DOUBLING, 0.02
    lost, trust = prior, 0.0
    if 2.0 in n:
        seen = float(series.step[n == 2.0][0] / series.step[0]) - 1
        trust = doubt**2 / (doubt**2 + (0.6 * doubt) ** 2)
        lost = max(trust * seen + (1 - trust) * prior, 0.0)
    ring = 2 * (n - 1) / n
    beyond = np.log2(np.maximum(n / series.per_node, 1))
    middle = 1 + lost * ring + 0.01 * beyond
    spread = _SPREAD_FLOOR + lost * 0.7 * ring + 0.015 * np.log2(n) * (1 - 0.5 * trust)
    # Nothing measured inside a node tells of the network between nodes.
    spread = spread + 0.05 * beyond
    return middle * (1 - spread), middle, middle * (1 + 1.6 * spread)


def _usl_growth(series: _Series) -> FloatArray:
    """Contention alone: one point does not decide coherency as well."""
    known = series.gpus == 2
    lost = float(series.step[known][0] / series.step[0]) - 1 if known.any() else 0.0
    return np.asarray(1 + max(lost, 0.0) * (series.gpus - 1))

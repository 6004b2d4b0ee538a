"""Published steps by placement: calibrate on one and two nodes, predict more."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from perfmodel.arrays import BoolArray, FloatArray
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.engine.stragglers import expected_largest_deviate
from validate.published.baselines import adaptdl, linear_scaling, usl
from validate.published.errors import compare_predictors
from validate.published.rows import number, read_rows

SOURCE: Final = "steptime_placements"
_COLUMNS: Final = (
    *("cluster", "gpu", "app", "placement", "nodes", "gpus", "local_batch", "step_time_s"),
)
_CALIBRATED_NODES: Final = 2
_FEWEST: Final = 12
#: Traffic between two nodes grows with the devices of both; over more nodes that growth is shared.
_KEPT_GROWTH: Final = 0.5
_PER_DOUBLING: Final = 0.5
"""Growth of the uncertainty per doubling of the nodes."""
_UNSEEN_NETWORK: Final = 0.08
"""Uncertainty of a network between more nodes than were measured, log, per doubling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Arrays of one shape."""

    batch: FloatArray
    nodes: FloatArray
    gpus: FloatArray
    densest: FloatArray
    """Devices of the fullest node."""
    step_s: FloatArray

    def where(self, mask: BoolArray) -> "Steps":
        """Some of the steps."""
        return Steps(
            batch=self.batch[mask],
            nodes=self.nodes[mask],
            gpus=self.gpus[mask],
            densest=self.densest[mask],
            step_s=self.step_s[mask],
        )


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Verdict on every model on every cluster, and what holds too little."""
    series, skipped = [], []
    for name, steps in _read(folder).items():
        known = steps.where(steps.nodes <= _CALIBRATED_NODES)
        unknown = steps.where(steps.nodes > _CALIBRATED_NODES)
        if min(len(known.batch), len(unknown.batch)) < _FEWEST:
            skipped.append(name)
        else:
            series.append(_judge_one(name, known, unknown))
    return series, skipped


def _read(folder: Path) -> dict[str, Steps]:
    groups: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for row in read_rows(folder / "steptime_placements.csv", columns=_COLUMNS):
        values = [number(row, n) for n in ("local_batch", "nodes", "gpus", "step_time_s")]
        batch, nodes, gpus, step_s = values
        if batch and nodes and gpus and step_s:
            digits = [int(digit) for digit in row["placement"] if digit.isdecimal()]
            densest = max(digits, default=int(-(-gpus // nodes)))
            name = f"{row['app']} on {row['gpu']} ({row['cluster']})"
            groups[name].append((batch, nodes, gpus, densest, step_s))
    tables = {name: np.array(rows).T for name, rows in groups.items()}
    return {
        name: Steps(batch=t[0], nodes=t[1], gpus=t[2], densest=t[3], step_s=t[4])
        for name, t in tables.items()
    }


def _judge_one(name: str, known: Steps, unknown: Steps) -> PublishedSeries:
    ours, low, high = predict_steps(known, unknown)
    plain = (known.batch, known.gpus, known.step_s)
    predicted = {
        "perfmodel": ours,
        "linear scaling": linear_scaling(*plain, unknown.batch),
        "USL": usl(*plain, (unknown.batch, unknown.gpus)),
        "AdaptDL": adaptdl(
            (known.batch, known.nodes, known.gpus),
            known.step_s,
            (unknown.batch, unknown.nodes, unknown.gpus),
        ),
    }
    return PublishedSeries(
        source=SOURCE,
        name=name,
        fitted="1 and 2 nodes",
        predicted=f"3 to {int(unknown.nodes.max())} nodes",
        num_fitted=len(known.batch),
        num_predicted=len(unknown.batch),
        errors=compare_predictors(
            unknown.step_s,
            predicted,
            covered=((low <= unknown.step_s) & (unknown.step_s <= high)).astype(float),
        ),
    )


def predict_steps(known: Steps, unknown: Steps) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Most probable steps, and the ends of their 90 % intervals. [s]

    A device computes for a time of its own at every batch; the devices of a node share a host that
    prepares samples and moves gradients; all wait for the slowest of them, as its pace varies; nodes
    exchange gradients beside the compute.
    """
    batches = np.unique(known.batch)
    found = _fit(known, batches)
    logs = _log_step(found, unknown, batches)
    inside = np.abs(_log_step(found, known, batches) - np.log(known.step_s))
    spread = max(float(np.quantile(inside, 0.9)), _held_back(known, batches))
    # Wider with every doubling of the nodes beyond the calibration, whatever the calibration showed.
    beyond = 1 + np.log2(unknown.nodes / _CALIBRATED_NODES)
    width = np.hypot(spread * (1 + _PER_DOUBLING * beyond), _UNSEEN_NETWORK * beyond)
    return np.exp(logs), np.exp(logs - width), np.exp(logs + width)


def _held_back(known: Steps, batches: FloatArray) -> float:
    """90 % quantile of the errors where the smaller half of the calibration predicts its larger half."""
    small = known.gpus <= np.median(known.gpus)
    smaller, larger = known.where(small), known.where(~small)
    if min(len(smaller.batch), len(larger.batch)) < _FEWEST:
        return 0.0
    logs = _log_step(_fit(smaller, batches), larger, batches)
    return float(np.quantile(np.abs(logs - np.log(larger.step_s)), 0.9))


def _fit(known: Steps, batches: FloatArray) -> FloatArray:
    start = _start(known, batches)

    def residuals(p: FloatArray) -> FloatArray:
        return np.concatenate(
            [_log_step(p, known, batches) - np.log(known.step_s), 0.05 * (p - start)]
        )

    found: FloatArray = least_squares(residuals, start, loss="soft_l1", f_scale=0.1).x
    return found


def _start(known: Steps, batches: FloatArray) -> FloatArray:
    single = np.log(linear_scaling(known.batch, known.gpus, known.step_s, batches))
    scale = float(single.min())
    # host per call, host per sample, between nodes, its growth with devices, norms, spread of paces
    host = [scale - 3, scale - 3 - np.log(batches.max()), scale - 2, 0.5, 0.5, 0.3, np.log(0.03)]
    return np.concatenate([single, host])


def _log_step(p: FloatArray, steps: Steps, batches: FloatArray) -> FloatArray:
    compute = np.interp(np.log(steps.batch), np.log(batches), p[: len(batches)])
    call, sample, between, growth, host_norm, net_norm, paces = p[len(batches) :]
    host = np.log((steps.densest - 1) * (np.exp(call) + np.exp(sample) * steps.batch) + 1e-12)
    norm = 1 + np.exp(np.clip(host_norm, -5, 3))
    local = np.logaddexp(norm * compute, norm * host) / norm + np.exp(paces) * _slowest(steps.gpus)
    kept = np.where(steps.nodes > _CALIBRATED_NODES, _KEPT_GROWTH, 1.0)
    network = between + kept * np.maximum(growth, 0.0) * np.log(steps.densest)
    network = np.where(steps.nodes > 1, network, -40.0)
    norm = 1 + np.exp(np.clip(net_norm, -5, 3))
    both: FloatArray = np.logaddexp(norm * local, norm * network) / norm
    return both


def _slowest(gpus: FloatArray) -> FloatArray:
    """Expected largest of as many normal deviates as there are devices."""
    counts, where = np.unique(gpus, return_inverse=True)
    return np.array([expected_largest_deviate(int(count)) for count in counts])[where]

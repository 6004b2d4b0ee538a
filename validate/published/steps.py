"""Published steps of small models by placement over nodes. No command predicts by this law: none reads such tables."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from scipy.optimize import least_squares

from perfmodel.documents.verdicts import CARRIED, PublishedSeries
from perfmodel.statistics import FloatArray, IntArray, expected_largest_deviate
from validate.published.harness import Part, Table, carried_on, numbers, verdict

_CALIBRATED_NODES: Final = 2
_FEWEST_PLACED: Final = 12
#: Traffic between two nodes grows with the devices of both; over more nodes that growth is shared.
_KEPT_GROWTH: Final = 0.5
#: Growth of the uncertainty per doubling of the nodes.
_PER_DOUBLING: Final = 0.5
#: Uncertainty of a network between more nodes than were measured, log, per doubling.
_UNSEEN_NETWORK: Final = 0.08


#: Columns of steps by placement; ``densest``: devices of the fullest node.
_STEP: Final = np.dtype([(n, float) for n in ("batch", "nodes", "gpus", "densest", "step_s")])
Steps: TypeAlias = np.recarray[Any, Any]


def judge_placements(table: Table) -> Iterator[PublishedSeries]:
    """Steps on one and two nodes predict those on more, for every model on every cluster."""
    groups: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for row in table.rows:
        found = numbers(row, "local_batch", "nodes", "gpus", "step_time_s")
        if found is None:
            table.leave_out("a cell is empty or no number", 1)
            continue
        batch, nodes, gpus, step_s = found
        digits = [int(digit) for digit in row["placement"] if digit.isdecimal()]
        densest = max(digits, default=int(-(-gpus // nodes)))
        name = f"{row['app']} on {row['gpu']} ({row['cluster']})"
        groups[name].append((batch, nodes, gpus, densest, step_s))
    for name, rows in groups.items():
        steps: Steps = np.array(rows, dtype=_STEP).view(np.recarray)
        known = steps[steps.nodes <= _CALIBRATED_NODES]
        unknown = steps[steps.nodes > _CALIBRATED_NODES]
        if min(len(known), len(unknown)) < _FEWEST_PLACED:
            where = "three nodes and more" if len(known) >= len(unknown) else "one and two nodes"
            few = f"models with fewer than {_FEWEST_PLACED} rows on {where}"
            table.leave_out(few, len(rows), name)
            continue
        ours, low, high = predict_steps(known, unknown)
        plain = (known.batch, known.gpus, known.step_s)
        part = Part(
            measured=unknown.step_s,
            predicted={
                "perfmodel": ours,
                "linear scaling": carried_on(*plain, unknown.batch, count=np.min),
                CARRIED: carried_on(*plain, unknown.batch),
                "nearest placement": known.step_s[_nearest(known, unknown)],
            },
            interval=(low, high),
            beyond=unknown.gpus > known.gpus.max(),
        )
        found_on = {
            "fitted": "1 and 2 nodes",
            "predicted": f"3 to {int(unknown.nodes.max())} nodes",
        }
        yield verdict(table.source, name, [part], **found_on, num_fitted=len(known))


def _nearest(known: Steps, unknown: Steps) -> IntArray:
    """Places of the known steps most alike: of that batch, then with as many devices, also on a node."""
    away = np.zeros((len(unknown), len(known)))
    for name, weight in (("batch", 100.0), ("gpus", 1.0), ("densest", 1.0)):
        away += weight * np.abs(np.log(np.divide.outer(unknown[name], known[name])))
    return np.asarray(away.argmin(axis=1))


def predict_steps(known: Steps, unknown: Steps) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Most probable steps, and the ends of their 90 % intervals. [s]"""
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
    smaller, larger = known[small], known[~small]
    if min(len(smaller), len(larger)) < _FEWEST_PLACED:
        return 0.0
    logs = _log_step(_fit(smaller, batches), larger, batches)
    return float(np.quantile(np.abs(logs - np.log(larger.step_s)), 0.9))


def _fit(known: Steps, batches: FloatArray) -> FloatArray:
    single = np.log(carried_on(known.batch, known.gpus, known.step_s, batches, count=np.min))
    scale = float(single.min())
    # host per call, host per sample, between nodes, its growth with devices, norms, spread of paces
    host = [scale - 3, scale - 3 - np.log(batches.max()), scale - 2, 0.5, 0.5, 0.3, np.log(0.03)]
    start = np.concatenate([single, host])

    def residuals(p: FloatArray) -> FloatArray:
        errors = _log_step(p, known, batches) - np.log(known.step_s)
        return np.concatenate([errors, 0.05 * (p - start)])

    found: FloatArray = least_squares(residuals, start, loss="soft_l1", f_scale=0.1).x
    return found


def _log_step(p: FloatArray, steps: Steps, batches: FloatArray) -> FloatArray:
    """Logarithm of the step. [log s]

    local = |compute(batch), host|_norm * exp(spread * E[largest of n deviates])
    host  = (devices of the fullest node - 1) (call + sample * batch)
    step  = |local, network * devices of the fullest node ^ growth|_norm
    """
    compute = np.interp(np.log(steps.batch), np.log(batches), p[: len(batches)])
    call, sample, between, growth, host_norm, net_norm, paces = p[len(batches) :]
    host = np.log((steps.densest - 1) * (np.exp(call) + np.exp(sample) * steps.batch) + 1e-12)
    norm = 1 + np.exp(np.clip(host_norm, -5, 3))
    counts, where = np.unique(steps.gpus, return_inverse=True)
    slowest = np.array([expected_largest_deviate(int(count)) for count in counts])[where]
    local = np.logaddexp(norm * compute, norm * host) / norm + np.exp(paces) * slowest
    kept = np.where(steps.nodes > _CALIBRATED_NODES, _KEPT_GROWTH, 1.0)
    network = between + kept * np.maximum(growth, 0.0) * np.log(steps.densest)
    network = np.where(steps.nodes > 1, network, -40.0)
    norm = 1 + np.exp(np.clip(net_norm, -5, 3))
    both: FloatArray = np.logaddexp(norm * local, norm * network) / norm
    return both

"""Use case: where scaling ends, what ends it, which bandwidth would be enough, what to measure next."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from perfmodel.answer import Question
from perfmodel.answer.answer import Forecast
from perfmodel.answer.measured import all_step_times, largest_all_reduce, layout_costs
from perfmodel.cost import CollectiveTime, Samples, Terms
from perfmodel.cost.collectives import bus_factor
from perfmodel.cost.network import ALL_REDUCE
from perfmodel.documents.prediction import PredictedPoint, PredictionDocument, ScalingAdvice
from perfmodel.explanation import LossCause, Nominal, lost_by_cause, on_one_device
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.statistics import DEVIATE_90, Interval
from perfmodel.step import Cause
from perfmodel.units import Bytes, Seconds

#: A doubling of the devices that gains less is past the knee.
KNEE_GAIN: Final = 1.5
#: Scaling efficiency that the bandwidth is sought for.
TARGET_EFFICIENCY: Final = 0.9
#: No link is a hundred times as fast: beyond, bandwidth does not help.
_MOST_FACTOR: Final = 100.0
_BISECTIONS: Final = 10
#: Groups of more than 2^3 times the measured one are another campaign.
_DOUBLINGS: Final = 3
#: An interval narrower than this part of the present one is worth a measurement.
_WORTHWHILE: Final = 0.85


def with_advice(
    document: PredictionDocument, question: Question, request: Forecast
) -> PredictionDocument:
    """The prediction with advice on scaling.

    It is unchanged for one device, and where other jobs share the links, which no removal knows of.
    """
    cluster, largest = question.cluster, document.points[-1].setting.world_size
    if largest == 1 or (cluster is not None and any(entry.jobs for entry in cluster.traffic)):
        return document
    whole = request.at_largest(question)
    asked = Nominal.of(dataclasses.replace(whole, num_draws=1, validation=None))
    single = Nominal.of(asked.question.at(on_one_device(asked.layout, request.scaling)))
    step_s, ideal_s = asked.step_s(), _ideal_s(asked, single)
    limit, lost_s = _limit(asked, single)
    factor = needed_factor(asked, ideal_s)
    busbw = _busbw_bytes_per_s(asked)
    devices, ratio = _measure_next(whole, document.points[-1].step_s)
    advice = ScalingAdvice(
        devices=largest,
        knee_devices=knee_devices(document.points),
        limit=limit.value,
        limit_share=min(1.0, max(0.0, lost_s / max(step_s - ideal_s, lost_s, 1e-12))),
        target_efficiency=TARGET_EFFICIENCY,
        bandwidth_factor=factor,
        needed_busbw_bytes_per_s=None if factor is None or busbw is None else factor * busbw,
        measure_devices=devices,
        interval_ratio=ratio,
    )
    return document.model_copy(update={"scaling_advice": advice})


def knee_devices(points: Sequence[PredictedPoint]) -> int | None:
    """Devices from which on every doubling gains less than 1.5x; None if none does.

    Between two counts the gain of one doubling is the ratio of throughputs to the power 1 / log2 of
    that of the counts.
    """
    found = None
    for fewer, more in itertools.pairwise(points):
        doublings = math.log2(more.setting.world_size / fewer.setting.world_size)
        ratio = more.samples_per_s.nominal / fewer.samples_per_s.nominal
        if ratio ** (1 / doublings) >= KNEE_GAIN:
            found = None
        elif found is None:
            found = fewer.setting.world_size
    return found


def _ideal_s(asked: Nominal, single: Nominal) -> Seconds:
    """The samples of a step at the speed of one device, shared by all. [s]"""
    layout = asked.layout
    return single.step_s() * layout.global_batch / single.layout.global_batch / layout.world_size


def _limit(asked: Nominal, single: Nominal) -> tuple[LossCause, Seconds]:
    """The cause whose removal saves most of what one device does not pay, and how much. [s]"""
    lost_s = lost_by_cause(asked, single)
    limit = max(lost_s, key=lambda cause: lost_s[cause])
    return limit, max(0.0, lost_s[limit])


def needed_factor(asked: Nominal, ideal_s: Seconds) -> float | None:
    """Bandwidth over today's that gives 90 % efficiency, at least 1; None if none does.

    A message takes its latency, that of one byte, and a transfer, which alone is divided.
    """

    def efficiency(factor: float) -> float:
        return ideal_s / asked.step_s(_at_rate(asked.terms, factor))

    if efficiency(1.0) >= TARGET_EFFICIENCY:
        return 1.0
    low, high = 0.0, math.log(_MOST_FACTOR)
    if efficiency(_MOST_FACTOR) < TARGET_EFFICIENCY:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        enough = efficiency(math.exp(middle)) >= TARGET_EFFICIENCY
        low, high = (low, middle) if enough else (middle, high)
    return math.exp(high)


def _at_rate(terms: Terms, factor: float) -> Terms:
    def faster(cost: CollectiveTime) -> CollectiveTime:
        latency_s = cost(1)

        def time_s(size: Bytes | Samples) -> Samples:
            whole_s = cost(size)
            least_s = np.minimum(latency_s, whole_s)
            result: Samples = least_s + (whole_s - least_s) / factor
            return result

        return time_s

    data_parallel = (Cause.ALL_REDUCE, Cause.BROADCAST)
    changed = {cause: faster(terms.exchange_s[cause]) for cause in data_parallel}
    return dataclasses.replace(terms, exchange_s={**terms.exchange_s, **changed})


def _busbw_bytes_per_s(asked: Nominal) -> float | None:
    """Bus bandwidth of the transfer of the largest all-reduce; None without one. [B/s]"""
    program = asked.costs.program
    size = largest_all_reduce(program)
    cost = asked.terms.exchange_s[Cause.ALL_REDUCE]
    transfer_s = float((cost(size) - cost(1))[0]) if size else 0.0
    if transfer_s <= 0:
        return None
    return bus_factor(ALL_REDUCE, asked.layout.world_size) * size / transfer_s


def _measure_next(question: Question, step: Interval) -> tuple[int | None, float | None]:
    """Devices to measure together next, and the width of the interval then over that of today.

    The variance of ln step is that of collectives, which grows with the doublings d beyond the largest
    group measured, and the rest. A group of d - k doublings less leaves

        ratio = sqrt(rest + collectives * ((d - k) / d)^2) / sqrt(rest + collectives)

    The first group that halves the interval is named, else the one of at most three doublings that narrows
    it most; None where collectives hardly widen it.
    """
    machine, count, cluster = question.machine, question.layout.world_size, question.cluster
    assert isinstance(machine, MeasuredMachine), machine
    most = machine.max_world_size
    if cluster is not None or most == 1:
        # Between nodes a cluster file is assumed: two of its nodes measure what it says.
        devices = 2 if cluster is None else 2 * (cluster.devices_per_node or 1)
        return (devices if most < devices <= count else None), None
    if count < 2 * most:
        return None, None
    costs = layout_costs(question)
    every = (costs.terms, _without_spread(costs.terms))
    draws = [terms.durations(costs.program) for terms in every]
    with_it, without = all_step_times(costs.program, list(zip(every, draws, strict=True)))
    whole = (math.log(step.p95 / step.p5) / 2 / DEVIATE_90) ** 2
    of_links = min(whole, max(0.0, float(np.log(with_it).var() - np.log(without).var())))
    if whole <= 0:
        return None, None
    beyond = math.log2(count / most)
    found: tuple[int | None, float | None] = None, None
    for doublings in range(1, math.floor(beyond) + 1):
        left = max(0.0, 1 - doublings / beyond)
        ratio = math.sqrt(1 - of_links / whole * (1 - left**2))
        if ratio <= 1 / 2 or (doublings <= _DOUBLINGS and ratio <= _WORTHWHILE):
            found = most * 2**doublings, ratio
        if ratio <= 1 / 2:
            break
    return found


def _without_spread(terms: Terms) -> Terms:
    """Terms whose collectives cost the same in every draw."""

    def nominal(cost: CollectiveTime) -> CollectiveTime:
        def time_s(size: Bytes | Samples) -> Samples:
            every_s = cost(size)
            result: Samples = np.broadcast_to(every_s[..., :1], every_s.shape)
            return result

        return time_s

    return dataclasses.replace(
        terms,
        exchange_s={cause: nominal(cost) for cause, cost in terms.exchange_s.items()},
    )

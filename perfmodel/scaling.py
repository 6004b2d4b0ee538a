"""Use case: what a step loses to each cause; where scaling ends, what ends it, and what to measure next."""

import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfmodel.answer import Question, interval
from perfmodel.answer.answer import Forecast
from perfmodel.answer.measured import (
    Costs,
    cost_model,
    largest_all_reduce,
    layout_costs,
    measured_steps_s,
    step_times,
)
from perfmodel.cost import CollectiveTime, Samples, Terms
from perfmodel.cost.collectives import bus_factor
from perfmodel.cost.network import ALL_REDUCE, UNCERTAINTY_PER_DOUBLING, Group
from perfmodel.documents.prediction import PredictedPoint, PredictionDocument, ScalingAdvice
from perfmodel.layout import Layout, Scaling
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.statistics import Interval
from perfmodel.step import Cause
from perfmodel.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Nominal:
    """A question at nominal parameters, and its costs."""

    question: Question
    costs: Costs

    @classmethod
    def of(cls, question: Question) -> "Nominal":
        """With its costs."""
        return cls(question, layout_costs(question))

    @property
    def layout(self) -> Layout:
        """That is asked about."""
        return self.question.layout

    @property
    def terms(self) -> Terms:
        """Of its costs."""
        return self.costs.terms

    def step_s(self, terms: Terms | None = None) -> Seconds:
        """Duration of the step, or of the same step under other terms. [s]"""
        program, terms = self.costs.program, terms or self.terms
        return float(step_times(program, terms, terms.durations(program))[0])

    def at(self, **changes: object) -> "Nominal":
        """The same with some values of the layout changed."""
        changed = replace(self.layout, **changes)  # type: ignore[arg-type]
        return Nominal.of(self.question.at(changed))


def nothing(_size_bytes: Bytes | Samples) -> Samples:
    """Communication that costs nothing. [s]"""
    return np.zeros(1)


#: Every operator of a forward pass has about two in the backward pass (gradients of input and
#: weight): the dispatch of both is shared out accordingly.
_DISPATCH_SHARES: Final = {Cause.FORWARD: 1 / 3, Cause.BACKWARD: 2 / 3}


class LossCause(enum.StrEnum):
    """What can be taken out of a step."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    TENSOR = "tensor"
    P2P = "p2p"
    INTERFERENCE = "interference"
    STRAGGLERS = "stragglers"
    BUCKET = "bucket"
    CONTENTION = "contention"
    SMALL_BATCH = "small_batch"
    DISPATCH = "dispatch"
    INPUT = "input"
    OPTIMIZER = "optimizer"


def on_one_device(layout: Layout, scaling: Scaling) -> Layout:
    """What speed-ups are over: the same micro-batch, or under strong scaling that of all devices together."""
    factor = layout.dp if scaling == "strong" else 1
    return replace(layout.alone, micro_batch=factor * layout.micro_batch)


def lost_by_cause(asked: Nominal, baseline: Nominal) -> dict[LossCause, Seconds]:
    """Step minus the same step without each cause, beyond what a perfect share of the baseline loses to it. [s]

    Of one device alone, all that it loses.
    """
    step_s, own_s = asked.step_s(), dict.fromkeys(LossCause, 0.0)
    if asked.layout.world_size > 1:
        share = asked.layout.global_batch / baseline.layout.global_batch / asked.layout.world_size
        whole_s = baseline.step_s()
        for cause, terms in _of_one_device(baseline):
            own_s[cause] = share * (whole_s - baseline.step_s(terms))
    return {
        cause: step_s - asked.step_s(terms) - own_s[cause]
        for cause, terms in _removals(asked, baseline.layout)
    }


def _removals(asked: Nominal, baseline: Layout) -> Iterator[tuple[LossCause, Terms]]:
    """Terms of the step with one cause removed at a time."""
    terms, none, one = asked.terms, np.zeros(1), np.ones(1)
    for cause in LossCause:
        if cause.value in terms.exchange_s:
            yield cause, without(terms, Cause(cause.value))
    yield LossCause.INTERFERENCE, replace(terms, compute_speed=one, comm_speed=one)
    yield LossCause.STRAGGLERS, replace(terms, slowest=one)
    yield LossCause.BUCKET, replace(terms, bucket_s=none, bucket_s_per_byte=none)
    yield LossCause.INPUT, replace(without(terms, Cause.INPUT), load_s=none)
    yield from _of_one_device(asked)
    if asked.layout.world_size > 1:
        single = Nominal.of(asked.question.at(asked.layout.alone)).terms
        shared = replace(terms, compute_s=single.compute_s, issue_s=single.issue_s)
        yield LossCause.CONTENTION, shared
    if asked.layout.micro_batch != baseline.micro_batch:
        yield LossCause.SMALL_BATCH, _at_large_batch(asked, baseline.micro_batch)


def _of_one_device(asked: Nominal) -> Iterator[tuple[LossCause, Terms]]:
    """The same for what a step without DDP does too; a slow loader is told though one device waits alike."""
    yield LossCause.DISPATCH, without_dispatch(asked)
    yield LossCause.OPTIMIZER, without(asked.terms, Cause.OPTIMIZER)


def without_dispatch(asked: Nominal) -> Terms:
    """On synchronous devices dispatch is part of the passes."""
    terms, machine, workload = asked.terms, asked.question.machine, asked.question.workload
    if terms.issue_s:
        return replace(terms, issue_s=dict.fromkeys(terms.issue_s, np.zeros(1)))
    assert isinstance(machine, MeasuredMachine)
    assert isinstance(workload, MeasuredWorkload)
    dispatch_s = machine.dispatch_s * workload.workload.num_operators
    compute_s = {
        cause: np.maximum(0.0, time_s - dispatch_s * _DISPATCH_SHARES.get(cause, 0.0))
        for cause, time_s in terms.compute_s.items()
    }
    return replace(terms, compute_s=compute_s)


def _at_large_batch(asked: Nominal, micro_batch: int) -> Terms:
    """Each sample costs what it does in the baseline's micro-batch; the optimizer is as it was."""
    large = asked.at(micro_batch=micro_batch).terms
    share = asked.layout.micro_batch / micro_batch

    def scaled(
        large_s: Mapping[Cause, Samples], asked_s: Mapping[Cause, Samples]
    ) -> dict[Cause, Samples]:
        return {
            cause: asked_s[cause] if cause is Cause.OPTIMIZER else time_s * share
            for cause, time_s in large_s.items()
        }

    return replace(
        asked.terms,
        compute_s=scaled(large.compute_s, asked.terms.compute_s),
        issue_s=scaled(large.issue_s, asked.terms.issue_s),
    )


def without(terms: Terms, cause: Cause) -> Terms:
    """Terms in which one kind of exchange, or of work, costs nothing."""
    if cause in terms.exchange_s:
        return replace(terms, exchange_s={**terms.exchange_s, cause: nothing})
    none = {cause: np.zeros(1)}
    issue_s = {**terms.issue_s, **none} if cause in terms.issue_s else terms.issue_s
    return replace(terms, compute_s={**terms.compute_s, **none}, issue_s=issue_s)


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
    """The prediction with advice on scaling; unchanged for one device."""
    largest = document.points[-1].setting.world_size
    if largest == 1:
        return document
    whole = request.at_largest(question)
    asked = Nominal.of(replace(whole, num_draws=1, validation=None))
    single = Nominal.of(asked.question.at(on_one_device(asked.layout, request.scaling)))
    samples = asked.layout.global_batch / single.layout.global_batch
    step_s, ideal_s = asked.step_s(), single.step_s() * samples / asked.layout.world_size
    lost_s = lost_by_cause(asked, single)
    limit = max(lost_s, key=lambda cause: lost_s[cause])
    most_s = max(0.0, lost_s[limit])
    factor = needed_factor(asked, ideal_s)
    busbw = _busbw_bytes_per_s(asked)
    counts, ratio, least = _measure_next(whole, document.points[-1].step_s)
    advice = ScalingAdvice(
        devices=largest,
        knee_devices=knee_devices(document.points),
        limit=limit.value,
        limit_share=min(1.0, max(0.0, most_s / max(step_s - ideal_s, most_s, 1e-12))),
        target_efficiency=TARGET_EFFICIENCY,
        bandwidth_factor=factor,
        needed_busbw_bytes_per_s=None if factor is None or busbw is None else factor * busbw,
        measure_devices=counts,
        interval_ratio=ratio,
        least_ratio=least,
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
            return np.asarray(least_s + (whole_s - least_s) / factor)

        return time_s

    data_parallel = (Cause.ALL_REDUCE, Cause.BROADCAST)
    changed = {cause: faster(terms.exchange_s[cause]) for cause in data_parallel}
    return replace(terms, exchange_s={**terms.exchange_s, **changed})


def _busbw_bytes_per_s(asked: Nominal) -> float | None:
    """Bus bandwidth of the transfer of the largest all-reduce; None without one. [B/s]"""
    program = asked.costs.program
    size = largest_all_reduce(program)
    cost = asked.terms.exchange_s[Cause.ALL_REDUCE]
    transfer_s = float((cost(size) - cost(1))[0]) if size else 0.0
    if transfer_s <= 0:
        return None
    return bus_factor(ALL_REDUCE, asked.layout.world_size) * size / transfer_s


def _measure_next(
    question: Question, step: Interval
) -> tuple[tuple[int, ...], float | None, float | None]:
    """The smallest counts that halve the interval, or else narrow it most; the ratio then, and at best.

    No counts where it stays. Every choice is asked as a machine that holds its measurements, in the draws of the
    machine of today:

        ratio = ln(p95 / p5) then / ln(p95 / p5) today
    """
    today = math.log(step.p95 / step.p5)
    machine, cluster, count = question.machine, question.cluster, question.layout.world_size
    assert isinstance(machine, MeasuredMachine), machine
    # Devices of the largest group that was measured; between nodes of a cluster file, of one node.
    inside = 1 if cluster is None else cluster.devices_per_node or 1
    most = max(machine.max_world_size, inside)
    if today <= 0:
        return (), None, None

    def ratio_of(counts: Sequence[int]) -> float:
        [draws_s] = measured_steps_s([_as_measured(question, counts)])
        found = interval(draws_s)
        return math.log(found.p95 / found.p5) / today

    best: tuple[int, ...] = ()
    narrowed: float | None = None
    least = min(1.0, ratio_of((1, count)))
    groups = [most * 2**doubling for doubling in range(1, _DOUBLINGS + 1)]
    tells_alone = question.measured.shared_log_error > 0
    choices = [[1]] if tells_alone else []
    for group in groups:
        if group <= count:
            choices += [[group], [1, group]] if tells_alone else [[group]]
    for counts in choices:
        ratio = ratio_of(counts)
        if ratio < (narrowed or _WORTHWHILE):
            best, narrowed = tuple(counts), ratio
        if ratio <= 1 / 2:
            break
    return best, narrowed, least


def _as_measured(question: Question, counts: Sequence[int]) -> Question:
    """The question to a machine that was also measured at some counts, which found what is expected."""
    if counts[0] == 1:  # then neither the device nor its law is in question
        workload = replace(question.measured, shared_log_error=0.0)
        question = replace(question, workload=workload)
    ranks = counts[-1]
    machine, cluster = question.machine, question.cluster
    assert isinstance(machine, MeasuredMachine), machine
    if ranks == 1:
        return question
    if cluster is not None:
        left = UNCERTAINTY_PER_DOUBLING * math.log2(question.layout.world_size / ranks)
        tiers = tuple(replace(t, log_error=min(t.log_error, left)) for t in cluster.tiers)
        return replace(question, cluster=replace(cluster, tiers=tiers))
    network = cost_model(machine, None, 1).network
    largest = max(group.world_size for group in machine.collectives)
    added = []
    for group in machine.collectives:
        if group.world_size == largest and group.collective in (ALL_REDUCE, "broadcast"):
            sizes = np.array([[int(point.at)] for point in group.points], np.float64)
            times_s = network.time_s(group.collective, sizes, Group(ranks))[:, 0].tolist()
            timed = zip(group.points, times_s, strict=True)
            points = tuple(replace(point, time_s=time_s) for point, time_s in timed)
            added.append(replace(group, world_size=ranks, points=points))
    return replace(question, machine=replace(machine, collectives=tuple(added)))

"""Phase curves of a traced workload from the durations of its operators: it need never have run."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfmodel.cost.operators import OperatorDurations, PhaseDuration
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    ComputeRate,
    CurvePoint,
    HostCosts,
    MeasuredMachine,
    MeasuredStep,
    MeasuredWorkload,
    OperatorCosts,
    PhaseCurves,
    StepNoise,
    TrainedStep,
)
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import Phase, Workload
from perfmodel.workload.step import AffineBytes, SymbolicStep, TracedStep, parameters_signature

#: Micro-batches at which curves are read; between them time is close to linear.
GRID: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Those of light models that keep a GPU busy.
LARGE_ON_GPU: Final = (1024, 4096, 16_384, 65_536)
#: How much more uncertain a phase is per e-fold of micro-batch away from a measured one: a prior.
_UNCERTAINTY_PER_EFOLD = 0.05
#: Uncertainty, in log, of the host's time to issue an operator: a prior.
_DISPATCH_ERROR = 0.3
#: Inputs and targets are copied one by one, and are no part of a trace.
INPUT_COPIES: Final = 2
#: A host that issues a step in less of its time does not bind it.
_NEAR = 0.8
#: Families that make up this share of a step without a timing near are named.
_NAMED_SHARE = 0.05
#: Smallest spread of how ranks slow each other down, in log.
_SMALLEST_SPREAD = 0.02


def traced_profile(
    profile: MeasuredMachine,
    operators: OperatorCosts,
    workload: Workload,
    trace: SymbolicStep,
    *,
    batch: AffineBytes | None = None,
    use_measured: bool = True,
) -> MeasuredWorkload:
    """Curves of a workload that was never run, as those of a calibrated one.

    ``operators``: Durations, those of ``profile``. ``batch``: Inputs and targets, if known.
    ``use_measured``: Whether operators of this workload that were timed in place count, or curves
    alone.
    """
    own = parameters_signature(trace)
    exact = OperatorDurations(
        operators, use_measured=use_measured, own=own, asynchronous=profile.asynchronous
    )
    batches = _measured_batches(exact, trace, own) if use_measured else ()
    curves = OperatorDurations(operators, use_measured=False, asynchronous=profile.asynchronous)
    grid = {*GRID, *batches, *(LARGE_ON_GPU if profile.asynchronous else ())}
    steps = {batch: trace.at(micro_batch=batch) for batch in grid}
    # A family is read once for all micro-batches: that is what takes the time.
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        curves.durations(
            (
                (step.operators[position], count)
                for step in steps.values()
                for (position, at), count in step.call_counts().items()
                if at is phase
            ),
            phase,
        )
    by_curves = _rising({batch: curves.step(steps[batch]) for batch in sorted(steps)})
    copied_s = {at: input_copy_s(profile.rates, batch.at(at)) if batch else 0.0 for at in steps}
    issue_s = _issue_s(profile, trace)
    replayed = {at: exact.step(steps[at]) for at in batches}
    shares = {
        at: _shares(
            exact.trained(steps[at]),
            known_s=copied_s[at] + sum(duration.time_s for duration in replayed[at].values()),
            issue_s=sum(issue_s.values()),
        )
        for at in batches
    }
    found = {at: _as_trained(replayed[at], shares[at]) for at in batches}
    points = {
        phase: _points(
            {batch: steps[phase] for batch, steps in by_curves.items()},
            {batch: steps[phase] for batch, steps in found.items()},
        )
        for phase in Phase
    }
    untimed = {name for steps in by_curves.values() for p in steps.values() for name in p.untimed}
    noise, rank_spread = _borrowed_noise(profile, points[Phase.BACKWARD])
    middle = batches[len(batches) // 2] if batches else GRID[len(GRID) // 3]
    return MeasuredWorkload(
        workload=with_ready_times(workload, steps[middle], exact),
        phases=_phases(profile, points, copied_s, issue_s, shares),
        noise=noise,
        rank_spread=rank_spread,
        # Of everything but the measured micro-batches.
        evidence=Evidence.INTERPOLATED
        if batches
        else Evidence.weakest(d.evidence for each in by_curves.values() for d in each.values()),
        measured_batches=batches,
        trained=tuple(each for batch in batches for each in _trained(exact, steps[batch])),
        untimed=tuple(sorted(untimed)) if not batches else (),
        far=()
        if batches
        else tuple((batch, _far(phases.values())) for batch, phases in by_curves.items()),
    )


def _far(phases: Iterable[PhaseDuration]) -> tuple[str, ...]:
    """Families that make up a twentieth of a step or more without a timing near, the longest first."""
    total_s, far_s = 0.0, defaultdict[str, float](float)
    for phase in phases:
        total_s += phase.time_s
        for name, part_s in phase.far_s.items():
            # Both passes of an operator are one to the reader.
            far_s[name.replace("_backward", "")] += part_s
    named = [name for name, part_s in far_s.items() if part_s >= _NAMED_SHARE * total_s]
    return tuple(sorted(named, key=lambda name: (-far_s[name], name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """Factors that bring what is known of the sides of a step to its own training."""

    device: float
    host: float
    relative_error: float
    """Of the side that binds."""
    host_binds: bool


def _shares(trained: MeasuredStep | None, *, known_s: Seconds, issue_s: Seconds) -> _Shares | None:
    """Factors of a step whose model was trained; None if it was not.

    ``known_s``: Its replayed operators and the copy of its batch. ``issue_s``: What the host takes to issue it, by the
    costs of operators. With T the trained step, D what is known, and I what the host took to issue it:

        I >= D and I near T:    host = T, device = min(D, T)    the device waits for its host
        else:                   device = T, host = min(I, T)    the device binds, with what could not be replayed
    """
    if trained is None or trained.trained_s is None:
        return None
    step_s = trained.trained_s
    own_s = trained.issued_s or 0.0
    host_s, device_s = min(own_s, step_s), step_s
    host_binds = own_s >= max(known_s, _NEAR * step_s)
    if host_binds:
        host_s, device_s = step_s, min(known_s, step_s)
    return _Shares(
        device=device_s / known_s,
        host=host_s / issue_s if own_s and issue_s else 1.0,
        relative_error=trained.relative_error,
        host_binds=host_binds,
    )


def _as_trained(
    replayed: Mapping[Phase, PhaseDuration], shares: _Shares | None
) -> Mapping[Phase, PhaseDuration]:
    """Phases of a step that was timed in place, in its own training if its model was trained."""
    if shares is None:
        return replayed
    return {
        phase: replace(d, time_s=d.time_s * shares.device, relative_error=shares.relative_error)
        for phase, d in replayed.items()
    }


def _trained(exact: OperatorDurations, step: TracedStep) -> Iterator[TrainedStep]:
    """Trainings of this very step, on one rank first."""
    if (found := exact.trained(step)) is None or found.trained_s is None:
        return
    alone = found.trained_s, found.relative_error
    for world_size, (step_s, error) in {1: alone, **found.ddp_s}.items():
        yield TrainedStep(
            world_size=world_size,
            micro_batch=found.micro_batch,
            step_s=step_s,
            relative_error=error,
            run_log_error=found.run_log_error,
        )


def with_ready_times(
    workload: Workload, step: TracedStep, durations: OperatorDurations
) -> Workload:
    """The workload with gradients ready when the backward pass, by its durations, has got to them.

    A trace counts FLOP; what is cheap in FLOP and dear in time, such as normalisation, counts here.
    """
    if len(workload.parameters) != len(step.parameters):
        return workload
    counts = step.call_counts().items()
    used = {at: count for (at, phase), count in counts if phase is Phase.BACKWARD}
    calls = [(step.operators[at], count) for at, count in used.items()]
    found = durations.durations(calls, Phase.BACKWARD)
    time_s = {at: duration.time_s for at, duration in zip(used, found, strict=True)}
    return ready_when_done(workload, step, time_s)


def ready_when_done(
    workload: Workload, step: TracedStep, time_s: Mapping[int, Seconds]
) -> Workload:
    """The workload with each gradient ready when what comes before it in the backward pass is done.

    ``time_s``: Of operators of the backward pass, by their position; others take none. [s]
    """
    calls = [
        time_s.get(call.operator, 0.0) for call in step.calls() if call.phase is Phase.BACKWARD
    ]
    done_s = np.concatenate(([0.0], np.cumsum(calls)))
    whole_s = float(done_s[-1]) or 1.0
    parameters = tuple(
        replace(
            parameter,
            ready_fraction=1.0
            if traced.ready_after is None
            else min(1.0, float(done_s[traced.ready_after]) / whole_s),
        )
        for parameter, traced in zip(workload.parameters, step.parameters, strict=True)
    )
    return replace(workload, parameters=parameters)


def _measured_batches(exact: OperatorDurations, trace: SymbolicStep, own: str) -> tuple[int, ...]:
    """Micro-batches at which this very trace was trained or replayed, or whose operators others share."""
    measured = exact.profile.measured
    replayed = {step.micro_batch for step in measured if step.parameters == own}
    others = {step.micro_batch for step in measured} - replayed if replayed else set()
    found = {
        batch
        for batch in replayed
        for step in [trace.at(micro_batch=batch)]
        if exact.trained(step)
        or all(duration.evidence is Evidence.MEASURED for duration in exact.step(step).values())
    }
    found |= {batch for batch in others if exact.holds(trace.at(micro_batch=batch))}
    return tuple(sorted(found))


def _rising(
    by_curves: Mapping[int, Mapping[Phase, PhaseDuration]],
) -> dict[int, dict[Phase, PhaseDuration]]:
    """Durations by ascending micro-batch without dips: more samples never take less time."""
    least_s = dict.fromkeys(Phase, 0.0)
    result = {}
    for batch, phases in by_curves.items():
        least_s = {
            phase: max(least_s[phase], duration.time_s) for phase, duration in phases.items()
        }
        result[batch] = {
            phase: replace(duration, time_s=least_s[phase]) for phase, duration in phases.items()
        }
    return result


def _points(
    by_curves: Mapping[int, PhaseDuration], found: Mapping[int, PhaseDuration]
) -> tuple[CurvePoint, ...]:
    """Measured where there is a measurement; elsewhere the curves, brought to the nearest one.

    T(batch) = curve(batch) measured(nearest) / curve(nearest)
    """
    points = []
    for batch, duration in sorted(by_curves.items()):
        at = found.get(batch)
        if at is not None:
            points.append(_point(batch, at.time_s, at.relative_error))
        elif found:
            known = nearest(found, batch)
            ratio = found[known].time_s / max(by_curves[known].time_s, 1e-12)
            uncertainty = _UNCERTAINTY_PER_EFOLD * abs(math.log(known / batch))
            error = math.hypot(found[known].relative_error, uncertainty)
            points.append(_point(batch, duration.time_s * ratio, error))
        else:
            points.append(_point(batch, duration.time_s, duration.relative_error))
    return tuple(points)


def nearest(batches: Iterable[int], batch: int) -> int:
    """On a logarithmic scale."""
    return min(batches, key=lambda known: abs(math.log(known / batch)))


def _point(batch: float, time_s: Seconds, relative_error: float) -> CurvePoint:
    return CurvePoint(at=batch, time_s=time_s, relative_error=relative_error)


def _phases(
    profile: MeasuredMachine,
    points: Mapping[Phase, tuple[CurvePoint, ...]],
    copied_s: Mapping[int, Seconds],
    issue_s: Mapping[Phase, Seconds],
    shares: Mapping[int, _Shares | None],
) -> tuple[PhaseCurves, ...]:
    """One set of curves per number of ranks that were measured together.

    ``copied_s``: By micro-batch, the copy of the batch. ``issue_s``: What the host takes to issue each phase.
    ``shares``: Of trained steps, by micro-batch.
    """
    trained = {batch: share for batch, share in shares.items() if share is not None}
    by_batch = {
        batch: trained[nearest(trained, batch)] if trained else None for batch in sorted(copied_s)
    }
    copied = tuple(
        _point(batch, copied_s[batch] * (share.device if share else 1.0), 0.0)
        for batch, share in by_batch.items()
    )
    dispatch = _dispatch(profile, issue_s, by_batch) if profile.asynchronous else {}
    world_sizes = sorted({p.world_size for w in profile.workloads for p in w.phases}) or [1]

    def slowed(phase: Phase, world_size: int) -> tuple[CurvePoint, ...]:
        factor, error = slowdown(profile, phase, world_size)
        return tuple(
            _point(p.at, p.time_s * factor, math.hypot(p.relative_error, error))
            for p in points[phase]
        )

    return tuple(
        PhaseCurves(
            world_size=world_size,
            input=copied,
            **{phase.value: slowed(phase, world_size) for phase in Phase},
            **dispatch,
        )
        for world_size in world_sizes
    )


def _dispatch(
    profile: MeasuredMachine, issue_s: Mapping[Phase, Seconds], shares: Mapping[int, _Shares | None]
) -> dict[str, tuple[CurvePoint, ...]]:
    """The host's time to issue every operator, whatever the batch but for what trainings tell; by micro-batch."""
    error = _DISPATCH_ERROR if profile.host is None else profile.host.relative_error
    return {
        f"dispatch_{phase.value}": tuple(
            _point(
                batch,
                phase_s * (share.host if share else 1.0),
                share.relative_error if share and share.host_binds else error,
            )
            for batch, share in shares.items()
        )
        for phase, phase_s in issue_s.items()
    }


def _issue_s(profile: MeasuredMachine, trace: SymbolicStep) -> dict[Phase, Seconds]:
    """The host's time to issue each phase, by the costs of what it issues; no batch changes it. [s]"""
    step, host = trace.at(micro_batch=max(2, trace.traced_micro_batches[0])), profile.host
    return {
        phase: profile.dispatch_s * step.num_calls(phase)
        if host is None
        else issued_s(host, issued(step, phase))
        for phase in Phase
    }


def input_copy_s(rates: Sequence[ComputeRate], size_bytes: Bytes) -> Seconds:
    """T = copies x start + B / rate, from pinned memory; 0 where no copy was timed. [s]

    The start is what the smallest timed copy takes, the rate that of the largest.
    """
    timed = sorted(
        (rate.bytes_per_s * rate.time_s, rate.time_s)
        for rate in rates
        if rate.probe == "host_to_device"
    )
    if not timed or size_bytes <= 0:
        return 0.0
    (least_bytes, least_s), (most_bytes, most_s) = timed[0], timed[-1]
    if len(timed) == 1:
        return most_s * size_bytes / most_bytes
    byte_s = max(0.0, most_s - least_s) / (most_bytes - least_bytes)
    return INPUT_COPIES * least_s + size_bytes * byte_s


def issued(step: TracedStep, phase: Phase) -> dict[str, int]:
    """What the host issues in a phase, by the name of its cost in ``HostCosts``.

    What moves nothing starts no kernel and counts as a view: views, memory without content, marks of the profiler,
    numbers that the host reads. Copies of the batch are issued before the forward pass. The optimizer issues
    operators over lists of tensors.
    """
    kernels, others, tensors = INPUT_COPIES if phase is Phase.FORWARD else 0, 0, 0
    for (position, at), count in step.call_counts().items():
        operator = step.operators[position]
        if at is not phase:
            continue
        has_kernel = operator.read_bytes + operator.written_bytes > 0
        kernels += count if has_kernel else 0
        others += 0 if has_kernel else count
        if "_foreach_" in operator.name or "_fused_" in operator.name:
            tensors += count * len(operator.inputs)
    found = {f"{phase.value}_s": kernels}
    match phase:
        case Phase.FORWARD:
            return found | {"view_s": others, "module_s": sum(step.modules_entered()), "phase_s": 1}
        case Phase.BACKWARD:
            nodes = num_nodes(issued(step, Phase.FORWARD)["forward_s"], kernels)
            return found | {"view_s": others, "phase_s": 1, "node_s": nodes}
        case Phase.OPTIMIZER:
            return found | {"tensor_s": tensors}


def num_nodes(forward: int, backward: int) -> int:
    """Nodes that autograd runs, of what the host issues with a kernel in either pass.

        N = min(forward - copies of the batch, backward)

    An operator of the forward pass has one node, or none where nothing is differentiated, as counters of batches.
    A node issues one kernel or several.
    """
    return max(0, min(forward - INPUT_COPIES, backward))


def issued_s(host: HostCosts, counts: Mapping[str, int]) -> Seconds:
    """T = sum of counts x costs. [s]"""
    return float(sum(count * getattr(host, name) for name, count in counts.items()))


def slowdown(profile: MeasuredMachine, phase: Phase, world_size: int) -> tuple[float, float]:
    """Ratio of a phase with ``world_size`` ranks at work to one alone, and its error in log.

    The geometric mean over the reference models, and how far they differ.
    """
    logs = [
        math.log(many.time_s / one.time_s)
        for workload in profile.workloads
        for phases in workload.phases
        if phases.world_size == world_size
        for one, many in zip(
            getattr(workload.phases[0], phase.value), getattr(phases, phase.value), strict=False
        )
        if one.at == many.at and min(one.time_s, many.time_s) > 0
    ]
    if world_size == 1 or not logs:
        return 1.0, 0.0
    return math.exp(max(0.0, float(np.mean(logs)))), max(_SMALLEST_SPREAD, float(np.std(logs)))


def _borrowed_noise(
    profile: MeasuredMachine, backward: Sequence[CurvePoint]
) -> tuple[tuple[StepNoise, ...], float]:
    """Noise of the reference model whose steps are about as long, and the spread of its ranks."""
    middle_s = backward[len(backward) // 2].time_s

    def distance(workload: MeasuredWorkload) -> float:
        other_s = workload.phases[0].backward[-1].time_s
        return abs(math.log(max(1e-9, other_s) / max(1e-9, middle_s)))

    donor = min((w for w in profile.workloads if w.noise), key=distance, default=None)
    return ((), 0.0) if donor is None else (donor.noise, donor.rank_spread)

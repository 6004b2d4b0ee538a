"""Phase curves of a traced workload on a device whose costs were fitted to whole steps of other models."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy as np

from perfmodel.cost.operators import PhaseDuration
from perfmodel.cost.step_law import (
    THREAD_CONSTANTS,
    ConstantPrior,
    Sheet,
    StepBatch,
    StepSeconds,
    joined_s,
    log_constants,
    step_seconds,
)
from perfmodel.cost.step_work import StepWork, step_work
from perfmodel.cost.traced import GRID, LARGE_ON_GPU, ready_when_done
from perfmodel.documents import read_toml
from perfmodel.errors import UsageError
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    CurvePoint,
    DeviceCosts,
    MeasuredMachine,
    MeasuredWorkload,
    MemoryFormat,
    PhaseCurves,
    StepNoise,
)
from perfmodel.statistics import FloatArray
from perfmodel.units import Seconds
from perfmodel.workload import Call, Operator, Phase, Workload
from perfmodel.workload.step import Segment, SymbolicStep, TracedStep

_SHIPPED_PRIORS: Final = Path(__file__).with_name("device_priors.toml")
_SHIPPED_THREADS: Final = Path(__file__).with_name("threads.toml")
#: Absolute error, in log, that one model in ten exceeds where no row has the precision and memory format.
UNSEEN_MODE_ERROR: Final = 0.5
#: Absolute change in log between versions that one model in ten exceeds, where no two were measured: RTX 3090,
#: PyTorch 1.10 to 1.12, moved single models by -24 to +28 % (5 to 95 %).
UNKNOWN_DRIFT: Final = 0.25
_NONE: Final = 1e-9
#: Spread, in log, of steps of one device and of equal devices: assumed. ResNet-50 on 1 to 8 A100, repeated
#: over three years, differs by 0.6 % (mvsjober/ml-benchmarks @d5c4253c).
_STEP_SPREAD: Final = 0.01


@cache
def shipped_priors(generation: str = "") -> Mapping[str, ConstantPrior]:
    """What the devices that were fitted so far say of the constants of another one of a generation."""
    tables = read_toml(_SHIPPED_PRIORS, what="priors of devices")
    constants = tables["constants"] | tables.get(generation, {})
    return {name: ConstantPrior(*values) for name, values in constants.items()}


@cache
def shipped_threads(device: str) -> tuple[FloatArray, float, bool]:
    """``THREAD_CONSTANTS`` by steps of a device, or of all; what one new step in ten is off, in log; which of both."""
    tables = read_toml(_SHIPPED_THREADS, what="constants of nn.DataParallel")
    known = tables.get(device, tables["others"])
    values = np.array([known[name] for name in THREAD_CONSTANTS])
    return values, known["log_error"], device in tables


def by_law(costs: DeviceCosts, works: Sequence[StepWork]) -> tuple[StepSeconds, FloatArray]:
    """Steps on a device, and the logarithms of all constants there."""
    # A fit from before these constants were known holds them in the others.
    old = {"host step": _NONE, "norm channels": _NONE} if costs.num_rows else {}
    logs = log_constants({**old, **costs.constants}, shipped_priors(costs.generation))
    sheet = Sheet(costs.flop_per_s, costs.bytes_per_s)
    return step_seconds(StepBatch.of(works, sheet), logs), logs


def workload_by_law(
    costs: DeviceCosts,
    workload: Workload,
    trace: SymbolicStep,
    *,
    batches: Sequence[int] = (*GRID, *LARGE_ON_GPU),
) -> MeasuredWorkload:
    """Curves of a workload that was never run, as those of a calibrated one, at these micro-batches.

    Device and host hide each other only in part, in a phase as in the step: phases of the device are as long as
    the whole step, each by what its device and host would take alone. A larger batch never takes less.
    """
    steps = [trace.at(micro_batch=batch) for batch in batches]
    works = tuple(step_work(step) for step in steps)
    found, logs = by_law(costs, works)
    joined = joined_s(found.device_s, found.host_s, logs)
    share = joined / joined.sum(axis=1, keepdims=True)
    device_s = share * np.maximum.accumulate(found.step_s)[:, np.newaxis]
    names = [phase.value for phase in Phase]
    mode = works[0].precision, works[0].memory_format
    known = costs.error(*mode)
    error = UNSEEN_MODE_ERROR if known is None else known.log_error
    phases = PhaseCurves(
        world_size=1,
        input=_curve(batches, np.zeros(len(batches))),
        **{name: _curve(batches, device_s[:, place]) for place, name in enumerate(names)},
        **{
            f"dispatch_{name}": _curve(batches, found.host_s[:, place])
            for place, name in enumerate(names)
        },
    )
    middle = len(GRID) // 2
    return MeasuredWorkload(
        workload=_with_ready_times(workload, steps[middle], works, found, middle),
        phases=(phases,),
        noise=(StepNoise(micro_batch=1, ratios=_spread_ratios()),),
        rank_spread=_STEP_SPREAD,
        evidence=Evidence.INFERRED,
        shared_log_error=error,
        # No step of any device tells of operators that are not PyTorch's own.
        untimed=tuple(
            sorted({o.name for o in steps[middle].operators if not o.name.startswith("aten.")})
        ),
    )


def _curve(batches: Sequence[int], time_s: FloatArray) -> tuple[CurvePoint, ...]:
    """Without errors of its own: what is uncertain is common to all phases."""
    return tuple(
        CurvePoint(at=batch, time_s=float(seconds), relative_error=0.0)
        for batch, seconds in zip(batches, time_s, strict=True)
    )


@cache
def _spread_ratios() -> tuple[float, ...]:
    count = 41
    normal = NormalDist(sigma=_STEP_SPREAD)
    return tuple(math.exp(normal.inv_cdf((index + 0.5) / count)) for index in range(count))


def _with_ready_times(
    workload: Workload, step: TracedStep, works: tuple[StepWork, ...], found: StepSeconds, row: int
) -> Workload:
    """The workload with gradients ready when the backward pass, by this law, has got to them."""
    before = sum(len(work.count) for work in works[:row])
    work = works[row]
    backward = work.phase == 1
    own_s = found.kernel_s[before : before + len(work.count)][backward]
    time_s = np.bincount(work.operator[backward], weights=own_s).tolist()
    return ready_when_done(workload, step, dict(enumerate(time_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LawDurations:
    """Parts of a step by the law, as ``OperatorDurations`` reads them off curves: how a layout divides it."""

    costs: DeviceCosts
    step: TracedStep
    """The whole, whose precision holds."""
    memory_format: MemoryFormat

    def phase(
        self,
        calls: Sequence[tuple[Operator, int]],
        phase: Phase,
        *,
        in_pass: Sequence[int] = (),  # noqa: ARG002 - each takes as long, however often it runs
    ) -> PhaseDuration:
        """Time of the device for calls of one phase, with how often each runs."""
        segments = tuple(
            Segment(count=count, calls=(Call(operator=place, phase=phase, module=""),))
            for place, (_, count) in enumerate(calls)
        )
        operators = tuple(operator for operator, _ in calls)
        part = replace(self.step, operators=operators, segments=segments)
        time_s = self._device_s(part, has_optimizer=False)
        return PhaseDuration(
            time_s=time_s, relative_error=0.0, evidence=Evidence.INFERRED, untimed=()
        )

    def optimizer_work_s(self, step: TracedStep) -> Seconds:
        """Time of the device to update the parameters of a step. [s]"""
        return self._device_s(replace(step, segments=()), has_optimizer=True)

    def _device_s(self, part: TracedStep, *, has_optimizer: bool) -> Seconds:
        work = step_work(part, memory_format=self.memory_format, has_optimizer=has_optimizer)
        return float(by_law(self.costs, [work])[0].device_s.sum())


def for_version(machine: MeasuredMachine, torch: str) -> MeasuredMachine:
    """The machine under another version of PyTorch: intervals widen by what versions were seen to change."""
    costs = machine.device_costs
    if costs is None:
        raise UsageError(
            "--torch: must come with a machine inferred from steps, got one that was measured; "
            "calibrate again with that version"
        )
    known = costs.versions.get("torch", "")
    if known and _release(torch) == _release(known):
        return machine
    drift = costs.version_drift or UNKNOWN_DRIFT
    left_out = tuple(
        replace(each, log_error=math.hypot(each.log_error, drift)) for each in costs.left_out
    )
    origin = "measured between versions" if costs.version_drift else "assumed"
    said = (
        f"steps were of PyTorch {known or 'unknown'}: {torch} widens the interval by "
        f"{math.expm1(drift):.0%} ({origin})"
    )
    return replace(
        machine,
        device_costs=replace(costs, left_out=left_out),
        undetermined=(*machine.undetermined, said),
    )


def _release(version: str) -> tuple[str, ...]:
    """Major and minor number."""
    return tuple(version.split("+", maxsplit=1)[0].split(".")[:2])

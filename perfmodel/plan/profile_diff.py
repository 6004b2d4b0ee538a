"""Use case: two profiles -> what changed beyond noise, and which predictions move."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perfmodel.answer import Question, interval
from perfmodel.answer.answer import steps_s
from perfmodel.documents import asked_by, checks_arguments
from perfmodel.documents.acceptance import Difference, MovedPrediction, ProfileDiffDocument
from perfmodel.errors import IncomparableRuns
from perfmodel.files import leaves
from perfmodel.layout import RunSetting, scaled_layouts
from perfmodel.machine.measured import PHASE_CURVES, DdpCosts, MeasuredMachine, MeasuredWorkload
from perfmodel.statistics import unpaired
from perfmodel.units import Seconds, format_bytes
from perfmodel.workload import Workload

#: Uncertainty is never below this, in log: clocks and rounding.
SMALLEST_ERROR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A fitted value."""

    value: float
    unit: str
    error: float
    """Standard error: of the logarithm, or of the value if ``is_additive``."""
    is_additive: bool = False


def estimates(profile: MeasuredMachine) -> dict[str, Estimate]:
    """Parameters by name.

    Steps and phases carry, beside their own error, that of the round, which no number of settings
    averages away. Kernels alone carry that of a run.
    """
    times = {name: _logarithmic(*values) for name, *values in _times(profile)}
    return (
        times
        | dict(_ddp(profile.ddp))
        | {
            f"kernel {rate.probe} {rate.dtype} {'x'.join(map(str, rate.shape))}": _logarithmic(
                rate.time_s, profile.repeatability.run_of(1)
            )
            for rate in profile.rates
        }
    )


def _times(profile: MeasuredMachine) -> Iterator[tuple[Any, ...]]:
    """Name, time in seconds and its relative errors: of phases, collectives and steps."""
    round_error = profile.repeatability.known_round(profile.num_rounds)
    for workload in profile.workloads:
        for phases, curve in itertools.product(workload.phases, PHASE_CURVES):
            where = f"{workload.workload.name} {curve.replace('_', ' ')}"
            for point in getattr(phases, curve):
                if point.time_s > 0:
                    name = f"{where}, micro-batch {point.at:g}, {_ranks(phases.world_size)}"
                    yield name, point.time_s, point.relative_error, round_error
    for entry in profile.collectives:
        for point in entry.points:
            name = f"{entry.collective} of {format_bytes(point.at)}, {_ranks(entry.world_size)}"
            yield name, point.time_s, point.relative_error
    for step in profile.steps:
        cap = "" if step.bucket_cap_mb is None else f", cap {step.bucket_cap_mb:g} MiB"
        size = f"micro-batch {step.micro_batch}, {_ranks(step.world_size)}"
        name = f"step {step.workload}, {size}, {step.synchronisation}{cap}"
        yield name, step.step_s, step.relative_error, round_error


def _ddp(ddp: DdpCosts) -> Iterator[tuple[str, Estimate]]:
    spreads = np.array(ddp.draws).std(axis=0)
    units = {"bucket_s": "s", "bucket_s_per_byte": "s/B"}
    rows = zip(ddp.names, ddp.values, spreads, ddp.determined, strict=True)
    for name, value, spread, determined in rows:
        if determined:
            error = max(float(spread), SMALLEST_ERROR * abs(value))
            unit = units.get(name, "fraction")
            yield f"DDP {name}", Estimate(value=value, unit=unit, error=error, is_additive=True)


def _logarithmic(time_s: Seconds, *errors: float) -> Estimate:
    return Estimate(value=time_s, unit="s", error=max(SMALLEST_ERROR, math.hypot(*errors)))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


#: Of the parameters that are called changed, this share may be chance.
FALSE_DISCOVERY_RATE: Final = 0.05
#: Predictions that are compared, beside all ranks that were measured together.
_DEVICE_COUNTS: Final = (1, 8, 64)
#: Facts that differ between any two runs; older profiles hold some that are no longer asked for.
_VOLATILE: Final = (
    *("time_utc", "command_line", "gpu_processes", "cpu.load_average_1min", "cpu.busy_cores"),
    *("cpu.steal", "cpu.frequency_hz", "memory.available_bytes", "memory.swap_used_bytes"),
)


@checks_arguments()
def compare_profiles(old: MeasuredMachine, new: MeasuredMachine) -> ProfileDiffDocument:
    """Compare every parameter that both hold.

    Differences are judged against the uncertainty of both sides, by Student's t with the rounds of both
    less two degrees of freedom, and all together by the rule of Benjamini and Hochberg (J. R. Stat.
    Soc. B 57(1), 1995): of the parameters called changed, at most this share is chance, on average.

    Raises ``IncomparableRuns`` if they have no parameter in common.
    """
    before, after = estimates(old), estimates(new)
    predictions = tuple(_predictions(old, new))
    shared = [name for name in before if name in after]
    if not shared:
        raise IncomparableRuns("diff: the profiles must hold a common parameter, got none")
    freedom = max(2, old.num_rounds + new.num_rounds - 2)
    return ProfileDiffDocument(
        command_line=asked_by(),
        old_digest=old.digest,
        new_digest=new.digest,
        false_discovery_rate=FALSE_DISCOVERY_RATE,
        facts=changed_facts(old.environment, new.environment),
        differences=_differences(before, after, shared, freedom),
        missing=tuple(
            [f"only in the old: {name}" for name in before if name not in after]
            + [f"only in the new: {name}" for name in after if name not in before]
        ),
        predictions=predictions,
        caveats=tuple(_caveats(old, new, is_told=bool(predictions))),
    )


def _differences(
    before: Mapping[str, Estimate],
    after: Mapping[str, Estimate],
    names: Sequence[str],
    freedom: int,
) -> tuple[Difference, ...]:
    from scipy.stats import false_discovery_control, t  # noqa: PLC0415 - a second, for every command

    scores = np.array([score(before[name], after[name]) for name in names])
    adjusted = false_discovery_control(2 * t.sf(np.abs(scores), freedom))
    found = [
        Difference(
            what=name,
            unit=before[name].unit,
            old=before[name].value,
            new=after[name].value,
            error=math.hypot(before[name].error, after[name].error),
            is_additive=before[name].is_additive,
            z=float(z),
            adjusted_p=float(min(1.0, p)),
            is_change=bool(p <= FALSE_DISCOVERY_RATE),
        )
        for name, z, p in zip(names, scores, adjusted, strict=True)
    ]
    return tuple(sorted(found, key=lambda entry: (entry.adjusted_p, -abs(entry.z))))


def score(old: Estimate, new: Estimate) -> float:
    """Difference over its standard error; positive: more than before."""
    error = math.hypot(old.error, new.error)
    difference = (
        new.value - old.value if old.is_additive else math.log(new.value) - math.log(old.value)
    )
    return difference / error if difference else 0.0


def changed_facts(
    old: Mapping[str, object], new: Mapping[str, object]
) -> dict[str, tuple[str, str]]:
    """Facts of the environment that differ, by their path; what changes with every run is left out."""
    before, after = ({path: str(fact) for path, fact in leaves(each)} for each in (old, new))
    return {
        path: (before.get(path, "-"), after.get(path, "-"))
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path) and not path.startswith(_VOLATILE)
    }


def _predictions(old: MeasuredMachine, new: MeasuredMachine) -> Iterator[MovedPrediction]:
    together = min(old.max_world_size, new.max_world_size)
    counts = sorted({*_DEVICE_COUNTS, together}) if together > 1 else [1]
    for entry in old.workloads:
        other = new.workload(entry.workload.name)
        batch = _shared_batch(entry, other)
        if other is None or batch is None or _trained(other) != _trained(entry):
            continue
        for layout in scaled_layouts(counts, scaling="weak", batch=batch):
            [old_s] = steps_s([Question(machine=old, workload=entry, layout=layout)])
            [new_s] = steps_s([Question(machine=new, workload=other, layout=layout)])
            setting = RunSetting.of(entry.workload.name, layout)
            ratio = interval(np.divide(*reversed(unpaired(old_s, new_s, seed=setting.label))))
            yield MovedPrediction(
                what=f"{setting.workload}, {setting.world_size} x {setting.micro_batch}",
                old_step_s=interval(old_s),
                new_step_s=interval(new_s),
                ratio=ratio,
                is_moved=not ratio.holds(1),
            )


def _trained(entry: MeasuredWorkload) -> Workload:
    """What is trained, without what its machine measured: when gradients are ready."""
    workload = entry.workload
    parameters = (dataclasses.replace(each, ready_fraction=1.0) for each in workload.parameters)
    ordered = tuple(sorted(parameters, key=lambda each: each.name))
    return dataclasses.replace(workload, parameters=ordered)


def _shared_batch(old: MeasuredWorkload, new: MeasuredWorkload | None) -> int | None:
    """The middle one of the micro-batches that both calibrated."""
    if new is None:
        return None
    known = {int(point.at) for point in new.phases[0].forward}
    shared = sorted(int(p.at) for p in old.phases[0].forward if int(p.at) in known)
    return shared[len(shared) // 2] if shared else None


def _caveats(old: MeasuredMachine, new: MeasuredMachine, *, is_told: bool) -> Iterator[str]:
    if not is_told:
        yield "no step is compared: the profiles hold no workload that is the same at a common batch"
    if old.origin.fingerprint != new.origin.fingerprint:
        yield "the profiles are of different machines"
    if min(old.num_rounds, new.num_rounds) < 3:
        yield "a profile of fewer than three rounds hardly knows its own noise"
    yield (
        "kernels alone have no error of their own: they are judged by how much the machine's speed "
        "varied between repetitions"
    )

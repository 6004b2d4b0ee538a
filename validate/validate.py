"""Use case: predict held-out settings, run them for real, and print the tool's own error.

Never fits: the profile is what it is. Predictions and gates are on disk before the first run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.campaign import Campaign, Progress, measure
from calibrate.environment import describe_environment
from calibrate.fit.steps import Repetition, by_setting, estimate, repetition, to_speed
from calibrate.launch import Launcher
from calibrate.placement import (
    Placement,
    place,
    provenance,
    recorded_conditions,
    refuse_other_machine,
)
from calibrate.topology import LaunchFlags
from perfmodel.answer.answer import answer
from perfmodel.answer.measured import check_machine, interval, timed_workload
from perfmodel.answer.question import Question
from perfmodel.documents.base import file_sha256
from perfmodel.documents.observation import StepObservation, read_observations, steal_share
from perfmodel.documents.verdicts import (
    ComparedSetting,
    ComparedSpeedup,
    Repeat,
    ValidationDocument,
)
from perfmodel.errors import MeasurementFailed, UsageError, refuse_unknown
from perfmodel.layout.layout import Synchronisation
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.measured import ASSUMED_SENSITIVITY, MeasuredMachine
from perfmodel.statistics.interval import Interval
from perfmodel.units import Seconds
from validate.holdout import (
    BUDGETS,
    calibrated_setting,
    holdout_settings,
    repeated_settings,
    rounds,
)
from validate.judging import (
    ProfileRequest,
    Tolerances,
    fraction,
    passed,
    summarise,
    summarise_any,
)

VALIDATION: Final = "validation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRequest(ProfileRequest):
    """What the user asked for."""

    flags: LaunchFlags = field(default_factory=LaunchFlags)
    """Nodes, where the profile is of several; ranks per node are those of the profile."""
    earlier: ValidationDocument | None = None
    """Errors of an earlier validation, which widen the intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What was predicted before anything was measured."""

    steps_s: Mapping[RunSetting, Interval]
    speedups: Mapping[RunSetting, Interval]


def validate(
    request: ValidationRequest, launcher: Launcher, *, on_progress: Callable[[Progress], None]
) -> ValidationDocument:
    """Run held-out settings in fresh processes and compare.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine.
    """
    refuse_unknown("--budget", request.budget, BUDGETS)
    budget = BUDGETS[request.budget]
    profile = request.profile
    here = place(
        describe_environment(),
        profile.device_kind,
        replace(request.flags, nproc_per_node=profile.ranks_per_node),
        conditions=recorded_conditions(profile),
    )
    _refuse_other_nodes(profile, here)
    settings = holdout_settings(
        profile, num_batches=budget.num_batches, goes_beyond=budget.goes_beyond
    )
    predicted = predict(profile, settings, earlier=request.earlier)
    observations = measure(
        Campaign(
            folder=request.folder,
            plan=_plan(request, predicted),
            rounds=rounds(
                settings, repeated=repeated_settings(profile), budget=budget, seed=request.seed
            ),
            placement=here,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    comparison = compare_observations(profile, predicted, observations)
    document = _document(request, comparison, observations)
    # Every node judges the same shared observations; one of them writes.
    if here.topology.node_rank == 0:
        document.write(request.folder / VALIDATION)
    return document


def predict(
    profile: MeasuredMachine,
    settings: tuple[RunSetting, ...],
    *,
    earlier: ValidationDocument | None = None,
) -> Predicted:
    """Predict every setting, and the speed-up of those with several ranks."""
    check_machine(profile, earlier, None)
    steps = {
        setting: answer(
            Question(
                machine=profile,
                workload=timed_workload(profile, setting.workload),
                layout=setting.layout,
                validation=earlier,
            )
        )
        for setting in settings
    }
    speedups = {}
    for setting, step in steps.items():
        baseline = baseline_of(setting)
        if setting.world_size > 1 and baseline in steps:
            ratio = setting.global_batch / baseline.global_batch
            speedups[setting] = interval(ratio * steps[baseline].step_s / step.step_s)
    return Predicted(
        steps_s={setting: interval(step.step_s) for setting, step in steps.items()},
        speedups=speedups,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting, measured now."""

    value_s: Seconds
    """At the machine speed of the calibration."""
    raw_s: Seconds
    relative_error: float
    num_repetitions: int


def measured(repetitions: Sequence[Repetition], *, profile: MeasuredMachine) -> Measured:
    """Typical step over repetitions, as the clock showed it and at the machine speed of the calibration.

    Each repetition is brought to that speed as far as the workload followed it during calibration.
    """
    workload = profile.workload(repetitions[0].setting.workload)
    sensitivity = workload.speed_sensitivity if workload is not None else ASSUMED_SENSITIVITY
    factors = [
        to_speed(v, speed_probe_s=profile.speed_probe_s, sensitivity=sensitivity)
        for v in repetitions
    ]
    steps_s = [v.step_s for v in repetitions]
    at_speed = estimate([s * factor for s, factor in zip(steps_s, factors, strict=True)])
    return Measured(
        value_s=at_speed.value_s,
        raw_s=estimate(steps_s).value_s,
        relative_error=at_speed.relative_error,
        num_repetitions=len(repetitions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows of a validation."""

    settings: tuple[ComparedSetting, ...]
    speedups: Mapping[RunSetting, ComparedSpeedup]
    repeats: tuple[Repeat, ...]
    machine_slowdown: float
    steal: float


def compare_observations(
    profile: MeasuredMachine, predicted: Predicted, observations: Path
) -> Comparison:
    """Put every prediction beside what was measured."""
    entries = read_observations(observations)
    repetitions = by_setting(
        repetition(entry) for entry in entries if isinstance(entry, StepObservation)
    )
    missing = [setting.label for setting in predicted.steps_s if setting not in repetitions]
    if missing:
        raise MeasurementFailed(
            f"{observations}: {len(missing)} predicted settings were not run, such as {missing[0]}; "
            "continue with --resume"
        )
    found = {setting: measured(group, profile=profile) for setting, group in repetitions.items()}
    slowdowns = [
        entry.speed_probe_s / profile.speed_probe_s[setting.world_size]
        for setting, group in repetitions.items()
        for entry in group
    ]
    return Comparison(
        settings=tuple(
            compare_setting(setting, predicted_s, found[setting], profile=profile)
            for setting, predicted_s in predicted.steps_s.items()
        ),
        speedups={
            setting: compare_speedup(setting, speedup, found)
            for setting, speedup in predicted.speedups.items()
        },
        repeats=tuple(
            compare_repeat(setting, step_s, found[setting])
            for setting, step_s in _calibrated_steps(profile).items()
            if setting in found
        ),
        machine_slowdown=float(np.median(slowdowns)),
        steal=steal_share(entries),
    )


def compare_setting(
    setting: RunSetting, predicted_s: Interval, found: Measured, *, profile: MeasuredMachine
) -> ComparedSetting:
    """One row of the table."""
    return ComparedSetting(
        setting=setting,
        predicted_s=predicted_s,
        measured_s=found.value_s,
        measured_raw_s=found.raw_s,
        num_repetitions=found.num_repetitions,
        measured_relative_error=found.relative_error,
        signed_error=predicted_s.signed_error(found.value_s),
        signed_error_raw=predicted_s.signed_error(found.raw_s),
        is_covered=predicted_s.holds(found.value_s),
        is_covered_raw=predicted_s.holds(found.raw_s),
        is_extrapolated=is_extrapolated(setting, profile),
    )


def is_extrapolated(setting: RunSetting, profile: MeasuredMachine) -> bool:
    """Whether a micro-batch lies beyond those that were calibrated for its workload."""
    workload = profile.workload(setting.workload)
    if workload is None:
        return True
    batches = [point.at for point in workload.phases[0].forward]
    return not min(batches) <= setting.micro_batch <= max(batches)


def baseline_of(setting: RunSetting) -> RunSetting:
    """The same micro-batch on one device on its own, every step an optimizer step."""
    return replace(
        setting,
        world_size=1,
        accumulation=1,
        synchronisation=Synchronisation.NONE,
        bucket_cap_mb=None,
    )


def compare_speedup(
    setting: RunSetting, predicted: Interval, found: Mapping[RunSetting, Measured]
) -> ComparedSpeedup:
    """Throughput over that of the baseline, predicted and measured."""
    baseline = baseline_of(setting)
    ratio = setting.global_batch / baseline.global_batch
    speedup = ratio * found[baseline].value_s / found[setting].value_s
    speedup_raw = ratio * found[baseline].raw_s / found[setting].raw_s
    return ComparedSpeedup(
        workload=setting.workload,
        world_size=setting.world_size,
        micro_batch=setting.micro_batch,
        accumulation=setting.accumulation,
        bucket_cap_mb=setting.bucket_cap_mb,
        predicted=predicted,
        measured=speedup,
        measured_raw=speedup_raw,
        signed_error=predicted.signed_error(speedup),
        signed_error_raw=predicted.signed_error(speedup_raw),
    )


def compare_repeat(setting: RunSetting, calibrated_s: Seconds, found: Measured) -> Repeat:
    """A calibrated setting, then and now."""
    return Repeat(
        setting=setting,
        calibrated_s=calibrated_s,
        measured_s=found.value_s,
        measured_raw_s=found.raw_s,
        signed_error=calibrated_s / found.value_s - 1,
        signed_error_raw=calibrated_s / found.raw_s - 1,
    )


def _calibrated_steps(profile: MeasuredMachine) -> dict[RunSetting, float]:
    steps_s = {calibrated_setting(step): step.step_s for step in profile.steps}
    return {setting: steps_s[setting] for setting in repeated_settings(profile)}


def _document(
    request: ValidationRequest, comparison: Comparison, observations: Path
) -> ValidationDocument:
    rows = comparison.settings
    # Accuracy is promised inside the calibrated range; beyond it the intervals have to hold.
    beyond = [row for row in rows if row.is_extrapolated]
    judged = [row for row in rows if not row.is_extrapolated] or beyond
    speedups = comparison.speedups
    speedups_beyond = [speedups[row.setting] for row in beyond if row.setting in speedups]
    speedups_judged = [speedups[row.setting] for row in judged if row.setting in speedups]
    summary = summarise([row.signed_error for row in judged])
    speedup_summary = summarise_any([row.signed_error for row in speedups_judged])
    coverage = fraction(row.is_covered for row in rows)
    gates = Tolerances().judge(summary=summary, speedups=speedup_summary, coverage=coverage)
    names = dict.fromkeys(row.setting.workload for row in judged)
    return ValidationDocument(
        schema_version=ValidationDocument.current_version,
        provenance=provenance(describe_environment(), seed=request.seed),
        profile_digest=request.profile.digest,
        observations_sha256=file_sha256(observations),
        machine_slowdown=comparison.machine_slowdown,
        steal=comparison.steal,
        settings=rows,
        speedups=tuple(speedups.values()),
        repeats=comparison.repeats,
        summary=summary,
        summary_extrapolated=summarise_any([row.signed_error for row in beyond]),
        summary_raw=summarise([row.signed_error_raw for row in judged]),
        summary_by_workload={
            name: summarise([row.signed_error for row in judged if row.setting.workload == name])
            for name in names
        },
        speedup_summary=speedup_summary,
        speedup_summary_extrapolated=summarise_any([row.signed_error for row in speedups_beyond]),
        speedup_summary_raw=summarise_any([row.signed_error_raw for row in speedups_judged]),
        noise_floor=summarise_any([repeat.signed_error for repeat in comparison.repeats]),
        coverage=coverage,
        coverage_raw=fraction(row.is_covered_raw for row in rows),
        gates=gates,
        passed=passed(gates),
    )


def _plan(request: ValidationRequest, predicted: Predicted) -> dict[str, object]:
    """What is measured, promised and predicted; written before the first run."""
    return {
        "stage": "validate",
        "budget": request.budget,
        "seed": request.seed,
        "profile_digest": request.profile.digest,
        "gates": asdict(Tolerances()),
        "predicted_s": {
            setting.label: asdict(found) for setting, found in predicted.steps_s.items()
        },
        "predicted_speedups": {
            setting.label: asdict(found) for setting, found in predicted.speedups.items()
        },
    }


def _refuse_other_nodes(profile: MeasuredMachine, here: Placement) -> None:
    topology = here.topology
    if topology.num_nodes != profile.num_nodes:
        raise UsageError(
            f"--nnodes: must be {profile.num_nodes}, as in the profile, got {topology.num_nodes}; "
            "start the command once per node with --nnodes, --node-rank and --master-addr"
        )
    # The profile names its first node.
    if topology.node_rank == 0:
        refuse_other_machine(profile, here.fingerprint)

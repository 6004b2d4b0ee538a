"""Use case: predict held-out settings, run them for real, and print the tool's own error.

Never fits: the profile is what it is. Predictions and gates are on disk before the first run.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.campaign import Campaign, Progress, measure
from calibrate.environment import describe_environment
from calibrate.fit.steps import by_setting, repetition
from calibrate.launch import Launcher
from calibrate.placement import (
    Placement,
    place,
    provenance,
    recorded_conditions,
    refuse_other_machine,
)
from calibrate.topology import LaunchFlags
from perfmodel.documents.base import file_sha256
from perfmodel.documents.observation import (
    RunSetting,
    StepObservation,
    read_observations,
    steal_share,
)
from perfmodel.documents.verdicts import (
    ComparedSetting,
    ComparedSpeedup,
    Repeat,
    ValidationDocument,
)
from perfmodel.errors import MeasurementFailed, UsageError, refuse_unknown
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.predictor import Predictor, interval
from perfmodel.statistics.interval import Interval
from validate import compare, gates
from validate.compare import fraction, summarise, summarise_any
from validate.holdout import BUDGETS, holdout_settings, repeated_settings, rounds
from validate.request import ProfileRequest

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
    predictor = Predictor(profile, validation=earlier)
    steps = {
        setting: predictor.step(predictor.workload(setting.workload), setting.layout)
        for setting in settings
    }
    speedups = {}
    for setting, step in steps.items():
        baseline = compare.baseline_of(setting)
        if setting.world_size > 1 and baseline in steps:
            ratio = setting.global_batch / baseline.global_batch
            speedups[setting] = interval(ratio * steps[baseline].step_s / step.step_s)
    return Predicted(
        steps_s={setting: interval(step.step_s) for setting, step in steps.items()},
        speedups=speedups,
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
    """Put every prediction beside what was measured.

    Raises
    ------
    MeasurementFailed
        If a predicted setting was never run.
    """
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
    found = {
        setting: compare.measured(group, profile=profile) for setting, group in repetitions.items()
    }
    calibrated_s = {
        setting: step_s
        for setting, step_s in _calibrated_steps(profile).items()
        if setting in found
    }
    slowdowns = [
        entry.speed_probe_s / profile.speed_probe_s[setting.world_size]
        for setting, group in repetitions.items()
        for entry in group
    ]
    return Comparison(
        settings=tuple(
            compare.compare_setting(setting, predicted_s, found[setting], profile=profile)
            for setting, predicted_s in predicted.steps_s.items()
        ),
        speedups={
            setting: compare.compare_speedup(setting, predicted, found)
            for setting, predicted in predicted.speedups.items()
        },
        repeats=tuple(
            compare.compare_repeat(setting, step_s, found[setting])
            for setting, step_s in calibrated_s.items()
        ),
        machine_slowdown=float(np.median(slowdowns)),
        steal=steal_share(entries),
    )


def _calibrated_steps(profile: MeasuredMachine) -> dict[RunSetting, float]:
    repeats = repeated_settings(profile)
    steps_s = {
        (s.workload, s.world_size, s.micro_batch, s.synchronisation, s.bucket_cap_mb): s.step_s
        for s in profile.steps
    }
    return {
        setting: steps_s[
            setting.workload,
            setting.world_size,
            setting.micro_batch,
            setting.synchronisation.value,
            setting.bucket_cap_mb,
        ]
        for setting in repeats
    }


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
    verdict = gates.judge(
        gates.Tolerances(), summary=summary, speedups=speedup_summary, coverage=coverage
    )
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
        gates=verdict,
        passed=gates.passed(verdict),
    )


def _plan(request: ValidationRequest, predicted: Predicted) -> dict[str, object]:
    """What is measured, promised and predicted; written before the first run."""
    tolerances = gates.Tolerances()
    return {
        "stage": "validate",
        "budget": request.budget,
        "seed": request.seed,
        "profile_digest": request.profile.digest,
        "gates": {name: getattr(tolerances, name) for name in type(tolerances).__slots__},
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

"""Use case: predict held-out settings, run them for real, and print the tool's own error.

Never fits: the profile is what it is. Predictions and gates are on disk before the first run.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from calibrate.campaign import (
    OBSERVATIONS,
    PLAN,
    Campaign,
    Progress,
    is_too_large,
    measure,
    read_plan,
    too_large_of,
)
from calibrate.environment import (
    Placement,
    describe_environment,
    place,
    provenance,
    recorded_conditions,
    refuse_other_machine,
)
from calibrate.launch import Launcher
from calibrate.summary import Estimate
from calibrate.topology import LaunchFlags
from perfmodel.answer import Question, timed_workload
from perfmodel.answer.answer import answer
from perfmodel.answer.measured import interval
from perfmodel.documents import Provenance, Record, checked
from perfmodel.documents.observation import failures, read_observations, steal_share
from perfmodel.documents.verdicts import (
    ComparedSetting,
    ComparedSpeedup,
    FailedModel,
    Repeat,
    ValidationDocument,
)
from perfmodel.errors import InvalidDocument, MeasurementFailed, UsageError, refuse_unknown
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.statistics import Interval
from validate.judging import (
    BUDGETS,
    HoldoutBudget,
    ProfileRequest,
    Tolerances,
    calibrated_setting,
    compared,
    fraction,
    holdout_settings,
    judged,
    launches,
    measured_steps,
    repeated_settings,
    rounds,
    summarise,
    summarise_any,
    wait_for_another_occasion,
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
    profile = request.profile
    budget = HoldoutBudget.of(request.budget, profile.device_kind)
    here = place(
        describe_environment(profile.truth),
        profile.device_kind,
        replace(request.flags, nproc_per_node=profile.ranks_per_node),
        conditions=recorded_conditions(profile),
    )
    _refuse_other_nodes(profile, here)
    settings = holdout_settings(
        profile, num_batches=budget.num_batches, goes_beyond=budget.goes_beyond
    )
    predicted = predict(
        profile, settings, earlier=request.earlier, num_repetitions=budget.num_repetitions
    )
    tolerances = _tolerances(request, len(settings))
    wait_for_another_occasion(request, on_progress)
    runs = rounds(settings, repeated=repeated_settings(profile), budget=budget, seed=request.seed)
    observations = measure(
        Campaign(
            folder=request.folder,
            plan=_plan(request, predicted, tolerances),
            rounds=launches(runs, request),
            placement=here,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    comparison = compare_observations(profile, predicted, observations)
    made = provenance(describe_environment(profile.truth), seed=request.seed)
    document = _document(request, comparison, observations, tolerances, made)
    # Every node judges the same shared observations; one of them writes.
    if here.topology.node_rank == 0:
        document.write(request.folder / VALIDATION)
    return document


def predict(
    profile: MeasuredMachine,
    settings: tuple[RunSetting, ...],
    *,
    earlier: ValidationDocument | None = None,
    num_repetitions: int = 1,
) -> Predicted:
    """Predict every setting as the mean of its runs, and the speed-up of those with several ranks."""
    steps = {
        setting: answer(
            Question(
                machine=profile,
                workload=timed_workload(profile, setting.workload),
                layout=setting.layout,
                validation=earlier,
                num_repetitions=num_repetitions,
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
class Comparison:
    """All rows of a validation."""

    settings: tuple[ComparedSetting, ...]
    speedups: Mapping[RunSetting, ComparedSpeedup]
    repeats: tuple[Repeat, ...]
    steal: float
    too_large: tuple[str, ...]
    """Settings that memory did not hold."""
    failed: tuple[FailedModel, ...]
    """Settings of which every run failed."""


def compare_observations(
    profile: MeasuredMachine, predicted: Predicted, observations: Path
) -> Comparison:
    """Put every prediction beside what was measured."""
    entries = read_observations(observations)
    found = measured_steps(entries)
    # What memory does not hold is no failure of the campaign, nor of a prediction of time.
    known = too_large_of(entries)
    absent = [setting for setting in predicted.steps_s if setting not in found]
    too_large = tuple(setting.label for setting in absent if is_too_large(setting, known))
    reasons = {entry.setting: entry.reason for entry in failures(entries)}
    failed = tuple(
        FailedModel(name=setting.label, reason=reasons[setting])
        for setting in absent
        if setting in reasons and setting.label not in too_large
    )
    told = {*too_large, *(entry.name for entry in failed)}
    missing = [setting.label for setting in absent if setting.label not in told]
    if missing or len(absent) == len(predicted.steps_s):
        why = f" ({failed[0].reason})" if failed else ""
        raise MeasurementFailed(
            f"{observations}: {len(missing or absent)} predicted settings were not run, such as "
            f"{(missing or [one.label for one in absent])[0]}{why}; continue with --resume"
        )
    calibrated_s = {calibrated_setting(step): step.step_s for step in profile.steps}
    return Comparison(
        settings=tuple(
            ComparedSetting(
                **compared(setting, predicted_s, found[setting]),
                is_extrapolated=is_extrapolated(setting, profile),
            )
            for setting, predicted_s in predicted.steps_s.items()
            if setting in found
        ),
        speedups={
            setting: compare_speedup(setting, speedup, found)
            for setting, speedup in predicted.speedups.items()
            if setting in found and baseline_of(setting) in found
        },
        repeats=tuple(
            Repeat(
                setting=setting,
                calibrated_s=calibrated_s[setting],
                measured_s=found[setting].value_s,
                signed_error=calibrated_s[setting] / found[setting].value_s - 1,
            )
            for setting in repeated_settings(profile)
            if setting in found
        ),
        steal=steal_share(entries),
        too_large=too_large,
        failed=failed,
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
    setting: RunSetting, predicted: Interval, found: Mapping[RunSetting, Estimate]
) -> ComparedSpeedup:
    """Throughput over that of the baseline, predicted and measured."""
    baseline = baseline_of(setting)
    ratio = setting.global_batch / baseline.global_batch
    speedup = ratio * found[baseline].value_s / found[setting].value_s
    return ComparedSpeedup(
        workload=setting.workload,
        world_size=setting.world_size,
        micro_batch=setting.micro_batch,
        accumulation=setting.accumulation,
        bucket_cap_mb=setting.bucket_cap_mb,
        predicted=predicted,
        measured=speedup,
        signed_error=predicted.signed_error(speedup),
    )


def _tolerances(request: ValidationRequest, num_settings: int) -> Tolerances:
    """Those of the standard budget, or relative to what the machine repeats itself to."""
    if request.budget != "quick":
        return Tolerances()
    return Tolerances.of_quick(
        request.profile,
        num_repetitions=HoldoutBudget.of(
            request.budget, request.profile.device_kind
        ).num_repetitions,
        num_settings=num_settings,
    )


def _document(
    request: ValidationRequest,
    comparison: Comparison,
    observations: Path,
    tolerances: Tolerances,
    made: Provenance,
) -> ValidationDocument:
    rows = comparison.settings
    # Accuracy is promised inside the calibrated range; beyond it the intervals have to hold.
    beyond = [row for row in rows if row.is_extrapolated]
    inside = [row for row in rows if not row.is_extrapolated] or beyond
    speedups = comparison.speedups
    speedups_beyond = [speedups[row.setting] for row in beyond if row.setting in speedups]
    speedups_inside = [speedups[row.setting] for row in inside if row.setting in speedups]
    summary = summarise([row.signed_error for row in inside])
    speedup_summary = summarise_any([row.signed_error for row in speedups_inside])
    coverage = fraction(row.is_covered for row in rows)
    noise_floor = summarise_any([repeat.signed_error for repeat in comparison.repeats])
    gates = tolerances.judge(
        summary=summary, speedups=speedup_summary, coverage=coverage, noise=noise_floor
    )
    names = dict.fromkeys(row.setting.workload for row in inside)
    return ValidationDocument(
        **judged(request, observations, gates),
        provenance=made,
        steal=comparison.steal,
        too_large=comparison.too_large,
        failed=comparison.failed,
        settings=rows,
        speedups=tuple(speedups.values()),
        repeats=comparison.repeats,
        summary=summary,
        summary_extrapolated=summarise_any([row.signed_error for row in beyond]),
        summary_by_workload={
            name: summarise([row.signed_error for row in inside if row.setting.workload == name])
            for name in names
        },
        speedup_summary=speedup_summary,
        speedup_summary_extrapolated=summarise_any([row.signed_error for row in speedups_beyond]),
        noise_floor=noise_floor,
        expected_noise=tolerances.expected_noise,
        coverage=coverage,
    )


def _plan(
    request: ValidationRequest, predicted: Predicted, tolerances: Tolerances
) -> dict[str, object]:
    """What is measured, promised and predicted; written before the first run."""
    return {
        "stage": "validate",
        "budget": request.budget,
        "seed": request.seed,
        "profile_digest": request.profile.digest,
        "gates": asdict(tolerances),
        "predicted_s": {
            setting.label: asdict(found) for setting, found in predicted.steps_s.items()
        },
        "predicted_speedups": {
            setting.label: asdict(found) for setting, found in predicted.speedups.items()
        },
    }


class _Plan(Record):
    """What a validation wrote down before its first run, as ``_plan`` does."""

    stage: Literal["validate"]
    budget: Literal["quick", "standard"]
    seed: int
    profile_digest: str
    gates: Tolerances
    predicted_s: dict[str, Interval]
    predicted_speedups: dict[str, Interval]


def judge_recorded(profile: MeasuredMachine, folder: Path) -> ValidationDocument:
    """Compare what a validation predicted with what it measured, wherever it ran; measures nothing.

    Raises
    ------
    InvalidDocument
        If the folder holds no validation of this profile, or one of another version.
    MeasurementFailed
        If a setting has not run yet.
    """
    where = folder / PLAN
    plan = checked(read_plan(folder), _Plan, where=where)
    if plan.profile_digest != profile.digest:
        raise InvalidDocument(
            f"{where}: must be of the profile beside it, got a validation of another one; fetch both again"
        )
    budget = HoldoutBudget.of(plan.budget, profile.device_kind)
    settings = {
        setting.label: setting
        for setting in holdout_settings(
            profile, num_batches=budget.num_batches, goes_beyond=budget.goes_beyond
        )
    }
    if unknown := sorted({*plan.predicted_s, *plan.predicted_speedups} - {*settings}):
        raise InvalidDocument(
            f"{where}: must hold settings of this version, got {unknown[0]}; judge with the version that ran it"
        )
    predicted = Predicted(
        steps_s={settings[label]: found for label, found in plan.predicted_s.items()},
        speedups={settings[label]: found for label, found in plan.predicted_speedups.items()},
    )
    observations = folder / OBSERVATIONS
    request = ValidationRequest(profile=profile, folder=folder, budget=plan.budget, seed=plan.seed)
    made = Provenance.of_answer(host_fingerprint=profile.origin.fingerprint, seed=plan.seed)
    comparison = compare_observations(profile, predicted, observations)
    return _document(request, comparison, observations, plan.gates, made)


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

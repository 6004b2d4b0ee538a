"""Use case: predict held-out settings, run them for real, and print the tool's own error.

Never fits: the profile is what it is. Predictions and gates are on disk before the first run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from calibrate.launch import Launcher, LaunchFlags
from calibrate.summary import Estimate, calibrated_setting, typical
from perfmodel.answer import Question, interval, timed_workload
from perfmodel.answer.answer import answer
from perfmodel.documents import Provenance, Record, checked
from perfmodel.documents.observation import (
    Observation,
    failures,
    read_observations,
    steal_share,
)
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
from perfmodel.units import Seconds
from validate.judging import (
    BUDGETS,
    HoldoutBudget,
    ProfileRequest,
    Tolerances,
    compared,
    holdout_settings,
    judged,
    launches,
    measured_runs,
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


class Plan(Record):
    """What a validation writes down before its first run; steps and speed-ups by the label of their setting."""

    stage: Literal["validate"] = "validate"
    budget: Literal["quick", "standard"]
    seed: int
    profile_digest: str
    gates: Tolerances
    predicted_s: dict[str, Interval]
    predicted_speedups: dict[str, Interval]
    intervals_of: Literal["runs", "means"] = "means"
    """What its intervals tell of; where a plan does not say so, of means over runs, which are narrower."""


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
    steps_s, speedups = predict(profile, settings, earlier=request.earlier)
    plan = Plan.model_validate(
        {
            "budget": request.budget,
            "seed": request.seed,
            "profile_digest": profile.digest,
            "gates": Tolerances()
            if request.budget != "quick"
            else Tolerances.of_quick(
                profile, num_repetitions=budget.num_repetitions, num_settings=len(settings)
            ),
            "predicted_s": steps_s,
            "predicted_speedups": speedups,
            "intervals_of": "runs",
        }
    )
    wait_for_another_occasion(request, on_progress)
    runs = rounds(settings, repeated=repeated_settings(profile), budget=budget, seed=request.seed)
    observations = measure(
        Campaign(
            folder=request.folder,
            plan=plan.model_dump(mode="json"),
            rounds=launches(runs, request),
            placement=here,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    made = provenance(describe_environment(profile.truth), seed=request.seed)
    document = judge(profile, plan, settings, observations, made)
    # Every node judges the same shared observations; one of them writes.
    if here.topology.node_rank == 0:
        document.write(request.folder / VALIDATION)
    return document


def predict(
    profile: MeasuredMachine,
    settings: Sequence[RunSetting],
    *,
    earlier: ValidationDocument | None = None,
) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """By label, the step of every setting [s], and the speed-up of those with several ranks."""
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
            speedups[setting.label] = interval(ratio * steps[baseline].step_s / step.step_s)
    return {setting.label: interval(step.step_s) for setting, step in steps.items()}, speedups


def judge(
    profile: MeasuredMachine,
    plan: Plan,
    settings: Sequence[RunSetting],
    observations: Path,
    made: Provenance,
) -> ValidationDocument:
    """Put every prediction beside what was measured; measures nothing.

    Accuracy is promised inside the calibrated range; beyond it the intervals have to hold.

    Raises
    ------
    MeasurementFailed
        If a setting has not run yet.
    """
    entries = read_observations(observations)
    runs = measured_runs(entries)
    found = measured_steps(runs)
    too_large, failed = _not_run([one for one in settings if one not in found], entries)
    rows = tuple(
        ComparedSetting(
            **compared(setting, plan.predicted_s[setting.label], [*runs[setting].values()]),
            is_extrapolated=is_extrapolated(setting, profile),
        )
        for setting in settings
        if setting in found
    )
    told = {*too_large, *(entry.name for entry in failed)}
    missing = [one.label for one in settings if one not in found and one.label not in told]
    if missing or not rows:
        why = f" ({failed[0].reason})" if failed else ""
        labels = missing or [setting.label for setting in settings]
        raise MeasurementFailed(
            f"{observations}: {len(labels)} predicted settings were not run, such as {labels[0]}{why}; "
            "continue with --resume"
        )
    repeats = _repeats(profile, found)
    speedups = {
        setting: compare_speedup(setting, plan.predicted_speedups[setting.label], runs)
        for setting in settings
        if setting.label in plan.predicted_speedups and {setting, baseline_of(setting)} <= {*runs}
    }
    beyond = [row for row in rows if row.is_extrapolated]
    inside = [row for row in rows if not row.is_extrapolated] or beyond
    speedups_inside, speedups_beyond = (
        summarise_any([speedups[r.setting].signed_error for r in part if r.setting in speedups])
        for part in (inside, beyond)
    )
    summary = summarise([row.signed_error for row in inside])
    noise_floor = summarise_any([repeat.signed_error for repeat in repeats])
    return ValidationDocument(
        **judged(
            profile,
            observations,
            plan.gates.judge(
                summary=summary, speedups=speedups_inside, rows=rows, noise=noise_floor
            ),
            rows,
        ),
        provenance=made,
        steal=steal_share(entries),
        too_large=too_large,
        failed=failed,
        settings=rows,
        speedups=tuple(speedups.values()),
        repeats=repeats,
        summary=summary,
        summary_extrapolated=summarise_any([row.signed_error for row in beyond]),
        summary_by_workload={
            name: summarise([row.signed_error for row in inside if row.setting.workload == name])
            for name in dict.fromkeys(row.setting.workload for row in inside)
        },
        speedup_summary=speedups_inside,
        speedup_summary_extrapolated=speedups_beyond,
        noise_floor=noise_floor,
        expected_noise=plan.gates.expected_noise,
    )


def _repeats(profile: MeasuredMachine, found: Mapping[RunSetting, Estimate]) -> tuple[Repeat, ...]:
    """Calibrated settings beside their runs of today."""
    calibrated_s = {calibrated_setting(step): step.step_s for step in profile.steps}
    return tuple(
        Repeat(
            setting=setting,
            calibrated_s=calibrated_s[setting],
            measured_s=found[setting].value_s,
            signed_error=calibrated_s[setting] / found[setting].value_s - 1,
        )
        for setting in repeated_settings(profile)
        if setting in found
    )


def _not_run(
    absent: Sequence[RunSetting], entries: Sequence[Observation]
) -> tuple[tuple[str, ...], tuple[FailedModel, ...]]:
    """Labels of what memory does not hold, no failure of a prediction of time; and what failed in every run."""
    known = too_large_of(entries)
    too_large = tuple(setting.label for setting in absent if is_too_large(setting, known))
    reasons = {entry.setting: entry.reason for entry in failures(entries)}
    return too_large, tuple(
        FailedModel(name=setting.label, reason=reasons[setting])
        for setting in absent
        if setting in reasons and setting.label not in too_large
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
    setting: RunSetting, predicted: Interval, runs: Mapping[RunSetting, Mapping[int, Seconds]]
) -> ComparedSpeedup:
    """Throughput over that of the baseline, predicted and measured, also by each round that ran both."""
    baseline = baseline_of(setting)
    ratio = setting.global_batch / baseline.global_batch
    alone, together = runs[baseline], runs[setting]
    speedup = ratio * typical([*alone.values()]) / typical([*together.values()])
    both = alone.keys() & together.keys()
    inside = [predicted.holds(ratio * alone[at] / together[at]) for at in both]
    return ComparedSpeedup(
        workload=setting.workload,
        world_size=setting.world_size,
        micro_batch=setting.micro_batch,
        accumulation=setting.accumulation,
        bucket_cap_mb=setting.bucket_cap_mb,
        predicted=predicted,
        measured=speedup,
        signed_error=predicted.signed_error(speedup),
        num_repetitions=len(inside) or None,
        num_inside=sum(inside),
    )


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
    plan = checked(read_plan(folder), Plan, where=where)
    if plan.profile_digest != profile.digest:
        raise InvalidDocument(
            f"{where}: must be of the profile beside it, got a validation of another one; fetch both again"
        )
    if plan.intervals_of != "runs":
        raise InvalidDocument(
            f"{where}: must hold intervals of single runs, got those of an older version; "
            "judge with the version that ran it"
        )
    budget = HoldoutBudget.of(plan.budget, profile.device_kind)
    settings = holdout_settings(
        profile, num_batches=budget.num_batches, goes_beyond=budget.goes_beyond
    )
    labels = {setting.label for setting in settings}
    if unknown := sorted({*plan.predicted_s, *plan.predicted_speedups} - labels):
        raise InvalidDocument(
            f"{where}: must hold settings of this version, got {unknown[0]}; judge with the version that ran it"
        )
    predicted = [setting for setting in settings if setting.label in plan.predicted_s]
    made = Provenance.of_answer(host_fingerprint=profile.origin.fingerprint, seed=plan.seed)
    return judge(profile, plan, predicted, folder / OBSERVATIONS, made)


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

"""Use case: run models that no fit has seen, and judge what their traces predict."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from calibrate.campaign import Campaign, Progress, measure
from calibrate.environment import describe_environment
from calibrate.launch import Launcher
from calibrate.placement import placement_of, provenance
from calibrate.replays import with_replays
from calibrate.summary import Repetition, by_setting, estimate, repetition
from calibrate.task import ReplayTask, StepTask, Task
from perfmodel.answer.answer import answer
from perfmodel.answer.measured import interval, layout_costs, timed_workload
from perfmodel.answer.question import Question
from perfmodel.documents.base import file_sha256
from perfmodel.documents.observation import (
    Observation,
    ReplayObservation,
    StepObservation,
    read_observations,
    steal_share,
)
from perfmodel.documents.verdicts import ComparedModel, ModelsValidationDocument
from perfmodel.errors import CalibrationUnavailable, MeasurementFailed, refuse_unknown
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.step.program import Cause
from perfmodel.units import Seconds
from validate.held_out_models import HeldOutSetting, held_out_settings, write_configs
from validate.judging import (
    ProfileRequest,
    Tolerances,
    fraction,
    passed,
    summarise,
    summarise_any,
)

Mode = Literal["measured", "curves"]

#: By whether the model's own operators were timed in place, or calibrated curves are read.
TOLERANCES: Final = {
    "measured": Tolerances(step_mape=0.03, step_worst=0.10),
    "curves": Tolerances(step_mape=0.06, step_worst=0.20),
}
_PHASES: Final = {
    "forward": Cause.FORWARD,
    "backward": Cause.BACKWARD,
    "optimizer": Cause.OPTIMIZER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsBudget:
    """How often each held-out run is measured."""

    num_rounds: int
    """Fresh process groups; each repetitions every run once."""
    repetition_s: Seconds
    """Of steps; replays take as long beside them. [s]"""
    parallel_repetitions: int = 2
    """In every round of a run on several ranks: whatever disturbs one of them stops all."""


BUDGETS: Final = {
    "quick": ModelsBudget(num_rounds=2, repetition_s=1.0),
    "standard": ModelsBudget(num_rounds=4, repetition_s=2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsRequest(ProfileRequest):
    """What the user asked for."""

    mode: Mode = "measured"


def validate_models(
    request: ModelsRequest, launcher: Launcher, *, on_progress: Callable[[Progress], None]
) -> ModelsValidationDocument:
    """Run held-out models in fresh processes, beside replays of their traces, and compare.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine, or has no costs of operators.
    """
    refuse_unknown("--budget", request.budget, BUDGETS)
    profile = request.profile
    here = placement_of(profile)
    if profile.operators is None:
        raise CalibrationUnavailable(
            "--profile: must hold costs of operators, got none; run perfmodel calibrate again"
        )
    settings = held_out_settings(profile.max_world_size, request.folder)
    write_configs(request.folder)
    plan = {
        "stage": "validate models",
        "budget": request.budget,
        "seed": request.seed,
        "gates": {
            mode: {"step_mape": promise.step_mape, "step_worst": promise.step_worst}
            for mode, promise in TOLERANCES.items()
        },
        "settings": [run.setting.label for run in settings],
    }
    observations = measure(
        Campaign(
            folder=request.folder,
            plan=plan,
            rounds=rounds(settings, BUDGETS[request.budget], seed=request.seed),
            placement=here,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    document = judge_models(request, read_observations(observations), observations)
    document.write(request.folder / file_name(request.mode))
    return document


def file_name(mode: Mode) -> str:
    """Of the verdict in one mode; one campaign serves both."""
    return f"models-{mode}.json"


def rounds(
    settings: Sequence[HeldOutSetting], budget: ModelsBudget, *, seed: int
) -> tuple[tuple[Task, ...], ...]:
    """Runs in random order; those on one rank are replayed as well."""
    result = []
    for index in range(budget.num_rounds):
        tasks: list[Task] = [
            StepTask(
                name=f"{index}: {run.setting.label}" + (f" again {number}" if number else ""),
                round=index,
                setting=run.setting,
                model_spec=run.model_spec,
                target_s=budget.repetition_s,
            )
            for run in settings
            for number in range(budget.parallel_repetitions if run.setting.world_size > 1 else 1)
        ]
        tasks += [
            ReplayTask(
                name=f"{index}: {run.setting.label} replayed",
                round=index,
                workload=run.setting.workload,
                micro_batch=run.setting.micro_batch,
                model_spec=run.model_spec,
                target_s=budget.repetition_s,
            )
            for run in settings
            if run.setting.world_size == 1
        ]
        random.Random(f"{seed}-{index}").shuffle(tasks)  # noqa: S311 - an order, no secret
        result.append(tuple(tasks))
    return tuple(result)


def judge_models(
    request: ModelsRequest, observations: Sequence[Observation], path: Path
) -> ModelsValidationDocument:
    """Put every prediction beside what was measured; measures nothing."""
    found = by_setting(
        repetition(entry) for entry in observations if isinstance(entry, StepObservation)
    )
    replays = [entry for entry in observations if isinstance(entry, ReplayObservation)]
    profile = request.profile
    uses_replays = request.mode == "measured"
    if uses_replays:
        profile = with_replays(profile, replays)
    num_repetitions = round(float(np.median([len(group) for group in found.values()] or [1])))
    traced = _traced(profile, replays, use_measured=uses_replays)
    rows = tuple(
        _compared(
            setting,
            found[setting],
            Question(
                machine=profile,
                workload=traced[setting.workload],
                layout=setting.layout,
                num_repetitions=num_repetitions,
            ),
            request.mode,
        )
        for setting in sorted(found, key=lambda s: s.label)
        if setting.workload in traced
    )
    if not rows:
        raise MeasurementFailed(
            f"{path}: must hold runs of held-out models with their traces, got none; "
            "continue with --resume"
        )
    return _document(request, rows, steal=steal_share(observations), path=path)


def _traced(
    machine: MeasuredMachine, replays: Sequence[ReplayObservation], *, use_measured: bool
) -> dict[str, MeasuredWorkload]:
    """Curves of each held-out workload from its trace alone."""
    return {
        entry.workload: timed_workload(
            machine, entry.model, trace=entry.traced, use_measured=use_measured
        )
        for entry in {e.workload: e for e in replays if e.traced is not None}.values()
        if entry.traced is not None and entry.model is not None
    }


def _compared(
    setting: RunSetting, found: Sequence[Repetition], question: Question, mode: Mode
) -> ComparedModel:
    step = answer(question)
    predicted_s = interval(step.step_s)
    measured = estimate([entry.step_s for entry in found])
    terms = layout_costs(question).terms
    phase_errors = {
        name: float(terms.compute_s[cause][0])
        / estimate([entry.phases_s[name] for entry in found]).value_s
        - 1
        for name, cause in (_PHASES if setting.world_size == 1 else {}).items()
    }
    return ComparedModel(
        setting=setting,
        mode=mode,
        predicted_s=predicted_s,
        measured_s=measured.value_s,
        num_repetitions=measured.num_repetitions,
        measured_relative_error=measured.relative_error,
        signed_error=predicted_s.signed_error(measured.value_s),
        phase_errors=phase_errors,
        evidence=step.evidence["compute"],
        untimed=question.measured.untimed,
        is_covered=predicted_s.holds(measured.value_s),
    )


def _document(
    request: ModelsRequest,
    rows: tuple[ComparedModel, ...],
    *,
    steal: float,
    path: Path,
) -> ModelsValidationDocument:
    single = [row for row in rows if row.setting.world_size == 1]
    summary = summarise([row.signed_error for row in single])
    coverage = fraction(row.is_covered for row in rows)
    gates = TOLERANCES[request.mode].judge(summary=summary, coverage=coverage)
    optimizers = {row.setting.workload.rpartition(" ")[2] for row in single}
    return ModelsValidationDocument(
        provenance=provenance(describe_environment(), seed=request.seed),
        profile_digest=request.profile.digest,
        observations_sha256=file_sha256(path),
        mode=request.mode,
        steal=steal,
        models=rows,
        summary=summary,
        summary_by_phase={
            name: summarise([row.phase_errors[name] for row in single]) for name in _PHASES
        },
        summary_by_optimizer={
            name: summarise([r.signed_error for r in single if r.setting.workload.endswith(name)])
            for name in sorted(optimizers)
        },
        summary_ddp=summarise_any([row.signed_error for row in rows if row.setting.world_size > 1]),
        coverage=coverage,
        gates=gates,
        passed=passed(gates),
    )

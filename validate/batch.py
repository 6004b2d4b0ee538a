"""Use case: train to a target at several batches, each at its best rate, and judge the law of the batch."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from calibrate.campaign import Campaign, Progress, measure
from calibrate.environment import describe_environment, placement_of, provenance
from calibrate.launch import Launcher
from calibrate.noise import RECIPES, TRAINING_TIMEOUT_S, trainings_in
from calibrate.task import TrainingTask
from perfmodel.convergence import (
    BatchPoint,
    Convergence,
    calibrated_law,
    fit_convergence,
)
from perfmodel.documents import file_sha256
from perfmodel.documents.observation import TrainingObservation
from perfmodel.documents.verdicts import BatchValidationDocument, JudgedBatch
from perfmodel.errors import CalibrationUnavailable, MeasurementFailed, refuse_unknown
from perfmodel.machine.measured import NoiseScaleProfile
from validate.judging import ProfileRequest, fraction, summarise

VALIDATION: Final = "batch.json"
#: A rate that needs so many times the predicted steps is a bad one.
_PATIENCE: Final = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBudget:
    """What is tried."""

    batches: tuple[int, ...]
    rates: tuple[float, ...]
    """Learning rates, over that of the recipe times the square root of the batch over the reference."""
    num_starts: int
    """Their median is judged: starts of one batch differ by up to a factor of two."""


BUDGETS: Final = {
    "quick": BatchBudget(batches=(32, 64, 256), rates=(0.5, 1.0, 2.0), num_starts=2),
    "standard": BatchBudget(batches=(32, 64, 128, 256, 512), rates=(0.5, 1.0, 2.0), num_starts=3),
    "thorough": BatchBudget(
        batches=(16, 32, 64, 128, 256, 512, 1024),
        rates=(0.35, 0.5, 0.7, 1.0, 1.4, 2.0),
        num_starts=8,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest(ProfileRequest):
    """What the user asked for."""

    workload: str = "lenet"


def validate_batch(
    request: BatchRequest, launcher: Launcher, *, on_progress: Callable[[Progress], None]
) -> BatchValidationDocument:
    """Train at every batch and rate on one rank, and compare steps to the target.

    How a batch is split over ranks changes the time of a step and not what it learns, so one rank tells.

    Raises
    ------
    UsageError
        If the budget is unknown.
    CalibrationUnavailable
        If the profile is of another machine, or lacks the noise scale of the workload.
    """
    refuse_unknown("--budget", request.budget, BUDGETS)
    here = placement_of(request.profile, num_ranks=1)
    tasks = planned_tasks(_scale(request), BUDGETS[request.budget], seed=request.seed)
    plan = {"stage": "validate batch", "tasks": [task.model_dump() for task in tasks]}
    observations = measure(
        Campaign(
            folder=request.folder,
            plan=plan,
            rounds=(tasks,),
            placement=here,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
        stall_timeout_s=TRAINING_TIMEOUT_S,
    )
    document = judge_batches(request, trainings_in(observations), observations)
    document.write(request.folder / VALIDATION)
    return document


def _scale(request: BatchRequest) -> NoiseScaleProfile:
    scale = request.profile.noise_scale(request.workload)
    if scale is None or request.workload not in RECIPES:
        raise CalibrationUnavailable(
            f"--profile: must hold the noise scale of {request.workload!r}, got none; "
            f"run perfmodel calibrate --noise-scale {request.workload}"
        )
    return scale


def planned_tasks(
    scale: NoiseScaleProfile, budget: BatchBudget, *, seed: int
) -> tuple[TrainingTask, ...]:
    """Every batch at every rate from every start; starts differ from those of the calibration."""
    law, recipe = calibrated_law(scale), RECIPES[scale.workload]
    return tuple(
        TrainingTask(
            name=f"training {scale.workload} batch={batch} rate x{rate:g} seed={seed}-{start}",
            round=0,
            workload=scale.workload,
            world_size=1,
            micro_batch=batch,
            learning_rate=rate * scale.learning_rate * (batch / scale.batch) ** 0.5,
            seed=1000 * seed + start,
            noise=recipe.noise,
            target_loss=scale.target_loss,
            max_steps=int(_PATIENCE * law.samples(batch).nominal / batch),
            evaluated_samples=recipe.evaluated_samples,
            look_growth=recipe.look_growth,
        )
        for start in range(budget.num_starts)
        for batch in budget.batches
        for rate in budget.rates
    )


def judge_batches(
    request: BatchRequest, trainings: Sequence[TrainingObservation], path: Path
) -> BatchValidationDocument:
    """Put every prediction beside what was measured; measures nothing."""
    scale = _scale(request)
    by_batch: dict[int, list[TrainingObservation]] = defaultdict(list)
    for training in trainings:
        by_batch[training.batch].append(training)
    law = calibrated_law(scale)
    rows = {
        batch: row
        for batch, group in sorted(by_batch.items())
        if (row := _judged(batch, group, law)) is not None
    }
    others = [row for batch, row in rows.items() if batch != scale.batch]
    if not others or len(rows) < 2:
        raise MeasurementFailed(
            f"{path}: must hold at least two batches that reached the target, got {len(rows)}; "
            "continue with --resume"
        )
    steps = median(scale.steps_to_target)
    fitted = fit_convergence(
        [
            BatchPoint(batch=row.batch, samples=row.batch * row.measured_steps)
            for row in rows.values()
        ]
    )
    own = rows.get(scale.batch)
    from_own = [
        own.measured_steps
        * law.samples_ratio(row.batch, reference=own.batch).nominal
        * (own.batch / row.batch / row.measured_steps)
        - 1
        for row in others
        if own is not None
    ]
    return BatchValidationDocument(
        provenance=provenance(describe_environment(), seed=request.seed),
        profile_digest=request.profile.digest,
        observations_sha256=file_sha256(path),
        workload=scale.workload,
        samples=scale.samples,
        reference_batch=scale.batch,
        noise_scale=scale.noise_scale,
        measured_critical_batch=fitted.critical_batch,
        batches=tuple(rows.values()),
        not_reached=tuple(sorted(set(by_batch) - set(rows))),
        summary=summarise([row.signed_error for row in others]),
        from_own_reference=None if own is None else summarise(from_own),
        same_samples=summarise(
            [steps * scale.batch / row.batch / row.measured_steps - 1 for row in others]
        ),
        same_steps=summarise([steps / row.measured_steps - 1 for row in others]),
        coverage=fraction(row.is_covered for row in others),
    )


def _judged(
    batch: int, group: Sequence[TrainingObservation], law: Convergence
) -> JudgedBatch | None:
    """The rate with the fewest steps in the median over its starts; None if too few reach the target."""
    by_rate: dict[float, list[float]] = defaultdict(list)
    for training in group:
        # A start that does not reach the target takes longer than any that does.
        by_rate[training.learning_rate].append(training.num_steps or math.inf)
    best = min(by_rate, key=lambda rate: median(by_rate[rate]))
    measured = float(median(by_rate[best]))
    if math.isinf(measured):
        return None
    predicted = law.samples(batch) / batch
    return JudgedBatch(
        batch=batch,
        learning_rate=best,
        is_rate_at_edge=best in (min(by_rate), max(by_rate)),
        steps=tuple(int(n) for n in by_rate[best] if n < math.inf),
        measured_steps=measured,
        predicted_steps=predicted,
        signed_error=predicted.signed_error(measured),
        is_covered=predicted.holds(measured),
    )

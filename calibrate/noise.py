"""Use case: gradient noise scales, measured in real trainings under DDP, added to a profile."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.campaign import OBSERVATIONS, Campaign, Progress, measure
from calibrate.environment import placement_of
from calibrate.launch import Launcher
from calibrate.summary import estimate, typical
from calibrate.task import TrainingTask
from perfmodel.convergence import GradientNorms, noise_scale
from perfmodel.documents.observation import TrainingObservation, read_observations
from perfmodel.errors import MeasurementFailed, UsageError, did_you_mean
from perfmodel.machine.measured import MeasuredMachine, NoiseScaleProfile

#: Folder, inside that of a calibration, with one folder per model that was trained.
NOISE: Final = "noise"
#: A training is one task: ranks show no progress before its end. [s]
TRAINING_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a reference model learns the samples of ``calibrate/probes/learnable.py``."""

    learning_rate: float
    """Of plain SGD, at ``batch``."""
    noise: float
    """Of the samples, over their patterns: the more parameters, the harder they must be."""
    target_loss: float
    most_steps: int
    batch: int = 64
    """Samples per step of all ranks together: near the noise scale, where both norms are well seen."""
    num_trainings: int = 8
    """Each with a start and samples of its own. Starts differ much: eight of LeNet took from 296 to
    462 steps, so that the median of three says little."""
    evaluated_samples: int = 512
    look_growth: float = 1.04
    """The loss is read whenever the steps have grown by so much: the resolution of steps to the target."""


#: Models that take 28x28 images of ten classes.
RECIPES: Final = {
    "lenet": Recipe(learning_rate=0.5, noise=1.5, target_loss=0.4, most_steps=2000),
    "mlp": Recipe(learning_rate=0.1, noise=5.0, target_loss=0.4, most_steps=1000),
    # A step of 16 images takes some two seconds of a core: few samples, few looks, few trainings.
    "resnet18": Recipe(
        learning_rate=0.05,
        noise=3.0,
        target_loss=0.4,
        most_steps=150,
        batch=16,
        num_trainings=4,
        evaluated_samples=96,
        look_growth=1.15,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRequest:
    """What the user asked for."""

    folder: Path
    """Of the calibration that is added to."""
    models: tuple[str, ...]
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse models that have no recipe, and none at all."""
        if not self.models:
            raise UsageError("--noise-scale: must name at least one model, got none")
        for model in self.models:
            if model not in RECIPES:
                raise UsageError(
                    f"--noise-scale: must be among {', '.join(RECIPES)}, got {model!r}"
                    f"{did_you_mean(model, RECIPES)}"
                )


def measure_noise(
    request: NoiseRequest,
    launcher: Launcher,
    *,
    profile: MeasuredMachine,
    on_progress: Callable[[Progress], None],
) -> MeasuredMachine:
    """Train each model a few times and return the profile with their noise scales.

    ``UsageError`` if the profile is of one rank: noise shows only as a difference between ranks.
    """
    here = placement_of(profile, where=str(request.folder))
    if profile.ranks_per_node < 2:
        raise UsageError(
            "--noise-scale: must have a profile of at least two ranks, got one; noise shows only as a "
            "difference between ranks"
        )
    for model in request.models:
        tasks = _tasks(model, here.topology.world_size)
        plan = {"stage": "noise", "tasks": [task.model_dump() for task in tasks]}
        observations = measure(
            Campaign(
                folder=request.folder / NOISE / model,
                plan=plan,
                rounds=(tasks,),
                placement=here,
            ),
            launcher,
            resume=request.resume,
            on_progress=on_progress,
            stall_timeout_s=TRAINING_TIMEOUT_S,
        )
        profile = with_noise(profile, trainings_in(observations))
    return profile


def _tasks(model: str, world_size: int) -> tuple[TrainingTask, ...]:
    recipe = RECIPES[model]
    return tuple(
        TrainingTask(
            name=f"training {model} seed={seed}",
            round=0,
            workload=model,
            world_size=world_size,
            micro_batch=max(1, recipe.batch // world_size),
            learning_rate=recipe.learning_rate,
            seed=seed,
            noise=recipe.noise,
            target_loss=recipe.target_loss,
            max_steps=recipe.most_steps,
            evaluated_samples=recipe.evaluated_samples,
            look_growth=recipe.look_growth,
        )
        for seed in range(recipe.num_trainings)
    )


def trainings_in(path: Path) -> list[TrainingObservation]:
    """Trainings among the observations of a file."""
    return [e for e in read_observations(path) if isinstance(e, TrainingObservation)]


def with_noise(
    profile: MeasuredMachine, trainings: Sequence[TrainingObservation]
) -> MeasuredMachine:
    """The profile with the noise scales of these trainings, in place of those it had of their models."""
    groups: dict[str, list[TrainingObservation]] = defaultdict(list)
    for training in trainings:
        groups[training.workload].append(training)
    kept = [entry for entry in profile.noise_scales if entry.workload not in groups]
    found = [noise_of(group) for group in groups.values()]
    ordered = sorted((*kept, *found), key=lambda entry: entry.workload)
    return replace(profile, noise_scales=tuple(ordered))


def with_stored_noise(profile: MeasuredMachine, folder: Path) -> MeasuredMachine:
    """The profile with every noise scale that was measured in the folder of its calibration."""
    for observations in sorted((folder / NOISE).glob(f"*/{OBSERVATIONS}")):
        profile = with_noise(profile, trainings_in(observations))
    return profile


def noise_of(trainings: Sequence[TrainingObservation]) -> NoiseScaleProfile:
    """What several trainings of one model at one batch say together.

    ``MeasurementFailed`` if fewer than two reached their target with a noise scale.
    """
    first = trainings[0]
    learned = [
        (training.num_steps, scale)
        for training in trainings
        if training.num_steps is not None and (scale := noise_scale(_norms(training))) is not None
    ]
    if len(learned) < 2:
        raise MeasurementFailed(
            f"noise scale of {first.workload}: at least two trainings must reach the loss "
            f"{first.target_loss:g} with a signal above their noise, got {len(learned)} of "
            f"{len(trainings)}; delete the folder of its observations and repeat"
        )
    scales = [scale for _, scale in learned]
    together = estimate([scale.batch for scale in scales])
    own_error = float(np.mean([scale.relative_error for scale in scales]))
    # Parts of a training whose signal shows above their noise, or the whole if none is clear.
    clear = [
        [batch for batch in scale.windows if 0 < batch < math.inf] or [scale.batch]
        for scale in scales
    ]
    return NoiseScaleProfile(
        workload=first.workload,
        samples=first.samples,
        ranks=first.world_size,
        batch=first.batch,
        learning_rate=first.learning_rate,
        target_loss=first.target_loss,
        noise_scale=together.value_s,
        # Scatter of two or three trainings is itself uncertain: not below what one knows of itself.
        relative_error=max(together.relative_error, own_error / len(learned) ** 0.5),
        at_start=typical([batches[0] for batches in clear]),
        at_end=typical([batches[-1] for batches in clear]),
        steps_to_target=tuple(num_steps for num_steps, _ in learned),
    )


def _norms(training: TrainingObservation) -> list[GradientNorms]:
    return [
        GradientNorms(
            ranks=training.world_size,
            local_batch=training.micro_batch,
            mean_square=mean_square,
            square_of_mean=square_of_mean,
        )
        for mean_square, square_of_mean in zip(
            training.mean_squares, training.squares_of_mean, strict=True
        )
    ]

"""Trainings -> noise scales in a profile; and what is refused before anything runs."""

from pathlib import Path

import pytest

from calibrate.noise import NoiseRequest, measure_noise, noise_of, with_noise
from perfmodel.documents.observation import TrainingObservation
from perfmodel.errors import CalibrationUnavailable, MeasurementFailed, UsageError
from tests.fakes import FakeLauncher
from tests.perfmodel.profiles import Machine, profile


def training(
    *,
    scale: float = 96.0,
    seed: int = 0,
    steps: int = 80,
    is_learned: bool = True,
    name: str = "lenet",
) -> TrainingObservation:
    """Two ranks with 16 samples each, |G|^2 = 1, exactly so much noise in every step."""
    return TrainingObservation(
        task=f"training {seed}",
        round=0,
        workload=name,
        samples="ten patterns",
        world_size=2,
        micro_batch=16,
        learning_rate=0.5,
        seed=seed,
        target_loss=0.4,
        mean_squares=(1 + scale / 16,) * steps,
        squares_of_mean=(1 + scale / 32,) * steps,
        evaluated_steps=(1, steps),
        losses=(2.3, 0.39 if is_learned else 0.41),
    )


def test_trainings_agree_on_the_scale_that_they_were_made_with() -> None:
    found = noise_of([training(seed=0, steps=70), training(seed=1, steps=90)])
    assert found.noise_scale == pytest.approx(96)
    assert (found.at_start, found.at_end) == pytest.approx((96, 96))
    assert (found.batch, found.ranks) == (32, 2)
    assert found.steps_to_target == (70, 90)
    assert found.samples_to_target == 32 * 80


def test_trainings_that_differ_leave_uncertainty() -> None:
    """Scales 64 and 144: geometric mean 96, standard error of the log ln(144 / 64) / 2 = 0.405."""
    found = noise_of([training(scale=64), training(scale=144, seed=1)])
    assert found.noise_scale == pytest.approx(96)
    assert found.relative_error == pytest.approx(0.405, abs=0.001)


def test_trainings_that_did_not_learn_do_not_count() -> None:
    learned = [training(seed=0), training(seed=1)]
    failed = training(scale=1e4, seed=2, is_learned=False)
    assert noise_of([*learned, failed]) == noise_of(learned)
    with pytest.raises(MeasurementFailed, match="at least two trainings must reach"):
        noise_of([learned[0], failed])


def test_a_new_measurement_replaces_that_of_the_same_model_only() -> None:
    first = with_noise(
        profile(Machine()),
        [training(seed=0), training(seed=1), *(training(seed=s, name="mlp") for s in (0, 1))],
    )
    assert [entry.workload for entry in first.noise_scales] == ["lenet", "mlp"]
    again = with_noise(first, [training(scale=50, seed=0), training(scale=50, seed=1)])
    lenet, mlp = again.noise_scale("lenet"), again.noise_scale("mlp")
    assert lenet is not None
    assert mlp is not None
    assert (lenet.noise_scale, mlp.noise_scale) == pytest.approx((50, 96))


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ((), "--noise-scale: must name at least one model, got none"),
        (("transformer",), "must be among lenet, mlp, resnet18, got 'transformer'"),
        (("lenet", "lenett"), "got 'lenett'; did you mean lenet"),
    ],
)
def test_models_without_a_recipe_are_refused(
    tmp_path: Path, models: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        NoiseRequest(folder=tmp_path, models=models)


def test_the_profile_of_another_machine_is_refused(tmp_path: Path) -> None:
    def unexpected(call: object) -> None:
        raise AssertionError(call)

    request = NoiseRequest(folder=tmp_path, models=("lenet",))
    with pytest.raises(CalibrationUnavailable, match="must describe this machine"):
        measure_noise(
            request,
            FakeLauncher(behave=unexpected),
            profile=profile(Machine()),
            on_progress=lambda _: None,
        )

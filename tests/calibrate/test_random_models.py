"""Models drawn at random: the same for the same seed, trainable, of all families."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from calibrate.random_models import FAMILIES, draw

NUM_FAMILIES = len(FAMILIES)


@pytest.mark.parametrize("index", range(NUM_FAMILIES))
def test_a_drawn_model_trains_and_a_second_draw_is_the_same(index: int) -> None:
    model, again = draw(3, index), draw(3, index)
    assert (model.name, model.micro_batch) == (again.name, again.micro_batch)
    assert (model.optimizer, model.flags) == (again.optimizer, again.flags)
    torch.manual_seed(0)
    module, example, loss_of = model.factory()
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in again.sketch.build().parameters()]
    assert [parameter.shape for parameter in module.parameters()] == shapes
    optimizer = model.make_optimizer(module.parameters())
    loss = loss_of(module(*(entry[:2] for entry in example)))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert bool(loss.isfinite())


@pytest.mark.parametrize(
    ("seed", "index", "family"),
    [
        (118614, 2, "mnasnet1_3"),
        (118614, 6, "convnext_small"),
        (781315, 4, "efficientnet_v2_m"),
    ],
)
def test_records_of_before_timm_name_the_models_that_they_drew(
    tmp_path: Path, seed: int, index: int, family: str
) -> None:
    drawn = draw(seed, index, on_gpu=True, with_timm=False)
    assert drawn.family == f"torchvision {family}"
    file, _, _ = drawn.write_file(tmp_path).rpartition(":")
    assert "with_timm=False" in Path(file).read_text()


def test_a_recommender_learns_shares() -> None:
    """Its loss falls without end where a target is below 0 or above 1, until it is no number."""
    models = (draw(3, index) for index in range(NUM_FAMILIES))
    model = next(model for model in models if model.family == "recommender")
    targets = model.sketch.targets.draw(500)
    assert 0 <= float(targets.min()) < 0.1
    assert 0.9 < float(targets.max()) <= 1


def test_families_take_turns_and_each_has_a_batch_that_keeps_a_gpu_busy() -> None:
    """Drawing would not end if one had none; a bag of words needs tens of thousands of samples."""
    drawn = [draw(4, index, on_gpu=True) for index in range(NUM_FAMILIES)]
    families = {model.family.split()[0] for model in drawn}
    assert families | {"timm"} == {name.split()[0] for name in FAMILIES}
    assert ("timm" in families) is bool(find_spec("timm"))
    assert {model.precision for model in drawn} == {"fp32", "bf16"}
    assert max(model.micro_batch for model in drawn) > 4096

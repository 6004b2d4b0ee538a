"""Models drawn at random: the same for the same seed, trainable, of all families."""

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


def test_a_recommender_learns_shares() -> None:
    """Its loss falls without end where a target is below 0 or above 1, until it is no number."""
    [model] = (m for m in (draw(3, i) for i in range(NUM_FAMILIES)) if m.family == "recommender")
    targets = model.sketch.targets.draw(500)
    assert 0 <= float(targets.min()) < 0.1
    assert 0.9 < float(targets.max()) <= 1


def test_families_take_turns_and_each_has_a_batch_that_keeps_a_gpu_busy() -> None:
    """Drawing would not end if one had none; a bag of words needs tens of thousands of samples."""
    drawn = [draw(4, index, on_gpu=True) for index in range(NUM_FAMILIES)]
    assert {model.family.split()[0] for model in drawn} == {e.split()[0] for e in FAMILIES}
    assert {model.precision for model in drawn} == {"fp32", "bf16"}
    assert max(model.micro_batch for model in drawn) > 4096

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


def test_families_take_turns_and_each_has_a_batch_that_keeps_a_gpu_busy() -> None:
    """Drawing would not end if one had none; a bag of words needs tens of thousands of samples."""
    drawn = [draw(4, index, on_gpu=True) for index in range(NUM_FAMILIES)]
    assert {model.family.split()[0] for model in drawn} == {e.split()[0] for e in FAMILIES}
    assert {model.precision for model in drawn} == {"fp32", "bf16"}
    assert max(model.micro_batch for model in drawn) > 4096

"""The held-out language models train with real weights, and under DDP."""

import math
from pathlib import Path

import pytest
import torch

from perfmodel.trace.source import SampleSize, make_optimizer
from perfmodel.trace.sources import find_source
from validate.held_out_models import HELD_OUT, HeldOutModel, write_configs

LANGUAGE = [model for model in HELD_OUT if model.config is not None]


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # Embedding 8000 and 64 positions of 384, six blocks of 12 w^2 + 13 w, a norm; the head is tied.
        (LANGUAGE[0], 8064 * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384),
        # 6000 words twice, 64 positions, 2 types of 320; norm; blocks; dense, norm, bias of the head.
        (
            LANGUAGE[1],
            (12_066 * 320 + 2 * 320) + 6 * (12 * 320**2 + 13 * 320) + (320**2 + 3 * 320 + 6000),
        ),
        # 8000 words twice; queries, output, grouped keys and values, gated 1376, two norms; a norm.
        (
            LANGUAGE[2],
            16_000 * 512 + 4 * ((2 + 2 / 4) * 512**2 + 3 * 512 * 1376 + 2 * 512) + 512,
        ),
    ],
    ids=lambda value: value.model if isinstance(value, HeldOutModel) else "",
)
def test_a_language_model_has_its_size_and_really_trains(
    tmp_path: Path, model: HeldOutModel, parameters: float
) -> None:
    write_configs(tmp_path)
    torch.manual_seed(0)
    source = find_source(model.model_spec("sgd", tmp_path).model, SampleSize())
    module = source.build()
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    optimizer = make_optimizer(module.parameters(), name="sgd", implementation="loop")
    batch = source.draw_batch(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = source.loss(module(*batch.positional), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        # DDP waits for the gradient of every parameter.
        assert all(parameter.grad is not None for parameter in module.parameters())
        assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(math.isfinite(value) for value in losses)
    assert losses[2] < losses[0]

"""Short cuts of the recorder against torch's own rules for shapes."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perfmodel.tracing import recorder
from perfmodel.tracing.cuda_casts import AsOnCuda
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.trace import trace_once
from perfmodel.workload.step import StepMethod

METHOD = StepMethod(
    optimizer="sgd",
    optimizer_implementation="foreach",
    precision="fp16",
    checkpointing="none",
    device_kind="cpu",
)


def layouts(results: Any) -> list[Any]:
    return [None if one is None else (tuple(one.shape), one.stride(), one.dtype) for one in results]


@pytest.mark.parametrize("model", ["torchvision:resnet18", "torchvision:vit_b_32", "transformer"])
def test_a_step_is_the_same_as_by_torch_s_rules_alone(model: str) -> None:
    def traced() -> Any:
        return trace_once(find_source(model), METHOD, micro_batch=4, casts=AsOnCuda("fp16"))

    quick = traced()
    with (
        patch.object(recorder, "_BY_RULE", {}),
        patch.object(recorder, "_is_new", lambda _result, _args: False),
    ):
        assert quick == traced()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_half_precision_scores_is_computed_as_cuda_s_autocast_does(
    smoothing: float,
) -> None:
    """``cross_entropy_loss`` has no rule there: logarithms stay bf16, and ``nll_loss`` reads them in fp32."""
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has_rule("aten::cross_entropy_loss", "AutocastCUDA")
    assert has_rule("aten::nll_loss", "AutocastCUDA")
    scores, targets = torch.randn(4, 8, dtype=torch.bfloat16), torch.tensor([0, 1, -100, 3])
    exact = torch.nn.functional.cross_entropy(scores.double(), targets, label_smoothing=smoothing)
    with torch.profiler.profile() as profiler, AsOnCuda("bf16"):
        loss = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)(scores, targets)
    assert float(loss) == pytest.approx(float(exact), rel=0.02)
    if not smoothing:
        assert loss.dtype == torch.float32
        casts = [event.name for event in profiler.events() if event.name == "aten::_to_copy"]
        assert len(casts) == 1


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, False]])
@pytest.mark.parametrize("is_training", [True, False])
def test_batch_normalisations_return_what_torch_says(
    *, last: bool, wanted: list[bool], is_training: bool
) -> None:
    shape = torch.channels_last if last else torch.contiguous_format
    with FakeTensorMode():
        images = torch.empty(4, 6, 5, 5).to(memory_format=shape)
        weight, mean = torch.empty(6), torch.empty(6)
        forward: tuple[Any, ...] = (images, weight, weight, mean, mean, is_training, 0.1, 1e-5)
        backward = (images, images, weight, mean, mean, mean, mean, is_training, 1e-5, wanted)
        for rule, own, args in (
            (recorder._batch_norm, recorder._BATCH_NORM, forward),
            (recorder._batch_norm_backward, recorder._BATCH_NORM_BACKWARD, backward),
        ):
            assert layouts(rule(*args)) == layouts(own(*args))


def test_real_images_are_normalised() -> None:
    images, weight = torch.randn(8, 2, 3, 3), torch.ones(2)
    found: Tensor = recorder._batch_norm(images, weight, weight, None, None, True, 0.1, 0.0)[0]
    assert float(found.std(unbiased=False)) == pytest.approx(1.0, rel=1e-3)

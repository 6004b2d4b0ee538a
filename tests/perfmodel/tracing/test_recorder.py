"""Short cuts of the recorder against torch's own rules; sums of gradients against those of a real step."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from perfmodel.tracing import recorder
from perfmodel.tracing.cuda import CUDNN_RULES, AsOnCuda
from perfmodel.tracing.liveness import workspace_bytes
from perfmodel.tracing.recorder import ModulePaths, Recorder
from perfmodel.tracing.source import ModelSource, labelled
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import build_model, record_step, without_content
from perfmodel.tracing.trace import trace_model, trace_once
from perfmodel.workload import Call, Operator, Phase
from perfmodel.workload.step import TracedStep
from tests.perfmodel.tracing.method import SGD, SGD_LOOP

METHOD = replace(SGD, precision="fp16")


def layouts(results: Any) -> list[Any]:
    return [None if one is None else (tuple(one.shape), one.stride(), one.dtype) for one in results]


class Dense(nn.Module):
    """Layers of a dense network: each reads parts of what lies in one tensor, and adds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 2 * n, 2, 3, padding=1) for n in range(4))
        self.head = nn.Linear(11, 10)

    def forward(self, images: Tensor) -> Any:
        for layer in self.layers:
            new = layer(images).relu_()
            images = torch.cat([images, new[:, :2]], 1)
        return self.head(images[:, :, 1::2, :-1].mean((2, 3)))


DENSELY = ModelSource(
    name="dense",
    sample="image",
    build=Dense,
    draw_batch=find_source("torchvision:resnet18").draw_batch,
    loss=find_source("torchvision:resnet18").loss,
)


class Recurrent(nn.Module):
    """Two like layers of cuDNN, each called twice: gradients are parts of a buffer, not added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 10)

    def forward(self, sequence: Tensor) -> Any:
        for layer in self.layers:
            for _ in range(2):
                sequence = layer(sequence)[0]
        return self.head(sequence[:, -1])


RECURRENTLY = replace(
    DENSELY,
    name="recurrent",
    build=Recurrent,
    draw_batch=labelled(lambda n: torch.randn(n, 5, 8), 10),
)


@pytest.mark.parametrize(
    ("source", "precision"),
    [
        (find_source("torchvision:resnet18"), "fp16"),
        (find_source("torchvision:vit_b_32"), "fp16"),
        (find_source("transformer"), "fp16"),
        (RECURRENTLY, "fp32"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_step_is_the_same_as_by_torch_s_rules_alone(source: ModelSource, precision: str) -> None:
    def traced() -> Any:
        method, casts = replace(SGD, precision=precision), AsOnCuda(precision)
        return trace_once(source, method, micro_batch=4, casts=casts)

    quick = traced()
    with by_torch_alone():
        assert quick == traced()


@pytest.mark.parametrize("source", [find_source("torchvision:resnet18"), DENSELY])
def test_a_trace_for_a_processor_is_the_same_as_by_torch_s_rules_alone(source: ModelSource) -> None:
    quick = trace_model(source, SGD_LOOP)
    with by_torch_alone():
        assert quick == trace_model(source, SGD_LOOP)


def twice(act: Callable[[], Tensor]) -> list[Tensor]:
    """Results of a call and of its like."""
    with Recorder(ModulePaths(nn.Identity())):
        return [act(), act()]


def test_memory_that_a_call_puts_in_place_is_its_own() -> None:
    def act() -> Tensor:
        other = torch.empty(4, device="meta")
        found: Tensor = torch.empty(4, device="meta").set_(other)  # type: ignore[call-overload]
        assert found.untyped_storage()._cdata == other.untyped_storage()._cdata
        return found

    first, second = twice(act)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_tensors_lie_where_the_call_says() -> None:
    places = iter(("cuda:0", "cuda:1"))
    with FakeTensorMode():
        found = twice(lambda: torch.zeros(2, device=next(places)))
    assert [str(tensor.device) for tensor in found] == ["cuda:0", "cuda:1"]


def test_tensors_have_the_type_that_torch_makes_now() -> None:
    def act() -> Tensor:
        torch.set_default_dtype(next(types))
        return torch.empty(2, dtype=torch.int64, device="meta") / 2

    default = torch.get_default_dtype()
    types = iter((torch.float32, torch.float64))
    try:
        found = twice(act)
    finally:
        torch.set_default_dtype(default)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.float64]


class Marked(Tensor):
    """A script's own kind of tensor, which every operator returns."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {})).as_subclass(cls)


def test_tensors_of_a_script_stay_of_their_kind() -> None:
    inputs = torch.empty(3, device="meta").as_subclass(Marked)
    assert [type(each) for each in twice(inputs.neg)] == [Marked, Marked]


def test_parts_of_conjugates_are_conjugates() -> None:
    inputs = torch.empty(4, dtype=torch.complex64, device="meta").conj()
    assert all(part.is_conj() for part in twice(lambda: inputs[1:]))
    assert all(part.is_neg() for part in twice(lambda: inputs.imag[1:]))
    assert all(each.is_conj() for each in twice(inputs.clone().conj))


@contextmanager
def by_torch_alone() -> Iterator[None]:
    with (
        patch.object(recorder, "_BY_RULE", CUDNN_RULES),
        patch.object(recorder, "_again", lambda *_: None),
    ):
        yield


@pytest.mark.parametrize(
    "where",
    [(0,), (1, 2), (1, -3, -1), (1, 3, 2), (1, 0, 2**63 - 1, 3), (-1, 1, 5, 2), (0, 99, 100)],
)
@pytest.mark.parametrize("last", [False, True])
def test_parts_of_a_tensor_lie_where_torch_says(*, where: tuple[int, ...], last: bool) -> None:
    shape = torch.channels_last if last else torch.contiguous_format
    with FakeTensorMode():
        images = torch.empty(4, 6, 5, 5).to(memory_format=shape)[:, 1:]
        found, expected = recorder._slice(images, *where), recorder._SLICE(images, *where)
        assert layouts([found]) == layouts([expected])
        assert found.storage_offset() == expected.storage_offset()
        assert found.untyped_storage()._cdata == images.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("how", "shape", "stride", "forward_bytes", "backward_bytes"),
    [
        # Samples, channels in and out, kernel, side; bytes as an H200 took them.
        ("fp32", (256, 128, 128, 3, 28), 1, 208.2e6, 214.4e6),
        ("fp32", (256, 3, 64, 7, 224), 2, 977.3e6, 1033.9e6),
        ("fp32", (32, 512, 128, 1, 28), 1, 0, 8.39e6),
        # The peak of a step of a ShuffleNet on an H100, 1 % above it.
        ("fp32", (1024, 192, 1024, 1, 2), 1, 0, 817.6e6),
        # Beyond what was seen, as much as was: 16 GiB otherwise.
        ("fp32", (4096, 2048, 512, 1, 2), 1, 0, 768 * 2**20),
        ("fp32", (256, 2048, 512, 1, 7), 1, 128.5e6, 136.8e6),
        ("bf16", (32, 512, 512, 3, 7), 1, 7.93e6, 7.93e6),
        ("bf16 last", (256, 3, 64, 7, 224), 2, 205.6e6, 211.8e6),
        ("bf16 last", (256, 512, 2048, 1, 7), 1, 0, 0),
    ],
)
def test_convolutions_on_tensor_cores_copy_what_is_not_laid_out_for_them(
    how: str,
    shape: tuple[int, int, int, int, int],
    stride: int,
    forward_bytes: float,
    backward_bytes: float,
) -> None:
    """Of the convolutions that the law was read off, some that it describes: none are held out."""
    samples, channels, results, kernel, side = shape
    settings = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    dtype = torch.float32 if how == "fp32" else torch.bfloat16
    form = torch.channels_last if how.endswith("last") else torch.contiguous_format
    with torch.device("meta"):
        inputs, weight, gradient = (
            torch.empty(size, dtype=dtype).contiguous(memory_format=form)
            for size in (
                (samples, channels, side, side),
                (results, channels, kernel, kernel),
                (samples, results, side // stride, side // stride),
            )
        )
    aten = torch.ops.aten
    convolution = aten.convolution.default, (inputs, weight, None, *settings)
    backward = aten.convolution_backward.default, (gradient, inputs, weight, None, *settings)
    for (func, args), expected in ((convolution, forward_bytes), (backward, backward_bytes)):
        found = workspace_bytes(func, (*args, [True] * 3), on_cuda=True)
        assert found == pytest.approx(expected, rel=0.06, abs=2e5)
        assert workspace_bytes(func, (*args, [True] * 3)) == 0  # a device of no kernels


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


def test_fused_attention_takes_dropout_without_scores() -> None:
    """A processor's fused kernel knows no dropout: torch would keep the scores of all pairs there."""
    inputs = torch.randn(2, 4, 8, 16, requires_grad=True)
    with torch.profiler.profile() as profiler, AsOnCuda("fp32"):
        torch.nn.functional.scaled_dot_product_attention(inputs, inputs, inputs, None, 0.1, True)
    called = {event.name for event in profiler.events() or []}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in called
    assert not any("softmax" in name for name in called)


def test_steps_of_a_table_attend_in_one_kernel_as_predicted_steps_do() -> None:
    """On "meta" torch would multiply matrices: steps would be fitted to other work than is predicted."""
    source, casts = find_source("timm:vit_tiny_patch16_224"), AsOnCuda("fp16")
    once = trace_once(source, METHOD, micro_batch=4, casts=casts)
    predicted = trace_model(source, METHOD, micro_batch=4, casts=casts).step.at(micro_batch=4)
    assert any("flash_attention" in operator.name for operator in once.operators)

    def called(step: TracedStep) -> Counter[str]:
        found: Counter[str] = Counter()
        for (operator, _), count in step.call_counts().items():
            found[step.operators[operator].name] += count
        return found

    assert called(once) == called(predicted)


@pytest.mark.parametrize(("width", "learns"), [(8, False), (8, True), (4, False)])
def test_attention_on_meta_is_one_kernel_where_torch_has_one(width: int, *, learns: bool) -> None:
    """Not for values of another width than keys, nor for a mask that learns: as fake tensors of a processor."""

    def is_one_kernel(mode: Any, device: str) -> bool:
        with mode, torch.profiler.profile() as profiler, AsOnCuda("fp32"):
            query = torch.empty(2, 3, 6, 8, device=device, requires_grad=True)
            value = torch.empty(2, 3, 6, width, device=device)
            mask = torch.empty(6, 6, device=device, requires_grad=learns)
            torch.nn.functional.scaled_dot_product_attention(query, query, value, mask)
        return any("flash" in event.name for event in profiler.events() or [])

    expected = width == 8 and not learns
    assert is_one_kernel(nullcontext(), "meta") == expected
    assert is_one_kernel(FakeTensorMode(), "cpu") == expected


HELD: list[Tensor] = []


def three_readers(x: Tensor) -> Tensor:
    return x.sin() + x.cos() + x.exp()


def residual(x: Tensor) -> Tensor:
    """Both summands are given the same gradient: while one holds it, it stays as it is."""
    return x + x.sin() + x


def concatenated(x: Tensor) -> Tensor:
    """The first gradient is a part of a larger one."""
    return torch.cat((x, x.sin()), dim=1).cos() * torch.cat((x, x.exp()), dim=1)


def kept(x: Tensor) -> Tensor:
    """A script that holds on to a gradient."""
    a = x * 2
    a.retain_grad()
    HELD.append(a)
    return a.sin() + a.cos()


def transposed(x: Tensor) -> Tensor:
    return x.t().sin() + x.t().cos() + x.exp().t()


def in_parts(x: Tensor) -> Tensor:
    """Gradients of parts have gaps."""
    return x[:, ::2].sin() + x[:, ::2].cos()


class Doubled(torch.autograd.Function):
    """A gradient that a script adds up itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = gradients[0] + x
        return found


def added_by_a_script(x: Tensor) -> Tensor:
    doubled: Tensor = Doubled.apply(x)
    return doubled.sin() + doubled.cos()


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Read the input twice."""
        return x.sin() + x


def checkpointed(x: Tensor) -> Tensor:
    """What is computed again adds as a forward pass does."""
    found: Tensor = checkpoint(Block(), x * 2, use_reentrant=False)
    return found


CASES = (
    *(three_readers, residual, concatenated, kept, transposed, in_parts),
    *(added_by_a_script, checkpointed),
)


def loss(function: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.ones(4, 6, requires_grad=True) * 1
    return function(x).sum()


def traced(function: Callable[[Tensor], Tensor]) -> Recorder:
    with without_content("cpu"), Recorder(ModulePaths(nn.Identity())) as recorder:
        start = loss(function)
        recorder.begin(Phase.BACKWARD)
        start.backward()  # type: ignore[no-untyped-call]
    found: Recorder = recorder
    return found


_SUMS = ("aten::add", "aten::add_")
_MICRO_BATCH = 2


def sums_of_calls(calls: Sequence[Call], operators: Sequence[Operator]) -> Counter[str]:
    """In the backward pass of a trace."""
    names = (operators[call.operator].name for call in calls if call.phase is Phase.BACKWARD)
    short = (f"aten::{name.split('.')[1]}" for name in names)
    return Counter(name for name in short if name in _SUMS)


def sums_of_backward(start: Tensor) -> Counter[str]:
    """In a real backward pass from here."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        start.backward()  # type: ignore[no-untyped-call]
    names = (event.name for event in profiled.events() or ())
    return Counter(name for name in names if name in _SUMS)


def traced_and_real(source: ModelSource) -> tuple[Counter[str], Counter[str]]:
    """Of a model's step."""
    with without_content("cpu"):
        step = record_step(build_model(source, SGD_LOOP), _MICRO_BATCH)
    model = build_model(source, SGD_LOOP)
    model.optimizer.zero_grad()
    batch = source.draw_batch(_MICRO_BATCH)
    outputs = model.module(*batch.positional, **batch.keyword)
    return (
        sums_of_calls(step.calls, step.operators),
        sums_of_backward(source.loss(outputs, batch.targets)),
    )


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_sums_of_a_traced_backward_pass_are_those_of_a_real_one(
    function: Callable[[Tensor], Tensor],
) -> None:
    recorder = traced(function)
    found = sums_of_calls(recorder.calls, recorder.operators)
    assert found == sums_of_backward(loss(function))
    assert found.total() > 0


DENSE = """
import torch
from torchvision.models import DenseNet


def model():
    return DenseNet(8, (3, 4), 16, num_classes=10), torch.randn(2, 3, 32, 32)
"""


def test_sums_of_a_model_whose_layers_read_all_before_them_are_those_of_a_real_step(
    tmp_path: Path,
) -> None:
    file = tmp_path / "dense.py"
    file.write_text(DENSE)
    found, real = traced_and_real(find_source(f"{file}:model"))
    assert found == real
    assert found["aten::add_"] > found["aten::add"] > 0


def test_a_sum_in_place_makes_no_tensor() -> None:
    sums = [o for o in traced(three_readers).operators if o.name == "aten.add_.Tensor"]
    assert {(operator.mutated, operator.outputs) for operator in sums} == {((0,), ())}

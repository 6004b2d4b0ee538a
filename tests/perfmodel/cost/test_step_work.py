"""The work of a step: families of kernels by their shapes, sums by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from perfmodel.cost.step_work import PRODUCTS, STREAMS, StepWork, step_work
from perfmodel.workload import Call, Operator, Phase, TensorSpec
from perfmodel.workload.step import Segment, TracedStep
from tests.perfmodel.operators import addition, matmul, operator, spec
from tests.perfmodel.traces import WIDTH, traced


def step_of(*calls: tuple[Operator, Phase]) -> TracedStep:
    made = tuple(Call(operator=i, phase=phase, module="") for i, (_, phase) in enumerate(calls))
    operators = tuple(each for each, _ in calls)
    segments = (Segment(count=1, calls=made),)
    return replace(traced().at(micro_batch=2), operators=operators, segments=segments)


def convolution(groups: int, channels: int, *, kernel: int = 3, side: int = 8) -> Operator:
    image = spec(4, channels, side, side)
    weight = spec(channels, channels // groups, kernel, kernel)
    pad = [kernel // 2] * 2
    return operator(
        *("aten.convolution.default", (image, weight), (image,)),
        *(None, [1, 1], pad, [1, 1], False, [0, 0], groups),
    )


def work_of(called: Operator, phase: Phase = Phase.FORWARD, **modes: Any) -> StepWork:
    """Of one call, without an update."""
    return step_work(step_of((called, phase)), has_optimizer=False, **modes)


def families(work: StepWork) -> list[str]:
    return [(*PRODUCTS, *STREAMS)[index] for index in work.family]


def test_an_optimizer_streams_its_parameters_and_half_precision_halves_bytes() -> None:
    step = step_of((addition(10**6), Phase.FORWARD))
    plain, halved = step_work(step), step_work(step, is_pure_half=True)
    assert families(plain) == ["pointwise", "optimizer"]
    assert halved.moved_bytes == pytest.approx(plain.moved_bytes / 2)
    assert (plain.precision, halved.precision) == ("fp32", "half")


@pytest.mark.parametrize(
    ("groups", "channels", "kernel", "family"),
    [
        (1, 64, 3, "conv"),
        (1, 64, 1, "conv 1x1"),
        (1, 3, 7, "stem"),
        (64, 64, 3, "depthwise"),
        (64, 64, 7, "depthwise 7x7"),
        (16, 64, 3, "group 8"),
        (4, 64, 3, "group 32"),
        (2, 128, 3, "group"),
    ],
)
def test_families_of_convolutions(groups: int, channels: int, kernel: int, family: str) -> None:
    called = convolution(groups, channels, kernel=kernel)
    work = work_of(called)
    assert families(work) == [f"{family} forward"]
    assert work.flop == pytest.approx(called.flop)


@pytest.mark.parametrize(
    ("groups", "channels", "family", "padded"),
    [
        (32, 4, "group 8", 1),
        (64, 32, "group 32", 1),
        (32, 6, "group untuned", 1),
        (4, 16, "group untuned", 1),
        (8, 4, "group 8", 4),
        (48, 16, "group 32", 4 / 3),
        (48, 128, "group", 1),
        (1, 64, "conv", 1),
    ],
)
def test_channels_side_by_side_have_fast_groups_of_some_sizes(
    groups: int, channels: int, family: str, padded: float
) -> None:
    """Of 4, 8, 16 or 32 channels, 32 groups at a time, and those of a whole tile."""
    called = convolution(groups, groups * channels)
    last = work_of(called, is_pure_half=True, memory_format="channels_last")
    assert families(last) == [f"{family} forward"]
    assert last.flop.tolist() == pytest.approx([padded * called.flop])
    for is_half, memory_format in ((False, "channels_last"), (True, "contiguous")):
        other = work_of(called, is_pure_half=is_half, memory_format=memory_format)
        assert "untuned" not in families(other)[0]


def test_an_update_passes_over_what_is_trained() -> None:
    """SGD with momentum goes over its elements five times, AdamW and what is unknown seven times."""
    step = step_of((addition(10), Phase.FORWARD))
    for optimizer, passes in (("sgd", 5), ("adamw", 7), ("lion", 7)):
        other = replace(step, method=replace(step.method, optimizer=optimizer))
        for is_half in (False, True):
            work = step_work(other, is_pure_half=is_half)
            assert work.moved_bytes[-1] == passes * WIDTH**2 * (2 if is_half else 4)
            assert (work.phase[-1], work.operator[-1], work.count[-1]) == (2, -1, 1)
    frozen = replace(step, parameters=(replace(step.parameters[0], ready_after=None),))
    assert step_work(frozen).moved_bytes[-1] == 0
    assert step_work(frozen).launches[2] == 0


def backward(
    groups: int, channels: int, mask: Sequence[bool] = (True, True, False), *, side: int = 8
) -> Operator:
    image, weight = spec(4, channels, side, side), spec(64, channels // groups, 3, 3)
    gradient = spec(4, 64, side, side)
    return operator(
        *("aten.convolution_backward.default", (gradient, image, weight), (image, weight)),
        *([0], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, list(mask)),
    )


def test_gradients_of_weights_sum_over_samples_and_pixels_those_of_inputs_over_filters() -> None:
    """4 x 1024 terms behind each weight are eight parts of 512; 32 filters x 9 terms behind each pixel are one."""
    called = backward(2, 32, side=32)
    work = work_of(called, Phase.BACKWARD)
    assert families(work) == ["group 32 inputs", "group 32 weights"]
    assert work.flop.sum() == pytest.approx(called.flop)
    assert work.filling == pytest.approx([4 * 32 * 1024, 64 * 16 * 9 * 4 * 1024 / 512])
    assert work.channels.tolist() == [16, 16]


def test_a_bias_is_summed_over_the_gradient_and_an_image_needs_none() -> None:
    bias = work_of(backward(1, 32, [False, True, True]), Phase.BACKWARD)
    assert families(bias) == ["conv weights", "reduction"]
    assert bias.moved_bytes[1] == 4 * 64 * 64 * 4
    for channels, mask, found in (
        (3, [True, True, False], ["stem weights", "stem weights"]),
        (4, [False, True, False], ["stem weights"]),
        (5, [False, True, False], ["conv weights"]),
    ):
        assert families(work_of(backward(1, channels, mask), Phase.BACKWARD)) == found


def test_a_transposed_convolution_is_the_gradient_of_the_other_way_round() -> None:
    """32 channels of 8 x 8 become 16 of 16 x 16 through filters of 2 x 2."""
    image, weight, result = spec(4, 32, 8, 8), spec(32, 16, 2, 2), spec(4, 16, 16, 16)
    rest = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    forward = operator("aten.convolution.default", (image, weight), (result,), None, *rest)
    back = operator(
        *("aten.convolution_backward.default", (result, image, weight), (image, weight)),
        *([0], *rest, [True, True, False]),
    )
    work = step_work(step_of((forward, Phase.FORWARD), (back, Phase.BACKWARD)), has_optimizer=False)
    assert families(work) == ["conv inputs", "conv forward", "conv weights"]
    assert work.flop == pytest.approx([forward.flop] * 3)
    assert work.flop[1:].sum() == pytest.approx(back.flop)
    assert work.filling[:2] == pytest.approx([4 * 16 * 256, 4 * 32 * 64])


#: Name, inputs and result of a product; results, the sum behind each, the narrowest side; batched or not.
PRODUCTS_BY_HAND = [
    ("aten.mm.default", ((24, 1024), (1024, 40)), (24, 40), 24 * 40, 1024, 24, "mm"),
    ("aten.addmm.default", ((40,), (24, 16), (16, 40)), (24, 40), 24 * 40, 16, 16, "mm"),
    ("aten.bmm.default", ((6, 24, 64), (6, 64, 40)), (6, 24, 40), 6 * 24 * 40, 64, 24, "bmm"),
    ("aten.baddbmm.default", ((1,), (6, 24, 64), (6, 64, 40)), (6, 24, 40), 5760, 64, 24, "bmm"),
    ("aten.linear.default", ((2, 3, 64), (40, 64)), (2, 3, 40), 6 * 40, 64, 16, "mm"),
]


@pytest.mark.parametrize(
    ("name", "inputs", "result", "results", "depth", "narrow", "family"), PRODUCTS_BY_HAND
)
def test_sizes_of_products(  # noqa: PLR0913 - a column each
    *,
    name: str,
    inputs: tuple[tuple[int, ...], ...],
    result: tuple[int, ...],
    results: int,
    depth: int,
    narrow: int,
    family: str,
) -> None:
    called = operator(name, tuple(spec(*shape) for shape in inputs), (spec(*result),))
    for phase, end in ((Phase.FORWARD, "forward"), (Phase.BACKWARD, "backward")):
        work = work_of(called, phase)
        assert families(work) == [f"{family} {end}"]
        assert work.filling == pytest.approx([results * max(1, depth / 512)])
        assert work.channels.tolist() == [narrow]
        assert work.flop.tolist() == [called.flop]
        assert work.moved_bytes.tolist() == [called.read_bytes + called.written_bytes]


def test_a_product_of_one_tensor_is_that_with_itself() -> None:
    """As a file may have it."""
    square = operator("aten.mm.default", (spec(24, 24),) * 2, (spec(24, 24),))
    both, one = work_of(square), work_of(replace(square, inputs=square.inputs[:1]))
    assert one.filling.tolist() == both.filling.tolist()
    assert one.channels.tolist() == both.channels.tolist()


@pytest.mark.parametrize(
    ("called", "odd"),
    [
        (matmul(32, 64, 64), 0.0),
        (matmul(33, 64, 64), 1.0),
        (convolution(1, 32), 0.0),
        (convolution(1, 36), 1.0),
        (replace(convolution(1, 32), inputs=(spec(4, 32, 8, 8), spec(36, 32, 3, 3))), 1.0),
    ],
    ids=range(5),
)
def test_tensor_cores_need_multiples_of_eight(called: Operator, odd: float) -> None:
    assert work_of(called, is_pure_half=True).is_odd.tolist() == [odd]
    assert work_of(called).is_odd.tolist() == [0.0]


def test_recurrent_layers_fill_the_device_with_every_instant() -> None:
    """3 sequences of 5 instants, 24 numbers each, through 16 states."""
    tokens, gates, states = spec(3, 5, 24), spec(64, 24), spec(64, 16)
    called = operator("aten.mkldnn_rnn_layer.default", (tokens, gates, states), (spec(3, 5, 16),))
    work = work_of(called)
    assert (families(work), work.flop.tolist()) == (["mm forward"], [called.flop])
    assert (work.filling.tolist(), work.channels.tolist()) == ([3 * 5 * 16], [24])


def test_attention_fills_the_device_with_its_queries() -> None:
    """2 samples, 4 heads, 16 queries of 24 numbers, 48 keys; the backward pass has a gradient before them."""
    query, key = spec(2, 4, 16, 24), spec(2, 4, 48, 24)
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    forward = operator(f"{name}.default", (query, key, key), (query,))
    back = operator(f"{name}_backward.default", (key, query, key, key), (query, key, key))
    step = step_of((forward, Phase.FORWARD), (back, Phase.BACKWARD))
    work = step_work(step, has_optimizer=False)
    assert families(work) == ["attention forward", "attention backward"]
    assert work.filling.tolist() == [2 * 4 * 16 * 24] * 2
    assert work.channels.tolist() == [24, 24]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("add", "pointwise"),
        ("fill_", "fill"),
        ("silu", "function"),
        ("native_batch_norm", "batch norm forward"),
        ("native_layer_norm_backward", "layer norm backward"),
        ("_fused_rms_norm", "layer norm forward"),
        ("native_group_norm", "group norm forward"),
        ("_softmax", "softmax forward"),
        ("_log_softmax_backward_data", "softmax backward"),
        ("max_pool2d_with_indices", "pool forward"),
        ("avg_pool2d_backward", "pool backward"),
        ("upsample_nearest2d", "resize forward"),
        ("grid_sampler_2d_backward", "resize backward"),
        ("native_dropout", "dropout"),
        ("native_dropout_backward", "dropout"),
        ("cat", "join"),
        ("_to_copy", "cast"),
        ("var_mean", "reduction"),
        ("sum", "reduction"),
        ("embedding", "scatter"),
        ("embedding_dense_backward", "scatter"),
        ("nll_loss_forward", "scatter"),
        ("gelu", "function"),
        ("relu_", "pointwise"),
        ("clone", "copy"),
        ("zeros_like", "fill"),
        ("fft_fft", "other"),
    ],
)
def test_families_of_what_moves_bytes_alone(name: str, family: str) -> None:
    for dtype in ("float32", "float16"):
        tensor = replace(spec(8, 8), dtype=dtype)
        called = operator(f"aten.{name}.default", (tensor,), (tensor,))
        work = work_of(called)
        assert families(work) == [family]
        assert work.flop.tolist() == [0.0]


def test_sixteen_bit_halves_what_was_single_precision_alone() -> None:
    """Of 128 bytes 64 are of indices, which keep theirs."""
    indices = TensorSpec(shape=(8,), dtype="int64")
    called = operator("aten.where.self", (spec(8), indices), (spec(8),))
    assert work_of(called).moved_bytes.tolist() == [128.0]
    assert work_of(called, is_pure_half=True).moved_bytes.tolist() == [96.0]


@pytest.mark.parametrize(("channels", "found"), [(8, "channels_last"), (1, "contiguous")])
def test_images_tell_how_they_lie(channels: int, found: str) -> None:
    """The stride of one channel is 1 either way."""
    called = convolution(1, 8)
    image = replace(spec(4, channels, 8, 8), stride=(64 * channels, 1, 8 * channels, channels))
    lying = replace(called, inputs=(image, called.inputs[1]))
    step = step_of((lying, Phase.FORWARD), (addition(4), Phase.FORWARD))
    assert step_work(step).memory_format == found
    assert step_work(step, memory_format="contiguous").memory_format == "contiguous"
    assert step_work(step_of((called, Phase.FORWARD))).memory_format == "contiguous"


def test_autocast_computes_in_half_precision() -> None:
    step = step_of((addition(4), Phase.FORWARD))
    cast = replace(step, method=replace(step.method, precision="bf16"))
    assert (step_work(step).precision, step_work(cast).precision) == ("fp32", "half")

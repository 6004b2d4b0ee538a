"""What places an operator among others of its family: sizes by hand; the curve through them at its ends."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel.cost.families import (
    attends,
    family,
    family_on,
    features,
    is_half,
    is_of_optimizer,
    kernels_of_gpu,
    optimizer_family,
    optimizer_features,
    optimizer_work,
    unlike_families,
    wider_families,
    work,
)
from perfmodel.statistics import GaussianProcess, covariance
from perfmodel.workload import Operator, Specs, TensorSpec
from tests.perfmodel.operators import addition, matmul, operator, spec


def logs(*sizes: float) -> list[float]:
    return [math.log(size) for size in sizes]


def convolution(
    image: tuple[int, ...] = (2, 8, 20, 10),
    weight: tuple[int, ...] = (12, 4, 3, 5),
    result: tuple[int, ...] = (2, 12, 10, 5),
    groups: int = 2,
    stride: int = 2,
    dilation: int = 1,
) -> Operator:
    return operator(
        *("aten.convolution.default", (spec(*image), spec(*weight)), (spec(*result),)),
        *(None, [stride] * 2, [1, 2], [dilation] * 2, False, [0, 0], groups),
    )


def backward(called: Operator, mask: list[bool]) -> Operator:
    image, weight, result = called.inputs[0], called.inputs[1], called.outputs[0]
    return operator(
        *("aten.convolution_backward.default", (result, image, weight), (image, weight)),
        *([0], [2, 2], [1, 2], [1, 1], False, [0, 0], 2, mask),
    )


def layer_norm(*scaled_by: TensorSpec, is_backward: bool = False) -> Operator:
    """Of 54 rows of 88 numbers in two dimensions."""
    image, rows = spec(6, 9, 8, 11), spec(6, 9, 1, 1)
    scales: list[object] = [{"tensor": at + 1 + 3 * is_backward} for at in range(len(scaled_by))]
    scales += [None] * (2 - len(scaled_by))
    if not is_backward:
        positional = [{"tensor": 0}, [8, 11], *scales, 1e-5]
        inputs, outputs = (image, *scaled_by), (image, rows, rows)
        return Operator.of(
            "aten.native_layer_norm.default", inputs, outputs, json.dumps([positional, {}])
        )
    tensors = [{"tensor": at} for at in range(4)]
    positional = [*tensors[:2], [8, 11], *tensors[2:], *scales, [True] * 3]
    return Operator.of(
        "aten.native_layer_norm_backward.default",
        (image, image, rows, rows, *scaled_by),
        (image, *scaled_by),
        json.dumps([positional, {}]),
    )


def test_a_convolution_is_placed_by_eight_sizes() -> None:
    """Samples, pixels, channels and filters of a group, groups, kernel, pixels in over out, whether inputs count."""
    sizes = logs(2, 50, 4, 6, 2, 15, 200 / 50)
    assert features(convolution()) == pytest.approx([*sizes, 1.0])
    for asked, value in ((True, 1.0), (False, 0.0)):
        found = features(backward(convolution(), [asked, True, False]))
        assert found == pytest.approx([*sizes, value])


def test_a_product_is_placed_by_its_sides_and_how_factors_lie() -> None:
    """Batches, rows, sum and columns; a transposed factor has its innermost stride elsewhere."""
    first, second = spec(3, 4, 5, 6), spec(3, 4, 6, 7)
    product = operator("aten.bmm.default", (first, second), (spec(3, 4, 5, 7),))
    assert features(product) == pytest.approx([*logs(12, 5, 6, 7), 0.0, 0.0])
    turned = replace(second, stride=(168, 42, 1, 6))
    lying = replace(product, inputs=(first, turned))
    assert features(lying) == pytest.approx([*logs(12, 5, 6, 7), 0.0, 1.0])
    assert features(replace(product, inputs=(turned, second)))[-2:] == (1.0, 0.0)
    straight = replace(second, stride=(168, 42, 7, 1))
    assert features(replace(product, inputs=(first, straight)))[-1] == 0.0
    plain = operator("aten.addmm.default", (spec(7), spec(5, 6), spec(6, 7)), (spec(5, 7),))
    assert features(plain) == pytest.approx([*logs(1, 5, 6, 7), 0.0, 0.0])


def test_attention_is_placed_by_heads_queries_keys_and_width() -> None:
    query, key = spec(2, 3, 16, 24), spec(2, 3, 48, 24)
    name = "aten._scaled_dot_product_flash_attention"
    forward = operator(f"{name}.default", (query, key, key), (query,))
    back = operator(f"{name}_backward.default", (key, query, key, key), (query,))
    for called in (forward, back):
        assert features(called) == pytest.approx(logs(6, 16, 48, 24))


def test_norms_and_pools_are_placed_by_elements_channels_and_pixels() -> None:
    image, channels = spec(2, 6, 5, 4), spec(6)
    batch = operator("aten.native_batch_norm.default", (image, channels, channels), (image,))
    assert features(batch) == pytest.approx(logs(240, 6, 20))
    pool = operator("aten.avg_pool2d.default", (spec(2, 6, 8, 4),), (spec(2, 6, 4, 2),))
    assert features(pool) == pytest.approx(logs(384, 96, 4))


def test_the_rest_is_placed_by_bytes_widths_jumps_and_whether_shapes_differ() -> None:
    plain = operator("aten.add.Tensor", (spec(10, 7), spec(10, 7)), (spec(10, 7),))
    half = [0.5 * each for each in logs(7, 7)]
    assert features(plain) == pytest.approx([*logs(560, 280), *half, 0.0, 0.0])
    jumping = replace(spec(10, 7), stride=(1, 10))
    wide = operator("aten.sum.default", (jumping, spec(7)), (spec(3),))
    found = [*logs(280 + 28, 12), *(0.5 * each for each in logs(7, 3)), 1.0, 1.0]
    assert features(wide) == pytest.approx(found)
    # Numbers of the host have no shape, and results of nothing no width.
    scalar = operator("aten.add.Tensor", (spec(10, 7), spec()), (spec(),))
    assert features(scalar)[3:] == pytest.approx([0.0, 0.0, 0.0])


def test_work_is_a_call_its_flop_and_bytes_of_four_kinds() -> None:
    """A further sample reads the weight of a convolution again; of the rest the largest input comes first."""
    called = convolution()
    image, weight, result = 4 * 3200, 4 * 720, 4 * 1200
    assert work(called) == (1.0, called.flop, image, weight, result, weight)
    assert work(convolution(image=(1, 8, 20, 10)))[-1] == 0
    assert work(convolution(image=(8, 8, 20, 10)))[-1] == 7 * weight
    product = matmul(3, 5, 7)
    assert work(product) == (1.0, 210.0, 60.0, 140.0, 84, 0.0)
    linear = operator("aten.linear.default", (spec(3, 5), spec(7, 5), spec(7)), (spec(3, 7),))
    assert work(linear) == (1.0, 210.0, 60.0, 140.0, 84, 0.0)
    unlike = operator("aten.add.Tensor", (spec(10), spec(40)), (spec(40),))
    assert work(unlike) == (1.0, 0.0, 160.0, 40.0, 160, 0.0)
    # An embedding reads less than its table.
    table = operator("aten.embedding.default", (spec(1000, 8), spec(2)), (spec(2, 8),))
    assert work(table) == (1.0, 0.0, 64.0 + 8.0, 0.0, 64, 0.0)
    # Bags sort their indices and go from row to row.
    bags = operator(
        "aten._embedding_bag.default",
        (spec(1000, 8), TensorSpec(shape=(6,), dtype="int64")),
        (spec(2, 8),),
    )
    assert work(bags) == (1.0, 0.0, 6 * 32.0 + 6 * 8.0, 0.0, 64, 6)
    # A tenth of all bytes bears a tenth of what a step costs by itself.
    assert optimizer_work(400, 4000) == (1.0, 400.0, 0.1)
    assert optimizer_work(0, 0) == (1.0, 0.0, 0.0)
    assert optimizer_features(400, 4000) == pytest.approx(tuple(logs(400, 4000)))
    assert optimizer_features(0, 0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        # More than one sample, and a kernel beyond 1 x 1: blocks.
        ({}, "dense"),
        # One small image and a kernel of at most 3 x 3: patches, unless the image or the kernel is large.
        ({"image": (1, 8, 20, 10), "result": (1, 12, 20, 10)}, "patches"),
        ({"image": (1, 128, 20, 10), "weight": (12, 128, 3, 5)}, "dense"),
        ({"image": (1, 8, 20, 10), "weight": (12, 8, 4, 4)}, "dense"),
        # 1 x 1 on few samples: patches; on sixteen, with a stride or dilated: blocks.
        ({"weight": (12, 8, 1, 1), "stride": 1}, "patches"),
        ({"weight": (12, 8, 1, 1), "stride": 2}, "dense"),
        ({"weight": (12, 8, 1, 1), "stride": 1, "dilation": 2}, "dense"),
        ({"image": (16, 8, 20, 10), "weight": (12, 8, 1, 1), "stride": 1}, "dense"),
        ({"image": (15, 8, 20, 10), "weight": (12, 8, 1, 1), "stride": 1}, "patches"),
        # An image of 20,480 numbers is small, one row more is not.
        ({"image": (1, 8, 64, 40), "result": (1, 12, 64, 40)}, "patches"),
        ({"image": (1, 8, 65, 40), "result": (1, 12, 65, 40)}, "dense"),
    ],
)
def test_a_cpu_convolves_in_blocks_or_over_patches(changes: dict[str, Any], way: str) -> None:
    """By the rule of ``ConvParams::use_mkldnn``."""
    called = convolution(groups=1, **({"weight": (12, 8, 3, 5)} | changes))
    assert family(called) == f"convolution {way}"
    assert family_on(family(called), gpu=False) == f"convolution {way}"
    assert family_on(family(called), gpu=True) == "convolution dense"


@pytest.mark.parametrize(
    ("groups", "kind"),
    [(1, "dense"), (16, "depthwise"), (2, "grouped"), (4, "grouped of odd widths")],
)
def test_convolutions_are_told_apart_by_their_groups(groups: int, kind: str) -> None:
    """On a CPU, too, by whether 8 channels of a group lie in a block."""
    called = convolution((2, 16, 14, 14), (16, 16 // groups, 3, 3), groups=groups)
    assert family(called) == f"convolution {kind}"
    image = replace(called.inputs[0], stride=(16 * 14 * 14, 1, 14 * 16, 16))
    last = replace(called, inputs=(image, called.inputs[1]))
    on_gpu = f"convolution {kind} channels last"
    assert family(last) == on_gpu
    assert family_on(family(last), gpu=True) == on_gpu.replace(" of odd widths", "")
    on_cpu = on_gpu if kind == "depthwise" else f"convolution {kind}"
    assert family_on(family(last), gpu=False) == on_cpu


@pytest.mark.parametrize(("side", "detail"), [(5, ""), (7, " of large kernels")])
def test_large_depthwise_kernels_of_channels_side_by_side_are_others_on_a_gpu(
    side: int, detail: str
) -> None:
    called = convolution((2, 16, 14, 14), (16, 1, side, side), groups=16)
    assert family(called) == "convolution depthwise"
    image = replace(called.inputs[0], stride=(16 * 14 * 14, 1, 14 * 16, 16))
    last = family(replace(called, inputs=(image, called.inputs[1])))
    assert family_on(last, gpu=True) == f"convolution depthwise channels last{detail}"
    assert family_on(last, gpu=False) == "convolution depthwise channels last"
    assert wider_families(last)[-1] == "convolution depthwise"


@pytest.mark.parametrize(("side", "is_padded"), [(1, True), (2, False)])
def test_depthwise_kernels_that_read_mostly_padding_are_others_on_a_cpu(
    side: int, *, is_padded: bool
) -> None:
    """5 x 5 on one pixel, padded by 2, took 20 times as long as on four."""
    image = (2, 8, side, side)
    called = convolution(image, (8, 1, 5, 5), image, groups=8)
    assert family(called) == f"convolution depthwise{' mostly padded' if is_padded else ''}"
    assert family_on(family(called), gpu=True) == "convolution depthwise"


@pytest.mark.parametrize(
    ("inner", "columns", "transposed", "is_aligned"),
    [
        (768, 50304, False, True),
        (768, 50257, False, False),
        (50257, 768, False, False),
        (768, 50257, True, False),
    ],
)
def test_products_are_told_apart_by_where_their_rows_begin(
    inner: int, columns: int, *, transposed: bool, is_aligned: bool
) -> None:
    """A row of 50,257 numbers of 2 bytes is no multiple of 16 bytes."""

    def half(rows: int, width: int, stride: tuple[int, int] | None = None) -> TensorSpec:
        return TensorSpec(shape=(rows, width), dtype="bfloat16", stride=stride)

    second = half(inner, columns, (1, inner) if transposed else None)
    called = operator("aten.mm.default", (half(32, inner), second), (half(32, columns),))
    mark = "" if is_aligned else " unaligned"
    assert family(called) == f"matmul{mark} in 16 bit"
    assert family_on("matmul unaligned in 16 bit", gpu=False) == "matmul in 16 bit"
    assert family(matmul(32, inner, columns)) == f"matmul{mark}"
    # Of 4 bytes two numbers less are as good as none.
    assert family(matmul(32, 772, 772)) == "matmul"


@pytest.mark.parametrize(
    ("kind", "rows", "classes"),
    [("nll_loss", (64,), 50_000), ("nll_loss2d", (4, 8, 2), 5), ("nll_loss", (64,), 1)],
)
@pytest.mark.parametrize("weights", [0, 1])
def test_a_loss_looks_one_score_a_row_up(
    kind: str, rows: tuple[int, ...], classes: int, weights: int
) -> None:
    """Of 64 rows of 50,000 scores the forward pass reads 64, the backward pass writes all."""
    scores, targets = spec(rows[0], classes, *rows[1:]), TensorSpec(shape=rows, dtype="int64")
    read = (scores, targets, *(spec(classes),) * weights)
    forward = operator(f"aten.{kind}_forward.default", read, (spec(), spec()))
    assert work(forward)[2:] == (512.0, 512.0, 8.0, 64)
    backward = operator(f"aten.{kind}_backward.default", (spec(), *read, spec()), (scores,))
    assert work(backward)[2:] == (512.0, 512.0, 4.0 * 64 * classes, 64)


def test_tensors_in_one_order_of_memory_are_read_without_jumps() -> None:
    image = replace(spec(2, 8, 4, 4), stride=(128, 1, 32, 8))
    told = [
        features(operator("aten.add.Tensor", inputs, (image,)))[4]
        for inputs in ((image, image), (image, spec(2, 8, 4, 4)))
    ]
    copied = features(operator("aten.clone.default", (image,), (spec(2, 8, 4, 4),)))[4]
    summed = features(operator("aten.sum.dim_IntList", (image,), (spec(2, 8),)))[4]
    assert (*told, copied, summed) == (0.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("kind", ["native_batch_norm", "native_batch_norm_backward"])
@pytest.mark.parametrize("scales", [4, 0])
def test_a_channel_costs_its_bytes(kind: str, scales: int) -> None:
    """Whether or not weights scale it and statistics are kept."""
    pixels = spec(6, 5, 8, 2)
    images = (pixels,) * (2 if "backward" in kind else 1)
    called = operator(f"aten.{kind}.default", (*images, *(spec(5),) * scales), (pixels,))
    assert work(called, gpu=False)[5:] == (4 * 6 * 8 * 2,)
    # On a GPU 16 rows of 32 threads go through 6 samples of 16 pixels at once; there are 30 rows of pixels.
    assert work(called)[5:] == (4 * 6 * 8 * 2, 4 * 512, 30)
    assert features(called) == pytest.approx(logs(480, 5, 16))


def test_channels_beyond_those_at_a_time_wait() -> None:
    """Of 1,200 channels 300 have a block at a time; side by side, none has one of its own."""
    pixels = spec(2, 1200, 8, 8)
    called = operator("aten.native_batch_norm.default", (pixels,), (pixels,))
    assert work(called)[6:] == (4 * 512 * 4, 2400)
    side_by_side = replace(pixels, stride=(8 * 8 * 1200, 1, 8 * 1200, 1200))
    called = operator("aten.native_batch_norm.default", (side_by_side,), (side_by_side,))
    assert work(called)[6:] == (0, 0)


@pytest.mark.parametrize(
    ("samples", "pixels", "turns"), [(1, 256, 1), (3, 257, 3), (5, 600, 10), (17, 4, 2)]
)
def test_threads_of_a_channel_stand_in_rows_of_pixels(
    samples: int, pixels: int, turns: int
) -> None:
    """A block has 512 of them: 24 x 24 pixels take two turns a sample, of which the second is nearly idle."""
    image = spec(samples, 16, pixels, 1)
    called = operator("aten.native_batch_norm.default", (image,), (image,))
    assert work(called)[6] == turns * 512 * 4
    # cuDNN has no such rows.
    called = operator("aten.cudnn_batch_norm.default", (image,), (image,))
    assert work(called)[6] == samples * max(32, pixels) * 4


@pytest.mark.parametrize("image", [spec(8192, 408), spec(64, 16, 1, 1)])
def test_rows_and_single_pixels_have_their_channels_side_by_side(image: TensorSpec) -> None:
    called = operator("aten.native_batch_norm.default", (image,), (image,))
    assert family(called) == "native_batch_norm channels last"
    assert work(called)[6:] == (0, 0)


@pytest.mark.parametrize(
    ("mask", "taps", "reads"), [((1, 1), 1, 1), ((0, 1), 0, 1), ((1, 0), 1, 0)]
)
def test_a_convolution_by_channel_reads_pixels_for_every_tap(
    mask: tuple[int, int], taps: int, reads: int
) -> None:
    """Images of 4 x 4 pixels, results of 2 x 2: a warp of 32 threads goes through those of a sample."""
    result, image, weight = spec(10, 6, 2, 2), spec(10, 6, 4, 4), spec(6, 1, 3, 3)
    tensors: list[object] = [{"tensor": at} for at in range(3)]
    masks = [bool(each) for each in (*mask, 0)]
    positional = [*tensors, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 6, masks]
    called = replace(
        operator("aten.convolution_backward.default", (result, image, weight), (image, weight)),
        arguments=json.dumps([positional, {}]),
    )
    assert work(called)[6:] == (taps * 960 * 9, reads * 10 * 32 * 54)
    assert len(work(called, gpu=False)) == 6


def test_attention_multiplies_whole_tiles() -> None:
    """24 queries and keys in heads of 32 take what 64 in heads of 64 do."""
    head = spec(2, 1, 24, 32)
    called = operator("aten._scaled_dot_product_efficient_attention.default", (head,) * 3, (head,))
    called = replace(called, flop=9.0)
    assert work(called)[6:] == pytest.approx((9.0 * (64 / 24) ** 2 * 2,))


def test_attention_without_features_of_its_own_has_no_tiles() -> None:
    """Kernels to come are like any operator."""
    name = "_scaled_dot_product_fused_attention_overrideable"
    head = spec(2, 1, 24, 32)
    assert len(work(operator(f"aten.{name}.default", (head,) * 3, (head,)))) == 6
    assert not attends(name)
    assert attends("_scaled_dot_product_efficient_attention in 16 bit")


def test_a_recurrence_without_timings_is_like_that_in_16_bit() -> None:
    assert unlike_families("_cudnn_rnn") == ("_cudnn_rnn in 16 bit",)
    assert unlike_families("_cudnn_rnn in 16 bit") == ()


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("scaled_by", [(spec(8, 11), spec(8, 11)), (spec(8, 11),), ()])
def test_a_row_costs_whatever_its_width(scaled_by: Specs, *, is_backward: bool) -> None:
    """Of a normalisation a row is what it normalises together, scaled or not."""
    called = layer_norm(*scaled_by, is_backward=is_backward)
    assert work(called)[-1] == 54
    assert features(called) == pytest.approx(logs(54 * 88, 88))


def test_a_softmax_has_rows_of_its_last_dimension() -> None:
    for shape, rows in (((4, 5, 7), 20), ((7,), 1), ((), 1)):
        assert work(operator("aten._softmax.default", (spec(*shape),), (spec(*shape),)))[-1] == rows


def test_kernels_of_one_operator_are_told_apart_but_not_where_they_write() -> None:
    exact = operator("aten.gelu.default", (spec(4),), (spec(4),))
    fast = replace(exact, arguments='[[{"tensor": 0}], {"approximate": "tanh"}]')
    assert (family(exact), family(fast)) == ("function gelu", "function gelu tanh")
    in_place = operator("aten.add_.Tensor", (spec(4), spec(4)), ())
    assert family(in_place) == family(addition(4)) == "pointwise"
    assert len(features(in_place)) == len(features(addition(4)))


def test_families_are_looked_up_where_others_like_them_were_timed() -> None:
    called = addition(8)
    halved = tuple(TensorSpec(shape=each.shape, dtype="bfloat16") for each in called.inputs)
    assert family(replace(called, inputs=halved)) == "pointwise in 16 bit"
    # The first input decides.
    mixed = replace(called, inputs=(called.inputs[0], halved[0]))
    assert family(mixed) == "pointwise of mixed types"
    assert family_on(family(mixed), gpu=False) == "pointwise"
    assert (is_half("pointwise in 16 bit"), is_half("pointwise")) == (True, False)
    assert wider_families("pointwise in 16 bit") == ("pointwise",)
    assert wider_families("function gelu") == ("function",)
    assert wider_families("function gelu in 16 bit") == (
        *("function in 16 bit", "function gelu", "function"),
    )
    assert wider_families("convolution depthwise channels last") == ("convolution depthwise",)
    assert wider_families("pointwise") == ()
    grouped = "convolution grouped", "convolution grouped of odd widths"
    assert [wider_families(name) for name in grouped] == [grouped[1:], grouped[:1]]
    # Factors in 16 bit are other kernels, more than anything else makes them.
    assert wider_families("matmul unaligned in 16 bit") == (
        *("matmul in 16 bit", "matmul unaligned", "matmul"),
    )
    kinds = ("patches channels last", "dense channels last", "patches", "dense")
    names = [f"convolution {kind}{half}" for half in (" in 16 bit", "") for kind in kinds]
    assert list(wider_families(names[0])) == names[1:]
    assert family(replace(called, view=True)) == "view"
    kind = optimizer_family("adamw", "fused")
    assert (is_of_optimizer(kind), is_of_optimizer("pointwise")) == (True, False)


def test_kernels_of_a_gpu_are_found_under_the_names_of_a_trace_without_one() -> None:
    assert kernels_of_gpu("native_batch_norm_backward channels last") == (
        "cudnn_batch_norm_backward channels last",
    )
    attention = "_scaled_dot_product_flash_attention_for_cpu_backward in 16 bit"
    assert kernels_of_gpu(attention) == tuple(
        f"_scaled_dot_product_{kernel}_attention_backward in 16 bit"
        for kernel in ("cudnn", "flash", "efficient")
    )
    assert kernels_of_gpu("matmul") == ()


def test_a_convolution_without_timings_is_like_that_of_another_format_or_precision() -> None:
    of_groups = unlike_families("convolution_backward grouped of odd widths")
    assert of_groups[:2] == (
        *("convolution_backward grouped", "convolution_backward grouped channels last"),
    )
    assert of_groups[2:] == tuple(f"{name} in 16 bit" for name in of_groups[:2])
    assert unlike_families("matmul") == ()


#: What the operators of traced steps are called.
RAW_NAMES = [
    f"{kind}{detail}{half}"
    for kind, details in {
        "convolution dense": ("", " channels last"),
        "convolution patches": ("", " channels last"),
        "convolution grouped": ("", " channels last"),
        "convolution grouped of odd widths": ("", " channels last"),
        "convolution depthwise": ("", " channels last"),
        "convolution depthwise mostly padded": ("", " channels last"),
        "native_batch_norm": ("", " channels last"),
        "matmul": ("", " unaligned"),
        "pointwise": ("", " of mixed types"),
        "function gelu": ("", " tanh"),
    }.items()
    for detail in details
    for half in ("", " in 16 bit")
]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", RAW_NAMES)
def test_what_was_fitted_is_found_first(name: str, *, gpu: bool) -> None:
    """The name under which a kind of device stores it comes before all others that it stores."""
    stored = {family_on(each, gpu=gpu) for each in RAW_NAMES}
    found = next(each for each in (name, *wider_families(name)) if each in stored)
    assert found == family_on(name, gpu=gpu)


def test_a_curve_falls_off_as_matern_says() -> None:
    """(1 + r) exp(-r), r = sqrt(3) times the distance in lengths of each feature."""
    first, second = np.array([[0.0, 0.0]]), np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 6.0]])
    found = covariance(first, second, np.array([2.0, 4.0]), 0.5)
    near, far = math.sqrt(3), math.sqrt(3) * math.sqrt(1 + 1.5**2)
    assert found[0] == pytest.approx(
        [0.25, 0.25 * (1 + near) * math.exp(-near), 0.25 * (1 + far) * math.exp(-far)]
    )


def test_a_curve_is_the_mean_given_its_points() -> None:
    """Of two points far apart, each seen with noise: the middle of both far away, between it and the point there."""
    curve = GaussianProcess(
        inputs=np.array([[0.0], [1e4]]),
        targets=np.array([1.0, 3.0]),
        lengths=np.array([1.0]),
        spread=0.6,
        noise=0.3,
    )
    means, errors = curve.predict(np.array([[0.0], [5e3], [1e4], [1.0]]))
    share = 0.6**2 / (0.6**2 + 0.3**2)
    near = (1 + math.sqrt(3)) * math.exp(-math.sqrt(3))
    assert means == pytest.approx([2 - share, 2, 2 + share, 2 - share * near])
    variances = [0.36 * (1 - share * k**2) for k in (1.0, 0.0, 1.0, near)]
    assert errors**2 == pytest.approx(variances)
    # Points that agree are believed together: a mean is drawn to where more of them are.
    crowded = replace(
        curve, inputs=np.array([[0.0], [0.0], [1e4]]), targets=np.array([1.0, 1.0, 4.0])
    )
    pair = 2 / (2 * 0.36 + 0.09)
    alone = 1 / (0.36 + 0.09)
    mean = (pair * 1.0 + alone * 4.0) / (pair + alone)
    assert crowded.predict(np.array([[5e3]]))[0] == pytest.approx([mean])

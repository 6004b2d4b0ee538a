"""Grids of single layers, alone and in a row, and operators that are repeated from their record."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibrate.device import Cpu
from calibrate.layers import Layer, is_optimizer, planned_layers
from calibrate.probes import Session, compute, layers
from calibrate.probes.compute import Evictor, measure_optimizer
from calibrate.probes.layers import (
    chain_operators,
    chained,
    grouped,
    recorded_layer,
)
from calibrate.probes.replay import ReplayedOperator, index_limits, made_up, returned_tensors
from calibrate.replays import linked
from perfmodel.cost.families import family, features
from perfmodel.tracing.recorder import ModulePaths, Recorder
from perfmodel.tracing.step import without_content
from perfmodel.workload import Operator, TensorSpec
from tests.existing import existing
from tests.perfmodel.operators import operator as called
from tests.perfmodel.operators import spec

CPU = torch.device("cpu")
#: The smallest sizes, and the kinds that take them.
SIZES: dict[tuple[int, ...], tuple[str, ...]] = {
    (2, 8, 9, 16, 3, 2, 1): ("convolution",),
    (2, 3, 9, 16, 3, 2, 1): ("convolution",),
    (2, 8, 9, 8, 3, 1, 8): ("depthwise",),
    (4, 8, 16): ("linear",),
    (4, 6, 8): ("product",),
    (2, 2, 8, 16, 1): ("attention", "rotate"),
    (2, 8, 6, 2, 2): ("max_pool", "average_pool"),
    (6, 50, 16): ("embedding",),
    (2, 4, 8, 16, 3): ("cells",),
    (6, 16): ("rms_norm", "layer_norm", "gelu", "gelu_tanh", "softmax", "dropout", "bias", "loss"),
    (2, 8, 5): (
        *(
            "batch_norm",
            "channel_norm",
            "global_pool",
            "adaptive_pool",
            "residual",
            "scale",
            "upsample",
        ),
        *("concatenate", "permute", "roll", "group_norm"),
    ),
}
RECURRENT = Layer(kind="recurrent", sizes=(2, 4, 8, 16))
BAGS = Layer(kind="bags", sizes=(4, 3, 50, 16, 1))
CELLS = Layer(kind="cells", sizes=(2, 4, 8, 16, 3))
SMALL = tuple(Layer(kind=kind, sizes=sizes) for sizes, kinds in SIZES.items() for kind in kinds)


def repeated(operator: Operator) -> list[torch.Tensor]:
    limits = index_limits(operator)
    tensors = [
        made_up(spec, CPU, below=limits.get(position, 1))
        for position, spec in enumerate(operator.inputs)
    ]
    with torch.no_grad():
        result = ReplayedOperator(operator, CPU).bound(tensors)()
    return returned_tensors(operator, result)


@pytest.mark.parametrize("layer", SMALL, ids=lambda layer: layer.kind)
def test_a_repeated_operator_returns_what_the_original_returned(layer: Layer) -> None:
    found = recorded_layer(layer, CPU).calls
    assert found
    for operator, _ in found:
        results = repeated(operator)
        assert [tuple(t.shape) for t in results] == [spec.shape for spec in operator.outputs]
        assert [str(t.dtype) for t in results] == [f"torch.{s.dtype}" for s in operator.outputs]


SOURCE, *INDEX = ({"tensor": position} for position in range(4))


@pytest.mark.parametrize(
    ("name", "arguments", "limits"),
    [
        ("index.Tensor", [SOURCE, [None, INDEX[0]]], {1: 7}),
        ("index.Tensor", [SOURCE, [INDEX[0], None, INDEX[0]]], {1: 5}),
        ("_unsafe_index.Tensor", [SOURCE, [None, INDEX[0]]], {1: 7}),
        ("index_put_.default", [SOURCE, [INDEX[0], INDEX[1]], INDEX[2]], {1: 5, 2: 7}),
        ("_index_put_impl_.default", [SOURCE, [None, None, INDEX[0]], INDEX[1]], {1: 9}),
        ("_unsafe_index_put.default", [SOURCE, [INDEX[0]], INDEX[1]], {1: 5}),
        ("_unsafe_masked_index.default", [SOURCE, INDEX[0], [None, INDEX[1]], 0.0], {2: 7}),
        ("index_select.default", [SOURCE, 1, INDEX[0]], {1: 7}),
        ("index_add.default", [SOURCE, 1, INDEX[0], INDEX[1]], {1: 7}),
        ("index_copy.default", [SOURCE, 0, INDEX[0], INDEX[1]], {1: 5}),
        ("index_fill_.int_Scalar", [SOURCE, 2, INDEX[0], 1.0], {1: 9}),
        ("index_reduce.default", [SOURCE, 1, INDEX[0], INDEX[1], "mean"], {1: 7}),
        ("gather.default", [SOURCE, -2, INDEX[0]], {1: 7}),
        ("scatter.value", [SOURCE, 0, INDEX[0], 1.0], {1: 5}),
        ("scatter_add.default", [SOURCE, -1, INDEX[0], INDEX[1]], {1: 9}),
        ("scatter_reduce.two", [SOURCE, 1, INDEX[0], INDEX[1], "amax"], {1: 7}),
        ("take.default", [SOURCE, INDEX[0]], {1: 5 * 7 * 9}),
        ("put_.default", [SOURCE, INDEX[0], INDEX[1]], {1: 5 * 7 * 9}),
        ("embedding.default", [SOURCE, INDEX[0]], {1: 5}),
        ("_embedding_bag.default", [SOURCE, INDEX[0], INDEX[1]], {1: 5}),
        ("embedding_dense_backward.default", [SOURCE, INDEX[0], 300, -1, False], {1: 300}),
        ("nll_loss2d_forward.default", [SOURCE, INDEX[0], None, 1, -100], {1: 7}),
        ("add.Tensor", [SOURCE, INDEX[0]], {}),
        ("select.int", [INDEX[0], 0, 2], {}),
        ("an_operator_of_another_torch.default", [SOURCE, 1, INDEX[0]], {}),
    ],
)
def test_indices_reach_to_the_end_of_what_they_address(
    name: str, arguments: list[object], limits: dict[int, int]
) -> None:
    inputs = (spec(5, 7, 9), *(TensorSpec(shape=(4,), dtype="int64") for _ in INDEX))
    called = Operator.of(f"aten.{name}", inputs, (), json.dumps([arguments, {}]))
    assert index_limits(called) == limits


def test_classes_of_scores_without_samples_are_all_there_is() -> None:
    inputs = (spec(10), TensorSpec(shape=(), dtype="int64"))
    arguments = json.dumps([[SOURCE, INDEX[0], None, 1, -100], {}])
    called = Operator.of("aten.nll_loss_forward.default", inputs, (), arguments)
    assert index_limits(called) == {1: 10}


def test_made_up_indices_are_distinct_where_there_are_enough() -> None:
    few = made_up(TensorSpec(shape=(6, 50), dtype="int64"), CPU, below=300)
    assert sorted(few.flatten().tolist()) == list(range(300))
    many = made_up(TensorSpec(shape=(400,), dtype="int64"), CPU, below=300)
    assert 0 <= int(many.min()) < int(many.max()) < 300


def test_every_kind_of_the_grid_is_tried_here() -> None:
    planned = {layer.kind for layer in planned_layers() if not is_optimizer(layer)}
    alike = {"grouped", "relu", "silu", "hardswish", "sigmoid", "elu"}
    # Backward it reads a workspace that forward it left, and records do not hold.
    alike.add(RECURRENT.kind)
    # What begins a bag follows from the operators before it.
    alike.add(BAGS.kind)
    assert planned - alike == {layer.kind for layer in SMALL}


@pytest.mark.parametrize(("share", "smallest", "largest"), [(0.2, 3e4, 2e4), (1.0, 70, 7e6)])
def test_optimizers_are_timed_from_biases_to_tables(
    share: float, smallest: float, largest: float
) -> None:
    """No large tensor tells what each of the many small ones of a model takes."""
    for seed in range(20):
        sizes: dict[str, list[int]] = {}
        for layer in filter(is_optimizer, planned_layers(optimizer_share=share, seed=seed)):
            count, size = layer.sizes
            assert 1 <= count <= 200
            assert 16 <= size <= count * size <= 6e7
            sizes.setdefault(layer.kind, []).append(size)
        assert len(sizes) == 6
        assert all(min(each) <= smallest and max(each) >= largest for each in sizes.values())


def test_members_of_a_family_have_as_many_features_as_each_other() -> None:
    widths: dict[str, set[int]] = {}
    for layer in SMALL:
        for operator, _ in recorded_layer(layer, CPU).calls:
            widths.setdefault(family(operator), set()).add(len(features(operator)))
    assert {name: found for name, found in widths.items() if len(found) > 1} == {}


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    order=st.randoms(use_true_random=False),
)
def test_made_up_tensors_have_the_layout_of_their_record(
    shape: tuple[int, ...], order: "st.DrawFn"
) -> None:
    dimensions = list(range(len(shape)))
    order.shuffle(dimensions)  # type: ignore[attr-defined]
    original = torch.empty(shape).permute(dimensions)
    spec = TensorSpec(shape=tuple(original.shape), dtype="float32", stride=tuple(original.stride()))
    copy = made_up(spec, CPU)
    assert copy.shape == original.shape
    assert copy.stride() == original.stride()


def test_an_argument_that_was_not_kept_is_refused() -> None:
    arguments = '[[[2]], {"generator": {"opaque": "Generator"}}]'
    operator = Operator.of("aten.rand.default", (), (), arguments)
    with pytest.raises(ValueError, match="Generator was not kept"):
        ReplayedOperator(operator, CPU).bound([])


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("samples", "side", "kernel", "stride"),
    [
        *((2, 4, 1, 1), (15, 2, 1, 1), (16, 4, 1, 1), (2, 4, 1, 2), (2, 4, 3, 1)),
        *((1, 4, 3, 1), (1, 8, 3, 2), (1, 8, 5, 1), (1, 64, 3, 1), (1, 64, 1, 1)),
    ],
)
def test_the_way_to_convolve_is_the_one_that_pytorch_takes(
    samples: int, side: int, kernel: int, stride: int
) -> None:
    layer = Layer(kind="convolution", sizes=(samples, 8, side, 16, kernel, stride, 1))
    taken = torch._C._select_conv_backend(
        torch.empty(samples, 8, side, side),
        torch.empty(16, 8, kernel, kernel),
        None,
        [stride, stride],
        [kernel // 2, kernel // 2],
        [1, 1],
        False,
        [0, 0],
        1,
    )
    kind = "dense" if "Mkldnn" in str(taken) else "patches"
    found = {family(o) for o, _ in recorded_layer(layer, CPU).calls if "convolution" in o.name}
    assert found == {f"convolution {kind}", f"convolution_backward {kind}"}


def test_layers_of_a_gpu_keep_it_busy_in_both_precisions() -> None:
    """The grid of a processor is shorter than a launch; the largest tensor here has 1e6 to 3e8 elements."""
    layers = [e for e in planned_layers(share=0.01, device_kind="cuda") if not is_optimizer(e)]
    assert {layer.precision for layer in layers} == {"fp32", "bf16"}
    largest = []
    for layer in layers:
        recorded = [operator for operator, _ in recorded_layer(layer, CPU).calls]
        specs = [spec for entry in recorded for spec in (*entry.inputs, *entry.outputs)]
        largest.append(max(spec.num_elements for spec in specs))
        assert max(operator.flop for operator in recorded) <= 3e12, layer
        is_half = any(spec.dtype == "bfloat16" for spec in specs)
        assert layer.precision == "bf16" or not is_half, layer
    # Some stay as short as kernels can be.
    assert max(largest) <= 1.2e9
    assert 0.6 < sum(size >= 5e5 for size in largest) / len(largest) < 1.0


def test_layers_of_a_gpu_have_both_memory_formats_and_products_of_odd_width() -> None:
    layers = planned_layers(device_kind="cuda")
    last = [layer for layer in layers if layer.is_channels_last]
    assert {"convolution", "batch_norm", "max_pool"} <= {layer.kind for layer in last}
    chosen = next(e for e in last if e.kind == "batch_norm" and e.precision == "bf16")
    [image] = recorded_layer(chosen, CPU).inputs
    assert (image.dtype, existing(image.stride)[1]) == ("bfloat16", 1)
    odd = [layer.sizes[-1] % 2 for layer in layers if layer.kind == "linear"]
    assert 0 < sum(odd) < len(odd) / 2
    # In a short calibration, too, some convolutions do as much as those of deep networks, in either format.
    short = planned_layers(share=0.1, optimizer_share=0.2, device_kind="cuda")
    for kind in ((precision, is_last) for precision in ("fp32", "bf16") for is_last in (0, 1)):
        alike = (e for e in short if (e.precision, e.is_channels_last) == kind)
        sizes = [layer.sizes for layer in alike if layer.kind == "convolution"]
        assert sum(n * c * o * (k * x / s) ** 2 > 1.5e10 for n, c, x, o, k, s, _ in sizes) >= 2
        assert any(c <= 32 and o <= 32 and n * c * x**2 > 1e6 for n, c, x, o, *_ in sizes)
    large = {
        e.precision
        for e in short
        if e.is_channels_last and e.kind == "depthwise" and e.sizes[4] == 7
    }
    assert large == {"fp32", "bf16"}


def test_layers_of_a_gpu_fill_the_ranges_of_networks() -> None:
    """In a short calibration, too: channels by side, groups by their width, samples of both kinds."""
    short = planned_layers(share=0.1, optimizer_share=0.2, device_kind="cuda")
    images = [e for e in short if e.kind in ("depthwise", "batch_norm") and e.sizes[0] > 1]
    assert sum(e.sizes[1] >= 256 for e in images) >= 8
    assert sum(e.sizes[1] <= 128 for e in images) >= 8
    wide = [e.sizes[1] * e.sizes[2] for e in images if 16 <= e.sizes[0] <= 256]
    assert sum(1500 <= each <= 25_000 for each in wide) >= len(images) / 2
    groups = [(e.sizes[1] // e.sizes[6], e.sizes[6]) for e in short if e.kind == "grouped"]
    assert sum(4 <= width <= 64 for width, _ in groups) >= len(groups) / 2
    assert max(count for _, count in groups) >= 16


def test_numbers_that_attention_of_cudnn_drew_are_made_up_where_its_results_are() -> None:
    head, state = spec(1, 1, 2, 2), replace(spec(), dtype="int64")
    attention = called(
        "aten._scaled_dot_product_cudnn_attention.default", (head,) * 3, (head, state)
    )
    found = returned_tensors(attention, (torch.ones(1, 1, 2, 2), None, torch.tensor(7)))
    assert [int(each.sum()) for each in found] == [4, 0]


def test_the_seeds_of_flash_attention_are_no_obstacle() -> None:
    """Its kernel on CUDA hands on two of them as 64-bit integers without a sign."""
    with without_content("cpu"):
        heads = [torch.empty(2, 4, 16, 8, dtype=torch.bfloat16) for _ in range(3)]
        with (recorder := Recorder(ModulePaths(torch.nn.Identity()))):
            torch.ops.aten._scaled_dot_product_flash_attention(*heads)
    assert any(spec.dtype == "uint64" for spec in recorder.operators[0].outputs)


LAYERS = (
    Layer(kind="convolution", sizes=(2, 8, 9, 16, 3, 1, 1)),
    Layer(kind="relu", sizes=(2, 8, 5)),
    Layer(kind="linear", sizes=(4, 8, 16)),
    Layer(kind="embedding", sizes=(6, 50, 16)),
    Layer(kind="loss", sizes=(6, 16)),
    RECURRENT,
    CELLS,
    BAGS,
)


def session() -> Session:
    return Session(rank=0, world_size=1, measured=Cpu(), control={}, data={})


def test_a_layer_reads_what_was_just_made_and_backward_what_forward_kept() -> None:
    step = chained([recorded_layer(LAYERS[1], CPU)]).step
    made_by: dict[int, str] = {}
    read: dict[str, list[str]] = {}
    for call in linked(step).calls:
        operator = step.operators[call.operator]
        name = operator.name.split(".")[1]
        read[name] = [made_by.get(tensor, "nobody") for tensor in call.inputs]
        # A view is what it looks at.
        made_by.update(dict.fromkeys(call.outputs, read[name][0] if operator.view else name))
    assert read["relu"] == ["clone"]
    assert sorted(read["threshold_backward"]) == ["ones_like", "relu"]


@pytest.mark.parametrize(
    ("kind", "left_out"), [("relu", {"aten.randn_like.default"}), ("residual", set())]
)
def test_numbers_that_begin_a_backward_pass_of_a_gpu_are_timed_in_one_kind_of_layer(
    kind: str, left_out: set[str]
) -> None:
    name = "aten.randn_like.default"
    layer = recorded_layer(Layer(kind=kind, sizes=(2, 8, 5)), CPU)
    drawn = tuple(
        (replace(each, name=name) if each.name == "aten.ones_like.default" else each, phase)
        for each, phase in layer.calls
    )
    chain = chained([replace(layer, calls=drawn)])
    timed = {chain.step.operators[at].name for at, _ in chain.timed}
    assert {each.name for each, _ in drawn if not each.view} - timed == left_out


@pytest.mark.parametrize(("long_s", "num_times"), [(0.0, 3), (math.inf, 6)])
def test_every_operator_is_timed_but_the_copies_that_stand_in_for_a_predecessor(
    monkeypatch: pytest.MonkeyPatch, long_s: float, num_times: int
) -> None:
    """Three times in each pass: one pass of a row that takes long, two of others."""
    monkeypatch.setattr(layers, "LONG_S", long_s)
    # Two layers of one shape are timed together.
    measured = chain_operators(session(), [*LAYERS, LAYERS[1]], Evictor(Cpu()))
    expected = {
        (operator.name, phase)
        for layer in LAYERS
        for operator, phase in recorded_layer(layer, CPU).calls
        if not operator.view
    }
    assert {(entry.operator.name, entry.phase) for entry in measured} == expected
    assert min(len(entry.times_s) for entry in measured) == num_times
    # Within one layer: gates of a cell in each of four instants.
    counts = {entry.operator.name: entry.num_calls for entry in measured}
    assert (counts["aten.sigmoid_.default"], counts["aten.relu.default"]) == (8, 1)
    assert all(min(entry.times_s) > 0 for entry in measured)


@pytest.mark.parametrize(("long_s", "num_times"), [(0.0, 1), (math.inf, 4)])
def test_every_implementation_of_an_optimizer_is_timed(
    monkeypatch: pytest.MonkeyPatch, long_s: float, num_times: int
) -> None:
    monkeypatch.setattr(compute, "LONG_S", long_s)
    for implementation in ("loop", "foreach", "fused"):
        layer = Layer(kind=f"adamw {implementation}", sizes=(3, 64))
        point = measure_optimizer(session(), layer, Evictor(Cpu()))
        assert (point.optimizer, point.implementation) == ("adamw", implementation)
        assert (point.num_tensors, point.tensor_bytes) == (3, 256)
        assert len(point.times_s) == num_times


def test_groups_hold_as_many_layers_as_fit() -> None:
    """A relu of 200 values writes 800 B forward, ones, a gradient, and reads as much from before."""
    layer = recorded_layer(LAYERS[1], CPU)
    groups = grouped([layer] * 5, most_bytes=2 * 4 * 2 * 8 * 25 * 4)
    assert [len(group) for group in groups] == [2, 2, 1]
    assert [len(group) for group in grouped([layer] * 2, most_bytes=1)] == [1, 1]

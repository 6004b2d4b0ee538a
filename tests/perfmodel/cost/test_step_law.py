"""The law of steps: sums by hand, families by their shapes, slopes by differences."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from calibrate.step_fit import DeviceFit, first_priors, prior_over
from perfmodel.cost.step_curves import UNSEEN_MODE_ERROR, for_version, workload_by_law
from perfmodel.cost.step_law import (
    CONSTANTS,
    POSITION,
    Sheet,
    StepBatch,
    log_constants,
    step_seconds,
)
from perfmodel.cost.step_work import PRODUCTS, STREAMS, StepWork, step_work
from perfmodel.errors import UsageError
from perfmodel.machine.measured import DeviceCosts, LeftOutError
from perfmodel.statistics import heavy_tailed_quantiles
from perfmodel.workload import Call, Operator, Phase, TensorSpec
from perfmodel.workload.step import Segment, TracedStep
from tests.existing import existing
from tests.perfmodel.operators import addition, matmul, operator, spec
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WIDTH, WORKLOAD, traced

SHEET = Sheet({"fp32": 1e13, "half": 6e13}, 1e12)
#: Every factor is one, nothing needs filling: what is left can be added up by hand.
PLAIN = dict.fromkeys(CONSTANTS, 1.0) | {
    "launch_s": 2e-6,
    "host_s": 1e-9,
    "half results": 1e-9,
    "half channels": 1e-9,
    "sharpness": 30.0,
}

#: The same, with a host that device and law hide in part.
COSTS = DeviceCosts(
    flop_per_s=dict(SHEET.flop_per_s),
    bytes_per_s=SHEET.bytes_per_s,
    constants=PLAIN | {"host_s": 3e-5, "sharpness": 1.0},
    undetermined=(),
    left_out=(
        LeftOutError(
            precision="fp32",
            memory_format="contiguous",
            num_rows=1,
            num_families=1,
            mape=0.1,
            log_error=0.1,
        ),
    ),
    num_rows=1,
    num_models=1,
    source="by hand",
)


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


def by_hand(products_s: float, bytes_s: float) -> float:
    """Both limits joined by the cube, as the page of the law says. [s]"""
    return float((products_s**3 + bytes_s**3) ** (1 / 3))


def families(work: StepWork) -> list[str]:
    return [(*PRODUCTS, *STREAMS)[index] for index in work.family]


def seconds(*works: StepWork, constants: dict[str, float] | None = None) -> float:
    logs = log_constants(constants or PLAIN, first_priors())
    return float(step_seconds(StepBatch.of(works, SHEET), logs).step_s.sum())


def test_a_product_is_its_arithmetic_or_its_bytes_and_a_launch() -> None:
    expected_s = by_hand(2 * 512**3 / 1e13, 3 * 512**2 * 4 / 1e12) + 2e-6
    assert seconds(work_of(matmul(512, 512, 512))) == pytest.approx(expected_s, rel=1e-3)


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
    ("groups", "channels", "family"),
    [
        (32, 4, "group 8"),
        (64, 32, "group 32"),
        (32, 6, "group untuned"),
        (16, 4, "group untuned"),
        (48, 16, "group untuned"),
        (48, 128, "group"),
        (1, 64, "conv"),
    ],
)
def test_channels_side_by_side_have_fast_groups_of_some_sizes(
    groups: int, channels: int, family: str
) -> None:
    """Of 4, 8, 16 or 32 channels, 32 groups at a time, and those of a whole tile."""
    called = convolution(groups, groups * channels)
    last = work_of(called, is_pure_half=True, memory_format="channels_last")
    assert families(last) == [f"{family} forward"]
    for is_half, memory_format in ((False, "channels_last"), (True, "contiguous")):
        other = work_of(called, is_pure_half=is_half, memory_format=memory_format)
        assert "untuned" not in families(other)[0]


def test_tensor_cores_convolve_in_tf32_and_leave_products_of_matrices_in_fp32() -> None:
    """At 8 times the rate of fp32, by the constants of tensor cores; depthwise kernels are no products."""
    sheet = Sheet({"fp32": 1e13, "half": 6e13, "tf32": 8e13}, 1e18)
    calls = (convolution(1, 64), convolution(64, 64), matmul(512, 512, 512))
    works = [work_of(called) for called in calls]
    logs = log_constants(PLAIN | {"half conv forward rate": 0.5}, first_priors())
    found = step_seconds(StepBatch.of(works, sheet), logs).kernel_s - 2e-6
    rates = [4e13, 1e13, 1e13]
    expected_s = [called.flop / rate for called, rate in zip(calls, rates, strict=True)]
    assert found == pytest.approx(expected_s, rel=1e-6)
    older = Sheet({"fp32": 1e13, "half": 1.6e14}, 1e18)
    [without_s] = step_seconds(StepBatch.of(works[:1], older), logs).kernel_s - 2e-6
    assert without_s == pytest.approx(calls[0].flop / 1e13, rel=1e-6)


def fit_of(generation: str, factor: float) -> DeviceFit:
    """A device whose constants are all off by a factor, and exactly known."""
    names = frozenset(CONSTANTS)
    logs = np.log([factor * first_priors()[name].median for name in CONSTANTS])
    return DeviceFit(
        logs=logs,
        log_sigma=np.full(len(CONSTANTS), 1e-6),
        determined=names,
        touched=names,
        generation=generation,
    )


def test_a_device_is_expected_to_be_most_like_those_of_its_generation() -> None:
    fits = [fit_of("old", 1.0), fit_of("new", 2.0)]
    old, new, other = (prior_over(fits, g)["memory"] for g in ("old", "new", "other"))
    middle = first_priors()["memory"].median
    assert 1 < old.median / middle < 2**0.5 < new.median / middle < 2
    assert old.median < other.median < new.median
    assert new.log_sigma < other.log_sigma


def test_16_bit_without_tensor_cores_has_constants_of_its_own() -> None:
    work = step_work(step_of((matmul(512, 512, 512), Phase.FORWARD)), is_pure_half=True)
    without = Sheet({"fp32": 1e13, "half": 1e13}, 1e12)
    logs = log_constants(PLAIN | {"vector half mm forward rate": 0.25}, first_priors())
    fast_s, slow_s = (
        float(step_seconds(StepBatch.of([work], sheet), logs).kernel_s[0] - 2e-6)
        for sheet in (SHEET, without)
    )
    flop, moved = 2 * 512**3, 3 * 512**2 * 2
    assert fast_s == pytest.approx(by_hand(flop / 6e13, moved / 1e12), rel=1e-3)
    assert slow_s == pytest.approx(4 * flop / 1e13, rel=1e-3)


@pytest.mark.parametrize("host_s", [1e-7, 3e-5, 1e-3])
def test_device_and_host_hide_each_other_in_part(host_s: float) -> None:
    work = step_work(step_of((matmul(2048, 2048, 2048), Phase.FORWARD)))
    constants = PLAIN | {"host_s": host_s, "sharpness": 1.0}
    found = step_seconds(StepBatch.of([work], SHEET), log_constants(constants, first_priors()))
    sides_s = found.device_s.sum(), found.host_s.sum()
    assert max(sides_s) <= found.step_s[0] <= sum(sides_s)


@pytest.mark.parametrize("host_s", [1e-7, 3e-4])
def test_curves_add_up_to_the_law_at_every_batch(host_s: float) -> None:
    """Where the host takes longer, small batches must not lengthen the phases of large ones."""
    costs = replace(COSTS, constants=COSTS.constants | {"host_s": host_s})
    [phases] = workload_by_law(costs, WORKLOAD, traced()).phases
    curves = [getattr(phases, phase) for phase in ("forward", "backward", "optimizer")]
    for points in zip(*curves, strict=True):
        work = step_work(traced().at(micro_batch=points[0].at))
        step_s = seconds(work, constants=costs.constants)
        assert sum(point.time_s for point in points) == pytest.approx(step_s)


def test_slopes_are_differences() -> None:
    steps = [
        step_of((convolution(1, 44), Phase.FORWARD), (backward(1, 44), Phase.BACKWARD)),
        step_of((matmul(300, 70, 300), Phase.FORWARD), (addition(10**5), Phase.BACKWARD)),
    ]
    works = [
        step_work(steps[0], is_pure_half=True, memory_format="channels_last"),
        step_work(steps[1]),
    ]
    batch = StepBatch.of(works, SHEET)
    logs = log_constants({}, first_priors())
    assert step_seconds(batch, logs).slope is None
    found = step_seconds(batch, logs, with_slope=True)
    assert found.slope is not None
    touched = {CONSTANTS[index] for index in np.flatnonzero(np.abs(found.slope).max(axis=0))}
    assert {"peak half", "odd channels", "launch_s", "sharpness", "host update"} <= touched
    for index, name in enumerate(CONSTANTS):
        moved = logs.copy()
        moved[index] += 1e-5
        other = step_seconds(batch, moved)
        difference = (np.log(other.step_s) - np.log(found.step_s)) / 1e-5
        assert difference == pytest.approx(found.slope[:, index], abs=1e-4), name


def test_quantiles_have_heavy_tails() -> None:
    places = np.array([0.001, 0.05, 0.3, 0.5, 0.9, 0.95, 0.999])
    assert heavy_tailed_quantiles(places) == pytest.approx(stats.t.ppf(places, 4), abs=1e-9)
    assert math.isclose(heavy_tailed_quantiles(np.array([0.95]))[0], 2.132, abs_tol=1e-3)


def test_every_constant_has_its_place_in_the_law() -> None:
    """One convolution of 20 channels in 16 bit, channels last; all constants away from one."""
    constants = PLAIN | {
        "peak half": 0.8,
        "memory": 0.7,
        "launch_s": 3e-6,
        "half results": 1e4,
        "half channels": 30.0,
        "odd channels": 0.6,
        "half conv forward rate": 0.5,
        "half conv forward rate channels last": 1.3,
        "half conv forward memory": 0.9,
        "half conv forward memory channels last": 1.1,
        "host_s": 1e-5,
        "sharpness": 2.0,
    }
    work = work_of(convolution(1, 20), is_pure_half=True, memory_format="channels_last")
    results, elements = 4 * 20 * 64, 2 * 4 * 20 * 64 + 20 * 20 * 9
    flop = 2 * results * 20 * 9
    rate = 6e13 * 0.8 * 0.5 * 1.3 * 0.6 * results / (results + 1e4) * 20 / (20 + 30)
    device_s = by_hand(flop / rate, 2 * elements / (1e12 * 0.7 * 0.9 * 1.1)) + 3e-6
    assert seconds(work, constants=constants) == pytest.approx(by_hand(device_s, 1e-5), rel=1e-9)


def test_more_processors_need_more_results_and_higher_peaks_in_16_bit_are_reached_in_part() -> None:
    """Four times the peaks: twice the results fill the device; 16 bit is 4 ^ 0.7 times as fast, depthwise kernels 4."""
    called = matmul(512, 512, 512)
    free = {"launch_s": 1e-15, "memory": 1e6, "half results": 512.0**2}
    logs = log_constants(PLAIN | free, first_priors())
    sheet = Sheet({"fp32": 4e13, "half": 2.4e14}, 1e12)
    works = [work_of(called, is_pure_half=half) for half in (False, True)]
    times_s = step_seconds(StepBatch.of(works, sheet), logs).device_s[:, 0]
    filled = 1 / (1 + 2)
    expected_s = [called.flop / (rate * filled) for rate in (4e13, 6e13 * 4**0.7)]
    assert times_s == pytest.approx(expected_s, rel=1e-3)
    channel = [work_of(convolution(64, 64))]
    slow_s, fast_s = (
        step_seconds(StepBatch.of(channel, s), logs).device_s[0, 0] for s in (SHEET, sheet)
    )
    assert slow_s == pytest.approx(4 * fast_s, rel=1e-3)


def test_matrices_multiply_no_faster_than_the_data_sheet_and_transformed_images_may() -> None:
    """Whatever the constants say: kernels of 3x3 may do with fewer products than are counted."""
    logs = log_constants(dict.fromkeys(CONSTANTS, 1e-9) | {"memory": 1e9}, first_priors())
    logs[[POSITION[name] for name in CONSTANTS if "rate" in name or "peak" in name]] = np.log(50.0)
    logs[[POSITION[name] for name in CONSTANTS if name.endswith(" memory")]] = 0.0
    works = [work_of(called) for called in (matmul(512, 512, 512), convolution(1, 64))]
    batch = StepBatch.of(works, SHEET)
    found = step_seconds(batch, logs, with_slope=True)
    assert found.slope is not None
    products_s = found.device_s[:, 0] - 1e-9
    assert products_s == pytest.approx(batch.products_s / [1, 2500], rel=1e-3)
    assert found.slope[0, POSITION["fp32 mm forward rate"]] == 0
    assert found.slope[1, POSITION["fp32 conv forward rate"]] < -0.1


def test_the_host_launches_views_in_part_and_an_update_by_its_lists() -> None:
    """One kernel forward, a view backward; a loop updates its one tensor, lists take 100 of them at once."""
    view = operator("aten.view.default", (spec(8),), (spec(8),), view=True)
    step = step_of((addition(10), Phase.FORWARD), (view, Phase.BACKWARD))
    lists = replace(step, method=replace(step.method, optimizer_implementation="foreach"))
    constants = PLAIN | {"host_s": 1e-3, "host backward": 2.0, "host update": 5.0}
    logs = log_constants(constants, first_priors())
    batch = StepBatch.of([step_work(step), step_work(lists)], SHEET)
    found = step_seconds(batch, logs).host_s
    assert found == pytest.approx(
        np.array([[1e-3, 2e-3 * 0.3, 5e-3], [1e-3, 2e-3 * 0.3, 5e-3 * 1.01]])
    )
    assert families(step_work(step)) == ["pointwise", "optimizer"]


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


def test_calls_of_a_phase_add_up() -> None:
    """Three of one operator forward; times of a phase are those of its kernels together."""
    step = step_of((addition(10**6), Phase.FORWARD), (matmul(64, 64, 64), Phase.BACKWARD))
    thrice = replace(step, segments=(replace(step.segments[0], count=3),))
    works = [step_work(each, has_optimizer=False) for each in (step, thrice)]
    found = step_seconds(StepBatch.of(works, SHEET), log_constants(PLAIN, first_priors()))
    assert found.device_s[0] == pytest.approx([12e6 / 1e12 + 2e-6, found.kernel_s[1], 0.0])
    assert found.device_s[1] == pytest.approx(3 * found.device_s[0])
    assert works[1].launches == pytest.approx([3, 3, 0])


def test_depthwise_convolutions_run_beside_the_tensor_cores() -> None:
    """At the rate of single precision whatever the type; no channel fills a tile or misses a multiple."""
    called = convolution(20, 20)
    work = work_of(called, is_pure_half=True)
    free = {"launch_s": 1e-15, "half depthwise forward memory": 1e6}
    constants = PLAIN | free | {"half channels": 100.0, "odd channels": 0.1}
    assert seconds(work, constants=constants) == pytest.approx(called.flop / 1e13, rel=1e-3)


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
    ],
    ids=range(4),
)
def test_tensor_cores_need_multiples_of_eight(called: Operator, odd: float) -> None:
    assert work_of(called, is_pure_half=True).is_odd.tolist() == [odd]
    assert work_of(called).is_odd.tolist() == [0.0]


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


def test_a_model_that_no_row_resembles_is_less_certain_and_devices_scatter_by_a_percent() -> None:
    costs = replace(COSTS, left_out=(replace(COSTS.left_out[0], precision="half"),))
    known, unseen = (workload_by_law(each, WORKLOAD, traced()) for each in (COSTS, costs))
    assert (known.shared_log_error, unseen.shared_log_error) == (0.1, UNSEEN_MODE_ERROR)
    [noise] = known.noise
    middles = (np.arange(41) + 0.5) / 41
    assert noise.micro_batch == 1
    assert np.log(noise.ratios) == pytest.approx(0.01 * stats.norm.ppf(middles), abs=1e-12)
    assert known.rank_spread == 0.01
    [phases] = known.phases
    assert {point.time_s for point in phases.input} == {0.0}
    assert {point.relative_error for point in phases.backward} == {0.0}


def test_the_host_of_every_phase_is_what_the_law_says_of_it() -> None:
    [phases] = workload_by_law(COSTS, WORKLOAD, traced()).phases
    work = step_work(traced().at(micro_batch=4))
    logs = log_constants(COSTS.constants, first_priors())
    found = step_seconds(StepBatch.of([work], SHEET), logs)
    at = [point.at for point in phases.forward].index(4)
    for phase, host_s in zip(Phase, found.host_s[0], strict=True):
        issued = getattr(phases, f"dispatch_{phase.value}")[at]
        assert issued.time_s == pytest.approx(host_s)


def test_a_gradient_is_ready_when_the_kernels_before_it_are_done() -> None:
    """Of the two products of the backward pass the first makes the gradient."""
    step = traced().at(micro_batch=32)
    work = step_work(step)
    logs = log_constants(COSTS.constants, first_priors())
    kernel_s = step_seconds(StepBatch.of([work], SHEET), logs).kernel_s
    after = dict(zip(work.operator[work.phase == 1], kernel_s[work.phase == 1], strict=True))
    [parameter] = workload_by_law(COSTS, WORKLOAD, traced()).workload.parameters
    assert parameter.ready_fraction == pytest.approx(after[1] / (after[0] + after[1]), rel=1e-6)


def test_another_version_widens_by_what_versions_were_seen_to_change() -> None:
    """0.1 of left-out models and 0.24 between versions are 0.26; nothing is known: a quarter; the same: nothing."""
    machine = replace(
        profile(Machine()),
        device_costs=replace(COSTS, versions={"torch": "2.4.1+cu121"}, version_drift=0.24),
    )
    assert for_version(machine, "2.4.0") is machine
    for found, error in (
        (for_version(machine, "2.5.1"), 0.26),
        (for_version(replace(machine, device_costs=COSTS), "2.4.0"), math.hypot(0.1, 0.25)),
    ):
        assert existing(found.device_costs).left_out[0].log_error == pytest.approx(error)
        assert len(found.undetermined) == len(machine.undetermined) + 1
    with pytest.raises(UsageError, match="--torch: must come with a machine inferred from steps"):
        for_version(profile(Machine()), "2.4.0")

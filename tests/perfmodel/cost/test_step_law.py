"""The law of steps: sums by hand, families by their shapes, slopes by differences."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from calibrate.step_fit import first_priors
from perfmodel.cost.step_curves import workload_by_law
from perfmodel.cost.step_law import (
    CONSTANTS,
    PRODUCTS,
    STREAMS,
    Sheet,
    StepBatch,
    StepWork,
    log_constants,
    step_seconds,
    step_work,
)
from perfmodel.machine.measured import DeviceCosts, LeftOutError
from perfmodel.statistics import heavy_tailed_quantiles
from perfmodel.workload import Call, Operator, Phase
from perfmodel.workload.step import Segment, TracedStep
from tests.perfmodel.operators import addition, matmul, operator, spec
from tests.perfmodel.traces import WORKLOAD, traced

SHEET = Sheet({"fp32": 1e13, "half": 5e13}, 1e12)
#: Every factor is one, nothing needs filling: what is left can be added up by hand.
PLAIN = dict.fromkeys(CONSTANTS, 1.0) | {
    "launch_s": 2e-6,
    "host_s": 1e-9,
    "half results": 1e-9,
    "half channels": 1e-9,
    "sharpness": 30.0,
}


def step_of(*calls: tuple[Operator, Phase]) -> TracedStep:
    return replace(
        traced().at(micro_batch=2),
        operators=tuple(each for each, _ in calls),
        segments=(
            Segment(
                count=1,
                calls=tuple(
                    Call(operator=index, phase=phase, module="")
                    for index, (_, phase) in enumerate(calls)
                ),
            ),
        ),
    )


def convolution(groups: int, channels: int, *, kernel: int = 3, side: int = 8) -> Operator:
    image, weight = (
        spec(4, channels, side, side),
        spec(channels, channels // groups, kernel, kernel),
    )
    pad = [kernel // 2] * 2
    return operator(
        *("aten.convolution.default", (image, weight), (image,)),
        *(None, [1, 1], pad, [1, 1], False, [0, 0], groups),
    )


def convolution_backward(groups: int, channels: int) -> Operator:
    image, weight = spec(4, channels, 8, 8), spec(channels, channels // groups, 3, 3)
    return operator(
        *("aten.convolution_backward.default", (image, image, weight), (image, weight)),
        *([0], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [True, True, False]),
    )


def families(work: StepWork) -> list[str]:
    return [(*PRODUCTS, *STREAMS)[index] for index in work.family]


def seconds(*works: StepWork, constants: dict[str, float] | None = None) -> float:
    logs = log_constants(constants or PLAIN, first_priors())
    return float(step_seconds(StepBatch.of(works), logs, SHEET).step_s.sum())


def test_a_product_is_its_arithmetic_or_its_bytes_and_a_launch() -> None:
    work = step_work(step_of((matmul(512, 512, 512), Phase.FORWARD)), has_optimizer=False)
    products_s, bytes_s = 2 * 512**3 / 1e13, 3 * 512**2 * 4 / 1e12
    by_hand = (products_s**3 + bytes_s**3) ** (1 / 3) + 2e-6
    assert seconds(work) == pytest.approx(by_hand, rel=1e-3)


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
    work = step_work(step_of((called, Phase.FORWARD)), has_optimizer=False)
    assert families(work) == [f"{family} forward"]
    assert work.flop == pytest.approx(called.flop)


def test_a_backward_convolution_is_two_kernels_of_its_flop_together() -> None:
    called = convolution_backward(2, 64)
    work = step_work(step_of((called, Phase.BACKWARD)), has_optimizer=False)
    assert families(work) == ["group 32 inputs", "group 32 weights"]
    assert work.flop.sum() == pytest.approx(called.flop)


def test_long_sums_fill_the_device() -> None:
    tiny = operator("aten.mm.default", (spec(16, 10**6), spec(10**6, 16)), (spec(16, 16),))
    work = step_work(step_of((tiny, Phase.BACKWARD)), has_optimizer=False)
    assert work.filling == pytest.approx(16 * 16 * 10**6 / 512)


@pytest.mark.parametrize("host_s", [1e-7, 3e-5, 1e-3])
def test_device_and_host_hide_each_other_in_part(host_s: float) -> None:
    work = step_work(step_of((matmul(2048, 2048, 2048), Phase.FORWARD)))
    constants = PLAIN | {"host_s": host_s, "sharpness": 1.0}
    found = step_seconds(StepBatch.of([work]), log_constants(constants, first_priors()), SHEET)
    sides_s = found.device_s.sum(), found.host_s.sum()
    assert max(sides_s) <= found.step_s[0] <= sum(sides_s)


@pytest.mark.parametrize("host_s", [1e-7, 3e-4])
def test_curves_add_up_to_the_law_at_every_batch(host_s: float) -> None:
    """Where the host takes longer, small batches must not lengthen the phases of large ones."""
    costs = DeviceCosts(
        flop_per_s=dict(SHEET.flop_per_s),
        bytes_per_s=SHEET.bytes_per_s,
        constants=PLAIN | {"host_s": host_s, "sharpness": 1.0},
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
    [phases] = workload_by_law(costs, WORKLOAD, traced()).phases
    curves = [getattr(phases, phase) for phase in ("forward", "backward", "optimizer")]
    for points in zip(*curves, strict=True):
        step_s = seconds(
            step_work(traced().at(micro_batch=points[0].at)), constants=costs.constants
        )
        assert sum(point.time_s for point in points) == pytest.approx(step_s)


def test_slopes_are_differences() -> None:
    steps = [
        step_of((convolution(1, 48), Phase.FORWARD), (convolution_backward(1, 48), Phase.BACKWARD)),
        step_of((matmul(300, 70, 300), Phase.FORWARD), (addition(10**5), Phase.BACKWARD)),
    ]
    works = [
        step_work(steps[0], is_pure_half=True, memory_format="channels_last"),
        step_work(steps[1]),
    ]
    batch = StepBatch.of(works)
    logs = log_constants({}, first_priors())
    found = step_seconds(batch, logs, SHEET, with_slope=True)
    assert found.slope is not None
    touched = np.flatnonzero(np.abs(found.slope).max(axis=0) > 0)
    assert {"peak half", "odd channels", "launch_s", "sharpness", "host update"} <= {
        CONSTANTS[index] for index in touched if CONSTANTS[index] != "odd channels"
    } | {"odd channels"}
    for index in touched:
        moved = logs.copy()
        moved[index] += 1e-5
        other = step_seconds(batch, moved, SHEET)
        difference = (np.log(other.step_s) - np.log(found.step_s)) / 1e-5
        assert difference == pytest.approx(found.slope[:, index], abs=1e-4), CONSTANTS[index]


def test_quantiles_have_heavy_tails() -> None:
    places = np.array([0.001, 0.05, 0.3, 0.5, 0.9, 0.95, 0.999])
    assert heavy_tailed_quantiles(places) == pytest.approx(stats.t.ppf(places, 4), abs=1e-9)
    assert math.isclose(heavy_tailed_quantiles(np.array([0.95]))[0], 2.132, abs_tol=1e-3)

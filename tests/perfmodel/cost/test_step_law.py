"""The law of steps: sums by hand, slopes by differences."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from calibrate.step_fit import DeviceFit, constants_of, first_priors, prior_over
from perfmodel.cost.machine import CostModel
from perfmodel.cost.step_curves import (
    UNSEEN_MODE_ERROR,
    by_law,
    for_version,
    shipped_threads,
    workload_by_law,
)
from perfmodel.cost.step_law import (
    CONSTANTS,
    POSITION,
    Sheet,
    StepBatch,
    ThreadedSteps,
    log_constants,
    step_seconds,
)
from perfmodel.cost.step_work import StepWork, step_work
from perfmodel.errors import UsageError
from perfmodel.layout import Layout
from perfmodel.machine.measured import DeviceCosts, LeftOutError
from perfmodel.statistics import heavy_tailed_quantiles
from perfmodel.step import Stream
from perfmodel.step.compile import compile_step
from perfmodel.workload import Operator, Phase
from tests.existing import existing
from tests.perfmodel.cost.test_step_work import backward, convolution, families, step_of, work_of
from tests.perfmodel.operators import addition, matmul, operator, spec
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced

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


def normalisation(channels: int) -> Operator:
    images, scale = spec(4, channels, 64, 64), spec(channels)
    return operator("aten.native_batch_norm.default", (images, scale), (images,))


def by_hand(products_s: float, bytes_s: float) -> float:
    """Both limits joined by the cube, as the page of the law says. [s]"""
    return float((products_s**3 + bytes_s**3) ** (1 / 3))


def seconds(*works: StepWork, constants: dict[str, float] | None = None) -> float:
    logs = log_constants(constants or PLAIN, first_priors())
    return float(step_seconds(StepBatch.of(works, SHEET), logs).step_s.sum())


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


def test_families_are_expected_to_be_most_like_those_of_the_generation() -> None:
    fits = [fit_of("old", 1.0), fit_of("new", 2.0)]
    name = "fp32 conv forward rate"
    old, new, other = (prior_over(fits, g)[name] for g in ("old", "new", "other"))
    middle = first_priors()[name].median
    assert 1 < old.median / middle < 2**0.5 < new.median / middle < 2
    assert old.median < other.median < new.median
    assert new.log_sigma < other.log_sigma
    memory = [prior_over(fits, g)["memory"].median for g in ("old", "other", "new")]
    assert 1 < memory[1] / memory[0] < 1.1, "cards of one generation differ nearly as any two"
    assert 1 < memory[2] / memory[1] < 1.1


def test_without_rows_that_tell_batch_normalisation_is_as_on_other_devices() -> None:
    """A machine that holds nothing of it is an older one."""
    fit = replace(fit_of("new", 2.0), touched=frozenset({"memory"}))
    expected = {name: 2 * first_priors()[name].median for name in ("memory", "norm channels")}
    assert constants_of(fit) == pytest.approx(expected)


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
        step_of((matmul(300, 70, 300), Phase.FORWARD), (normalisation(20), Phase.BACKWARD)),
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
    assert "norm channels" in touched
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
        "host step": 3.0,
        "sharpness": 2.0,
    }
    work = work_of(convolution(1, 20), is_pure_half=True, memory_format="channels_last")
    results, elements = 4 * 20 * 64, 2 * 4 * 20 * 64 + 20 * 20 * 9
    flop = 2 * results * 20 * 9
    rate = 6e13 * 0.8 * 0.5 * 1.3 * 0.6 * results / (results + 1e4) * 20 / (20 + 30)
    device_s = by_hand(flop / rate, 2 * elements / (1e12 * 0.7 * 0.9 * 1.1)) + 3e-6
    assert seconds(work, constants=constants) == pytest.approx(by_hand(device_s, 4e-5), rel=1e-9)


def test_few_channels_slow_batch_normalisation_unless_they_lie_side_by_side() -> None:
    """A block for each: of 100 that occupy half of the device, 32 take (1 + 100 / 32) / (1 + 100 / 128) as long."""
    works = [
        work_of(normalisation(channels), memory_format=memory_format)
        for channels in (32, 128)
        for memory_format in ("contiguous", "channels_last")
    ]
    plain_s = [(2 * 4 * channels * 64**2 + channels) * 4 / 1e12 for channels in (32, 32, 128, 128)]
    free = {"norm channels": 100.0, "launch_s": 1e-15}
    logs = log_constants(PLAIN | free, first_priors())
    expected_s = [plain_s[0] * (1 + 100 / 32) / (1 + 100 / 128), *plain_s[1:]]
    batch = StepBatch.of(works, SHEET)
    assert step_seconds(batch, logs).device_s[:, 0] == pytest.approx(expected_s, rel=1e-6)
    # Machines that were made before this constant hold none of it.
    before = {name: value for name, value in (PLAIN | free).items() if name != "norm channels"}
    old = by_law(replace(COSTS, constants=before), works)[0].device_s[:, 0]
    assert old == pytest.approx(plain_s, rel=1e-6)


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


def test_the_host_takes_a_step_launches_views_in_part_and_updates_by_lists() -> None:
    """One kernel forward, a view backward; a loop updates its one tensor, lists take 100 of them at once."""
    view = operator("aten.view.default", (spec(8),), (spec(8),), view=True)
    step = step_of((addition(10), Phase.FORWARD), (view, Phase.BACKWARD))
    lists = replace(step, method=replace(step.method, optimizer_implementation="foreach"))
    free = {"host_s": 1e-3, "host backward": 2.0, "host update": 5.0, "host step": 0.5}
    constants = PLAIN | free
    logs = log_constants(constants, first_priors())
    batch = StepBatch.of([step_work(step), step_work(lists)], SHEET)
    found = step_seconds(batch, logs).host_s
    assert found == pytest.approx(
        np.array([[1e-3, 2e-3 * 0.3, 5.5e-3], [1e-3, 2e-3 * 0.3, 5e-3 * 1.01 + 5e-4]])
    )
    # Machines that were made before this constant hold none of it.
    before = {name: value for name, value in constants.items() if name != "host step"}
    [old, _] = by_law(replace(COSTS, constants=before), [step_work(step)] * 2)[0].host_s
    assert old == pytest.approx(np.array([1e-3, 2e-3 * 0.3, 5e-3]))
    assert families(step_work(step)) == ["pointwise", "optimizer"]


@pytest.mark.parametrize("accumulation", [1, 3, 100])
def test_what_a_step_takes_of_the_host_by_itself_comes_once_in_all_micro_batches(
    accumulation: int,
) -> None:
    """100 launches more than a step that takes none."""
    layout = Layout(micro_batch=4, accumulation=accumulation)
    host_s = []
    for launches in (1e-9, 100.0):
        costs = replace(COSTS, constants=COSTS.constants | {"host step": launches})
        machine = replace(profile(Machine()), device_costs=costs)
        workload = workload_by_law(costs, WORKLOAD, traced())
        program = compile_step(workload.workload, layout, asynchronous=True)
        terms = CostModel(machine, num_draws=2).terms(workload, layout, program)
        of_host = list(program.on_stream(Stream.HOST))
        host_s.append(terms.durations(program)[of_host, 0].sum())
    assert host_s[1] - host_s[0] == pytest.approx(100 * costs.constants["host_s"])


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


def test_operators_that_are_not_those_of_pytorch_are_named() -> None:
    for name, untimed in (("mine.mm.default", ("mine.mm.default",)), ("aten.mm.default", ())):
        step = traced()
        step = replace(step, operators=(replace(step.operators[0], name=name), step.operators[1]))
        assert workload_by_law(COSTS, WORKLOAD, step).untimed == untimed


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
    unknown = replace(machine, device_costs=COSTS)
    for found, error, said in (
        (for_version(machine, "2.5.1"), 0.26, "2.4.1+cu121: 2.5.1"),
        (for_version(unknown, "2.4.0"), math.hypot(0.1, 0.25), "unknown: 2.4.0"),
    ):
        assert found.undetermined[-1].startswith(f"steps were of PyTorch {said} widens")
        assert existing(found.device_costs).left_out[0].log_error == pytest.approx(error)
        assert len(found.undetermined) == len(machine.undetermined) + 1
    with pytest.raises(UsageError, match="--torch: must come with a machine inferred from steps"):
        for_version(profile(Machine()), "2.4.0")


def test_the_slower_of_devices_and_lock_then_copies_and_bytes() -> None:
    """Ten modules on four devices: 40 ms of calls, 20 ms of copies, 10 ms for a megabyte; devices 30 % slower."""
    four, ten, size_bytes = np.array(4.0), np.array(10.0), np.array(1e6)
    steps = ThreadedSteps(np.array([1e-3, 4.0]), four, ten, size_bytes)
    constants = np.array([1e-3, 2e-3, 1e-8, 0.1])
    assert steps.step_s(constants) == pytest.approx([0.07, 5.23], rel=1e-4)
    led_s, copied_s = steps.parts_s(constants)
    assert led_s == pytest.approx([0.04, 5.2], rel=1e-4)
    assert copied_s == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("device", "is_own"), [("titan-xp", True), ("rtx-2080ti", True), ("rtx-3090", False)]
)
def test_hosts_of_another_card_are_as_those_of_all(device: str, *, is_own: bool) -> None:
    constants, log_error, found = shipped_threads(device)
    assert found is is_own
    assert (constants.tolist() == shipped_threads("another")[0].tolist()) is not is_own
    # No card that was never timed is better known.
    assert log_error <= shipped_threads("another")[1]

"""What a step adds to its operators is recovered, by curves too; what cannot be known is assumed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from calibrate.fit.operators import (
    KernelCosts,
    Timing,
    _negative_log_likelihood,
    fit_curves,
    fit_family,
    fit_gaussian_process,
    fit_operators,
    squared_differences,
    timings_of,
    unit_costs,
)
from perfmodel.cost.operators import OperatorDurations, work_s
from perfmodel.documents.observation import OperatorsObservation, OptimizerPoint, TimedOperator
from perfmodel.machine.measured import CurvePoint, MeasuredWorkload
from perfmodel.statistics import covariance
from perfmodel.workload import Phase
from perfmodel.workload.step import signature
from tests.existing import existing
from tests.perfmodel.operators import (
    START_S,
    addition,
    costs_of_the_made_up_machine,
    matmul,
    observation,
    recurring,
    true_time_s,
)
from tests.perfmodel.profiles import Machine, compute_rate, profile
from tests.perfmodel.traces import traced
from tests.played_worker import REPLAY

NUM_STEPS = 12


def test_without_timings_there_are_no_prices() -> None:
    assert fit_operators([], workloads=(), rates=()) is None


def timing(time_s: float, *units: float) -> Timing:
    """A call, FLOP, and bytes of up to four kinds."""
    return Timing(
        features=(0.0,), time_s=time_s, flop=units[1], moved_bytes=sum(units[2:]), units=units
    )


@given(
    costs_s=st.tuples(st.floats(1e-6, 1e-4), st.floats(1e-12, 1e-10), st.floats(1e-11, 1e-9)),
    seed=st.integers(0, 100),
)
def test_what_a_unit_of_work_costs_is_recovered(
    costs_s: tuple[float, float, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    timings = [
        timing(float(np.dot(units, costs_s)), *units)
        for units in ((1.0, *map(float, 10 ** rng.uniform(3, 9, 2))) for _ in range(30))
    ]
    assert unit_costs(timings) == pytest.approx(costs_s, rel=1e-3)


def kernel(size_bytes: float, *, flop: float = 0.0) -> Timing:
    """A kernel of a GPU that starts in 2 us, moves 1 TB/s and multiplies at 10 TFLOP/s."""
    return Timing(
        features=(float(np.log(size_bytes)),),
        time_s=2e-6 + size_bytes / 1e12 + flop / 1e13,
        flop=flop,
        moved_bytes=size_bytes,
        units=(1.0, flop, size_bytes, 0.0, 0.0, 0.0),
    )


def test_a_family_with_one_point_on_a_gpu_starts_as_fast_as_any_kernel() -> None:
    """One dropout of 1 ms must not make a small one as slow: that made a perceptron 3.6 times too slow."""
    points = {"pointwise": [kernel(1e3), kernel(1e9)], "native_dropout": [kernel(1e9)]}
    kernels = existing(KernelCosts.seen(points, on_gpu=True))
    assert kernels.start_s == pytest.approx(2e-6, rel=0.01)
    alone, informed = (
        fit_family("native_dropout", points["native_dropout"], kernels=each)
        for each in (None, kernels)
    )
    assert alone.least_s > 1e-3
    small = work_s((1.0, 0.0, 1e6), informed.unit_s, least_s=informed.least_s)
    assert small == pytest.approx(kernel(1e6).time_s, rel=0.35)
    large = work_s((1.0, 0.0, 1e9), informed.unit_s, least_s=informed.least_s)
    assert large == pytest.approx(kernel(1e9).time_s, rel=0.01)


def test_a_time_shorter_than_any_kernel_tells_nothing_on_a_gpu() -> None:
    """What is left of a call when its events took as long: two of them made each start of an H100 1.3 ns."""
    entry = observation()
    lost = entry.operators[-1].model_copy(update={"times_s": (1.3e-9,)})
    with_lost = entry.model_copy(update={"operators": (*entry.operators, lost)})
    whole, without, on_cpu = (
        existing(fit_operators([each], workloads=(), rates=(), on_gpu=on_gpu))
        for each, on_gpu in ((with_lost, True), (entry, True), (with_lost, False))
    )
    assert whole.families == without.families
    assert min(family.least_s for family in whole.families) > START_S / 2
    assert min(family.least_s for family in on_cpu.families) == pytest.approx(1.3e-9)


def test_known_steps_inform_the_curves_of_a_gpu() -> None:
    """A product of a traced step that took ten times what layers say; a CPU's caches make that its own affair."""
    step = traced().at(micro_batch=4)
    timed = tuple(
        TimedOperator(
            signature=signature(each),
            phase=Phase.FORWARD,
            num_calls=1,
            times_s=(10 * true_time_s(each),),
        )
        for each in step.operators
    )
    replay = REPLAY.model_copy(update={"operators": timed, "traced": traced()})
    for on_gpu, factor in ((True, 10), (False, 1)):
        costs = existing(
            fit_operators([observation(), replay], workloads=(), rates=(), on_gpu=on_gpu)
        )
        durations = OperatorDurations(costs, use_measured=False)
        [found] = durations.durations([(step.operators[0], 1)], Phase.FORWARD)
        assert found.time_s == pytest.approx(factor * true_time_s(step.operators[0]), rel=0.3)


@pytest.mark.parametrize("num_calls", [1, 12])
def test_calls_that_are_all_as_frequent_tell_nothing_of_others(num_calls: int) -> None:
    """Of a grid, whose layers are called once, twelve calls take what one takes."""
    entry = recurring(observation(), num_calls, 1.0)
    costs = existing(fit_operators([entry], workloads=(), rates=()))
    assert costs.families == costs_of_the_made_up_machine().families
    calls = [(addition(1000), 1), (addition(1000), 12)]
    once, often = OperatorDurations(costs).durations(calls, Phase.FORWARD)
    assert once == often


def test_calls_that_recur_take_what_such_calls_took() -> None:
    entries = [observation(), recurring(observation(1), 12, 0.5)]
    costs = existing(fit_operators(entries, workloads=(), rates=()))
    for called in (addition(1000), matmul(64, 128, 256)):
        calls = [(called, 1), (called, 12)]
        once, often = OperatorDurations(costs).durations(calls, Phase.FORWARD)
        assert often.time_s == pytest.approx(0.5 * once.time_s, rel=0.15)


def drawn(seed: int, *, factor: float) -> OperatorsObservation:
    """A drawn model whose operators take longer than the law of the machine says."""
    entry = observation(seed)
    operators = tuple(
        one.model_copy(update={"times_s": tuple(factor * time_s for time_s in one.times_s)})
        for one in entry.operators
    )
    return entry.model_copy(update={"model": f"model {seed}", "operators": operators})


@pytest.mark.parametrize("scatter", [0.0, 0.3])
def test_the_error_of_curves_is_that_of_models_left_out(scatter: float) -> None:
    """What all operators of a model share is no property of any curve."""
    rng = np.random.default_rng(5)
    models = [drawn(seed, factor=float(np.exp(rng.normal(0, scatter)))) for seed in range(12)]
    timed = [observation(99), *models]
    found = existing(fit_operators(timed, workloads=(), rates=()))
    assert found.curve_log_error == pytest.approx(max(scatter, 0.02), rel=0.5)
    # What one run is off the mean of many is none of it: an answer adds that by itself.
    run = 0.8 * found.curve_log_error
    without = existing(fit_operators(timed, workloads=(), rates=(), run_log_error=run))
    assert without.curve_log_error == pytest.approx(max(0.6 * found.curve_log_error, 0.02))
    # Models of a GPU share a process: what it is off is in curves and timings alike.
    one, other = (
        existing(fit_operators(timed, workloads=(), rates=(), run_log_error=each, on_gpu=True))
        for each in (0.0, run)
    )
    assert one.curve_log_error == other.curve_log_error


def test_a_family_with_one_point_on_a_cpu_is_no_longer_than_its_bytes_take() -> None:
    """One upsampling of 1 ms made a network of 6 ms 2.7 times too slow; families well timed keep their own start."""
    slow = [replace(kernel(1e9 * n), time_s=1e-3 * n) for n in range(1, 7)]
    points = {"pointwise": [kernel(1e3), kernel(1e9)], "copy": [kernel(1e4)], "upsample": slow[:1]}
    kernels = existing(KernelCosts.seen(points, on_gpu=False))
    # What most families start within, not the fastest of them.
    assert kernels.start_s == pytest.approx(2e-6, rel=0.05)
    found = fit_family("upsample", slow[:1], kernels=kernels)
    assert work_s(kernel(1e5).units, found.unit_s, least_s=found.least_s) < 1e-5
    assert work_s(slow[0].units, found.unit_s, least_s=found.least_s) == pytest.approx(1e-3, 0.1)
    assert fit_family("upsample", slow, kernels=kernels) == fit_family("upsample", slow)
    assert kernels.unit_s("optimizer sgd fused", slow[:1]) == ()


def test_what_kernels_are_expected_to_take_is_the_best_of_all() -> None:
    """The shortest start, the best rates of each precision, and bytes of families that surely move all of theirs."""
    found = KernelCosts.seen(
        {
            "matmul": [timing(1.0, 1, 30.0, 4.0), timing(2.0, 1, 100.0, 4.0)],
            "matmul in 16 bit": [timing(1.0, 1, 400.0, 4.0)],
            "convolution dense": [timing(1.0, 1, 200.0, 4.0)],
            "reduction": [timing(1e-3, 1, 0.0, 1e6)],
            "pointwise": [timing(0.5, 1, 0.0, 40.0)],
            "copy": [timing(1.0, 1, 0.0, 90.0)],
            "view": [timing(1e-9, 1, 0.0, 0.0)],
            "optimizer adamw fused": [timing(1e-6, 1, 0.0, 9e9)],
        },
        on_gpu=True,
    )
    assert found is not None
    assert (found.start_s, found.bytes_per_s) == (1e-3, 90.0)
    # TF32 may convolve, and does not multiply.
    kinds = (False, False), (False, True), (True, False)
    assert [found.flop_per_s[kind] for kind in kinds] == [50.0, 400.0, 200.0]
    assert KernelCosts.seen({"view": [timing(1e-9, 1, 0.0, 0.0)]}, on_gpu=True) is None
    # Nothing streamed: a guess.
    single = existing(KernelCosts.seen({"matmul": [timing(1.0, 1, 30.0, 4.0)]}, on_gpu=True))
    assert single.bytes_per_s == 1e9


def test_expected_times_of_a_unit_of_work() -> None:
    """A start, FLOP at the rate of the precision, bytes; an update over lists a hundredth of a start per tensor."""
    rates = {(False, False): 1e12, (False, True): 8e12, (True, False): 4e12}
    kernels = KernelCosts(on_gpu=True, start_s=2e-6, flop_per_s=rates, bytes_per_s=1e11)
    matrix = [timing(1.0, 1, 30.0, 4.0)]
    assert kernels.unit_s("matmul", matrix) == pytest.approx(
        (2e-6, 1e-12, 1e-11, 1e-11, 1e-11, 2e-9)
    )
    last, *by_channel = kernels.unit_s("native_batch_norm", matrix)[5:]
    assert last == pytest.approx(1e-11)
    assert by_channel == [1.5e-10, 3e-10]
    backward = kernels.unit_s("native_batch_norm_backward in 16 bit", matrix)[6:]
    assert backward == pytest.approx((1e-9, 1.5e-10))
    side_by_side = kernels.unit_s("native_batch_norm channels last", matrix)
    assert side_by_side[5:] == pytest.approx((1e-9,))
    convolved = kernels.unit_s("convolution dense", matrix)
    assert (convolved[1], convolved[-1]) == pytest.approx((2.5e-13, 1e-13))
    assert kernels.unit_s("matmul in 16 bit", matrix)[1] == pytest.approx(1 / 8e12)
    assert kernels.unit_s("view", [timing(1e-9, 1, 0.0, 0.0), *matrix]) == ()
    update = Timing(features=(0.0,), time_s=1.0, flop=0.0, moved_bytes=2800.0, units=(1.0, 400.0))
    of_update = kernels.unit_s("optimizer adamw fused", [update])
    assert of_update == pytest.approx((2e-8, 7e-11, 6e-6))
    assert kernels.unit_s("optimizer adamw loop", [update]) == ()


def test_what_is_expected_fills_in_where_timings_tell_nothing() -> None:
    """Bytes alone were timed: their cost is theirs, a start is what was expected of it."""
    timings = [timing(size * 1e-9, 0.0, 0.0, size) for size in (1e6, 1e7, 1e8)]
    found = unit_costs(timings, (5e-6, 1e-12))
    assert found == pytest.approx((5e-6, 1e-12, 1e-9), rel=1e-6)
    assert unit_costs(timings)[:2] == (0.0, 0.0)
    # Timings that contradict it weigh by their number: a fifth of a timing each.
    both = [timing(1e-5, 1.0, 0.0, 0.0)] * 50
    assert unit_costs(both, (5e-6,))[0] == pytest.approx(1e-5, rel=0.01)
    # One call of 100 s among fifty of 1 s: its weight is that of a sum of a tenth of it.
    found_s, sums_s = 0.0, [1.0, 100.0]
    for _ in range(7):
        weights = 50 / sums_s[0], 1 / (100 * sums_s[1])
        found_s = (weights[0] + weights[1] * 100) / sum(weights)
        sums_s = [found_s, max(found_s, 10.0)]
    odd = [timing(1.0, 1.0, 0.0, 0.0)] * 50 + [timing(100.0, 1.0, 0.0, 0.0)]
    assert unit_costs(odd)[0] == pytest.approx(found_s, rel=1e-9)


def test_the_peaks_are_the_best_that_was_seen_by_operators_or_probes() -> None:
    entry = observation(3, noise=0.0)
    plain = existing(fit_operators([entry], workloads=(), rates=()))
    flop = max(one.operator.flop / one.times_s[0] for one in entry.operators)
    moved = max(
        (one.operator.read_bytes + one.operator.written_bytes) / one.times_s[0]
        for one in entry.operators
        if one.operator.flop == 0
    )
    assert plain.peak_flop_per_s == pytest.approx(flop)
    assert plain.peak_bytes_per_s == pytest.approx(moved)
    rate = compute_rate("matmul", flop_per_s=1e15, bytes_per_s=1e14)
    found = existing(fit_operators([entry], workloads=(), rates=(rate,)))
    assert (found.peak_flop_per_s, found.peak_bytes_per_s) == (1e15, 1e14)
    # Nothing tells how far sums are off: a tenth is assumed.
    assert (plain.replay_log_error, plain.curve_log_error) == (0.1, 0.1)


def test_sums_are_judged_by_the_passes_of_reference_models() -> None:
    """Replays of 1 s for passes of 2 and 1 s, or of 1 s: root mean squares in log, 2 % at least; curves by traces."""
    light, *_ = profile(Machine()).workloads

    def passes(**time_s: float) -> MeasuredWorkload:
        curves: dict[str, Any] = {
            name: (CurvePoint(at=4, time_s=each_s, relative_error=0.0),)
            for name, each_s in time_s.items()
        }
        phases = replace(light.phases[0], **curves)
        return replace(light, workload=replace(light.workload, name="linear"), phases=(phases,))

    others = REPLAY.model_copy(update={"workload": "other", "forward_s": (9.0,)})
    for forward_s, error in ((2.0, math.log(2) / math.sqrt(2)), (1.0, 0.02)):
        known = [passes(forward=forward_s, backward=1.0)]
        found = existing(fit_operators([REPLAY, others], workloads=known, rates=()))
        assert (found.replay_log_error, found.curve_log_error) == pytest.approx((error, 0.1))
    replay = REPLAY.model_copy(update={"traced": traced()})
    known = [passes(forward=2.0, backward=1e-3)]
    found = existing(fit_operators([observation(), replay], workloads=known, rates=()))
    steps = OperatorDurations(found, use_measured=False).step(traced().at(micro_batch=4))
    errors = [
        math.log(steps[phase].time_s / real_s)
        for phase, real_s in ((Phase.FORWARD, 2.0), (Phase.BACKWARD, 1e-3))
    ]
    error = math.hypot(*errors) / math.sqrt(2)
    assert (found.replay_log_error, found.curve_log_error) == pytest.approx((error, error))


def test_an_update_is_timed_by_the_tensor() -> None:
    """AdamW over four tensors of 400 bytes in 8 us: 2 us each, seven passes."""
    point = OptimizerPoint(
        optimizer="adamw",
        implementation="fused",
        num_tensors=4,
        tensor_bytes=400,
        times_s=(4e-6, 16e-6),
    )
    entry = OperatorsObservation(task="one", round=0, operators=(), optimizers=(point,))
    [found] = fit_curves([timings_of(entry, (), on_gpu=False)])
    assert found.name == "optimizer adamw fused"
    assert found.least_s == pytest.approx(2e-6)
    assert found.bytes_per_s == pytest.approx(7 * 400 / 2e-6)
    assert found.features == ((math.log(400), math.log(1600)),)


def test_a_family_keeps_no_more_points_than_tell_something() -> None:
    """Those with most sizes count; chosen ones are of the family, and the same every time."""
    points = [
        Timing(features=(float(i), 0.0), time_s=1.0 + i, flop=0.0, moved_bytes=1.0, units=(1.0,))
        for i in range(30)
    ]
    odd = Timing(features=(0.0,), time_s=1e-9, flop=0.0, moved_bytes=1.0, units=(1.0,))
    found = fit_family("pointwise", [odd, *points], most_points=12)
    assert len(found.features) == len(set(found.features)) == 12
    assert list(found.features) == sorted(found.features)
    assert found.least_s == 1.0 + found.features[0][0]
    assert fit_family("pointwise", [odd, *points], most_points=12) == found
    assert len(fit_family("pointwise", points).features) == 30


def test_what_is_rare_is_kept_and_what_was_timed_again_is_one_point() -> None:
    """One recurring sum in place among many calls of networks, each of them timed twice."""
    plain = Timing(features=(0.0,), time_s=1.0, flop=0.0, moved_bytes=1.0, units=(1.0,))
    many = [replace(plain, features=(i / 100,), time_s=t) for i in range(100) for t in (1.0, 4.0)]
    rare = replace(plain, features=(0.5,), num_calls=64, is_in_place=True)
    found = fit_family("pointwise", [*many, rare], most_points=10)
    assert len(set(found.features)) == 10
    assert (0.5, 1.0, math.log(64)) in found.features
    assert found.least_s == 1.0
    least = min(found.log_ratios)
    assert sorted(r - least for r in found.log_ratios) == pytest.approx([0.0, *[math.log(2)] * 9])
    no_calls = fit_family("pointwise", [*many, replace(rare, num_calls=1)])
    assert {len(place) for place in no_calls.features} == {1}


def test_fit_recovers_the_function_that_made_the_data() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.uniform(0, 10, (120, 2))
    truth = np.sin(inputs[:, 0] / 2) + 0.1 * inputs[:, 1]
    values = truth + rng.normal(0, 0.05, 120)
    process = fit_gaussian_process(tuple(map(tuple, inputs.tolist())), tuple(values.tolist()))
    at = rng.uniform(1, 9, (50, 2))
    means, _ = process.predict(at)
    expected = np.sin(at[:, 0] / 2) + 0.1 * at[:, 1]
    assert np.sqrt(np.mean((means - expected) ** 2)) < 0.06
    assert 0.025 < process.noise < 0.1


@pytest.mark.parametrize("count", [1, 12, 65, 131])
def test_the_likelihood_is_that_of_a_normal_distribution_with_its_gradient(count: int) -> None:
    """Inverted whole and by blocks."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.uniform(0, 5, (count, 2)), rng.normal(size=count)
    squares, logs = squared_differences(inputs), np.log([1.5, 2.0, 0.7, 0.3])
    value, gradient = _negative_log_likelihood(squares, targets, np.exp(logs))
    expected = multivariate_normal(
        np.full(count, targets.mean()),
        covariance(inputs, inputs, np.array([1.5, 2.0]), 0.7) + (0.09 + 1e-9) * np.eye(count),
    ).logpdf(targets)
    assert value == pytest.approx(-expected - count * math.log(2 * math.pi) / 2)
    for index in range(4):
        step = np.zeros(4)
        step[index] = 1e-5
        above, _ = _negative_log_likelihood(squares, targets, np.exp(logs + step))
        below, _ = _negative_log_likelihood(squares, targets, np.exp(logs - step))
        assert gradient[index] == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-5)

"""Durations of operators: recovered from timings, bounded by physics, never zero."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.families import called_features, features, optimizer_features
from perfmodel.cost.operators import UNKNOWN_LOG_ERROR, OperatorDurations
from perfmodel.machine import Evidence
from perfmodel.machine.measured import OperatorCosts, OperatorFamily
from perfmodel.workload import Operator, Phase
from perfmodel.workload.step import (
    OPTIMIZERS,
    TracedStep,
    calls_signature,
    parameters_signature,
    signature,
)
from tests.perfmodel.operators import (
    addition,
    costs_of_the_made_up_machine,
    matmul,
    measured_step,
    operator,
    spec,
    true_time_s,
)
from tests.perfmodel.traces import traced


@functools.cache
def machine() -> OperatorCosts:
    return costs_of_the_made_up_machine()


def price_s(called: Operator) -> float:
    return OperatorDurations(machine()).durations([(called, 1)], Phase.FORWARD)[0].time_s


def test_prices_recover_the_machine_that_made_the_timings() -> None:
    durations = OperatorDurations(machine())
    for called in (matmul(64, 128, 256), matmul(300, 300, 300), addition(10_000), addition(10**6)):
        found = durations.durations([(called, 1)], Phase.FORWARD)[0]
        assert found.time_s == pytest.approx(true_time_s(called), rel=0.12)
        assert found.evidence is Evidence.INTERPOLATED


sizes = st.integers(1, 20_000)


@given(
    called=st.one_of(
        st.builds(matmul, sizes, sizes, sizes), st.builds(addition, st.integers(1, 10**10))
    )
)
def test_nothing_is_faster_than_the_peaks(called: Operator) -> None:
    time_s = price_s(called)
    assert called.flop / time_s <= machine().peak_flop_per_s * (1 + 1e-9)
    moved = called.read_bytes + called.written_bytes
    assert moved / time_s <= machine().peak_bytes_per_s * (1 + 1e-9)


def curve(name: str, point: tuple[float, ...], *unit_s: float) -> OperatorFamily:
    """Of one timed member, which took e^0.1 of what its work takes; others scatter around it by 0.2."""
    return OperatorFamily(
        name=name,
        flop_per_s=0.0,
        bytes_per_s=1e9,
        least_s=1e-9,
        unit_s=unit_s,
        features=(point,),
        log_ratios=(0.1,),
        lengths=(1.0,) * len(point),
        spread=0.5,
        noise=0.2,
    )


def left_open(distance: float) -> float:
    """What a single point leaves open of a Matern curve."""
    known = 0.25 * (1 + math.sqrt(3) * distance) * math.exp(-math.sqrt(3) * distance)
    return math.sqrt(0.25 - known**2 / (0.25 + 0.04))


#: A call, bytes of the larger input, of the other and of the result.
POINTWISE = curve("pointwise", features(addition(1000)), 2e-6, 0.0, 1e-9, 2e-9, 4e-9)
BY_HAND = OperatorCosts(
    peak_flop_per_s=1e12,
    peak_bytes_per_s=1e10,
    families=(POINTWISE, replace(POINTWISE, name="other", least_s=1e-7)),
    measured=(),
    replay_log_error=0.3,
    curve_log_error=0.4,
)


@pytest.mark.parametrize(
    ("size", "evidence"),
    [
        (1000, Evidence.INTERPOLATED),
        (1105, Evidence.INTERPOLATED),
        (1221, Evidence.EXTRAPOLATED),
        (819, Evidence.EXTRAPOLATED),
        (20_000, Evidence.EXTRAPOLATED),
    ],
)
def test_a_call_is_read_off_a_timed_member(size: int, evidence: Evidence) -> None:
    """At the mean of what scatters; bytes read and written and two half widths are away from it by as many e-folds."""
    away = abs(math.log(size / 1000))
    [found] = OperatorDurations(BY_HAND).durations([(addition(size), 1)], Phase.FORWARD)
    assert found.time_s == pytest.approx((2e-6 + 28e-9 * size) * math.exp(0.1 + 0.2**2 / 2))
    error = math.hypot(left_open(math.sqrt(2.5) * away), 0.1 * 3 * away)
    assert found.log_error == pytest.approx(error)
    assert (found.evidence, found.family) == (evidence, "pointwise")


def test_calls_that_recur_are_read_where_such_calls_were_timed() -> None:
    """Of two points that differ in the number of calls alone; curves without it tell nothing of that."""
    points = tuple(called_features(addition(1000), count) for count in (1, 32))
    recurring = replace(
        curve("pointwise", points[0], 2e-5), features=points, log_ratios=(0.0, -1.0), noise=0.01
    )
    calls = [(addition(1000), count) for count in (1, 32)]
    once, again = OperatorDurations(replace(BY_HAND, families=(recurring,))).durations(
        calls, Phase.FORWARD
    )
    assert again.time_s == pytest.approx(math.exp(-1) * once.time_s, rel=0.02)
    one, other = OperatorDurations(BY_HAND).durations(calls, Phase.FORWARD)
    assert one == other


def test_sums_in_place_are_read_where_such_sums_were_timed() -> None:
    """Gradients of recurrent weights, found in the caches; curves of calls alone do not tell them from others."""
    apart = addition(1000)
    in_place = operator("aten.add_.Tensor", apart.inputs, apart.outputs, mutated=(0,))
    points = tuple(called_features(each, 32) for each in (apart, in_place))
    assert [place[-2] for place in points] == [0.0, 1.0]
    told = replace(
        curve("pointwise", points[0], 2e-5), features=points, log_ratios=(0.0, -1.0), noise=0.01
    )
    untold = curve("pointwise", (*features(apart), math.log(32)), 2e-5)
    calls = [(apart, 32), (in_place, 32)]
    tables = (OperatorDurations(replace(BY_HAND, families=(each,))) for each in (told, untold))
    (new, again), (one, other) = (table.durations(calls, Phase.BACKWARD) for table in tables)
    assert again.time_s == pytest.approx(math.exp(-1) * new.time_s, rel=0.1)
    assert one.time_s == pytest.approx(other.time_s)


@pytest.mark.parametrize(
    ("size", "evidence"), [(100, Evidence.EXTRAPOLATED), (10**6, Evidence.ASSUMED)]
)
def test_errors_add_up_in_a_family_and_mix_between_families(size: int, evidence: Evidence) -> None:
    """Five additions, and what nobody timed: the shortest call and twice its bytes, off by a factor of e."""
    mystery = operator("aten.mystery.default", (spec(size),), (spec(size),))
    calls = [(addition(1000), 3), (mystery, 1), (addition(2000), 2)]
    table = OperatorDurations(BY_HAND)
    first, unknown, second = table.durations(calls, Phase.FORWARD)
    assert unknown.time_s == pytest.approx(1e-9 + 2 * 8 * size / 1e10)
    assert (unknown.log_error, unknown.evidence) == (UNKNOWN_LOG_ERROR, Evidence.ASSUMED)
    total_s = 3 * first.time_s + 2 * second.time_s + unknown.time_s
    together_s = 3 * first.time_s * first.log_error + 2 * second.time_s * second.log_error
    found = table.phase(calls, Phase.FORWARD)
    assert found.time_s == pytest.approx(total_s)
    own = math.hypot(together_s, unknown.time_s) / total_s
    assert found.relative_error == pytest.approx(math.hypot(own, 0.4))
    assert (found.evidence, found.untimed) == (evidence, ("aten.mystery.default",))
    free = table.durations([(operator("aten.mystery.default", (), ()), 1)], Phase.FORWARD)
    assert (free[0].time_s, free[0].evidence) == (1e-9, Evidence.INTERPOLATED)
    gpu = OperatorDurations(BY_HAND, asynchronous=True)
    kernel, view = gpu.durations(
        [(mystery, 1), (operator("aten.mystery.default", (), ()), 1)], Phase.FORWARD
    )
    assert kernel.time_s - unknown.time_s == pytest.approx(5.05e-8 - 1e-9)
    assert view == free[0]


def test_calls_far_from_every_timing_are_less_certain_on_a_gpu_and_counted() -> None:
    """More than their curve says, which a processor is held to; near ones are alike on both."""
    near, far = addition(1000), addition(20_000)
    host, gpu = (OperatorDurations(BY_HAND, asynchronous=each) for each in (False, True))
    for called, more in ((near, 0.0), (far, 0.8)):
        [alone], [queued] = (each.durations([(called, 1)], Phase.FORWARD) for each in (host, gpu))
        assert queued.time_s == alone.time_s
        assert queued.log_error == pytest.approx(math.hypot(alone.log_error, more))
    [found] = host.durations([(far, 1)], Phase.FORWARD)
    assert host.phase([(near, 3), (far, 2)], Phase.FORWARD).far_s == {
        "pointwise": pytest.approx(2 * found.time_s)
    }
    assert host.phase([(near, 3)], Phase.FORWARD).far_s == {}


def test_a_kernel_of_cuda_stands_in_only_where_the_kernel_itself_was_not_timed() -> None:
    image, channel = spec(2, 8, 5, 5), spec(8)
    inputs = (image, *(channel,) * 4)
    called = operator("aten.native_batch_norm.default", inputs, (image, channel, channel))
    own, other = (
        curve(name, features(called), each_s)
        for name, each_s in (("native_batch_norm", 1e-3), ("cudnn_batch_norm", 1e-2))
    )
    for families, name in (((own, other), own.name), ((other,), other.name)):
        table = OperatorDurations(replace(BY_HAND, families=families))
        [found] = table.durations([(called, 1)], Phase.FORWARD)
        assert (found.family, found.evidence) == (name, Evidence.INTERPOLATED)


def test_what_was_measured_in_place_comes_first_that_of_the_own_step_before_others() -> None:
    called = addition(1000)
    names = [(signature(called), "forward")]
    steps = tuple(
        replace(measured_step(names, time_s, parameters=step), relative_error=error)
        for step, time_s, error in (("one", 1.0, 0.05), ("two", 2.0, 0.2))
    )
    profile = replace(BY_HAND, measured=steps)
    for own, time_s, error in (("one", 1.0, 0.05), ("two", 2.0, 0.2), ("three", 2.0, 0.0)):
        table = OperatorDurations(profile, own=own)
        found = table.phase([(called, 2)], Phase.FORWARD)
        assert (found.time_s, found.evidence) == (2 * time_s, Evidence.MEASURED)
        assert found.relative_error == pytest.approx(math.hypot(0.3, error))
    # Where most of the time is read off curves, theirs is the error.
    for size, error in ((10**9, 0.4), (4 * 10**7, 0.3)):
        [large] = table.durations([(addition(size), 1)], Phase.FORWARD)
        found = table.phase([(called, 1), (addition(size), 1)], Phase.FORWARD)
        own_error = large.log_error * large.time_s / (large.time_s + 2.0)
        assert found.relative_error == pytest.approx(math.hypot(own_error, error))
    [curved] = OperatorDurations(BY_HAND).durations([(called, 1)], Phase.FORWARD)
    assert table.durations([(called, 1)], Phase.BACKWARD) == [curved]
    alone = OperatorDurations(profile, use_measured=False, own="one")
    assert alone.durations([(called, 1)], Phase.FORWARD) == [curved]


def updated() -> TracedStep:
    """A step that updates 65,536 and 256 numbers, and leaves a frozen parameter alone."""
    step = traced().at(micro_batch=2)
    [matrix] = step.parameters
    bias = replace(matrix, name="b", shape=(256,))
    return replace(step, parameters=(matrix, bias, replace(matrix, name="f", ready_after=None)))


def test_an_update_costs_each_tensor_its_call_its_bytes_and_its_share_of_a_step() -> None:
    step, name, sizes = updated(), "optimizer sgd loop", (2**18, 2**10)
    entry = curve(name, optimizer_features(sizes[0], sum(sizes)), 1e-6, 2e-11, 4e-6)
    table = OperatorDurations(replace(BY_HAND, families=(entry,)))
    each_s = [1e-6 + 2e-11 * size + 4e-6 * size / sum(sizes) for size in sizes]
    assert table.optimizer_work_s(step) == pytest.approx(sum(each_s))
    found = table.optimizer(step)
    assert found.time_s == pytest.approx(sum(each_s) * math.exp(0.1 + 0.2**2 / 2))
    away = math.log(256)
    errors = left_open(0.0), math.hypot(left_open(away), 0.1 * away)
    own = sum(map(math.prod, zip(each_s, errors, strict=True))) / sum(each_s)
    assert found.relative_error == pytest.approx(math.hypot(own, 0.4))
    assert found.untimed == ()
    # Nobody timed it: what it moves, twice as long as memory takes.
    bare = OperatorDurations(replace(BY_HAND, families=()))
    moved_s = OPTIMIZERS["sgd"].passes * sum(sizes) / 1e10
    assert bare.optimizer_work_s(step) == pytest.approx(moved_s)
    unknown = bare.optimizer(step)
    assert unknown.time_s == pytest.approx(2 * moved_s)
    assert unknown.relative_error == pytest.approx(math.hypot(UNKNOWN_LOG_ERROR, 0.4))
    assert (unknown.evidence, unknown.untimed) == (Evidence.ASSUMED, (name,))
    # Timed in place: the middle of what this step took.
    own_name = parameters_signature(step)
    steps = [
        measured_step([], 0.0, parameters=parameters, optimizer_s=optimizer_s)
        for parameters, optimizer_s in ((own_name, 3.0), ("other", 9.0), (own_name, 5.0))
    ]
    profile = replace(BY_HAND, measured=tuple(steps), families=(entry,))
    in_place = OperatorDurations(profile, own=own_name).optimizer(step)
    assert (in_place.time_s, in_place.evidence) == (4.0, Evidence.MEASURED)
    assert in_place.relative_error == pytest.approx(math.hypot(0.3, 0.01))
    assert OperatorDurations(profile, use_measured=False).optimizer(step) == found


def test_whether_all_calls_of_a_step_were_timed_and_its_model_trained() -> None:
    step = updated()
    own, calls = parameters_signature(step), calls_signature(step)
    names = [(signature(step.operators[at]), phase.value) for at, phase in step.call_counts()]
    whole = measured_step(names, 1.0, micro_batch=2, parameters=own)
    part, other = replace(whole, operators=whole.operators[1:]), replace(whole, parameters="other")
    more = measured_step([*names, ("more", "forward")], 1.0, parameters=own)
    trained = replace(whole, trained_s=1.0, calls=calls)
    for measured, holds in (
        ((whole,), True),
        ((part,), False),
        ((other,), False),
        ((part, other), True),
        ((more,), True),
    ):
        assert OperatorDurations(replace(BY_HAND, measured=measured)).holds(step) is holds
    changes: list[dict[str, Any]] = [
        *({"micro_batch": 3}, {"parameters": "other"}, {"calls": "other"}, {"trained_s": None}),
    ]
    wrong = tuple(replace(trained, **change) for change in changes)
    renamed = replace(trained, workload="renamed", ddp_s={2: (1.0, 0.1)})
    cases = ((wrong, None), ((*wrong, trained), trained), ((trained, renamed, trained), renamed))
    for steps, found in cases:
        assert OperatorDurations(replace(BY_HAND, measured=steps)).trained(step) is found

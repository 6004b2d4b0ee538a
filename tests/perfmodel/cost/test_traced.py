"""A traced workload as phase curves: sums of durations, evidence, ranks that slow each other down."""

import math
from dataclasses import replace

import pytest

from calibrate.fit.operators import fit_operators
from perfmodel.answer.measured import interval, measured_caveats
from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.traced import INPUT_COPIES, issued, slowdown, traced_profile, with_ready_times
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    ComputeRate,
    MeasuredMachine,
    MeasuredOperator,
    MeasuredStep,
    MeasuredWorkload,
    OperatorCosts,
    PhaseCurves,
)
from perfmodel.workload import Call, Phase
from perfmodel.workload.step import AffineBytes, Segment, parameters_signature, signature
from tests.perfmodel.asking import Asking
from tests.perfmodel.operators import costs_of_the_made_up_machine, observation
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced


@pytest.fixture(scope="module")
def durations() -> OperatorCosts:
    return costs_of_the_made_up_machine()


@pytest.fixture(scope="module")
def machine(durations: OperatorCosts) -> MeasuredMachine:
    return replace(profile(Machine()), operators=durations)


def single(micro_batch: int) -> RunSetting:
    return RunSetting(
        workload="linear",
        world_size=1,
        micro_batch=micro_batch,
        synchronisation=Synchronisation.NONE,
    )


def measured(durations: OperatorCosts, micro_batch: int, time_s: float) -> OperatorCosts:
    """Every operator of the step measured to take so long."""
    step = traced().at(micro_batch=micro_batch)
    names = [(signature(step.operators[at]), phase.value) for at, phase in step.call_counts()]
    found = MeasuredStep(
        workload="linear",
        micro_batch=micro_batch,
        parameters=parameters_signature(step),
        operators=tuple(
            MeasuredOperator(signature=name, phase=phase, time_s=time_s) for name, phase in names
        ),
        optimizer_s=5 * time_s,
        relative_error=0.01,
    )
    return replace(durations, measured=(found,))


def test_measured_operators_decide_at_their_batch_and_scale_the_others(
    machine: MeasuredMachine, durations: OperatorCosts
) -> None:
    known = replace(machine, operators=measured(durations, 8, 0.1))
    predictor = Asking(known)
    workload = predictor.workload(WORKLOAD, traced())
    assert workload.measured_batches == (8,)
    at_eight = predictor.step(workload, single(8).layout)
    # One call forward, two backward, the optimizer five times as long.
    assert at_eight.step_s[0] == pytest.approx(0.1 + 0.2 + 0.5)
    assert at_eight.evidence["compute"] is Evidence.MEASURED
    at_sixteen = predictor.step(workload, single(16).layout)
    assert at_sixteen.evidence["compute"] is Evidence.INTERPOLATED
    assert at_sixteen.step_s[0] > at_eight.step_s[0]
    curves = Asking(known, use_measured=False)
    alone = curves.step(curves.workload(WORKLOAD, traced()), single(8).layout)
    assert alone.step_s[0] < 0.1


def test_ranks_beside_each_other_are_slowed_as_the_reference_models_are(
    machine: MeasuredMachine, durations: OperatorCosts
) -> None:
    workload = traced_profile(machine, durations, WORKLOAD, traced())
    one, two = workload.phases[0], workload.phases[-1]
    for phase in Phase:
        factor = slowdown(machine, phase, two.world_size, WORKLOAD.gradient_bytes).factor
        first, second = getattr(one, phase.value)[3], getattr(two, phase.value)[3]
        assert second.time_s == pytest.approx(factor * first.time_s)


def with_sharing(machine: MeasuredMachine, slopes: dict[str, float]) -> MeasuredMachine:
    """Two ranks slow each other by so much, by workload."""
    return replace(
        machine,
        workloads=tuple(
            replace(entry, phases=(entry.phases[0], _slowed(entry, slopes)))
            for entry in machine.workloads
        ),
    )


def _slowed(entry: MeasuredWorkload, slopes: dict[str, float]) -> PhaseCurves:
    factor = slopes[entry.workload.name]
    points = tuple(replace(p, time_s=p.time_s * factor) for p in entry.phases[0].backward)
    return replace(entry.phases[1], backward=points)


def test_heavier_models_are_slowed_as_the_reference_models_rise(machine: MeasuredMachine) -> None:
    sizes = {w.workload.name: w.workload.gradient_bytes for w in machine.workloads}
    light, heavy = sorted(sizes, key=sizes.__getitem__)
    shared = with_sharing(machine, {light: 1.0, heavy: 1.2})
    factors = [
        slowdown(shared, Phase.BACKWARD, 2, size)
        for size in (sizes[light], sizes[heavy], 100 * sizes[heavy])
    ]
    at_light, at_heavy, beyond = (found.factor for found in factors)
    # Drawn towards none: between flat and the line through both.
    assert 1.0 <= at_light < at_heavy < 1.2 < beyond
    assert factors[0].log_error < factors[2].log_error
    level = with_sharing(machine, {light: 1.1, heavy: 1.1})
    assert slowdown(level, Phase.BACKWARD, 2, 10**12).factor == pytest.approx(1.1)


def test_one_more_repetition_widens_what_is_said_of_a_traced_step(machine: MeasuredMachine) -> None:
    restless = replace(machine, repeatability=replace(machine.repeatability, run={1: 0.2}))
    widths = []
    for known in (machine, restless):
        predictor = Asking(known)
        found = interval(
            predictor.step(predictor.workload(WORKLOAD, traced()), single(8).layout).step_s
        )
        widths.append(math.log(found.p95 / found.p5))
    # 3.29 standard deviations lie between the two ends.
    assert math.hypot(widths[0], 3.29 * 0.2) == pytest.approx(widths[1], rel=0.15)


def test_an_operator_that_nothing_tells_about_is_named(machine: MeasuredMachine) -> None:
    predictor = Asking(machine)
    workload = predictor.workload(WORKLOAD, traced(mystery=True))
    assert "aten.mystery.default" in workload.untimed
    step = predictor.step(workload, single(8).layout)
    text = " ".join(measured_caveats(step.question, {step.layout: step.evidence}))
    assert "aten.mystery.default" in text
    assert workload.phases[0].forward[0].relative_error > 0.3


def test_a_phase_is_the_sum_of_its_calls_and_tells_when_gradients_are_ready(
    durations: OperatorCosts,
) -> None:
    table = OperatorDurations(durations)
    step = traced().at(micro_batch=8)
    forward, gradient = (
        duration.time_s for duration in table.durations(step.operators, Phase.BACKWARD)
    )
    found = table.step(step)
    assert found[Phase.FORWARD].time_s == pytest.approx(forward)
    assert found[Phase.BACKWARD].time_s == pytest.approx(forward + gradient)
    (parameter,) = with_ready_times(WORKLOAD, step, table).parameters
    assert parameter.ready_fraction == pytest.approx(gradient / (forward + gradient))


@pytest.mark.parametrize("seed", range(4))
def test_more_samples_never_take_less_time(machine: MeasuredMachine, seed: int) -> None:
    noisy = fit_operators([observation(seed, noise=0.5)], workloads=(), rates=())
    assert noisy is not None
    workload = traced_profile(machine, noisy, WORKLOAD, traced())
    for phase in Phase:
        times_s = [point.time_s for point in getattr(workload.phases[0], phase.value)]
        assert times_s == sorted(times_s)


def test_the_batch_is_copied_to_a_device_that_works_behind_its_host(
    durations: OperatorCosts,
) -> None:
    """A bag of words copies longer than it computes: without its batch it was 80 % too fast."""
    fast = replace(
        profile(Machine(asynchronous=True)), rates=(copy_of(4e3, 1e-5), copy_of(1e8, 1e-2))
    )
    batch = AffineBytes(constant_bytes=0, per_sample_bytes=10_000_000)
    bare, fed = (
        traced_profile(fast, durations, WORKLOAD, traced(), batch=each).phases[0].input
        for each in (None, batch)
    )
    assert {point.time_s for point in bare} == {0.0}
    at = next(point for point in fed if point.at == 8)
    assert at.time_s == pytest.approx(8e7 * 1e-10 + 2e-5, rel=2e-3)


def copy_of(size_bytes: float, time_s: float) -> ComputeRate:
    return ComputeRate(
        probe="host_to_device",
        dtype="fp32",
        shape=(1,),
        time_s=time_s,
        flop_per_s=0.0,
        bytes_per_s=size_bytes / time_s,
    )


def test_what_moves_nothing_starts_no_kernel() -> None:
    """An unsafe view is no view by its schema; the optimizer's marks and numbers of the host are no kernels."""
    step = traced()
    moves_nothing = replace(step.operators[0], name="aten._unsafe_view.default", inputs=(0,))
    calls = step.segments[0].calls
    more = tuple(Call(operator=2, phase=phase, module="") for phase in Phase)
    step = replace(
        step,
        operators=(*step.operators, moves_nothing),
        segments=(Segment(count=1, calls=(*calls, *more)),),
    )
    at = step.at(micro_batch=2)
    counts = {phase: issued(at, phase) for phase in Phase}
    assert counts == {
        Phase.FORWARD: (1 + INPUT_COPIES, 1),
        Phase.BACKWARD: (2, 1),
        Phase.OPTIMIZER: (0, 0),
    }

"""Terms of a setting from a profile whose parameters are known."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel.cost import Terms
from perfmodel.cost.accumulation import additions, calls_of_additions
from perfmodel.cost.machine import CostModel, model_form, step_program
from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.traced import issued
from perfmodel.layout import Layout, Synchronisation, parse_layout
from perfmodel.machine import Evidence
from perfmodel.machine.measured import CurvePoint, MeasuredMachine, PhaseCurves, TracedWorkload
from perfmodel.step import Cause, Operation, StepProgram, Stream
from perfmodel.step.stages import gradient_buckets
from perfmodel.workload import Phase, TensorSpec
from perfmodel.workload.step import signature
from tests.existing import existing
from tests.perfmodel.cost.test_step_law import COSTS
from tests.perfmodel.llama import traced
from tests.perfmodel.operators import costs_of_the_made_up_machine, measured_step, operator
from tests.perfmodel.profiles import Machine, compute_rate, host_costs, profile, slowed


def terms(
    document: MeasuredMachine,
    *,
    world_size: int = 2,
    micro_batch: int = 16,
    **others: Any,
) -> Terms:
    workload = existing(document.workload("heavy"))
    layout = Layout(dp=world_size, micro_batch=micro_batch, **others)
    costs = CostModel(document, num_draws=200, seed=0)
    return costs.terms(workload, layout, step_program(document, workload, layout))


def test_compute_is_read_from_the_curves_of_the_world_size() -> None:
    """Forward at 8: 1 + 8 * 5 = 41 ms alone; two ranks share the node and take 1.5 times as long."""
    document = profile(Machine(sharing=1.5))
    alone, shared = terms(document, world_size=1, micro_batch=8), terms(document, micro_batch=8)
    assert alone.compute_s[Cause.FORWARD][0] == pytest.approx(0.041)
    assert shared.compute_s[Cause.FORWARD][0] == pytest.approx(0.0615)
    many = terms(document, world_size=64, micro_batch=8)
    assert many.compute_s[Cause.FORWARD][0] == pytest.approx(0.0615)


def timed_over(*rows: tuple[float, float]) -> MeasuredMachine:
    """A machine whose kernels moved bytes over the memory in seconds, one pair each."""
    rates = (compute_rate("memory", time_s=time_s, bytes_per_s=b / time_s) for b, time_s in rows)
    return replace(profile(Machine()), rates=tuple(rates))


def test_gradients_are_added_to_those_of_earlier_micro_batches() -> None:
    """Twice in three micro-batches: 1 ms to start, and three bytes per byte at 1 ns, as kernels over memory took."""
    document = timed_over((8e6, 9e-3), (8e9, 8.001))
    workload = existing(document.workload("heavy"))
    sizes = [each.size_bytes for each in workload.workload.parameters]
    once, thrice = (terms(document, accumulation=count) for count in (1, 3))
    found_s = thrice.compute_s[Cause.BACKWARD] - once.compute_s[Cause.BACKWARD]
    added_s = 1e-3 * len(sizes) + 3e-9 * sum(sizes)
    assert found_s[0] == pytest.approx(2 / 3 * added_s)
    three = parse_layout("accumulation=3")
    assert additions(replace(document, rates=()), three, sizes).time_s == 0.0
    # The schedule of a pipeline divides the sum, two bytes per byte.
    divided_s = 1e-3 * len(sizes) + 2e-9 * sum(sizes)
    found = additions(document, replace(three, pp=2), sizes)
    assert found.time_s == pytest.approx((2 * added_s + divided_s) / 3)


def test_curves_of_operators_tell_what_adding_gradients_takes() -> None:
    """One addition of two in a step of two micro-batches, and in a pipeline one division."""
    machine = replace(profile(Machine()), operators=costs_of_the_made_up_machine())
    assert machine.operators is not None
    # What another step took in place tells nothing of these.
    durations = OperatorDurations(machine.operators, use_measured=False)
    held = [TensorSpec(shape=(count,), dtype="float32") for count in (1000, 2_000_000)]
    adds = [(operator("aten.add_.Tensor", (h, h), (), mutated=(0,)), 1) for h in held]
    divides = [(operator("aten.div_.Scalar", (h,), (), mutated=(0,)), 1) for h in held]
    add_s, divide_s = (durations.phase(c, Phase.BACKWARD).time_s for c in (adds, divides))
    in_place = [(signature(replace(c, arguments="[]")), "backward") for c, _ in (*adds, *divides)]
    another = measured_step(in_place, 9.0)
    machine = replace(machine, operators=replace(machine.operators, measured=(another,)))
    two = parse_layout("accumulation=2")
    found = additions(machine, two, [4000, 8_000_000])
    assert found.time_s == pytest.approx(add_s / 2)
    found = additions(machine, replace(two, pp=2), [4000, 8_000_000])
    assert found.time_s == pytest.approx((add_s + divide_s) / 2)


HEAVY = existing(profile(Machine()).workload("heavy"))
GRADIENTS = len(HEAVY.workload.parameters)


def issuing(shared_s: float, relative_error: float = 0.0) -> MeasuredMachine:
    """Where the host of one rank issues every phase in 5 ms."""

    def phases_of(each: PhaseCurves) -> PhaseCurves:
        time_s = 5e-3 if each.world_size == 1 else shared_s
        points = tuple(
            CurvePoint(at=at, time_s=time_s, relative_error=relative_error) for at in (8.0, 32.0)
        )
        names = ("dispatch_forward", "dispatch_backward", "dispatch_optimizer")
        issued: dict[str, Any] = dict.fromkeys(names, points)
        return replace(each, **issued)

    phases = tuple(map(phases_of, HEAVY.phases))
    return replace(profile(Machine()), workloads=(replace(HEAVY, phases=phases),))


def test_ddp_costs_the_host_once_in_a_step_of_several_micro_batches() -> None:
    """Hooks and buckets took 3 ms on top of 5 ms; four micro-batches, of which one reduces."""
    document = issuing(shared_s=8e-3)
    once, often = (terms(document, accumulation=count) for count in (1, 4))
    assert once.issue_s[Cause.BACKWARD][0] == pytest.approx(8e-3)
    call_s = 0.01 / HEAVY.workload.num_operators
    added_s = 3 / 4 * GRADIENTS * call_s
    assert often.issue_s[Cause.BACKWARD][0] == pytest.approx(5e-3 + 3e-3 / 4 + added_s)
    assert often.issue_s[Cause.FORWARD][0] == pytest.approx(5e-3 + 3e-3 / 4)


def test_a_host_that_is_slow_is_slow_in_all_phases_and_at_all_batches() -> None:
    """Between two points too its time is uncertain by 20 %; what DDP adds is not."""
    issued = terms(issuing(shared_s=8e-3, relative_error=0.2)).issue_s
    forward_s, backward_s = issued[Cause.FORWARD], issued[Cause.BACKWARD]
    np.testing.assert_allclose(forward_s, backward_s)
    assert np.std(np.log(forward_s)) == pytest.approx(0.2, rel=0.2)


def test_a_host_varies_by_run_and_as_much_by_occasion() -> None:
    document = issuing(shared_s=5e-3)
    again = replace(document, repeatability=replace(document.repeatability, host=0.1))
    forward_s, backward_s = (
        terms(again).issue_s[cause] for cause in (Cause.FORWARD, Cause.BACKWARD)
    )
    np.testing.assert_allclose(forward_s, backward_s)
    assert forward_s[0] == pytest.approx(5e-3)
    assert np.std(np.log(forward_s)) == pytest.approx(0.1 * 2**0.5, rel=0.2)
    [workload] = again.workloads
    phases = tuple(replace(each, dispatch_backward=()) for each in workload.phases)
    without = replace(again, workloads=(replace(workload, phases=phases),))
    for count in (1, 4):
        issued = terms(without, accumulation=count).issue_s
        assert Cause.BACKWARD not in issued
        np.testing.assert_allclose(issued[Cause.FORWARD], forward_s)


def test_the_host_issues_an_addition_for_every_gradient() -> None:
    """As timed; else at what a call of autograd costs more than a view: as fitted, or in the mean of both passes.

    A single operator differs from the mean by 30 %, beside what the mean is off by.
    """
    document = issuing(shared_s=5e-3)
    host = host_costs(forward_s=1e-6, backward_s=2e-6, view_s=5e-7, relative_error=0.1)
    for known, call_s, log_error in (
        (None, 0.01 / HEAVY.workload.num_operators, 0.3),
        (host, 1.5e-6, math.hypot(0.3, 0.1)),
        (replace(host, addition_s=2.5e-6, addition_log_error=0.05), 2.5e-6, 0.05),
    ):
        found = replace(document, host=known)
        once, twice = (terms(found, accumulation=count) for count in (1, 2))
        more_s = twice.issue_s[Cause.BACKWARD] - once.issue_s[Cause.BACKWARD]
        assert more_s[0] == pytest.approx(GRADIENTS * call_s / 2)
        assert np.log(more_s / more_s[0]).std() == pytest.approx(log_error, rel=0.2)


def test_more_buckets_are_more_work_of_the_host() -> None:
    """One operator for each beyond the default ones."""
    usual, small = (
        len(gradient_buckets(HEAVY.workload, Layout(dp=2, bucket_cap_mb=cap_mb)))
        for cap_mb in (None, 0.01)
    )
    assert small > usual
    found = terms(replace(issuing(shared_s=8e-3), dispatch_s=1e-5), bucket_cap_mb=0.01).issue_s
    assert found[Cause.BACKWARD][0] == pytest.approx(8e-3 + (small - usual) * 1e-5)
    assert found[Cause.FORWARD][0] == pytest.approx(8e-3)


def test_an_addition_takes_the_place_of_a_view() -> None:
    """10 ms for all calls and views of a backward pass, a view 0.3 of a call; a division replaces nothing."""
    document = profile(Machine())
    heavy = existing(document.workload("heavy"))
    trace, memory = traced("resnet18")
    workload = TracedWorkload.of(heavy, trace, memory)
    counts = issued(trace.at(micro_batch=8), Phase.BACKWARD)
    kernels, views = counts["backward_s"], counts["view_s"]
    assert views > 0
    call_s = 10e-3 / (kernels + 0.3 * views)
    num_gradients = len(heavy.workload.parameters)
    passes_s = np.array([5e-3]), np.array([10e-3])
    machine = replace(document, host=None)
    for text, each_s in (
        ("accumulation=4", 3 / 4 * 0.7 * call_s),
        ("accumulation=4 pp=2", (3 / 4 * 0.7 + 1 / 4) * call_s),
    ):
        layout = parse_layout(f"{text} micro_batch=8")
        found_s, log_error = calls_of_additions(machine, workload, layout, passes_s)
        assert found_s == pytest.approx(num_gradients * each_s)
        assert log_error == 0.3


def test_what_additions_take_is_uncertain() -> None:
    """By 10 % where kernels over memory tell it; of a single micro-batch nothing is added."""
    document = timed_over((8e6, 8.0), (8e9, 8e3))
    once, twice = (terms(document, accumulation=count) for count in (1, 2))
    added_s = twice.compute_s[Cause.BACKWARD] - once.compute_s[Cause.BACKWARD]
    assert np.log(added_s / added_s[0]).std() == pytest.approx(0.1, rel=0.2)


def test_between_measured_numbers_of_ranks_the_nearest_two_tell() -> None:
    """Three ranks, half-way between two and four that take twice as long; eight say nothing of them."""
    document = profile(Machine(world_size=8))
    workload = existing(document.workload("heavy"))
    alone = workload.phases[0]

    slower = (slowed(alone, n, factor) for n, factor in ((2, 1.0), (4, 2.0), (8, 9.0)))
    phases = (alone, *slower)
    others = tuple(each for each in document.workloads if each is not workload)
    changed = replace(document, workloads=(*others, replace(workload, phases=phases)))
    found = terms(changed, world_size=3, micro_batch=8).compute_s[Cause.FORWARD]
    assert found[0] == pytest.approx(1.5 * 0.041)


def test_a_bucket_costs_its_gradients_and_its_bytes() -> None:
    """Three gradients at 1 ms, and 2 MB at 1 ns a byte; twice that on the slowest rank."""
    costs = {"bucket_s": 1e-3, "bucket_s_per_byte": 1e-9, "slowest": 2.0}
    changes: dict[str, Any] = {name: np.array([cost]) for name, cost in costs.items()}
    known = replace(terms(profile(Machine())), **changes)
    bucket = Operation("bucket", Stream.COMPUTE, Cause.BUCKET, share=3.0, size_bytes=2_000_000)
    program = StepProgram((bucket,))
    assert known.median_durations(program)[0, 0] == pytest.approx(5e-3)
    assert known.durations(program)[0, 0] == pytest.approx(10e-3)


def test_all_reduces_of_a_step_wait_for_their_start() -> None:
    """2 ms each on two ranks; the broadcast of buffers does not, and one rank has nobody to wait for."""

    def found(start_s: float, world_size: int) -> dict[Cause, set[float]]:
        document = profile(Machine(all_reduce_start_s=start_s))
        layout = Layout(dp=world_size, micro_batch=16, wrapper=Synchronisation.DDP)
        program = step_program(document, HEAVY, layout)
        costs = CostModel(document, num_draws=1, seed=0)
        rows_s = costs.terms(HEAVY, layout, program).durations(program)[:, 0]
        return {
            cause: {
                round(float(time_s), 9)
                for operation, time_s in zip(program.operations, rows_s, strict=True)
                if operation.cause is cause
            }
            for cause in (Cause.ALL_REDUCE, Cause.BROADCAST)
        }

    free, late = found(0.0, 2), found(2e-3, 2)
    assert late[Cause.ALL_REDUCE] == {round(time_s + 2e-3, 9) for time_s in free[Cause.ALL_REDUCE]}
    assert late[Cause.BROADCAST] == free[Cause.BROADCAST]
    assert found(2e-3, 1) == found(0.0, 1)


def test_runs_scatter_beyond_the_noise_that_residuals_hold() -> None:
    """Residuals of nothing: 13 % of a run, of which a calibration of one round holds 5 %, leave 12 %."""
    document = profile(Machine())
    document = replace(document, repeatability=replace(document.repeatability, run={1: 0.05}))
    workload = existing(document.workload("heavy"))
    layout = parse_layout("dp=2 micro_batch=8")
    factors = model_form(document, {}, workload, layout, num_draws=20_000, run_error=0.13)
    assert factors[0] == 1.0
    assert np.log(factors).std() == pytest.approx(0.12, rel=0.03)


def test_settings_share_their_uncertainty() -> None:
    """One rank and two read curves that were drawn once: asking again gives the same draws."""
    document = profile(Machine(relative_error=0.1))
    workload = existing(document.workload("heavy"))
    costs = CostModel(document, num_draws=50, seed=0)
    first, again = (
        costs.terms(workload, layout, step_program(document, workload, layout))
        for layout in (Layout(dp=2, micro_batch=16), Layout(dp=2, micro_batch=16, accumulation=4))
    )
    assert np.array_equal(first.compute_s[Cause.FORWARD], again.compute_s[Cause.FORWARD])
    assert len(set(first.compute_s[Cause.FORWARD])) == 50


def test_evidence_weakens_beyond_the_calibration() -> None:
    document = profile(Machine())
    assert terms(document, world_size=1).evidence == {"compute": Evidence.MEASURED}
    inside = terms(document, micro_batch=8).evidence
    assert inside["compute"] is Evidence.INTERPOLATED
    assert inside["communication"] is Evidence.INTERPOLATED
    beyond = terms(document, world_size=4, micro_batch=128).evidence
    assert set(beyond.values()) == {Evidence.EXTRAPOLATED}


def test_gradients_beyond_and_below_the_kernels_that_were_timed() -> None:
    """A line through the two smallest, never below nothing; beyond the largest at its rate."""
    machine = timed_over((4e6, 9e-3), (2e6, 3e-3), (1e6, 2e-3))
    rates = machine.rates[::-1]
    product = compute_rate("matmul", time_s=1.0, bytes_per_s=3e6)
    machine = replace(machine, rates=(product, *machine.rates))
    two = parse_layout("accumulation=2")
    for size, time_s in ((0, 1e-3), (3e6, 6e-3), (8e6, 18e-3)):
        # One addition of three bytes per byte in two micro-batches.
        found_s = additions(machine, two, [int(size / 3)]).time_s
        assert found_s == pytest.approx(time_s / 2, rel=1e-5)
    steep = replace(machine, rates=(replace(rates[0], time_s=1e-4, bytes_per_s=1e10), rates[1]))
    assert additions(steep, two, [0]).time_s == 0.0
    # One kernel tells no line; a device that was fitted to steps has its data sheet.
    assert additions(replace(machine, rates=(rates[0],)), two, [10**6]).time_s == 0.0
    fitted = replace(machine, rates=(), device_costs=COSTS)
    assert additions(fitted, two, [10**6, 10**6]).time_s == pytest.approx(6e6 / 1e12 / 2)
    assert additions(machine, parse_layout("accumulation=1"), [10**6]).time_s == 0.0

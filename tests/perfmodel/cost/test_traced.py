"""A traced workload as phase curves: sums of durations, evidence, ranks that slow each other down."""

import math
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.answer import Answer, interval
from perfmodel.answer.answer import answer, steps_s
from perfmodel.answer.measured import measured_caveats, measured_in_place
from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.traced import (
    INPUT_COPIES,
    input_copy_s,
    issued,
    issued_s,
    ready_when_done,
    slowdown,
    traced_profile,
    with_ready_times,
)
from perfmodel.layout import Layout
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    CollectiveProfile,
    ComputeRate,
    MeasuredMachine,
    MeasuredStep,
    MeasuredWorkload,
    OperatorCosts,
    Repeatability,
)
from perfmodel.workload import Call, Phase
from perfmodel.workload.step import (
    AffineBytes,
    Segment,
    SymbolicStep,
    calls_signature,
    parameters_signature,
    signature,
)
from tests.perfmodel.asking import Asking
from tests.perfmodel.operators import costs_of_the_made_up_machine, measured_step
from tests.perfmodel.profiles import Machine, compute_rate, host_costs, profile, slowed
from tests.perfmodel.traces import WORKLOAD, traced

EIGHT = Layout(micro_batch=8)


@pytest.fixture(scope="module")
def durations() -> OperatorCosts:
    return costs_of_the_made_up_machine()


@pytest.fixture(scope="module")
def machine(durations: OperatorCosts) -> MeasuredMachine:
    return replace(profile(Machine()), operators=durations)


def measured(durations: OperatorCosts, micro_batch: int, time_s: float) -> OperatorCosts:
    """Every operator of the step measured to take so long."""
    step = traced().at(micro_batch=micro_batch)
    names = [(signature(step.operators[at]), phase.value) for at, phase in step.call_counts()]
    found = measured_step(
        names,
        time_s,
        micro_batch=micro_batch,
        parameters=parameters_signature(step),
        optimizer_s=5 * time_s,
    )
    return replace(durations, measured=(found,))


def test_measured_operators_decide_at_their_batch_and_scale_the_others(
    machine: MeasuredMachine, durations: OperatorCosts
) -> None:
    known = replace(machine, operators=measured(durations, 8, 0.1))
    predictor = Asking(known)
    workload = predictor.workload(WORKLOAD, traced())
    assert workload.measured_batches == (8,)
    at_eight = predictor.step(workload, EIGHT)
    # One call forward, two backward, the optimizer five times as long.
    assert at_eight.step_s[0] == pytest.approx(0.1 + 0.2 + 0.5)
    assert at_eight.evidence["compute"] is Evidence.MEASURED
    at_sixteen = predictor.step(workload, Layout(micro_batch=16))
    assert at_sixteen.evidence["compute"] is Evidence.INTERPOLATED
    assert at_sixteen.step_s[0] > at_eight.step_s[0]
    curves = Asking(known, use_measured=False)
    alone = curves.step(curves.workload(WORKLOAD, traced()), EIGHT)
    assert alone.step_s[0] < 0.1


def test_a_trained_step_takes_as_long_as_its_training_and_scales_the_others(
    machine: MeasuredMachine, durations: OperatorCosts
) -> None:
    """Of operators that take 80 ms in 160 ms: all twice as long, at other batches and of operators that failed too."""
    costs = measured(durations, 8, 0.01)
    (step,) = costs.measured
    calls = calls_signature(traced().at(micro_batch=8))
    trained = replace(step, trained_s=0.16, relative_error=0.02, calls=calls)
    both = [
        traced_profile(machine, replace(costs, measured=(each,)), WORKLOAD, traced())
        for each in (step, trained)
    ]
    for phase in Phase:
        before, after = (getattr(workload.phases[0], phase.value) for workload in both)
        assert [p.time_s for p in after] == pytest.approx([2 * p.time_s for p in before])
        assert after[3].relative_error == 0.02
    deep = calls_signature(deeper(traced(), 10).at(micro_batch=8))
    other = replace(trained, calls=deep, relative_error=step.relative_error)
    alone = traced_profile(machine, replace(costs, measured=(other,)), WORKLOAD, traced())
    assert alone.phases == both[0].phases  # of a model that applies its block more often
    bare = replace(costs, measured=(replace(trained, operators=trained.operators[:1]),))
    workload = traced_profile(machine, bare, WORKLOAD, traced())
    assert workload.measured_batches == (8,)
    at_eight = [getattr(workload.phases[0], phase.value)[3].time_s for phase in Phase]
    assert sum(at_eight) == pytest.approx(0.16)


def test_a_trained_step_is_as_sure_as_its_own_trainings(durations: OperatorCosts) -> None:
    """Of 3 %, beside a calibration of 20 %: what other processes differ by, 0.43 of its variance later, and its run.

    Other batches, more micro-batches and trainings without a second one keep the noise of the calibration.
    """
    noisy = Repeatability(run={1: 0.2}, round=0.0, occasion=0.2)
    machine = replace(profile(Machine(residual=0.1)), repeatability=noisy)
    (step,) = measured(durations, 8, 0.1).measured
    calls = calls_signature(traced().at(micro_batch=8))
    once = replace(step, trained_s=1.6, relative_error=0.0, calls=calls)
    known = replace(once, run_log_error=0.03)

    def spread(trained: MeasuredStep, layout: Layout = EIGHT) -> float:
        costs = replace(durations, measured=(trained,))
        asked = Asking(replace(machine, operators=costs), num_draws=20_000)
        return float(np.log(asked.step(asked.workload(WORKLOAD, traced()), layout).step_s).std())

    expected = math.sqrt(0.05**2 + (0.43 + 1) * 0.03**2)
    assert spread(known) == pytest.approx(expected, rel=0.03)
    assert spread(replace(known, trained_s=None)) > 0.2
    assert spread(once) > 0.2
    assert spread(known, Layout(micro_batch=16)) > 0.2
    assert spread(known, Layout(micro_batch=8, accumulation=16)) > 0.2


def test_a_step_of_several_ranks_is_as_sure_as_its_trainings_where_links_are_theirs(
    durations: OperatorCosts,
) -> None:
    """Of 3 %, on 2 ranks; over slower links, as noisy as the calibration."""
    noisy = Repeatability(run={2: 0.2}, round=0.0, occasion=0.2)
    (step,) = measured(durations, 8, 0.1).measured
    trained = replace(
        step,
        trained_s=1.6,
        ddp_s={2: (3.0, 0.0)},
        run_log_error=0.03,
        calls=calls_signature(traced().at(micro_batch=8)),
    )
    machine = replace(profile(Machine(world_size=2)), repeatability=noisy)
    costs = replace(durations, measured=(trained,))
    asked = Asking(replace(machine, operators=costs), num_draws=20_000)
    found = asked.step(asked.workload(WORKLOAD, traced()), Layout(dp=2, micro_batch=8))
    assert np.log(found.step_s).std() < 0.08
    slower = asked.profile.with_links(lambda c: slower_messages(c, 2.0))
    assert np.log(answer(replace(found.question, machine=slower)).step_s).std() > 0.2


@pytest.mark.parametrize(
    ("trained_s", "issued_s", "device_s", "host_s"),
    [
        (1.6, 0.3, 1.6, 0.3),
        (1.6, 1.2, 1.6, 1.2),
        (1.6, 1.3, 0.8, 1.6),
        (0.5, 1.2, 0.5, 0.5),
    ],
)
def test_a_step_trained_on_a_gpu_tells_which_side_waits(
    durations: OperatorCosts, trained_s: float, issued_s: float, device_s: float, host_s: float
) -> None:
    """Operators take 0.8 s. What takes longer and nearly all of the step is the host, else the device binds."""
    costs = measured(durations, 8, 0.1)
    (step,) = costs.measured
    calls = calls_signature(traced().at(micro_batch=8))
    known = replace(step, trained_s=trained_s, issued_s=issued_s, relative_error=0.02, calls=calls)
    machine = profile(Machine(asynchronous=True, dispatch_s=7e-6))
    machine = replace(machine, operators=replace(costs, measured=(known,)))
    asked = Asking(machine)
    workload = asked.workload(WORKLOAD, traced())
    for side, expected_s in (("", device_s), ("dispatch_", host_s)):
        curves = [getattr(workload.phases[0], side + phase.value) for phase in Phase]
        at_eight = [next(point for point in curve if point.at == 8) for curve in curves]
        assert sum(point.time_s for point in at_eight) == pytest.approx(expected_s)
        error = 0.3 if side and device_s == trained_s > host_s else 0.02
        assert {point.relative_error for point in at_eight} == {error}
    assert asked.step(workload, EIGHT).step_s[0] == pytest.approx(trained_s, rel=1e-4)


def test_a_step_that_was_trained_under_ddp_is_the_answer_and_mends_the_others(
    durations: OperatorCosts,
) -> None:
    """T measured, P predicted of it: p T / P at other batches and in what-ifs, at most T - P more on more ranks."""
    machine, costs = profile(Machine(world_size=4)), measured(durations, 8, 0.1)
    calls = calls_signature(traced().at(micro_batch=8))
    (step,) = costs.measured
    alone = replace(step, trained_s=1.6, relative_error=0.02, calls=calls)
    without, asked = (
        Asking(replace(machine, operators=replace(costs, measured=(each,))))
        for each in (alone, replace(alone, ddp_s={2: (3.0, 0.02), 4: (9.0, 0.1)}))
    )
    workload, bare = (each.workload(WORKLOAD, traced()) for each in (asked, without))

    def steps(layout: Layout) -> tuple[Answer, Answer]:
        return asked.step(workload, layout), without.step(bare, layout)

    found, predicted = steps(Layout(dp=2, micro_batch=8))
    p_s = predicted.step.nominal
    assert found.step.nominal == pytest.approx(3.0)
    assert np.log(found.step_s[1:]).std() == pytest.approx(0.02, rel=0.1)
    assert Evidence.of_step(found.evidence) is Evidence.MEASURED
    assert (
        found.evidence["compute"] is Evidence.INTERPOLATED
    )  # what of it computes, nobody measured
    assert sum(found.breakdown_s.values()) == pytest.approx(3.0)
    assert steps_s([found.question])[0] == pytest.approx(found.step_s)
    assert [*measured_in_place(workload)] == [
        "trained in place at micro-batch 8",
        "under DDP on 2 ranks at micro-batch 8",
        "under DDP on 4 ranks at micro-batch 8",
    ]
    one, before = steps(EIGHT)
    assert one.step_s == pytest.approx(before.step_s)
    other, before = steps(Layout(dp=2, micro_batch=16))
    assert other.step.nominal / before.step.nominal == pytest.approx(3.0 / p_s)
    assert other.evidence == before.evidence
    four, of_four = steps(Layout(dp=4, micro_batch=8))
    assert four.step.nominal == pytest.approx(9.0)
    assert np.log(four.step_s[1:]).std() == pytest.approx(0.1, rel=0.1)
    more, before = steps(Layout(dp=8, micro_batch=8))
    longer_s = more.step.nominal - before.step.nominal
    assert longer_s == pytest.approx(9.0 - of_four.step.nominal)
    slower = asked.profile.with_links(lambda c: slower_messages(c, 2.0))
    changed = answer(replace(found.question, machine=slower))
    assert Evidence.of_step(changed.evidence) is not Evidence.MEASURED
    assert np.log(changed.step_s / found.step_s).std() < 1e-3


def slower_messages(entry: CollectiveProfile, factor: float) -> CollectiveProfile:
    points = tuple(replace(point, time_s=factor * point.time_s) for point in entry.points)
    return replace(entry, points=points)


def deeper(step: SymbolicStep, times: int) -> SymbolicStep:
    """The same calls this many times as often, with the same parameters."""
    segments = tuple(replace(each, count=times * each.count) for each in step.segments)
    return replace(step, segments=segments)


def test_ranks_beside_each_other_are_slowed_as_the_reference_models_are(
    machine: MeasuredMachine, durations: OperatorCosts
) -> None:
    workload = traced_profile(machine, durations, WORKLOAD, traced())
    one, two = workload.phases[0], workload.phases[-1]
    for phase in Phase:
        factor, _ = slowdown(machine, phase, two.world_size)
        first, second = getattr(one, phase.value)[3], getattr(two, phase.value)[3]
        assert second.time_s == pytest.approx(factor * first.time_s)
    quiet = replace(machine, workloads=tuple(replace(each, noise=()) for each in machine.workloads))
    found = traced_profile(quiet, durations, WORKLOAD, traced())
    assert (found.noise, found.rank_spread) == ((), 0.0)


def with_sharing(machine: MeasuredMachine, slopes: dict[str, float]) -> MeasuredMachine:
    """Two ranks slow each other by so much, by workload."""
    return replace(
        machine,
        workloads=tuple(
            replace(
                entry,
                phases=(entry.phases[0], slowed(entry.phases[0], 2, slopes[entry.workload.name])),
            )
            for entry in machine.workloads
        ),
    )


def test_one_more_repetition_widens_what_is_said_of_a_traced_step(machine: MeasuredMachine) -> None:
    restless = replace(machine, repeatability=replace(machine.repeatability, run={1: 0.2}))
    widths = []
    for known in (machine, restless):
        predictor = Asking(known)
        found = interval(predictor.step(predictor.workload(WORKLOAD, traced()), EIGHT).step_s)
        widths.append(math.log(found.p95 / found.p5))
    # 3.29 standard deviations lie between the two ends.
    assert math.hypot(widths[0], 3.29 * 0.2) == pytest.approx(widths[1], rel=0.15)


def test_an_operator_that_nothing_tells_about_is_named(machine: MeasuredMachine) -> None:
    predictor = Asking(machine)
    workload = predictor.workload(WORKLOAD, traced(mystery=True))
    assert "aten.mystery.default" in workload.untimed
    step = predictor.step(workload, EIGHT)
    text = " ".join(measured_caveats(step.question, {step.layout: step.evidence}))
    assert "aten.mystery.default" in text
    assert workload.phases[0].forward[0].relative_error > 0.3


def caveats_on_far_families(
    workload: MeasuredWorkload, machine: MeasuredMachine, batch: int
) -> list[str]:
    step = Asking(machine).step(workload, Layout(micro_batch=batch))
    said = measured_caveats(step.question, {step.layout: step.evidence})
    return [each for each in said if each.startswith("far from every timing")]


def test_families_far_from_every_timing_are_named_for_the_batch_that_was_asked(
    machine: MeasuredMachine,
) -> None:
    """Of 64 rows per sample, where up to 1,100 were timed."""
    workload = Asking(machine).workload(WORKLOAD, traced())
    assert caveats_on_far_families(workload, machine, 8) == []
    assert caveats_on_far_families(workload, machine, 512) == ["far from every timing: matmul"]
    many = replace(workload, far=((8, ("d", "c", "b", "a")), (64, ("x", "y"))))
    assert caveats_on_far_families(many, machine, 20) == [
        "far from every timing: d, c, b and 1 more"
    ]
    assert caveats_on_far_families(many, machine, 500) == ["far from every timing: x, y"]


@pytest.mark.parametrize(
    ("num_additions", "named"),
    [(1, ("matmul", "pointwise")), (40, ("pointwise", "matmul")), (400, ("pointwise",))],
)
def test_far_families_come_by_their_share_of_a_step_from_a_twentieth_on(
    durations: OperatorCosts, num_additions: int, named: tuple[str, ...]
) -> None:
    """A product of 256 columns takes about four times an addition."""
    product, gradient = traced().operators
    addition = replace(gradient, name="aten.add.Tensor", inputs=(0, 0), outputs=(0,))
    order = [(0, Phase.FORWARD), *[(1, Phase.FORWARD)] * num_additions]
    calls = [*order, *((at, Phase.BACKWARD) for at, _ in order)]
    segment = Segment(
        count=1, calls=tuple(Call(operator=at, phase=p, module="") for at, p in calls)
    )
    step = replace(traced(), operators=(product, addition), segments=(segment,))
    found = traced_profile(profile(Machine(asynchronous=True)), durations, WORKLOAD, step)
    assert dict(found.far)[65_536] == named
    assert "matmul" not in dict(found.far)[8]


def test_a_phase_is_the_sum_of_its_calls_and_tells_when_gradients_are_ready(
    durations: OperatorCosts,
) -> None:
    table = OperatorDurations(durations)
    step = traced().at(micro_batch=8)
    calls = [(each, 1) for each in step.operators]
    forward, gradient = (found.time_s for found in table.durations(calls, Phase.BACKWARD))
    found = table.step(step)
    assert found[Phase.FORWARD].time_s == pytest.approx(forward)
    assert found[Phase.BACKWARD].time_s == pytest.approx(forward + gradient)
    (parameter,) = with_ready_times(WORKLOAD, step, table).parameters
    assert parameter.ready_fraction == pytest.approx(gradient / (forward + gradient))
    # Unless batches were measured, those of 8 samples tell it.
    whole = traced_profile(profile(Machine()), durations, WORKLOAD, traced()).workload
    assert whole.parameters == (parameter,)


def test_more_samples_never_take_less_time(
    machine: MeasuredMachine, durations: OperatorCosts
) -> None:
    """Of curves that go up and down by a factor of 20; a dip is as long as what is before it."""
    families = tuple(
        replace(
            each,
            spread=3.0,
            lengths=(1.0,) * len(each.lengths),
            log_ratios=tuple(3 * math.sin(3 * sum(at)) for at in each.features),
        )
        for each in durations.families
    )
    workload = traced_profile(machine, replace(durations, families=families), WORKLOAD, traced())
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        times_s = [point.time_s for point in getattr(workload.phases[0], phase.value)]
        assert times_s == sorted(times_s)
        assert len(set(times_s)) < len(times_s)


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
    return compute_rate("host_to_device", time_s=time_s, bytes_per_s=size_bytes / time_s)


def test_what_moves_nothing_starts_no_kernel() -> None:
    """An unsafe view is no view by its schema; the optimizer's marks and numbers of the host are no kernels."""
    step = traced()
    moves_nothing = replace(step.operators[0], name="aten._unsafe_view.default", inputs=(0,))
    calls = step.segments[0].calls
    more = tuple(Call(operator=2, phase=phase, module="block.norm") for phase in Phase)
    step = replace(
        step,
        operators=(*step.operators, moves_nothing),
        segments=(Segment(count=1, calls=(*calls, *more)),),
    )
    at = step.at(micro_batch=2)
    counts = {phase: issued(at, phase) for phase in Phase}
    forward = {"forward_s": 1 + INPUT_COPIES, "view_s": 1, "module_s": 2, "phase_s": 1}
    assert counts == {
        Phase.FORWARD: forward,
        Phase.BACKWARD: {"backward_s": 2, "view_s": 1, "phase_s": 1, "node_s": 1},
        Phase.OPTIMIZER: {"optimizer_s": 0, "tensor_s": 0},
    }


def test_ranks_slow_each_other_by_the_mean_over_the_reference_models(
    machine: MeasuredMachine,
) -> None:
    first, second = (entry.workload.name for entry in machine.workloads)
    shared = with_sharing(machine, {first: 1.1, second: 1.4})
    factor, log_error = slowdown(shared, Phase.BACKWARD, 2)
    assert factor == pytest.approx(math.sqrt(1.1 * 1.4))
    assert log_error == pytest.approx(math.log(1.4 / 1.1) / 2)
    # Ranks never speed each other up, and one rank is alone.
    faster = with_sharing(machine, {first: 0.8, second: 0.8})
    assert slowdown(faster, Phase.BACKWARD, 2)[0] == 1.0
    for world_size in (1, 3):
        assert slowdown(shared, Phase.BACKWARD, world_size) == (1.0, 0.0)


def test_measured_batches_bring_the_curve_to_them(durations: OperatorCosts) -> None:
    """Twice as slow as the curves at 8: so at 16, 5 % less certain per e-fold."""
    machine = replace(profile(Machine()), operators=durations)
    [curves] = traced_profile(machine, durations, WORKLOAD, traced(), use_measured=False).phases[:1]
    at_eight = next(point for point in curves.forward if point.at == 8)
    known = measured(durations, 8, 2 * at_eight.time_s)
    found = traced_profile(replace(machine, operators=known), known, WORKLOAD, traced())
    assert (found.measured_batches, found.untimed) == ((8,), ())
    assert found.evidence is Evidence.INTERPOLATED
    replayed = OperatorDurations(known, own=parameters_signature(traced()))
    own = replayed.step(traced().at(micro_batch=8))[Phase.FORWARD].relative_error
    for before, after in zip(curves.forward, found.phases[0].forward, strict=True):
        assert after.time_s == pytest.approx(2 * before.time_s)
        away = 0.05 * abs(math.log(before.at / 8))
        assert after.relative_error == pytest.approx(math.hypot(own, away))


def test_noise_is_borrowed_from_the_model_whose_steps_are_as_long(
    durations: OperatorCosts,
) -> None:
    """A light and a heavy one; without noise of any there is none."""
    machine = replace(profile(Machine(noise=(0.9, 1.0, 1.2), rank_spread=0.1)), operators=durations)
    light, heavy = machine.workloads
    marked = replace(machine, workloads=(replace(light, rank_spread=0.3), heavy))
    quick = traced_profile(marked, durations, WORKLOAD, traced())
    assert quick.rank_spread == 0.3
    assert quick.noise == light.noise
    slow = measured(durations, 16, heavy.phases[0].backward[-1].time_s)
    late = traced_profile(marked, slow, WORKLOAD, traced())
    assert late.rank_spread == 0.1
    # The longest steps of a model count: 1.5 times as long at every batch is nearer than alike in the middle.
    middle_s = heavy.phases[0].backward[1].time_s
    level = tuple(replace(point, time_s=1.5 * middle_s) for point in light.phases[0].backward)
    flat = replace(light, phases=(replace(light.phases[0], backward=level),), rank_spread=0.3)
    alike = measured(durations, 16, middle_s / 2)
    machine = replace(machine, workloads=(flat, heavy))
    assert traced_profile(machine, alike, WORKLOAD, traced()).rank_spread == 0.3
    still = replace(marked, workloads=tuple(replace(w, noise=()) for w in marked.workloads))
    assert traced_profile(still, durations, WORKLOAD, traced()).noise == ()


@pytest.mark.parametrize("is_known", [False, True])
def test_the_host_issues_every_operator_of_a_phase(
    durations: OperatorCosts, *, is_known: bool
) -> None:
    """One product and two copies forward, two products backward; 7 us each, or as steps told."""
    forms = {"forward_s": 1e-5, "backward_s": 2e-5, "view_s": 1e-6, "optimizer_s": 1e-4}
    host = host_costs(**forms, tensor_s=1e-6, relative_error=0.07)
    machine = replace(
        profile(Machine(asynchronous=True, dispatch_s=7e-6)), host=host if is_known else None
    )
    phases = traced_profile(machine, durations, WORKLOAD, traced()).phases[0]
    issued_of = (phases.dispatch_forward[0], phases.dispatch_backward[0])
    expected = (3e-5, 4e-5) if is_known else (7e-6, 14e-6)
    assert [point.time_s for point in issued_of] == pytest.approx(expected)
    assert {point.relative_error for point in issued_of} == {0.07 if is_known else 0.3}
    # Light models keep a GPU busy with large batches alone.
    assert phases.forward[-1].at == 65_536
    synchronous = traced_profile(profile(Machine()), durations, WORKLOAD, traced()).phases[0]
    assert synchronous.forward[-1].at == 512
    assert synchronous.dispatch_forward == ()


def test_issuing_takes_each_count_times_its_cost() -> None:
    host = host_costs(forward_s=1.0, view_s=0.1, module_s=0.01, phase_s=7.0)
    counts = {"forward_s": 3, "view_s": 5, "module_s": 2, "phase_s": 1}
    assert issued_s(host, counts) == pytest.approx(10.52)


def test_copies_of_the_batch_start_once_each_and_go_at_the_rate_of_the_largest() -> None:
    """Between 1 ms at 1 MB and 101 ms at 1 GB: 0.1 ns a byte, nearly; of one copy its own rate."""
    small, large = copy_of(1e6, 1e-3), copy_of(1e9, 101e-3)
    byte_s = 0.1 / (1e9 - 1e6)
    assert input_copy_s((large, small), 10**8) == pytest.approx(INPUT_COPIES * 1e-3 + 1e8 * byte_s)
    assert input_copy_s((large,), 10**8) == pytest.approx(10.1e-3)
    assert input_copy_s((small, copy_of(1e9, 5e-4)), 10**8) == pytest.approx(INPUT_COPIES * 1e-3)
    assert input_copy_s((large, small), 0) == input_copy_s((), 10**8) == 0.0
    other = replace(large, probe="memory")
    assert input_copy_s((other,), 10**8) == 0.0


def test_an_update_of_lists_costs_each_tensor_of_them() -> None:
    step = traced().at(micro_batch=2)
    lists = replace(step.operators[0], name="aten._foreach_add_.List")
    fused = replace(lists, name="aten._fused_adamw_.default")
    loose = replace(step.operators[0], name="aten.add_.Tensor")
    operators = (lists, fused, loose)
    calls = tuple(Call(operator=at, phase=Phase.OPTIMIZER, module="") for at in range(3))
    step = replace(step, operators=operators, segments=(Segment(count=2, calls=calls),))
    found = issued(step, Phase.OPTIMIZER)
    assert (found["optimizer_s"], found["tensor_s"]) == (6, 2 * 2 * len(lists.inputs))


def test_gradients_are_ready_where_the_pass_has_got_to() -> None:
    """Of three calls of 1, 2 and 1 s the first two are done before the last; without one it is ready at the end."""
    step = traced().at(micro_batch=2)
    calls = tuple(Call(operator=at, phase=Phase.BACKWARD, module="") for at in (0, 1, 0))
    step = replace(step, segments=(Segment(count=1, calls=calls),))
    for after, ready in ((0, 0.0), (1, 0.25), (2, 0.75), (3, 1.0), (None, 1.0)):
        other = replace(step, parameters=(replace(step.parameters[0], ready_after=after),))
        [parameter] = ready_when_done(WORKLOAD, other, {0: 1.0, 1: 2.0}).parameters
        assert parameter.ready_fraction == pytest.approx(ready)
    [parameter] = ready_when_done(WORKLOAD, step, {}).parameters
    assert parameter.ready_fraction == 0.0

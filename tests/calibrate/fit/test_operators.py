"""What a step adds to its operators is recovered; what cannot be known is assumed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.fit.operators import (
    Timing,
    _brought_to_steps,
    _slower,
    _timings,
    fit_family,
    fit_operators,
    fresh_byte_s,
    unit_costs,
)
from calibrate.fit.overheads import _per_call, fit_overhead
from calibrate.replays import Pair, steps_over_replays
from perfmodel.cost.families import FRESH_KIND, OPTIMIZER_FRESH_KIND
from perfmodel.cost.operators import OperatorPrices
from perfmodel.cost.traced import traced_profile
from perfmodel.documents.observation import (
    PHASES,
    OptimizerPoint,
    RankSteps,
    ReplayObservation,
    TimedOperator,
)
from perfmodel.workload.operator import Phase
from tests.perfmodel.operators import observation, prices_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced

NUM_STEPS = 12


@given(
    overhead_s=st.floats(-1e-6, 1e-4),
    sums=st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(10, 1000)), min_size=2, max_size=6),
)
def test_the_overhead_per_call_is_recovered(
    overhead_s: float, sums: list[tuple[float, int]]
) -> None:
    rows = [(sum_s + overhead_s * calls, sum_s, calls) for sum_s, calls in sums]
    found, error = _per_call(rows)
    assert found == pytest.approx(overhead_s, rel=1e-6)
    assert error == pytest.approx(0.02)


def beside(num_calls: int, call_s: float, *, real_s: float) -> ReplayObservation:
    """A replay whose calls all take the same time, and the steps that took turns with it."""
    sum_s = (num_calls * call_s,) * NUM_STEPS
    steps = RankSteps(
        rank=0,
        step_s=(3 * real_s,) * NUM_STEPS,
        input_s=(0.0,) * NUM_STEPS,
        forward_s=(real_s,) * NUM_STEPS,
        backward_s=(real_s,) * NUM_STEPS,
        optimizer_s=sum_s,
        speed_probe_s=(1e-3,) * NUM_STEPS,
    )
    return ReplayObservation(
        task="one",
        round=0,
        workload="made up",
        micro_batch=4,
        parameters=f"of {num_calls}",
        num_trained=2,
        operators=tuple(
            TimedOperator(
                signature="a", phase=phase, num_calls=num_calls, times_s=(call_s,) * NUM_STEPS
            )
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ),
        forward_s=sum_s,
        backward_s=sum_s,
        optimizer_s=sum_s,
        speed_probe_s=(1e-3,) * NUM_STEPS,
        failed=(),
        beside=steps,
    )


@pytest.mark.parametrize("overhead_s", [-4e-6, 3e-6])
def test_steps_that_took_turns_with_a_replay_tell_less_than_nothing_too(overhead_s: float) -> None:
    replays = [
        beside(calls, call_s, real_s=calls * (call_s + overhead_s))
        for calls, call_s in ((50, 1e-4), (400, 5e-5))
    ]
    found = fit_overhead([], replays, [])
    assert found.forward_s == pytest.approx(overhead_s)
    assert found.backward_s == pytest.approx(overhead_s)
    assert found.optimizer_s == 0.0


def test_a_processor_that_changes_its_speed_between_turns_costs_no_overhead() -> None:
    """The median step saw both speeds, the median replay the slow one; eleven of twelve turns agree."""
    replay = beside(100, 1e-4, real_s=0.01)
    assert replay.beside is not None

    def slowed(by: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
        return {f"{phase}_s": tuple(0.01 * factor for factor in by) for phase in PHASES[1:]}

    steps = replay.beside.model_copy(update=slowed((1.0,) * 6 + (1.7,) * 6))
    changed = replay.model_copy(update={**slowed((1.0,) * 5 + (1.7,) * 7), "beside": steps})
    found = fit_overhead([], [changed], [])
    assert found.forward_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_a_speed_that_changes_within_turns_is_out_of_the_ratio(exponent: float) -> None:
    """Steps follow the probe with the exponent: one step in two met half the speed, no replay did."""
    replay = beside(100, 1e-4, real_s=0.011)
    real = replay.beside
    assert real is not None
    slow = (1.0, 2.0) * (NUM_STEPS // 2)

    def beside_of(probes_s: tuple[float, ...]) -> list[Pair]:
        times = {f"{phase}_s": tuple(0.011 * by**exponent for by in slow) for phase in PHASES[1:]}
        times["step_s"] = tuple(0.033 * by**exponent for by in slow)
        steps = real.model_copy(update={**times, "speed_probe_s": probes_s})
        return [(steps, replay)]

    found = beside_of(tuple(1e-3 * by for by in slow))
    for phase in (None, "forward"):
        assert steps_over_replays(found, phase).value_s == pytest.approx(1.1)
    # An asynchronous device has one probe for all: nothing can be said.
    apart = steps_over_replays(beside_of((1e-3,)))
    assert apart.value_s == pytest.approx(1.1 * 2 ** (exponent / 2))
    with pytest.raises(ValueError, match="longer"):
        steps_over_replays(beside_of((1e-3,) * 3))


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_a_layer_is_brought_to_speed_by_the_probe_before_it(exponent: float) -> None:
    """Whatever was probed around all of them."""
    entry = observation()
    twice_s = tuple(
        timed.model_copy(
            update={
                "times_s": tuple(time_s * 2**exponent for time_s in timed.times_s),
                "speed_probe_s": (2e-3,) * len(timed.times_s),
            }
        )
        for timed in entry.operators
    )
    slow = entry.model_copy(update={"operators": twice_s, "speed_probe_s": (7e-3,)})
    found, corrected = (_timings([of], 1e-3, exponent) for of in (entry, slow))
    for name, timings in found.items():
        for timing, other in zip(timings, corrected[name], strict=True):
            assert other.time_s == pytest.approx(timing.time_s)


def test_layers_follow_the_speed_probe_with_the_exponent_of_steps() -> None:
    entry = observation()
    probes_s = tuple(2 * probe_s for probe_s in entry.speed_probe_s)
    slow = entry.model_copy(update={"speed_probe_s": probes_s})
    for exponent in (0.5, 1.0):
        found, corrected = (_timings([of], 1e-3, exponent) for of in (entry, slow))
        for name, timings in found.items():
            for timing, other in zip(timings, corrected[name], strict=True):
                assert other.time_s == pytest.approx(timing.time_s / 2**exponent)


def test_sums_above_the_real_step_of_another_moment_have_no_negative_overhead() -> None:
    overhead_s, error = _per_call([(1.0, 1.2, 100), (2.0, 2.4, 50)], 0.0)
    assert overhead_s == 0.0
    assert error == pytest.approx(0.182, abs=0.001)


def test_without_timings_there_are_no_prices() -> None:
    assert fit_operators([], workloads=(), rates=(), speed_probe_s=1e-3, sensitivity=1.0) is None


@given(
    costs_s=st.tuples(st.floats(1e-6, 1e-4), st.floats(1e-12, 1e-10), st.floats(1e-11, 1e-9)),
    seed=st.integers(0, 100),
)
def test_what_a_unit_of_work_costs_is_recovered(
    costs_s: tuple[float, float, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    timings = [
        Timing(
            features=(0.0,),
            time_s=float(np.dot(units, costs_s)),
            flop=units[1],
            moved_bytes=units[2],
            units=units,
        )
        for units in ((1.0, *map(float, 10 ** rng.uniform(3, 9, 2))) for _ in range(30))
    ]
    assert unit_costs(timings) == pytest.approx(costs_s, rel=1e-3)


def touched(size_bytes: float, *, fresh_s: float, byte_s: float) -> Timing:
    """Writing a result, in fresh pages from 32 MiB on."""
    fresh = size_bytes if size_bytes >= 2**25 else 0.0
    return Timing(
        features=(float(np.log(size_bytes)),),
        time_s=1e-5 + byte_s * size_bytes + fresh_s * fresh,
        flop=0.0,
        moved_bytes=size_bytes,
        units=(1.0, 0.0, 0.0, 0.0, size_bytes, fresh, 0.0),
    )


@given(fresh_s=st.floats(1e-10, 1e-9), byte_s=st.floats(5e-11, 5e-10))
def test_the_first_touch_of_a_page_is_recovered_and_holds_for_families_without_one(
    fresh_s: float, byte_s: float
) -> None:
    sizes = [2.0**power for power in range(12, 25)]
    both = {
        "with": [touched(s, fresh_s=fresh_s, byte_s=byte_s) for s in (*sizes, 2.0**26, 2.0**28)],
        "without": [touched(s, fresh_s=fresh_s, byte_s=3 * byte_s) for s in sizes],
    }
    found_s = fresh_byte_s(both)
    assert found_s == pytest.approx(fresh_s, rel=1e-3)
    entry = fit_family("without", both["without"], known_s={FRESH_KIND: found_s})
    assert entry.unit_s[FRESH_KIND] == pytest.approx(fresh_s, rel=1e-3)
    assert entry.unit_s[FRESH_KIND - 1] == pytest.approx(3 * byte_s, rel=1e-3)


def test_a_cost_that_is_known_to_be_nothing_is_not_fitted() -> None:
    """Were it free, it would explain that large results are slow."""
    sizes = [2.0**power for power in range(12, 28)]
    members = [touched(s, fresh_s=5e-10, byte_s=1e-10) for s in sizes]
    assert unit_costs(members)[FRESH_KIND] == pytest.approx(5e-10, rel=1e-3)
    assert unit_costs(members, {FRESH_KIND: 0.0})[FRESH_KIND] == 0.0


def test_without_large_results_nothing_is_said_about_fresh_pages() -> None:
    assert fresh_byte_s({"small": [touched(2.0**20, fresh_s=1e-9, byte_s=1e-10)] * 9}) == 0.0


def test_where_memory_is_kept_no_family_pays_for_fresh_pages() -> None:
    point = OptimizerPoint(
        optimizer="sgd",
        implementation="loop",
        num_tensors=1,
        tensor_bytes=1,
        times_s=(1.0,),
    )
    sizes = [2**power for power in range(12, 28)]
    # As if every byte of a large tensor cost three times as much.
    points = tuple(
        point.model_copy(
            update={
                "tensor_bytes": size,
                "times_s": (1e-5 + 1e-10 * size * (3 if size >= 2**25 else 1),),
            }
        )
        for size in sizes
    )
    layers = observation().model_copy(update={"optimizers": points})
    for keeps, is_free in ((True, True), (False, False)):
        found = fit_operators(
            [layers],
            workloads=(),
            rates=(),
            speed_probe_s=1e-3,
            sensitivity=1.0,
            keeps_memory=keeps,
        )
        assert found is not None
        (family,) = (f for f in found.families if f.name == "optimizer sgd loop")
        assert (family.unit_s[OPTIMIZER_FRESH_KIND] == 0.0) is is_free


@pytest.mark.parametrize("factor", [1.1, 1.25])
def test_curves_are_brought_to_the_steps_of_reference_models(factor: float) -> None:
    """Real passes that take so many times as long as rows of layers say."""
    alone = prices_of_the_made_up_machine()
    slower = tuple(_slower(family, factor) for family in alone.families)
    reference = traced_profile(
        profile(Machine()), replace(alone, families=slower), WORKLOAD, traced()
    )
    replay = beside(50, 1e-4, real_s=5e-3).model_copy(
        update={"workload": WORKLOAD.name, "traced": traced()}
    )
    found = fit_operators(
        [observation(), replay],
        workloads=[reference],
        rates=(),
        speed_probe_s=1e-3,
        sensitivity=1.0,
    )
    assert found is not None
    for family, before in zip(found.families, alone.families, strict=True):
        assert family.unit_s == pytest.approx(
            [factor * each_s for each_s in before.unit_s], rel=0.02
        )
    assert found.curve_log_error == pytest.approx(0.02, abs=0.005)


@pytest.mark.parametrize(("factor", "call_s"), [(1.1, -3e-6), (0.9, 2e-6), (1.0, 0.0)])
def test_what_a_call_takes_beyond_its_curve_is_told_from_a_factor(
    factor: float, call_s: float
) -> None:
    """Passes of 50 to 400 calls of 20 us to 1 ms; with half as many passes the factor alone is fitted."""
    alone = prices_of_the_made_up_machine()
    passes = [(calls * each_s, calls) for calls in (50, 400) for each_s in (2e-5, 5e-5, 1e-4, 1e-3)]
    rows = [(factor * curve_s + call_s * calls, curve_s, calls) for curve_s, calls in passes]
    found = _brought_to_steps(alone, rows, asynchronous=False)
    assert found.curve_call_s == pytest.approx(call_s, abs=1e-12)
    assert found.families[0].unit_s == pytest.approx(
        [factor * each_s for each_s in alone.families[0].unit_s]
    )
    assert found.curve_log_error == 0.02
    for few, asynchronous in ((rows[4:], False), (rows, True)):
        told = _brought_to_steps(alone, few, asynchronous=asynchronous)
        assert told.curve_call_s == 0.0
    assert _brought_to_steps(alone, [], asynchronous=False) == alone


def test_what_a_call_takes_beyond_its_curve_is_added_to_calls_without_a_measurement() -> None:
    alone = prices_of_the_made_up_machine()
    longer = replace(alone, curve_call_s=1e-3)
    counts = traced().at(micro_batch=4).call_counts()
    before, after = (
        OperatorPrices(of, use_measured=False).step(traced().at(micro_batch=4))
        for of in (alone, longer)
    )
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        calls = sum(count for (_, at), count in counts.items() if at is phase)
        added_s = after[phase].time_s - before[phase].time_s
        assert added_s == pytest.approx(1e-3 * calls)

"""Terms of a setting from a profile whose parameters are known."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel.cost import Terms
from perfmodel.cost.machine import CostModel, model_form, step_program
from perfmodel.cost.network import KINDS, groups
from perfmodel.layout import Layout, parse_layout
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    CurvePoint,
    LayoutCost,
    MeasuredMachine,
    MeasuredWorkload,
    OperatorCosts,
    PhaseCurves,
    Rescaling,
    Residual,
    StepNoise,
)
from perfmodel.step import Cause, Operation, StepProgram, Stream
from perfmodel.units import MIB
from tests.existing import existing
from tests.perfmodel.cost.test_step_law import COSTS
from tests.perfmodel.profiles import (
    Machine,
    profile,
    setting_of,
    slowed,
)


def terms(
    document: MeasuredMachine,
    *,
    world_size: int = 2,
    micro_batch: int = 16,
    **others: Any,
) -> Terms:
    workload = existing(document.workload("heavy"))
    layout = Layout(dp=world_size, micro_batch=micro_batch, **others)
    costs = CostModel(document, num_draws=200)
    return costs.terms(workload, layout, step_program(document, workload, layout))


def test_compute_is_read_from_the_curves_of_the_world_size() -> None:
    """Forward at 8: 1 + 8 * 5 = 41 ms alone; two ranks share the node and take 1.5 times as long."""
    document = profile(Machine(sharing=1.5))
    alone, shared = terms(document, world_size=1, micro_batch=8), terms(document, micro_batch=8)
    assert alone.compute_s[Cause.FORWARD][0] == pytest.approx(0.041)
    assert shared.compute_s[Cause.FORWARD][0] == pytest.approx(0.0615)
    many = terms(document, world_size=64, micro_batch=8)
    assert many.compute_s[Cause.FORWARD][0] == pytest.approx(0.0615)


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


def test_operations_take_their_share_and_only_compute_is_slower_on_the_slowest_rank() -> None:
    """Three gradients at 1 ms, and 2 MB at 1 ns a byte; three all-reduces of 1 kB, and one of 4 kB."""
    costs = {"bucket_s": 1e-3, "bucket_s_per_byte": 1e-9, "slowest": 2.0, "load_s": 7.0}
    changes: dict[str, Any] = {name: np.array([cost]) for name, cost in costs.items()}
    changes["issue_s"] = {Cause.FORWARD: np.array([4.0])}
    changes["compute_s"] = {Cause.FORWARD: np.array([8.0])}
    changes["exchange_s"] = {Cause.ALL_REDUCE: lambda size_bytes: size_bytes * np.array([1e-3])}
    known = replace(terms(profile(Machine())), **changes)
    operations = (
        (Operation("load", Stream.LOADER, Cause.INPUT), 7.0, 7.0),
        (
            Operation("issue", Stream.HOST, Cause.DISPATCH, share=0.5, issues=Cause.FORWARD),
            2.0,
            2.0,
        ),
        (Operation("forward", Stream.COMPUTE, Cause.FORWARD, share=0.25), 2.0, 4.0),
        (
            Operation("copy", Stream.COMPUTE, Cause.BUCKET, share=3.0, size_bytes=2_000_000),
            5e-3,
            1e-2,
        ),
        (Operation("sum", Stream.COMM, Cause.ALL_REDUCE, share=3.0, size_bytes=1000), 3.0, 3.0),
        (Operation("last", Stream.COMM, Cause.ALL_REDUCE, size_bytes=4000), 4.0, 4.0),
    )
    done, median_s, slowest_s = zip(*operations, strict=True)
    assert known.median_durations(StepProgram(done))[:, 0] == pytest.approx(median_s)
    assert known.durations(StepProgram(done))[:, 0] == pytest.approx(slowest_s)


def test_runs_scatter_beyond_the_noise_that_residuals_hold() -> None:
    """Residuals of nothing: 13 % of a run, of which a calibration of four rounds holds 5 %, leave 12 %."""
    document = profile(Machine())
    runs = replace(document.repeatability, run={1: 0.1})
    document = replace(document, repeatability=runs, num_rounds=4)
    layout = parse_layout("dp=2 micro_batch=8")
    unknown = replace(HEAVY, workload=replace(HEAVY.workload, name="unknown"))
    for workload, error in ((HEAVY, 0.12), (unknown, 0.13)):
        factors = model_form(document, {}, workload, layout, num_draws=20_000, run_error=0.13)
        assert factors[0] == 1.0
        assert np.log(factors).std() == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize(
    ("text", "errors"), [("dp=1", {0.1, math.log(1.5)}), ("dp=2", {0.3, -math.log(0.8)})]
)
def test_a_model_was_wrong_as_often_too_high_as_too_low(text: str, errors: set[float]) -> None:
    """By residuals and by earlier runs of as many ranks; what was never compared is off by 5 %."""
    document = profile(Machine())
    known = Residual(single_log_errors=(0.1,), ddp_log_errors=(0.3,))
    earlier = {setting_of("light", 1, 4): 0.5, setting_of("light", 2, 4): -0.2}
    layout = parse_layout(f"{text} micro_batch=8")
    none = Residual(single_log_errors=(), ddp_log_errors=())
    for residual, told, expected in ((known, earlier, errors), (none, {}, {0.05})):
        judged = replace(document, residual=residual)
        factors = model_form(judged, told, HEAVY, layout, num_draws=100, run_error=0.0)
        both = sorted({*expected, *(-error for error in expected)})
        found = sorted(set(np.log(factors[1:]).round(9).tolist()))
        assert found == pytest.approx(both)


def test_settings_share_their_uncertainty() -> None:
    """One rank and two read curves that were drawn once: asking again gives the same draws."""
    document = profile(Machine(relative_error=0.1))
    workload = existing(document.workload("heavy"))
    costs = CostModel(document, num_draws=50)
    first, again = (
        costs.terms(workload, layout, step_program(document, workload, layout))
        for layout in (Layout(dp=2, micro_batch=16), Layout(dp=2, micro_batch=16, accumulation=4))
    )
    assert np.array_equal(first.compute_s[Cause.FORWARD], again.compute_s[Cause.FORWARD])
    assert len(set(first.compute_s[Cause.FORWARD])) == 50


FORWARD = Operation("forward", Stream.COMPUTE, Cause.FORWARD)


def of_layout(
    machine: MeasuredMachine,
    text: str,
    *causes: Cause,
    workload: MeasuredWorkload = HEAVY,
    num_draws: int = 1,
    **options: Any,
) -> Terms:
    """Terms of a layout whose program exchanges 1 MiB for each cause."""
    exchanges = (Operation(c.value, Stream.COMM, c, size_bytes=MIB) for c in causes)
    costs = CostModel(machine, num_draws=num_draws)
    layout = parse_layout(f"{text} micro_batch=16")
    return costs.terms(workload, layout, StepProgram((FORWARD, *exchanges)), **options)


def added(family: str, call_s: float = 0.0, byte_s: float = 0.0) -> LayoutCost:
    """What a library adds on two ranks."""
    return LayoutCost(family=family, world_size=2, call_s=call_s, byte_s=byte_s, log_error=0.0)


@pytest.mark.parametrize(
    ("backend", "waiting", "slower"),
    [
        ("gloo", {Cause.ALL_REDUCE}, 2),
        ("nccl", {Cause.ALL_REDUCE, Cause.ALL_GATHER, Cause.REDUCE_SCATTER}, 1),
    ],
)
def test_exchanges_wait_for_their_start_their_processors_and_their_library(
    backend: str, waiting: set[Cause], slower: int
) -> None:
    """Groups of two of a stage of four, which compute twice as long as two; a send has no such neighbours."""
    layouts = added("tensor", 3e-3, 1e-9), added("pipeline", 5e-3)
    machine = replace(profile(Machine(all_reduce_start_s=2e-3)), backend=backend, layouts=layouts)
    workload = replace(HEAVY, phases=(*HEAVY.phases, slowed(HEAVY.phases[0], 4, 2.0)))
    text = "dp=2 tp=2 pp=2 accumulation=2"
    found = of_layout(machine, text, workload=workload).exchange_s
    network = CostModel(machine, num_draws=1).network
    members = groups(parse_layout(text))
    assert found.keys() == KINDS.keys()
    for cause, kind in KINDS.items():
        expected_s = network.time_s(kind, MIB, members[cause])[0]
        expected_s *= 1 if cause is Cause.P2P else slower
        expected_s += {Cause.TENSOR: 3e-3 + 1e-9 * MIB, Cause.P2P: 5e-3}.get(cause, 0.0)
        expected_s += 2e-3 if cause in waiting else 0.0
        assert found[cause](MIB)[0] == pytest.approx(expected_s), cause
    alone = of_layout(machine, "dp=1").exchange_s
    assert alone.keys() == {Cause.ALL_REDUCE, Cause.BROADCAST}
    assert alone[Cause.ALL_REDUCE](MIB).tolist() == [0.0]


@pytest.mark.parametrize(
    ("text", "load_s", "bucket", "speeds"),
    [
        ("dp=1 accumulation=3", 0.48, (1e-4, 1e-9), (1.0, 1.0)),
        ("dp=2 accumulation=3", 0.48, (1e-4, 1e-9), (0.5, 0.25)),
        ("fsdp=2", 0.16, (1e-3, 2e-9), (0.5, 0.25)),
        ("tp=2", 0.16, (1e-4, 1e-9), (0.5, 0.25)),
    ],
)
def test_terms_of_the_loader_of_buckets_and_of_ranks_that_share_a_device(
    text: str, load_s: float, bucket: tuple[float, float], speeds: tuple[float, float]
) -> None:
    """A loader of 100 samples a second; one rank shares nothing."""
    costs = Machine(bucket_s=1e-4, bucket_s_per_byte=1e-9, compute_speed=0.5, comm_speed=0.25)
    machine = replace(profile(costs), layouts=(added("fsdp", 1e-3, 2e-9),))
    found = of_layout(machine, text, num_draws=3, loader_samples_per_s=100.0)
    known = (found.load_s, found.bucket_s, found.bucket_s_per_byte)
    for draws, value in zip(
        (*known, found.compute_speed, found.comm_speed), (load_s, *bucket, *speeds), strict=True
    ):
        assert draws == pytest.approx([value] * 3)
    assert of_layout(machine, text).load_s.tolist() == [0.0]


def test_matrices_that_ranks_share_are_unsure_by_every_halving() -> None:
    """5 % each in both passes, until it was run; the optimizer is not."""
    machine = profile(Machine())
    found = of_layout(machine, "tp=4", num_draws=4000).compute_s
    judged = replace(machine, layouts=(added("tensor"),))
    run = of_layout(judged, "tp=4", num_draws=4000).compute_s
    for cause, error in ((Cause.FORWARD, 0.1), (Cause.BACKWARD, 0.1), (Cause.OPTIMIZER, 0.0)):
        assert np.log(found[cause]).std() == pytest.approx(error, rel=0.05, abs=1e-12)
        assert np.ptp(run[cause]) == pytest.approx(0.0, abs=1e-12)
        assert found[cause][0] == pytest.approx(run[cause][0])


def test_a_host_of_shards_issues_its_exchanges_with_every_micro_batch() -> None:
    """Hooks of DDP run in one of four; six buckets more than the usual two cost nothing where nobody exchanges."""
    document = replace(issuing(shared_s=8e-3), dispatch_s=1e-5)
    added_s = 3 / 4 * GRADIENTS * 0.01 / HEAVY.workload.num_operators
    for text, shared_s in (("dp=2", 5e-3 + 3e-3 / 4), ("fsdp=2", 8e-3)):
        heavy = existing(document.workload("heavy"))
        found = of_layout(document, f"{text} accumulation=4", workload=heavy).issue_s
        issued_s = [found[cause][0] for cause in (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER)]
        assert issued_s == pytest.approx([shared_s, shared_s + added_s, 8e-3])
    slow = replace(document, dispatch_s=1.0)
    for machine, world_size, cap_mb, backward_s in (
        (document, 1, 0.01, 5e-3),
        (document, 2, 0.01, 8e-3 + 1e-5 * (GRADIENTS - 2)),
        (document, 2, 100, 8e-3 - 1e-5),
        (slow, 2, 100, 5e-3),
    ):
        issued = terms(machine, world_size=world_size, bucket_cap_mb=cap_mb).issue_s
        assert issued[Cause.BACKWARD][0] == pytest.approx(backward_s)


def test_a_batch_so_noisy_that_its_step_was_longer_keeps_larger_ones_as_long() -> None:
    """30 times a step of 4 samples, over how much longer 16 take: by what is hidden or by what is not, the lesser."""
    noise = StepNoise(micro_batch=4, ratios=(30.0,) * 4), StepNoise(micro_batch=16, ratios=(1.0,))
    layout = Layout(dp=2, micro_batch=16, accumulation=3)
    for gradient_s, byte_s in ((0.0, 0.0), (5e-3, 1e-9)):
        machine = profile(Machine(bucket_s=gradient_s, bucket_s_per_byte=byte_s))
        copies_s = 8 * gradient_s + 8 * MIB * byte_s
        forward_s, backward_s = (
            [3 * (once_s + each_s * batch) + more_s for batch in (4, 16)]
            for once_s, each_s, more_s in ((1.2e-3, 5e-3, 4e-3), (2e-3, 1e-2, copies_s))
        )
        grown = min(forward_s[1] / forward_s[0], backward_s[1] / backward_s[0])
        costs = CostModel(machine, num_draws=2)
        found = costs.slowest(replace(HEAVY, noise=noise), layout)
        assert found == pytest.approx([30 / grown] * 2)
        assert costs.slowest(HEAVY, replace(layout, dp=1)).tolist() == [1.0, 1.0]


LIBRARY = "work of the layout's library"
MEASURED, BETWEEN, BEYOND, _, ASSUMED = Evidence
OPERATORS = OperatorCosts(
    peak_flop_per_s=1e12,
    peak_bytes_per_s=1e11,
    families=(),
    measured=(),
    replay_log_error=0.0,
    curve_log_error=0.0,
)


@pytest.mark.parametrize(
    ("text", "cause", "evidence"),
    [
        ("dp=1", Cause.ALL_REDUCE, (MEASURED,)),
        ("dp=2", Cause.ALL_REDUCE, (MEASURED, BETWEEN, MEASURED, {"communication": BETWEEN})),
        ("dp=4", Cause.ALL_REDUCE, (MEASURED, BEYOND, BEYOND, {"communication": BEYOND})),
        (
            "fsdp=2",
            Cause.ALL_GATHER,
            (MEASURED, BETWEEN, MEASURED, {"communication": BEYOND, LIBRARY: BETWEEN}),
        ),
        ("tp=2", Cause.ALL_REDUCE, (BEYOND, BETWEEN, MEASURED, {LIBRARY: ASSUMED})),
        (
            "tp=2",
            Cause.TENSOR,
            (BEYOND, BETWEEN, MEASURED, {LIBRARY: ASSUMED, "tensor collectives": BETWEEN}),
        ),
        ("fsdp=2 tp=2", Cause.FORWARD, (BEYOND, BEYOND, BEYOND, {LIBRARY: ASSUMED})),
        (
            "pp=2 accumulation=2",
            Cause.P2P,
            (MEASURED, {LIBRARY: ASSUMED, "pipeline sends": BEYOND}),
        ),
    ],
)
def test_how_well_each_term_is_known(text: str, cause: Cause, evidence: tuple[Any, ...]) -> None:
    """Compute, interference, stragglers; what ranks exchange; fully sharded ranks were run."""
    machine = replace(profile(Machine()), layouts=(added("fsdp"),))
    *known, others = evidence if len(evidence) > 1 else (*evidence, {})
    names = ("compute", "interference", "stragglers")
    expected = {**dict(zip(names, known, strict=False)), **others}
    assert of_layout(machine, text, cause).evidence == expected
    open_costs = replace(machine.ddp, determined=(True,) * 4 + (False,))
    found = of_layout(replace(machine, ddp=open_costs), text, cause).evidence
    assert found == expected | ({"interference": ASSUMED} if "interference" in expected else {})
    carried = Rescaling(
        source=None,
        target=COSTS,
        log_error=0.1,
        notes=(),
        notes_on_groups=(),
        device_kind="cuda",
        architecture="",
    )
    elsewhere = replace(machine, operators=replace(OPERATORS, rescaling=carried))
    assert of_layout(elsewhere, text, cause).evidence == dict.fromkeys(expected, ASSUMED)


def test_compute_is_known_as_well_as_the_curves_say() -> None:
    """In place at 16, on one rank; elsewhere as the trace does."""
    for text, batches, evidence in (
        ("dp=1", (16,), MEASURED),
        ("dp=1", (8,), BEYOND),
        ("dp=2", (16,), BEYOND),
    ):
        known = replace(HEAVY, evidence=BEYOND, measured_batches=batches)
        assert of_layout(profile(Machine()), text, workload=known).evidence["compute"] is evidence
    assert terms(profile(Machine()), micro_batch=8).evidence["compute"] is BETWEEN
    assert terms(profile(Machine()), micro_batch=128).evidence["compute"] is BEYOND

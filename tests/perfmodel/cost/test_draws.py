"""What draws of a cost model carry: errors of a law, of layouts, of ranks; and what lies between runs."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from perfmodel.answer import Question
from perfmodel.answer.measured import crowding
from perfmodel.cost import contention, in_step, phases_at, phases_under
from perfmodel.cost.machine import (
    CostModel,
    families,
    form_factors,
    layout_cost,
    model_form,
    noise_weights,
    step_program,
)
from perfmodel.engine import algebra
from perfmodel.layout import Layout, RunSetting, parse_layout
from perfmodel.machine import Cluster, Evidence, Tier
from perfmodel.machine.measured import (
    CurvePoint,
    LayoutCost,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
    Residual,
    StepNoise,
)
from perfmodel.statistics import FloatArray
from perfmodel.step import Cause, Operation, StepProgram, Stream
from tests.existing import existing
from tests.perfmodel.cost.test_step_law import COSTS
from tests.perfmodel.profiles import Machine, profile, slowed

DRAWS = 4000
PAIRS = Cluster(
    name="like others",
    tiers=(
        Tier(name="node", of="device", count=2, link_bytes_per_s=1e9, latency_s=1e-6),
        Tier(name="fabric", of="node", count=64, link_bytes_per_s=1e9, latency_s=1e-6),
    ),
)


def heavy(machine: MeasuredMachine) -> MeasuredWorkload:
    return existing(machine.workload("heavy"))


def forward_s(machine: MeasuredMachine, workload: MeasuredWorkload) -> FloatArray:
    layout = Layout(micro_batch=16)
    costs = CostModel(machine, num_draws=DRAWS)
    terms = costs.terms(workload, layout, step_program(machine, workload, layout))
    return np.asarray(terms.compute_s[Cause.FORWARD])


def test_a_law_that_was_fitted_to_others_is_wrong_by_so_much_in_one_of_ten() -> None:
    """In either direction, with the tails of Student's distribution."""
    machine = profile(Machine())
    found = forward_s(machine, replace(heavy(machine), shared_log_error=0.3))
    logs = np.log(found / found[0])
    assert logs[0] == 0
    assert np.quantile(logs, 0.95) == pytest.approx(0.3, rel=0.02)
    assert np.quantile(logs, 0.05) == pytest.approx(-0.3, rel=0.02)
    assert np.mean(logs) == pytest.approx(0.0, abs=0.01)
    assert np.abs(logs).max() > 3 * 0.3
    assert not np.all(np.diff(logs[1:]) >= 0)
    assert np.ptp(forward_s(machine, heavy(machine))) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("micro_batch", "weights"),
    [
        (2, [((0.9, 1.1), 1.0)]),
        (4, [((0.9, 1.1), 1.0)]),
        (16, [((0.9, 1.1), 0.5), ((0.5, 1.5), 0.5)]),
        (32, [((0.9, 1.1), 0.25), ((0.5, 1.5), 0.75)]),
        (64, [((0.5, 1.5), 1.0)]),
        (100, [((0.5, 1.5), 1.0)]),
    ],
)
def test_noise_between_batches_is_mixed_by_their_logarithm(
    micro_batch: int, weights: list[tuple[tuple[float, ...], float]]
) -> None:
    noise = (
        StepNoise(micro_batch=64, ratios=(0.5, 1.5)),
        StepNoise(micro_batch=4, ratios=(0.9, 1.1)),
    )
    found = noise_weights(replace(heavy(profile(Machine())), noise=noise), micro_batch)
    assert [ratios for ratios, _ in found] == [ratios for ratios, _ in weights]
    assert [share for _, share in found] == pytest.approx([share for _, share in weights])
    assert noise_weights(heavy(profile(Machine())), micro_batch) == [((), 1.0)]


def costs(*world_sizes: int) -> tuple[LayoutCost, ...]:
    return tuple(
        LayoutCost(
            family="fsdp", world_size=n, call_s=1e-3 * n, byte_s=1e-10 * n, log_error=0.1 * n
        )
        for n in world_sizes
    )


@pytest.mark.parametrize(("text", "n"), [("fsdp=2", 2), ("fsdp=3", 3), ("fsdp=16", 4)])
def test_what_a_library_adds_lies_between_the_ranks_that_ran_it(text: str, n: int) -> None:
    machine = replace(profile(Machine()), layouts=costs(2, 4))
    found = existing(layout_cost(machine, "fsdp", parse_layout(text)))
    assert (found.call_s, found.byte_s, found.log_error) == pytest.approx(
        (1e-3 * n, 1e-10 * n, 0.1 * n)
    )
    assert layout_cost(machine, "tensor", parse_layout(text)) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("dp=8", ()),
        ("fsdp=8", ("fsdp",)),
        ("dp=8 zero=2", ("fsdp",)),
        ("dp=8 zero=1", ("zero",)),
        ("tp=2 pp=2 accumulation=2", ("tensor", "pipeline")),
    ],
)
def test_what_a_layout_is_beyond_data_parallelism(text: str, names: tuple[str, ...]) -> None:
    assert families(parse_layout(text)) == names


def test_layouts_err_as_they_were_judged_or_as_is_believed() -> None:
    """20 % of fully sharded ranks that were run, 5 % of tensor parallelism that was not: together 20.6 %."""
    machine = replace(profile(Machine()), layouts=costs(2))
    model = CostModel(machine, num_draws=DRAWS)
    for text, error in (("dp=2", 0.0), ("fsdp=2", 0.2), ("fsdp=2 tp=2", np.hypot(0.2, 0.05))):
        found = np.log(form_factors(model, parse_layout(text)))
        assert found[0] == 0
        assert found.std() == pytest.approx(error, rel=0.05, abs=1e-12)


def test_ranks_beside_each_other_take_longer_as_both_passes_did() -> None:
    """Two 1.5 and four 3 times as long: three 2.25 times; beyond all as the most."""
    machine = profile(Machine())
    alone = heavy(machine).phases[0]
    workload = replace(heavy(machine), phases=(slowed(alone, 4, 3.0), alone, slowed(alone, 2, 1.5)))
    for ranks, than, factor in ((4, 2, 2.0), (3, 1, 2.25), (64, 1, 3.0), (1, 1, 1.0)):
        assert contention(workload, 16, ranks, than=than) == pytest.approx(factor)
    assert [point.at for point in phases_at(workload, 3).backward] == [4, 16, 64]
    most = workload.phases[0]
    later = CurvePoint(at=256, time_s=9.0, relative_error=0.0)
    more = replace(most, backward=(*most.backward, later))
    own = phases_at(replace(workload, phases=(more, *workload.phases[1:])), 2)
    assert [point.at for point in own.backward] == [4, 16, 64]
    for text, like in (("tp=3", 4), ("tp=3 pp=2", 4), ("tp=2", 2), ("fsdp=3", 3), ("tp=6", 4)):
        assert phases_under(machine, workload, parse_layout(text)) == phases_at(workload, like)


@pytest.mark.parametrize(
    ("cpu", "kind", "like"),
    [
        ({"usable_cores": 2}, "cpu", 4),
        ({"usable_cores": 3, "quota_cores": None}, "cpu", 3),
        ({"usable_cores": 8, "quota_cores": 2.0}, "cpu", 4),
        ({"usable_cores": 2}, "cuda", 3),
    ],
)
def test_ranks_with_a_processor_each_take_no_turns(
    cpu: dict[str, object], kind: Literal["cpu", "cuda"], like: int
) -> None:
    machine = replace(
        profile(Machine()), ranks_per_node=4, device_kind=kind, environment={"cpu": cpu}
    )
    alone = heavy(machine).phases[0]
    workload = replace(heavy(machine), phases=(alone, slowed(alone, 2, 1.5), slowed(alone, 4, 3.0)))
    assert in_step(machine, workload, 3) == like


@pytest.mark.parametrize(
    ("text", "factor"),
    [("tp=3 pp=2", 1.0), ("tp=2 pp=2", 2.0), ("dp=3 pp=2", 3 / 2.25), ("pp=3", 3.0)],
)
def test_a_stage_beside_another_is_slowed_by_what_its_own_ranks_do_not_tell(
    text: str, factor: float
) -> None:
    """Three ranks that share matrices, or three stages, take as long as four, the most that were measured."""
    machine = profile(Machine())
    alone = heavy(machine).phases[0]
    workload = replace(heavy(machine), phases=(alone, slowed(alone, 2, 1.5), slowed(alone, 4, 3.0)))
    layout = parse_layout(text)
    stages = range(layout.pp)
    passes = (Operation("pass", Stream.COMPUTE, Cause.FORWARD, stage=stage) for stage in stages)
    trace = algebra.trace(StepProgram(tuple(passes)), np.ones(layout.pp))
    question = Question(machine=machine, workload=workload, layout=layout)
    assert crowding(question, trace) == pytest.approx(factor)


def test_dips_of_curves_are_noise() -> None:
    """Backward by itself; forward, update and input together, so that a dip of one that another fills stays."""

    def curve(*times_s: float) -> tuple[CurvePoint, ...]:
        return tuple(
            CurvePoint(at=at, time_s=t, relative_error=0.0)
            for at, t in zip((1, 2, 4), times_s, strict=True)
        )

    phases = PhaseCurves(
        world_size=1,
        input=curve(1.0, 1.0, 1.0),
        forward=curve(5.0, 3.0, 6.0),
        backward=curve(4.0, 3.0, 9.0),
        optimizer=curve(2.0, 3.0, 2.0),
    )
    workload = replace(heavy(profile(Machine())), phases=(phases,))
    found = phases_at(workload, 1)
    assert [point.time_s for point in found.backward] == [4.0, 4.0, 9.0]
    assert [point.time_s for point in found.forward] == [5.0, 4.0, 6.0]
    assert found.optimizer == phases.optimizer
    rising = replace(
        phases, forward=curve(1, 2, 3), backward=curve(1, 2, 3), optimizer=curve(0, 0, 0)
    )
    few = replace(phases, input=phases.input[:1])
    for left in (rising, few):
        assert phases_at(replace(workload, phases=(left,)), 1) is left
    late = replace(rising, backward=curve(4.0, 3.0, 9.0))
    found = phases_at(replace(workload, phases=(late,)), 1)
    assert [point.time_s for point in found.backward] == [4.0, 4.0, 9.0]
    assert found.forward == rising.forward


def test_every_doubling_of_nodes_is_slower_where_runs_of_others_show_it() -> None:
    """Two devices a node: eight are four nodes, two doublings of a tenth."""
    cluster = replace(PAIRS, straggler_share=0.1, straggler_log_error=0.5)
    machine = profile(Machine())
    model = CostModel(machine, num_draws=DRAWS, cluster=cluster)
    for ranks, doublings in ((1, 0), (2, 0), (8, 2), (7, 2)):
        found = model.slowest(heavy(machine), Layout(dp=ranks, micro_batch=16))
        assert found[0] == pytest.approx(1 + 0.1 * doublings)
        if doublings:
            assert np.log((found - 1) / 0.2).std() == pytest.approx(0.5, rel=0.05)
    alone = CostModel(machine, num_draws=2)
    assert alone.slowest(heavy(machine), Layout(dp=8, micro_batch=16)).tolist() == [1.0, 1.0]


def test_how_well_it_is_known_that_ranks_differ() -> None:
    """Measured, beyond what was measured, by runs of others, or by nobody where steps of one device were published."""
    machine = profile(Machine())
    others = replace(PAIRS, evidence=Evidence.INFERRED)

    def evidence(found: MeasuredMachine, ranks: int, cluster: Cluster | None = None) -> Evidence:
        layout = Layout(dp=ranks, micro_batch=16)
        model = CostModel(found, num_draws=2, cluster=cluster)
        program = step_program(found, heavy(found), layout)
        return model.terms(heavy(found), layout, program).evidence["stragglers"]

    assert evidence(machine, 2) is Evidence.MEASURED
    assert evidence(machine, 4) is Evidence.EXTRAPOLATED
    assert evidence(machine, 2, others) is Evidence.MEASURED
    assert evidence(machine, 4, others) is Evidence.INFERRED
    assert evidence(replace(machine, device_costs=COSTS), 2) is Evidence.ASSUMED


def test_every_stage_waits_for_the_slowest_rank_of_all() -> None:
    """Ranks that differ for good by 10 %: the slowest of two is 5.9 %, of four 10.5 % behind, in log."""
    machine = profile(Machine())
    workload = replace(heavy(machine), rank_spread=0.1, noise=())
    model = CostModel(machine, num_draws=2)
    program = step_program(machine, workload, Layout(micro_batch=16))
    for text, behind in (("pp=2", 0.059), ("dp=2 pp=2", 0.105), ("dp=2 pp=1", 0.059), ("pp=1", 0)):
        terms = model.terms(workload, parse_layout(f"{text} micro_batch=16"), program)
        assert np.log(terms.slowest) == pytest.approx(behind, abs=1e-3)


def test_of_accumulated_steps_what_ddp_adds_is_off_once() -> None:
    """One device is off by 20 % either way, two by 40 %: of four micro-batches three quarters and one, in log."""
    known = profile(Machine())
    errors = Residual(single_log_errors=(0.2,), ddp_log_errors=(0.4,))
    factors = model_form(
        replace(known, residual=errors),
        {},
        known.workloads[0],
        Layout(dp=2, micro_batch=16, accumulation=4),
        num_draws=100,
        run_error=0.0,
    )
    assert factors[0] == 1.0
    assert sorted({*np.log(factors[1:]).round(9).tolist()}) == [-0.25, -0.05, 0.05, 0.25]


def test_an_earlier_run_of_the_same_layout_is_no_error_of_another() -> None:
    known, one = profile(Machine()), Layout(micro_batch=16)
    earlier = {RunSetting.of(known.workloads[0].workload.name, one): 0.5}
    factors = model_form(
        replace(known, residual=Residual(single_log_errors=(0.0,), ddp_log_errors=(0.4,))),
        earlier,
        known.workloads[0],
        one,
        num_draws=50,
        run_error=0.0,
    )
    assert factors == pytest.approx(np.ones(50))

"""Layouts of a traced model on a calibrated machine: laws that hold for any prices."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import perfmodel
from perfmodel.answer import Answer
from perfmodel.answer.measured import layout_costs
from perfmodel.cost import shares
from perfmodel.cost.machine import PIPELINE, CostModel, ranks_beside
from perfmodel.cost.network import Group, groups
from perfmodel.errors import CalibrationUnavailable, NotFeasible
from perfmodel.layout import Layout, parse_layout
from perfmodel.machine import Evidence
from perfmodel.machine.measured import LayoutCost, MeasuredMachine, MeasuredWorkload
from perfmodel.step import Cause, StepProgram
from perfmodel.step.compile import compile_divided
from perfmodel.step.stages import WaitingSends
from perfmodel.units import GIB
from tests.existing import existing
from tests.perfmodel.asking import Asking
from tests.perfmodel.llama import HIDDEN, document
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile, slowed

BATCH = 8


@pytest.fixture(scope="module")
def machine() -> MeasuredMachine:
    found = profile(Machine(bucket_s=1e-5, bucket_s_per_byte=1e-11, world_size=4))
    return dataclasses.replace(found, operators=costs_of_the_made_up_machine())


def workload(predictor: Asking, model: str = "llama") -> MeasuredWorkload:
    found = document(model)
    return predictor.workload(found.workload, found.trace, found.memory)


def step_s(machine: MeasuredMachine, text: str, model: str = "llama") -> float:
    predictor = Asking(machine)
    layout = parse_layout(f"{text} micro_batch={BATCH}")
    return float(predictor.step(workload(predictor, model), layout).step_s[0])


@pytest.mark.parametrize("dp", [1, 2, 8])
def test_ddp_is_the_same_question_in_both_grammars(machine: MeasuredMachine, dp: int) -> None:
    found = step_s(machine, f"dp={dp} tp=1 pp=1 zero=0")
    predictor = Asking(machine)
    plain = predictor.step(workload(predictor), Layout(dp=dp, micro_batch=BATCH))
    assert found == pytest.approx(float(plain.step_s[0]), rel=1e-9)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_kernel_holds_a_part_of_the_largest_message_between_nodes(
    machine: MeasuredMachine, monkeypatch: pytest.MonkeyPatch, num_nodes: int
) -> None:
    """200,000 bytes of BATCH x 64 tokens x HIDDEN numbers; indices enter the first stage. Within a node: nothing."""
    held = []

    def compiled(*arguments: Any, waiting: WaitingSends, **options: Any) -> StepProgram:
        held.append(waiting.queued)
        return compile_divided(*arguments, waiting=waiting, **options)

    monkeypatch.setattr(shares, "compile_divided", compiled)
    joined = dataclasses.replace(machine, num_nodes=num_nodes)
    layout = parse_layout(f"pp=2 micro_batch={BATCH}")
    shares.divided_program(joined, workload(Asking(machine)), layout, backward_s=1.0)
    message_bytes = BATCH * 64 * HIDDEN * 4
    assert held == [pytest.approx((num_nodes - 1) * 200_000 / message_bytes)]


def test_other_costs_of_ddp_are_drawn_again(machine: MeasuredMachine) -> None:
    values = tuple(3 * value for value in machine.ddp.values)
    ddp = dataclasses.replace(machine.ddp, values=values, draws=(values,))
    found = CostModel(machine, num_draws=1, seed=0).with_ddp(ddp)
    fresh = CostModel(dataclasses.replace(machine, ddp=ddp), num_draws=1, seed=0)
    assert found._ddp == fresh._ddp
    assert found._ddp["bucket_s"] == pytest.approx(3e-5)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_divides_compute_and_pays_for_all_reduces(
    machine: MeasuredMachine, tp: int
) -> None:
    predictor = Asking(machine)
    whole, divided = (
        predictor.step(workload(predictor), parse_layout(f"tp={n} micro_batch={BATCH}"))
        for n in (1, tp)
    )

    def seconds(of: Answer, cause: Cause) -> float:
        program, terms = of.program, layout_costs(of.question).terms
        rows = terms.durations(program)[:, 0]
        return sum(
            float(s) for o, s in zip(program.operations, rows, strict=True) if o.cause is cause
        )

    for cause in (Cause.FORWARD, Cause.BACKWARD):
        ratio = seconds(divided, cause) / seconds(whole, cause)
        assert 1 / tp <= ratio < 1
    assert seconds(divided, Cause.TENSOR) > 0
    assert divided.evidence["compute"] in (Evidence.EXTRAPOLATED, Evidence.ASSUMED)


def test_shares_of_tensor_parallelism_are_unsure_until_it_was_run(
    machine: MeasuredMachine,
) -> None:
    cost = LayoutCost(family="tensor", world_size=2, call_s=1e-5, byte_s=0.0, log_error=0.1)

    def spread(of: MeasuredMachine) -> float:
        predictor = Asking(of)
        found = predictor.step(workload(predictor), parse_layout(f"tp=2 micro_batch={BATCH}"))
        return float(np.log(layout_costs(found.question).terms.compute_s[Cause.FORWARD]).std())

    assert spread(machine) > 1.05 * spread(dataclasses.replace(machine, layouts=(cost,)))


def test_parameters_outside_blocks_are_gathered_once(machine: MeasuredMachine) -> None:
    """FSDP2 gathers 4 blocks and what is before and after them, then the blocks again; all are reduced."""
    predictor = Asking(machine)
    layout = parse_layout(f"fsdp=2 micro_batch={BATCH}")
    causes = [o.cause for o in predictor.step(workload(predictor), layout).program.operations]
    assert causes.count(Cause.ALL_GATHER) == 6 + 4
    assert causes.count(Cause.REDUCE_SCATTER) == 6


@pytest.mark.parametrize("stages", [2, 4])
def test_a_send_within_a_node_is_paid_once(machine: MeasuredMachine, stages: int) -> None:
    """Every micro-batch crosses each border forward and back; nothing queues behind what a kernel holds."""
    predictor = Asking(machine)
    layout = parse_layout(f"pp={stages} accumulation=4 micro_batch={BATCH}")
    program = predictor.step(workload(predictor), layout).program
    sent = sum(o.share for o in program.operations if o.cause is Cause.P2P)
    assert sent == pytest.approx(2 * 4 * (stages - 1))


def test_groups_that_share_processors_slow_each_others_collectives() -> None:
    """Two groups of two ranks at once, where n ranks at work take n times as long as one."""
    shared = profile(Machine(world_size=4))
    workloads = tuple(
        dataclasses.replace(
            entry, phases=tuple(slowed(c, c.world_size, float(c.world_size)) for c in entry.phases)
        )
        for entry in shared.workloads
    )
    machine = dataclasses.replace(
        shared, workloads=workloads, operators=costs_of_the_made_up_machine()
    )
    predictor = Asking(machine)

    def tensor_s(text: str) -> float:
        question = predictor.step(workload(predictor), parse_layout(text)).question
        costs = layout_costs(question)
        rows = costs.terms.durations(costs.program)[:, 0]
        pairs = zip(costs.program.operations, rows, strict=True)
        return sum(float(s) for o, s in pairs if o.cause is Cause.TENSOR)

    alone_s = tensor_s(f"tp=2 micro_batch={BATCH}")
    assert tensor_s(f"dp=2 tp=2 micro_batch={BATCH}") == pytest.approx(2 * alone_s, rel=0.05)


def test_ranks_of_every_exchange_by_their_order() -> None:
    found = groups(parse_layout("dp=4 tp=2 pp=2 accumulation=2"))
    assert found[Cause.TENSOR] == Group(2, 1)
    assert found[Cause.ALL_REDUCE] == Group(4, 2)
    assert found[Cause.P2P] == Group(2, 8)


def test_who_exchanges_at_the_same_time() -> None:
    """Of 8 ranks in two stages four of each, and two that send."""
    layout = parse_layout("dp=4 pp=2 accumulation=2")
    assert ranks_beside("zero-3", layout) == 4
    assert ranks_beside(PIPELINE, layout) == 2


def test_without_a_trace_or_operators_nothing_is_divided(machine: MeasuredMachine) -> None:
    """The workload is at fault, or the profile."""
    predictor = Asking(machine)
    with pytest.raises(NotFeasible, match="--layout: --workload must be a file of perfmodel trace"):
        predictor.step(predictor.workload("heavy"), parse_layout("dp=2 zero=3 micro_batch=16"))

    predictor = Asking(dataclasses.replace(machine, operators=None))
    with pytest.raises(CalibrationUnavailable, match="the profile holds none; calibrate again"):
        predictor.step(workload(predictor), parse_layout(f"dp=2 zero=3 micro_batch={BATCH}"))


def test_a_layout_in_python_with_memory_and_probability(machine: MeasuredMachine) -> None:
    found = perfmodel.predict(
        machine, document(), layout="fsdp=4 micro_batch=8", capacity_bytes=GIB
    )
    [point] = found.points
    assert point.layout == "dp=4 zero=3 micro_batch=8"
    assert len(point.memory) == 1
    assert point.memory[0].needed_bytes == sum(point.memory[0].parts_bytes.values())
    assert 0 < existing(point.fit_probability) <= 1
    assert point.step_s.p5 < point.step_s.nominal < point.step_s.p95

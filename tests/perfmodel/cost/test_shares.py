"""Shares of units in a measured step: what a layout does to each, and what stays the whole."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from calibrate.fit.operators import fit_operators
from perfmodel.answer import timed_workload
from perfmodel.cost.machine import step_program
from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.shares import unit_shares
from perfmodel.errors import CalibrationUnavailable
from perfmodel.layout import parse_layout
from perfmodel.step import Cause
from perfmodel.step.division import Unit, UnitShares, parameter_bytes, units
from perfmodel.workload import Phase
from tests.existing import existing
from tests.perfmodel.llama import LAYERS, document, traced
from tests.perfmodel.operators import costs_of_the_made_up_machine, observation, recurring
from tests.perfmodel.profiles import Machine, profile

BATCH = 8


@functools.cache
def durations() -> OperatorDurations:
    return OperatorDurations(costs_of_the_made_up_machine(), use_measured=False)


def nothing(_: Sequence[int]) -> float:
    return 0.0


def shares(text: str = "dp=1") -> UnitShares:
    trace, memory = traced()
    return unit_shares(
        trace, memory, parse_layout(f"{text} micro_batch={BATCH}"), durations(), nothing
    )


@functools.cache
def every() -> tuple[Unit, ...]:
    return units(*traced())


def test_one_rank_does_everything_once() -> None:
    found = shares()
    for phase in (found.forward, found.backward, found.optimizer):
        assert len(phase) == len(every())
        assert sum(phase) == pytest.approx(1.0)
    # Equal layers have equal shares.
    for phase in (found.forward, found.backward, found.optimizer):
        blocks = [s for s, unit in zip(phase, every(), strict=True) if unit.block is not None]
        assert blocks == pytest.approx([blocks[0]] * LAYERS)
        assert all(share > 0 for share in blocks)


def test_a_share_is_a_unit_of_time_over_all_of_it() -> None:
    """Of a pass the calls of a unit, each as long as in the whole pass; calls that recur take a third."""
    entries = [observation(), recurring(observation(1), 12, 1 / 3)]
    costs = existing(fit_operators(entries, workloads=(), rates=()))
    curves = OperatorDurations(costs, use_measured=False)
    trace, memory = traced()
    step = trace.at(micro_batch=BATCH)
    whole, counts = curves.step(step), step.call_counts()
    layout = parse_layout(f"dp=1 micro_batch={BATCH}")
    found = unit_shares(trace, memory, layout, curves, nothing)
    for phase, column in ((Phase.FORWARD, found.forward), (Phase.BACKWARD, found.backward)):
        for unit, share in zip(every(), column, strict=True):
            calls = [call for call in unit.calls if call.phase is phase]
            asked = [(step.operators[c.operator], counts[c.operator, phase]) for c in calls]
            each = zip(calls, curves.durations(asked, phase), strict=True)
            own_s = sum(call.times * one.time_s for call, one in each)
            assert share == pytest.approx(own_s / whole[phase].time_s)


@pytest.mark.parametrize(
    ("text", "causes"),
    [
        ("dp=4 zero=1", {Cause.ALL_REDUCE, Cause.BROADCAST}),
        ("fsdp=4", {Cause.ALL_GATHER, Cause.REDUCE_SCATTER}),
    ],
)
def test_a_sharded_optimizer_alone_stands_behind_the_buckets_of_ddp(
    text: str, causes: set[Cause]
) -> None:
    machine = replace(profile(Machine()), operators=costs_of_the_made_up_machine())
    model, (trace, memory) = document().workload, traced()
    workload = timed_workload(machine, model, trace=trace, memory=memory)
    program = step_program(machine, workload, parse_layout(f"{text} micro_batch={BATCH}"))
    assert {o.cause for o in program.operations if o.is_collective} == causes


def test_without_operators_no_layout_is_divided() -> None:
    machine = profile(Machine())
    with pytest.raises(CalibrationUnavailable, match="'dp=4 zero=3' needs operators"):
        step_program(machine, machine.workloads[0], parse_layout("fsdp=4"))


def test_what_is_computed_again_adds_the_forward_pass_of_blocks() -> None:
    trace, _ = traced()
    whole = durations().step(trace.at(micro_batch=BATCH))
    ratio = whole[Phase.FORWARD].time_s / whole[Phase.BACKWARD].time_s
    plain, again = shares(), shares("recompute=full")
    assert again.forward == plain.forward
    columns = zip(every(), plain.forward, plain.backward, again.backward, strict=True)
    for unit, forward, backward, found in columns:
        more = ratio * forward if unit.block is not None else 0.0
        assert found - backward == pytest.approx(more, abs=1e-12)


@pytest.mark.parametrize(("text", "part"), [("dp=4", 1), ("dp=4 zero=1", 4), ("fsdp=4", 4)])
def test_sharded_states_are_updated_in_parts(text: str, part: int) -> None:
    plain, found = shares().optimizer, shares(text).optimizer
    assert found == pytest.approx([share / part for share in plain], rel=1e-3)


@pytest.mark.parametrize(
    ("text", "part"), [("dp=2 accumulation=2", 1), ("dp=2 zero=2 accumulation=2", 2), ("tp=2", 2)]
)
def test_gradients_that_are_added_up_are_those_that_a_rank_holds(text: str, part: int) -> None:
    """Every unit asks once, of all its gradients; what it hears comes on top of its backward pass."""
    trace, memory = traced()
    asked: list[Sequence[int]] = []

    def a_quarter(sizes_bytes: Sequence[int]) -> float:
        asked.append(sizes_bytes)
        return 0.25

    layout = parse_layout(f"{text} micro_batch={BATCH}")
    found = unit_shares(trace, memory, layout, durations(), a_quarter)
    plain = unit_shares(trace, memory, layout, durations(), nothing)
    assert found.backward == pytest.approx([share + 0.25 for share in plain.backward])
    assert [len(sizes) for sizes in asked] == [len(unit.parameters) for unit in every()]
    whole = parameter_bytes(trace, range(len(trace.parameters)), 1)
    held = parameter_bytes(trace, range(len(trace.parameters)), layout.tp)
    shards = part if layout.tp == 1 else 1
    assert sum(map(sum, asked)) == pytest.approx(
        (whole if layout.tp == 1 else held) / shards, rel=1e-3
    )


def test_tensor_parallelism_divides_matrices_and_with_sequences_all_else() -> None:
    one, two, all_divided = (
        shares(text) for text in ("dp=1", "tp=2", "tp=2 sequence_parallel=yes")
    )
    for whole, half, everything in zip(one.forward, two.forward, all_divided.forward, strict=True):
        assert everything <= half * (1 + 1e-9)
        assert half <= whole * (1 + 1e-9)
    assert sum(all_divided.forward) < sum(two.forward) < 1

"""Units, stages and tensor-parallel shares of a traced step: sums, bytes and FLOP by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from perfmodel.cost.families import optimizer_family
from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.shares import unit_shares
from perfmodel.errors import NotFeasible
from perfmodel.layout import Layout, parse_layout
from perfmodel.machine.measured import OperatorFamily
from perfmodel.step import StageDivision
from perfmodel.step.division import (
    constant_dimensions,
    divide,
    divided,
    parameter_bytes,
    stage_units,
    units,
)
from perfmodel.workload import Phase
from tests.perfmodel.llama import HIDDEN, LAYERS, document, traced
from tests.perfmodel.operators import costs_of_the_made_up_machine

SEQUENCE = 64
BATCH = 8


@pytest.fixture(scope="module")
def durations() -> OperatorDurations:
    return OperatorDurations(costs_of_the_made_up_machine(), use_measured=False)


def division(
    text: str,
    durations: OperatorDurations,
    model: str = "llama",
    accumulated: Callable[[Sequence[int]], float] = lambda _: 0.0,
) -> tuple[StageDivision, ...]:
    layout = parse_layout(f"{text} micro_batch={BATCH}")
    trace, memory = traced(model)
    return divide(
        trace,
        memory,
        document(model).workload.parameters,
        layout,
        unit_shares(trace, memory, layout, durations, accumulated),
    )


@pytest.mark.parametrize(("model", "blocks"), [("llama", LAYERS), ("resnet18", 8)])
def test_every_call_and_parameter_is_in_one_unit(model: str, blocks: int) -> None:
    trace, memory = traced(model)
    found = units(trace, memory)
    assert [unit.block is not None for unit in found] == [False, *[True] * blocks, False]
    step = trace.at(micro_batch=BATCH)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert sum(unit.num_calls(phase) for unit in found) == step.num_calls(phase)
    held = sorted(position for unit in found for position in unit.parameters)
    assert held == list(range(len(trace.parameters)))


def test_a_block_has_two_pairs_of_matrices_and_its_input_is_the_hidden_state() -> None:
    trace, memory = traced()
    _, block, *_ = units(trace, memory)
    assert block.regions == (2, 2)
    assert block.activation.at(BATCH) == BATCH * SEQUENCE * HIDDEN * 4


@pytest.mark.parametrize(
    "text", ["dp=1", "dp=8", "fsdp=8", "pp=4", "dp=2 zero=1 pp=2", "pp=2 dp=4"]
)
@pytest.mark.parametrize("model", ["llama", "resnet18"])
def test_shares_of_a_step_add_to_one(text: str, model: str, durations: OperatorDurations) -> None:
    stages = division(text.replace("fsdp=8", "dp=8 zero=3"), durations, model)
    for name in ("forward", "backward"):
        pieces = [piece for stage in stages for piece in getattr(stage, name)]
        assert sum(piece.share for piece in pieces) == pytest.approx(1, abs=1e-9)
        assert sum(piece.issue_share for piece in pieces) == pytest.approx(1, abs=1e-9)
        assert not any(piece.all_reduces for piece in pieces)
    assert sum(stage.issue_optimizer for stage in stages) == pytest.approx(1)
    if "zero" not in text and "fsdp" not in text:
        assert sum(stage.optimizer for stage in stages) == pytest.approx(1)


def test_an_update_of_a_part_takes_its_share_of_tensors_and_bytes(
    durations: OperatorDurations,
) -> None:
    """Whatever the curve of the optimizer's family says at either size."""
    family = OperatorFamily(
        name=optimizer_family("adamw", "foreach"),
        flop_per_s=0.0,
        bytes_per_s=1e10,
        least_s=1e-6,
        unit_s=(1e-5, 1e-9),
        features=((8.0, 12.0), (12.0, 14.0), (16.0, 18.0)),
        log_ratios=(0.5, -0.5, 0.5),
        lengths=(2.0, 2.0),
        spread=0.5,
        noise=0.05,
    )
    known = OperatorDurations(
        replace(durations.profile, families=(*durations.profile.families, family)),
        use_measured=False,
    )
    trace, _ = traced()
    sizes = [4 * parameter.num_elements for parameter in trace.parameters]
    (stage,) = division("dp=4 zero=3", known)
    whole_s = sum(1e-5 + 1e-9 * size for size in sizes)
    assert stage.optimizer == pytest.approx(
        sum(1e-5 + 1e-9 * size / 4 for size in sizes) / whole_s, rel=1e-3
    )


def test_sharded_parameters_are_gathered_unit_by_unit(durations: OperatorDurations) -> None:
    trace, memory = traced()
    (stage,) = division("dp=8 zero=3", durations)
    sizes = [parameter_bytes(trace, unit.parameters, 1) for unit in units(trace, memory)]
    assert [piece.size_bytes for piece in stage.forward] == sizes
    assert [piece.size_bytes for piece in stage.backward] == sizes[::-1]
    assert sum(sizes) == document().workload.gradient_bytes


def test_buckets_of_a_pipeline_hold_the_gradients_of_their_stage(
    durations: OperatorDurations,
) -> None:
    trace, memory = traced()
    layout = Layout(pp=2, micro_batch=BATCH)
    stages = division("pp=2", durations)
    for stage, held in zip(stages, stage_units(trace, memory, layout), strict=True):
        own = [p for i in held for p in units(trace, memory)[i].parameters]
        reduced = sum(piece.size_bytes for piece in stage.backward)
        assert reduced == parameter_bytes(trace, own, 1)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_divides_the_flop_of_every_block(tp: int) -> None:
    trace, memory = traced()
    step = trace.at(micro_batch=BATCH)
    for unit in units(trace, memory):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            calls = [call for call in unit.calls if call.phase is phase]
            whole = sum(call.times * step.operators[call.operator].flop for call in calls)
            own = sum(
                call.times
                * divided(
                    step.operators[call.operator], constant_dimensions(trace, call.operator), tp
                ).flop
                for call in calls
                if call.divisible
            )
            assert own == pytest.approx(whole / tp, rel=1e-12)


def test_full_recomputation_adds_the_forward_pass_of_the_blocks(
    durations: OperatorDurations,
) -> None:
    plain, again = (division(f"dp=2{more}", durations)[0] for more in ("", " recompute=full"))
    assert sum(p.share for p in again.forward) == pytest.approx(1)
    assert 1.2 < sum(p.share for p in again.backward) / sum(p.share for p in plain.backward) < 1.7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=8 zero=3 shard=4", "no HSDP"),
        ("cp=2", "cp must be 1"),
        ("pp=5", "pp must be at most the 4 blocks"),
        ("tp=7", "tp must divide a width"),
    ],
)
def test_what_a_trace_does_not_tell_about_is_refused_in_one_line(
    text: str, message: str, durations: OperatorDurations
) -> None:
    with pytest.raises(NotFeasible, match=f"--layout: .*{message}") as raised:
        division(text, durations)
    assert "\n" not in str(raised.value)

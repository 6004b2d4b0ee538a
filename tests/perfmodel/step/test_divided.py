"""Programs of divided steps: DDP's as compiled by hand, sizes of exchanges, stages."""

import dataclasses

import pytest

from perfmodel.layout import parse_layout
from perfmodel.step import Cause, StepProgram, Stream
from perfmodel.step.compile import compile_divided
from perfmodel.step.stages import Piece, StageDivision, WaitingSends

#: Two units of 100 and 300 bytes; the second one takes longer.
UNITS = StageDivision(
    forward=(Piece(0.25, 0.5, 100, 2.0), Piece(0.75, 0.5, 300, 1.0)),
    backward=(Piece(0.75, 0.5, 300, 1.0), Piece(0.25, 0.5, 100, 2.0)),
    activation_bytes=64,
)


def divided(text: str, *stages: StageDivision, blocking: bool = False) -> StepProgram:
    return compile_divided(
        parse_layout(text),
        stages,
        asynchronous=False,
        waiting=WaitingSends() if blocking else None,
    )


def sizes(program: StepProgram, cause: Cause) -> list[int]:
    return [o.size_bytes for o in program.operations if o.cause is cause and o.size_bytes]


@pytest.mark.parametrize("blocking", [False, True])
def test_fully_sharded_units_are_gathered_twice_and_reduced_once(*, blocking: bool) -> None:
    found = divided("dp=2 zero=3", UNITS, blocking=blocking)
    assert sizes(found, Cause.ALL_GATHER) == [100, 300, 300, 100]
    assert sizes(found, Cause.REDUCE_SCATTER) == [300, 100]
    assert not sizes(found, Cause.ALL_REDUCE)


def test_a_sharded_optimizer_gathers_once_a_step_and_reduces_after_the_last_pass() -> None:
    found = divided("dp=2 zero=1 accumulation=2", UNITS)
    assert sizes(found, Cause.ALL_GATHER) == [100, 300]
    assert sizes(found, Cause.REDUCE_SCATTER) == [300, 100]


def test_tensor_parallel_all_reduces_are_waited_for() -> None:
    found = divided("dp=2 tp=2", UNITS)
    reduced = [o for o in found.operations if o.stream is Stream.TENSOR]
    assert [(o.share, o.size_bytes) for o in reduced] == [(3.0, 64), (1.0, 64), (2.0, 64)]
    after = {i for o in found.operations if o.stream is Stream.COMPUTE for i in o.after}
    assert {found.operations.index(o) for o in reduced} <= after


@pytest.mark.parametrize("blocking", [False, True])
def test_stages_send_what_enters_the_next_one(*, blocking: bool) -> None:
    second = dataclasses.replace(UNITS, activation_bytes=48)
    found = divided("pp=2 accumulation=2", UNITS, second, blocking=blocking)
    sent = [o for o in found.operations if o.cause is Cause.P2P]
    assert len(sent) == 4
    assert {o.size_bytes for o in sent} == {48}
    assert {o.stage for o in sent if o.stream is Stream.SEND_FORWARD} == {0}
    assert {o.stage for o in sent if o.stream is Stream.SEND_BACKWARD} == {1}

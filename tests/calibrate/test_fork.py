"""Tasks in processes of their own."""

import os

import pytest

from calibrate.probes.fork import own_heaps
from calibrate.task import Task, TraceTask
from perfmodel.errors import MeasurementFailed


def task(name: str) -> Task:
    return TraceTask(name=name, round=0, workload="lenet")


def test_every_task_finds_the_process_as_it_was_at_the_start() -> None:
    seen: list[str] = []

    def act(task: Task) -> str | None:
        seen.append(task.name)
        return f"{os.getpid()} {' '.join(seen)}"

    with own_heaps(act, imports=()) as carry_out:
        seen.append("later")
        answers = [(carry_out(task(name)) or "").split() for name in ("one", "two")]
    assert [answer[1:] for answer in answers] == [["one"], ["two"]]
    assert len({str(os.getpid()), *(answer[0] for answer in answers)}) == 3
    assert seen == ["later"]


def test_a_task_that_fails_says_so_and_the_next_one_runs() -> None:
    def act(task: Task) -> str | None:
        if task.name == "bad":
            raise MeasurementFailed("no such disk")
        return None

    with own_heaps(act, imports=()) as carry_out:
        with pytest.raises(MeasurementFailed, match="no such disk"):
            carry_out(task("bad"))
        assert carry_out(task("good")) is None

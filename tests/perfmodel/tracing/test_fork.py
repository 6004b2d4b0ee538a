"""A function in a copy of this process."""

import os
from typing import NoReturn

import pytest

from perfmodel.errors import UntraceableModel
from perfmodel.tracing.fork import Fork


def test_the_copy_answers_and_changes_nothing_here() -> None:
    seen: list[int] = []

    def act() -> tuple[int, list[int]]:
        seen.append(1)
        return os.getpid(), seen

    with Fork(act) as copy:
        child, found = copy.result()
    assert child != os.getpid()
    assert found == [1]
    assert seen == []


def test_what_the_copy_raises_is_raised_here() -> None:
    def act() -> NoReturn:
        raise UntraceableModel("module 'x': no")

    with Fork(act) as copy, pytest.raises(UntraceableModel, match="module 'x': no"):
        copy.result()


def test_a_copy_that_dies_is_told_and_one_that_is_not_wanted_is_ended() -> None:
    with (
        Fork(lambda: os._exit(3)) as copy,
        pytest.raises(RuntimeError, match="must answer before it ends"),
    ):
        copy.result()
    with Fork(lambda: __import__("time").sleep(60)):
        pass  # returns at once
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)

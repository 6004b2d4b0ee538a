"""A function in a copy of this process."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

from perfmodel.errors import UntraceableModel
from perfmodel.tracing.fork import CrashedError, Fork, apart
from tests.existing import existing


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


_TEAM = """
import torch
from perfmodel.tracing.fork import Fork
torch.set_num_threads(2)
size = 1 << 20  # large enough for torch to share the work among threads
assert float(torch.ones(size).sum()) == size
with Fork(lambda: float(torch.ones(size).sum())) as copy:
    print(copy.result(within_s=60))
"""


def test_a_copy_does_not_wait_for_threads_that_stayed_behind() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _TEAM], check=True, timeout=120, capture_output=True, text=True
    )
    assert float(told.stdout) == 1 << 20


class OfTwo(Exception):
    """Cannot be made again from its text alone."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


@pytest.mark.parametrize("error", [UntraceableModel("no way"), OfTwo("no", "way")])
def test_what_the_copy_raises_is_raised_here(error: Exception) -> None:
    def act() -> NoReturn:
        raise error

    said = r"^(OfTwo: )?no way\nTraceback"
    with Fork(act) as copy, pytest.raises((RuntimeError, type(error)), match=said):
        copy.result()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "out of memory"),
        (sys.exit, "exit code 0"),
    ],
)
def test_how_a_copy_ended_without_an_answer_is_told(end: Callable[[], object], told: str) -> None:
    with Fork(end) as copy, pytest.raises(CrashedError, match=rf"before it ends, got .*{told}"):
        copy.result()


def test_a_copy_that_hangs_is_not_waited_for_and_ended() -> None:
    with Fork(functools.partial(time.sleep, 60)) as copy:
        with pytest.raises(TimeoutError, match=r"must answer within 0\.01 s"):
            copy.result(within_s=0.01)
        child = existing(copy._child.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_a_crash_costs_one_item_and_all_keep_their_order() -> None:
    def act(item: int) -> int:
        if item == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if item == 3:
            raise UntraceableModel("no way")
        time.sleep(0.1 / (1 + item))
        return item * item

    found = dict(apart(act, range(5), at_once=2))
    assert list(found) == [0, 1, 2, 3, 4]
    assert [found[item] for item in (0, 1, 4)] == [0, 1, 16]
    assert isinstance(found[2], CrashedError)
    assert "SIGTERM" in str(found[2])
    assert isinstance(found[3], UntraceableModel)


def test_whoever_stops_early_leaves_no_copy_behind() -> None:
    before = multiprocessing.active_children()
    rest = apart(time.sleep, [0.0, 60.0, 60.0], at_once=2)
    next(rest)
    rest.close()
    assert multiprocessing.active_children() == before

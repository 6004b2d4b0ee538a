"""What a hypervisor takes away is seen, and tasks that met it are measured again."""

from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from calibrate.environment import Patience, ProcessorTime, processor_time, steal_under_load
from perfmodel.documents.observation import (
    EnvironmentObservation,
    Observation,
    ProcessorObservation,
    steal_share,
)

TASK_S = 1.0


def played(*steal: float) -> tuple[Patience, Iterator[int]]:
    """A machine of which tasks of one second lose such shares in turn, and the numbers of the tries."""
    shares = iter(steal)
    now = {"s": 0.0, "busy_s": 100.0, "steal_s": 50.0}

    def tries() -> Iterator[int]:
        for number, share in enumerate(shares):
            now["s"] += TASK_S
            now["busy_s"] += TASK_S * (1 - share)
            now["steal_s"] += TASK_S * share
            yield number

    patience = Patience(
        agree=lambda mine: mine,
        on_again=lambda: None,
        clock=lambda: now["s"],
        read=lambda: ProcessorTime(busy_s=now["busy_s"], steal_s=now["steal_s"]),
    )
    return patience, tries()


def test_a_quiet_task_is_measured_once() -> None:
    patience, tries = played(0.04, 0.0)
    tried = patience.quietest(lambda: next(tries))
    assert tried.found == 0
    assert tried.spent.steal_share == pytest.approx(0.04)


def test_a_disturbed_task_is_measured_again_until_it_is_quiet() -> None:
    patience, tries = played(0.0, 0.0, 0.5, 0.01, 0.0)
    for _ in range(2):
        patience.quietest(lambda: next(tries))
    assert patience.quietest(lambda: next(tries)).found == 3


def test_the_quietest_try_counts_where_none_is_quiet() -> None:
    patience, tries = played(*[0.0] * 9, 0.5, 0.2, 0.3, 0.0)
    for _ in range(9):
        patience.quietest(lambda: next(tries))
    tried = patience.quietest(lambda: next(tries))
    assert tried.found == 10
    assert tried.spent.steal_share == pytest.approx(0.2)


def test_a_restless_machine_is_not_waited_for_without_end() -> None:
    """A try again for every second task at most, on average."""
    patience, tries = played(*[0.6] * 1000)
    for _ in range(100):
        patience.quietest(lambda: next(tries))
    assert 150 <= next(tries) <= 152


def test_all_ranks_do_as_rank_0_does() -> None:
    """A rank that saw nothing steal tries again nevertheless."""
    patience, tries = played(0.0, 0.0, 0.0, 0.0)
    quiet, steal = ProcessorTime(busy_s=1.0, steal_s=0.0), ProcessorTime(busy_s=1.0, steal_s=9.0)
    told = iter([(quiet, TASK_S), (quiet, TASK_S), (steal, TASK_S), (quiet, TASK_S)])
    patience.agree = lambda _mine: next(told)
    found = [patience.quietest(lambda: next(tries)).found for _ in range(3)]
    assert found == [0, 1, 3]


def test_nothing_is_steal_of_what_nobody_wanted() -> None:
    idle = ProcessorTime(busy_s=1.0, steal_s=1.0)
    assert idle.since(idle).steal_share == 0.0


def test_busy_time_holds_neither_idle_nor_steal_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = SimpleNamespace(
        user=1.0, nice=0.2, system=0.3, irq=0.05, softirq=0.45, idle=90.0, iowait=4.0, steal=0.77
    )
    monkeypatch.setattr(psutil, "cpu_times", lambda: counted)
    assert processor_time() == pytest.approx((2.0, 0.77))


def test_this_machine_counts_its_processors_time() -> None:
    before = processor_time()
    assert 0.0 <= steal_under_load(1, 0.2) <= 1.0
    after = processor_time()
    assert after.busy_s + after.steal_s > before.busy_s + before.steal_s


def test_long_tasks_count_for_more() -> None:
    observations: list[Observation] = [
        EnvironmentObservation(task="environment-1", round=0, facts={}),
        ProcessorObservation(task="long", round=0, busy_s=8.0, steal_s=0.0),
        ProcessorObservation(task="short", round=0, busy_s=1.0, steal_s=1.0),
    ]
    assert steal_share(observations) == pytest.approx(0.1)
    assert steal_share([]) == 0.0


def test_whoever_waits_is_told_of_every_other_try() -> None:
    patience, tries = played(0.0, 0.0, 0.5, 0.3, 0.0, 0.0)
    told: list[str] = []
    patience.on_again = lambda: told.append("again")
    for _ in range(3):
        patience.quietest(lambda: next(tries))
    assert next(tries) == 5
    assert len(told) == 2


def test_what_was_disturbed_twice_waits_for_quiet_before_its_last_try() -> None:
    """Looking is a task of the played machine too: the third and fourth."""
    patience, tries = played(*[0.0] * 9, 0.5, 0.4, 0.6, 0.01, 0.02)
    patience.wait_s = 100.0
    looked: list[int] = []
    patience.look = lambda _load_s: looked.append(next(tries))
    rested_s: list[float] = []
    patience.rest = rested_s.append
    told_s: list[float] = []
    patience.on_wait = told_s.append
    for _ in range(9):
        patience.quietest(lambda: next(tries))
    tried = patience.quietest(lambda: next(tries))
    assert tried.found == 13
    assert looked == [11, 12]
    assert told_s == [rested_s[0] + TASK_S] * 2
    assert patience.wait_s == pytest.approx(100.0 - sum(told_s))


def test_nobody_waits_longer_than_may_be_waited() -> None:
    patience, tries = played(*[0.6] * 1000)
    patience.wait_s = 30.0
    looked: list[int] = []
    patience.look = lambda _load_s: looked.append(next(tries))
    rested_s: list[float] = []
    patience.rest = rested_s.append
    for _ in range(20):
        patience.quietest(lambda: next(tries))
    assert len(rested_s) == 2
    assert patience.wait_s <= 0


def test_nobody_waits_who_was_not_told_to() -> None:
    patience, tries = played(*[0.6] * 1000)
    patience.rest = lambda _rest_s: pytest.fail("rested")
    for _ in range(20):
        patience.quietest(lambda: next(tries))


def test_whoever_has_no_tries_left_waits_before_a_second_one() -> None:
    """Trying again at once is for short disturbances; the share for it is spent here."""
    patience, tries = played(*[0.6] * 5, 0.0, 0.0)
    for _ in range(2):
        patience.quietest(lambda: next(tries))
    patience.wait_s = 100.0
    looked: list[int] = []
    patience.look = lambda _load_s: looked.append(next(tries))
    patience.rest = lambda _rest_s: None
    tried = patience.quietest(lambda: next(tries))
    assert looked == [5]
    assert tried.found == 6
    assert tried.spent.steal_share == 0.0

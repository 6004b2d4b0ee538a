"""Which clock times what."""

import time
from collections.abc import Iterator

import pytest
import torch

from calibrate.probes.session import Session, host_clock


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def session() -> Session:
    return Session(rank=0, world_size=1, device=torch.device("cpu"), control={}, data={})


@pytest.mark.usefixtures("num_threads")
def test_a_thread_that_does_not_have_the_processor_is_not_timed(session: Session) -> None:
    """Asleep or pushed aside: for its own clock that is the same."""
    torch.set_num_threads(1)
    (own_s,) = session.time_repeats(lambda: time.sleep(0.2), repeats=1)
    (joint_s,) = session.time_repeats(lambda: time.sleep(0.2), repeats=1, is_joint=True)
    assert own_s < 0.1
    assert joint_s >= 0.2


@pytest.mark.usefixtures("num_threads")
def test_several_threads_are_timed_by_the_clock_on_the_wall(session: Session) -> None:
    torch.set_num_threads(2)
    assert host_clock(is_joint=False) is time.perf_counter
    (found_s,) = session.time_repeats(lambda: time.sleep(0.05), repeats=1)
    assert found_s >= 0.05


@pytest.mark.usefixtures("num_threads")
def test_a_thread_at_work_is_timed(session: Session) -> None:
    """On a machine to itself both clocks agree; beside others its own shows less, never more."""
    torch.set_num_threads(1)
    matrix = torch.ones(256, 256)

    def work() -> None:
        for _ in range(20):
            matrix @ matrix

    work()
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    own_s = sum(session.time_repeats(work, repeats=5))
    cpu_s, wall_s = time.process_time() - cpu_started_s, time.perf_counter() - started_s
    assert own_s <= 1.01 * wall_s
    assert own_s == pytest.approx(cpu_s, rel=0.1)

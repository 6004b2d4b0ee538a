"""Compute beside an all-reduce on virtual GPUs, whose slowdown is known."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from calibrate.experiment import BUDGETS, Experiment
from calibrate.probes import compute
from calibrate.task import CollectiveTask, OverlapTask
from calibrate.virtual import Truth
from calibrate.virtual.gpu import Work
from perfmodel.units import KIB, MIB
from tests.virtual_ranks import Team, TeamSession


class Begun:
    """An all-reduce that was issued."""

    def __init__(self, session: TeamSession, size_bytes: int) -> None:
        work = Work(kind="collective", collective="all_reduce", size_bytes=size_bytes, group_size=2)
        self._gpu, self._end_s = session.gpu, session.gpu.execute(work)

    def wait(self) -> None:
        self._gpu.wait_for(self._end_s)


def product(session: TeamSession, width: int) -> Callable[[], object]:
    work = Work(kind="kernel", flop=2.0 * width**3, size_bytes=3 * 2 * width**2, dtype="bf16")
    return lambda: session.gpu.execute(work)


@pytest.mark.parametrize("name", ["nvlink-node", "balanced", "slow-pcie"])
def test_what_compute_loses_beside_an_all_reduce_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = Truth.read(name)
    monkeypatch.setattr(compute, "_product", product)
    team = Team(truth=truth, size=2)
    sessions = [TeamSession(team, rank) for rank in range(2)]

    def beside(session: TeamSession, **sizes: int) -> Any:
        width = session.agree(compute._device_width(session), world_size=2)
        return product(session, width), lambda: Begun(session, sizes["size_bytes"])

    monkeypatch.setattr(compute, "_beside", beside)
    task = OverlapTask(name="", round=0, world_size=2, size_bytes=32 * MIB, target_s=0.0)
    found = team.run(2, lambda rank: compute.measure_overlap(sessions[rank], task))[0]
    middle = {
        key: statistics.median(values_s)
        for key, values_s in found.model_dump().items()
        if key.endswith("_s")
    }
    # Long enough for the host to stay ahead, short enough to be counted; a slow GPU takes longer for the least.
    assert middle["compute_alone_s"] >= 0.9e-5
    if name == "nvlink-node":
        assert middle["compute_alone_s"] < 2.5e-5
    assert middle["comm_alone_s"] / middle["compute_alone_s"] > 5
    slowdown = truth.network.compute_slowdown
    ratio = middle["compute_together_s"] / middle["compute_alone_s"]
    assert ratio == pytest.approx(slowdown, rel=0.03)
    assert middle["comm_together_s"] == pytest.approx(middle["comm_alone_s"], rel=0.1)


def test_messages_between_gpus_last_many_products() -> None:
    experiment = Experiment(
        device_kind="cuda", models=("lenet",), world_sizes=(1, 2), budget=BUDGETS["quick"]
    )
    sizes = {
        task.size_bytes
        for tasks in experiment.rounds()
        for task in tasks
        if isinstance(task, OverlapTask)
    }
    assert all(25 * MIB <= size_bytes <= 256 * MIB for size_bytes in sizes)
    assert sizes


def test_a_collective_is_the_mean_of_many_back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of them costs one wait for the last rank and no launch; two ranks of unlike hosts agree."""
    truth = Truth.read("nvlink-node")
    team = Team(truth=truth, size=2)
    sessions = [TeamSession(team, rank) for rank in range(2)]
    num_begun = [0, 0]

    def begins(session: TeamSession, *_: str, **sizes: int) -> Any:
        def begin() -> Begun:
            num_begun[session.rank] += 1
            return Begun(session, sizes["size_bytes"])

        return [begin]

    monkeypatch.setattr(compute, "_begins", begins)
    task = CollectiveTask(
        name="", round=0, collective="all_reduce", world_size=2, size_bytes=KIB, target_s=0.0
    )
    found = team.run(2, lambda rank: compute.measure_collective(sessions[rank], task))
    true_s = truth.collective_s("all_reduce", KIB, 2)
    for times_s in found[0].durations_s:
        assert list(times_s) == [pytest.approx(true_s, rel=0.1)]
    assert min(num_begun) >= 12

"""What a profile is made of beside its fits: rates, collectives, names, and what is not known."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import pytest

from calibrate.fit.ddp import left_out_errors
from calibrate.fit.profile import _device_name, _draft, _rate, _undetermined, collective_profiles
from perfmodel.documents.observation import (
    PHASES,
    QUEUE_PROBE,
    CollectiveObservation,
    ComputeObservation,
    Observation,
    OverlapObservation,
    WorkloadObservation,
)
from perfmodel.layout import Synchronisation
from tests.calibrate.fit.synthetic import environment
from tests.calibrate.fit.test_device_streams import BARE
from tests.perfmodel.profiles import LIGHT, Machine, profile, setting_of
from tests.played_worker import step_observation


def exchange(
    size_bytes: int,
    *ranks_s: tuple[float, ...],
    world_size: int = 2,
    name: str = "all_reduce",
    stride: int = 1,
) -> CollectiveObservation:
    return CollectiveObservation(
        task="one",
        round=0,
        collective=name,
        world_size=world_size,
        size_bytes=size_bytes,
        stride=stride,
        durations_s=ranks_s,
    )


def probed(
    probe: str,
    shape: tuple[int, ...],
    durations_s: Iterable[float],
    *,
    flop: float = 0.0,
    moved_bytes: float = 0.0,
) -> ComputeObservation:
    return ComputeObservation(
        task=f"{probe} {shape}",
        round=0,
        probe=probe,
        dtype="fp32",
        shape=shape,
        flop=flop,
        moved_bytes=moved_bytes,
        durations_s=tuple(durations_s),
    )


def test_a_collective_takes_the_slowest_rank_or_behind_a_queue_the_mean_of_the_fastest() -> None:
    """Three repetitions of two ranks: slowest 3, 5 and 4 ms; means 3 and 10 / 3 ms."""
    observed = [exchange(64, (3e-3, 5e-3, 1e-3), (2e-3, 4e-3, 4e-3))]
    for back_to_back, time_s in ((False, 4e-3), (True, 3e-3)):
        [found] = collective_profiles(observed, back_to_back=back_to_back)
        assert found.points[0].time_s == pytest.approx(time_s)
        assert (found.collective, found.world_size, found.points[0].at) == ("all_reduce", 2, 64)


def test_collectives_are_kept_apart_by_kind_and_group() -> None:
    """Rounds of one size are means in log: 1 and 4 ms are 2 ms."""
    observed = [
        exchange(64, (1e-3,)),
        exchange(64, (4e-3,)),
        exchange(16, (1e-4,)),
        exchange(64, (7e-3,), world_size=4),
        exchange(64, (5e-3,), name="broadcast"),
    ]
    found = collective_profiles(observed, back_to_back=False)
    kinds = [(each.collective, each.world_size, len(each.points)) for each in found]
    assert kinds == [("all_reduce", 2, 2), ("all_reduce", 4, 1), ("broadcast", 2, 1)]
    assert [point.at for point in found[0].points] == [16, 64]
    assert found[0].points[1].time_s == pytest.approx(2e-3)


def test_rates_are_work_over_the_middle_time() -> None:
    found = _rate(probed("matmul", (4, 4), (1.0, 9.0, 2.0), flop=100.0, moved_bytes=60.0))
    assert (found.time_s, found.flop_per_s, found.bytes_per_s) == (2.0, 50.0, 30.0)


@pytest.mark.parametrize(
    ("facts", "kind", "name"),
    [
        ({"gpus": [{"name": "A"}, {"name": "B"}]}, "cuda", "A"),
        ({"gpus": []}, "cuda", "unknown CUDA device"),
        ({}, "cuda", "unknown CUDA device"),
        ({"virtual": {"name": "V"}}, "virtual", "V"),
        ({"cpu": {"model": "Zen"}}, "cpu", "one core of Zen"),
        ({"cpu": {"model": ""}}, "cpu", "one core of an unknown CPU"),
        ({}, "cpu", "one core of an unknown CPU"),
    ],
)
def test_a_device_is_called_as_its_driver_does(facts: dict[str, Any], kind: str, name: str) -> None:
    assert _device_name(facts, kind) == name


def observations(world_size: int) -> list[Observation]:
    """One rank alone, as many as there are without synchronisation, in three rounds."""
    kinds = [(1, Synchronisation.NONE), (world_size, Synchronisation.NO_SYNC)][:world_size]
    settings = [setting_of("light", ranks, 4, synchronisation=how) for ranks, how in kinds]
    steps = [step_observation(each, repetition=index) for each in settings for index in range(3)]
    return [WorkloadObservation(task="light", round=0, workload=LIGHT), *steps]


@pytest.mark.parametrize(
    ("world_size", "exchanges", "num_nodes", "unknown"),
    [
        (1, True, 1, ["no second rank", "only one node"]),
        (2, True, 1, ["only two ranks", "only one node"]),
        (2, False, 1, ["no second rank", "only one node"]),
        (4, True, 1, ["only one node"]),
        (4, True, 2, []),
    ],
)
def test_what_cannot_be_known_is_said(
    *, world_size: int, exchanges: bool, num_nodes: int, unknown: list[str]
) -> None:
    observed = observations(world_size)
    if exchanges and world_size > 1:
        observed.append(exchange(64, (1e-3,) * world_size, world_size=world_size))
        observed.append(exchange(64, (5e-3,) * 2, stride=world_size))
    facts = dict(environment("one").facts)
    draft = _draft(observed, facts)
    found = _undetermined(draft, num_nodes=num_nodes)
    assert len(found) == len(unknown)
    for said, begins in zip(found, unknown, strict=True):
        assert said.startswith(begins)
    counts = (draft.num_rounds, draft.ranks_per_node, draft.max_world_size)
    assert counts == (3, world_size, world_size)
    assert (draft.backend, draft.device_kind, draft.dispatch_s) == ("gloo", "cpu", 0.0)
    for groups, time_s in ((draft.collectives, 1e-3), (draft.between_nodes, 5e-3)):
        times_s = [point.time_s for group in groups for point in group.points]
        assert times_s == ([pytest.approx(time_s)] if exchanges and world_size > 1 else [])


@pytest.mark.parametrize(
    ("row_s", "device_kind", "is_said"),
    [(35e-6, "cuda", False), (60e-6, "cuda", True), (60e-6, "virtual", False)],
)
def test_events_that_a_late_host_hid_are_said(
    row_s: float, device_kind: Literal["cuda", "virtual"], *, is_said: bool
) -> None:
    """One kernel between two events took 3.5 us, the fastest tenth of rows of 17 of them less or more than 17 such."""
    rows = {1: [3.5e-6] * 20, 17: [*[row_s] * 3, *[170e-6] * 17]}
    observed = [probed(QUEUE_PROBE, (count,), times_s) for count, times_s in rows.items()]
    draft = _draft([*observations(1), *observed], dict(environment("one").facts))
    assert [rate.time_s for rate in draft.rates] == pytest.approx([3.5e-6, row_s])
    found = _undetermined(replace(draft, device_kind=device_kind), num_nodes=1)
    assert any(said.startswith("events of this device") for said in found) is is_said


def test_a_device_whose_streams_any_step_timed_is_asynchronous() -> None:
    draft = _draft([*observations(2), BARE], dict(environment("one").facts))
    assert (draft.device_kind, draft.backend, draft.asynchronous) == ("cuda", "nccl", True)


def test_overlap_is_kept_apart_by_group_and_size() -> None:
    """A speed beside the other is time alone over time together, the middle of a run, the mean of runs."""
    observed = [
        OverlapObservation(
            task="overlap",
            round=0,
            world_size=world_size,
            size_bytes=1024,
            compute_alone_s=(1.0, 1.0, 50.0),
            compute_together_s=(slower, slower, 50.0),
            comm_alone_s=(2.0,),
            comm_together_s=(4.0,),
        )
        for world_size, slower in ((2, 1.25), (4, 2.0), (2, 5.0))
    ]
    draft = _draft([*observations(4), *observed], dict(environment("one").facts))
    assert [each.world_size for each in draft.overlaps] == [2, 4]
    assert [each.compute_speed for each in draft.overlaps] == pytest.approx([0.4, 0.5])
    assert [each.comm_speed for each in draft.overlaps] == pytest.approx([0.5, 0.5])


def test_a_batch_that_is_left_out_is_read_from_its_neighbours() -> None:
    """Of 4, 16 and 64 the middle one: met where curves lie on a line, missed by half where its step took twice as long.

    Curves were drawn to that line. They alone count for a device with a queue, and where a batch has no step.
    """
    machine = profile(Machine())
    light, heavy = machine.workloads
    points = [point for name in PHASES for point in getattr(heavy.phases[0], name)]
    sums_s = {at: sum(p.time_s for p in points if p.at == at) for at in (4, 16, 64)}
    steps_s = sums_s | {16: 2 * sums_s[16]}
    steps = [replace(machine.steps[0], micro_batch=at, step_s=s) for at, s in steps_s.items()]
    slow = replace(machine, steps=tuple(steps))
    assert (light.workload.name, machine.steps[0].workload) == ("light", "heavy")
    assert left_out_errors(slow) == pytest.approx((0.0, -math.log(2)), abs=1e-12)
    for alone in (replace(slow, asynchronous=True), replace(slow, steps=slow.steps[1:])):
        assert left_out_errors(alone) == pytest.approx((0.0, 0.0), abs=1e-12)

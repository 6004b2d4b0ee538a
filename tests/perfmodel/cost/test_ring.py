"""Collectives of any group from those of two ranks."""

import numpy as np
import pytest

from perfmodel.cost.curve import CurveDraws
from perfmodel.cost.ring import RingAllReduce, tree_broadcast_time
from perfmodel.documents.prediction import Evidence
from perfmodel.documents.profile import CollectiveProfile, CurvePoint

LATENCY_S = 1e-3
S_PER_BYTE = 1e-6


def measured(world_size: int, *, factor: float = 1.0) -> CollectiveProfile:
    """A ring: 2 (n - 1) messages of 1 ms plus 1 us per byte, for messages of 100 to 10,000 B."""
    return CollectiveProfile(
        collective="all_reduce",
        world_size=world_size,
        points=tuple(
            CurvePoint(
                at=message * world_size,
                time_s=factor * 2 * (world_size - 1) * (LATENCY_S + message * S_PER_BYTE),
                relative_error=0.0,
            )
            for message in (100, 1000, 10_000)
        ),
    )


def ring(*profiles: CollectiveProfile, has_tree: bool = False, num_draws: int = 1) -> RingAllReduce:
    return RingAllReduce.sample(
        profiles, has_tree=has_tree, num_draws=num_draws, rng=np.random.default_rng(0)
    )


def time(all_reduce: RingAllReduce, size_bytes: int, world_size: int) -> float:
    values = all_reduce.time_s(size_bytes, world_size=world_size)
    return float(values[0])


@pytest.mark.parametrize(
    ("size_bytes", "world_size", "expected_ms"),
    [
        (4000, 2, 6.0),  # 2 messages of 2000 B: 2 * (1 + 2)
        (4000, 4, 12.0),  # 6 messages of 1000 B: 6 * (1 + 1)
        (4000, 8, 21.0),  # 14 messages of 500 B: 14 * (1 + 0.5)
        (40_000, 2, 42.0),  # 2 messages of 20,000 B, beyond the data: 2 * (1 + 20)
    ],
)
def test_a_ring_of_any_size_follows_from_two_ranks(
    size_bytes: int, world_size: int, expected_ms: float
) -> None:
    """2 (n - 1) messages of size / n bytes, each 1 ms + 1 us per byte."""
    assert time(ring(measured(2)), size_bytes, world_size) == pytest.approx(expected_ms / 1e3)


def test_one_rank_communicates_nothing() -> None:
    assert time(ring(measured(2)), 4000, 1) == 0.0


def test_group_sizes_that_disagree_are_averaged_and_widen_the_doubt() -> None:
    """Messages of 4 ranks cost 4 times those of 2: the geometric mean is 2 times, log sd log 2."""
    both = ring(measured(2), measured(4, factor=4.0), num_draws=4000)
    assert time(both, 4000, 2) == pytest.approx(0.012)
    assert np.log(both.message.time_s[1]).std() == pytest.approx(np.log(2), rel=0.05)
    assert both.largest_world_size == 4


def test_a_tree_is_taken_where_it_is_faster() -> None:
    """64 ranks, 6400 B. Ring: 126 messages of 100 B, 126 * 1.1 = 138.6 ms.

    Tree: 2 * 6 messages like the smallest (1.1 ms) = 13.2 ms, and twice 6400 B at the rate of the
    largest, 10,000 B in 11 ms: 12,800 * 1.1 us = 14.08 ms; together 27.28 ms.
    """
    assert time(ring(measured(2)), 6400, 64) == pytest.approx(0.1386)
    assert time(ring(measured(2), has_tree=True), 6400, 64) == pytest.approx(0.02728)


def test_a_ring_is_taken_where_it_is_faster() -> None:
    """2 ranks, 4000 B: the ring's 6 ms against 2 * 1.1 + 8000 * 1.1e-3 = 11 ms."""
    assert time(ring(measured(2), has_tree=True), 4000, 2) == pytest.approx(0.006)


def test_doubt_grows_with_every_doubling_beyond_the_data() -> None:
    """5 % per doubling: from 2 to 16 ranks are 3."""
    all_reduce = ring(measured(2), num_draws=4000)
    size_bytes = 16 * 1000
    values = all_reduce.time_s(size_bytes, world_size=16)
    assert np.log(values).std() == pytest.approx(0.15, rel=0.05)


@pytest.mark.parametrize(
    ("sizes_bytes", "world_size", "expected"),
    [
        ([4000], 2, Evidence.INTERPOLATED),
        ([200, 20_000], 2, Evidence.INTERPOLATED),  # the ends of what was measured
        ([4000, 199], 2, Evidence.EXTRAPOLATED),
        ([20_001, 4000], 2, Evidence.EXTRAPOLATED),
        ([6000], 3, Evidence.EXTRAPOLATED),  # no such group
    ],
)
def test_groups_and_messages_beyond_the_data_are_extrapolated(
    sizes_bytes: list[int], world_size: int, expected: Evidence
) -> None:
    """Two ranks exchange halves: 100 to 10,000 B are 200 to 20,000 B of gradients."""
    assert ring(measured(2)).evidence(sizes_bytes, world_size=world_size) is expected


@pytest.mark.parametrize(("world_size", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_broadcast_takes_as_many_rounds_as_doublings(world_size: int, rounds: int) -> None:
    """Every round doubles who has the data; 3 ms each."""
    points = [CurvePoint(at=at, time_s=0.003, relative_error=0.0) for at in (1, 1000)]
    rng = np.random.default_rng(0)
    curve = CurveDraws.sample(points, num_draws=1, rng=rng)
    values = tree_broadcast_time(curve, 100, world_size=world_size)
    assert float(values[0]) == pytest.approx(0.003 * rounds)


def test_a_larger_message_is_never_faster_whatever_the_groups_say() -> None:
    """Four ranks measured three times slower than two: their messages lie between those of two."""
    both = ring(measured(2), shifted := measured(4, factor=3.0))
    shifted_sizes = [point.at / 4 for point in shifted.points]
    sizes = sorted({100.0, 1000.0, 10_000.0, *shifted_sizes, 150.0, 5000.0})
    times = [float(both.message.read(size)[0]) for size in sizes]
    assert times == sorted(times)
    noisy = CollectiveProfile(
        collective="all_reduce",
        world_size=4,
        points=tuple(
            point.model_copy(update={"at": point.at * 1.5, "time_s": point.time_s / 4})
            for point in measured(4).points
        ),
    )
    merged = ring(measured(2), noisy)
    times = [float(value) for value in merged.message.time_s[:, 0]]
    assert times == sorted(times)

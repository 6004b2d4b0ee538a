"""Collectives of any group from measured ones."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from perfmodel.cost.collectives import bus_factor, message_bytes, num_messages
from perfmodel.cost.group_cost import GroupCost, _rising
from perfmodel.cost.network import sampled_cost
from perfmodel.errors import UsageError
from perfmodel.machine.measured import MeasuredCollective
from tests.perfmodel.profiles import timed_group

LATENCY_S = 1e-4
S_PER_BYTE = 1e-9
SIZES = tuple(4**power for power in range(5, 13))


def measured(world_size: int, *, power: float = 0.0, **others: Any) -> MeasuredCollective:
    """A ring whose 2 (n - 1) messages take 0.1 ms plus 1 ns per byte, times (n / 2) ** power."""
    slower = (world_size / 2) ** power
    return timed_group(world_size, lambda size: slower * ring_s(size, world_size), SIZES, **others)


def sampled(*groups: MeasuredCollective) -> GroupCost:
    return sampled_cost(groups, library="gloo", num_draws=1, rng=np.random.default_rng(0))


def ring_s(size_bytes: float, world_size: int) -> float:
    return 2 * (world_size - 1) * (LATENCY_S + size_bytes / world_size * S_PER_BYTE)


@pytest.mark.parametrize(
    ("collective", "ranks", "nodes", "library", "count", "share"),
    [
        ("all_reduce", 4, 1, "gloo", 6, 1.5),
        ("all_gather", 4, 1, "gloo", 3, 0.75),
        ("broadcast", 5, 1, "gloo", 3, 3.0),
        ("all_to_all", 4, 1, "gloo", 3, 0.75),
        ("all_to_all", 16, 2, "nccl", 15, 0.5),  # a half of the array stays in its node
        ("send_recv", 2, 1, "gloo", 1, 1.0),
        ("all_reduce", 16, 2, "nccl", 30, 1.0),  # two trees: a half of the array each, up and down
        ("all_reduce", 16, 2, "gloo", 30, 1.875),  # one ring, whatever it crosses
        ("all_reduce", 32, 4, "nccl", 62, 1.9375),
        ("all_gather", 16, 2, "nccl", 15, 0.9375),
    ],
)
def test_messages_and_bytes_of_a_collective(
    *, collective: str, ranks: int, nodes: int, library: str, count: int, share: float
) -> None:
    assert num_messages(collective, ranks) == count
    assert count * message_bytes(collective, 1.0, ranks, nodes, library) == pytest.approx(share)


@pytest.mark.parametrize("ranks", [2, 3, 8, 4096])
def test_reduce_scatter_and_all_gather_move_the_bytes_of_an_all_reduce(ranks: int) -> None:
    """Conservation of bytes, and busbw factors that equal the volume of a ring."""
    whole, *parts = (
        num_messages(name, ranks) * message_bytes(name, 1.0, ranks)
        for name in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert sum(parts) == pytest.approx(whole)
    assert bus_factor("all_reduce", ranks) == pytest.approx(whole)


@pytest.mark.parametrize(("size_bytes", "world_size"), [(2**14, 2), (2**20, 4), (2**22, 8)])
def test_a_ring_of_any_size_follows_from_two_ranks(size_bytes: int, world_size: int) -> None:
    found_s = float(sampled(measured(2)).group_s(size_bytes, world_size)[0])
    assert found_s == pytest.approx(ring_s(size_bytes, world_size))


def test_one_size_leaves_the_latency_of_a_message_to_belief() -> None:
    """1 GiB, all bandwidth: a ring of 32 sends hardly more than one of 16."""
    whole = timed_group(16, lambda _: 0.03, [2.0**30], nodes=2)
    four_s = float(sampled(whole).group_s(2**30, 32, nodes=4)[0])
    latency_s = 40e-6
    expected_s = 62 * latency_s + 1.9375 / 1.875 * (0.03 - 30 * latency_s)
    assert four_s == pytest.approx(expected_s, rel=1e-3)


def test_groups_of_different_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="16 ranks must all span as many nodes, got 2 and 4"):
        sampled(measured(16, nodes=2), measured(16, nodes=4))


def test_larger_messages_are_never_faster_even_if_groups_disagree() -> None:
    cost = sampled(measured(2), measured(4, power=-1.5), measured(8, power=0.7))
    for ranks in (2, 3, 4, 6, 8, 64):
        times_s = [float(cost.group_s(int(s), ranks)[0]) for s in np.geomspace(1, 1e9, 60)]
        assert times_s == sorted(times_s)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_pooling_is_isotonic_regression(values: list[float]) -> None:
    assert _rising(values) == pytest.approx(isotonic_regression(values).x.tolist(), abs=1e-9)

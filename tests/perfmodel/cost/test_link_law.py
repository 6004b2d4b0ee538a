"""Collectives of ranks with links of their own, from smaller groups."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import deviates
from perfmodel.cost.link_law import Factor, LinkCost, LinkLaw, Path, paths
from perfmodel.machine.measured import MeasuredCollective
from tests.perfmodel.profiles import timed_group

START_S: Final = 7e-6
P2P_S: Final = 1.3e-6
LINK: Final = 2e11
OWN: Final = 3e11
LATER_S: Final = 20e-6
HALF: Final = 3e6
SIZES: Final = tuple(2**power for power in range(9, 31))


def all_reduce_s(size_bytes: float, ranks: int) -> float:
    """A ring that launches once; every rank also handles its own array; large ones start later."""
    latencies_s = 2 * (ranks - 1) * P2P_S
    sent_s = size_bytes * (2 * (ranks - 1) / ranks / LINK + 1 / OWN)
    return START_S + latencies_s + sent_s + later_s(size_bytes, ranks)


def later_s(size_bytes: float, ranks: int) -> float:
    return LATER_S * size_bytes / (size_bytes + HALF * math.sqrt(ranks))


def group(
    ranks: int, *, slower: float = 1.0, sizes: Sequence[float] = SIZES, **others: Any
) -> MeasuredCollective:
    return timed_group(ranks, lambda size: slower * all_reduce_s(size, ranks), sizes, **others)


def cost_of(
    *groups: MeasuredCollective, library: str = "nccl", num_draws: int = 1, **others: Any
) -> LinkCost:
    return LinkCost.sample(
        groups, library=library, num_draws=num_draws, rng=np.random.default_rng(0), **others
    )


def test_a_library_of_one_protocol_takes_what_was_timed() -> None:
    cost = cost_of(group(2), group(4), library="mpi")
    assert float(cost.group_s(2**20, 4, nodes=1)[0]) == pytest.approx(
        all_reduce_s(2**20, 4), rel=0.02
    )


@pytest.mark.parametrize("size_bytes", [512, 2**20, 2**23, 2**30])
def test_eight_ranks_follow_from_two_and_four(size_bytes: int) -> None:
    """Launches once, a message more with every rank, own bytes with none: all told by two groups."""
    cost = cost_of(group(2), group(4))
    found_s = float(cost.group_s(size_bytes, 8, nodes=1)[0])
    assert found_s == pytest.approx(all_reduce_s(size_bytes, 8), rel=0.02)


def test_groups_inside_a_node_say_nothing_of_those_on_several() -> None:
    """A network of a quarter of the rate: 32 devices on 4 nodes follow from 16 on 2, as timed 8 in one or not."""
    across = group(16, slower=4.0, nodes=2)
    inside = timed_group(8, lambda size: size / 4e11, SIZES, collective="all_gather")
    alone, beside = cost_of(across), cost_of(group(8), across, others=[inside])
    for size in (2**20, 2**30):
        found_s, expected_s = (float(of.group_s(size, 32, nodes=4)[0]) for of in (beside, alone))
        assert found_s == pytest.approx(expected_s, rel=1e-6)
    assert float(beside.group_s(2**20, 8, nodes=1)[0]) == pytest.approx(all_reduce_s(2**20, 8))


def test_a_tree_is_taken_for_small_arrays_of_many_nodes() -> None:
    """1,024 nodes: 2,046 messages of a ring, 20 of a tree; on one node trees are chains."""
    cost = cost_of(group(2, nodes=2), group(4, nodes=4))
    small_s, large_s = (float(cost.group_s(size, 1024, nodes=1024)[0]) for size in (512, 2**40))
    assert small_s < 60 * P2P_S + 2 * START_S
    # Large arrays go round: a tree reaches a third of the bandwidth.
    assert large_s == pytest.approx(2**40 * (2 / LINK + 1 / OWN), rel=0.05)
    inside = cost_of(group(2), group(4))
    assert float(inside.group_s(512, 64, nodes=1)[0]) > 100 * P2P_S


def test_other_collectives_tell_a_single_group_from_links_and_latencies() -> None:
    """A slow link and free memory: all-gathers of the same two ranks say which of the two is slow."""

    def measured(collective: str, ranks: int) -> MeasuredCollective:
        (ring,) = paths(collective, ranks, 1, "nccl")
        return timed_group(
            ranks,
            lambda size: float(2e-5 + ring.steps * 4e-6 + size * ring.sent / 4e11),
            SIZES,
            collective=collective,
        )

    def error(*others: str, size: int) -> float:
        cost = LinkCost.sample(
            [measured("all_reduce", 2)],
            library="nccl",
            num_draws=1,
            rng=np.random.default_rng(0),
            others=[measured(name, 2) for name in others],
        )
        true_s = measured("all_reduce", 8).points[SIZES.index(size)].time_s
        return abs(float(cost.group_s(size, 8, nodes=1)[0]) / true_s - 1)

    kinds = ("all_gather", "reduce_scatter", "broadcast")
    for size in (2**10, 2**30):
        assert error(*kinds, size=size) < 0.6 * error(size=size)
    # A send between two ranks goes by channels of its own.
    assert error("send_recv", size=2**30) == error(size=2**30)


@pytest.mark.parametrize(
    ("library", "ranks", "nodes", "ways"),
    [
        # a ring; and from node to node a tree of 4 above chains of 8, both ways
        ("nccl", 32, 4, [(62, 62 / 32), (2 * (7 + 2), 2 / 0.368)]),
        # two nodes: two trees with a half each, so that a ring too sends half as much over the link
        ("nccl", 16, 2, [(30, 1.0), (2 * (7 + 1), 1 / 0.368)]),
        ("nccl", 3, 3, [(4, 4 / 3), (2 * 2, 2 / 0.368)]),
        ("nccl", 8, 1, [(14, 14 / 8)]),
        ("mpi", 24, 4, [(46, 46 / 24), (2 * 5, 46 / 24)]),
        ("mpi", 8, 1, [(14, 14 / 8), (2 * 3, 14 / 8)]),
        ("gloo", 8, 4, [(14, 14 / 8)]),
    ],
)
def test_ways_of_a_library(
    library: str, ranks: int, nodes: int, ways: list[tuple[float, float]]
) -> None:
    """Messages that follow one another, and arrays over a link."""
    found = paths("all_reduce", ranks, nodes, library)
    assert [each[:2] for each in found] == [pytest.approx(way) for way in ways]


def test_what_one_size_does_not_tell_is_as_published() -> None:
    """20 series of 2 to 8 GPUs: starts of 5 to 10 us, P2P of 0.8 to 1.4 us, 0.6 to 1.4 TB/s; slower between nodes."""
    inside, between = (
        np.exp(cost_of(group(8, nodes=nodes, sizes=[2**30])).law.logs[:, 0]) for nodes in (1, 8)
    )
    assert 5e-6 < inside[0] < 10e-6
    assert 0.8e-6 < inside[1] < 1.4e-6
    assert inside[0] < between[0] < 3 * inside[0]
    assert 5 * inside[1] < between[1] < 15 * inside[1]


def test_the_launch_is_counted_once_in_a_tier() -> None:
    """A tier of a hierarchy hands out the latency of a message, and its launch apart."""
    cost = cost_of(group(2), group(4))
    level = cost.level("nvlink", 4, crossings=3, inside_node=True)
    assert float(np.asarray(level.start_s)[0]) == pytest.approx(START_S, rel=0.2)
    assert float(level.latency_s[0]) == pytest.approx(P2P_S, rel=0.2)
    whole_s = level.start_s + 6 * (level.latency_s + level.transfer_s(2**26 / 4))
    assert float(np.asarray(whole_s)[0]) == pytest.approx(all_reduce_s(2**26, 4), rel=1e-6)


def test_a_broadcast_of_a_tier_goes_along_its_chain_once() -> None:
    """Three messages of 4 KiB behind one launch; with the launch and the messages of the law, transfer is the rest."""
    chains = (
        timed_group(n, partial(chain_s, ranks=n), SIZES, collective="broadcast") for n in (2, 4)
    )
    level = cost_of(*chains).level("nvlink", 4, crossings=3, inside_node=True)
    whole_s = level.start_s + 3 * level.latency_s + level.transfer_s(4096)
    assert float(np.asarray(whole_s)[0]) == pytest.approx(chain_s(4096, 4), rel=1e-6)


def chain_s(size_bytes: float, ranks: int) -> float:
    return 2 * START_S + (ranks - 1) * P2P_S + size_bytes / LINK


@given(
    slower=st.lists(st.floats(0.2, 5.0), min_size=3, max_size=3),
    ranks=st.sampled_from([2, 3, 4, 6, 8, 64]),
)
@settings(max_examples=30)
def test_larger_arrays_are_never_faster_even_if_groups_disagree(
    slower: list[float], ranks: int
) -> None:
    groups = [group(n, slower=s) for n, s in zip((2, 4, 8), slower, strict=True)]
    sizes = np.geomspace(64, 1e10, 80)[:, np.newaxis]
    times_s = cost_of(*groups).group_s(sizes, ranks)[:, 0]
    assert (np.diff(times_s) >= -1e-12 * times_s[1:]).all()


def test_collectives_that_were_not_measured_borrow_the_links() -> None:
    """An all-gather has half the messages and sends half as much; its launch and own bytes are whole."""
    cost = replace(cost_of(group(2), group(4), group(8)), collective="all_gather")
    expected_s = START_S + 7 * P2P_S + 2**26 * (7 / 8 / LINK + 1 / OWN) + later_s(2**26, 8)
    assert float(cost.group_s(2**26, 8)[0]) == pytest.approx(expected_s, rel=0.03)


def test_one_size_is_enough() -> None:
    """Start and latency are then believed; the rate is measured."""
    cost = cost_of(group(8, sizes=[2**30]))
    assert float(cost.group_s(2**30, 8)[0]) == pytest.approx(all_reduce_s(2**30, 8))
    assert math.isfinite(float(cost.group_s(512, 64, nodes=8)[0]))


def test_a_factor_lies_on_lines_between_its_sizes_and_stays_beyond_them() -> None:
    """Over the logarithm of the size; of one size it is the same everywhere."""
    at = np.array([1.0, 1e3, 1e4, 1e5, 1e9])
    pair = Factor(np.array([1e3, 1e5]), np.array([[0.2, 0.1], [0.6, 0.3]]))
    assert pair.at(at) == pytest.approx(
        np.array([[0.2, 0.1], [0.2, 0.1], [0.4, 0.2], [0.6, 0.3], [0.6, 0.3]])
    )
    one = Factor(np.array([1e3]), np.array([[0.2, 0.1]]))
    assert one.at(at) == pytest.approx(np.tile([0.2, 0.1], (5, 1)))


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (8, 1), (9, 2), (16, 2), (24, 3), (64, 8)])
def test_ranks_fill_nodes_as_those_that_were_measured(ranks: int, nodes: int) -> None:
    """Eight on a node; where it is said, as many nodes as there are ranks at most."""
    cost = cost_of(group(2), group(8))
    assert cost._spanned(ranks, None) == nodes
    assert cost._spanned(ranks, 4) == min(4, ranks)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (8, 2), (9, 3), (24, 6)])
def test_ranks_fill_several_nodes_as_those_that_were_measured(ranks: int, nodes: int) -> None:
    """Four on a node."""
    assert replace(given_cost(2, 8), nodes=(1, 2))._spanned(ranks, None) == nodes


#: Messages. [B]
FEW: Final = np.array([2.0**12, 2.0**16, 2.0**20, 2.0**24])
#: Three draws of the law: start, latency, link, own rate, later start, half size.
LAW: Final = LinkLaw(
    logs=np.log(
        [
            (7e-6, 1e-6, 2e11, 3e11, 2e-5, 3e6),
            (6e-6, 2e-6, 2e11, 4e11, 1e-5, 3e6),
            (9e-6, 1e-6, 1e11, 3e11, 2e-5, 1e6),
        ]
    ).T
)


def given_cost(*ranks: int, collective: str = "all_reduce") -> LinkCost:
    """Groups with random factors on a law, at sizes of their own."""
    rng = np.random.default_rng(sum(ranks))

    def factor(n: int) -> Factor:
        return Factor(FEW * n, rng.uniform(-0.3, 0.3, (len(FEW), 3)))

    return LinkCost(
        collective=collective,
        library="nccl",
        ranks=ranks,
        nodes=(1,) * len(ranks),
        factors=tuple(map(factor, ranks)),
        law=LAW,
        deviates=np.array([0.0, 1.0, -2.0]),
        between_sizes=np.array([0.0, 1.0, -1.0]),
    )


def by_law(size: float, way: Path, draw: int) -> float:
    start, p2p, link, own, later, half = np.exp(LAW.logs[:, draw])
    known_s = start + way.steps * p2p + size * (way.sent / link + 1 / own)
    return float(known_s + later * size / (size + half * math.sqrt(way.ranks)))


def rising_s(way: Path, sizes: Iterable[float], logs: Iterable[float], draw: int) -> list[float]:
    times = (by_law(s, way, draw) * math.exp(log) for s, log in zip(sizes, logs, strict=True))
    return list(itertools.accumulate(times, max))


def near(at: float, sizes: Iterable[float]) -> list[float]:
    """A bell curve over doublings of the size."""
    parts = [math.exp(-(math.log2(at / size) ** 2) / 2) for size in sizes]
    return [part / sum(parts) for part in parts]


def mixed(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(w * v for w, v in zip(weights, values, strict=True))


def read(factor: Factor, size: float, draw: int) -> float:
    return float(np.interp(math.log(size), np.log(factor.sizes_bytes), factor.logs[:, draw]))


def carried(cost: LinkCost, ranks: int, draw: int) -> list[float]:
    """The last group's factor, smoothed; groups differ by what those before it did, and 8 % of one more."""
    last, growth, found = cost.factors[-1], ranks / cost.ranks[-1], []
    for size in last.sizes_bytes:
        square = 0.08**2
        groups = zip(cost.ranks, cost.factors, strict=True)
        for (fewer, left), (more, right) in itertools.pairwise(groups):
            known = right.sizes_bytes
            changes = [(read(right, s, 0) - read(left, s, 0)) ** 2 for s in known]
            square += mixed(near(size, known), changes) / math.log2(more / fewer)
        spread = math.sqrt(math.log2(growth) * square / len(cost.ranks))
        moved = [each * math.sqrt(growth) for each in last.sizes_bytes]
        smooth = mixed(near(size, moved), [float(log) for log in last.logs[:, draw]])
        found.append(smooth + spread * float(cost.deviates[draw]))
    return found


@pytest.mark.parametrize("draw", [0, 1, 2])
def test_a_factor_is_carried_to_larger_groups(draw: int) -> None:
    cost = given_cost(2, 4, 16, collective="all_gather")
    (way,) = paths("all_gather", 64, 1, "nccl")
    sizes = cost.factors[-1].sizes_bytes
    logs = carried(cost, 64, draw)
    assert cost.group_s(sizes[:, np.newaxis], 64, nodes=1)[:, draw] == pytest.approx(
        rising_s(way, sizes, logs, draw)
    )
    assert cost.sizes_bytes == pytest.approx((FEW[0] * 16 / 15, FEW[-1] * 2))


def test_between_two_groups_factors_mix_by_their_logarithm() -> None:
    """Four of two and sixteen ranks: two thirds of the former."""
    cost = given_cost(2, 16)
    left, right = cost.factors
    (way,) = paths("all_reduce", 4, 1, "nccl")
    sizes = np.union1d(left.sizes_bytes, right.sizes_bytes)
    found_s = cost.group_s(sizes[:, np.newaxis], 4, nodes=1)
    for draw in range(3):
        logs = [read(left, s, draw) * 2 / 3 + read(right, s, draw) / 3 for s in sizes]
        assert found_s[:, draw] == pytest.approx(rising_s(way, sizes, logs, draw))


def test_points_tell_their_time_to_a_tenth() -> None:
    """Beliefs about links are wide: what a single size leaves open is the error of a point."""
    drawn = deviates(np.random.default_rng(0), 6, 4000)
    law = LinkLaw.fit("all_reduce", [group(8, sizes=[2**30])], "nccl", drawn)
    times_s = law.time_s(np.array([[2.0**30]]), paths("all_reduce", 8, 1, "nccl"))
    assert np.log(times_s).std() == pytest.approx(0.1, rel=0.1)


def test_what_the_law_misses_is_drawn_apart_from_its_constants() -> None:
    cost = cost_of(group(2), group(4), num_draws=2000)
    found = np.corrcoef([*cost.law.logs, cost.deviates, cost.between_sizes])[6:]
    assert max(np.abs(found[:, :6]).max(), abs(found[0, 7])) < 0.1

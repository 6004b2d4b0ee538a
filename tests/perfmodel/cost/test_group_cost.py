"""What laws of collectives share: fits, groups joined, neighbours, sizes between; messages of ranks that move bytes."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import CurveDraws, Samples, deviates
from perfmodel.cost.collectives import message_bytes, num_messages, work
from perfmodel.cost.group_cost import NUM_PARAMETERS, Law, MessageCost, MessageLaw, joined
from perfmodel.machine.measured import CurvePoint, MeasuredCollective
from perfmodel.statistics import FloatArray
from tests.perfmodel.profiles import timed_group


def points(*found: tuple[float, float, float]) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(at=at, time_s=t, relative_error=error) for at, t, error in found)


def group(ranks: int, *found: tuple[float, float, float]) -> MeasuredCollective:
    return MeasuredCollective(
        collective="all_reduce", world_size=ranks, num_nodes=1, points=points(*found)
    )


def test_repeated_sizes_are_averaged_and_larger_ones_are_never_faster() -> None:
    """1 and 4 ms at one size: 2 ms in log, as far apart as they are; two that agree halve the variance."""
    first = group(2, (1000.0, 1e-3, 0.01), (2000.0, 8e-3, 0.02), (4000.0, 2e-3, 0.03))
    again = group(2, (1000.0, 4e-3, 0.01), (2000.0, 8e-3, 0.01))
    larger, [found] = group(8, (1000.0, 1e-2, 0.1)), joined([first, again])
    assert [point.at for point in found.points] == [1000.0, 2000.0, 4000.0]
    # 8 and 2 ms at the next two: 4 ms each.
    assert [point.time_s for point in found.points] == pytest.approx([2e-3, 4e-3, 4e-3])
    errors = [point.relative_error for point in found.points]
    assert errors == pytest.approx([math.log(2), 0.02 / math.sqrt(2), 0.03])
    assert [each.world_size for each in joined([larger, first])] == [2, 8]


#: A line through four points: a straight problem, whose solution and covariance are known.
DESIGN = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 5.0]])


def line(missed: FloatArray, *, num_draws: int, num_points: int = 0) -> Law:
    def residuals(parameters: FloatArray) -> FloatArray:
        found: FloatArray = (
            DESIGN @ (parameters - np.array([[2.0], [-1.0]])) + missed[:, np.newaxis]
        )
        return found

    drawn = deviates(np.random.default_rng(0), 2, num_draws)
    starts = [np.array([0.0, 0.0]), np.array([9.0, 9.0])]
    return Law.fitted(residuals, starts, drawn, num_points=num_points)


def test_a_fit_finds_its_parameters_and_how_well_they_are_known() -> None:
    """The covariance of least squares is the inverse of the squared slopes."""
    found = line(np.zeros(4), num_draws=20_000)
    assert found.logs[:, 0] == pytest.approx([2.0, -1.0], abs=1e-6)
    assert found.nominal().logs.tolist() == found.logs[:, :1].tolist()
    known = np.linalg.inv(DESIGN.T @ DESIGN)
    assert np.cov(found.logs) == pytest.approx(known, abs=0.02)
    assert np.abs(found.logs - found.logs[:, :1]).max() <= 3.0


def test_what_a_law_misses_makes_its_parameters_less_certain() -> None:
    """Residuals beside any line, of one standard deviation less or more; that of priors does not count."""
    beside = np.array([1.0, -2.0, 1.0, 0.0])
    beside -= DESIGN @ np.linalg.lstsq(DESIGN, beside, rcond=None)[0]
    spreads = {
        (size, num_points): line(size * beside, num_draws=200, num_points=num_points).logs[1].std()
        for size in (1e-3, 0.3, 2.0)
        for num_points in (0, 4)
    }
    assert spreads[1e-3, 4] == spreads[1e-3, 0]
    assert spreads[0.3, 4] == pytest.approx(spreads[0.3, 0])
    rms = math.sqrt(float(np.mean((2.0 * beside) ** 2)))
    # The robust fit is not the least squares: it misses a little more.
    assert 0.95 * rms < spreads[2.0, 4] / spreads[2.0, 0] < 1.5 * rms


@functools.cache
def cost_of(*ranks: int, num_draws: int = 1) -> MessageCost:
    """Groups that took 1 ms and a nanosecond a byte, without error."""
    found = [
        group(n, *((size, 1e-3 + size * 1e-9, 0.0) for size in (1e3, 1e5, 1e7))) for n in ranks
    ]
    return MessageCost.sample(
        found, library="gloo", num_draws=num_draws, rng=np.random.default_rng(0)
    )


@pytest.mark.parametrize(
    ("ranks", "right", "weight"),
    [(1, 0, 1), (2, 0, 1), (4, 1, 1 / 2), (8, 1, 1), (16, 2, 1 / 2), (32, 2, 1), (64, 2, 1)],
)
def test_groups_between_two_lie_where_their_logarithm_does(
    ranks: int, right: int, weight: float
) -> None:
    assert cost_of(2, 8, 32).neighbours(ranks) == pytest.approx((right, weight))


def test_sizes_between_measured_ones_are_less_certain_and_those_beyond_are_no_business_of_it() -> (
    None
):
    """8 % one e-fold from the nearest, by the root of the distance."""
    cost = cost_of(2, num_draws=4000)
    known = np.array([1e3, 1e5, 1e7])
    at = np.array([1e3, 1e3 * math.e, 1e5 / math.sqrt(math.e), 1e7, 10.0, 1e12])
    found = np.log(cost.away_from_sizes(at, known))
    assert (found[:, 0] == 0).all()
    expected = [0, 0.08, 0.08 * math.sqrt(0.5), 0, 0, 0]
    assert found.std(axis=1) == pytest.approx(expected, rel=0.05, abs=1e-12)


def test_a_tier_hands_out_what_was_measured_inside_it() -> None:
    """Two messages of half the array each: latency is that of the smallest, 500 B."""
    level = cost_of(2).level("node", 2, crossings=1, inside_node=True)
    assert (level.tier, level.members, level.crossings) == ("node", 2, 1)
    assert (level.inside_node, level.is_measured) == (True, True)
    assert level.latency_s[0] == pytest.approx(0.5e-3 + 500e-9)
    assert level.transfer_s(5e6)[0] == pytest.approx((5e6 - 500) * 1e-9)
    whole = level.start_s + 2 * (level.latency_s + level.transfer_s(5e6))
    assert cost_of(2).group_s(1e7, 2)[0] == pytest.approx(float(np.asarray(whole)[0]))


def test_another_collective_goes_over_the_same_links() -> None:
    cost = replace(cost_of(2), collective="all_gather")
    assert cost.collective == "all_gather"
    assert cost.group_s(1e7, 2)[0] == pytest.approx(0.5e-3 + 5e6 * 1e-9)


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = tuple(4.0**power for power in range(5, 13))
#: Hop, byte of a link, handling a message, a byte of it, sharpness.
KNOWN = (1e-4, 4e-8, 3e-5, 1e-10, 7.0)


ENDS = ((1e-6, 1e-2), (1e-11, 1e-6), (1e-7, 1e-3), (1e-12, 1e-8), (0.1, 20))


def law(*parameters: float) -> MessageLaw:
    return MessageLaw(logs=np.log(parameters)[:, np.newaxis])


def whole_s(of: MessageLaw, collective: str, size_bytes: float, ranks: int) -> float:
    count = num_messages(collective, ranks)
    sent = np.array([[message_bytes(collective, size_bytes, ranks)]])
    return count * float(of.message_s(sent, work(collective, ranks))[0, 0])


@pytest.mark.parametrize(
    ("ranks", "loads"),
    [
        (2, 1),
        (4, 3),  # 0 sends to 1 and 2 at once: both have it after two; then 1 sends to 3
        (5, 4),  # 0 to 1, 2 and 4: after three; then 1 to 3
        (6, 5),  # 0 to 1, 2 and 4: after three; 1 to 3 and 5: after two more
        (8, 6),
        (16, 10),
    ],
)
def test_a_broadcast_waits_for_links_that_its_branches_share(ranks: int, loads: int) -> None:
    """All bandwidth: a copy of the array takes 1 s on a link."""
    wire = law(1e-12, 1e-3, 1e-12, 1e-15, 50.0)
    assert whole_s(wire, "broadcast", 1000, ranks) == pytest.approx(loads, rel=1e-4)


@pytest.mark.parametrize(
    ("collective", "handled"),
    [
        ("all_reduce", 2 * 8 * 7),
        ("reduce_scatter", 2 * 8 * 7),
        ("all_gather", 8 * 7),
        ("all_to_all", 8 * 7),
        ("broadcast", 7),
    ],
)
def test_messages_that_processors_handle(collective: str, handled: int) -> None:
    """8 ranks, all handling at 1 ms each: every message is handled one after another."""
    busy = law(1e-12, 1e-18, 1e-3, 1e-18, 50.0)
    assert whole_s(busy, collective, 8, 8) == pytest.approx(handled * 1e-3, rel=1e-4)


@settings(max_examples=200)
@given(
    collective=st.sampled_from(COLLECTIVES),
    parameters=st.tuples(*(st.floats(*ends) for ends in ENDS)),
    size=st.floats(1, 1e9),
    ranks=st.integers(2, 64),
    place=st.integers(0, 3),
)
def test_more_ranks_more_bytes_and_slower_parts_never_help(
    collective: str, parameters: tuple[float, ...], size: float, ranks: int, place: int
) -> None:
    base_s = whole_s(law(*parameters), collective, size, ranks)
    assert whole_s(law(*parameters), collective, size * 2, ranks) >= base_s * (1 - 1e-9)
    slower = [value * (2 if i == place else 1) for i, value in enumerate(parameters)]
    assert whole_s(law(*slower), collective, size, ranks) >= base_s * (1 - 1e-9)
    # A smaller message is rounded up to the same steps of the law by a part in a hundred thousand.
    assert whole_s(law(*parameters), collective, size, ranks + 1) >= base_s * (1 - 1e-4)


def measured(
    ranks: int, collective: str, rng: np.random.Generator, error: float
) -> list[CurvePoint]:
    count = num_messages(collective, ranks)
    noise = np.exp(error * rng.standard_normal(len(SIZES)))
    return [
        CurvePoint(
            at=message_bytes(collective, size, ranks),
            time_s=whole_s(law(*KNOWN), collective, size, ranks) / count * float(factor),
            relative_error=error,
        )
        for size, factor in zip(SIZES, noise, strict=True)
    ]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_sixteen_ranks_follow_from_two_four_and_eight(collective: str) -> None:
    """Links decide nearly everything up to 8 ranks; processors most of the small ones at 16."""
    rng = np.random.default_rng(0)
    groups = {ranks: measured(ranks, collective, rng, 0.01) for ranks in (2, 4, 8)}
    deviates: Samples = rng.standard_normal((NUM_PARAMETERS, 400))
    found = MessageLaw.fit(groups, collective, deviates)
    errors = [
        whole_s(found.nominal(), collective, size, 16) / whole_s(law(*KNOWN), collective, size, 16)
        for size in SIZES
    ]
    assert np.abs(np.log(errors)).mean() < 0.02
    assert np.abs(np.log(errors)).max() < 0.08


def away_from(
    parameters: tuple[float, ...], collective: str, ranks: tuple[int, ...]
) -> dict[int, float]:
    """How far a fit to times without noise of 2, 4 and 8 ranks is off at its worst size, by ranks."""
    known, sizes = law(*parameters), np.array(SIZES)[:, np.newaxis]
    groups = {
        n: [
            CurvePoint(at=size, time_s=float(time_s), relative_error=0.01)
            for size, [time_s] in zip(
                SIZES, known.message_s(sizes, work(collective, n)), strict=True
            )
        ]
        for n in (2, 4, 8)
    }
    found = MessageLaw.fit(groups, collective, np.zeros((NUM_PARAMETERS, 1)))
    ratios = {
        n: found.message_s(sizes, work(collective, n)) / known.message_s(sizes, work(collective, n))
        for n in ranks
    }
    return {n: float(np.abs(ratio - 1).max()) for n, ratio in ratios.items()}


@pytest.mark.parametrize(
    "parameters",
    [
        (1e-6, 1e-11, 3e-4, 5e-9, 7.0),
        (1e-6, 1e-12, 1e-4, 1e-10, 7.0),
        (1e-5, 1e-10, 1e-3, 5e-8, 3.0),
    ],
)
@pytest.mark.parametrize("collective", COLLECTIVES[::3])
def test_processors_that_decide_everything_are_found(
    collective: str, parameters: tuple[float, ...]
) -> None:
    """A fit that begins at links alone ends with half of the largest group's time."""
    assert max(away_from(parameters, collective, (2, 4, 8)).values()) < 0.01


@pytest.mark.parametrize(
    "parameters", [(9e-3, 6e-11, 7e-6, 8e-11, 0.3), (6e-6, 4e-8, 7e-6, 1e-11, 0.4)]
)
def test_links_and_processors_that_nearly_add_up_are_found(parameters: tuple[float, ...]) -> None:
    """A fit that begins with the smallest group's whole time as links is off by a quarter, at 16 ranks by half."""
    away = away_from(parameters, "all_reduce", (2, 4, 8, 16))
    assert away.pop(16) < 0.1
    assert max(away.values()) < 0.05


def test_what_stays_hidden_behind_links_stays_uncertain() -> None:
    """Handling a byte costs a hundredth of what its link takes: its draws spread, the link's do not."""
    rng = np.random.default_rng(0)
    groups = {ranks: measured(ranks, "all_reduce", rng, 0.01) for ranks in (2, 4)}
    found = MessageLaw.fit(groups, "all_reduce", rng.standard_normal((NUM_PARAMETERS, 400)))
    _, link, _, handled, _ = found.logs.std(axis=1)
    assert link < 0.05
    assert handled > 1.0


#: Of 8 ranks: arrays that pass the busiest link, and messages that wait for one another.
@pytest.mark.parametrize(
    ("collective", "arrays", "rounds"),
    [
        ("all_reduce", 14 / 8, 14),
        ("all_gather", 7 / 8, 7),
        ("reduce_scatter", 14 / 8, 14),  # gloo reduces all, and keeps a part
        ("all_to_all", 7 / 8, 1),  # all leave at once
        ("broadcast", 6, 3),
        ("send_recv", 1, 1),
    ],
)
def test_what_passes_a_link_and_what_waits(collective: str, arrays: float, rounds: int) -> None:
    wire = law(1e-12, 1e-3, 1e-12, 1e-15, 50.0)
    assert whole_s(wire, collective, 1000, 8) == pytest.approx(arrays, rel=1e-4)
    far = law(1e-3, 1e-18, 1e-12, 1e-18, 50.0)
    assert whole_s(far, collective, 1000, 8) == pytest.approx(rounds * 1e-3, rel=1e-4)


def test_between_two_groups_what_either_of_them_was_timed_at_counts() -> None:
    """Two ranks at 1 and 4 KB, eight at 1, 2 and 16: at four ranks messages of all these sizes."""

    groups = [
        timed_group(2, lambda _: 2e-3, [2e3, 8e3]),
        timed_group(8, lambda _: 14e-3, [8e3, 16e3, 128e3]),
    ]
    cost = MessageCost.sample(groups, library="gloo", num_draws=1, rng=np.random.default_rng(0))
    sizes, times_s, _ = cost._times(4)
    assert sizes.tolist() == [1e3, 2e3, 4e3, 16e3]
    assert times_s[0] == pytest.approx(1e-3, rel=0.5)


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_messages_of_any_group_by_the_law_and_the_groups_beside_it(ranks: int) -> None:
    """Three draws; between two groups by the logarithm of their number, beyond both as the law grows."""
    drawn = (KNOWN, (2e-4, 2e-8, 1e-5, 2e-10, 1.0), (1e-5, 4e-8, 6e-5, 1e-10, 3.0))
    sizes, rng = np.array([1e2, 1e4, 1e6]), np.random.default_rng(0)
    shape = (len(sizes), len(drawn))
    times_s = {n: np.outer([1e-3, 4e-3, 9e-2], rng.uniform(1, 2, shape[1])) * n for n in (2, 8)}
    cost = MessageCost(
        collective="all_gather",
        library="gloo",
        ranks=(2, 8),
        between_sizes=np.zeros(shape[1]),
        curves=tuple(CurveDraws(sizes, each_s, np.zeros(shape[1])) for each_s in times_s.values()),
        law=MessageLaw(logs=np.log(drawn).T),
    )

    def by_law(n: int, size: float, draw: int) -> float:
        p2p, each, handling, each_handled, sharpness = drawn[draw]
        link, host, k = p2p + each * size, n * (handling + each_handled * size), 1 + sharpness
        return float((link**k + host**k) ** (1 / k) * (1 + 1e-6 * math.log1p(size)))

    share = {2: 0.0, 4: 0.5, 8: 1.0, 32: 1.0}[ranks]
    expected_s = np.ones(shape)
    for place, draw in itertools.product(*map(range, shape)):
        for n, part in ((2, 1 - share), (8, share)):
            grown = by_law(ranks, sizes[place], draw) / by_law(n, sizes[place], draw)
            expected_s[place, draw] *= (times_s[n][place, draw] * grown) ** part
    found_s = cost.group_s(sizes[:, np.newaxis] * ranks, ranks)
    assert found_s == pytest.approx((ranks - 1) * expected_s)
    start_s, latency_s, transfer_s = cost.message(ranks, nodes=None)
    assert start_s == 0.0
    assert latency_s == pytest.approx(expected_s[0])
    assert transfer_s(1e4) == pytest.approx(expected_s[1] - expected_s[0])
    assert cost.sizes_bytes == (1e2, 1e6)

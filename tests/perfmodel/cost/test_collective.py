"""Collectives of any group from measured ones."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.collective import CollectiveCost
from perfmodel.cost.collective_law import PARAMETERS, Law, Points
from perfmodel.cost.collective_steps import Algorithm, bus_factor, steps, volume
from perfmodel.documents.collectives import MeasuredCollective
from perfmodel.documents.prediction import Evidence
from perfmodel.documents.profile import CurvePoint

LATENCY_S = 1e-4
S_PER_BYTE = 1e-9
SIZES = tuple(4**power for power in range(5, 13))


def measured(
    world_size: int, *, power: float = 0.0, error: float = 0.0, collective: str = "all_reduce"
) -> MeasuredCollective:
    """A ring whose 2 (n - 1) messages take 0.1 ms plus 1 ns per byte, times (n / 2) ** power."""
    return MeasuredCollective(
        collective=collective,
        world_size=world_size,
        num_nodes=1,
        points=tuple(
            CurvePoint(
                at=size,
                time_s=2
                * (world_size - 1)
                * (LATENCY_S + size / world_size * S_PER_BYTE)
                * (world_size / 2) ** power,
                relative_error=error,
            )
            for size in SIZES
        ),
    )


def fitted(
    *groups: MeasuredCollective, library: str = "gloo", num_draws: int = 1
) -> CollectiveCost:
    return CollectiveCost.sample(
        groups, library=library, num_draws=num_draws, rng=np.random.default_rng(0)
    )


def ring_s(size_bytes: float, world_size: int) -> float:
    return 2 * (world_size - 1) * (LATENCY_S + size_bytes / world_size * S_PER_BYTE)


@pytest.mark.parametrize(
    ("algorithm", "collective", "ranks", "num_steps", "share"),
    [
        (Algorithm.RING, "all_reduce", 4, 6, 1.5),
        (Algorithm.RING, "all_gather", 4, 3, 0.75),
        (Algorithm.HALVING_DOUBLING, "all_reduce", 8, 6, 1.75),
        (Algorithm.TREE, "all_reduce", 8, 6, 2.0),
        (Algorithm.TREE, "broadcast", 5, 3, 3.0),
        (Algorithm.NVLS, "all_reduce", 8, 2, 1.0),
        (Algorithm.DIRECT, "all_to_all", 4, 3, 0.75),
        (Algorithm.DIRECT, "send_recv", 2, 1, 1.0),
        (Algorithm.RING, "all_reduce", 1, 0, 0.0),
    ],
)
def test_steps_and_bytes_of_the_algorithms(
    algorithm: Algorithm, collective: str, ranks: int, num_steps: float, share: float
) -> None:
    assert float(steps(algorithm, collective, ranks)) == num_steps
    assert float(volume(algorithm, collective, ranks)) == pytest.approx(share)


@given(ranks=st.integers(2, 4096))
def test_reduce_scatter_and_all_gather_move_the_bytes_of_an_all_reduce(ranks: int) -> None:
    """Conservation of bytes, and busbw factors that equal the volume of a ring."""
    whole = float(volume(Algorithm.RING, "all_reduce", ranks))
    parts = [
        float(volume(Algorithm.RING, name, ranks)) for name in ("reduce_scatter", "all_gather")
    ]
    assert sum(parts) == pytest.approx(whole)
    assert float(bus_factor("all_reduce", ranks)) == pytest.approx(whole)


@pytest.mark.parametrize(("size_bytes", "world_size"), [(2**14, 2), (2**20, 4), (2**22, 8)])
def test_a_ring_of_any_size_follows_from_two_ranks(size_bytes: int, world_size: int) -> None:
    found_s = float(fitted(measured(2)).time_s(size_bytes, world_size=world_size)[0])
    assert found_s == pytest.approx(ring_s(size_bytes, world_size), rel=2e-3)


def test_ranks_that_share_processors_are_recognised_by_their_groups() -> None:
    """2, 4 and 8 ranks whose times grow by one more power of n; predicted at 16."""
    cost = fitted(*(measured(n, power=1.0, error=0.01) for n in (2, 4, 8)))
    growth = cost.fitted.parameters[[PARAMETERS.index("latency_growth")]]
    assert float(growth[0]) == pytest.approx(1.0, abs=0.03)
    found_s = float(cost.time_s(2**20, world_size=16)[0])
    assert found_s == pytest.approx(8 * ring_s(2**20, 16), rel=0.03)


def test_one_rank_communicates_nothing() -> None:
    assert fitted(measured(2)).time_s(4000, world_size=1)[0] == 0.0


def test_groups_of_different_collectives_are_refused() -> None:
    with pytest.raises(ValueError, match="must be of one collective"):
        fitted(measured(2), measured(2, collective="broadcast"))


def test_larger_messages_are_never_faster_even_if_groups_disagree() -> None:
    cost = fitted(measured(2), measured(4, power=-1.5), measured(8, power=0.7), num_draws=50)
    times_s = np.stack([cost.time_s(int(s), world_size=4) for s in np.geomspace(1, 1e9, 200)])
    assert (np.diff(times_s, axis=0) >= 0).all()


def test_doubt_grows_beyond_the_largest_group() -> None:
    cost = fitted(measured(2, error=0.01), num_draws=2000)
    spreads = [np.log(cost.time_s(2**20, world_size=n)).std() for n in (2, 4, 16, 256)]
    assert all(a < b for a, b in itertools.pairwise(spreads))
    assert spreads[0] < 0.02
    assert spreads[2] > 0.15
    assert cost.evidence(2) is Evidence.INTERPOLATED
    assert cost.evidence(3) is Evidence.EXTRAPOLATED


def test_regimes_are_where_one_side_is_ten_times_the_other() -> None:
    """2 ranks: latency 0.2 ms, transfer 1 ns per byte; the sides are equal at 200 kB."""
    regimes = fitted(measured(2)).regimes(2)
    assert regimes.latency_until_bytes == pytest.approx(2e4, rel=0.12)
    assert regimes.bandwidth_from_bytes == pytest.approx(2e6, rel=0.12)
    assert set(regimes.algorithm_of) == {Algorithm.RING}


def parameters(**changed: float) -> np.ndarray:
    values = dict.fromkeys(PARAMETERS, 0.0) | {
        "log_latency_s": np.log(LATENCY_S),
        "log_s_per_byte": np.log(S_PER_BYTE),
        "log_base_s": -30.0,
    }
    return np.array([(values | changed)[name] for name in PARAMETERS])


def test_the_library_takes_a_tree_for_small_messages_of_many_ranks() -> None:
    law = Law(collective="all_reduce", algorithms=(Algorithm.RING, Algorithm.TREE))
    small, large = (Points.of(size, ranks=64) for size in (1024, 2**30))
    assert int(law.fastest(parameters(), small)) == 1
    assert int(law.fastest(parameters(), large)) == 0


@settings(max_examples=60)
@given(
    size=st.floats(1, 1e10),
    ranks=st.integers(2, 4096),
    nodes=st.integers(1, 64),
    name=st.sampled_from(["log_latency_s", "log_s_per_byte", "log_transfer_between_ratio"]),
    norm=st.floats(-0.5, 1.5),
)
def test_laws_of_time(size: float, ranks: int, nodes: int, name: str, norm: float) -> None:
    """Monotone in size, latency, bandwidth and ranks; one more tier never helps."""
    law = Law(collective="all_reduce", algorithms=(Algorithm.RING,))
    ranks *= nodes
    at = Points.of(size, ranks=ranks, nodes=nodes)
    base = float(law.log_time(parameters(log_norm=norm), at))
    slack = 1e-9
    assert float(law.log_time(parameters(log_norm=norm, **worse(name)), at)) >= base - slack
    bigger = Points.of(size * 2, ranks=ranks, nodes=nodes)
    assert float(law.log_time(parameters(log_norm=norm), bigger)) >= base - slack
    more = Points.of(size, ranks=ranks + nodes, nodes=nodes)
    assert float(law.log_time(parameters(log_norm=norm), more)) >= base - slack
    flat = Points.of(size, ranks=ranks, nodes=1)
    assert base >= float(law.log_time(parameters(log_norm=norm), flat)) - slack


def worse(name: str) -> dict[str, float]:
    start = dict(zip(PARAMETERS, parameters(), strict=True))[name]
    return {name: start + 0.7}

"""Collectives of a profile, alone and on a cluster around it."""

import numpy as np
import pytest

from perfmodel.cost.model import CostModel
from perfmodel.cost.network import Network
from perfmodel.documents.prediction import Evidence
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.parallelism.strategy import Setting
from perfmodel.predictor import Predictor
from perfmodel.sweep import Grid, sweep
from perfmodel.topology.cluster import Cluster, SlowDevice, SlowLink, Tier, Traffic
from tests.perfmodel.profiles import MIB, Machine, message_time, profile

NODE = Tier(name="node", of="device", count=4, link_bytes_per_s=1e9, latency_s=1e-4)
FABRIC = Tier(name="fabric", of="node", count=4, link_bytes_per_s=2e8, latency_s=9e-4)
SETTING = Setting(workload="heavy", world_size=16, micro_batch=16, bucket_cap_mb=100)


def cluster(**changes: tuple[object, ...]) -> Cluster:
    return Cluster(name="small", tiers=(NODE, FABRIC), **changes)  # type: ignore[arg-type]


def network(machine: Machine, of: Cluster | None = None, *, num_draws: int = 1) -> Network:
    return CostModel(profile(machine), num_draws=num_draws, seed=0, cluster=of).network


def step_s(of: Cluster | None, setting: Setting = SETTING) -> float:
    predictor = Predictor(profile(Machine()), cluster=of)
    return float(predictor.step(predictor.workload("heavy"), setting).step_s[0])


def test_the_measured_tier_takes_its_messages_from_the_profile() -> None:
    """Inside the node the file says nothing: 4 ranks send 6 messages of a quarter."""
    machine = Machine()
    alone_s = network(machine).all_reduce_s(4 * MIB, world_size=4)
    inside_s = network(machine, cluster()).all_reduce_s(4 * MIB, world_size=4)
    assert float(inside_s[0]) == pytest.approx(float(alone_s[0]))
    assert float(inside_s[0]) == pytest.approx(6 * message_time(machine, MIB))


def test_a_ring_between_nodes_waits_for_the_link_of_the_file() -> None:
    """16 ranks, 16 MiB: 24 messages of 0.1 ms, 6 of 1 ms, and 30 MiB at 0.2 GB/s."""
    found = network(Machine(), cluster())
    whole_s = 24 * 1e-4 + 6 * 1e-3 + 30 * MIB / 2e8
    # The smallest message of the profile, 128 B, counts as latency.
    assert float(found.all_reduce_s(16 * MIB, world_size=16)[0]) == pytest.approx(whole_s, rel=1e-3)
    assert found.binding(16 * MIB, world_size=16) == "fabric (bandwidth, ring of 4)"
    assert found.evidence([16 * MIB], world_size=16) is Evidence.ASSUMED
    assert found.evidence([MIB], world_size=2) is Evidence.INTERPOLATED


@pytest.mark.parametrize(
    ("sizes_bytes", "world_size", "expected"),
    [
        ([256, 4**13], 2, Evidence.INTERPOLATED),  # the ends of what was measured
        ([MIB, 255], 2, Evidence.EXTRAPOLATED),
        ([4**13 + 1], 2, Evidence.EXTRAPOLATED),
        ([MIB], 3, Evidence.EXTRAPOLATED),  # no such group
    ],
)
def test_groups_and_messages_beyond_the_data_are_extrapolated(
    sizes_bytes: list[int], world_size: int, expected: Evidence
) -> None:
    assert network(Machine()).evidence(sizes_bytes, world_size=world_size) is expected


def test_links_that_only_a_file_tells_are_more_doubtful() -> None:
    machine = Machine(relative_error=0.01)
    measured, assumed = (
        np.log(network(machine, of, num_draws=2000).all_reduce_s(16 * MIB, world_size=16)).std()
        for of in (None, cluster())
    )
    assert assumed > 0.25 > measured


def test_ranks_on_one_machine_say_nothing_about_machines_with_one_device() -> None:
    rack = Tier(name="rack", of="device", count=16, link_bytes_per_s=1e8, latency_s=1e-3)
    found = network(Machine(), Cluster(name="rack", tiers=(rack,)))
    assert float(found.all_reduce_s(2 * MIB, world_size=2)[0]) == pytest.approx(
        2 * (1e-3 + MIB / 1e8)
    )
    assert found.evidence([MIB], world_size=2) is Evidence.ASSUMED


def test_what_ifs_lengthen_the_step() -> None:
    plain_s = step_s(cluster())
    slow_link = cluster(slow_links=(SlowLink(tier="fabric", member=3, factor=0.5),))
    slow_device = cluster(slow_devices=(SlowDevice(device=15, factor=1.5),))
    busy = cluster(traffic=(Traffic(tier="fabric", bytes_per_s=1e8),))
    shared = cluster(traffic=(Traffic(tier="fabric", jobs=1),))
    for worse in (slow_link, slow_device, busy, shared):
        assert step_s(worse) > plain_s
    assert step_s(None) < plain_s
    # Half the link either way.
    assert step_s(slow_link) == pytest.approx(step_s(busy))


def test_more_devices_than_the_cluster_has_are_not_feasible() -> None:
    with pytest.raises(NotFeasible, match="at most 16, all that small has, got 17"):
        step_s(cluster(), Setting(workload="heavy", world_size=17, micro_batch=16))


def test_a_node_smaller_than_the_measured_one_does_not_add_up() -> None:
    pair = Cluster(name="pair", tiers=(NODE, FABRIC))
    with pytest.raises(UsageError, match="at least the 5 ranks per node of the profile, got 4"):
        Predictor(profile(Machine(world_size=5)), cluster=pair)


@pytest.mark.parametrize("of", [None, cluster()])
@pytest.mark.parametrize("machine", [Machine(), Machine(compute_speed=0.6, comm_speed=0.7)])
def test_a_sweep_says_what_single_predictions_say(of: Cluster | None, machine: Machine) -> None:
    predictor = Predictor(profile(machine), cluster=of)
    workload = predictor.workload("heavy")
    grid = Grid(
        world_sizes=[2, 16],
        micro_batches=[4, 16, 32],
        bandwidths=[0.5, 1.0, 2.0],
        bucket_caps_mb=[None, 4.0],
    )
    found = sweep(profile(machine), workload, grid, cluster=of)
    assert found.shape == (2, 3, 3, 2)
    for i, n in enumerate(grid.world_sizes):
        for j, batch in enumerate(grid.micro_batches):
            for k, cap in enumerate(grid.bucket_caps_mb):
                setting = Setting(
                    workload="heavy", world_size=n, micro_batch=batch, bucket_cap_mb=cap
                )
                expected = float(predictor.step(workload, setting).step_s[0])
                assert found[i, j, 1, k] == pytest.approx(expected)
    assert (np.diff(found, axis=2) <= 1e-12).all()


def test_an_empty_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one value"):
        Grid(world_sizes=[], micro_batches=[1])


def test_strong_and_weak_scaling_reach_16384_devices() -> None:
    large = Cluster(
        name="large",
        tiers=(NODE, Tier(name="f", of="node", count=4096, link_bytes_per_s=1e9, latency_s=1e-5)),
    )
    setting = Setting(workload="heavy", world_size=16384, micro_batch=4)
    assert step_s(large, setting) > step_s(large, SETTING) / 16

"""A cluster that answers at once, from a known law and the product's own simulation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from perfmodel.engine.simulate import simulate
from perfmodel.errors import MeasurementFailed
from validate.testbed import campaign
from validate.testbed.all_reduce import ShapedRing, ring_bytes
from validate.testbed.campaign import Cluster
from validate.testbed.ddp import Calibration, TrainingCosts
from validate.testbed.links import BUSY, STEAL, links
from validate.testbed.records import CollectiveSetting, Job, TrainingSetting

NUM_CORES = 2


def serve(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns run on a played cluster, with the rights that it needs."""

    @contextmanager
    def server() -> Iterator[Cluster]:
        yield cluster

    monkeypatch.setattr(campaign, "running_server", server)
    monkeypatch.setattr(campaign, "refuse_without_rights", lambda _: None)


def known_ring() -> ShapedRing:
    def one(value: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([value])

    return ShapedRing(
        overhead=one(1.01),
        message_bytes=one(500.0),
        burst_bytes=one(70_000.0),
        launch_s=one(4e-4),
        p2p_s=one(1e-4),
        launch_cpu_s=one(4e-4),
        message_cpu_s=one(3.75e-5),
        byte_cpu_s=one(1e-9),
    )


def known() -> Calibration:
    return Calibration(
        ring=known_ring(),
        step_cpu_s=1e-3,
        layer_cpu_s=2e-4,
        byte_cpu_s=4e-10,
        residual=0.002,
        num_cores=NUM_CORES,
        num_draws=1,
    )


@dataclass(slots=True)
class PlayedCluster:
    """Plays jobs by arithmetic; fails when asked for more than it may play."""

    at_most: int = 10_000
    played: list[str] = field(default_factory=list)

    def play(self, job: Job) -> dict[str, Any]:
        if len(self.played) >= self.at_most:
            raise MeasurementFailed("played cluster: enough")
        self.played.append(job.setting.name)
        if isinstance(job.setting, CollectiveSetting):
            copies = job.setting.fabric.num_ranks * job.setting.copies
            return _reply([_collective_rank(job.setting)] * copies)
        assert isinstance(job.setting, TrainingSetting)
        return _reply(_training_ranks(job.setting))


def _reply(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"started_utc": 0.0, "is_realtime": True, "ranks": ranks}


def moments(
    window_s: float, cpu_s: float, sent: dict[str, float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    nothing = dict.fromkeys(sent, 0.0)
    before = {"counters": nothing | {BUSY: 0.0, STEAL: 0.0}, "cpu_s": 0.0, "at_s": 0.0}
    after = {"counters": sent | {BUSY: window_s, STEAL: 0.0}, "cpu_s": cpu_s, "at_s": window_s}
    return before, after


def _collective_rank(setting: CollectiveSetting) -> dict[str, Any]:
    ring, fabric = known_ring(), setting.fabric
    before, after = moments(1.0, 0.1, dict.fromkeys(links(fabric), 0.0))
    sizes = []
    for size_bytes in setting.sizes_bytes:
        duration_s = float(
            ring.time_s(size_bytes, fabric, num_cores=NUM_CORES, burst_s=ring.burst_s(fabric))[0]
        )
        num_ranks = fabric.num_ranks
        cpu_s = float(ring.cpu_s(size_bytes, num_ranks)[0])
        if setting.pause_s == 0:
            duration_s = float(2 * ring.p2p_s[0])
        starts_s = [float(number) for number in range(setting.repeats)]
        ends_s = [start_s + duration_s for start_s in starts_s]
        sizes.append({"starts_s": starts_s, "ends_s": ends_s, "cpu_s": cpu_s / num_ranks})
    return {"before": before, "after": after, "sizes": sizes}


def simulated_s(costs: TrainingCosts) -> float:
    """One step of all ranks, by the product's simulation."""
    num_ranks = costs.setting.fabric.num_ranks
    return simulate(costs.program, np.tile(costs.durations_s[:, 0], (num_ranks, 1))).step_s


def _training_ranks(setting: TrainingSetting) -> list[dict[str, Any]]:
    costs = TrainingCosts(setting, known())
    cpu_step_s = float(costs.cpu_s()[0])
    step_s = max(simulated_s(costs), cpu_step_s / NUM_CORES / 0.95)
    num_steps = setting.num_steps
    ends_s = [step_s * step for step in range(num_steps + 1)]
    num_ranks = setting.fabric.num_ranks
    payload = ring_bytes(setting.model.gradient_bytes, num_ranks)
    num_messages = 2 * (num_ranks - 1) * len(costs.all_reduces)
    message_bytes = num_messages * float(known_ring().message_bytes[0])
    sent = dict.fromkeys(links(setting.fabric), (1.01 * payload + message_bytes) * num_steps)
    before, after = moments(ends_s[-1], cpu_step_s * num_steps / num_ranks, sent)
    return [
        {
            "before": before,
            "after": after,
            "ends_s": ends_s,
            "late_s": [1e-5],
            "bucket_bytes": [o.size_bytes for o in costs.all_reduces.values()] or [1],
        }
    ] * num_ranks

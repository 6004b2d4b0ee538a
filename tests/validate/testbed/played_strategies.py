"""A cluster that answers strategies at once, from a known law and the product's own simulation."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perfmodel.documents.testbed import CollectiveSetting, Job, StrategySetting
from perfmodel.errors import MeasurementFailed
from tests.validate.testbed.played import NUM_CORES, PlayedCluster, known_ring, moments
from validate.testbed.ring import ShapedRing, link_rates
from validate.testbed.strategies import (
    BACK_TO_BACK,
    FAMILIES,
    HostWork,
    StrategyCalibration,
    StrategyCosts,
)

PAIR_GATHER = 1.5
WORK = HostWork(pass_s=4e-4, byte_s=5e-10)


def gloo_ring() -> ShapedRing:
    return ShapedRing(**{name: np.array([v]) for name, v in known_ring().nominal().items()})


def known() -> StrategyCalibration:
    return StrategyCalibration(
        ring=gloo_ring(),
        pair_gather=PAIR_GATHER,
        hosts=dict.fromkeys(FAMILIES, WORK),
        residuals=dict.fromkeys(FAMILIES, 0.0),
        num_cores=NUM_CORES,
        num_draws=1,
    )


@dataclass(slots=True)
class PlayedStrategies:
    """Plays jobs by arithmetic; fails when asked for more than it may play."""

    at_most: int = 10_000
    slowness: float = 1.0
    """Strategies on more than two ranks take this much longer than the law says."""
    played: list[str] = field(default_factory=list)
    others: PlayedCluster = field(default_factory=PlayedCluster)

    def play(self, job: Job) -> dict[str, Any]:
        if len(self.played) >= self.at_most:
            raise MeasurementFailed("played cluster: enough")
        setting = job.setting
        self.played.append(setting.name)
        if isinstance(setting, StrategySetting):
            return self._strategy(setting)
        reply = self.others.play(job)
        if setting.name == BACK_TO_BACK:
            assert isinstance(setting, CollectiveSetting)
            _back_to_back(setting, reply)
        return reply

    def _strategy(self, setting: StrategySetting) -> dict[str, Any]:
        step_s = StrategyCosts.of(setting, known()).step_s()
        if setting.fabric.num_ranks > 2:
            step_s *= self.slowness
        ends_s = (step_s * np.arange(setting.num_steps + 1)).tolist()
        before, after = moments(ends_s[-1], 0.01, dict.fromkeys(link_rates(setting.fabric), 1.0))
        rank = {"before": before, "after": after, "ends_s": ends_s}
        return {
            "started_utc": 0.0,
            "is_realtime": True,
            "ranks": [rank] * setting.fabric.num_ranks,
        }


def _back_to_back(setting: CollectiveSetting, reply: dict[str, Any]) -> None:
    for size_bytes, of_size in zip(setting.sizes_bytes, reply["ranks"][0]["sizes"], strict=True):
        ring_s = float(gloo_ring().wire_s(size_bytes, setting.fabric, "all_gather")[0])
        of_size["ends_s"] = [start_s + PAIR_GATHER * ring_s for start_s in of_size["starts_s"]]

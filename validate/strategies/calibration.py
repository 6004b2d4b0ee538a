"""From runs of two ranks to everything that predictions of strategies rest on."""

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfmodel.documents.testbed import CollectiveRun, Run, StrategyRun, TrainingRun
from perfmodel.errors import MeasurementFailed
from validate.strategies.plan import FAMILIES, IN_TURN
from validate.strategies.predict import HostWork, StrategyCalibration, StrategyPrices
from validate.testbed.shaped import ShapedRing, message_bytes_of

NUM_DRAWS: Final = 200
#: What host work is searched in: parts of a millisecond per pass, and per megabyte. [s], [s/B]
_SCALES: Final = (1e-3, 1e-9)


def calibrate(runs: Sequence[Run], *, seed: int) -> StrategyCalibration:
    """Fit the ring on collectives between two ranks, then each strategy's host work on its first runs.

    Raises
    ------
    MeasurementFailed
        If a kind of run is missing.
    """
    collectives = [run for run in runs if isinstance(run, CollectiveRun)]
    trainings = [run for run in runs if isinstance(run, TrainingRun)]
    first = [run for run in runs if isinstance(run, StrategyRun)]
    in_turn = [run for run in collectives if run.setting.name == IN_TURN]
    if not in_turn or not trainings or {run.setting.family for run in first} != set(FAMILIES):
        raise MeasurementFailed(
            "strategies: calibration must hold collectives, DDP and all strategies; "
            "continue with --resume"
        )
    assert all(run.setting.fabric.num_ranks == 2 for run in runs)
    ring = ShapedRing.fit(
        [run for run in collectives if run.setting.collective == "all_reduce"],
        message_bytes=message_bytes_of(trainings),
        num_draws=NUM_DRAWS,
        rng=np.random.default_rng(seed),
    )
    bare = StrategyCalibration(
        ring=ring,
        pair_gather=_pair_gather(in_turn[0], ring),
        hosts=dict.fromkeys(FAMILIES, HostWork()),
        residuals=dict.fromkeys(FAMILIES, 0.0),
        num_cores=first[0].host.num_cores,
        num_draws=NUM_DRAWS,
    )
    hosts: dict[str, HostWork] = {
        family: _host_work([run for run in first if run.setting.family == family], bare)
        for family in FAMILIES
    }
    full = dataclasses.replace(bare, hosts=hosts)
    residuals: dict[str, float] = {
        family: _residual([run for run in first if run.setting.family == family], full)
        for family in FAMILIES
    }
    return dataclasses.replace(full, residuals=residuals)


def _pair_gather(run: CollectiveRun, ring: ShapedRing) -> float:
    """All-gathers that follow one another over what their ring would take."""
    ratios = [
        float(np.median(durations_s) / ring.wire_s(size, run.setting.fabric, "all_gather")[0])
        for size, durations_s in zip(run.setting.sizes_bytes, run.durations_s, strict=True)
    ]
    return float(np.median(ratios))


def _errors(runs: Sequence[StrategyRun], calibration: StrategyCalibration) -> NDArray[np.float64]:
    return np.array(
        [
            np.log(StrategyPrices.of(run.setting, calibration).step_s() / np.median(run.step_s))
            for run in runs
        ]
    )


def _host_work(runs: Sequence[StrategyRun], bare: StrategyCalibration) -> HostWork:
    """The non-negative work with which the first runs of a family are predicted best."""
    family = runs[0].setting.family
    # One draw is enough for the nominal value.
    nominal = dataclasses.replace(bare, ring=_first_draw(bare.ring), num_draws=1)

    def off(values: NDArray[np.float64]) -> NDArray[np.float64]:
        pass_s, byte_s = (float(value) for value in values * _SCALES)
        work = HostWork(pass_s=pass_s, byte_s=byte_s)
        return _errors(runs, dataclasses.replace(nominal, hosts={family: work}))

    found = least_squares(off, x0=(0.3, 0.3), bounds=(0.0, np.inf))
    pass_s, byte_s = (float(value) for value in found.x * _SCALES)
    return HostWork(pass_s=pass_s, byte_s=byte_s)


def _first_draw(ring: ShapedRing) -> ShapedRing:
    return ShapedRing(**{name: np.array([value]) for name, value in ring.nominal().items()})


def _residual(runs: Sequence[StrategyRun], full: StrategyCalibration) -> float:
    return float(np.sqrt(np.mean(np.square(_errors(runs, full)))))

"""From runs of one and two ranks to everything that predictions of more ranks rest on."""

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.optimize import nnls

from perfmodel.arrays import FloatArray
from perfmodel.documents.testbed import CollectiveRun, Run, TrainingRun
from perfmodel.engine.stragglers import RankNoise
from perfmodel.errors import MeasurementFailed
from validate.testbed.disturbance import price_uncertainty, quietest_of_each
from validate.testbed.plan import RUSH
from validate.testbed.predict import Calibration, TrainingPrices, is_noisy, noise_key
from validate.testbed.shaped import ShapedRing, message_bytes_of

NUM_DRAWS: Final = 100
LARGEST_WORLD_SIZE: Final = 2


def calibrate(runs: Sequence[Run], *, seed: int = 0) -> Calibration:
    """Fit the ring on collectives, then what a rank does besides on training runs.

    Of settings that were run again the quietest run counts.

    Raises
    ------
    MeasurementFailed
        If a kind of run is missing.
    """
    runs = quietest_of_each(runs)
    assert all(run.setting.fabric.num_ranks <= LARGEST_WORLD_SIZE for run in runs)
    collectives = [run for run in runs if isinstance(run, CollectiveRun)]
    trainings = [run for run in runs if isinstance(run, TrainingRun)]
    rush = [run for run in trainings if run.setting.family == RUSH]
    plain = [
        run for run in trainings if not is_noisy(run.setting.noise) and run.setting.family != RUSH
    ]
    if not rush or not collectives or not plain:
        raise MeasurementFailed(
            "testbed: calibration must hold all-reduces and training runs; continue with --resume"
        )
    alone = [run for run in plain if run.setting.fabric.num_ranks == 1]
    pairs = [run for run in plain if run.setting.fabric.num_ranks == LARGEST_WORLD_SIZE]
    ring = ShapedRing.fit(
        collectives,
        message_bytes=message_bytes_of(pairs),
        num_draws=NUM_DRAWS,
        rng=np.random.default_rng(seed),
    )
    bare = Calibration(
        ring=ring,
        finish_s=0.0,
        finish_s_per_byte=0.0,
        step_cpu_s=0.0,
        layer_cpu_s=0.0,
        wake_cpu_s=0.0,
        byte_cpu_s=0.0,
        noises=_noises(trainings),
        residual=0.0,
        price_uncertainty=price_uncertainty(runs),
        num_cores=plain[0].host.num_cores,
        num_draws=NUM_DRAWS,
    )
    finish_s, finish_s_per_byte = _finish(plain, bare)
    step_cpu_s, layer_cpu_s, byte_cpu_s = _cpu(rush)
    full = dataclasses.replace(
        bare,
        finish_s=finish_s,
        finish_s_per_byte=finish_s_per_byte,
        step_cpu_s=step_cpu_s,
        layer_cpu_s=layer_cpu_s,
        byte_cpu_s=byte_cpu_s,
    )
    full = dataclasses.replace(full, wake_cpu_s=_wake_cpu_s(alone, full))
    return dataclasses.replace(full, residual=_residual(plain, full))


def _finish(runs: Sequence[TrainingRun], bare: Calibration) -> tuple[float, float]:
    """What steps take beyond compute and exposed all-reduces: constant, and per byte of a bucket."""
    rows, left_s = [], []
    for run in runs:
        prices = TrainingPrices.of(run.setting, bare)
        rows.append((1.0, float(prices.last_bucket_bytes)))
        left_s.append(float(np.median(run.step_s)) - prices.step_s())
    found, _ = nnls(np.array(rows), np.array(left_s))
    return float(found[0]), float(found[1])


def _cpu(runs: Sequence[TrainingRun]) -> tuple[float, float, float]:
    """CPU time of a rank per step, per layer pass, per byte of gradient, without any all-reduce."""
    rows, values_s = [], []
    for run in runs:
        passes = len(run.setting.model.layers) * run.setting.accumulation
        rows.append((1.0, float(passes), float(run.setting.model.gradient_bytes)))
        values_s.append(run.host.own_cpu_s / len(run.step_s))
    table = np.array(rows)
    scale = table.max(axis=0)
    found, _ = nnls(table / scale, np.array(values_s))
    step_s, layer_s, byte_s = found / scale
    return float(step_s), float(layer_s), float(byte_s)


def _wake_cpu_s(runs: Sequence[TrainingRun], awake: Calibration) -> float:
    """CPU time per layer pass that a rank with an idle machine spends on sleeping and waking. [s]"""
    found = []
    for run in runs:
        passes = len(run.setting.model.layers) * run.setting.accumulation
        awake_s = float(TrainingPrices.of(run.setting, awake).cpu_s()[0])
        found.append((run.host.own_cpu_s / len(run.step_s) - awake_s) / passes)
    return max(0.0, float(np.median(found)))


def _residual(runs: Sequence[TrainingRun], full: Calibration) -> float:
    errors = [
        np.log(TrainingPrices.of(run.setting, full).step_s() / float(np.median(run.step_s)))
        for run in runs
    ]
    return float(np.sqrt(np.mean(np.square(errors))))


def _noises(runs: Sequence[TrainingRun]) -> dict[str, RankNoise]:
    groups: dict[str, list[FloatArray]] = {}
    for run in runs:
        if is_noisy(run.setting.noise):
            nominal_s = run.setting.model.compute_s * run.setting.accumulation
            paces = np.array(run.compute_s) / nominal_s
            groups.setdefault(noise_key(run.setting.noise), []).append(paces)
    return {key: RankNoise.fit(found) for key, found in groups.items()}

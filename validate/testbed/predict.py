"""Predict testbed settings with the product's own step programs, simulation and algebra."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.testbed import Noise, PredictedStep, TrainingSetting
from perfmodel.engine.algebra import end_times
from perfmodel.engine.simulate import simulate
from perfmodel.engine.stragglers import RankNoise, slowest_durations
from perfmodel.layout.layout import Layout
from perfmodel.statistics.interval import Interval
from perfmodel.step.compile import compile_step
from perfmodel.step.program import Cause, Operation, StepProgram, Stream
from perfmodel.units import Bytes, Seconds
from validate.testbed.prices import PlayingMachine, Prices, Saving
from validate.testbed.resources import HOST, device_name, limit, link_uses
from validate.testbed.shaped import link_rates, ring_bytes
from validate.testbed.shapes import as_workload

#: Uncertainty where the machine itself is the limit, as a standard deviation of the logarithm: six such settings of
#: two recorded campaigns took 5 to 42 % longer in one than in the other. It fades by the square of the
#: machine's share of the step.
_HOST_UNCERTAINTY: Final = 0.1
#: The same, of messages that wait for a core, as often as cores are busy: by the share itself. A prior.
_WAITING_UNCERTAINTY: Final = 0.03
#: What the kernel lets real-time processes have of every second (``sched_rt_runtime_us``).
_REALTIME_SHARE: Final = 0.95
#: Uncertainty that everything else leaves at least: a prior.
_LEAST_UNCERTAINTY: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration(PlayingMachine):
    """All that runs of one and two ranks have told."""

    finish_s: float
    """From the end of the last all-reduce to the end of the step, of one rank. [s]"""
    finish_s_per_byte: float
    """The same, per byte of the last bucket. [s/B]"""
    step_cpu_s: float
    """CPU time of one rank per step. [s]"""
    layer_cpu_s: float
    """CPU time of one rank per layer and micro-step. [s]"""
    wake_cpu_s: float
    """The same, more, for a layer whose device makes the rank sleep. [s]"""
    byte_cpu_s: float
    """CPU time of one rank per byte of gradient, beside the all-reduce. [s/B]"""
    noises: dict[str, RankNoise]
    """By ``noise_key``."""
    residual: float
    """Standard deviation of the logarithm of measured over predicted steps of two ranks."""
    price_uncertainty: float
    """Standard error, in log, of what work costs the machine, from moment to moment of the calibration."""


def noise_key(noise: Noise) -> str:
    """Which noises are the same, whatever their seed and known slow ranks."""
    return f"{noise.kind} {noise.spread:g} {noise.slow_share:g} {noise.rank_spread:g}"


def is_noisy(noise: Noise) -> bool:
    """Whether the pace varies at random."""
    return noise.kind != "none" or noise.rank_spread > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingPrices(Prices):
    """Plain DDP; one all-reduce that waits for another has a head start."""

    setting: TrainingSetting
    calibration: Calibration

    @classmethod
    def of(cls, setting: TrainingSetting, calibration: Calibration) -> "TrainingPrices":
        """Compile the step of a setting."""
        step = Layout(
            dp=setting.fabric.num_ranks,
            accumulation=setting.accumulation,
            bucket_cap_mb=setting.bucket_cap_mb,
        )
        program = compile_step(as_workload(setting.model), step, asynchronous=False)
        return cls(setting=setting, calibration=calibration, program=program)

    @property
    def all_reduces(self) -> tuple[Operation, ...]:
        """Collectives of the step, in order."""
        return tuple(self.program.operations[i] for i in self.program.on_stream(Stream.COMM))

    @property
    def last_bucket_bytes(self) -> int:
        """Bytes of the bucket that is filled last. [B]"""
        return [o.size_bytes for o in self.program.operations if o.cause is Cause.BUCKET][-1]

    def cpu_s(self) -> FloatArray:
        """CPU time that one step costs the machine, shape ``(num_draws,)``. [s]"""
        found, setting = self.calibration, self.setting
        num_ranks = setting.fabric.num_ranks
        num_passes = len(setting.model.layers) * setting.accumulation
        awake_s = (
            found.step_cpu_s
            + found.layer_cpu_s * num_passes
            + found.byte_cpu_s * setting.model.gradient_bytes
        )
        of_ring_s = np.zeros(found.num_draws)
        for operation in self.all_reduces:
            of_ring_s += found.ring.cpu_s(operation.size_bytes, num_ranks)
        busy_s = num_ranks * awake_s + of_ring_s
        # A rank that waits for a core, be it for the rings, finds its device done, and need not sleep.
        device_s = setting.model.compute_s * setting.accumulation
        core_s = np.maximum(awake_s, busy_s / found.num_cores)
        asleep = device_s / (device_s + core_s)
        result: FloatArray = busy_s + num_ranks * found.wake_cpu_s * num_passes * asleep
        return result

    def _size_bytes(self, operation: Operation) -> Bytes:
        return operation.size_bytes

    def _compute_s(self, operation: Operation) -> Seconds:
        model, found = self.setting.model, self.calibration
        if operation.cause is Cause.FORWARD:
            return sum(layer.forward_s for layer in model.layers) * operation.share
        if operation.cause is Cause.BACKWARD:
            return sum(layer.backward_s for layer in model.layers) * operation.share
        if operation.cause is Cause.OPTIMIZER:
            finish_s = found.finish_s + found.finish_s_per_byte * self.last_bucket_bytes
            return model.optimizer_s + finish_s
        return 0.0

    def _savings(self, durations_s: FloatArray) -> dict[int, Saving]:
        """Burst and head start of each all-reduce. [s]

        Two are in flight at a time: one that waits for another is under way as far as the links do
        not matter, as long as the other leaves the machine time.
        """
        ring, fabric = self.calibration.ring, self.setting.fabric
        ends_s = end_times(self.program, self.paced(durations_s))
        full_s = ring.burst_s(fabric)
        burst_s, free_s, idle = full_s, np.zeros_like(full_s), np.ones_like(full_s)
        found = {}
        for position in self.program.on_stream(Stream.COMM):
            operation, duration_s = self.program.operations[position], durations_s[position]
            ready_s = ends_s[list(operation.after)].max(axis=0)
            burst_s = np.minimum(full_s, burst_s + np.maximum(ready_s - free_s, 0.0))
            found[position] = Saving(burst_s, idle * np.maximum(free_s - ready_s, 0.0))
            burst_s = np.maximum(burst_s - duration_s, 0.0)
            free_s = ends_s[position]
            host_s = ring.cpu_s(operation.size_bytes, fabric.num_ranks) / self.calibration.num_cores
            idle = np.clip(1 - host_s / duration_s, 0.0, 1.0)
        return found

    def paced(self, durations_s: FloatArray) -> FloatArray:
        """Durations at the pace of a known slow rank."""
        slowest = max((factor for _, factor in self.setting.noise.slow_ranks), default=1.0)
        return at_pace(self.program, durations_s, np.asarray(slowest))


def at_pace(program: StepProgram, durations_s: FloatArray, pace: FloatArray) -> FloatArray:
    """Stretch forward and backward; collectives and the end of the step know no pace."""
    is_paced = np.array([o.cause in (Cause.FORWARD, Cause.BACKWARD) for o in program.operations])
    shape = (-1,) + (1,) * (durations_s.ndim - 1)
    return np.where(is_paced.reshape(shape), durations_s * pace, durations_s)


def predict(setting: TrainingSetting, calibration: Calibration, *, seed: int = 0) -> PredictedStep:
    """Predict one setting: median, tail, interval, and the busiest resource."""
    prices = TrainingPrices.of(setting, calibration)
    durations_s = prices.durations()
    rng = np.random.default_rng([seed, setting.fabric.num_ranks, setting.noise.seed])
    cpu_s = prices.cpu_s()
    host_s = cpu_s / (calibration.num_cores * _REALTIME_SHARE)
    # Shape (num_draws, num_steps): a run in every draw.
    steps_s = np.maximum(_runs(prices, durations_s, rng), host_s[:, np.newaxis])
    nominal_s = _nominal(prices, durations_s, steps_s)
    share = min(1.0, float(cpu_s[0]) / (calibration.num_cores * nominal_s))
    doublings = max(0.0, np.log2(max(2, setting.fabric.num_ranks) / 2))
    spread = float(
        np.sqrt(
            max(calibration.residual, _LEAST_UNCERTAINTY) ** 2 * (1 + doublings)
            + (_HOST_UNCERTAINTY**2 + calibration.price_uncertainty**2) * share**4
            + (_WAITING_UNCERTAINTY * share) ** 2
        )
    )
    uncertainty = np.exp(spread * rng.standard_normal(calibration.num_draws))
    uses = _uses(prices, nominal_s, share)
    return PredictedStep(
        name=setting.name,
        # Draws lie around the fitted parameters; the simulation at these is the prediction.
        step_s=Interval.of(np.median(steps_s, axis=1) * uncertainty, nominal=nominal_s),
        p95_s=Interval.of(np.quantile(steps_s, 0.95, axis=1) * uncertainty),
        p99_s=Interval.of(np.quantile(steps_s, 0.99, axis=1) * uncertainty),
        limit=limit(uses),
        uses=uses,
    )


def _runs(prices: TrainingPrices, durations_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Every step of a run in every draw, shape ``(num_draws, num_steps)``. [s]"""
    setting, calibration = prices.setting, prices.calibration
    if not is_noisy(setting.noise):
        ends_s = end_times(prices.program, prices.paced(durations_s))
        return np.asarray(ends_s.max(axis=0)[:, np.newaxis])
    noise = calibration.noises[noise_key(setting.noise)]
    runs = []
    for draw in range(calibration.num_draws):
        paces = noise.resampled(rng).draw(
            num_ranks=setting.fabric.num_ranks, num_steps=setting.num_steps, rng=rng
        )
        for rank, factor in setting.noise.slow_ranks:
            paces[rank] *= factor
        of_ranks = at_pace(prices.program, durations_s[:, draw, np.newaxis, np.newaxis], paces)
        slowest_s = slowest_durations(
            prices.program, np.broadcast_to(of_ranks, (len(durations_s), *paces.shape))
        )
        runs.append(end_times(prices.program, slowest_s).max(axis=0))
    return np.array(runs)


def _nominal(prices: TrainingPrices, durations_s: FloatArray, steps_s: FloatArray) -> float:
    """The simulation of all ranks at nominal parameters; with noise, the middle of all runs."""
    if is_noisy(prices.setting.noise):
        return float(np.median(np.median(steps_s, axis=1)))
    paces = np.ones(prices.setting.fabric.num_ranks)
    for rank, factor in prices.setting.noise.slow_ranks:
        paces[rank] = factor
    simulated_s = simulated_step(prices, durations_s[:, 0], paces)
    return max(simulated_s, float(steps_s[0, 0]))


def simulated_step(prices: TrainingPrices, durations_s: FloatArray, paces: FloatArray) -> float:
    """Simulate one step of all ranks, each at its pace. [s]"""
    of_ranks = at_pace(prices.program, durations_s[:, np.newaxis], paces)
    table_s = np.broadcast_to(of_ranks, (len(durations_s), len(paces)))
    return simulate(prices.program, table_s.T).step_s


def replayed(setting: TrainingSetting, calibration: Calibration, factors: FloatArray) -> FloatArray:
    """Steps of a run whose paces are known, shape ``(num_steps,)``. [s]"""
    prices = TrainingPrices.of(setting, calibration)
    durations_s = prices.durations()[:, 0]
    return np.array([simulated_step(prices, durations_s, paces) for paces in factors.T])


def _uses(prices: TrainingPrices, step_s: float, host_share: float) -> dict[str, float]:
    setting, calibration = prices.setting, prices.calibration
    busy_s = setting.model.compute_s * setting.accumulation
    slowest = max((factor for _, factor in setting.noise.slow_ranks), default=1.0)
    if is_noisy(setting.noise):
        noise = calibration.noises[noise_key(setting.noise)]
        paces = noise.draw(
            num_ranks=setting.fabric.num_ranks, num_steps=200, rng=np.random.default_rng(0)
        )
        slowest = max(slowest, float(paces.max(axis=0).mean()))
    payload = ring_bytes(setting.model.gradient_bytes, setting.fabric)
    overhead = float(calibration.ring.overhead[0])
    sent = {link: overhead * size / step_s for link, size in payload.items()}
    rates = link_rates(setting.fabric)
    return {
        device_name(setting): (busy_s * slowest + setting.model.optimizer_s) / step_s,
        HOST: host_share,
        **link_uses(setting.fabric, {link: sent[link] / rates[link] for link in rates}),
    }

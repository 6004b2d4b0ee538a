"""Plain DDP on the testbed: fitted on runs of one and two ranks, predicted for more."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls

from perfmodel.arrays import FloatArray
from perfmodel.documents.testbed import (
    STANDS_OUT,
    CollectiveRun,
    Fabric,
    Noise,
    PredictedStep,
    Run,
    TrainingRun,
    TrainingSetting,
)
from perfmodel.engine.algebra import end_times
from perfmodel.engine.simulate import simulate
from perfmodel.engine.stragglers import RankNoise, slowest_durations
from perfmodel.errors import MeasurementFailed
from perfmodel.layout.layout import Layout, Synchronisation
from perfmodel.statistics.interval import Interval
from perfmodel.step.compile import compile_step
from perfmodel.step.program import Cause, Operation, StepProgram, Stream
from perfmodel.units import Bytes, Seconds
from validate.testbed.disturbance import cost_uncertainty, quietest_of_each
from validate.testbed.plan import RUSH, as_workload
from validate.testbed.ring import (
    PlayingMachine,
    Saving,
    ShapedRing,
    StepCosts,
    link_rates,
    message_bytes_of,
    path,
    ring_bytes,
)

NUM_DRAWS: Final = 100
LARGEST_WORLD_SIZE: Final = 2
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
#: Name of the machine that plays all ranks, among the resources.
HOST: Final = "host CPU"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration(PlayingMachine):
    """What runs of one and two ranks tell."""

    finish_s: float = 0.0
    """From the end of the last all-reduce to the end of the step, of one rank. [s]"""
    finish_s_per_byte: float = 0.0
    """The same, per byte of the last bucket. [s/B]"""
    step_cpu_s: float = 0.0
    """CPU time of one rank per step. [s]"""
    layer_cpu_s: float = 0.0
    """CPU time of one rank per layer and micro-step. [s]"""
    wake_cpu_s: float = 0.0
    """The same, more, for a layer whose device makes the rank sleep. [s]"""
    byte_cpu_s: float = 0.0
    """CPU time of one rank per byte of gradient, beside the all-reduce. [s/B]"""
    noises: dict[str, RankNoise]
    """By ``noise_key``."""
    residual: float = 0.0
    """Standard deviation of the logarithm of measured over predicted steps of two ranks."""
    cost_uncertainty: float
    """Standard error, in log, of what work costs the machine, from moment to moment of the calibration."""


def calibrate(runs: Sequence[Run], *, seed: int = 0) -> Calibration:
    """Fit the ring on collectives, then what a rank does besides on training runs.

    Of settings that were run again the quietest run counts.
    """
    runs = quietest_of_each(runs)
    assert all(run.setting.fabric.num_ranks <= LARGEST_WORLD_SIZE for run in runs)
    collectives = [run for run in runs if isinstance(run, CollectiveRun)]
    trainings = [run for run in runs if isinstance(run, TrainingRun)]
    rush = [run for run in trainings if run.setting.family == RUSH]
    noisy = [run for run in trainings if is_noisy(run.setting.noise)]
    plain = [
        run for run in trainings if run.setting.family != RUSH and not is_noisy(run.setting.noise)
    ]
    if not rush or not collectives or not plain:
        raise MeasurementFailed(
            "testbed: calibration must hold all-reduces and training runs; continue with --resume"
        )
    alone = [run for run in plain if run.setting.fabric.num_ranks == 1]
    pairs = [run for run in plain if run.setting.fabric.num_ranks == LARGEST_WORLD_SIZE]
    paces: dict[str, list[FloatArray]] = {}
    for run in noisy:
        nominal_s = run.setting.model.compute_s * run.setting.accumulation
        paces.setdefault(noise_key(run.setting.noise), []).append(
            np.array(run.compute_s) / nominal_s
        )
    found = Calibration(
        ring=ShapedRing.fit(
            collectives,
            message_bytes=message_bytes_of(pairs),
            num_draws=NUM_DRAWS,
            rng=np.random.default_rng(seed),
        ),
        noises={key: RankNoise.fit(each) for key, each in paces.items()},
        cost_uncertainty=cost_uncertainty(runs),
        num_cores=plain[0].host.num_cores,
        num_draws=NUM_DRAWS,
    )
    finish_s, finish_s_per_byte = _finish(plain, found)
    step_cpu_s, layer_cpu_s, byte_cpu_s = _cpu(rush)
    found = dataclasses.replace(
        found,
        finish_s=finish_s,
        finish_s_per_byte=finish_s_per_byte,
        step_cpu_s=step_cpu_s,
        layer_cpu_s=layer_cpu_s,
        byte_cpu_s=byte_cpu_s,
    )
    # What ranks with an idle machine spend on sleeping and waking, per layer pass.
    asleep_s = [
        (_cpu_per_step(run) - float(TrainingCosts.of(run.setting, found).cpu_s()[0]))
        / _passes(run.setting)
        for run in alone
    ]
    found = dataclasses.replace(found, wake_cpu_s=max(0.0, float(np.median(asleep_s))))
    errors = [
        np.log(TrainingCosts.of(run.setting, found).step_s() / float(np.median(run.step_s)))
        for run in plain
    ]
    return dataclasses.replace(found, residual=float(np.sqrt(np.mean(np.square(errors)))))


def _finish(runs: Sequence[TrainingRun], bare: Calibration) -> FloatArray:
    """What steps take beyond compute and exposed all-reduces: constant, and per byte of a bucket."""
    rows, left_s = [], []
    for run in runs:
        costs = TrainingCosts.of(run.setting, bare)
        rows.append((1.0, float(costs.last_bucket_bytes)))
        left_s.append(float(np.median(run.step_s)) - costs.step_s())
    return _non_negative(rows, left_s, scaled=False)


def _cpu(runs: Sequence[TrainingRun]) -> FloatArray:
    """CPU time of a rank per step, per layer pass, per byte of gradient, without any all-reduce."""
    rows = [
        (1.0, float(_passes(run.setting)), float(run.setting.model.gradient_bytes)) for run in runs
    ]
    return _non_negative(rows, [_cpu_per_step(run) for run in runs], scaled=True)


def _non_negative(
    rows: Sequence[tuple[float, ...]], values: Sequence[float], *, scaled: bool
) -> FloatArray:
    """Non-negative least squares, with columns of one scale if asked to."""
    table = np.array(rows)
    scale = table.max(axis=0) if scaled else np.ones(table.shape[1])
    found, _ = nnls(table / scale, np.array(values))
    return np.array([float(each) for each in found / scale])


def _passes(setting: TrainingSetting) -> int:
    return len(setting.model.layers) * setting.accumulation


def _cpu_per_step(run: TrainingRun) -> Seconds:
    return run.host.own_cpu_s / len(run.step_s)


def noise_key(noise: Noise) -> str:
    """Which noises are the same, whatever their seed and known slow ranks."""
    return f"{noise.kind} {noise.spread:g} {noise.slow_share:g} {noise.rank_spread:g}"


def is_noisy(noise: Noise) -> bool:
    """Whether the pace varies at random."""
    return noise.kind != "none" or noise.rank_spread > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingCosts(StepCosts):
    """Plain DDP; one all-reduce that waits for another has a head start."""

    setting: TrainingSetting
    calibration: Calibration

    @classmethod
    def of(cls, setting: TrainingSetting, calibration: Calibration) -> "TrainingCosts":
        """Compile the step of a setting."""
        step = Layout(
            dp=setting.fabric.num_ranks,
            # One rank is wrapped as well.
            wrapper=Synchronisation.DDP,
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

    @property
    def slow_factor(self) -> float:
        """Pace of the slowest rank that is known to be slow."""
        return max((factor for _, factor in self.setting.noise.slow_ranks), default=1.0)

    def cpu_s(self) -> FloatArray:
        """CPU time that one step costs the machine, shape ``(num_draws,)``. [s]"""
        found, setting = self.calibration, self.setting
        num_ranks, num_passes = setting.fabric.num_ranks, _passes(setting)
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
        ends_s = end_times(self.program, at_pace(self.program, durations_s, self.slow_factor))
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


def at_pace(program: StepProgram, durations_s: FloatArray, pace: FloatArray | float) -> FloatArray:
    """Stretch forward and backward; collectives and the end of the step know no pace."""
    is_paced = np.array([o.cause in (Cause.FORWARD, Cause.BACKWARD) for o in program.operations])
    shape = (-1,) + (1,) * (durations_s.ndim - 1)
    return np.where(is_paced.reshape(shape), durations_s * pace, durations_s)


def predict(setting: TrainingSetting, calibration: Calibration, *, seed: int = 0) -> PredictedStep:
    """Predict one setting: median, tail, interval, and the busiest resource."""
    costs = TrainingCosts.of(setting, calibration)
    durations_s = costs.durations()
    rng = np.random.default_rng([seed, setting.fabric.num_ranks, setting.noise.seed])
    cpu_s = costs.cpu_s()
    host_s = cpu_s / (calibration.num_cores * _REALTIME_SHARE)
    # Shape (num_draws, num_steps): a run in every draw.
    steps_s = np.maximum(_runs(costs, durations_s, rng), host_s[:, np.newaxis])
    if is_noisy(setting.noise):
        nominal_s = float(np.median(np.median(steps_s, axis=1)))
    else:
        # The simulation of all ranks at nominal parameters.
        paces = np.ones(setting.fabric.num_ranks)
        for rank, factor in setting.noise.slow_ranks:
            paces[rank] = factor
        nominal_s = max(simulated_step(costs, durations_s[:, 0], paces), float(steps_s[0, 0]))
    share = min(1.0, float(cpu_s[0]) / (calibration.num_cores * nominal_s))
    doublings = max(0.0, np.log2(max(2, setting.fabric.num_ranks) / 2))
    spread = float(
        np.sqrt(
            max(calibration.residual, _LEAST_UNCERTAINTY) ** 2 * (1 + doublings)
            + (_HOST_UNCERTAINTY**2 + calibration.cost_uncertainty**2) * share**4
            + (_WAITING_UNCERTAINTY * share) ** 2
        )
    )
    uncertainty = np.exp(spread * rng.standard_normal(calibration.num_draws))
    uses = _uses(costs, nominal_s, share)
    return PredictedStep(
        name=setting.name,
        # Draws lie around the fitted parameters; the simulation at these is the prediction.
        step_s=Interval.of(np.median(steps_s, axis=1) * uncertainty, nominal=nominal_s),
        p95_s=Interval.of(np.quantile(steps_s, 0.95, axis=1) * uncertainty),
        p99_s=Interval.of(np.quantile(steps_s, 0.99, axis=1) * uncertainty),
        limit=limit(uses),
        uses=uses,
    )


def _runs(costs: TrainingCosts, durations_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Every step of a run in every draw, shape ``(num_draws, num_steps)``. [s]"""
    setting, program = costs.setting, costs.program
    if not is_noisy(setting.noise):
        ends_s = end_times(program, at_pace(program, durations_s, costs.slow_factor))
        return np.asarray(ends_s.max(axis=0)[:, np.newaxis])
    noise = costs.calibration.noises[noise_key(setting.noise)]
    runs = []
    for draw in range(costs.calibration.num_draws):
        paces = noise.resampled(rng).draw(
            num_ranks=setting.fabric.num_ranks, num_steps=setting.num_steps, rng=rng
        )
        for rank, factor in setting.noise.slow_ranks:
            paces[rank] *= factor
        of_ranks = at_pace(program, durations_s[:, draw, np.newaxis, np.newaxis], paces)
        slowest_s = slowest_durations(
            program, np.broadcast_to(of_ranks, (len(durations_s), *paces.shape))
        )
        runs.append(end_times(program, slowest_s).max(axis=0))
    return np.array(runs)


def simulated_step(costs: TrainingCosts, durations_s: FloatArray, paces: FloatArray) -> float:
    """Simulate one step of all ranks, each at its pace. [s]"""
    of_ranks = at_pace(costs.program, durations_s[:, np.newaxis], paces)
    table_s = np.broadcast_to(of_ranks, (len(durations_s), len(paces)))
    return simulate(costs.program, table_s.T).step_s


def replayed(setting: TrainingSetting, calibration: Calibration, factors: FloatArray) -> FloatArray:
    """Steps of a run whose paces are known, shape ``(num_steps,)``. [s]"""
    costs = TrainingCosts.of(setting, calibration)
    durations_s = costs.durations()[:, 0]
    return np.array([simulated_step(costs, durations_s, paces) for paces in factors.T])


def limit(uses: dict[str, float]) -> str:
    """The busiest resource: devices, links, or the machine that plays them all."""
    return max(uses, key=lambda name: uses[name])


def _uses(costs: TrainingCosts, step_s: float, host_share: float) -> dict[str, float]:
    """Busy share of each resource, as predicted."""
    setting, calibration = costs.setting, costs.calibration
    slowest = costs.slow_factor
    if is_noisy(setting.noise):
        paces = calibration.noises[noise_key(setting.noise)].draw(
            num_ranks=setting.fabric.num_ranks, num_steps=200, rng=np.random.default_rng(0)
        )
        slowest = max(slowest, float(paces.max(axis=0).mean()))
    busy_s = setting.model.compute_s * setting.accumulation * slowest + setting.model.optimizer_s
    overhead = float(calibration.ring.overhead[0])
    payload = ring_bytes(setting.model.gradient_bytes, setting.fabric)
    rates = link_rates(setting.fabric)
    sent = {link: overhead * payload[link] / step_s / rates[link] for link in rates}
    return {
        _device_name(setting): busy_s / step_s,
        HOST: host_share,
        **link_uses(setting.fabric, sent),
    }


def observed_uses(run: TrainingRun) -> dict[str, float]:
    """Busy share of each resource as the counters saw it."""
    setting = run.setting
    slowest = float(np.max(run.factors, axis=0).sum())
    busy_s = setting.model.compute_s * setting.accumulation * slowest
    busy_s += setting.model.optimizer_s * len(run.step_s)
    # Counters hold the steady traffic already.
    quiet = setting.fabric.model_copy(update={"background": ()})
    sent = {
        link: size / run.host.window_s / rate
        for (link, size), rate in zip(
            run.link_bytes.items(), link_rates(quiet).values(), strict=True
        )
    }
    return {
        _device_name(setting): busy_s / float(np.sum(run.step_s)),
        HOST: run.host.own_share,
        **link_uses(quiet, sent),
    }


def _device_name(setting: TrainingSetting) -> str:
    """Devices as a resource: the known slow one, or all of them."""
    if not setting.noise.slow_ranks:
        return "devices"
    rank, _ = max(setting.noise.slow_ranks, key=lambda entry: entry[1])
    return f"device of rank {rank}"


def link_uses(fabric: Fabric, of_collectives: dict[str, float]) -> dict[str, float]:
    """Busy share of the busiest link of each kind; named on its own if it stands out.

    Parameters
    ----------
    of_collectives
        Busy share of each link without steady traffic, which is added here.
    """
    uses = dict(of_collectives)
    capacity = link_rates(fabric)
    for stream in fabric.background:
        for link in path(fabric, stream.from_node, stream.to_node):
            uses[link] += stream.bytes_per_s / capacity[link]
    found = {}
    for kind in ("node", "rack"):
        ordered = sorted(
            ((use, link) for link, use in uses.items() if f" {kind} " in link), reverse=True
        )
        if ordered:
            use, link = ordered[0]
            stands_out = len(ordered) > 1 and use > STANDS_OUT * ordered[1][0]
            found[link if stands_out else f"{kind} uplinks"] = use
    return found

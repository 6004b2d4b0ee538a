"""Use case: plain DDP on the testbed; calibrate with one and two ranks, predict 4, 8 and 16, run them, judge.

The step is the product's program. Compute takes what the emulated model says, an all-reduce what
``all_reduce`` says; two are in flight at a time, and links that had time to rest let a burst through.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from scipy.optimize import nnls

from calibrate.campaign import Progress
from calibrate.environment import describe_environment, provenance
from perfmodel.documents.verdicts import (
    Gate,
    JudgedFamily,
    JudgedStep,
    TestbedDocument,
)
from perfmodel.engine.algebra import end_times
from perfmodel.errors import MeasurementFailed, refuse_unknown
from perfmodel.layout import Layout, Synchronisation
from perfmodel.statistics import FloatArray, Interval
from perfmodel.step import Cause, Operation, StepProgram, Stream
from perfmodel.step.compile import compile_step
from validate.judging import coverage_gate, families, gate, passed, step_gates
from validate.testbed import plan
from validate.testbed.all_reduce import ShapedRing, message_bytes_of
from validate.testbed.campaign import (
    CALIBRATION,
    RUNS,
    CampaignRequest,
    open_campaign,
    predict_once,
    refuse_earlier_runs,
)
from validate.testbed.records import (
    CollectiveRun,
    Run,
    TrainingRun,
    TrainingSetting,
    read_runs,
)

NUM_DRAWS: Final = 100
LARGEST_WORLD_SIZE: Final = 2
#: Uncertainty where the machine itself is the limit, as a standard deviation of the logarithm: six such
#: settings of two recorded campaigns took 5 to 42 % longer in one than in the other. It fades by the square
#: of the machine's share of the step.
_HOST_UNCERTAINTY: Final = 0.1
#: What the kernel lets real-time processes have of every second (``sched_rt_runtime_us``).
_REALTIME_SHARE: Final = 0.95
#: Uncertainty that everything else leaves at least: a prior.
_LEAST_UNCERTAINTY: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """The machine that plays all ranks and links, as runs of one and two ranks have shown it."""

    ring: ShapedRing
    num_cores: int
    num_draws: int
    step_cpu_s: float
    """CPU time of one rank per step. [s]"""
    layer_cpu_s: float
    """CPU time of one rank per layer and micro-step. [s]"""
    byte_cpu_s: float
    """CPU time of one rank per byte of gradient, beside the all-reduce. [s/B]"""
    residual: float = 0.0
    """Standard deviation of the logarithm of measured over predicted steps of two ranks."""

    def law(self) -> dict[str, float]:
        """Fitted parameters by name."""
        own = ("step_cpu_s", "layer_cpu_s", "byte_cpu_s", "residual")
        return {f"ring_{name}": value for name, value in self.ring.nominal().items()} | {
            f"rank_{name}": float(getattr(self, name)) for name in own
        }


def calibrate(runs: Sequence[Run], *, seed: int = 0) -> Calibration:
    """Fit the ring on collectives, then what a rank does besides on training runs."""
    assert all(run.setting.fabric.num_ranks <= LARGEST_WORLD_SIZE for run in runs)
    collectives = [run for run in runs if isinstance(run, CollectiveRun)]
    trainings = [run for run in runs if isinstance(run, TrainingRun)]
    rush = [run for run in trainings if run.setting.family == plan.RUSH]
    plain = [run for run in trainings if run not in rush]
    if not rush or not collectives or not plain:
        raise MeasurementFailed(
            "testbed: calibration must hold all-reduces and training runs; continue with --resume"
        )
    # CPU time per step, layer pass and byte of gradient where devices need no time and nothing is reduced.
    rows = np.array([(1, _passes(r.setting), r.setting.model.gradient_bytes) for r in rush])
    scale = rows.max(axis=0)
    cpu, _ = nnls(rows / scale, np.array([r.host.own_cpu_s / len(r.step_s) for r in rush]))
    step_cpu_s, layer_cpu_s, byte_cpu_s = (cpu / scale).tolist()
    pairs = [run for run in plain if run.setting.fabric.num_ranks == LARGEST_WORLD_SIZE]
    found = Calibration(
        ring=ShapedRing.fit(
            collectives,
            message_bytes=message_bytes_of(pairs),
            num_draws=NUM_DRAWS,
            rng=np.random.default_rng(seed),
        ),
        num_cores=plain[0].host.num_cores,
        num_draws=NUM_DRAWS,
        step_cpu_s=step_cpu_s,
        layer_cpu_s=layer_cpu_s,
        byte_cpu_s=byte_cpu_s,
    )
    errors = [
        np.log(TrainingCosts(run.setting, found).step_s()[0] / np.median(run.step_s))
        for run in plain
    ]
    return dataclasses.replace(found, residual=float(np.sqrt(np.mean(np.square(errors)))))


def _passes(setting: TrainingSetting) -> int:
    return len(setting.model.layers) * setting.accumulation


@dataclass(frozen=True, eq=False)
class TrainingCosts:
    """Seconds of the operations of one setting."""

    setting: TrainingSetting
    calibration: Calibration

    @cached_property
    def program(self) -> StepProgram:
        """The step, as the product compiles it; one rank is wrapped as well."""
        layout = Layout(
            dp=self.setting.fabric.num_ranks,
            wrapper=Synchronisation.DDP,
            accumulation=self.setting.accumulation,
            bucket_cap_mb=self.setting.bucket_cap_mb,
        )
        return compile_step(plan.as_workload(self.setting.model), layout, asynchronous=False)

    @cached_property
    def all_reduces(self) -> dict[int, Operation]:
        """Collectives of the step by position, in order."""
        return {i: self.program.operations[i] for i in self.program.on_stream(Stream.COMM)}

    @cached_property
    def durations_s(self) -> FloatArray:
        """Time of each operation, shape ``(num_operations, num_draws)``. [s]

        What an all-reduce saves follows from when it starts, hence from durations without any saving.
        """
        model = self.setting.model
        whole_s = {
            Cause.FORWARD: sum(layer.forward_s for layer in model.layers),
            Cause.BACKWARD: sum(layer.backward_s for layer in model.layers),
            Cause.OPTIMIZER: model.optimizer_s,
        }
        shares = [
            whole_s.get(o.cause, 0.0) * (1.0 if o.cause is Cause.OPTIMIZER else o.share)
            for o in self.program.operations
        ]
        found_s = np.tile(np.array(shares)[:, np.newaxis], self.calibration.num_draws)
        nothing = np.zeros(self.calibration.num_draws)
        for position, operation in self.all_reduces.items():
            found_s[position] = self._all_reduce_s(operation, nothing, nothing)
        for position, (burst_s, head_start_s) in self._savings(found_s).items():
            found_s[position] = self._all_reduce_s(
                self.all_reduces[position], burst_s, head_start_s
            )
        return found_s

    def _all_reduce_s(
        self, operation: Operation, burst_s: FloatArray, head_start_s: FloatArray
    ) -> FloatArray:
        return self.calibration.ring.time_s(
            operation.size_bytes,
            self.setting.fabric,
            num_cores=self.calibration.num_cores,
            burst_s=burst_s,
            head_start_s=head_start_s,
        )

    def _savings(self, durations_s: FloatArray) -> dict[int, tuple[FloatArray, FloatArray]]:
        """Burst and head start of each all-reduce. [s]

        One that waits for another is under way as far as the links do not matter, as long as the other
        leaves the machine time.
        """
        ring, fabric = self.calibration.ring, self.setting.fabric
        ends_s = end_times(self.program, durations_s)
        full_s = ring.burst_s(fabric)
        burst_s, free_s, idle = full_s, np.zeros_like(full_s), np.ones_like(full_s)
        found = {}
        for position, operation in self.all_reduces.items():
            duration_s = durations_s[position]
            ready_s = ends_s[list(operation.after)].max(axis=0)
            burst_s = np.minimum(full_s, burst_s + np.maximum(ready_s - free_s, 0.0))
            found[position] = (burst_s, idle * np.maximum(free_s - ready_s, 0.0))
            burst_s = np.maximum(burst_s - duration_s, 0.0)
            free_s = ends_s[position]
            host_s = ring.cpu_s(operation.size_bytes, fabric.num_ranks) / self.calibration.num_cores
            idle = np.clip(1 - host_s / duration_s, 0.0, 1.0)
        return found

    def cpu_s(self) -> FloatArray:
        """CPU time that one step costs the machine, shape ``(num_draws,)``. [s]"""
        found, setting = self.calibration, self.setting
        of_rank_s = (
            found.step_cpu_s
            + found.layer_cpu_s * _passes(setting)
            + found.byte_cpu_s * setting.model.gradient_bytes
        )
        num_ranks = setting.fabric.num_ranks
        sizes = [operation.size_bytes for operation in self.all_reduces.values()]
        of_rings_s = sum(
            (found.ring.cpu_s(size, num_ranks) for size in sizes), start=np.zeros(found.num_draws)
        )
        return num_ranks * of_rank_s + of_rings_s

    def step_s(self) -> FloatArray:
        """One step without noise, shape ``(num_draws,)``. [s]"""
        return np.asarray(end_times(self.program, self.durations_s).max(axis=0))


def predict(setting: TrainingSetting, calibration: Calibration, *, seed: int = 0) -> Interval:
    """Median step of one setting. [s]"""
    costs = TrainingCosts(setting, calibration)
    rng = np.random.default_rng([seed, setting.fabric.num_ranks, 0])
    cpu_s = costs.cpu_s()
    host_s = cpu_s / (calibration.num_cores * _REALTIME_SHARE)
    # Draws lie around the fitted parameters; the step at these is the prediction.
    steps_s = np.maximum(costs.step_s(), host_s)
    nominal_s = float(steps_s[0])
    share = min(1.0, float(cpu_s[0]) / (calibration.num_cores * nominal_s))
    doublings = max(0.0, np.log2(max(2, setting.fabric.num_ranks) / 2))
    spread = np.hypot(
        max(calibration.residual, _LEAST_UNCERTAINTY) * np.sqrt(1 + doublings),
        _HOST_UNCERTAINTY * share**2,
    )
    uncertainty = np.exp(spread * rng.standard_normal(calibration.num_draws))
    return Interval.of(steps_s * uncertainty, nominal=nominal_s)


VERDICT: Final = "testbed.json"
BUDGETS: Final = ("quick", "standard")
#: Gates, as fractions; written to disk before the first run that they judge.
LIMITS: Final = {
    "mape": 0.01,
    "worst": 0.04,
    "bias": 0.005,
    "covered_from": 0.85,
    "covered_to": 0.97,
}


def validate_testbed(
    request: CampaignRequest, *, on_progress: Callable[[Progress], None]
) -> TestbedDocument:
    """Carry out the whole campaign: calibrate, predict, run, judge."""
    refuse_unknown("--budget", request.budget, BUDGETS)
    refuse_earlier_runs(request, CALIBRATION)
    first, judged = plan.calibration(), plan.judged(request.budget, seed=request.seed)
    total = len(first) + len(judged)
    with open_campaign(
        request, command="validate testbed", total=total, on_progress=on_progress
    ) as campaign:
        campaign.run(first, request.folder / CALIBRATION)
        calibration = calibrate(read_runs(request.folder / CALIBRATION), seed=request.seed)
        predicted = predict_once(
            request.folder,
            judged,
            lambda setting: predict(setting, calibration, seed=request.seed),
            options={"budget": request.budget, "seed": request.seed},
            terms={"gates": LIMITS, "law": calibration.law()},
        )
        campaign.run(judged, request.folder / RUNS)
    steps = [
        judge_step(predicted[run.setting.name], run)
        for run in read_runs(request.folder / RUNS)
        if isinstance(run, TrainingRun)
    ]
    judgement = gates(steps)
    document = TestbedDocument(
        provenance=provenance(describe_environment(), seed=request.seed),
        law=calibration.law(),
        settings=tuple(steps),
        families=by_ranks(steps),
        gates=judgement,
        passed=passed(judgement),
    )
    document.write(request.folder / VERDICT)
    return document


def judge_step(predicted_s: Interval, run: TrainingRun) -> JudgedStep:
    """Compare one setting."""
    measured_s = float(np.median(run.step_s))
    return JudgedStep(
        name=run.setting.name,
        world_size=run.setting.fabric.num_ranks,
        predicted_s=predicted_s,
        measured_s=measured_s,
        signed_error=predicted_s.signed_error(measured_s),
        is_covered=predicted_s.holds(measured_s),
        variation=float(np.std(run.step_s) / np.mean(run.step_s)),
        own_cpu_share=run.host.own_share,
    )


def by_ranks(steps: Sequence[JudgedStep]) -> tuple[JudgedFamily, ...]:
    """Errors by number of ranks, and of all together as the last."""
    ordered = sorted(steps, key=lambda step: step.world_size)
    return families(ordered, lambda step: f"{step.world_size} ranks")


def gates(steps: Sequence[JudgedStep]) -> tuple[Gate, ...]:
    """Compare all settings with what was promised."""
    whole, limits = by_ranks(steps)[-1], LIMITS
    low, high = limits["covered_from"], limits["covered_to"]
    return (
        *step_gates(whole.summary, mape=limits["mape"], worst=limits["worst"]),
        gate("bias", abs(whole.summary.bias), at_most=limits["bias"]),
        coverage_gate(whole.coverage, at_least=low, at_most=high),
    )

"""Predict real strategies with the product's step programs and simulation; the testbed prices collectives."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.testbed import StrategySetting
from perfmodel.documents.verdicts import PredictedStrategy
from perfmodel.engine.algebra import end_times
from perfmodel.layout.buckets import assign_shards
from perfmodel.layout.layout import Layout, parse_layout
from perfmodel.statistics.interval import Interval
from perfmodel.step.compile import Execution, compile_layout, compile_step
from perfmodel.step.program import Cause, Operation, StepProgram, Stream
from perfmodel.units import Bytes, Seconds
from perfmodel.workload.workload import Parameter, Workload
from validate.testbed.prices import PlayingMachine, Prices, Saving, is_collective

_ELEMENT_BYTES: Final = 4
_PAIR: Final = 2
#: All-reduces of a layer in a micro-batch: attention and perceptron have one each way [arXiv 1909.08053].
_ALL_REDUCES: Final = 4
#: What a kernel holds of a message that the program has sent: two parts of 64 KiB and their book-keeping
#: (TCP small queues), as seen in the timelines of two runs.
_KERNEL_QUEUE_BYTES: Final = 200_000
#: Uncertainty that calibration leaves at least, as a standard deviation of the logarithm: priors, of the size of
#: the errors on the runs with which the programs were developed.
_LEAST_UNCERTAINTY: Final = {"fsdp": 0.02, "zero": 0.025, "tensor": 0.025, "pipeline": 0.015}
#: The same, more, beyond two ranks. Programs leave out how broadcasts of several ranks share links, and
#: whether what a stage announces really meets its own data on the link.
_UNCERTAINTY_BEYOND_PAIRS: Final = {"fsdp": 0.015, "zero": 0.04, "tensor": 0.015, "pipeline": 0.04}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What a strategy's own code costs beside the device, which waits for it."""

    pass_s: float = 0.0
    """Per pass of a layer. [s]"""
    byte_s: float = 0.0
    """The same, per byte that the layer communicates. [s/B]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyCalibration(PlayingMachine):
    """All that runs of two ranks have told."""

    pair_gather: float
    """All-gather between two ranks over what its ring would take: both directions share a connection, in
    which the word that one may send waits behind what the other sends."""
    hosts: dict[str, HostWork]
    """By family."""
    residuals: dict[str, float]
    """Standard deviation of the logarithm of measured over predicted steps, by family."""


def compiled(setting: StrategySetting) -> StepProgram:
    """The step as the product sees it; gloo makes the host wait."""
    layout = parse_layout(setting.layout)
    if setting.family == "zero":
        return _redundant(setting, layout)
    if layout.zero == 3:
        layout = replace(layout, prefetch=int(setting.prefetch))
    return compile_layout(
        layout,
        layers=setting.model.num_layers,
        execution=Execution.BLOCKING,
        queued=_KERNEL_QUEUE_BYTES / setting.model.activation_bytes,
    )


def _redundant(setting: StrategySetting, layout: Layout) -> StepProgram:
    """DDP, then an optimizer that is divided by parameters."""
    model = setting.model
    sizes = [_ELEMENT_BYTES * model.layer_elements] * model.num_layers
    workload = Workload(
        name=setting.name,
        sample="one emulated sample",
        parameters=tuple(
            Parameter(
                name=f"layer {number}",
                num_elements=model.layer_elements,
                ready_fraction=(number + 1) / model.num_layers,
            )
            for number in range(model.num_layers)
        ),
        forward_flop=0.0,
        backward_flop=0.0,
        num_operators=model.num_layers,
    )
    step = Layout(
        dp=layout.dp, accumulation=layout.accumulation, bucket_cap_mb=setting.bucket_cap_mb
    )
    shards = assign_shards(sizes, num_ranks=layout.dp)
    return compile_step(workload, step, asynchronous=False, shards_bytes=shards)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyPrices(Prices):
    """Sharding, tensor parallelism and pipeline stages."""

    setting: StrategySetting
    calibration: StrategyCalibration
    layout: Layout

    @classmethod
    def of(cls, setting: StrategySetting, calibration: StrategyCalibration) -> "StrategyPrices":
        """Compile and be ready to price."""
        return cls(
            setting=setting,
            layout=parse_layout(setting.layout),
            calibration=calibration,
            program=compiled(setting),
        )

    def _times(self, operation: Operation) -> float:
        if operation.cause is Cause.ALL_GATHER and self.setting.fabric.num_ranks == _PAIR:
            return self.calibration.pair_gather
        return self._all_reduces(operation) if operation.cause is Cause.TENSOR else 1.0

    def _all_reduces(self, operation: Operation) -> float:
        return _ALL_REDUCES * self._layers_per_stage * operation.share

    @property
    def _layers_per_stage(self) -> float:
        return self.setting.model.num_layers / self.layout.pp

    def _size_bytes(self, operation: Operation) -> Bytes:
        model = self.setting.model
        if operation.cause is Cause.TENSOR:
            return model.activation_bytes
        if operation.cause is Cause.P2P:
            return round(model.activation_bytes * operation.share)
        layers = self._layers_per_stage * operation.share
        return operation.size_bytes or round(_ELEMENT_BYTES * model.layer_elements * layers)

    def _compute_s(self, operation: Operation) -> Seconds:
        model, layout = self.setting.model, self.layout
        if operation.cause is Cause.OPTIMIZER:
            others = layout.tp * layout.pp
            # A program that divides the optimizer itself says its largest part.
            divided = layout.dp if layout.zero > 1 else 1
            return model.optimizer_s * operation.share / others / divided
        if operation.cause not in (Cause.FORWARD, Cause.BACKWARD):
            return 0.0
        is_forward = operation.cause is Cause.FORWARD
        layer_s = (model.forward_s if is_forward else model.backward_s) / layout.tp
        return (layer_s + self._host_s()) * self._layers_per_stage * operation.share

    def _host_s(self) -> float:
        model, work = self.setting.model, self.calibration.hosts[self.setting.family]
        sharded = self.setting.family in ("fsdp", "zero")
        moved = _ELEMENT_BYTES * model.layer_elements if sharded else model.activation_bytes
        return work.pass_s + work.byte_s * moved

    def _savings(self, durations_s: FloatArray) -> dict[int, Saving]:
        """What the rest before each collective saves: it grows while its link is idle. [s]"""
        full_s = self.calibration.ring.burst_s(self.setting.fabric)
        ends_s = end_times(self.program, durations_s)
        state: dict[tuple[int, Stream], tuple[FloatArray, FloatArray]] = {}
        found = {}
        for position, operation in enumerate(self.program.operations):
            if not is_collective(operation):
                continue
            if operation.cause is Cause.TENSOR:
                rest_s = self._rest_s(operation, durations_s)
                found[position] = Saving(np.minimum(full_s, rest_s))
                continue
            burst_s, free_s = state.get(operation.lane, (full_s, np.zeros_like(full_s)))
            starts_s = ends_s[position] - durations_s[position]
            burst_s = np.minimum(full_s, burst_s + np.maximum(starts_s - free_s, 0.0))
            found[position] = Saving(burst_s)
            left_s = np.maximum(burst_s - durations_s[position], 0.0)
            state[operation.lane] = (left_s, ends_s[position])
        return found

    def _rest_s(self, operation: Operation, durations_s: FloatArray) -> FloatArray:
        """Compute between two all-reduces of a layer."""
        (before,) = operation.after
        rest_s: FloatArray = durations_s[before] / self._all_reduces(operation)
        return rest_s


def predict(
    setting: StrategySetting, calibration: StrategyCalibration, *, seed: int
) -> PredictedStrategy:
    """Predict one setting with its interval."""
    prices = StrategyPrices.of(setting, calibration)
    steps_s = end_times(prices.program, prices.durations()).max(axis=0)
    beyond = _UNCERTAINTY_BEYOND_PAIRS[setting.family] if setting.fabric.num_ranks > _PAIR else 0.0
    spread = np.sqrt(
        calibration.residuals[setting.family] ** 2
        + _LEAST_UNCERTAINTY[setting.family] ** 2
        + beyond**2
    )
    rng = np.random.default_rng([seed, *setting.name.encode()])
    uncertainty = np.exp(spread * rng.standard_normal(calibration.num_draws))
    return PredictedStrategy(
        name=setting.name,
        step_s=Interval.of(steps_s * uncertainty, nominal=prices.step_s()),
    )

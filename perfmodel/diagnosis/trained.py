"""What is trained, as times of its step over terms that causes change.

By a data sheet: large models by shape, others by trace. On a calibrated machine: a prediction, taken apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from perfmodel.answer import Question
from perfmodel.answer.measured import layout_costs, measured_answer, measured_caveats, step_times
from perfmodel.cost.collectives import ring_share
from perfmodel.cost.jobs import Jobs
from perfmodel.cost.layout_memory import ASSUMED_MEMORY, TENSORS, rank_parts
from perfmodel.cost.layout_time import DEVICE_OR_HOST, step_parts
from perfmodel.cost.parameters import FittedParameters
from perfmodel.layout import Layout
from perfmodel.machine import Evidence
from perfmodel.statistics import FloatArray, soft_maximum
from perfmodel.step import Stream
from perfmodel.workload import Workload
from perfmodel.workload.step import SymbolicStep

NUM_DRAWS: Final = 4000
#: Part of the backward pass that hides gradients of a traced model.
_HIDDEN: Final = 0.5
#: Operators of a transformer layer forward: what the prior of its host time is of.
_OPERATORS_OF_LAYER: Final = 15
#: Of LoRA: backward passes lack the gradients of weights, and hardly any gradient travels.
_FROZEN_COMPUTE: Final = 2 / 3
_FROZEN_GRADIENTS: Final = 0.01
#: Sharded weights are gathered in both passes; of gather, gather, reduce-scatter the last is left out.
_FROZEN_GATHERS: Final = 2 / 3
_SHARDED: Final = 3
#: Of the roofline at 70 % of both peaks. ResNet-50 in 16 bit: NVIDIA's own code reaches all of it (A100), that of
#: lambdal/deeplearning-benchmark 0.5 to 0.7 (A10, A100, H100).
_ROOFLINE: Final = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One setting of the training."""

    layout: Layout
    devices_per_node: int

    @property
    def devices(self) -> int:
        """All devices."""
        return self.layout.world_size

    @property
    def nodes(self) -> int:
        """All nodes."""
        return -(-self.devices // self.devices_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeModel:
    """A transformer by its shape."""

    name: str
    """As the user calls it."""
    parameters: float
    tokens: float
    """Of one sample."""
    jobs: Callable[[Run], Jobs]
    frozen: bool = False
    """Whether only adapters (LoRA) are trained."""

    def model_flop(self, run: Run) -> float:
        """Of one optimizer step of all devices, nothing recomputed: 6 N per token and attention."""
        return float(self.jobs(run).model_flop[0]) * (_FROZEN_COMPUTE if self.frozen else 1.0)

    def step_s(self, run: Run, terms: FittedParameters) -> FloatArray:
        """The closed form of layouts, shape ``(num_draws,)``. [s]"""
        jobs = self.jobs(run)
        changed = dict(terms)
        if self.frozen:
            changed["matmul_flop_per_s"] = np.asarray(terms["matmul_flop_per_s"]) / _FROZEN_COMPUTE
            changed["optimizer_bytes"] = np.asarray(terms["optimizer_bytes"]) * _FROZEN_GRADIENTS
            left = _FROZEN_GRADIENTS if run.layout.zero < _SHARDED else _FROZEN_GATHERS
            for name in ("data_bytes_per_s", "node_bytes_per_s"):
                changed[name] = np.asarray(terms[name]) / left
        columns = {name: np.reshape(values, (-1, 1)) for name, values in changed.items()}
        return np.asarray(step_parts(jobs, columns).total_s[:, 0])

    def memory_bytes(self, run: Run) -> Mapping[str, float]:
        """Tensors of a rank of the first stage as the closed form counts; empty where weights are frozen. [B]"""
        if self.frozen:
            return {}
        parts = rank_parts(self.jobs(run))
        return {name: float(size[0]) for name, size in parts.items() if name in TENSORS}

    def fit(self, run: Run, capacity_bytes: float) -> tuple[float, float] | None:
        """What the fullest rank needs with context and slack [B], and the odds that a device holds it.

        None where weights are frozen.
        """
        if self.frozen:
            return None
        jobs = self.jobs(run)
        needed = ASSUMED_MEMORY.fullest_bytes(jobs)
        odds = ASSUMED_MEMORY.fit_probability(jobs, needed, capacity_bytes)
        return float(needed[0]), float(odds[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfWorkload:
    """What a workload says of what is trained."""

    workload: Workload
    tokens: float | None = None

    @property
    def name(self) -> str:
        """Of the trace."""
        return self.workload.name

    @property
    def parameters(self) -> float:
        """Trainable elements."""
        return float(self.workload.num_parameters)

    def model_flop(self, run: Run) -> float:
        """Both passes."""
        each = self.workload.forward_flop + self.workload.backward_flop
        return run.layout.global_batch * each

    def memory_bytes(self, run: Run) -> Mapping[str, float]:  # noqa: ARG002 - the protocol's
        """Not from parameters alone; left to ``perfmodel memory``."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineModel(_OfWorkload):
    """A traced model under data parallelism: a roofline of its operators, launches, one ring of gradients.

    compute = sum over operators of max(FLOP / rate, bytes / memory) / 0.7
    launches = operators * launch          device = both, the longer hides the other
    step    = device + max(0, gradients - 0.5 * 2/3 device) + optimizer
    """

    trace: SymbolicStep
    rate_ratio: float = 1.0
    """Peak of the precision over that of 16 bit, which the terms hold."""
    bytes_ratio: float = 1.0
    """Bytes of an activation over those that were traced."""
    _by_batch: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict, compare=False)

    def step_s(self, run: Run, terms: FittedParameters) -> FloatArray:
        """See the class."""
        t = {name: np.atleast_1d(values) for name, values in terms.items()}
        n, layout, size = run.devices, run.layout, self.workload.gradient_bytes
        compute_s = self._compute_s(run, t)
        operators = self.workload.num_operators * layout.accumulation
        launches_s = operators * t["layer_host_s"] / _OPERATORS_OF_LAYER
        device_s = soft_maximum(compute_s, launches_s, DEVICE_OR_HOST)
        local = min(n, run.devices_per_node)
        # A ring leaves every node through the adapters of all its devices together.
        rate = t["data_bytes_per_s"]
        if run.nodes > 1:
            rate = np.minimum(rate, t["node_bytes_per_s"] * local)
        gradients_s = float(ring_share(n, passes=2)) * size / rate
        exposed_s = np.maximum(0.0, gradients_s - _HIDDEN * 2 / 3 * device_s / layout.accumulation)
        return np.asarray(
            device_s + exposed_s + size / 4 * t["optimizer_bytes"] / t["memory_bytes_per_s"]
        )

    def _compute_s(self, run: Run, terms: Mapping[str, FloatArray]) -> FloatArray:
        """Both passes of all micro-batches. [s]"""
        batch = run.layout.micro_batch
        if batch not in self._by_batch:
            self._by_batch[batch] = self._work(batch)
        flop, moved = self._by_batch[batch]
        rate = self.rate_ratio * terms["matmul_flop_per_s"]
        stream = terms["memory_bytes_per_s"] / self.bytes_ratio
        bounds = np.maximum(np.divide.outer(flop, rate), np.divide.outer(moved, stream))
        return np.asarray(run.layout.accumulation * bounds.sum(axis=0) / _ROOFLINE)

    def _work(self, micro_batch: int) -> tuple[FloatArray, FloatArray]:
        """FLOP and bytes of one micro-batch, by arithmetic intensity."""
        step = self.trace.at(micro_batch=micro_batch)
        counts = step.call_counts()
        rows = [(n, step.operators[place]) for (place, _), n in counts.items()]
        flop = np.array([n * float(o.flop) for n, o in rows])
        moved = np.array([n * float(o.read_bytes + o.written_bytes) for n, o in rows])
        # Operators of like intensity are bound by the same side.
        bins = np.floor(np.log2(1 + flop / np.maximum(moved, 1.0))).astype(int)
        sums = [np.bincount(bins, weights=each) for each in (flop, moved)]
        return np.asarray(sums[0], np.float64), np.asarray(sums[1], np.float64)


_EXCHANGES: Final = (Stream.COMM, Stream.TENSOR, Stream.SEND_FORWARD, Stream.SEND_BACKWARD)
#: What causes change. On a calibrated machine all are factors on what was measured.
_TERMS: Final = (
    "matmul_flop_per_s",
    "memory_bytes_per_s",
    "data_bytes_per_s",
    "tensor_bytes_per_s",
    "node_bytes_per_s",
    "layer_host_s",
)


class _Parts(NamedTuple):
    """Of a predicted step, shape ``(NUM_DRAWS,)`` each. [s]"""

    silent_s: FloatArray
    """The step with communication that costs nothing."""
    exposed_s: FloatArray
    exchange_s: FloatArray
    """All communication, hidden or not."""
    launches_s: FloatArray
    """Host alone; 0 where the device is the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedModel(_OfWorkload):
    """A workload on its machine; nothing of a data sheet.

    exposed = max(0, exchange / links - (exchange - exposed as predicted) / speed)
    step    = max(silent / speed + exposed, launches * host)
    """

    question: Question
    _by_run: dict[Layout, _Parts] = field(default_factory=dict, compare=False)
    _evidence: dict[Layout, Mapping[str, Evidence]] = field(default_factory=dict, compare=False)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Of the predictions of all runs that were asked for."""
        return measured_caveats(self.question, self._evidence) if self._evidence else ()

    def step_s(self, run: Run, terms: FittedParameters) -> FloatArray:
        """See the class."""
        parts = self._parts(run.layout)
        speed = np.asarray(terms["matmul_flop_per_s"])
        links = np.asarray(terms["node_bytes_per_s" if run.nodes > 1 else "data_bytes_per_s"])
        hidden_s = (parts.exchange_s - parts.exposed_s) / speed
        exposed_s = np.maximum(0.0, parts.exchange_s / links - hidden_s)
        device_s = parts.silent_s / speed + exposed_s
        return np.asarray(np.maximum(device_s, parts.launches_s * terms["layer_host_s"]))

    def terms(self, layout: Layout) -> dict[str, FloatArray]:
        """Factors of 1 in every draw; the host's 0 where nothing is launched ahead."""
        found = {name: np.ones(NUM_DRAWS) for name in _TERMS}
        found["layer_host_s"] *= bool(self._parts(layout).launches_s.any())
        return found

    def _parts(self, layout: Layout) -> _Parts:
        """The prediction of ``perfmodel predict`` in its own draws, repeated up to ``NUM_DRAWS``."""
        if layout not in self._by_run:
            asked = self.question.at(layout)
            costs, found = layout_costs(asked), measured_answer(asked)
            program, durations_s = costs.program, costs.durations_s
            raw_s = step_times(program, costs.terms, durations_s)
            factor = found.step_s / raw_s
            exposed_s = np.minimum(found.exposed_comm_s, raw_s)

            def total_s(*streams: Stream) -> FloatArray:
                places = [place for stream in streams for place in program.on_stream(stream)]
                return np.asarray(durations_s[places].sum(axis=0))

            every = (
                raw_s - exposed_s,
                exposed_s,
                total_s(*_EXCHANGES),
                total_s(Stream.HOST) * (not program.host_waits),
            )
            self._by_run[layout] = _Parts(*(np.resize(part * factor, NUM_DRAWS) for part in every))
            self._evidence[layout] = found.evidence
        return self._by_run[layout]


Trained: TypeAlias = LargeModel | RooflineModel | CalibratedModel
"""What is trained: the time of a step in every draw of the model's terms."""

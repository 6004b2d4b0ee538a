"""Cases: what a user holds, what was logged, and models of what is trained; nothing that was not said is assumed.

A model gives times of its step over terms that causes change. ``LargeModel`` (by shape) and ``RooflineModel`` (by
trace) go by a data sheet. ``CalibratedModel`` takes a prediction of a calibrated machine apart.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from perfmodel.answer import Question
from perfmodel.answer.measured import layout_costs, measured_answer, measured_caveats, step_times
from perfmodel.cost.collectives import ring_share
from perfmodel.cost.jobs import FittedParameters, Jobs
from perfmodel.cost.layout_time import DEVICE_OR_HOST, step_parts
from perfmodel.cost.memory import ASSUMED_MEMORY, TENSORS, rank_parts
from perfmodel.documents.observed import Logged, Unit
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.layout import Layout, accumulation_for, parse_layout
from perfmodel.machine import Cluster, Evidence
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.statistics import FloatArray, soft_maximum
from perfmodel.step import Stream
from perfmodel.units import BytesPerSecond, Seconds
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
    *("matmul_flop_per_s", "memory_bytes_per_s", "layer_host_s"),
    *("data_bytes_per_s", "tensor_bytes_per_s", "node_bytes_per_s"),
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


#: English text, tokenizers of 32,000 to 128,000 entries: assumed. [tokens/word]
TOKENS_PER_WORD: Final = 1.33
#: MFU that no transformer reaches: the best published ones on A100 and H100 have 0.6 to 0.7. Convolutions take
#: fewer FLOP than are counted, and so does causal attention, which counts in longer sequences.
_MOST_REACHED: Final = 0.8
_MOST_TOKENS: Final = 16_384
#: Of ZeRO, by strategy.
LEVELS: Final = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
#: Rates from here on need no digits behind the point.
_WHOLE: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A logged number as the time of an optimizer step."""

    text: str
    run: Run
    step_s: Seconds | None
    """None: nothing was logged, only what is expected is wanted. [s]"""
    is_possible: bool = True
    """False: faster than any device computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a user holds; options of ``diagnose``."""

    model: str | WorkloadDocument
    """A name, a file, or a traced model."""
    device: str | None = None
    """By its data sheet."""
    machine: MeasuredMachine | None = None
    """That was calibrated, in place of a data sheet."""
    cluster: Cluster | None = None
    """Links between the devices of ``machine``."""
    observed: str | Sequence[str] | None = None
    log: Path | None = None
    log_format: str | None = None
    devices: int | None = None
    devices_per_node: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    strategy: str | None = None
    nic_bandwidth: BytesPerSecond | None = None
    nics: int | None = None
    name: str | None = None
    lora: bool = False


def unsaid(logged: Logged, case: Case) -> list[str]:
    """What neither a logged number nor the options say of its run, as options."""
    per_node = logged.per_node or case.devices_per_node
    devices = logged.devices or case.devices or (logged.nodes and per_node)
    needs = []
    if not devices:
        needs.append("--devices (or '8 GPUs' in --observed)")
    if devices != 1 and not per_node and not (logged.nodes and devices):
        needs.append("--devices-per-node (or '1 node')")
    shared = math.prod(map(int, re.findall(r"\b[tpc]p=(\d+)", logged.layout)))
    is_said = case.strategy or re.search(r"\b(?:dp|ddp|fsdp|zero)=", logged.layout)
    if devices != shared and not is_said:
        needs.append(f"--strategy ({', '.join(LEVELS)})")
    return needs


def run_of(logged: Logged, case: Case) -> Run:
    """The run of a logged number of which nothing is ``unsaid``; ``UsageError`` if it contradicts itself."""
    where = f"--observed {logged.text!r}"
    per_node = logged.per_node or case.devices_per_node
    devices = logged.devices or case.devices
    if logged.per_node and logged.nodes:
        told = logged.nodes * logged.per_node
        if logged.devices not in (None, told, logged.per_node):
            raise UsageError(f"{where}: nodes x devices of a node are {told}, not {logged.devices}")
        devices = told
    elif logged.nodes and devices:
        if devices % logged.nodes:
            raise UsageError(f"{where}: {devices} devices must fill {logged.nodes} nodes evenly")
        per_node = devices // logged.nodes
    elif logged.nodes and per_node:
        devices = logged.nodes * per_node
    assert devices is not None, "the command asks for devices"
    assert per_node is not None or devices == 1, "the command asks for nodes"
    try:
        return Run(layout=_layout(logged, case, devices), devices_per_node=per_node or 1)
    except NotFeasible as error:
        raise UsageError(f"{where}: {error}; see --global-batch and --micro-batch") from error


def _layout(logged: Logged, case: Case, devices: int) -> Layout:
    parse_layout(logged.layout)  # refuses what makes no sense
    words = dict(word.split("=", 1) for word in logged.layout.split())
    if not {"dp", "ddp", "fsdp"} & set(words):
        shared = math.prod(int(words.get(key, "1")) for key in ("tp", "pp", "cp"))
        if devices % shared:
            raise UsageError(
                f"--observed {logged.text!r}: {devices} devices must be a multiple of tp x pp x cp = {shared}"
            )
        words["dp"] = str(devices // shared)
        if words["dp"] != "1" and "zero" not in words:
            if case.strategy is None:
                raise UsageError(
                    f"--strategy: must be one of {', '.join(LEVELS)} for {devices} devices, got none"
                )
            words["zero"] = str(LEVELS[case.strategy])
    words = ({} if case.precision is None else {"precision": case.precision}) | words
    layout = parse_layout(" ".join(f"{key}={value}" for key, value in words.items()))
    if layout.world_size != devices:
        raise UsageError(
            f"--observed {logged.text!r}: layout has {layout.world_size} devices, not {devices}"
        )
    accumulation, micro = case.accumulation, case.micro_batch
    if "micro_batch" in words:
        micro = layout.micro_batch
    if case.global_batch is not None and micro is not None:
        accumulation = accumulation_for(
            global_batch=case.global_batch, dp=layout.dp, micro_batch=micro
        )
    elif case.global_batch is not None:
        micro, left = divmod(case.global_batch, layout.dp * (accumulation or 1))
        if left:
            raise UsageError(
                f"--global-batch: must be a multiple of the {layout.dp} replicas of {logged.text!r}, got "
                f"{case.global_batch}"
            )
    assert micro is not None, "the command asks for a batch"
    return replace(layout, micro_batch=micro, accumulation=accumulation or layout.accumulation)


def observation_of(
    logged: Logged, run: Run, trained: Trained, *, peak_flop_per_s: float
) -> tuple[Observation, tuple[str, ...]]:
    """A logged number as a step time, and how it was read where the text leaves that open."""
    value, unit = logged.value, logged.unit
    if value is None or unit is None or unit is Unit.MEMORY:
        return Observation(text=logged.text, run=run, step_s=None), ()
    notes = []
    is_rate = unit in (Unit.TOKENS, Unit.SAMPLES, Unit.WORDS)
    if is_rate and logged.per_device is None and run.devices > 1:
        whole = f"all {run.devices} devices; write 'per GPU' if not"
        notes.append(f"{logged.text!r} is read as of {whole}")
    if unit is Unit.MICRO_STEP:
        count = run.layout.accumulation
        one = "one is read as a step; --accumulation says more"
        told = f"{count} are a step" if count > 1 else one
        notes.append(f"{logged.text!r} counts batches: {told}")
    if unit is Unit.WORDS:
        notes.append(f"a word is read as {TOKENS_PER_WORD} tokens")
    if unit is Unit.MFU and math.isinf(peak_flop_per_s):
        raise UsageError(
            f"--observed {logged.text!r}: MFU is a share of a data sheet's peak, which a profile lacks; give "
            "step times, or --device instead of --profile"
        )
    step_s = _step_s(logged, value, unit, run, trained, peak_flop_per_s)
    reached = trained.model_flop(run) / run.devices / step_s / peak_flop_per_s
    is_counted = trained.tokens is not None and trained.tokens <= _MOST_TOKENS
    is_possible = reached <= _MOST_REACHED or not is_counted
    if not is_possible:
        peak = "its peak (nanoGPT's is 312 TFLOP/s of an A100), " if unit is Unit.MFU else ""
        notes.append(
            f"TOO FAST: {logged.text!r} means {100 * reached:.0f} % of the dense peak (MFU), which no training "
            f"reaches; check {peak}units, batch, sequence length, model and device"
        )
    found = Observation(text=logged.text, run=run, step_s=step_s, is_possible=is_possible)
    return found, tuple(notes)


def _step_s(
    logged: Logged, value: float, unit: Unit, run: Run, trained: Trained, peak_flop_per_s: float
) -> Seconds:
    samples = run.layout.global_batch
    each = run.devices if logged.per_device else 1
    if unit in (Unit.TOKENS, Unit.WORDS):
        if trained.tokens is None:
            raise UsageError(
                f"--observed {logged.text!r}: {unit} need a model of sequences, got {trained.name}; "
                "give samples/s"
            )
        rate = value * (TOKENS_PER_WORD if unit is Unit.WORDS else 1.0) * each
        return samples * trained.tokens / rate
    if unit is Unit.SAMPLES:
        return samples / (value * each)
    if unit in (Unit.MFU, Unit.FLOP):
        reached = value * (peak_flop_per_s if unit is Unit.MFU else 1.0)
        return trained.model_flop(run) / run.devices / reached
    if unit is Unit.MICRO_STEP:
        return value * run.layout.accumulation
    return 1 / value if unit is Unit.STEPS else value


def logged_as(step_s: Seconds, logged: Logged, measured_s: Seconds | None) -> str:
    """A step in the unit that was logged, such as ``7,480 tokens/s per device``; empty for step times.

    ``measured_s``: The logged number as a step time: every rate falls as the step grows. [s]
    """
    if logged.value is None or measured_s is None:
        return ""
    unit, value = logged.unit, logged.value * measured_s / step_s
    whose = " per device" if logged.per_device else ""
    if unit in (Unit.TOKENS, Unit.WORDS) or (unit is Unit.SAMPLES and value >= _WHOLE):
        return f"{value:,.0f} {unit}{whose}"
    if unit is Unit.SAMPLES:
        return f"{value:.3g} {unit}{whose}"
    if unit is Unit.MFU:
        return f"{100 * value:.3g} % MFU"
    return f"{value / 1e12:.0f} TFLOP/s" if unit is Unit.FLOP else ""

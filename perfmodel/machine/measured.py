"""Costs of a machine as measured: curves of phases, operators, collectives, and what DDP adds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final, Literal

from annotated_types import Ge, MinLen

from perfmodel.machine import Cluster, Evidence, Machine
from perfmodel.statistics import Count, NonNegative, Positive, Share
from perfmodel.workload import Workload

#: Precisions that devices compute in at different rates; 16-bit types share one.
Precision = Literal["fp32", "half"]
MemoryFormat = Literal["contiguous", "channels_last"]
#: Variance of an occasion over that of a run: ten campaigns of ``validate`` on processors, each left out, 0.3 to 0.5.
#: GPUs take it, too: those that ship vary less than the least, 0.6 %.
OCCASION_OVER_RUN: Final = 0.43


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutError:
    """Errors of model families that a fit had not seen, each left out once."""

    precision: Precision
    memory_format: MemoryFormat
    num_rows: Count
    num_families: Count
    mape: NonNegative
    """Mean absolute error, predicted over measured minus 1."""
    log_error: Positive
    """Absolute error in log that one new model in ten exceeds; few rows lean on errors of other devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCosts:
    """Constants of the law of steps, fitted to the step times of others."""

    flop_per_s: dict[str, Positive]
    """Peaks of the data sheet, by precision of the factors; ``tf32``: of convolutions in fp32."""
    bytes_per_s: Positive
    """Memory bandwidth of the data sheet."""
    constants: dict[str, Positive]
    """By name; what is not here is as the prior over devices says."""
    undetermined: tuple[str, ...]
    """Names among them that the rows hardly tell: the prior is kept."""
    left_out: Annotated[tuple[LeftOutError, ...], MinLen(1)]
    """By precision and memory format, that with most rows first."""
    num_rows: Count
    num_models: Count
    source: str
    """Who measured the steps, and where."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the software that was measured, such as torch."""
    version_drift: NonNegative = 0.0
    """Absolute change in log between versions that one model in ten exceeds; 0 if unknown."""
    generation: str = ""
    """Of the device: what its rows do not tell is as others of it have it."""

    @property
    def usual_precision(self) -> Precision:
        """16 bit where the device has tensor cores and rows show it."""
        has_tensor_cores = self.flop_per_s["half"] > self.flop_per_s["fp32"]
        shown = {each.precision for each in self.left_out}
        return "half" if shown == {"half"} or (has_tensor_cores and "half" in shown) else "fp32"

    def error(self, precision: Precision, memory_format: MemoryFormat) -> LeftOutError | None:
        """Errors of left-out families in one mode, if rows show it."""
        found = (
            e for e in self.left_out if (e.precision, e.memory_format) == (precision, memory_format)
        )
        return next(found, None)


if TYPE_CHECKING:
    from perfmodel.workload.memory import StepMemory
    from perfmodel.workload.step import SymbolicStep

#: Standard error of a logarithm.
RelativeError = NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A typical time at one abscissa (a micro-batch, or a message size in bytes)."""

    at: Positive
    time_s: NonNegative
    relative_error: RelativeError
    """Standard error of the logarithm of ``time_s``."""


Curve = Annotated[tuple[CurvePoint, ...], MinLen(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCurves:
    """Time of each phase of one micro-step over the micro-batch, by the number of ranks at work."""

    world_size: Count
    input: Curve
    forward: Curve
    backward: Curve
    optimizer: Curve
    dispatch_forward: tuple[CurvePoint, ...] = ()
    """Host time to issue the forward pass; empty on devices that run synchronously."""
    dispatch_backward: tuple[CurvePoint, ...] = ()
    dispatch_optimizer: tuple[CurvePoint, ...] = ()


PHASE_CURVES: Final = tuple(
    name for name in PhaseCurves.__dataclass_fields__ if name != "world_size"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """Spread of single steps of one rank around the typical one."""

    micro_batch: Count
    ratios: tuple[Positive, ...]
    """Step over typical step at evenly spaced probabilities (k + 1/2) / len."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step of a model's own training, under DistributedDataParallel if several ranks of one node trained."""

    world_size: Count
    micro_batch: Count
    step_s: Positive
    relative_error: RelativeError
    run_log_error: RelativeError | None = None
    """Of one more training, all trained steps of the machine together; None where none was trained again."""
    predicted_s: tuple[NonNegative, ...] = ()
    """Draws of what the costs of the machine say of it, the nominal first; none where nobody asked them. [s]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWorkload:
    """One workload as measured on the machine."""

    workload: Workload
    phases: Annotated[tuple[PhaseCurves, ...], MinLen(1)]
    """Ascending in ``world_size``; the first is one rank alone."""
    noise: tuple[StepNoise, ...]
    rank_spread: RelativeError
    """Standard deviation of the logarithm of the ranks' own typical steps; 0 with one rank."""
    evidence: Evidence | None = None
    """Where the curves come from, if not from steps of this workload on this machine."""
    measured_batches: tuple[int, ...] = ()
    """Micro-batches at which all operators were measured in place, if the curves are theirs."""
    untimed: tuple[str, ...] = ()
    """Operators that no timing tells about; their time is the roofline of the device."""
    far: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """By micro-batch, families of operators whose curves were read far from every timing, the longest first."""
    shared_log_error: NonNegative = 0.0
    """Absolute error in log, common to all phases, that one workload in ten exceeds."""
    trained: tuple[TrainedStep, ...] = ()
    """Steps of its own training in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWorkload(MeasuredWorkload):
    """A workload whose operators are known, so that any layout can divide them."""

    trace: "SymbolicStep"
    memory: "StepMemory | None" = None
    """Blocks of layers; without them the step is one unit."""

    @classmethod
    def of(
        cls, measured: MeasuredWorkload, trace: "SymbolicStep", memory: "StepMemory | None"
    ) -> "TracedWorkload":
        """Times that are known already, with the operators behind them."""
        known = {field.name: getattr(measured, field.name) for field in fields(MeasuredWorkload)}
        return cls(**known, trace=trace, memory=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProfile:
    """One collective over the group sizes at hand."""

    collective: str
    world_size: Count
    points: Curve
    """Time over the size of the whole array in bytes, ascending; it counts as in nccl-tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective(CollectiveProfile):
    """The same of a group whose nodes are known."""

    world_size: Annotated[int, Ge(2)]
    num_nodes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapProfile:
    """Matrix products and one all-reduce at the same time, each as a fraction of its speed alone."""

    world_size: Count
    size_bytes: Count
    """Of the all-reduce."""
    compute_speed: Positive
    comm_speed: Positive


_DDP_COSTS: Final = (
    *("bucket_s", "bucket_s_per_byte", "all_reduce_start_s"),
    *("compute_speed", "comm_speed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpCosts:
    """What DDP adds to a step beyond compute and communication alone; draws carry the covariance."""

    names: tuple[str, ...] = _DDP_COSTS
    values: tuple[float, ...]
    draws: tuple[tuple[float, ...], ...]
    """Bootstrap over the rounds of the calibration; shape ``(num_draws, len(names))``."""
    determined: tuple[bool, ...]
    """Whether the data determine each value; otherwise it is an assumption."""

    def __post_init__(self) -> None:
        """Refuse another number of values, or values of something else."""
        sizes = {*map(len, (self.names, self.values, self.determined, *self.draws))}
        if set(self.names) != set(_DDP_COSTS) or len(sizes) > 1:
            raise ValueError(f"must have a value, and draws, of each of {', '.join(_DDP_COSTS)}")

    def times(self, factors: Mapping[str, float]) -> "DdpCosts":
        """Costs times factors by name; those without one stay."""
        each = [factors.get(name, 1.0) for name in self.names]
        values, *draws = (
            tuple(value * factor for value, factor in zip(row, each, strict=True))
            for row in (self.values, *self.draws)
        )
        return replace(self, values=values, draws=tuple(draws))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """What a family of layouts adds to each of its exchanges: copies, calls, waiting for each other."""

    family: str
    """One of fsdp, zero, tensor and pipeline."""
    world_size: Count
    call_s: NonNegative
    byte_s: NonNegative
    """Per byte that is exchanged. [s/B]"""
    log_error: RelativeError
    """Standard deviation, in log, of measured steps around those predicted with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Errors of the model on its own calibration, each setting left out of the fit once."""

    single_log_errors: tuple[float, ...]
    ddp_log_errors: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """A kernel alone: what the device can do at most."""

    probe: str
    dtype: str
    shape: tuple[int, ...]
    time_s: Positive
    flop_per_s: NonNegative
    bytes_per_s: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleStep:
    """A calibrated setting as measured, for plots and speed-ups: what is typical over repetitions."""

    workload: str
    world_size: Count
    micro_batch: Count
    synchronisation: str
    bucket_cap_mb: float | None
    step_s: Positive
    relative_error: RelativeError


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFamily:
    """Timings of operators that tell about each other, as ratios to the sum of their work's times."""

    name: str
    flop_per_s: NonNegative
    """Highest rate that any member reached; 0 if none computes products."""
    bytes_per_s: Positive
    least_s: Positive
    """Fastest member: the cost of a call that has nothing to do. [s]"""
    unit_s: Annotated[tuple[NonNegative, ...], MinLen(1)]
    """Time per unit of each kind of work. [s]"""
    features: tuple[tuple[float, ...], ...]
    log_ratios: tuple[float, ...]
    """Logarithm of time over that sum, one per row of ``features``."""
    lengths: tuple[Positive, ...]
    spread: Positive
    noise: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperator:
    """One operator of a workload, timed in the order and surroundings of its step."""

    signature: str
    phase: str
    time_s: NonNegative
    """Mean over its calls. [s]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A traced step at one micro-batch, measured operator by operator, and as a whole where the model was trained."""

    workload: str
    micro_batch: Count
    parameters: str
    """Signature of the parameters and the optimizer."""
    operators: tuple[MeasuredOperator, ...]
    optimizer_s: NonNegative
    relative_error: RelativeError
    """Of ``trained_s`` if that is known, else of the sum of the operators."""
    trained_s: Positive | None = None
    """A step of the model's own training on one device."""
    issued_s: Positive | None = None
    """What its host takes to issue that step on an idle device; None where the two are one."""
    ddp_s: Mapping[int, tuple[Positive, RelativeError]] = field(default_factory=dict)
    """The same under DistributedDataParallel and its relative error, by the number of ranks of one node."""
    run_log_error: RelativeError | None = None
    """As ``TrainedStep.run_log_error``."""
    calls: str = ""
    """Signature of the calls of the step that was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaling:
    """How costs of a calibrated device become those of a device that is not present."""

    source: DeviceCosts | None
    """Law of the calibrated device; None of one that is no GPU of the catalogue."""
    target: DeviceCosts
    log_error: RelativeError
    """Absolute error in log, common to all phases, that one workload in ten exceeds."""
    notes: tuple[str, ...]
    """What a reader must know of any prediction."""
    notes_on_groups: tuple[str, ...]
    """The same of predictions for several devices."""
    device_kind: Literal["cpu", "cuda"]
    """Whose framework and allocator take memory; whatever is timed is as on the calibrated kind."""
    architecture: str
    """Of the device that is not present, such as "Hopper sm_90"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCosts:
    """What single operators cost on the machine."""

    peak_flop_per_s: Positive
    peak_bytes_per_s: Positive
    """No operator is faster than these two rates allow."""
    families: tuple[OperatorFamily, ...]
    measured: tuple[MeasuredStep, ...]
    replay_log_error: RelativeError
    """Standard deviation, in log, of sums of operators timed in place around reference passes."""
    curve_log_error: RelativeError
    """The same of sums of operators read from curves."""
    rescaling: Rescaling | None = None
    """Set where the costs are of another device than the timed one; never in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeatability:
    """How far steps of one setting differ when they are run again: standard deviations, in log.

    log step = typical + occasion + round + run. Occasions, hours apart, and rounds move all alike on as many ranks.
    """

    run: dict[Count, RelativeError]
    """Of one run of a setting, by the number of ranks at work."""
    round: RelativeError
    """Of a round of fresh processes."""
    occasion: RelativeError
    """Of an occasion: inferred from runs, since one calibration sees one occasion."""
    host: RelativeError = 0.0
    """Of one run of a host that an asynchronous device waits for; 0 where all steps wait: ``run`` is its, too."""
    host_occasion: RelativeError | None = None
    """The same of an occasion, as a round of it; ``None``: nothing tells the two apart, it is as much as a run."""

    def run_of(self, world_size: int) -> float:
        """Of a run with ``world_size`` ranks, or with the most below that; 0 if unknown."""
        return self.run.get(max((n for n in self.run if n <= world_size), default=0), 0.0)

    @property
    def host_again(self) -> float:
        """How far one more run of a host, on another occasion, is off the mean of many."""
        later = self.host if self.host_occasion is None else self.host_occasion
        return math.hypot(self.host, later)

    def known_round(self, num_rounds: int) -> float:
        """Error of a mean over ``num_rounds`` rounds."""
        return self.round / math.sqrt(num_rounds)

    def again(self, num_rounds: int, num_repetitions: int) -> float:
        """How far a mean over new runs of a calibrated setting is off that of the calibration, in log."""
        runs = [*self.run.values(), *((self.host,) if self.host else ())] or [0.0]
        run = math.sqrt(sum(each**2 for each in runs) / len(runs))
        own = run * math.sqrt(1 / num_rounds + 1 / num_repetitions)
        return math.hypot(own, self.common(num_rounds, num_repetitions))

    def common(self, num_rounds: int, num_repetitions: int = 1) -> float:
        """Of a mean over new runs, beside that of the calibration: what all settings share."""
        new_round = self.round / math.sqrt(num_repetitions)
        return math.hypot(self.occasion, new_round, self.known_round(num_rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Time of the host to issue operators of real steps to a device that runs behind it. [s]"""

    forward_s: NonNegative
    """Per operator with a kernel."""
    backward_s: NonNegative
    """The same where autograd issues it, beside its nodes."""
    view_s: NonNegative
    """Per operator without."""
    optimizer_s: NonNegative
    """Per operator of the optimizer, and
    ..."""
    tensor_s: NonNegative
    """... per tensor of its lists."""
    module_s: NonNegative = 0.0
    """Per module that the forward pass calls: its Python."""
    phase_s: NonNegative = 0.0
    """Per phase: what it costs beside its operators."""
    node_s: NonNegative = 0.0
    """Per node of autograd."""
    relative_error: RelativeError
    """Of the host's time of a step, in log: that of models left out of the fit."""
    addition_s: NonNegative | None = None
    """Per gradient that is added to an earlier one, beyond the view of one that is kept; absent if not timed."""
    addition_log_error: RelativeError = 0.0
    """Of that, for another model."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MeasuredMachine(Machine):
    """A machine that was calibrated: what it costs, and how sure that is."""

    device_kind: Literal["cpu", "cuda", "virtual"]
    """A virtual device costs what a truth file says: it proves the tool, and is no prediction."""
    backend: str
    asynchronous: bool
    """Whether the device runs behind the host's back (a GPU does, a CPU does not)."""
    ranks_per_node: Count
    num_nodes: Count
    num_rounds: Count
    environment: dict[str, object]
    repeatability: Repeatability
    workloads: tuple[MeasuredWorkload, ...]
    collectives: tuple[CollectiveProfile, ...]
    between_nodes: tuple[CollectiveProfile, ...] = ()
    """Of one rank on each of several nodes."""
    overlaps: tuple[OverlapProfile, ...] = ()
    ddp: DdpCosts
    residual: Residual
    layouts: tuple[LayoutCost, ...] = ()
    """Ascending in ``world_size``; empty where layouts other than DDP were not run."""
    rates: tuple[ComputeRate, ...]
    dispatch_s: NonNegative
    """Host time to issue one operator that has nothing to do."""
    host: HostCosts | None = None
    """The same in real steps; absent where host and device are one."""
    steps: tuple[SingleStep, ...]
    operators: OperatorCosts | None = None
    """Durations for traced workloads; absent where no operator was timed."""
    device_costs: DeviceCosts | None = None
    """The same where whole steps of other models are all that is known."""
    cluster: Cluster | None = None
    """Its node among others: by data sheet where it ships with perfmodel, or joined like those of another
    machine. None: nothing is known of other nodes."""
    undetermined: tuple[str, ...]
    """What the data could not determine, in words."""
    steal: Share = 0.0
    """Processor time that a hypervisor gave to others meanwhile, of what was wanted."""

    def with_links(
        self, edited: Callable[[CollectiveProfile], CollectiveProfile]
    ) -> "MeasuredMachine":
        """The machine with all its collectives edited, inside nodes and between."""
        return replace(
            self,
            collectives=tuple(map(edited, self.collectives)),
            between_nodes=tuple(map(edited, self.between_nodes)),
        )

    @property
    def max_world_size(self) -> int:
        """Most ranks that were measured together."""
        return self.ranks_per_node * self.num_nodes

    @property
    def devices_per_node(self) -> int | None:
        """Devices that share a node, measured or not; None where they were not counted, or on a CPU."""
        virtual, gpus = self.environment.get("virtual"), self.environment.get("gpus")
        if isinstance(virtual, dict):
            known = virtual.get("devices_per_node", virtual.get("devices"))
            return known if isinstance(known, int) else None
        return len(gpus) if self.device_kind == "cuda" and isinstance(gpus, list) and gpus else None

    @property
    def host_memory_bytes(self) -> int | None:
        """What processes on a node may use together, by the memory or its control group; None: not recorded. [B]"""
        memory = self.environment.get("memory")
        known = memory if isinstance(memory, dict) else {}
        limits = (known.get("total_bytes"), known.get("limit_bytes"))
        return min((each for each in limits if isinstance(each, int)), default=None)

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment in which ranks were measured, those that change what is measured."""
        found = self.environment.get("variables")
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def precision_of_fp32(self, operator: str) -> Literal["fp32", "tf32"]:
        """In which precision steps here multiplied fp32 factors: torch has a switch for each kind of product."""
        flags = self.environment.get("gpu_flags")
        if not isinstance(flags, dict) or self.variables.get("NVIDIA_TF32_OVERRIDE") == "0":
            return "fp32"
        name = "cudnn_tf32" if "convolution" in operator else "matmul_tf32"
        return "tf32" if flags.get(name) else "fp32"

    @property
    def truth(self) -> str | None:
        """The file that says what a virtual device costs."""
        virtual = self.environment.get("virtual")
        return str(virtual["truth"]) if isinstance(virtual, dict) else None

    @property
    def rescaling(self) -> Rescaling | None:
        """How operators are brought to another device, if they are."""
        return None if self.operators is None else self.operators.rescaling

    @property
    def law(self) -> DeviceCosts | None:
        """Of steps on its device, where no operator of it was timed."""
        return self.device_costs if self.rescaling is None else self.rescaling.target

    @property
    def calibrated(self) -> "MeasuredMachine":
        """The machine that was timed, where another device is asked for."""
        assert self.operators is not None
        return replace(self, operators=replace(self.operators, rescaling=None))

    @cached_property
    def without_links(self) -> "MeasuredMachine":
        """The same where a cluster file tells of all links, as of one device that was timed alone."""
        assert self.operators is not None
        assert self.rescaling is not None
        rescaling = replace(self.rescaling, notes_on_groups=())
        return replace(
            self,
            backend="nccl",
            num_nodes=1,
            ranks_per_node=1,
            collectives=(),
            between_nodes=(),
            ddp=self.ddp.times({"all_reduce_start_s": 0.0}),
            operators=replace(self.operators, rescaling=rescaling),
        )

    @property
    def traced_kind(self) -> Literal["cpu", "cuda"]:
        """Kind of device whose kernels are in traces for it; a virtual device runs those of a CPU."""
        return "cuda" if self.device_kind == "cuda" else "cpu"

    @property
    def memory_kind(self) -> Literal["cpu", "cuda"]:
        """Kind of device whose framework and allocator take memory."""
        if self.rescaling is not None:
            return self.rescaling.device_kind
        return "cpu" if self.device_kind == "cpu" else "cuda"

    def workload(self, name: str) -> MeasuredWorkload | None:
        """A calibrated workload by name, if there is one; its whole steps tell nothing of another device."""
        if self.rescaling is not None:
            return None
        return next((entry for entry in self.workloads if entry.workload.name == name), None)

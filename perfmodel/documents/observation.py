"""Raw observations: one line of JSON per measurement, as the workers saw it.

Durations are stored to a tenth of a nanosecond, finer than any clock ticks: the digits beyond are the
arithmetic of floats, and nearly half of a packed file.
"""

import functools
import hashlib
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import from_json, to_json

from perfmodel.documents import Record, first_problem
from perfmodel.errors import InvalidDocument, reading, why
from perfmodel.files import (
    MOST_KEYS,
    MOST_VALUES,
    begins_sealed,
    parse_json,
    read_bytes,
    refuse_deep,
    unseal_line,
)
from perfmodel.layout import RunSetting
from perfmodel.statistics import Share
from perfmodel.units import MOST_DIGITS
from perfmodel.workload import Operator, Phase, Workload, traffic_bytes
from perfmodel.workload.memory import StepMemory
from perfmodel.workload.step import SymbolicStep

_Line = TypeVar("_Line")
_stored: Final = PlainSerializer(lambda duration_s: round(duration_s, 10), when_used="json")
Duration = Annotated[float, Field(ge=0), _stored]
Durations = tuple[Duration, ...]
_SomeDurations = Annotated[Durations, Field(min_length=1)]

#: How the reason of a run begins that its device could not hold.
OUT_OF_MEMORY: Final = "out of memory"

#: Of a step on one rank, in order, as ``RankSteps`` times them.
PHASES: Final = ("input", "forward", "backward", "optimizer")


class PeakMemory(Record):
    """Of a device with memory of its own, since the run began. [B]"""

    allocated_bytes: NonNegativeInt
    """Held by tensors at most."""
    reserved_bytes: NonNegativeInt
    """Held by the caching allocator at most."""
    used_bytes: NonNegativeInt
    """Of the whole device in the end: contexts, buffers of collectives and other processes included."""


class RankSteps(Record):
    """Every timed step of one rank by the clock on the wall, or of the GPU; fields of equal length. [s]"""

    rank: int
    step_s: Durations
    """From the start of the step to its end."""
    input_s: Durations
    forward_s: Durations
    backward_s: Durations
    optimizer_s: Durations
    memory: PeakMemory | None = None
    """With models that earlier tasks left there; None where the device has none of its own."""


class DeviceStreams(Record):
    """Host and device time of a step taken apart, on devices that run asynchronously. [s]

    ``dispatch`` is how long the host takes to issue a phase; ``dense`` is how long the device takes
    for it when everything has been issued beforehand.
    """

    dispatch_forward_s: Durations
    """With the copy of the batch."""
    dispatch_backward_s: Durations
    dispatch_optimizer_s: Durations
    dense_input_s: tuple[float, ...] = ()
    dense_forward_s: Durations
    dense_backward_s: Durations
    dense_optimizer_s: Durations


class Taken(Record):
    """What one task of a round observed."""

    task: str
    round: int


class StepObservation(Taken):
    """One repetition of a setting: a few steps in one process."""

    kind: Literal["step"] = "step"
    started_utc: float
    setting: RunSetting
    ranks: tuple[RankSteps, ...]
    device_streams: DeviceStreams | None = None
    bucket_bytes: tuple[PositiveInt, ...]
    """Sizes of the buckets that DDP formed, in the order it reduces them; empty without DDP. [B]"""


class LoopObservation(Taken):
    """A plain training loop in a process of its own, with a clock around many steps."""

    kind: Literal["loop"] = "loop"
    started_utc: float
    setting: RunSetting
    step_s: Annotated[float, Field(gt=0)]
    """Mean over the steps, of the slowest rank. [s]"""
    num_steps: PositiveInt
    memory: PeakMemory | None = None
    """Of the first rank, in a process that did nothing else; None where the device has none of its own."""


class FailedObservation(Taken):
    """A training that raised, diverged or was killed."""

    kind: Literal["failed"] = "failed"
    setting: RunSetting
    reason: str

    @property
    def is_too_large(self) -> bool:
        """Whether memory ended: then a larger one need not be tried."""
        return self.reason.startswith(OUT_OF_MEMORY)


class CollectiveObservation(Taken):
    """Repeats of one collective, alone on the machine."""

    kind: Literal["collective"] = "collective"
    collective: str
    world_size: int
    size_bytes: int
    stride: PositiveInt = 1
    """How far its ranks are apart in the numbering of all."""
    durations_s: tuple[Durations, ...]
    """Shape ``(world_size, repeats)``. [s]"""


#: A stack of square layers, bare and under DDP by turns; ``shape``: gradients, width.
DDP_PROBE: Final = "ddp"
#: Probes that the host's clock times: they have nothing to do, or start no kernel.
HOST_PROBES: Final = ("dispatch", "view")
#: Short kernels between two events, as many as its shape says.
QUEUE_PROBE: Final = "queue"


class ComputeObservation(Taken):
    """Repeats of one piece of computation or one copy."""

    kind: Literal["compute"] = "compute"
    probe: str
    dtype: str
    shape: tuple[int, ...]
    flop: float
    moved_bytes: float
    durations_s: Durations


class WorkloadObservation(Taken):
    """A reference model as traced on this machine, gradients in the order they became ready."""

    kind: Literal["workload"] = "workload"
    workload: Workload


class OverlapObservation(Taken):
    """Compute and an all-reduce alone and at the same time. [s]"""

    kind: Literal["overlap"] = "overlap"
    world_size: int
    size_bytes: int
    compute_alone_s: Durations
    comm_alone_s: Durations
    compute_together_s: Durations
    comm_together_s: Durations


class TimedOperator(Record):
    """One operator of a step in its surroundings: in every pass the mean over its calls. [s]"""

    signature: str
    phase: Phase
    num_calls: PositiveInt
    times_s: Durations


class ReplayObservation(Taken):
    """A traced step repeated operator by operator, in its order and with its allocations.

    On several ranks its model trained under DistributedDataParallel, and nothing was repeated.
    """

    kind: Literal["replay"] = "replay"
    workload: str
    micro_batch: PositiveInt
    parameters: str
    """Signature of the parameters and the optimizer."""
    world_size: PositiveInt = 1
    operators: tuple[TimedOperator, ...] = ()
    forward_s: Durations = ()
    """Sum over the calls of the phase, by pass."""
    backward_s: Durations = ()
    optimizer_s: Durations = ()
    trained_s: PositiveFloat | None = None
    """A step of the model's own training, a mean over many; None if only operators ran."""
    issued_s: PositiveFloat | None = None
    """What the host takes to issue such a step on an idle device; None where the two are one."""
    untrained: str = ""
    """Why its model, whose code was at hand, did not train."""
    calls: str = ""
    """Signature of the calls of the step; absent from records of earlier versions."""
    failed: tuple[str, ...] = ()
    """Operators that could not be repeated from their record."""
    traced: SymbolicStep | None = None
    """The step, where it was traced by the worker itself."""
    model: Workload | None = None
    num_trained: int | None = None
    """Both in records of earlier versions alone; unused."""


@functools.lru_cache(maxsize=8192)
def _once(operator: Operator) -> Operator:
    """The same for equal ones, which every round times again; with the traffic that traces count today."""
    read_bytes, written_bytes = traffic_bytes(
        operator.name,
        operator.inputs,
        operator.outputs,
        mutated=operator.mutated,
        view=operator.view,
    )
    return replace(operator, read_bytes=read_bytes, written_bytes=written_bytes)


class IsolatedOperator(Record):
    """One operator of a single layer, or of a model drawn at random. [s]"""

    operator: Annotated[Operator, AfterValidator(_once)]
    phase: Phase
    times_s: _SomeDurations
    """Inside a step that consists of such layers, or of the model; a mean over its calls."""
    num_calls: PositiveInt = 1
    """In a step of the model."""


class OptimizerPoint(Record):
    """An optimizer step over equal tensors. [s]"""

    optimizer: str
    implementation: str
    num_tensors: PositiveInt
    tensor_bytes: PositiveInt
    times_s: _SomeDurations
    """As it follows a backward pass."""


class HostSteps(Record):
    """Steps of few samples in a plain loop, in which the device waits for its host."""

    issued: dict[Phase, dict[str, int]]
    """What the host issues in each phase, by the name of its cost in ``HostCosts``."""
    dispatch_s: dict[Phase, Durations]
    """Of every step. [s]"""
    adding_s: Durations = ()
    """Of its second backward pass, which adds to the gradients of the first. [s]"""
    num_gradients: NonNegativeInt = 0
    """That it adds up."""


class OperatorsObservation(Taken):
    """Operators of some single layers, or of a model drawn at random."""

    kind: Literal["operators"] = "operators"
    model: str | None = None
    operators: tuple[IsolatedOperator, ...]
    optimizers: tuple[OptimizerPoint, ...]
    host: HostSteps | None = None
    """Of the model, on a device that runs behind its host."""


class StackSpec(Record):
    """A stack of equal layers that any layout divides."""

    layers: PositiveInt
    width: PositiveInt
    tokens: PositiveInt = 1
    head: int = 0
    """Width of an attention head; 0: layers without attention."""


class LayoutObservation(Taken):
    """Steps of a stack of layers under a layout, in a plain loop."""

    kind: Literal["layout"] = "layout"
    stack: StackSpec
    layout: str
    optimizer: str
    step_s: tuple[Durations, ...]
    """Shape ``(world_size, num_steps)``. [s]"""
    workload: Workload | None = None
    trace: SymbolicStep | None = None
    memory: StepMemory | None = None
    """What was trained, if it was traced as well."""

    @property
    def median_step_s(self) -> float:
        """Median over the steps of their mean over the ranks, which wait for each other. [s]"""
        return statistics.median(
            statistics.fmean(of_ranks) for of_ranks in zip(*self.step_s, strict=True)
        )


class ProcessorObservation(Taken):
    """What all processors of the machine did during a task; of several machines the one that lost most."""

    kind: Literal["processor"] = "processor"
    busy_s: Duration
    steal_s: Duration
    """Wanted, and given to others by a hypervisor, as far as it tells."""


class GpuObservation(Taken):
    """What the GPUs of one launch did meanwhile, by ``nvidia-smi`` and the kernel's log."""

    kind: Literal["gpus"] = "gpus"
    num_busy: NonNegativeInt
    """Samples of a GPU at work."""
    clock_hz: float | None
    """Median of its multiprocessors, at work. [Hz]"""
    most_power_w: float | None
    most_heat_c: float | None
    slowed: dict[str, Share]
    """By what lowered clocks, the share of the samples at work."""
    xid: tuple[str, ...]
    """Errors that the driver reported."""


def _shallow(facts: dict[str, object]) -> dict[str, object]:
    """What no schema describes is nested no deeper than any document."""
    refuse_deep(facts)
    return facts


class EnvironmentObservation(Taken):
    """What the machine was; free-form facts, see ``calibrate/environment.py``."""

    kind: Literal["environment"] = "environment"
    facts: Annotated[dict[str, object], AfterValidator(_shallow)]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the machine; ``InvalidDocument`` if there is none."""
        host = self.facts.get("host")
        found = host.get("fingerprint") if isinstance(host, dict) else None
        if not isinstance(found, str):
            raise InvalidDocument(
                f"{self.task}: environment must name host.fingerprint, got {found!r}"
            )
        return found


Observation = Annotated[
    StepObservation
    | LoopObservation
    | FailedObservation
    | CollectiveObservation
    | ComputeObservation
    | WorkloadObservation
    | OverlapObservation
    | ReplayObservation
    | OperatorsObservation
    | LayoutObservation
    | ProcessorObservation
    | GpuObservation
    | EnvironmentObservation,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[Observation] = TypeAdapter(Observation)


#: Every digit as 0, and more of them than an integer may have.
_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER: Final = b"0" * (MOST_DIGITS + 1)
_OF_NUMBERS: Final = b"0123456789+-.eE"
_TEXT: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')


def read_lines(path: Path, kind: TypeAdapter[_Line], *, what: str) -> list[_Line]:
    """Values of a file with one JSON value per line; half a last line, of an interrupted writer, is dropped.

    Lines of older versions have no seal; in one file all have one, or none.
    """
    with reading(path, what):
        # As bytes: text would also be split at the line separators of Unicode.
        lines = read_bytes(path).split(b"\n")
    found: list[_Line] = []
    shapes: set[bytes] = set()
    bare: list[int] = []
    # What stands after the last line end is empty, or half an object.
    *lines, rest = lines
    if rest.strip() and not (lines and rest.startswith(b"{")):
        raise InvalidDocument(
            f"{path}: line {len(lines) + 1}: must be a JSON object; save it again"
        )
    for number, written in enumerate(lines, start=1):
        try:
            line, is_sealed = unseal_line(written)
            if not is_sealed:
                bare.append(number)
            if not _is_surely_strict(line, shapes):
                parse_json(line.decode())
            found.append(kind.validate_json(line, strict=True))
        except ValueError as error:
            said = first_problem(error) if isinstance(error, ValidationError) else why(error)
            raise InvalidDocument(f"{path}: line {number}: {said}") from error
    if bare and len(bare) < len(found):
        raise InvalidDocument(f"{path}: line {bare[0]}: must carry a seal as others do, got none")
    return found


def _is_surely_strict(line: bytes, shapes: set[bytes]) -> bool:
    """Whether JSON surely keeps the rules of ``parse_json`` on keys and numbers; depth is what its schema allows.

    Written again, a quotation mark stays one, unless it was written as a number of Unicode. Of a key that stands
    twice one is gone, with its marks. Lines of one shape differ in digits, signs, points and exponents alone. The
    check leaves them out of texts: keys unlike without them are unlike with them. So one line answers for its shape.
    ``shapes``: digests of those that passed.
    """
    marks = line.count(b'"')
    if b"\\u" in line or marks > 2 * MOST_KEYS or len(line) > MOST_VALUES:
        return False
    if _LONG_NUMBER in line.translate(_DIGITS):
        return False
    shape = hashlib.sha256(line.translate(None, _OF_NUMBERS)).digest()
    if shape in shapes:
        return True
    try:
        # First what is no JSON: a search for the end of a text that has none takes the square of its length.
        from_json(line)
        bare = _TEXT.sub(lambda text: text[0].translate(None, _OF_NUMBERS), line)
        if to_json(from_json(bare)).count(b'"') != marks:
            return False
    except ValueError:
        return False
    shapes.add(shape)
    return True


def read_observations(path: Path) -> list[Observation]:
    """All complete lines of a file of observations; ``InvalidDocument`` if one breaks the schema."""
    return read_lines(path, _ADAPTER, what="observations")


def is_sealed(path: Path) -> bool:
    """Whether the lines of a file of observations, which was read, carry seals: all do, or none."""
    with path.open("rb") as file:
        return begins_sealed(file)


#: All that a task leaves which was not finished.
_OF_A_FAILURE: Final = (FailedObservation, ProcessorObservation)
#: Samples with lowered clocks from which on a run is not what the GPU can do.
_OFTEN: Final = 0.05
#: Of a GPU that trains; whoever trains there later has it, too.
POWER_LIMIT: Final = "its power limit"
HEAT: Final = "heat"


def gpu_faults(observations: Iterable[Observation]) -> tuple[str, ...]:
    """What lowered clocks, and Xid errors, over all launches: caveats of whatever was measured then."""
    seen = [entry for entry in observations if isinstance(entry, GpuObservation)]
    num_busy = sum(entry.num_busy for entry in seen)
    shares = {
        reason: sum(entry.slowed.get(reason, 0.0) * entry.num_busy for entry in seen) / num_busy
        for reason in sorted({reason for entry in seen for reason in entry.slowed})
    }
    lowered = [
        f"GPU clocks were lowered by {reason} in {100 * share:.0f} % of the samples: mend it and measure again"
        for reason, share in shares.items()
        if share >= _OFTEN and reason != POWER_LIMIT
    ]
    errors = Counter(error for entry in seen for error in entry.xid)
    return (*lowered, *(f"{error}, {count} times: see dmesg" for error, count in errors.items()))


def refuse_repeated(path: Path, observations: Iterable[Observation]) -> None:
    """Refuse a file that holds a task twice: two campaigns wrote it, and its repetitions are not independent.

    Raises ``InvalidDocument`` with the task.
    """
    entries = list(observations)
    # What failed may be tried again, and each try tells what processors did.
    failed = {entry.task for entry in entries if isinstance(entry, FailedObservation)}
    times = Counter(
        (entry.kind, entry.task)
        for entry in entries
        if not (entry.task in failed and isinstance(entry, _OF_A_FAILURE))
    )
    if repeated := [task for (_, task), number in times.items() if number > 1]:
        more = f" (and {len(repeated) - 1} more)" if len(repeated) > 1 else ""
        raise InvalidDocument(
            f"{path}: every task must be recorded once, got {repeated[0]!r} twice{more}; two "
            "campaigns wrote it: measure again into another --out"
        )


def failures(observations: Iterable[Observation]) -> list[FailedObservation]:
    """Tasks that failed and that no later try finished, with the latest reason of each."""
    entries = list(observations)
    finished = {entry.task for entry in entries if not isinstance(entry, _OF_A_FAILURE)}
    failed = {entry.task: entry for entry in entries if isinstance(entry, FailedObservation)}
    return [entry for task, entry in failed.items() if task not in finished]


def tasks_done(observations: Iterable[Observation]) -> frozenset[str]:
    """Names of the tasks that need not run again: finished, or more than memory holds."""
    entries = list(observations)
    again = {entry.task for entry in failures(entries) if OUT_OF_MEMORY not in entry.reason}
    return frozenset(entry.task for entry in entries) - again


def steal_share(observations: Sequence[Observation]) -> float:
    """Of the processor time that was wanted, what a hypervisor gave to others, in [0, 1]."""
    spent = [entry for entry in observations if isinstance(entry, ProcessorObservation)]
    steal_s = sum(entry.steal_s for entry in spent)
    wanted_s = steal_s + sum(entry.busy_s for entry in spent)
    return steal_s / wanted_s if wanted_s > 0 else 0.0

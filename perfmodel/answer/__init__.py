"""Question -> Answer, and tables of answers: the one way to a prediction."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from perfmodel.cost import Samples
from perfmodel.documents import Provenance
from perfmodel.documents.prediction import (
    MeasuredPoint,
    PredictedPoint,
    PredictionDocument,
    RankMemory,
)
from perfmodel.errors import (
    CalibrationUnavailable,
    UsageError,
    check_fraction,
    check_positive,
    did_you_mean,
)
from perfmodel.layout import Layout, RunSetting, Scaling, scaled_layouts
from perfmodel.machine import DEVICES_PER_NODE, Cluster, Evidence, Machine
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, TracedWorkload
from perfmodel.statistics import Interval
from perfmodel.step import Cause, StepProgram, Trace, time_by_cause
from perfmodel.units import Bytes, Seconds, format_bytes
from perfmodel.workload import Workload

# Only some questions need operators, files of clusters and of validations. They are imported where they are
# used: together they would double the start of a prediction.
if TYPE_CHECKING:
    from perfmodel.cost.memory import DeviceMemory
    from perfmodel.documents.verdicts import ValidationDocument
    from perfmodel.documents.workload import WorkloadDocument
    from perfmodel.workload.memory import StepMemory
    from perfmodel.workload.step import SymbolicStep
    from perfmodel.workload.transformer import NamedTransformer

NUM_DRAWS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """One layout of a workload on a machine; a what-if is ``dataclasses.replace`` of a question."""

    machine: Machine
    workload: "MeasuredWorkload | NamedTransformer"
    """On a calibrated machine, or by its shape on one that was inferred from runs."""
    layout: Layout = field(default_factory=Layout)
    cluster: Cluster | None = None
    """Links between the devices; None: nodes that the machine knows or usually comes in, else one ring like the
    measured."""
    validation: "ValidationDocument | None" = None
    """Errors of earlier predictions on this machine: they widen the intervals, never shift them."""
    loader_samples_per_s: float | None = None
    """What the input pipeline feeds one device; None: no limit. [1/s]"""
    sync_every_step: bool = False
    """Whether every step waits for the device, as ``loss.item()`` does; no matter where it is synchronous."""
    gradient_share: float = 1.0
    """Bytes of gradients when they are exchanged, over those they have."""
    capacity_bytes: Bytes | None = None
    """Memory of one device, whose chance to suffice is wanted. [B]"""
    devices: int | None = None
    """Devices there are; None: as many as the layout uses."""
    devices_per_node: int = DEVICES_PER_NODE
    num_draws: int = NUM_DRAWS
    num_repetitions: int = 1
    """Over how many runs the step is a mean; one for the next training."""

    def __post_init__(self) -> None:
        """A machine that knows other nodes stands among them; what contradicts the machine is refused."""
        if self.loader_samples_per_s is not None:
            check_positive("loader_samples_per_s", self.loader_samples_per_s)
        check_fraction("gradient_share", self.gradient_share)
        machine, validation = self.machine, self.validation
        if not isinstance(machine, MeasuredMachine):
            return
        if self.cluster is not None and machine.has_other_library:
            machine = machine.without_links
            object.__setattr__(self, "machine", machine)
        crosses = self.layout.world_size > (machine.devices_per_node or math.inf)
        if crosses and (self.cluster or machine.cluster) is None:
            from perfmodel.cost.inferred import among_usual_nodes  # noqa: PLC0415 - as above

            machine = among_usual_nodes(machine)
            object.__setattr__(self, "machine", machine)
        cluster = self.cluster or machine.cluster
        object.__setattr__(self, "cluster", cluster)
        if validation is not None:
            ours, theirs = machine.origin.fingerprint, validation.provenance.host_fingerprint
            if ours != theirs:
                raise CalibrationUnavailable(
                    f"--validation: must come from the machine of the profile (fingerprint {ours[:12]}), "
                    f"got {theirs[:12]}; run perfmodel validate there"
                )
        devices = None if cluster is None else cluster.devices_per_node
        is_own = machine.device_costs is None  # half a node of others' runs is a node as well
        if cluster and devices and is_own and machine.ranks_per_node > devices:
            raise UsageError(
                f"--cluster: nodes of {cluster.name} must have at least the {machine.ranks_per_node} "
                f"ranks per node of the profile, got {devices}; correct the counts up to tier node"
            )

    def at(self, layout: Layout) -> "Question":
        """The same question about another layout."""
        return dataclasses.replace(self, layout=layout)

    @property
    def measured(self) -> MeasuredWorkload:
        """The workload on a calibrated machine."""
        assert isinstance(self.workload, MeasuredWorkload), self.workload
        return self.workload

    @property
    def workload_name(self) -> str:
        """What is trained."""
        if isinstance(self.workload, MeasuredWorkload):
            return self.workload.workload.name
        return self.workload.name


def open_question(
    machine: MeasuredMachine,
    workload: "str | PathLike[str] | WorkloadDocument",
    *,
    validation: "ValidationDocument | str | PathLike[str] | None" = None,
    cluster: Cluster | str | PathLike[str] | None = None,
    where: str = "--workload",
) -> Question:
    """A question about a workload on a calibrated machine; each part is read if a file or a name stands for it.

    ``cluster``: None: as in ``Question``.
    ``where``: as in ``open_workload``.
    """
    if isinstance(validation, str | PathLike):
        from perfmodel.documents.verdicts import ValidationDocument  # noqa: PLC0415

        validation = ValidationDocument.read(Path(validation))
    if isinstance(cluster, str | PathLike):
        from perfmodel.cost.network import tier_between_nodes  # noqa: PLC0415
        from perfmodel.documents.hardware import open_cluster  # noqa: PLC0415

        cluster = open_cluster(cluster, measured=tier_between_nodes(machine))
    return Question(
        machine=machine,
        workload=open_workload(machine, workload, where=where),
        validation=validation,
        cluster=cluster,
    )


def open_workload(
    machine: MeasuredMachine,
    name: "str | PathLike[str] | WorkloadDocument",
    *,
    where: str = "--workload",
    use_measured: bool = True,
) -> MeasuredWorkload:
    """A calibrated workload by name, or a workload file (``.json``), with its times on a machine.

    ``where``: The flag, or the key of a file, that gave the name; errors begin with it.
    ``use_measured``: Whether operators that were measured in place count for traced workloads, or curves
    alone.
    """
    if isinstance(name, str | PathLike) and Path(name).suffix == ".json":
        from perfmodel.documents.workload import WorkloadDocument  # noqa: PLC0415

        name = WorkloadDocument.read(Path(name))
    try:
        if isinstance(name, str | PathLike):
            return timed_workload(machine, fspath(name))
        return timed_workload(
            machine, name.workload, trace=name.trace, memory=name.memory, use_measured=use_measured
        )
    except UsageError as error:
        raise UsageError(f"{where}{str(error).removeprefix('--workload')}") from error


def timed_workload(
    machine: MeasuredMachine,
    workload: str | Workload,
    *,
    trace: "SymbolicStep | None" = None,
    memory: "StepMemory | None" = None,
    use_measured: bool = True,
) -> MeasuredWorkload:
    """A calibrated workload by name, or a traced one by its operators."""
    name = workload if isinstance(workload, str) else workload.name
    if (rescaling := machine.rescaling) is not None:
        from perfmodel.cost.rescaling import carried_over, whole_steps_refused  # noqa: PLC0415
        from perfmodel.cost.step_curves import workload_by_law  # noqa: PLC0415
        from perfmodel.cost.traced import GRID  # noqa: PLC0415

        if trace is None or isinstance(workload, str):
            raise whole_steps_refused(name, machine.device_name)
        if rescaling.source is None:
            found = workload_by_law(rescaling.target, workload, trace, batches=GRID)
        else:
            found = timed_workload(
                machine.calibrated, workload, trace=trace, memory=memory, use_measured=use_measured
            )
            found = carried_over(found, trace, rescaling)
        found = dataclasses.replace(found, shared_log_error=rescaling.log_error)
        return TracedWorkload.of(found, trace, memory)
    if machine.device_costs is not None:
        if trace is None or isinstance(workload, str):
            raise UsageError(
                f"--workload: must be a model or a traced workload file on {machine.device_name}, whose costs "
                f"were inferred from steps of others, got {name!r}; perfmodel trace {name}, then give its file"
            )
        from perfmodel.cost.step_curves import workload_by_law  # noqa: PLC0415

        return TracedWorkload.of(
            workload_by_law(machine.device_costs, workload, trace), trace, memory
        )
    calibrated = machine.workload(name)
    if calibrated is not None:
        if isinstance(workload, Workload) and workload != calibrated.workload:
            raise UsageError(
                f"--workload: {name!r} in the file is not the calibrated one, whose "
                f"{_difference(calibrated.workload, workload)}; {name} without a file names that one, "
                "torchvision:NAME the model of torchvision"
            )
        return calibrated if trace is None else TracedWorkload.of(calibrated, trace, memory)
    if isinstance(workload, str) or trace is None:
        known = [entry.workload.name for entry in machine.workloads]
        raise UsageError(
            f"--workload: must be in the profile or a workload file, got {name!r}"
            f"{did_you_mean(name, known)} (the profile holds {', '.join(known)}; torchvision:NAME is traced)"
        )
    if machine.operators is None:
        raise CalibrationUnavailable(
            f"--workload: {name} needs costs of operators, but the profile holds none; calibrate again"
        )
    from perfmodel.answer.measured import with_predicted  # noqa: PLC0415 - which asks questions itself
    from perfmodel.cost.traced import traced_profile  # noqa: PLC0415

    batch = None if memory is None else memory.batch
    found = traced_profile(
        machine, machine.operators, workload, trace, batch=batch, use_measured=use_measured
    )
    return with_predicted(machine, TracedWorkload.of(found, trace, memory))


def _difference(calibrated: Workload, given: Workload) -> str:
    """The first property of a calibrated workload that another one does not have, and both values."""
    for name in ("sample", "num_parameters", "num_operators", "forward_flop", "backward_flop"):
        is_, asked = getattr(calibrated, name), getattr(given, name)
        if is_ != asked:
            return f"{name} is {is_}, not {asked}"
    return "gradients were measured to be ready at other times"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What the layout of a question takes. Draws have the nominal value first."""

    question: Question
    program: StepProgram
    trace: Trace
    """The simulated step at nominal costs, of the slowest rank."""
    step: Interval
    """Typical step of a run, with 90 % of outcomes between p5 and p95. [s]"""
    step_s: Samples
    """Draws of the same, shape ``(num_draws,)``. [s]"""
    exposed_comm_s: Samples
    """Step minus the same step with communication that costs nothing. [s]"""
    straggler_s: Seconds
    """Part of the nominal step that ranks as fast as the typical one would not take. [s]"""
    evidence: Mapping[str, Evidence]
    """Term of the model to where it comes from."""
    bottleneck_link: str | None = None
    """Link that costs most of the largest all-reduce, and why; None without a cluster."""

    @property
    def layout(self) -> Layout:
        """What was asked."""
        return self.question.layout

    @property
    def setting(self) -> RunSetting:
        """Workload and layout as records hold them."""
        return RunSetting.of(self.question.workload_name, self.layout)

    @property
    def breakdown_s(self) -> dict[Cause, Seconds]:
        """Time on the critical path by cause; sums to the nominal step. [s]"""
        return time_by_cause(self.trace)


def interval(draws: Samples) -> Interval:
    """The nominal draw (the first), and the middle 90 % of all; the nominal is always inside."""
    return Interval.of(draws, nominal=float(draws[0]))


def architecture_of(machine: MeasuredMachine) -> str | None:
    """Of the GPUs of a machine, empty if it is unknown; None of virtual ones, whose truth knows no libraries."""
    from perfmodel.documents.hardware import sheet_named, shipped_catalogue  # noqa: PLC0415

    if machine.rescaling is not None:
        return machine.rescaling.architecture
    sheet = sheet_named(machine.device_name, shipped_catalogue())
    if sheet is not None:
        return sheet.architecture
    return None if machine.device_kind == "virtual" else ""


def stage_memory(question: Question) -> "tuple[DeviceMemory, ...]":
    """What a rank of every pipeline stage holds; empty if the workload's memory was not recorded."""
    machine, workload = question.machine, question.workload
    assert isinstance(machine, MeasuredMachine), machine
    if not isinstance(workload, TracedWorkload) or workload.memory is None:
        return ()
    from perfmodel.cost.memory import TracedMemory, overhead_of  # noqa: PLC0415

    overhead = overhead_of(workload.memory, machine.memory_kind, architecture_of(machine))
    traced = TracedMemory(trace=workload.trace, memory=workload.memory, overhead=overhead)
    return traced.ranks(question.layout)


def answer(question: Question) -> Answer:
    """What the layout of a question takes, with its uncertainty."""
    if not isinstance(question.machine, MeasuredMachine):
        # SciPy's optimizers come with it, which would double the start of every other prediction.
        from perfmodel.answer.inferred import inferred_answer  # noqa: PLC0415

        return inferred_answer(question)
    from perfmodel.answer.measured import measured_answer  # noqa: PLC0415 - which asks questions itself

    return measured_answer(question)


def steps_s(questions: Sequence[Question]) -> list[Samples]:
    """Draws of the step of many questions on one machine and nothing else. [s]"""
    if questions and not isinstance(questions[0].machine, MeasuredMachine):
        return [answer(question).step_s for question in questions]
    from perfmodel.answer.measured import measured_steps_s  # noqa: PLC0415 - as above

    return measured_steps_s(questions)


def default_batch(workload: MeasuredWorkload, scaling: str) -> int:
    """The batch that came with the model, or the middle calibrated one; strong scaling: the largest."""
    if scaling == "weak" and isinstance(workload, TracedWorkload):
        own = workload.trace.own_micro_batch
        if own is not None:
            return own
    batches = sorted(int(point.at) for point in workload.phases[0].forward)
    return batches[-1] if scaling == "strong" else batches[len(batches) // 2]


def step_ratio(question: Question, baseline: Layout) -> tuple[float, float]:
    """The step of a question over that of another layout, and its standard error in log: shared errors cancel."""
    if not isinstance(question.machine, MeasuredMachine):
        from perfmodel.answer.inferred import inferred_ratio  # noqa: PLC0415 - as above

        return inferred_ratio(question, baseline)
    of_large, of_small = steps_s([question, question.at(baseline)])
    draws = min(len(of_large), len(of_small))
    ratio = of_large[:draws] / of_small[:draws]
    return float(ratio[0]), float(np.log(ratio[1:]).std())


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Which device counts, and what stays the same as they grow."""

    world_sizes: tuple[int, ...]
    scaling: Scaling
    batch: int | None = None
    accumulation: int = 1
    bucket_cap_mb: float | None = None

    def layouts(self, workload: MeasuredWorkload) -> tuple[Layout, ...]:
        """One device, which speed-ups refer to, and every count asked for."""
        batch = default_batch(workload, self.scaling) if self.batch is None else self.batch
        return scaled_layouts(
            sorted({1, *self.world_sizes}),
            scaling=self.scaling,
            batch=batch,
            accumulation=self.accumulation,
            bucket_cap_mb=self.bucket_cap_mb,
        )

    def at_largest(self, question: Question) -> Question:
        """The question of the largest count."""
        return question.at(self.layouts(question.measured)[-1])


def table(question: Question, request: Forecast) -> tuple[PredictionDocument, Answer]:
    """Data parallelism on every count of devices, and the answer at the largest, for its timeline."""
    assert isinstance(question.workload, MeasuredWorkload), question.workload
    asked = request.at_largest(question)
    layouts = request.layouts(question.workload)
    answers = [answer(asked.at(layout)) for layout in layouts]
    wanted = [each for each in answers if each.layout.world_size in request.world_sizes]
    document = prediction(wanted, baseline=answers[0], scaling=request.scaling)
    return document, answers[-1]


def layout_table(question: Question) -> tuple[PredictionDocument, Answer]:
    """One layout; on a calibrated machine its speed-up is over one device with the same micro-batch."""
    layout = question.layout
    found = answer(question)
    if not isinstance(question.machine, MeasuredMachine):
        from perfmodel.answer.inferred import layout_document  # noqa: PLC0415 - as above

        document = layout_document(found)
        needed_bytes = max(stage.needed_bytes for stage in document.points[0].memory)
        most_bytes = question.capacity_bytes or _most_memory_bytes(question)
        if most_bytes is not None and needed_bytes > most_bytes:
            size, most = format_bytes(needed_bytes), format_bytes(most_bytes)
            document = _warned(document, f"does not fit: a rank needs {size} of {most}")
        return document, found
    alone = layout.alone
    baseline = found if layout == alone else answer(question.at(alone))
    document = prediction([found], baseline=baseline, scaling="weak")
    workload = question.workload
    own = (isinstance(workload, TracedWorkload) and workload.trace.own_micro_batch) or 1
    if layout.micro_batch == 1 < own:
        said = f"micro-batch 1 per replica; the model came with {own}: add micro_batch={own}"
        document = _warned(document, said)
    [only] = document.points
    told = with_memory(only, question).model_copy(update={"layout": str(layout)})
    return document.model_copy(update={"points": (told,)}), found


def _warned(document: PredictionDocument, said: str) -> PredictionDocument:
    """With a caveat before all others."""
    return document.model_copy(update={"caveats": (said, *document.caveats)})


def with_memory(point: PredictedPoint, question: Question) -> PredictedPoint:
    """The point with what a rank of every stage of a traced workload holds, and whether the fullest fits."""
    stages, capacity_bytes = stage_memory(question), question.capacity_bytes
    fits = None
    if stages and capacity_bytes is not None:
        fits = min(stage.fit_probability(capacity_bytes) for stage in stages)
    memory = tuple(
        RankMemory(
            stage=number,
            parts_bytes=dict(stage.parts),
            needed_bytes=stage.needed_bytes,
            spread_bytes=stage.spread_bytes,
        )
        for number, stage in enumerate(stages)
    )
    told = {"memory": memory, "capacity_bytes": capacity_bytes, "fit_probability": fits}
    return point.model_copy(update=told)


def prediction(
    answers: Sequence[Answer], *, baseline: Answer, scaling: Scaling
) -> PredictionDocument:
    """Answers about one workload on one calibrated machine as a document."""
    from perfmodel.answer.measured import measured_caveats  # noqa: PLC0415 - as above

    question = baseline.question
    machine, validation, cluster = question.machine, question.validation, question.cluster
    traced = question.workload
    assert isinstance(machine, MeasuredMachine), machine
    return PredictionDocument(
        provenance=Provenance.of_answer(host_fingerprint=machine.origin.fingerprint),
        profile_digest=machine.digest,
        validation_digest=None if validation is None else validation.digest,
        device_name=machine.device_name,
        workload=question.workload_name,
        scaling=scaling,
        method=_method(traced, answers[0].layout) if isinstance(traced, TracedWorkload) else None,
        cluster=None if cluster is None else cluster.name,
        points=tuple(point(each, baseline=baseline) for each in answers),
        measured=measured_points(
            machine,
            question.workload_name,
            [baseline.layout, *(each.layout for each in answers if each is not baseline)],
        ),
        caveats=(
            *memory_caveats(answers),
            *measured_caveats(question, {each.layout: each.evidence for each in answers}),
        ),
    )


def _method(workload: TracedWorkload, layout: Layout) -> str:
    """How a traced step trains, whether at the batch that came with its model, and what was measured in place."""
    from perfmodel.answer.measured import measured_in_place  # noqa: PLC0415 - as above

    is_own = layout.micro_batch == workload.trace.own_micro_batch
    own = ("the model's own batch",) if is_own else ()
    return ", ".join((workload.trace.method.words, *own, *measured_in_place(workload)))


def _most_memory_bytes(question: Question) -> Bytes | None:
    """Memory of the device by its data sheet; None where none is known. [B]"""
    from perfmodel.documents.hardware import (  # noqa: PLC0415 - only where memory is known
        most_memory_bytes,
        shipped_catalogue,
    )

    return most_memory_bytes(question.machine.device_name, shipped_catalogue())


def memory_caveats(answers: Sequence[Answer]) -> tuple[str, ...]:
    """The first layout that memory does not hold, by ``capacity_bytes`` or the data sheet of the device."""
    for found in answers:
        question = found.question
        stages, capacity_bytes = stage_memory(question), question.capacity_bytes
        if not stages:
            continue
        from perfmodel.cost.memory import Verdict, verdict  # noqa: PLC0415 - only for traced models

        if capacity_bytes is None:
            capacity_bytes = _most_memory_bytes(question)
        if capacity_bytes is None:
            continue
        fullest = max(stages, key=lambda stage: stage.needed_bytes)
        if verdict(fullest.fit_probability(capacity_bytes)) is Verdict.DOES_NOT_FIT:
            said = (
                f"{found.layout.micro_batch} per device do not fit: "
                f"{format_bytes(fullest.needed_bytes)} of {format_bytes(capacity_bytes)}; see perfmodel memory"
            )
            return (said,)
    return ()


#: Devices together over as many alone, as runs scatter: nothing makes them faster than that.
BEST_OF_DEVICES: Final = 1.1


def speedups(
    question: Question, step_s: Samples, *, baseline: Layout, before_s: Samples
) -> Samples:
    """Draws of the speed-up of a question over one device, no higher than its devices can give.

    ``baseline`` and ``before_s``: What runs on the one device, and draws of its step. [s]

    Errors of the two steps are independent in part, so that some draws would be faster than n devices that
    never wait. What one device does of the step, alone, bounds them:

        speed-up = (samples_n / samples_1) step_1 / step_n  <=  1.1 n (samples_alone / samples_1) step_1 / step_alone

    A smaller part of the batch may be faster per sample, which the bound allows for.
    """
    layout = question.layout
    draws = min(len(before_s), len(step_s))
    before_s = before_s[:draws]
    found: Samples = layout.global_batch / baseline.global_batch * before_s / step_s[:draws]
    highest = BEST_OF_DEVICES * layout.world_size
    if layout == baseline or np.sort(found)[int(0.95 * (draws - 1))] <= highest:
        return found
    alone = layout.alone
    if alone != baseline:
        alone_s = steps_s([question.at(alone)])[0][:draws]
        faster = alone.global_batch / baseline.global_batch * before_s[: len(alone_s)] / alone_s
        highest = highest * np.maximum(1.0, float(faster[0]))
    bounded: Samples = np.minimum(found, max(highest, float(found[0])))
    return bounded


def point(answer: Answer, *, baseline: Answer) -> PredictedPoint:
    """Quantities with intervals, relative to one device."""
    layout, batch = answer.layout, answer.layout.global_batch
    # The baseline's own uncertainty cancels where the two layouts are the same.
    speedup = speedups(
        answer.question, answer.step_s, baseline=baseline.layout, before_s=baseline.step_s
    )
    return PredictedPoint(
        setting=answer.setting,
        step_s=interval(answer.step_s),
        samples_per_s=interval(batch / answer.step_s),
        speedup=interval(speedup),
        scaling_efficiency=interval(speedup / layout.world_size),
        exposed_comm_s=interval(answer.exposed_comm_s),
        breakdown_s=answer.breakdown_s,
        straggler_s=answer.straggler_s,
        evidence=dict(answer.evidence),
        bottleneck_link=answer.bottleneck_link,
    )


def measured_points(
    machine: MeasuredMachine, workload: str, layouts: Sequence[Layout]
) -> tuple[MeasuredPoint, ...]:
    """Calibration runs that are the same as one of the layouts, with measured speed-ups."""
    steps_s = {
        (step.world_size, step.micro_batch, step.synchronisation, step.bucket_cap_mb): step.step_s
        for step in machine.steps
        if step.workload == workload
    }
    points = []
    alone = layouts[0].alone
    for layout in layouts:
        step_s = steps_s.get(_key(layout))
        if step_s is None or layout.accumulation != 1 or layout.dp != layout.world_size:
            continue
        single_s = steps_s.get(_key(alone))
        ratio = layout.global_batch / alone.global_batch
        points.append(
            MeasuredPoint(
                world_size=layout.world_size,
                micro_batch=layout.micro_batch,
                step_s=step_s,
                speedup=None if single_s is None else ratio * single_s / step_s,
            )
        )
    return tuple(points)


def _key(layout: Layout) -> tuple[int, int, str, float | None]:
    return (
        layout.world_size,
        layout.micro_batch,
        layout.synchronisation.value,
        layout.bucket_cap_mb,
    )

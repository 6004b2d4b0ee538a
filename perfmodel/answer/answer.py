"""Question -> Answer, and tables of answers: the one way to a prediction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.answer import Answer, Question, interval, stage_memory
from perfmodel.answer.measured import (
    measured_answer,
    measured_caveats,
    measured_in_place,
    measured_steps_s,
)
from perfmodel.cost import Samples
from perfmodel.documents import Provenance
from perfmodel.documents.prediction import (
    MeasuredPoint,
    PredictedPoint,
    PredictionDocument,
    RankMemory,
)
from perfmodel.layout import Layout, Scaling, Synchronisation, scaled_layouts
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, TracedWorkload
from perfmodel.units import Bytes, format_bytes


def answer(question: Question) -> Answer:
    """What the layout of a question takes, with its uncertainty."""
    if not isinstance(question.machine, MeasuredMachine):
        # SciPy's optimizers come with it, which would double the start of every other prediction.
        from perfmodel.answer.inferred import inferred_answer  # noqa: PLC0415

        return inferred_answer(question)
    return measured_answer(question)


def steps_s(questions: Sequence[Question]) -> list[Samples]:
    """Draws of the step of many questions on one machine and nothing else. [s]"""
    if questions and not isinstance(questions[0].machine, MeasuredMachine):
        return [answer(question).step_s for question in questions]
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
    question = baseline.question
    machine, validation, cluster = question.machine, question.validation, question.cluster
    traced = question.workload
    assert isinstance(machine, MeasuredMachine), machine
    method = None
    if isinstance(traced, TracedWorkload):
        is_own = answers[0].layout.micro_batch == traced.trace.own_micro_batch
        own = ("the model's own batch",) if is_own else ()
        method = ", ".join((traced.trace.method.words, *own, *measured_in_place(traced)))
    return PredictionDocument(
        provenance=Provenance.of_answer(host_fingerprint=machine.origin.fingerprint),
        profile_digest=machine.digest,
        validation_digest=None if validation is None else validation.digest,
        device_name=machine.device_name,
        workload=question.workload_name,
        scaling=scaling,
        method=method,
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


def _most_memory_bytes(question: Question) -> Bytes | None:
    """Memory of the device by its data sheet; None where none is known. [B]"""
    from perfmodel.documents.hardware import (  # noqa: PLC0415 - only where memory is known
        most_memory_bytes,
        shipped_catalogue,
    )

    return most_memory_bytes(question.machine.device_name, shipped_catalogue())


def memory_caveats(answers: Sequence[Answer]) -> tuple[str, ...]:
    """The first layout that memory does not hold: ``capacity_bytes``, that of a data sheet, or a processor's.

    Ranks on the node of a calibrated processor share its memory.
    """
    for found in answers:
        question = found.question
        stages, capacity_bytes = stage_memory(question), question.capacity_bytes
        if not stages:
            continue
        machine, num_ranks, whose = question.machine, 1, ""
        if (
            capacity_bytes is None
            and isinstance(machine, MeasuredMachine)
            and machine.memory_kind == "cpu"
        ):
            capacity_bytes, whose = machine.host_memory_bytes, "the machine's "
            num_ranks = min(found.layout.world_size, machine.ranks_per_node)
        from perfmodel.cost.memory import Verdict, verdict  # noqa: PLC0415 - only for traced models

        if capacity_bytes is None:
            capacity_bytes = _most_memory_bytes(question)
        if capacity_bytes is None:
            continue
        fullest = max(stages, key=lambda stage: stage.needed_bytes)
        if verdict(fullest.fit_probability(capacity_bytes // num_ranks)) is Verdict.DOES_NOT_FIT:
            needed, held = map(format_bytes, (num_ranks * fullest.needed_bytes, capacity_bytes))
            said = f"{found.layout.micro_batch} per device do not fit: {needed} of {whose}{held}; see perfmodel memory"
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
        Layout(
            dp=step.world_size,
            micro_batch=step.micro_batch,
            wrapper=Synchronisation(step.synchronisation),
            bucket_cap_mb=step.bucket_cap_mb,
        ): step.step_s
        for step in machine.steps
        if step.workload == workload
    }
    alone = layouts[0].alone
    single_s = steps_s.get(alone)
    points = []
    for layout in layouts:
        if (step_s := steps_s.get(layout)) is not None:
            ratio = layout.global_batch / alone.global_batch
            run = MeasuredPoint(
                world_size=layout.world_size,
                micro_batch=layout.micro_batch,
                step_s=step_s,
                speedup=None if single_s is None else ratio * single_s / step_s,
            )
            points.append(run)
    return tuple(points)

"""Answers about machines that were inferred from runs: closed form, deviations, memory, caveats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfmodel.answer import Answer, Question
from perfmodel.cost.inferred import LINKS_OF_FILE, InferredModel, on_links, open_inferred
from perfmodel.cost.jobs import Jobs, jobs_from, layout_distance_squared
from perfmodel.cost.layout_time import StepParts, layout_durations, unit_times
from perfmodel.cost.memory import TENSORS, rank_parts
from perfmodel.documents import Provenance, age_notes
from perfmodel.documents.prediction import (
    LargeModelStep,
    PredictedPoint,
    PredictionDocument,
    RankMemory,
    StepPartsRecord,
    TrainedModel,
)
from perfmodel.engine import algebra
from perfmodel.files import unsealed_notes
from perfmodel.layout import Layout, Limits, Precision, Recompute, Schedule, require_feasible
from perfmodel.machine import Evidence, InferredMachine
from perfmodel.statistics import FloatArray, Interval
from perfmodel.step import StepProgram, Trace
from perfmodel.step.compile import compile_layout
from perfmodel.workload.transformer import NamedTransformer

_FAR: Final = 2.0
"""Distance to the nearest run, in lengths of the deviations, from which on a layout is far from all."""
_FEW: Final = 10
"""Fewer runs cannot even tell how often intervals of 90 % hold."""
RARE_STALL: Final = 0.05
"""Probability of a stall from which on it is said, and is an assumption of its own."""
#: Passes of micro-batches through stages of which all are operations; of more those between are counted.
_MOST_PASSES: Final = 2**14
_REST: Final = "framework and allocator"
#: What a job needs of the fitted parameters, if the runs did not determine them.
_RELEVANT: Final = {
    "tp": ("tensor_latency_s", "tensor_bytes_per_s", "tensor_node_s", "crowded_s"),
    "pp": ("p2p_latency_s",),
    "dp": ("data_bytes_per_s", "data_latency_s", "overlap", "overlap_sharded"),
    "devices": ("node_bytes_per_s",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and on what."""

    model: NamedTransformer
    devices: int
    devices_per_node: int
    global_batch: int
    """Sequences per optimizer step."""

    @property
    def limits(self) -> Limits:
        """What bounds its layouts."""
        return Limits(
            layers=self.model.shape.layers,
            heads=self.model.shape.heads,
            devices=self.devices,
            sequence=self.model.sequence,
            experts=self.model.shape.experts,
        )


def training_of(question: Question) -> Training:
    """What is trained, and on what."""
    layout, model = question.layout, question.workload
    assert isinstance(model, NamedTransformer), model
    return Training(
        model=model,
        devices=layout.world_size if question.devices is None else question.devices,
        devices_per_node=question.devices_per_node,
        global_batch=layout.global_batch,
    )


def question_jobs(question: Question) -> Jobs:
    """The columns of the layout of a question; raises as ``layout_jobs`` does."""
    return layout_jobs(training_of(question), question.layout, device=question.machine.device_name)


def inferred_answer(question: Question) -> Answer:
    """What a layout takes on a machine that was inferred from runs.

    The step is the compiled program at the fitted parameters with the deviations of the runs. How far
    parameters leave it open is read from the closed form, whose draws take a thousandth of the time.
    """
    jobs = question_jobs(question)
    model = _opened(question)
    parts = model.parts(jobs)
    trace = _simulated(question, jobs, model)
    normal_s = np.array([trace.step_s])
    found = model.predict(jobs, normal_s=normal_s)
    return Answer(
        question=question,
        program=trace.program,
        trace=trace,
        step=found.of(0),
        step_s=model.step_draws(jobs, num_draws=question.num_draws, normal_s=normal_s)[0],
        exposed_comm_s=parts.tensor_s + parts.pipeline_s + parts.data_s,
        straggler_s=0.0,
        evidence={"step": Evidence.INFERRED},
    )


def inferred_ratio(question: Question, baseline: Layout) -> tuple[float, float]:
    """The step over that of another layout, and its standard error in log."""
    both = [question.at(baseline), question]
    jobs = Jobs.joined([question_jobs(one) for one in both])
    of_small, of_large = (inferred_answer(one).step.nominal for one in both)
    return of_large / of_small, float(_opened(question).ratio_uncertainty(jobs)[1])


def layout_document(answer: Answer) -> PredictionDocument:
    """Step, throughput, utilisation and memory of an answer, with what must be known beside it."""
    question, layout = answer.question, answer.layout
    model, training, jobs = _opened(question), training_of(question), question_jobs(question)
    parts, origin = model.parts(jobs), model.machine.origin
    held = layout.stages(training.model.shape.layers)
    memory, fits = _stages(model, jobs, held, question.capacity_bytes)
    exposed_s = float(answer.exposed_comm_s[0])
    point = PredictedPoint(
        setting=answer.setting,
        step_s=answer.step,
        samples_per_s=training.global_batch / answer.step,
        exposed_comm_s=Interval(exposed_s, exposed_s, exposed_s),
        breakdown_s=answer.breakdown_s,
        straggler_s=answer.straggler_s,
        evidence=dict(answer.evidence),
        layout=str(layout),
        memory=memory,
        capacity_bytes=question.capacity_bytes,
        fit_probability=fits,
        large_model=LargeModelStep(
            trained=trained_record(training),
            tokens_per_s=training.global_batch * training.model.sequence / answer.step,
            mfu=float(model.peak_s(jobs)[0]) / answer.step,
            parts_s=parts_record(parts, 0),
            simulated_step_s=answer.trace.step_s,
            formula_step_s=float(parts.total_s[0]),
        ),
    )
    return PredictionDocument(
        provenance=Provenance.of_answer(host_fingerprint=origin.fingerprint, seed=origin.seed),
        profile_digest=model.machine.digest,
        device_name=model.machine.device_name,
        workload=question.workload_name,
        scaling="weak",
        points=(point,),
        caveats=(
            *(() if question.cluster is None else (LINKS_OF_FILE,)),
            *layout_caveats(model, jobs),
            *_option_caveats(layout, jobs, held),
        ),
    )


def _opened(question: Question) -> InferredModel:
    assert isinstance(question.machine, InferredMachine), question.machine
    machine, cluster = question.machine, question.cluster
    if cluster is not None:
        machine = on_links(machine, cluster, num_devices=training_of(question).devices)
    return open_inferred(machine)


def _simulated(question: Question, jobs: Jobs, model: InferredModel) -> Trace:
    """The step of every pipeline stage at the fitted parameters; its streams do not contend."""
    assert isinstance(question.workload, NamedTransformer), question.workload
    layout, layers = question.layout, question.workload.shape.layers
    times = unit_times(layout, jobs, model.nominal)

    def durations_s(program: StepProgram) -> FloatArray:
        return layout_durations(program, times)

    alternates = layout.schedule is Schedule.ONE_F_ONE_B and layout.interleave == 1
    is_long = layout.pp * layout.accumulation > _MOST_PASSES
    if is_long and alternates and layout.pp > 1:
        return algebra.steady_trace(
            lambda count: compile_layout(replace(layout, accumulation=count), layers=layers),
            durations_s,
            micro_batches=layout.accumulation,
            stages=layout.pp,
        )
    program = compile_layout(layout, layers=layers)
    return algebra.trace(program, durations_s(program))


def layout_jobs(training: Training, layout: Layout, *, device: str | None = None) -> Jobs:
    """The columns of one layout, if it is possible.

    ``training``: What is trained.
    ``layout``: How it is spread.
    ``device``: Device of the runs, whose data sheet knows its precisions; None: they count as usual.
    """
    require_feasible(layout, training.limits)
    jobs = jobs_from(
        [(training.model.shape, layout)],
        sequence=training.model.sequence,
        devices_per_node=training.devices_per_node,
    )
    if device is None or layout.precision is Precision.BF16:
        return jobs
    from perfmodel.cost.rescaling import precision_ratio  # noqa: PLC0415 - reads the catalogue

    ratio = precision_ratio(layout.precision, device, where=f"layout {layout}")
    return replace(jobs, matmul_ratio=np.array([ratio]))


def layout_caveats(model: InferredModel, jobs: Jobs) -> list[str]:
    """What must be known before acting on the first of some jobs."""
    caveats = [
        "inferred from step times of whole runs: no part was measured alone",
        *unsealed_notes(),
        *(f"calibration {note}" for note in age_notes(model.machine.origin.made_utc)),
        *_beyond_runs(model, jobs),
    ]
    open_names = {p.name for p in model.machine.fitted_parameters if not p.determined}
    open_names.discard("overlap" if jobs.zero[0] in {1, 2} else "overlap_sharded")
    if not jobs.several_nodes[0]:
        open_names -= {"crowded_s", "node_bytes_per_s"}
    if jobs.pp[0] == 1:
        open_names.discard("crowded_s")
    if jobs.tp[0] <= jobs.devices_per_node[0]:
        open_names.discard("tensor_node_s")
    relevant = {
        name for key, names in _RELEVANT.items() if getattr(jobs, key)[0] > 1 for name in names
    }
    unknown = [
        each.meaning
        for each in model.machine.fitted_parameters
        if each.name in relevant & open_names
    ]
    if unknown:
        caveats.append(f"the runs do not tell: {'; '.join(unknown)}")
    chance = float(model.stall_probability(jobs.take(np.array([0])))[0])
    if chance > RARE_STALL:
        caveats.append(
            f"degraded with probability {chance:.0%}, as some runs were; the interval holds it"
        )
    printed = model.memory.discrepancy
    caveats.append(
        "memory: a formula, never compared with a run; 16-bit weights, 32-bit gradients, Adam; context and "
        "allocator slack are assumed"
        if printed is None
        else f"memory: fitted to the peaks of {len(printed.runs)} runs, taken as rank 0's; the sum holds "
        "their framework and whole tensors besides the parts"
    )
    return caveats


def _beyond_runs(model: InferredModel, jobs: Jobs) -> list[str]:
    """Where the first of some jobs is outside of what the runs have shown."""
    runs = model.discrepancy.runs
    caveats = []
    if len(runs) < _FEW:
        caveats.append(f"only {len(runs)} runs: the answer rests on priors more than on them")
    near = np.sqrt(layout_distance_squared(jobs, runs).min(axis=1)[0])
    if near > _FAR * model.discrepancy.spreads.length:
        caveats.append(
            f"the nearest run is {near:.1f} doublings away: the formula alone answers; distance of "
            "layout, model and batch"
        )
    widths = np.unique(runs.hidden)
    if len(widths) == 1 and jobs.hidden[0] != widths[0]:
        caveats.append(f"all runs were {widths[0]:.0f} wide: those of another width were 13 % off")
    most = runs.devices.max()
    if jobs.devices[0] > most:
        caveats.append(f"{jobs.devices[0]:.0f} devices: no run had more than {most:.0f}")
    for name, meaning in (
        ("cp", "context parallelism"),
        ("interleave", "interleaved stages"),
        ("sequence_parallel", "sequence parallelism"),
        ("recompute_full", "full recomputation"),
        ("zero", f"zero={jobs.zero[0]:.0f}"),
        ("experts", "experts"),
        ("ep", "expert parallelism"),
        ("shard", "shards inside groups (HSDP)"),
    ):
        if getattr(jobs, name)[0] > getattr(runs, name).max():
            caveats.append(f"no run used {meaning}: its effect is untested")
    return caveats


def _option_caveats(layout: Layout, jobs: Jobs, held: Sequence[int]) -> tuple[str, ...]:
    """What some options of a layout mean for its numbers."""
    said = []
    if len(set(held)) > 1:
        said.append(f"uneven stages: {', '.join(map(str, held))} layers")
    if layout.precision is not Precision.BF16:
        said.append(
            f"{layout.precision}: products {jobs.matmul_ratio[0]:.2g} x as fast as in 16 bit, by data sheets"
        )
    if layout.recompute is Recompute.SELECTIVE and jobs.fused_attention[0] > 0:
        said.append("recompute=selective repeats fused attention: time, but no memory saved")
    if layout.ep > 1:
        said.append("experts are evenly loaded")
    return tuple(said)


def trained_record(training: Training) -> TrainedModel:
    """What is trained, as documents say it."""
    return TrainedModel(
        name=training.model.name,
        parameters=training.model.shape.parameters,
        sequence=training.model.sequence,
        devices=training.devices,
        devices_per_node=training.devices_per_node,
        global_batch=training.global_batch,
    )


def parts_record(parts: StepParts, index: int) -> StepPartsRecord:
    """Parts of one job as documents say them."""
    names = StepPartsRecord.model_fields
    return StepPartsRecord(**{name: float(getattr(parts, name)[index]) for name in names})


def _stages(
    model: InferredModel, jobs: Jobs, held: Sequence[int], capacity_bytes: int | None
) -> tuple[tuple[RankMemory, ...], float | None]:
    """Memory of every stage of the first job, which hold ``held`` layers; whether the fullest one fits."""
    stages = np.arange(len(held), dtype=np.float64)
    first = np.zeros(len(held), dtype=np.intp)
    each = replace(jobs.take(first), most_layers=np.array(held, dtype=np.float64))
    parts = model.memory.parts_bytes(each, stages)
    whole = sum(parts.values(), start=np.zeros(len(held)))
    # What the formula counts is said without the allocator's slack, unless peaks were printed.
    counted = parts if model.memory.discrepancy else rank_parts(each, stages)
    columns = {name: counted[name] for name in TENSORS}
    columns[_REST] = np.maximum(0.0, whole - sum(columns.values()))
    fits = None
    if capacity_bytes is not None:
        fits = float(model.memory.fit_probability(each, whole, capacity_bytes).min())
    return tuple(
        RankMemory(
            stage=stage,
            layers=layers,
            parts_bytes={name: float(column[stage]) for name, column in columns.items()},
            needed_bytes=float(whole[stage]),
        )
        for stage, layers in enumerate(held)
    ), fits

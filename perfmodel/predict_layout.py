"""Use case: one layout of a large model, from latents that were inferred from runs."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import numpy as np

from perfmodel.cost.discrepancy import layout_distance_squared
from perfmodel.cost.inferred import InferredModel
from perfmodel.cost.inferred_profile import model_of
from perfmodel.cost.jobs import Jobs, jobs_from
from perfmodel.cost.latents import SHEETS, DeviceSheet
from perfmodel.cost.layout_memory import fit_probability, needed_bytes, rank_memory
from perfmodel.cost.layout_terms import layout_durations, unit_times
from perfmodel.cost.layout_time import StepParts
from perfmodel.documents.base import Provenance, command_line
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.layout import (
    LayoutPredictionDocument,
    StageMemory,
    StepPartsRecord,
    TrainedModel,
)
from perfmodel.documents.prediction import Interval
from perfmodel.errors import CalibrationUnavailable
from perfmodel.parallelism.layout import Layout, require_feasible
from perfmodel.program.layout_step import compile_layout
from perfmodel.program.trace import Trace
from perfmodel.simulation import collector_paused, simulate
from perfmodel.workload.transformers import NamedTransformer

_FAR: Final = 2.0
"""Distance to the nearest run, in lengths of the deviations, from which on a layout is far from all."""
_RARE: Final = 0.05
"""Probability of a stall from which on it is said."""
_PARTS: Final = ("compute_s", "tensor_s", "pipeline_s", "data_s", "other_s")
#: What a job needs of the latents, if the runs did not determine them.
_RELEVANT: Final = {
    "tp": ("tensor_latency_s", "tensor_bytes_per_s"),
    "pp": ("hop_latency_s",),
    "dp": ("data_bytes_per_s", "overlap"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and on what."""

    model: NamedTransformer
    devices: int
    devices_per_node: int
    global_batch: int
    """Sequences per optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferredMachine:
    """A calibration from runs, ready to predict."""

    document: InferredDocument
    model: InferredModel
    sheet: DeviceSheet


def inferred_machine(document: InferredDocument) -> InferredMachine:
    """The machine of a document.

    Raises
    ------
    CalibrationUnavailable
        If the device is not among the known data sheets.
    """
    if document.device not in SHEETS:
        raise CalibrationUnavailable(
            f"profile: device must be one of {', '.join(SHEETS)}, got {document.device!r}; "
            "calibrate --from-runs anew"
        )
    return InferredMachine(
        document=document, model=model_of(document), sheet=SHEETS[document.device]
    )


def predict_layout(
    machine: InferredMachine,
    training: Training,
    layout: Layout,
    *,
    capacity_bytes: int | None = None,
    argv: Sequence[str],
) -> tuple[LayoutPredictionDocument, Trace]:
    """Step, throughput, utilisation and memory of a layout with their doubt, and the simulated step.

    Raises
    ------
    NotFeasible
        If the model or the number of devices does not allow the layout.
    """
    jobs = layout_jobs(training, layout)
    found = machine.model.predict(jobs)
    step_s = Interval(
        p5=float(found.lower_s[0]), p50=float(found.median_s[0]), p95=float(found.upper_s[0])
    )
    parts = machine.model.parts(jobs)
    memory = tuple(_stage(jobs, stage) for stage in sorted({0, layout.pp - 1}))
    fullest = max(sum(_tensors(stage)) for stage in memory)
    step = simulated_step(machine, training, layout)
    document = LayoutPredictionDocument(
        schema_version=LayoutPredictionDocument.current_version,
        provenance=layout_provenance(machine, argv),
        profile_digest=machine.document.digest,
        device_name=machine.document.device,
        evidence="inferred",
        trained=trained_record(training),
        layout=str(layout),
        step_s=step_s,
        tokens_per_s=_inverse(step_s, training.global_batch * training.model.sequence),
        mfu=_inverse(step_s, work_per_peak_s(machine, jobs)),
        parts_s=parts_record(parts, 0),
        simulated_step_s=step.step_s,
        formula_step_s=float(parts.total_s[0]),
        memory=memory,
        capacity_bytes=capacity_bytes,
        fit_probability=None
        if capacity_bytes is None
        else float(fit_probability(np.array(fullest), capacity_bytes)),
        caveats=tuple(layout_caveats(machine, jobs)),
    )
    return document, step


def simulated_step(machine: InferredMachine, training: Training, layout: Layout) -> Trace:
    """The step of every pipeline stage in simulated time, at the fitted latents.

    Raises
    ------
    NotFeasible
        If the model or the number of devices does not allow the layout.
    """
    jobs = layout_jobs(training, layout)
    times = unit_times(layout, jobs, machine.model.nominal)
    with collector_paused():
        program = compile_layout(layout, layers=training.model.shape.layers)
        return simulate(program, layout_durations(program, times)[np.newaxis])


def layout_jobs(training: Training, layout: Layout) -> Jobs:
    """The columns of one layout, if it is possible.

    Raises
    ------
    NotFeasible
        Naming the first rule that is broken.
    """
    shape = training.model.shape
    require_feasible(
        layout,
        layers=shape.layers,
        heads=shape.heads,
        world_size=training.devices,
        sequence=training.model.sequence,
    )
    return jobs_from(
        [(shape, layout)],
        sequence=training.model.sequence,
        devices_per_node=training.devices_per_node,
    )


def layout_caveats(machine: InferredMachine, jobs: Jobs) -> list[str]:
    """What must be known before acting on the first of some jobs."""
    runs = machine.model.discrepancy.runs
    caveats = [
        "inferred from end-to-end step times of others: no part of the step was ever measured alone"
    ]
    near = np.sqrt(layout_distance_squared(jobs, runs).min(axis=1)[0])
    if near > _FAR * machine.model.discrepancy.spreads.length:
        caveats.append(
            f"the nearest run is {near:.1f} doublings away (layout, model, batch): the formula alone "
            "carries the answer"
        )
    most = runs.devices.max()
    if jobs.devices[0] > most:
        caveats.append(f"{jobs.devices[0]:.0f} devices, more than the {most:.0f} of any run")
    for name, meaning in (
        ("cp", "context parallelism"),
        ("interleave", "interleaved stages"),
        ("zero_bubble", "zero-bubble schedules"),
        ("sequence_parallel", "sequence parallelism"),
        ("recompute_full", "full recomputation"),
        ("zero", f"zero={jobs.zero[0]:.0f}"),
    ):
        if getattr(jobs, name)[0] > getattr(runs, name).max():
            caveats.append(f"no run used {meaning}: the formula's effect of it is untested")
    unknown = [
        name
        for key, names in _RELEVANT.items()
        if getattr(jobs, key)[0] > 1
        for name in names
        if not _is_determined(machine.document, name)
    ]
    if unknown:
        caveats.append(f"not determined by the runs, prior kept: {', '.join(unknown)}")
    if machine.model.disturbance is not None:
        chance = float(machine.model.disturbance.probability(jobs.take(np.array([0])))[0])
        if chance > _RARE:
            caveats.append(
                f"some runs between nodes stalled; this one would with probability {chance:.0%}, "
                "which the interval holds"
            )
    caveats.append(
        "memory: formula of an eager framework (16-bit weights, 32-bit gradients, Adam), not fitted to "
        "any run; context and allocator slack are assumed"
    )
    return caveats


def work_per_peak_s(machine: InferredMachine, jobs: Jobs) -> float:
    """How long the model FLOP of a step take at the dense peak of all devices. [s]"""
    peak = machine.sheet.matmul_flop_per_s * jobs.devices[0]
    return float(jobs.model_flop[0] / peak)


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
    return StepPartsRecord(**{name: float(getattr(parts, name)[index]) for name in _PARTS})


def layout_provenance(machine: InferredMachine, argv: Sequence[str]) -> Provenance:
    """Who made an answer, from whose runs."""
    return Provenance(
        created_utc=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command_line=command_line(argv),
        git_commit=None,
        seed=machine.document.provenance.seed,
        versions={"perfmodel": version("perfmodel")},
        host_fingerprint=machine.document.provenance.host_fingerprint,
    )


def _inverse(step_s: Interval, work: float) -> Interval:
    return Interval(p5=work / step_s.p95, p50=work / step_s.p50, p95=work / step_s.p5)


def _stage(jobs: Jobs, stage: int) -> StageMemory:
    found = rank_memory(jobs, stage)
    return StageMemory(
        stage=stage,
        parameters_bytes=float(found.parameters_bytes[0]),
        gradients_bytes=float(found.gradients_bytes[0]),
        optimizer_bytes=float(found.optimizer_bytes[0]),
        activations_bytes=float(found.activations_bytes[0]),
        logits_bytes=float(found.logits_bytes[0]),
        needed_bytes=float(needed_bytes(found.tensor_bytes)[0]),
    )


def _tensors(stage: StageMemory) -> tuple[float, ...]:
    return (
        stage.parameters_bytes,
        stage.gradients_bytes,
        stage.optimizer_bytes,
        stage.activations_bytes,
        stage.logits_bytes,
    )


def _is_determined(document: InferredDocument, name: str) -> bool:
    return all(latent.determined for latent in document.latents if latent.name == name)

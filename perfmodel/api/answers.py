"""Questions about steps: trace, predict, explain, compare, memory, diagnosis."""

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from perfmodel.answer import Question, open_question
from perfmodel.answer.answer import Forecast, layout_table, table
from perfmodel.answer.memory import MemoryReport, report_of, sheet_of
from perfmodel.cost.inferred import with_nodes_of as joined_like
from perfmodel.diagnosis.asked import Diagnosed, diagnosed
from perfmodel.diagnosis.cases import Case
from perfmodel.documents import checks_arguments, fitted
from perfmodel.documents.hardware import open_cluster
from perfmodel.documents.prediction import PredictionDocument, WhatIfDocument
from perfmodel.documents.profile import InferredDocument, ProfileDocument, machine_file
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError, brief, refuse_unknown
from perfmodel.explanation import Explanation
from perfmodel.explanation import explain as explain_question
from perfmodel.layout import Scaling, parse_layout
from perfmodel.machine import Cluster
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.models import document_of, is_workload_file, traced_document, workload_of
from perfmodel.scaling import with_advice
from perfmodel.scenarios import Scenario, compare_scenarios
from perfmodel.scenarios.fields import changed
from perfmodel.units import MOST_ENTRIES, Bytes
from perfmodel.workload.step import CHECKPOINTING, DEVICE_KINDS, PRECISIONS, USUAL_METHOD

if TYPE_CHECKING:
    from perfmodel.tracing.loop import LoopClock

AnyPath: TypeAlias = str | os.PathLike[str]
#: A document, or the file that holds it.
AnyMachine: TypeAlias = MeasuredMachine | AnyPath
AnyValidation: TypeAlias = ValidationDocument | AnyPath
#: Name of a calibrated workload, a workload file, or its document.
AnyWorkload: TypeAlias = WorkloadDocument | AnyPath
#: A cluster, or the file that describes it.
AnyCluster: TypeAlias = Cluster | AnyPath


@checks_arguments(but=("device_kind",))
def trace(  # noqa: PLR0913 - one parameter per part of a step
    model: Any,
    inputs: Any = None,
    targets: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = "sgd",
    precision: str = "fp32",
    checkpointing: str = "none",
    device_kind: Literal["cpu", "cuda", "as-cuda"] = "cpu",
    micro_batch: int | None = None,
    image_size: int | None = None,
    sequence_length: int | None = None,
) -> WorkloadDocument:
    """Record a training step on tensors without content: no weights are read, nothing runs.

    Parameters
    ----------
    model
        Your ``nn.Module``; or a name, ``FILE.py:FACTORY`` or ``config.json`` as ``perfmodel trace`` takes it;
        or what ``record`` saw.
    inputs
        Of a module: a batch as the loop passes it, a tensor, a tuple of arguments or a dict of keywords. The
        first dimension counts samples.
    targets
        A tensor that the loss takes after the outputs.
    loss
        ``loss(outputs)`` or ``loss(outputs, targets)``. Default: the outputs' ``.loss``, or themselves if they
        are a scalar; cross-entropy of scores ``(samples, classes)`` against ``targets``.
    optimizer
        ``"sgd"`` (with momentum), ``"adamw"``, or your optimizer.
    precision, checkpointing
        As the options of ``perfmodel trace``.
    device_kind
        Whose kernels: ``"cpu"``, ``"cuda"``, or, where there is no GPU, ``"as-cuda"``: what a GPU would run, for
        the machines of ``perfmodel machines``.
    micro_batch
        Samples of a forward pass; the answer serves others too. Default: the batch that comes
        with the model, or 8.
    image_size, sequence_length
        Of a named model.

    Raises
    ------
    UsageError, UntraceableModel
        If the model or the batch makes no sense, with the module and operator that refused it.
    """
    refuse_unknown("precision", precision, PRECISIONS)
    refuse_unknown("checkpointing", checkpointing, CHECKPOINTING)
    refuse_unknown("device_kind", device_kind, DEVICE_KINDS)
    as_on_cuda = device_kind == "as-cuda"
    kind = "cpu" if as_on_cuda else device_kind
    method = replace(
        USUAL_METHOD, precision=precision, checkpointing=checkpointing, device_kind=kind
    )
    if hasattr(model, "traced"):
        return document_of(model.traced())
    if not isinstance(model, str):
        from perfmodel.tracing.loop import trace_live  # noqa: PLC0415 - imports torch

        traced = trace_live(
            model,
            inputs,
            targets,
            method,
            loss=loss,
            optimizer=optimizer,
            micro_batch=micro_batch,
            as_on_cuda=as_on_cuda,
        )
        return document_of(traced)
    return traced_document(
        model,
        replace(method, optimizer=optimizer),
        micro_batch=micro_batch,
        image_size=image_size,
        sequence_length=sequence_length,
        as_on_cuda=as_on_cuda,
    )


def record(
    model: Any,
    optimizer: Any,
    *,
    loss: Callable[..., Any] | None = None,
    steps: int = 10,
    warmup: int = 3,
) -> "LoopClock":
    """Time some steps of a loop that exists, and see what it trains: a context around the loop.

    Its lines stay as they are. ``with pm.record(model, optimizer) as run: train()``; then ``run.step_s``,
    ``pm.trace(run)`` and ``pm.diagnose(pm.trace(run), observed=[run.observed], ...)``.

    Parameters
    ----------
    model, optimizer
        Those of the loop; wrappers for data parallelism are allowed.
    loss
        A module whose calls tell the targets, or a function of the outputs. Default: the outputs' own.
    steps
        Steps to time; the loop then runs on untouched.
    warmup
        Steps before them.
    """
    from perfmodel.tracing.loop import LoopClock  # noqa: PLC0415 - imports torch

    return LoopClock(model, optimizer, loss=loss, num_steps=steps, warmup=warmup)


@checks_arguments()
def memory(
    workload: WorkloadDocument | AnyPath,
    *,
    device: str | None = None,
    capacity_bytes: Bytes | None = None,
    machine: AnyMachine | None = None,
    micro_batch: int | None = None,
    devices: int = 1,
) -> MemoryReport:
    """Say whether a step fits into a device, the largest batch that does, and what to change first.

    Parameters
    ----------
    workload
        From ``trace``, its file, or a model by name.
    device
        By data sheet, such as ``"h100-sxm"``; default: that of ``machine``.
    capacity_bytes
        Memory of one device; default: that of ``device``. [B]
    machine
        Whose devices are meant, calibrated or by name.
    micro_batch
        Samples of a forward pass; default: as traced.
    devices
        Data-parallel ranks.

    Raises
    ------
    UsageError
        If neither a device nor its memory is given, or the device is unknown.
    """
    found = None if machine is None else opened(machine)
    sheet = sheet_of(device, found)
    if capacity_bytes is None:
        if sheet is None:
            raise UsageError("device: must be given where capacity_bytes is not, such as h100-sxm")
        capacity_bytes = sheet.memory.size_bytes
    trace_again = None
    if not isinstance(workload, WorkloadDocument):
        text, as_on_cuda = os.fspath(workload), sheet is not None and sheet.kind == "cuda"
        if is_workload_file(text):
            workload = WorkloadDocument.read(Path(text))
        else:
            trace_again = partial(
                traced_document, text, micro_batch=micro_batch, as_on_cuda=as_on_cuda
            )
            workload = trace_again(USUAL_METHOD)
    return report_of(
        workload,
        capacity_bytes,
        machine=found,
        micro_batch=micro_batch,
        devices=devices,
        sheet=sheet,
        trace_again=trace_again,
    )


@checks_arguments()
def diagnose(
    model: str | WorkloadDocument, *, machine: AnyMachine | None = None, **case: Any
) -> Diagnosed:
    """Say whether logged speeds are normal, which causes fit with which odds, and what to measure next.

    Parameters
    ----------
    model
        A name, a file, or what ``trace`` returned.
    machine
        Calibrated, or by name, in place of the data sheet of ``device``.
    case
        Fields of ``perfmodel.diagnosis.cases.Case``, the options of ``perfmodel diagnose``:
        ``device="h100-sxm", precision="bf16", micro_batch=4, observed=["2 nodes of 4: 8.7 s"]``; rates in B/s.

    Raises
    ------
    UsageError
        If something is missing or contradicts itself; nothing is assumed in its place.
    """
    kinds = {each.name: each.type for each in fields(Case) if each.name not in {"model", "machine"}}
    for name in case:
        refuse_unknown("diagnose: parameter", name, kinds)
    kinds["cluster"] = AnyCluster | None
    said = {name: fitted(name, value, kinds[name]) for name, value in case.items()}
    said["cluster"] = cluster_of(said.get("cluster"))
    found = None if machine is None else opened(machine)
    return diagnosed(Case(model=model, machine=found, **said))


@checks_arguments()
def read_profile(path: AnyPath) -> MeasuredMachine:
    """Read a profile, as ``perfmodel calibrate`` writes it, or a machine of ``perfmodel machines`` by name.

    Raises
    ------
    CalibrationUnavailable
        If it is unusable.
    """
    return ProfileDocument.read(machine_file(os.fspath(path), flag="profile")).machine


def opened(machine: AnyMachine) -> MeasuredMachine:
    """A machine, read if a file or a name stands for it."""
    return machine if isinstance(machine, MeasuredMachine) else read_profile(machine)


@checks_arguments()
def with_nodes_of(machine: AnyMachine, name: str) -> MeasuredMachine:
    """Put a machine of one node among nodes that are joined like those of a shipped machine.

    Rate and slow nodes are as published runs on that machine show; the evidence of these terms is "inferred".

    Parameters
    ----------
    machine
        Of one node, measured with several ranks.
    name
        Of ``perfmodel machines``, with runs of large models: ``"dgx-a100"``, ``"dgx-h100"``.

    Raises
    ------
    UsageError, CalibrationUnavailable
        If the machine was not measured so, or nobody knows the nodes of the other.
    """
    return joined_like(
        opened(machine), InferredDocument.named(name, flag="name").machine, name=name
    )


@checks_arguments()
def read_prediction(path: AnyPath) -> PredictionDocument:
    """Read a prediction, as ``perfmodel predict --output`` writes it."""
    return PredictionDocument.read(Path(path))


@checks_arguments(but=("devices", "workload"))
def predict(  # noqa: PLR0913 - one parameter per part of the question
    machine: AnyMachine,
    workload: AnyWorkload,
    *,
    devices: int | Sequence[int] = (1, 2, 4, 8),
    scaling: Scaling = "weak",
    batch: int | None = None,
    accumulation: int = 1,
    bucket_cap_mb: float | None = None,
    loader_samples_per_s: float | None = None,
    sync_every_step: bool = False,
    validation: AnyValidation | None = None,
    cluster: AnyCluster | None = None,
    layout: str | None = None,
    capacity_bytes: Bytes | None = None,
) -> PredictionDocument:
    """Predict step time, samples per second and speed-up for several numbers of devices, or one layout.

    Parameters
    ----------
    machine
        A document, a path, or a name of ``perfmodel machines``.
    workload
        Name of a calibrated workload, path of a workload file (``.json``), its document, or a model by name.
    scaling
        ``"weak"``: the batch of each device is fixed; ``"strong"``: the global batch is.
    batch
        Weak: samples per forward pass of each device; strong: samples per step of all. Default: the
        middle calibrated micro-batch (weak), or the largest (strong).
    accumulation
        Forward and backward passes per optimizer step.
    bucket_cap_mb
        As DistributedDataParallel takes it, in MiB; default: PyTorch's.
    loader_samples_per_s
        What the input pipeline feeds one device; default: no limit.
    sync_every_step
        Whether every step waits for the device, as ``loss.item()`` does: on GPUs it then cannot hide the host.
    validation
        Earlier errors on this machine, which widen the intervals.
    cluster
        Links between the devices; default: nodes that the machine knows or usually comes in, else one ring of links
        like the measured ones.
    layout
        Such as ``"fsdp=8 tp=2 micro_batch=4"``, of a traced workload; excludes all that counts devices
        and batches.
    capacity_bytes
        Memory of one device, whose chance to suffice for the layout is wanted. [B]

    Returns
    -------
    PredictionDocument
        One point per device count, or of the layout: every quantity as ``p5``, ``nominal``, ``p95``; times in seconds.

    Raises
    ------
    UsageError, NotFeasible, CalibrationUnavailable
        If the workload is unknown, a global batch cannot be split evenly or a cluster is too small, or
        the profile holds too little for the question.
    """
    question = replace(
        question_of(machine, workload, validation=validation, cluster=cluster),
        loader_samples_per_s=loader_samples_per_s,
        sync_every_step=sync_every_step,
    )
    if layout is not None:
        asked = replace(question, layout=parse_layout(layout), capacity_bytes=capacity_bytes)
        return layout_table(asked)[0]
    request = Forecast(
        world_sizes=_counts(devices),
        scaling=scaling,
        batch=batch,
        accumulation=accumulation,
        bucket_cap_mb=bucket_cap_mb,
    )
    return with_advice(table(question, request)[0], question, request)


@checks_arguments(but=("workload",))
def explain(  # noqa: PLR0913 - the same
    machine: AnyMachine,
    workload: AnyWorkload,
    *,
    devices: int,
    scaling: Scaling = "weak",
    batch: int | None = None,
    accumulation: int = 1,
    bucket_cap_mb: float | None = None,
    loader_samples_per_s: float | None = None,
    cluster: AnyCluster | None = None,
) -> Explanation:
    """Rank what costs the speed-up on ``devices`` devices, with one change for each cause.

    Parameters are those of ``predict``, with one device count. Times are in seconds.
    """
    question = replace(
        question_of(machine, workload, cluster=cluster), loader_samples_per_s=loader_samples_per_s
    )
    request = Forecast(
        world_sizes=(devices,),
        scaling=scaling,
        batch=batch,
        accumulation=accumulation,
        bucket_cap_mb=bucket_cap_mb,
    )
    return explain_question(request.at_largest(question), scaling=scaling)


@checks_arguments(but=("workload",))
def whatif(  # noqa: PLR0913 - the same
    machine: AnyMachine,
    workload: AnyWorkload,
    *scenarios: Mapping[str, str],
    devices: int = 8,
    scaling: Scaling = "weak",
    batch: int | None = None,
    validation: AnyValidation | None = None,
    cluster: AnyCluster | None = None,
) -> WhatIfDocument:
    """Compare a question with scenarios in which some of its fields are others.

    Parameters
    ----------
    scenarios
        Field to value as text, such as ``{"network.bandwidth": "400Gb/s", "devices": "64"}``; the
        fields are those of ``perfmodel whatif --fields``.
    devices, scaling, batch, cluster
        The question as it is; see ``predict``.

    Raises
    ------
    UsageError
        If a field is unknown or a value makes no sense.
    """
    base = Scenario(
        question=question_of(machine, workload, validation=validation, cluster=cluster),
        request=Forecast(world_sizes=(devices,), scaling=scaling, batch=batch),
    )
    return compare_scenarios([base, *(changed(base, changes) for changes in scenarios)])


def cluster_of(cluster: AnyCluster | None) -> Cluster | None:
    """A cluster, read if a file or words stand for it."""
    return cluster if cluster is None or isinstance(cluster, Cluster) else open_cluster(cluster)


def _counts(devices: Any) -> tuple[int, ...]:
    """Counts of devices, ascending, each once."""
    found = (
        devices if isinstance(devices, Iterable) and not isinstance(devices, str) else (devices,)
    )
    named = [*itertools.islice(found, MOST_ENTRIES + 1)]
    if len(named) > MOST_ENTRIES:
        raise UsageError(
            f"devices: must name at most {MOST_ENTRIES} counts, got more; name 1, 2, 4, 8, ...: between them it is "
            "smooth"
        )
    try:
        counts = tuple(sorted(set(map(operator.index, named))))
    except TypeError:
        raise UsageError(f"devices: must be whole numbers, got {brief(devices)}") from None
    if not counts:
        raise UsageError("devices: must be one number or more, got none")
    return counts


def question_of(machine: AnyMachine, workload: AnyWorkload, **more: Any) -> Question:
    """A question about what was traced; a model itself is refused."""
    if not isinstance(workload, WorkloadDocument | str | os.PathLike):
        kind = type(workload).__name__
        raise UsageError(f"workload: must be traced, got a {kind}; pm.trace(model, batch) does")
    found = opened(machine)
    if not isinstance(workload, WorkloadDocument):
        workload = workload_of(found, os.fspath(workload), where="workload")
    return open_question(found, workload, **more)

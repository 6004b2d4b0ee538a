"""What ``import perfmodel as pm`` offers: the use cases of the command line as functions.

Every function takes and returns the documents that the command line reads and writes, so that a
number in a notebook and one in a terminal come from the same lines.
"""

import datetime as dt
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from perfmodel.advice import with_advice
from perfmodel.answer.answer import Forecast, layout_table, table
from perfmodel.answer.measured import check_machine, open_workload
from perfmodel.answer.question import Question
from perfmodel.documents.acceptance import AcceptanceTerms
from perfmodel.documents.base import today_utc
from perfmodel.documents.budget import CostDocument, read_budget
from perfmodel.documents.goodput import GoodputDocument
from perfmodel.documents.hardware import read_cluster
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.plan import PlanDocument, read_plan
from perfmodel.documents.prediction import (
    PredictionDocument,
    WhatIfDocument,
)
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.seals import unsealed
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.engine.job import FailureCause, Job
from perfmodel.errors import UsageError
from perfmodel.explanation import Explanation
from perfmodel.explanation import explain as explain_question
from perfmodel.layout.layout import Scaling, parse_layout
from perfmodel.machine.cluster import Cluster
from perfmodel.machine.inferred import InferredMachine
from perfmodel.machine.machine import DEVICES_PER_NODE
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.models import read_model
from perfmodel.plan.acceptance import acceptance_terms as terms_of
from perfmodel.plan.acceptance import judge
from perfmodel.plan.cost import compare_costs as costs_of
from perfmodel.plan.goodput import Request
from perfmodel.plan.goodput import goodput as simulated_weeks
from perfmodel.plan.machines import read_sources
from perfmodel.plan.options import plan_options as ranked_options
from perfmodel.plan.profile_diff import compare_profiles
from perfmodel.scenarios.changes import Scenario
from perfmodel.scenarios.compare import compare_scenarios
from perfmodel.scenarios.fields import changed
from perfmodel.units import Bytes, Seconds

AnyPath: TypeAlias = str | os.PathLike[str]
#: A document, or the file that holds it.
AnyProfile: TypeAlias = MeasuredMachine | AnyPath
AnyValidation: TypeAlias = ValidationDocument | AnyPath
#: Name of a calibrated workload, a workload file, or its document.
AnyWorkload: TypeAlias = WorkloadDocument | AnyPath
#: A cluster, or the file that describes it.
AnyCluster: TypeAlias = Cluster | AnyPath


def plan_options(
    plan: AnyPath,
    *,
    prices: AnyPath | None = None,
    today: dt.date | None = None,
    argv: Sequence[str] = ("perfmodel.plan_options",),
) -> PlanDocument:
    """Rank the options of a plan file by cost, with the chance to meet its deadline.

    Parameters
    ----------
    plan
        In TOML; paths in it are relative to its folder.
    prices
        CSV of prices, used by name.
    today
        For the age of prices, and the first day of training if the plan names none; default: today.

    Returns
    -------
    PlanDocument
        ``ranked`` is empty if nothing is feasible; ``options`` then says what comes nearest.

    Raises
    ------
    InvalidDocument
        If the plan breaks a rule, contradicts itself, or its deadline is past.
    """
    path, day = Path(plan), today or today_utc()
    found = read_plan(path, today=day, prices=None if prices is None else Path(prices))
    try:
        return ranked_options(*read_sources(found, path), today=day, argv=argv)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def compare_costs(
    budget: AnyPath,
    *,
    prices: AnyPath | None = None,
    today: dt.date | None = None,
) -> CostDocument:
    """Compare buying with renting: cost of a useful device-hour, and where they cross.

    Parameters are those of ``plan_options``; the budget is in TOML.

    Raises
    ------
    InvalidDocument
        If the budget breaks a rule, or mixes currencies.
    """
    day = today or today_utc()
    found = read_budget(Path(budget), today=day, prices=None if prices is None else Path(prices))
    return costs_of(found, today=day, argv=("perfmodel.compare_costs",))


def goodput(
    job: Job,
    *,
    replicas: int = 200,
    seed: int = 0,
    mtbf_stops: int | None = None,
    deadline_s: Seconds | None = None,
) -> GoodputDocument:
    """Simulate weeks of a job that fails: when it ends, and how often to write checkpoints.

    Parameters
    ----------
    replicas
        Simulated courses.
    mtbf_stops
        From how many stops the rates of failure were estimated: widens the answer.
    deadline_s
        Whose chance is wanted, from the start. [s]

    Raises
    ------
    NotFeasible
        If the job would hardly get on.
    """
    request = Request(
        job=job, replicas=replicas, seed=seed, mtbf_stops=mtbf_stops, deadline_s=deadline_s
    )
    return simulated_weeks(request, argv=("perfmodel.goodput",))


def predict_large_model(
    profile: InferredMachine | AnyPath,
    model: str,
    layout: str,
    *,
    sequence_length: int | None = None,
    devices_per_node: int = DEVICES_PER_NODE,
    capacity_bytes: Bytes | None = None,
) -> PredictionDocument:
    """Predict one layout of a large model, from a calibration that was inferred from runs.

    Parameters
    ----------
    model
        By name, such as ``"llama2-7b"``, or its Hugging Face ``config.json``.
    layout
        Such as ``"dp=16 tp=4 zero=1 accumulation=8"``; its product is the number of devices.
    capacity_bytes
        Memory of one device, whose chance to suffice is wanted. [B]

    Raises
    ------
    UsageError, NotFeasible, CalibrationUnavailable
        If a name or the layout makes no sense, the model does not allow it, or the profile is another.
    """
    if not isinstance(profile, InferredMachine):
        profile = InferredDocument.read(Path(profile)).machine
    question = Question(
        machine=profile,
        workload=read_model(model, sequence=sequence_length),
        layout=parse_layout(layout),
        devices_per_node=devices_per_node,
        capacity_bytes=capacity_bytes,
    )
    return layout_table(question, argv=("perfmodel.predict_large_model",))[0]


def read_profile(path: AnyPath) -> MeasuredMachine:
    """Read a profile, as ``perfmodel calibrate`` writes it; ``CalibrationUnavailable`` if it is unusable."""
    return ProfileDocument.read(Path(path)).machine


def read_workload(path: AnyPath) -> WorkloadDocument:
    """Read a workload file, as ``perfmodel trace`` writes it."""
    return WorkloadDocument.read(Path(path))


def read_validation(path: AnyPath) -> ValidationDocument:
    """Read a validation, as ``perfmodel validate`` writes it."""
    return ValidationDocument.read(Path(path))


def read_prediction(path: AnyPath) -> PredictionDocument:
    """Read a prediction, as ``perfmodel predict --output`` writes it."""
    return PredictionDocument.read(Path(path))


def predict(  # noqa: PLR0913 - one parameter per part of the question
    profile: AnyProfile,
    workload: AnyWorkload,
    *,
    devices: Sequence[int] = (1, 2, 4, 8),
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
    profile
        The machine: a document, or a path.
    workload
        Name of a calibrated workload, path of a workload file (``.json``), or its document.
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
        Links between the devices; default: one ring of links like the measured ones.
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
    question, argv = _question(profile, workload, validation, cluster), ("perfmodel.predict",)
    if layout is not None:
        asked = replace(
            question,
            layout=parse_layout(layout),
            capacity_bytes=capacity_bytes,
            loader_samples_per_s=loader_samples_per_s,
            sync_every_step=sync_every_step,
        )
        return layout_table(asked, argv=argv)[0]
    request = Forecast(
        world_sizes=tuple(sorted(set(devices))),
        scaling=scaling,
        batch=batch,
        accumulation=accumulation,
        bucket_cap_mb=bucket_cap_mb,
        loader_samples_per_s=loader_samples_per_s,
        sync_every_step=sync_every_step,
    )
    return with_advice(table(question, request, argv=argv)[0], question, request)


def explain(  # noqa: PLR0913 - the same
    profile: AnyProfile,
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
    """Rank what costs the speed-up on so many devices, with one change for each cause.

    Parameters are those of ``predict``, with one device count. Times are in seconds.
    """
    question = _question(profile, workload, None, cluster)
    request = Forecast(
        world_sizes=(devices,),
        scaling=scaling,
        batch=batch,
        accumulation=accumulation,
        bucket_cap_mb=bucket_cap_mb,
        loader_samples_per_s=loader_samples_per_s,
    )
    return explain_question(request.at_largest(question), scaling=scaling)


def whatif(  # noqa: PLR0913 - the same
    profile: AnyProfile,
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
        question=_question(profile, workload, validation, cluster),
        request=Forecast(world_sizes=(devices,), scaling=scaling, batch=batch),
    )
    return compare_scenarios(
        [base, *(changed(base, changes) for changes in scenarios)], argv=("perfmodel.whatif",)
    )


def acceptance_terms(
    profile: AnyProfile,
    workloads: Sequence[str] | None = None,
    *,
    confidence: float = 0.95,
    goodput: GoodputDocument | None = None,
) -> AcceptanceTerms:
    """Clauses that a machine like the one of the profile keeps, each with this confidence.

    Parameters
    ----------
    workloads
        Calibrated workloads whose step is a clause; default: all.
    goodput
        From ``perfmodel goodput --json``: its share of useful time becomes a clause.
    """
    machine = profile if isinstance(profile, MeasuredMachine) else read_profile(profile)
    names = [entry.workload.name for entry in machine.workloads]
    return terms_of(machine, workloads or names, confidence=confidence, goodput=goodput)


def _question(
    profile: AnyProfile,
    workload: AnyWorkload,
    validation: AnyValidation | None,
    cluster: AnyCluster | None,
) -> Question:
    """A workload on a machine with earlier errors, in a cluster."""
    machine = profile if isinstance(profile, MeasuredMachine) else read_profile(profile)
    if validation is not None and not isinstance(validation, ValidationDocument):
        validation = read_validation(validation)
    if cluster is not None and not isinstance(cluster, Cluster):
        cluster = read_cluster(Path(cluster))
    check_machine(machine, validation, cluster)
    named = workload if isinstance(workload, WorkloadDocument) else os.fspath(workload)
    return Question(
        machine=machine,
        workload=open_workload(machine, named),
        validation=validation,
        cluster=cluster,
    )


__all__ = (
    "FailureCause",
    "Job",
    "acceptance_terms",
    "compare_costs",
    "compare_profiles",
    "explain",
    "goodput",
    "judge",
    "plan_options",
    "predict",
    "predict_large_model",
    "read_prediction",
    "read_profile",
    "read_validation",
    "read_workload",
    "unsealed",
    "whatif",
)

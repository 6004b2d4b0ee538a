"""Questions about machines: plans, searches, layouts of large models, clauses for a contract and their judgement."""

import datetime as dt
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfmodel.answer import Question
from perfmodel.answer.answer import layout_table
from perfmodel.answer.inferred import Training
from perfmodel.api.answers import AnyCluster, AnyMachine, AnyPath, cluster_of, opened, question_of
from perfmodel.cost.inferred import LINKS_OF_FILE, on_links, open_inferred, with_nodes_of
from perfmodel.documents import Provenance, checks_arguments, today_utc
from perfmodel.documents.acceptance import AcceptanceDocument, AcceptanceTerms, RankRun, read_run
from perfmodel.documents.budget import GoodputDocument
from perfmodel.documents.importers import read_nccl_paste
from perfmodel.documents.observation import Observation
from perfmodel.documents.observed import Unit, read_observed
from perfmodel.documents.plan import PlanDocument, read_plan
from perfmodel.documents.prediction import ParallelismPlanDocument, PredictionDocument
from perfmodel.documents.profile import InferredDocument, shipped_runs
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError
from perfmodel.layout import Layout, parse_layout
from perfmodel.layout_search import Request as SearchRequest
from perfmodel.layout_search import plan_parallelism as ranked_layouts
from perfmodel.machine import DEVICES_PER_NODE, Cluster, InferredMachine
from perfmodel.machine.measured import MeasuredCollective, MeasuredMachine
from perfmodel.models import is_model_config, read_model
from perfmodel.plan.acceptance import (
    BoughtJob,
    goodput_promises,
    job_promises,
    machine_promises,
    terms_of,
)
from perfmodel.plan.acceptance import judge as judged
from perfmodel.plan.delivered import Delivery, JobRun
from perfmodel.plan.machines import read_sources
from perfmodel.plan.options import plan_options as ranked_options
from perfmodel.units import GIB, Bytes, Seconds, parse_duration
from perfmodel.workload.transformer import TRANSFORMERS

if TYPE_CHECKING:
    from perfmodel.tracing.loop import LoopClock

#: Devices of a part, in its name.
_COUNT: Final = re.compile(r"\b([1-9][0-9]{0,6})\s*(?:gpus?|devices?|ranks?)\b", re.IGNORECASE)


@checks_arguments()
def plan_options(plan: AnyPath, *, today: dt.date | None = None) -> PlanDocument:
    """Rank the options of a plan file by cost, with the chance to meet its deadline.

    Parameters
    ----------
    plan
        In TOML; paths in it are relative to its folder.
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
    found = read_plan(path, today=day)
    try:
        return ranked_options(*read_sources(found, path), today=day)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _inferred(machine: InferredMachine | AnyPath) -> InferredMachine:
    if isinstance(machine, InferredMachine):
        return machine
    return InferredDocument.named(machine).machine


@checks_arguments()
def search(  # noqa: PLR0913 - one parameter per part of the question
    machine: InferredMachine | AnyPath,
    model: str,
    *,
    devices: int,
    global_batch: int,
    capacity_bytes: Bytes = 80 * GIB,
    sequence_length: int | None = None,
    devices_per_node: int | None = None,
    cluster: AnyCluster | None = None,
    interleave: int = 1,
    top: int = 10,
) -> ParallelismPlanDocument:
    """Rank all layouts of a large model on a cluster.

    Parameters
    ----------
    machine
        Inferred from runs: its file, or a name of ``perfmodel machines``.
    model
        By name, such as ``"llama2-7b"``, or its Hugging Face ``config.json``.
    global_batch
        Sequences per optimizer step.
    capacity_bytes
        Memory of one device. [B]
    devices_per_node
        Devices that share fast links; default: those of a node of the cluster, or 8.
    cluster
        Links between the devices; default: those of the runs.
    interleave
        Most pipeline stages per device.
    top
        Layouts to return.
    """
    links, found = cluster_of(cluster), _inferred(machine)
    training = Training(
        model=read_model(model, sequence=sequence_length),
        devices=devices,
        devices_per_node=devices_per_node or _inside(links),
        global_batch=global_batch,
    )
    request = SearchRequest(
        training=training,
        capacity_bytes=capacity_bytes,
        interleave=interleave,
        top=top,
        caveats=() if links is None else (LINKS_OF_FILE,),
    )
    if links is not None:
        found = on_links(found, links, num_devices=devices)
    return ranked_layouts(open_inferred(found), request)


def _inside(cluster: Cluster | None) -> int:
    """Devices of a node."""
    return (cluster and cluster.devices_per_node) or DEVICES_PER_NODE


@checks_arguments()
def predict_large_model(
    machine: InferredMachine | AnyPath,
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
    question = Question(
        machine=_inferred(machine),
        workload=read_model(model, sequence=sequence_length),
        layout=parse_layout(layout),
        devices_per_node=devices_per_node,
        capacity_bytes=capacity_bytes,
    )
    return layout_table(question)[0]


@checks_arguments()
def acceptance_terms(  # noqa: PLR0913 - one parameter per part of the question
    machine: AnyMachine,
    workloads: str | WorkloadDocument | Sequence[str] | None = None,
    *,
    layout: str | None = None,
    cluster: AnyCluster | None = None,
    observed: Sequence[str] = (),
    logs: Sequence[AnyPath] = (),
    confidence: float = 0.95,
    goodput: GoodputDocument | None = None,
) -> AcceptanceTerms:
    """Clauses that a machine like this one keeps, all together with this confidence.

    Parameters
    ----------
    workloads
        Calibrated workloads whose step is a clause, on all ranks that were measured together; default: all. With
        ``layout``: what is trained, a model as ``trace`` takes it, its document, or a transformer by name.
    layout
        Of the job that a machine is bought for, such as ``"dp=64 micro_batch=32"``: clauses are then predicted.
    cluster
        How its nodes are joined, see ``predict``.
    observed
        Runs of the job on a part of such a machine, ``"8 GPUs 1 node 0.46 s"``: what makes a clause strong.
    logs
        Of nccl-tests on a part of such a machine.
    confidence
        Of all clauses together, between 0.5 and 1; see ``perfmodel.plan.acceptance``.
    goodput
        From ``perfmodel goodput --json``: its share of useful time becomes a clause.

    Raises
    ------
    UsageError, CalibrationUnavailable, NotFeasible
        If a name or the layout makes no sense, or nothing is known to write a clause about.
    """
    if layout is None:
        found = opened(machine)
        if isinstance(workloads, WorkloadDocument):
            raise UsageError(
                "layout: must be given with a traced model, such as 'dp=64 micro_batch=32'"
            )
        names = [workloads] if isinstance(workloads, str) else workloads
        if names is None:
            names = [entry.workload.name for entry in found.workloads]
        promises = machine_promises(found, names)
        device_name, digest = found.device_name, found.digest
    else:
        if isinstance(workloads, str | WorkloadDocument):
            models: Sequence[str | WorkloadDocument] = [workloads]
        else:
            models = workloads or ()
        if len(models) != 1:
            raise UsageError(f"--workload: must be one model beside --layout, got {len(models)}")
        runs = tuple(map(_observed_run, observed))
        reference = Delivery(runs=runs, collectives=_collectives(logs))
        job = replace(_job(machine, models[0], layout, cluster), reference=reference)
        promises, joined = job_promises(job), job.question.cluster
        device_name, digest = job.question.machine.device_name, job.question.machine.digest
        device_name += "" if joined is None else f" in {joined.name}"
    return terms_of(
        [*promises, *goodput_promises(goodput)],
        confidence=confidence,
        device_name=device_name,
        digest=digest,
    )


@checks_arguments()
def judge(  # noqa: PLR0913 - one parameter per kind of measurement
    terms: AcceptanceTerms | AnyPath,
    machine: AnyMachine | None = None,
    *,
    observations: Sequence[Observation] = (),
    observed: Sequence[str] = (),
    runs: Sequence[AnyPath] = (),
    parts: Sequence[str] = (),
    logs: Sequence[AnyPath] = (),
    goodput: GoodputDocument | None = None,
) -> AcceptanceDocument:
    """Judge every clause with the uncertainty of what was measured of the delivered machine.

    Parameters
    ----------
    machine
        Its profile, if it was calibrated.
    observations
        Raw times behind the profile, which say which rank is slow.
    observed, runs
        Runs of the job: ``"64 GPUs 8 nodes 0.48 s"``, or folders of ``write_run``.
    parts
        The job on equal parts, ``"node 3, 8 GPUs: 0.52 s"``: what finds the slow one where ranks wait for each other.
    logs
        Of nccl-tests.
    goodput
        Of the same job at the rates of failures that the machine showed.
    """
    found = terms if isinstance(terms, AcceptanceTerms) else AcceptanceTerms.read(Path(terms))
    parts_s = _parts(parts)
    counts = [int(each[1]) for name in parts_s if (each := _COUNT.search(name))]
    delivery = Delivery(
        machine=None if machine is None else opened(machine),
        observations=observations,
        runs=(
            *map(_observed_run, observed),
            *(JobRun.of_ranks(read_run(Path(folder))) for folder in runs),
        ),
        parts_s=parts_s,
        # Where all names say it.
        parts_devices=sum(counts) if counts and len(counts) == len(parts_s) else None,
        collectives=_collectives(logs),
        goodput=goodput,
    )
    return judged(found, delivery)


@checks_arguments(but=("run",))
def write_run(run: "LoopClock", folder: AnyPath) -> Path:
    """Write what a rank recorded into a folder that all ranks share, for ``judge``; returns the file."""
    path = Path(folder) / f"rank-{run.rank:05}.json"
    RankRun(
        provenance=Provenance.of_answer(host_fingerprint=platform.node() or "unknown"),
        rank=run.rank,
        world_size=run.world_size,
        ranks_per_node=run.ranks_per_node,
        host=platform.node(),
        step_s=run.step_s,
        ready_s=run.ready_s,
    ).write(path)
    return path


def _job(
    machine: AnyMachine, workload: str | WorkloadDocument, layout: str, cluster: AnyCluster | None
) -> BoughtJob:
    """The job on the machine that is bought; a transformer by its shape where runs of such are known."""
    split = parse_layout(layout)
    named = Path(machine).stem if isinstance(machine, str | os.PathLike) else ""
    if isinstance(workload, str) and (
        workload in TRANSFORMERS or (named in shipped_runs() and is_model_config(Path(workload)))
    ):
        return _large_job(machine, workload, split, cluster)
    found = opened(machine)
    question = question_of(found, workload, cluster=cluster)
    return BoughtJob(question=replace(question, layout=split), links=found)


def _large_job(
    machine: AnyMachine, workload: str, layout: Layout, cluster: AnyCluster | None
) -> BoughtJob:
    """Of a large model; collectives are those of the node by name, and its nodes as the runs show them."""
    if isinstance(machine, MeasuredMachine):
        raise UsageError(
            f"workload: {workload} by its shape needs a machine by name, got {machine.device_name}; trace it"
        )
    inferred, name = InferredDocument.named(machine).machine, Path(machine).stem
    links = opened(name) if name in shipped_runs() else None
    joined = cluster_of(cluster)
    if links and joined is None and layout.world_size > links.ranks_per_node:
        links = with_nodes_of(links, inferred, name=name)
    question = Question(
        machine=inferred,
        workload=read_model(workload, sequence=None),
        layout=layout,
        cluster=joined,
        devices_per_node=_inside(joined),
    )
    return BoughtJob(question=question, links=links)


def _observed_run(text: str) -> JobRun:
    """A run as a person says it."""
    said = read_observed(text)
    if said.value is None or said.unit not in (Unit.STEP, Unit.STEPS):
        raise UsageError(
            f"--observed: must hold a step time, such as '64 GPUs 0.48 s', got {text!r}"
        )
    devices = said.devices or (said.nodes and said.per_node and said.nodes * said.per_node)
    step_s = 1 / said.value if said.unit is Unit.STEPS else said.value
    return JobRun(step_s=step_s, world_size=devices or None)


def _parts(texts: Sequence[str]) -> dict[str, Seconds]:
    """Times of parts by name; one alone has no other to be slower than. [s]"""
    found: dict[str, Seconds] = {}
    for text in texts:
        words, colon, time = text.rpartition(":")
        name = words.strip()
        if not (colon and name):
            raise UsageError(f"--part: must look like 'node 3, 8 GPUs: 0.52 s', got {text!r}")
        try:
            time_s = parse_duration(time.strip())
        except ValueError as error:
            raise UsageError(f"--part: {error}") from error
        if time_s == 0:
            raise UsageError(f"--part: must take longer than 0 s, got {text!r}")
        if name in found:
            raise UsageError(f"--part: must have names of their own, got {name!r} twice")
        found[name] = time_s
    if len(found) == 1:
        raise UsageError(f"--part: must be given for two parts or more, got {texts[0]!r} alone")
    return found


def _collectives(logs: Sequence[AnyPath]) -> tuple[MeasuredCollective, ...]:
    return tuple(found for log in logs for found in read_nccl_paste(Path(log))[0])

"""Questions about machines: plans, searches, layouts of large models."""

import datetime as dt
from pathlib import Path

from perfmodel.answer import Question
from perfmodel.answer.answer import layout_table
from perfmodel.answer.inferred import Training
from perfmodel.api.answers import AnyPath
from perfmodel.cost.inferred import open_inferred
from perfmodel.documents import today_utc
from perfmodel.documents.plan import PlanDocument, read_plan
from perfmodel.documents.prediction import ParallelismPlanDocument, PredictionDocument
from perfmodel.documents.profile import InferredDocument
from perfmodel.errors import UsageError
from perfmodel.layout import parse_layout
from perfmodel.layout_search import Request as SearchRequest
from perfmodel.layout_search import plan_parallelism as ranked_layouts
from perfmodel.machine import DEVICES_PER_NODE, InferredMachine
from perfmodel.models import read_model
from perfmodel.plan.machines import read_sources
from perfmodel.plan.options import plan_options as ranked_options
from perfmodel.units import GIB, Bytes


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


def search(  # noqa: PLR0913 - one parameter per part of the question
    machine: InferredMachine | AnyPath,
    model: str,
    *,
    devices: int,
    global_batch: int,
    capacity_bytes: Bytes = 80 * GIB,
    sequence_length: int | None = None,
    devices_per_node: int = DEVICES_PER_NODE,
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
    top
        Layouts to return.
    """
    training = Training(
        model=read_model(model, sequence=sequence_length),
        devices=devices,
        devices_per_node=devices_per_node,
        global_batch=global_batch,
    )
    request = SearchRequest(training=training, capacity_bytes=capacity_bytes, top=top)
    return ranked_layouts(open_inferred(_inferred(machine)), request)


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

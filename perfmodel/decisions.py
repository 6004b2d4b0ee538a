"""Part of ``perfmodel.api``: plans, money, weeks of a job, and layouts of large models."""

import datetime as dt
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from perfmodel.documents.age import today_utc
from perfmodel.documents.budget import read_budget
from perfmodel.documents.cost import CostDocument
from perfmodel.documents.goodput import GoodputDocument
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.layout import LayoutPredictionDocument
from perfmodel.documents.plan import PlanDocument
from perfmodel.documents.plan_file import read_plan
from perfmodel.errors import UsageError
from perfmodel.parallelism.layout import parse_layout
from perfmodel.plan.cost import compare_costs as costs_of
from perfmodel.plan.goodput import Request
from perfmodel.plan.goodput import goodput as simulated_weeks
from perfmodel.plan.options import plan_options as ranked_options
from perfmodel.plan.sources import named_transformer, read_sources
from perfmodel.predict_layout import Training, inferred_machine, predict_layout
from perfmodel.program.job import Job
from perfmodel.topology.cluster import DEVICES_PER_NODE
from perfmodel.units import Bytes, Seconds
from perfmodel.workload.transformers import NamedTransformer


def plan_options(
    plan: str | os.PathLike[str],
    *,
    prices: str | os.PathLike[str] | None = None,
    today: dt.date | None = None,
    open_model: Callable[[str, int | None], NamedTransformer] = named_transformer,
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
    open_model
        Large model by name and tokens per sequence; the command line also reads Hugging Face configs.

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
        return ranked_options(
            *read_sources(found, path, open_model=open_model), today=day, argv=argv
        )
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def compare_costs(
    budget: str | os.PathLike[str],
    *,
    prices: str | os.PathLike[str] | None = None,
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
    profile: InferredDocument | str | os.PathLike[str],
    model: str,
    layout: str,
    *,
    sequence_length: int | None = None,
    devices_per_node: int = DEVICES_PER_NODE,
    capacity_bytes: Bytes | None = None,
) -> LayoutPredictionDocument:
    """Predict one layout of a large model, from a calibration that was inferred from runs.

    Parameters
    ----------
    model
        By name, such as ``"llama2-7b"``.
    layout
        Such as ``"dp=16 tp=4 zero=1 accumulation=8"``; its product is the number of devices.
    capacity_bytes
        Memory of one device, whose chance to suffice is wanted. [B]

    Raises
    ------
    UsageError, NotFeasible, CalibrationUnavailable
        If a name or the layout makes no sense, the model does not allow it, or the profile is another.
    """
    document = (
        profile if isinstance(profile, InferredDocument) else InferredDocument.read(Path(profile))
    )
    parsed = parse_layout(layout)
    training = Training(
        model=named_transformer(model, sequence_length),
        devices=parsed.world_size,
        devices_per_node=devices_per_node,
        global_batch=parsed.global_batch,
    )
    found, _ = predict_layout(
        inferred_machine(document),
        training,
        parsed,
        capacity_bytes=capacity_bytes,
        argv=("perfmodel.predict_large_model",),
    )
    return found

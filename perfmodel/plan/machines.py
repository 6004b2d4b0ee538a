"""The files that a plan names, read, and the steps of its options on the machines in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from perfmodel.answer import Question, open_question, stage_memory
from perfmodel.cost.inferred import InferredModel, open_inferred
from perfmodel.cost.rescaling import rescaled_profile
from perfmodel.documents.hardware import find_device, open_cluster, shipped_catalogue
from perfmodel.documents.plan import Option, PlanAccuracy, PlanFile, PlanMachine
from perfmodel.documents.profile import InferredDocument, ProfileDocument, machine_file
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError
from perfmodel.machine import DEVICES_PER_NODE, Cluster, InferredMachine
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.models import document_for, read_model
from perfmodel.plan.steps import InferredSteps, MeasuredSteps, Steps
from perfmodel.workload.transformer import NamedTransformer

#: Of an option by its place in the plan, at one batch.
Tables: TypeAlias = dict[tuple[int, int], Steps]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources:
    """The files that a plan names, read; by option."""

    profiles: Mapping[str, MeasuredMachine | InferredMachine]
    validations: Mapping[str, ValidationDocument] = field(default_factory=dict)
    clusters: Mapping[str, Cluster] = field(default_factory=dict)
    workload: WorkloadDocument | None = None
    """The workload file, if the plan names one; or the trace of its model for machines that were not measured."""
    model: NamedTransformer | None = None
    """The large model, if the plan names one."""


def open_tables(plan: PlanFile, sources: Sources) -> Tables:
    """One table per option and batch; options that ask the same share theirs."""
    shared: dict[object, Steps] = {}
    opened: dict[object, Question | InferredModel] = {}
    tables: Tables = {}
    for index, option in enumerate(plan.option):
        # What two options must have in common to share their predictions.
        key = (
            sources.profiles[option.name].digest,
            *(option.validation, option.cluster, option.device_memory),
            *(option.layout, option.devices_per_node),
        )
        if key not in opened:
            opened[key] = _opened(plan, sources, option)
        for batch in option.batches:
            place = (key, batch, option.device_counts)
            if place not in shared:
                shared[place] = _table(plan, sources, option, opened[key], batch)
            tables[index, batch] = shared[place]
    return tables


def _opened(plan: PlanFile, sources: Sources, option: Option) -> Question | InferredModel:
    machine = sources.profiles[option.name]
    if isinstance(machine, InferredMachine):
        return open_inferred(machine)
    is_traced = machine.device_costs is not None or plan.work.name.endswith(".json")
    named = sources.workload if is_traced else None
    question = open_question(
        machine,
        named or plan.work.name,
        validation=sources.validations.get(option.name),
        cluster=sources.clusters.get(option.name),
        where="work.workload",
    )
    if option.capacity_bytes is not None and not stage_memory(question):
        raise UsageError(
            "option.device_memory: must come with a workload file of perfmodel trace as "
            f"work.workload, got {plan.work.name!r}, whose memory nobody recorded"
        )
    return replace(question, capacity_bytes=option.capacity_bytes)


def _table(
    plan: PlanFile, sources: Sources, option: Option, machine: Question | InferredModel, batch: int
) -> Steps:
    """Steps of an option at a batch."""
    work, capacity_bytes = plan.work, option.capacity_bytes
    if isinstance(machine, Question):
        return MeasuredSteps(
            machine,
            scaling=work.scaling,
            batch=batch,
            accumulation=work.accumulation,
            counts=option.device_counts,
        )
    assert sources.model is not None
    assert capacity_bytes is not None
    cluster = sources.clusters.get(option.name)
    inside = option.devices_per_node if cluster is None else cluster.devices_per_node
    return InferredSteps(
        machine,
        sources.model,
        scaling=work.scaling,
        batch=batch,
        counts=option.device_counts,
        capacity_bytes=capacity_bytes,
        devices_per_node=inside or DEVICES_PER_NODE,
        cluster=cluster,
        fixed=option.fixed_layout,
    )


def machine_records(plan: PlanFile, sources: Sources) -> tuple[PlanMachine, ...]:
    """What the predictions of the options rest on, machines in the order of the plan."""
    groups: dict[tuple[str, str | None], list[Option]] = {}
    for option in plan.option:
        key = (sources.profiles[option.name].digest, option.validation)
        groups.setdefault(key, []).append(option)
    return tuple(_record(options, sources) for options in groups.values())


def _record(options: list[Option], sources: Sources) -> PlanMachine:
    profile = sources.profiles[options[0].name]
    basis: Literal["measured", "inferred"] = "inferred"
    if isinstance(profile, InferredMachine):
        sizes = open_inferred(profile).discrepancy.runs.devices
        num_runs, most = profile.num_runs, int(sizes.max())
    elif profile.device_costs is not None:
        num_runs, most = profile.device_costs.num_rows, profile.max_world_size
    else:
        basis, num_runs, most = "measured", len(profile.steps), profile.max_world_size
    return PlanMachine(
        options=tuple(option.name for option in options),
        profile=options[0].profile,
        digest=profile.digest,
        device=profile.device_name,
        basis=basis,
        made_utc=profile.origin.made_utc,
        num_runs=max(num_runs, 1),
        most_devices=most,
        accuracy=_accuracy(options[0], sources.validations.get(options[0].name)),
    )


def _accuracy(option: Option, validation: ValidationDocument | None) -> PlanAccuracy | None:
    if validation is None:
        return None
    assert option.validation is not None
    summary, inside = validation.summary, validation.runs_inside
    return PlanAccuracy(
        validation=option.validation,
        num_settings=summary.num_settings,
        mape=summary.mape,
        worst_absolute=summary.worst_absolute,
        coverage=validation.coverage if inside is None else inside,
        passed=validation.passed,
    )


def read_sources(plan: PlanFile, path: Path) -> tuple[PlanFile, Sources]:
    """Read everything that a plan, which lies at a path, names; it then names paths as seen from here."""
    folder, work = path.parent, plan.work
    workload, model = None, None
    if work.model is not None:
        config = folder / work.model
        named = str(config) if config.suffix == ".json" or config.is_dir() else work.model
        model = read_model(named, sequence=work.sequence_length, flag="work.model")
        work = work.model_copy(update={"sequence_length": model.sequence})
    elif work.name.endswith(".json"):
        workload = WorkloadDocument.read(folder / work.name)
        work = work.model_copy(update={"workload": str(folder / work.name)})
    found = plan.model_copy(update={"work": work})
    profiles = {
        option.name: _profile(option, folder, is_large=bool(model)) for option in plan.option
    }
    for machine in profiles.values() if workload is None else ():
        # The first that holds no workloads traces the model; all such machines run the same.
        if isinstance(machine, MeasuredMachine) and machine.device_costs is not None:
            workload = document_for(machine, work.name, where="work.workload")
            break
    return found, Sources(
        profiles=profiles,
        validations={
            option.name: ValidationDocument.read(folder / option.validation)
            for option in plan.option
            if option.validation is not None
        },
        clusters={
            option.name: _cluster(option.cluster, folder)
            for option in plan.option
            if option.cluster is not None
        },
        workload=workload,
        model=model,
    )


def _profile(option: Option, folder: Path, *, is_large: bool) -> MeasuredMachine | InferredMachine:
    path = machine_file(option.profile, flag="option.profile", folder=folder)
    if is_large:
        return InferredDocument.named(path).machine
    profile = ProfileDocument.read(path).machine
    if option.device is None:
        return profile
    catalogue = shipped_catalogue()
    sheet = find_device(option.device, catalogue, flag="option.device")
    return rescaled_profile(profile, sheet, catalogue)


def _cluster(name: str, folder: Path) -> Cluster:
    try:
        return open_cluster(name, folder=folder)
    except UsageError as error:
        raise UsageError(f"option.cluster{str(error).removeprefix('--cluster')}") from error

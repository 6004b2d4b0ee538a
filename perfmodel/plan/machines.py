"""The machines of a plan, opened: what predicts each option, and what that rests on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from perfmodel.cost.memory import step_memory
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.plan import PlanAccuracy, PlanMachine
from perfmodel.documents.plan_file import Option, PlanFile
from perfmodel.documents.profile import CheckpointProfile, ProfileDocument, WorkloadProfile
from perfmodel.documents.validation import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError
from perfmodel.forecast import open_workload
from perfmodel.parallelism.strategy import Setting
from perfmodel.plan.layout_table import LayoutQuestion, LayoutTable
from perfmodel.plan.step_table import StepTable
from perfmodel.plan.steps import FitInMemory, Steps
from perfmodel.predict_layout import InferredMachine, inferred_machine
from perfmodel.predictor import Predictor
from perfmodel.topology.cluster import DEVICES_PER_NODE, Cluster
from perfmodel.workload.transformers import NamedTransformer

#: Of an option by its place in the plan, at one batch.
Tables: TypeAlias = dict[tuple[int, int], Steps]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources:
    """The files that a plan names, read; by option."""

    profiles: Mapping[str, ProfileDocument | InferredDocument]
    validations: Mapping[str, ValidationDocument] = field(default_factory=dict)
    clusters: Mapping[str, Cluster] = field(default_factory=dict)
    workload: WorkloadDocument | None = None
    """The workload file, if the plan names one."""
    model: NamedTransformer | None = None
    """The large model, if the plan names one."""
    checkpoints: Mapping[str, tuple[str, CheckpointProfile]] = field(default_factory=dict)
    """Where the plan gives the size of a checkpoint: the file that timed some, and their times."""


def open_tables(plan: PlanFile, sources: Sources) -> Tables:
    """One table per option and batch; options that ask the same share theirs.

    Raises
    ------
    UsageError, CalibrationUnavailable
        If a profile does not know the workload, or holds one rank and several are asked for.
    """
    opened: dict[object, Steps] = {}
    tables: Tables = {}
    machines = _Opened(plan, sources)
    for index, option in enumerate(plan.option):
        for batch in option.batches:
            key = (machines.key(option), batch, option.device_counts)
            if key not in opened:
                opened[key] = machines.table(option, batch)
            tables[index, batch] = opened[key]
    return tables


class _Opened:
    """Machines that were opened, each once."""

    def __init__(self, plan: PlanFile, sources: Sources) -> None:
        self._plan, self._sources = plan, sources
        self._predictors: dict[object, tuple[Predictor, WorkloadProfile]] = {}
        self._inferred: dict[str, InferredMachine] = {}
        # a digest takes some ten milliseconds, and options ask for it at every batch
        self._keys = {option.name: self._key(option) for option in plan.option}

    def key(self, option: Option) -> object:
        """What two options must have in common to share their predictions."""
        return self._keys[option.name]

    def _key(self, option: Option) -> object:
        return (
            self._sources.profiles[option.name].digest,
            option.validation,
            option.cluster,
            option.device_memory,
            option.layout,
            option.devices_per_node,
        )

    def table(self, option: Option, batch: int) -> Steps:
        """Steps of an option at a batch."""
        profile = self._sources.profiles[option.name]
        if isinstance(profile, InferredDocument):
            return self._layouts(option, batch, profile)
        key = self.key(option)
        if key not in self._predictors:
            predictor = Predictor(
                profile,
                validation=self._sources.validations.get(option.name),
                cluster=self._sources.clusters.get(option.name),
            )
            opened = open_workload(predictor, self._plan.work.name, where="work.workload")
            self._predictors[key] = (predictor, opened.profile)
        predictor, workload = self._predictors[key]
        return StepTable(
            predictor,
            workload,
            scaling=self._plan.work.scaling,
            batch=batch,
            accumulation=self._plan.work.accumulation,
            counts=option.device_counts,
            memory=self._memory(option, profile),
        )

    def _layouts(self, option: Option, batch: int, document: InferredDocument) -> Steps:
        assert self._sources.model is not None
        assert option.capacity_bytes is not None
        if document.digest not in self._inferred:
            self._inferred[document.digest] = inferred_machine(document)
        return LayoutTable(
            self._inferred[document.digest],
            LayoutQuestion(
                model=self._sources.model,
                scaling=self._plan.work.scaling,
                batch=batch,
                capacity_bytes=option.capacity_bytes,
                devices_per_node=option.devices_per_node or DEVICES_PER_NODE,
                fixed=option.fixed_layout,
            ),
            counts=option.device_counts,
        )

    def _memory(
        self, option: Option, profile: ProfileDocument
    ) -> Callable[[Setting], FitInMemory] | None:
        capacity_bytes, document = option.capacity_bytes, self._sources.workload
        if capacity_bytes is None:
            return None
        if document is None or document.memory is None:
            raise UsageError(
                "option.device_memory: must come with a workload file of perfmodel trace as "
                f"work.workload, got {self._plan.work.name!r}, whose memory nobody recorded"
            )

        def fit(setting: Setting) -> FitInMemory:
            found = step_memory(document, setting, device_kind=profile.memory_kind)
            assert found is not None
            return FitInMemory(
                needed_bytes=float(found.needed_bytes),
                probability=found.fit_probability(capacity_bytes),
            )

        return fit


def machine_records(plan: PlanFile, sources: Sources) -> tuple[PlanMachine, ...]:
    """What the predictions of the options rest on, machines in the order of the plan."""
    groups: dict[tuple[str, str | None], list[Option]] = {}
    for option in plan.option:
        key = (sources.profiles[option.name].digest, option.validation)
        groups.setdefault(key, []).append(option)
    return tuple(_record(options, sources) for options in groups.values())


def _record(options: list[Option], sources: Sources) -> PlanMachine:
    profile = sources.profiles[options[0].name]
    if isinstance(profile, InferredDocument):
        sizes = inferred_machine(profile).model.discrepancy.runs.devices
        device, num_runs, most = profile.device, profile.num_runs, int(sizes.max())
    else:
        device, num_runs, most = profile.device_name, len(profile.steps), profile.max_world_size
    return PlanMachine(
        options=tuple(option.name for option in options),
        profile=options[0].profile,
        digest=profile.digest,
        device=device,
        basis="inferred" if isinstance(profile, InferredDocument) else "measured",
        made_utc=profile.provenance.created_utc,
        num_runs=max(num_runs, 1),
        most_devices=most,
        accuracy=_accuracy(options[0], sources.validations.get(options[0].name)),
    )


def _accuracy(option: Option, validation: ValidationDocument | None) -> PlanAccuracy | None:
    if validation is None:
        return None
    assert option.validation is not None
    summary = validation.summary
    return PlanAccuracy(
        validation=option.validation,
        num_settings=summary.num_settings,
        mape=summary.mape,
        worst_absolute=summary.worst_absolute,
        coverage=validation.coverage,
        passed=validation.passed,
    )

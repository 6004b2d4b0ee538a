"""A question about one layout of a workload on a machine, how it is opened, and its answer."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfmodel.cost import Samples
from perfmodel.errors import (
    CalibrationUnavailable,
    UsageError,
    check_fraction,
    check_positive,
    did_you_mean,
)
from perfmodel.layout import Layout, RunSetting
from perfmodel.machine import DEVICES_PER_NODE, Cluster, Evidence, Machine
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, TracedWorkload
from perfmodel.statistics import Interval
from perfmodel.step import Cause, StepProgram, Trace, time_by_cause
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import Workload

# Only some questions need operators, files of clusters and of validations. They are imported where they are
# used: together they would double the start of a prediction.
if TYPE_CHECKING:
    from perfmodel.cost.memory import DeviceMemory
    from perfmodel.documents.verdicts import ValidationDocument
    from perfmodel.documents.workload import WorkloadDocument
    from perfmodel.workload.memory import StepMemory
    from perfmodel.workload.step import SymbolicStep
    from perfmodel.workload.transformer import NamedTransformer

NUM_DRAWS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """One layout of a workload on a machine; a what-if is ``dataclasses.replace`` of a question."""

    machine: Machine
    workload: "MeasuredWorkload | NamedTransformer"
    """On a calibrated machine, or by its shape on one that was inferred from runs."""
    layout: Layout = field(default_factory=Layout)
    cluster: Cluster | None = None
    """Links between the devices; None: nodes that the machine knows or usually comes in, else one ring like the
    measured."""
    validation: "ValidationDocument | None" = None
    """Errors of earlier predictions on this machine: they widen the intervals, never shift them."""
    loader_samples_per_s: float | None = None
    """What the input pipeline feeds one device; None: no limit. [1/s]"""
    sync_every_step: bool = False
    """Whether every step waits for the device, as ``loss.item()`` does; no matter where it is synchronous."""
    gradient_share: float = 1.0
    """Bytes of gradients when they are exchanged, over those they have."""
    capacity_bytes: Bytes | None = None
    """Memory of one device, whose chance to suffice is wanted. [B]"""
    devices: int | None = None
    """Devices there are; None: as many as the layout uses."""
    devices_per_node: int = DEVICES_PER_NODE
    num_draws: int = NUM_DRAWS

    def __post_init__(self) -> None:
        """A machine that knows other nodes stands among them; what contradicts the machine is refused."""
        if self.loader_samples_per_s is not None:
            check_positive("loader_samples_per_s", self.loader_samples_per_s)
        check_fraction("gradient_share", self.gradient_share)
        machine, validation = self.machine, self.validation
        if not isinstance(machine, MeasuredMachine):
            return
        # A processor's library was timed, and a GPU is asked for.
        is_gpu = machine.rescaling is not None and machine.rescaling.device_kind == "cuda"
        if self.cluster is not None and is_gpu and machine.backend != "nccl":
            machine = machine.without_links
            object.__setattr__(self, "machine", machine)
        crosses = self.layout.world_size > (machine.devices_per_node or math.inf)
        if crosses and (self.cluster or machine.cluster) is None:
            from perfmodel.cost.inferred import among_usual_nodes  # noqa: PLC0415 - as above

            machine = among_usual_nodes(machine)
            object.__setattr__(self, "machine", machine)
        cluster = self.cluster or machine.cluster
        object.__setattr__(self, "cluster", cluster)
        if validation is not None:
            ours, theirs = machine.origin.fingerprint, validation.provenance.host_fingerprint
            if ours != theirs:
                raise CalibrationUnavailable(
                    f"--validation: must come from the machine of the profile (fingerprint {ours[:12]}), "
                    f"got {theirs[:12]}; run perfmodel validate there"
                )
        devices = None if cluster is None else cluster.devices_per_node
        is_own = machine.device_costs is None  # half a node of others' runs is a node as well
        if cluster and devices and is_own and machine.ranks_per_node > devices:
            raise UsageError(
                f"--cluster: nodes of {cluster.name} must have at least the {machine.ranks_per_node} "
                f"ranks per node of the profile, got {devices}; correct the counts up to tier node"
            )

    def at(self, layout: Layout) -> "Question":
        """The same question about another layout."""
        return dataclasses.replace(self, layout=layout)

    @property
    def measured(self) -> MeasuredWorkload:
        """The workload on a calibrated machine."""
        assert isinstance(self.workload, MeasuredWorkload), self.workload
        return self.workload

    @property
    def workload_name(self) -> str:
        """What is trained."""
        if isinstance(self.workload, MeasuredWorkload):
            return self.workload.workload.name
        return self.workload.name


def open_question(
    machine: MeasuredMachine,
    workload: "str | PathLike[str] | WorkloadDocument",
    *,
    validation: "ValidationDocument | str | PathLike[str] | None" = None,
    cluster: Cluster | str | PathLike[str] | None = None,
    where: str = "--workload",
) -> Question:
    """A question about a workload on a calibrated machine; each part is read if a file or a name stands for it.

    ``cluster``: None: as in ``Question``.
    ``where``: as in ``open_workload``.
    """
    if isinstance(validation, str | PathLike):
        from perfmodel.documents.verdicts import ValidationDocument  # noqa: PLC0415

        validation = ValidationDocument.read(Path(validation))
    if isinstance(cluster, str | PathLike):
        from perfmodel.cost.network import tier_between_nodes  # noqa: PLC0415
        from perfmodel.documents.hardware import open_cluster  # noqa: PLC0415

        cluster = open_cluster(cluster, measured=tier_between_nodes(machine))
    return Question(
        machine=machine,
        workload=open_workload(machine, workload, where=where),
        validation=validation,
        cluster=cluster,
    )


def open_workload(
    machine: MeasuredMachine,
    name: "str | PathLike[str] | WorkloadDocument",
    *,
    where: str = "--workload",
    use_measured: bool = True,
) -> MeasuredWorkload:
    """A calibrated workload by name, or a workload file (``.json``), with its times on a machine.

    ``where``: The flag, or the key of a file, that gave the name; errors begin with it.
    ``use_measured``: Whether operators that were measured in place count for traced workloads, or curves
    alone.
    """
    if isinstance(name, str | PathLike) and Path(name).suffix == ".json":
        from perfmodel.documents.workload import WorkloadDocument  # noqa: PLC0415

        name = WorkloadDocument.read(Path(name))
    try:
        if isinstance(name, str | PathLike):
            return timed_workload(machine, fspath(name))
        return timed_workload(
            machine, name.workload, trace=name.trace, memory=name.memory, use_measured=use_measured
        )
    except UsageError as error:
        raise UsageError(f"{where}{str(error).removeprefix('--workload')}") from error


def timed_workload(
    machine: MeasuredMachine,
    workload: str | Workload,
    *,
    trace: "SymbolicStep | None" = None,
    memory: "StepMemory | None" = None,
    use_measured: bool = True,
) -> MeasuredWorkload:
    """A calibrated workload by name, or a traced one by its operators."""
    name = workload if isinstance(workload, str) else workload.name
    if (rescaling := machine.rescaling) is not None:
        from perfmodel.cost.rescaling import carried_over  # noqa: PLC0415
        from perfmodel.cost.step_curves import workload_by_law  # noqa: PLC0415
        from perfmodel.cost.traced import GRID  # noqa: PLC0415

        if trace is None or isinstance(workload, str):
            raise UsageError(
                f"--workload: must be a traced workload file on {machine.device_name}, got {name!r}: whole "
                f"steps of another device cannot be scaled; perfmodel trace {name}, then give its file"
            )
        if rescaling.source is None:
            found = workload_by_law(rescaling.target, workload, trace, batches=GRID)
        else:
            found = timed_workload(
                machine.calibrated, workload, trace=trace, memory=memory, use_measured=use_measured
            )
            found = carried_over(found, trace, rescaling)
        found = dataclasses.replace(found, shared_log_error=rescaling.log_error)
        return TracedWorkload.of(found, trace, memory)
    if machine.device_costs is not None:
        if trace is None or isinstance(workload, str):
            raise UsageError(
                f"--workload: must be a model or a traced workload file on {machine.device_name}, whose costs "
                f"were inferred from steps of others, got {name!r}; perfmodel trace {name}, then give its file"
            )
        from perfmodel.cost.step_curves import workload_by_law  # noqa: PLC0415

        return TracedWorkload.of(
            workload_by_law(machine.device_costs, workload, trace), trace, memory
        )
    calibrated = machine.workload(name)
    if calibrated is not None:
        if isinstance(workload, Workload) and workload != calibrated.workload:
            raise UsageError(
                f"--workload: {name!r} in the file is not the calibrated one, whose "
                f"{_difference(calibrated.workload, workload)}; {name} without a file names that one, "
                "torchvision:NAME the model of torchvision"
            )
        return calibrated if trace is None else TracedWorkload.of(calibrated, trace, memory)
    if isinstance(workload, str) or trace is None:
        known = [entry.workload.name for entry in machine.workloads]
        raise UsageError(
            f"--workload: must be in the profile or a workload file, got {name!r}"
            f"{did_you_mean(name, known)} (the profile holds {', '.join(known)}; torchvision:NAME is traced)"
        )
    if machine.operators is None:
        raise CalibrationUnavailable(
            f"--workload: {name} needs costs of operators, but the profile holds none; calibrate again"
        )
    from perfmodel.answer.measured import with_predicted  # noqa: PLC0415 - which asks questions itself
    from perfmodel.cost.traced import traced_profile  # noqa: PLC0415

    batch = None if memory is None else memory.batch
    found = traced_profile(
        machine, machine.operators, workload, trace, batch=batch, use_measured=use_measured
    )
    return with_predicted(machine, TracedWorkload.of(found, trace, memory))


def _difference(calibrated: Workload, given: Workload) -> str:
    """The first property of a calibrated workload that another one does not have, and both values."""
    for name in ("sample", "num_parameters", "num_operators", "forward_flop", "backward_flop"):
        is_, asked = getattr(calibrated, name), getattr(given, name)
        if is_ != asked:
            return f"{name} is {is_}, not {asked}"
    return "gradients were measured to be ready at other times"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What the layout of a question takes. Draws have the nominal value first."""

    question: Question
    program: StepProgram
    trace: Trace
    """The simulated step at nominal costs, of the slowest rank."""
    step: Interval
    """Typical step of a run, with 90 % of outcomes between p5 and p95. [s]"""
    step_s: Samples
    """Draws of the same, shape ``(num_draws,)``. [s]"""
    exposed_comm_s: Samples
    """Step minus the same step with communication that costs nothing. [s]"""
    straggler_s: Seconds
    """Part of the nominal step that ranks as fast as the typical one would not take. [s]"""
    evidence: Mapping[str, Evidence]
    """Term of the model to where it comes from."""
    bottleneck_link: str | None = None
    """Link that costs most of the largest all-reduce, and why; None without a cluster."""

    @property
    def layout(self) -> Layout:
        """What was asked."""
        return self.question.layout

    @property
    def setting(self) -> RunSetting:
        """Workload and layout as records hold them."""
        return RunSetting.of(self.question.workload_name, self.layout)

    @property
    def breakdown_s(self) -> dict[Cause, Seconds]:
        """Time on the critical path by cause; sums to the nominal step. [s]"""
        return time_by_cause(self.trace)


def interval(draws: Samples) -> Interval:
    """The nominal draw (the first), and the middle 90 % of all; the nominal is always inside."""
    return Interval.of(draws, nominal=float(draws[0]))


def architecture_of(machine: MeasuredMachine) -> str | None:
    """Of the GPUs of a machine, empty if it is unknown; None of virtual ones, whose truth knows no libraries."""
    from perfmodel.documents.hardware import sheet_named, shipped_catalogue  # noqa: PLC0415

    if machine.rescaling is not None:
        return machine.rescaling.architecture
    sheet = sheet_named(machine.device_name, shipped_catalogue())
    if sheet is not None:
        return sheet.architecture
    return None if machine.device_kind == "virtual" else ""


def stage_memory(question: Question) -> "tuple[DeviceMemory, ...]":
    """What a rank of every pipeline stage holds; empty if memory was not recorded, or under nn.DataParallel."""
    machine, workload = question.machine, question.workload
    assert isinstance(machine, MeasuredMachine), machine
    if not isinstance(workload, TracedWorkload) or workload.memory is None:
        return ()
    if question.layout.one_process:
        return ()
    from perfmodel.cost.memory import TracedMemory, overhead_of  # noqa: PLC0415

    overhead = overhead_of(workload.memory, machine.memory_kind, architecture_of(machine))
    traced = TracedMemory(trace=workload.trace, memory=workload.memory, overhead=overhead)
    return traced.ranks(question.layout)

"""A question about one layout of a workload on a machine, and its answer."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from perfmodel.cost import Samples
from perfmodel.layout import Layout, RunSetting
from perfmodel.machine import DEVICES_PER_NODE, Evidence, Machine
from perfmodel.machine.measured import MeasuredWorkload
from perfmodel.statistics import Interval
from perfmodel.step import Cause, StepProgram, Trace, time_by_cause
from perfmodel.units import Bytes, BytesPerSecond, Seconds

if TYPE_CHECKING:
    from perfmodel.documents.verdicts import ValidationDocument
    from perfmodel.machine import Cluster
    from perfmodel.workload.transformer import NamedTransformer

NUM_DRAWS: Final = 400
#: Percentiles of the steps of a run beside the typical one.
TAILS: Final = (95, 99)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """One layout of a workload on a machine; a what-if is ``dataclasses.replace`` of a question."""

    machine: Machine
    workload: "MeasuredWorkload | NamedTransformer"
    """On a calibrated machine, or by its shape on one that was inferred from runs."""
    layout: Layout = field(default_factory=Layout)
    cluster: "Cluster | None" = None
    """Links between the devices; None: one ring of links like the measured ones."""
    validation: "ValidationDocument | None" = None
    """Errors of earlier predictions on this machine: they widen the intervals, never shift them."""
    loader_samples_per_s: float | None = None
    """What the input pipeline feeds one device; None: no limit. [1/s]"""
    sync_every_step: bool = False
    """Whether every step waits for the device, as ``loss.item()`` does; no matter where it is synchronous."""
    capacity_bytes: Bytes | None = None
    """Memory of one device, whose chance to suffice is wanted. [B]"""
    devices: int | None = None
    """Devices there are; None: as many as the layout uses."""
    devices_per_node: int = DEVICES_PER_NODE
    data_centre_bytes_per_s: BytesPerSecond | None = None
    """Link between data centres, all devices of one together. [B/s]"""
    tails: tuple[int, ...] = TAILS
    """Percentiles of the steps of a run that are wanted."""
    num_draws: int = NUM_DRAWS
    num_repetitions: int = 1
    """Over how many runs the step is a mean; one for the next training."""

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
    tail_s: Mapping[int, Samples]
    """Percentiles over the steps of a run. [s]"""
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

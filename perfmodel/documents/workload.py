"""A workload as a file."""

from typing import ClassVar

from perfmodel.documents import Document, Printed, Provenance
from perfmodel.workload import Workload
from perfmodel.workload.memory import StepMemory
from perfmodel.workload.step import SymbolicStep


class WorkloadDocument(Printed, Document):
    """What is trained, independent of any machine."""

    schema_version: int = 2
    title: ClassVar[str] = "workload"
    made_by: ClassVar[str] = "perfmodel trace"

    provenance: Provenance | None = None
    workload: Workload
    trace: SymbolicStep
    """Every operator of a step."""
    memory: StepMemory | None = None
    """What that step keeps in memory, part by part."""

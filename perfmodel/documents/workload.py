"""A workload as a file."""

from typing import ClassVar

from perfmodel.documents.base import Document
from perfmodel.workload.workload import Workload


class WorkloadDocument(Document):
    """What is trained, independent of any machine."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "workload"

    workload: Workload

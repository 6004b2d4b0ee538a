"""A scenario: a machine, a workload and a question, each possibly changed by fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from perfmodel.documents.profile import ProfileDocument, WorkloadProfile
from perfmodel.documents.validation import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.forecast import Forecast
from perfmodel.topology.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a prediction starts from, after some changes."""

    profile: ProfileDocument
    workload: WorkloadProfile
    request: Forecast
    """With one device count."""
    machine_digest: str
    """Of the profile before any change."""
    validation: ValidationDocument | None = None
    document: WorkloadDocument | None = None
    """What was traced, where the workload came as a file: another device prices it anew."""
    cluster: Cluster | None = None
    changes: Mapping[str, str] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()
    """Terms that rest on what was typed and not on a measurement, by their name in the evidence."""
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The changes in one line."""
        return ", ".join(f"{name}={value}" for name, value in self.changes.items()) or "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfField:
    """One thing that a what-if can change."""

    name: str
    meaning: str
    example: str
    apply: Callable[[Scenario, str], Scenario]
    """Raises ``ValueError`` or a user error for a value that makes no sense."""

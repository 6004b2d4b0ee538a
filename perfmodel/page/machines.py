"""Machines that the page can ask about, each under a name; paths stay with whoever started it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from perfmodel.documents.page import PriceOffer
from perfmodel.documents.profile import ProfileDocument, WorkloadProfile
from perfmodel.documents.validation import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import refuse_unknown
from perfmodel.predict_layout import InferredMachine
from perfmodel.topology.cluster import Cluster
from perfmodel.workload.transformers import NamedTransformer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWorkload:
    """A workload on a calibrated machine."""

    entry: WorkloadProfile
    typed: str
    """As ``--workload`` takes it."""
    document: WorkloadDocument | None = None
    """With its memory, where the workload came as a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCluster:
    """A cluster file."""

    cluster: Cluster
    typed: str
    """As ``--set cluster=`` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMachine:
    """A machine that was calibrated by running on it."""

    name: str
    typed: str
    """As ``--profile`` takes it."""
    profile: ProfileDocument
    digest: str
    workloads: Mapping[str, OpenedWorkload]
    clusters: Mapping[str, OpenedCluster] = field(default_factory=dict)
    """In which its devices may stand, by name on the page."""
    validation: ValidationDocument | None = None
    validation_typed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMachine:
    """A machine whose latents were inferred from runs."""

    name: str
    typed: str
    machine: InferredMachine
    models: Mapping[str, NamedTransformer]


_Machine = TypeVar("_Machine", StepMachine, LayoutMachine)
_Offered = TypeVar("_Offered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """All that one page can be asked."""

    machines: Mapping[str, StepMachine | LayoutMachine]
    """By the name on the page; at least one."""
    prices: tuple[PriceOffer, ...] = ()
    price_warnings: tuple[str, ...] = field(default=())

    def step_machine(self, name: str) -> StepMachine:
        """A calibrated machine by name.

        Raises
        ------
        UsageError
            If there is none of that name.
        """
        return _named(name, self.machines, StepMachine)

    def layout_machine(self, name: str) -> LayoutMachine:
        """A machine that was inferred from runs, by name.

        Raises
        ------
        UsageError
            If there is none of that name.
        """
        return _named(name, self.machines, LayoutMachine)


def chosen(kind: str, name: str, offered: Mapping[str, _Offered]) -> _Offered:
    """What the page offers under a name: a workload, a cluster, a transformer.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    refuse_unknown(kind, name, offered)
    return offered[name]


def typed_path(path: Path) -> str:
    """A path that may be shown: relative to the working folder, or the name of the file alone."""
    here, there = Path.cwd(), path.absolute()
    return there.relative_to(here).as_posix() if there.is_relative_to(here) else there.name


def unique_name(path: Path, taken: Mapping[str, object]) -> str:
    """What a file is called on the page: its name, with its folder's where several share it."""
    name = path.stem
    if name in taken or name == "profile":
        name = f"{path.absolute().parent.name}/{path.stem}"
    number = 2
    while name in taken:
        name = f"{path.stem} {number}"
        number += 1
    return name


def _named(
    name: str, machines: Mapping[str, StepMachine | LayoutMachine], kind: type[_Machine]
) -> _Machine:
    """A machine of one kind; one of the other kind answers other questions."""
    of_kind = {other: found for other, found in machines.items() if isinstance(found, kind)}
    return chosen("profile", name, of_kind)

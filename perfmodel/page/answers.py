"""One question in, one answer out; what the server, the export and the tests call."""

import functools
import threading
from importlib.metadata import version

from perfmodel.answer.answer import Forecast
from perfmodel.answer.question import Question
from perfmodel.cost.rescaling import LINK_SHARE, shipped_catalogue
from perfmodel.documents.page import (
    Catalogue,
    CatalogueCluster,
    CatalogueDevice,
    CatalogueEntry,
    CatalogueLink,
    CatalogueProfile,
    CatalogueTier,
    LayoutQuestion,
    PageAnswer,
    StepQuestion,
)
from perfmodel.errors import PerfModelError
from perfmodel.page.layouts import LayoutSession
from perfmodel.page.machines import LayoutMachine, OpenedWorkload, Session, StepMachine
from perfmodel.page.steps import StepSession
from perfmodel.scenarios.changes import link_of
from perfmodel.scenarios.fields import Scenario, changed, usable_links

PRECISIONS = ("bf16", "fp16")


class Answers:
    """Answers questions one at a time, and remembers the last ones."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.catalogue = _catalogue(session)
        self._one_at_a_time = threading.Lock()
        self._step_desk = functools.lru_cache(maxsize=4)(self._open_step_desk)
        self._layout_desk = functools.lru_cache(maxsize=4)(self._open_layout_desk)

    def answer(self, question: StepQuestion | LayoutQuestion) -> PageAnswer:
        """The prediction that is asked for.

        Raises
        ------
        PerfModelError
            What the user can mend: an unknown name, a batch that cannot be split, and the like.
        ValueError
            If a number makes no sense together with the others.
        """
        with self._one_at_a_time:
            if isinstance(question, StepQuestion):
                return self._step_desk(question.profile, question.workload).answer(question)
            return self._layout_desk(question.profile, question.workload).answer(question)

    def _open_step_desk(self, profile: str, workload: str) -> StepSession:
        return StepSession(self.session.step_machine(profile), workload)

    def _open_layout_desk(self, profile: str, workload: str) -> LayoutSession:
        return LayoutSession(self.session.layout_machine(profile), workload)


def _catalogue(session: Session) -> Catalogue:
    return Catalogue(
        version=version("perfmodel"),
        profiles=tuple(
            _of_steps(machine) if isinstance(machine, StepMachine) else _of_layouts(machine)
            for machine in session.machines.values()
        ),
        clusters=_clusters(session),
        links=tuple(
            CatalogueLink(
                id=link.id, name=link.name, bytes_per_s=LINK_SHARE * link.rate.bytes_per_s
            )
            for link in usable_links()
        ),
        devices=tuple(
            CatalogueDevice(id=sheet.id, name=sheet.name)
            for sheet in shipped_catalogue().devices
            if sheet.bandwidth is not None
        ),
        prices=session.prices,
        price_warnings=session.price_warnings,
    )


def _clusters(session: Session) -> tuple[CatalogueCluster, ...]:
    known = {
        name: entry.cluster
        for machine in session.machines.values()
        if isinstance(machine, StepMachine)
        for name, entry in machine.clusters.items()
    }
    return tuple(
        CatalogueCluster(
            name=name,
            devices=cluster.num_devices,
            tiers=tuple(
                CatalogueTier(name=tier.name, bytes_per_s=tier.link_bytes_per_s)
                for tier in cluster.tiers
            ),
        )
        for name, cluster in known.items()
    )


def _of_steps(machine: StepMachine) -> CatalogueProfile:
    try:
        link = link_of(machine.profile)
    except PerfModelError:
        link = None
    return CatalogueProfile(
        name=machine.name,
        kind="step",
        device=machine.profile.device_name,
        bandwidth_bytes_per_s=None if link is None else link.bytes_per_s,
        latency_s=None if link is None else link.latency_s,
        workloads=tuple(_entry(machine, name, w) for name, w in machine.workloads.items()),
    )


def _entry(machine: StepMachine, name: str, workload: OpenedWorkload) -> CatalogueEntry:
    batches = sorted(int(point.at) for point in workload.entry.phases[0].forward)
    refused = {
        precision: reason
        for precision in PRECISIONS
        if (reason := _why_not(machine, workload, precision))
    }
    return CatalogueEntry(
        name=name,
        batches=tuple(batches),
        refused=refused,
        no_devices=_why_no_device(machine, workload),
    )


def _why_no_device(machine: StepMachine, workload: OpenedWorkload) -> str:
    """Why the workload cannot be scaled to a device that is not present; empty if it can."""
    if machine.profile.operators is None:
        return "this profile has no costs of operators: calibrate again with this version"
    if workload.document is None or workload.document.trace is None:
        return (
            "whole steps of another device cannot be scaled: perfmodel trace, then --workload FILE"
        )
    return ""


def _why_not(machine: StepMachine, workload: OpenedWorkload, precision: str) -> str:
    """Why a precision cannot be asked for; empty if it can."""
    base = Scenario(
        question=Question(machine=machine.profile, workload=workload.entry),
        request=Forecast(world_sizes=(1,), scaling="weak"),
    )
    try:
        changed(base, {"precision": precision})
    except PerfModelError as error:
        return str(error).removeprefix("--set precision: ")
    return ""


def _of_layouts(machine: LayoutMachine) -> CatalogueProfile:
    return CatalogueProfile(
        name=machine.name,
        kind="layout",
        device=machine.machine.machine.device_name,
        workloads=tuple(
            CatalogueEntry(name=name, layers=model.shape.layers, heads=model.shape.heads)
            for name, model in machine.models.items()
        ),
    )

"""Desks of machines whose every parameter is known."""

import functools

from perfmodel.answer.inferred import opened_machine
from perfmodel.documents.page import PriceOffer
from perfmodel.page.answers import Answers
from perfmodel.page.machines import LayoutMachine, OpenedWorkload, Session, StepMachine
from perfmodel.workload.transformer import TRANSFORMERS
from tests.perfmodel.cost.large_samples import document
from tests.perfmodel.profiles import Machine, profile

NOISY = profile(Machine(noise=(0.9, 1.0, 1.1, 1.2), residual=0.05, relative_error=0.05))


def step_machine() -> StepMachine:
    return StepMachine(
        name="here",
        typed="runs/profile.json",
        profile=NOISY,
        digest=NOISY.digest,
        workloads={
            entry.workload.name: OpenedWorkload(entry=entry, typed=entry.workload.name)
            for entry in NOISY.workloads
        },
    )


def layout_machine() -> LayoutMachine:
    return LayoutMachine(
        name="inferred",
        typed="inferred.json",
        machine=opened_machine(document().machine),
        models=TRANSFORMERS,
    )


@functools.cache
def answers() -> Answers:
    """Of a calibrated machine."""
    offer = PriceOffer(name="rent", per_device_hour=3.0, currency="EUR", source="budget.toml")
    return Answers(Session(machines={"here": step_machine()}, prices=(offer,)))


@functools.cache
def layout_answers() -> Answers:
    """Of a machine that was inferred from runs."""
    return Answers(Session(machines={"inferred": layout_machine()}))

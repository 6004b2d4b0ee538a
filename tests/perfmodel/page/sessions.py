"""Pages of machines whose every parameter is known."""

import functools

from perfmodel.page import OfferedMachine, OfferedWorkload
from perfmodel.page.answers import Answers
from perfmodel.workload.transformer import TRANSFORMERS
from tests.perfmodel.cost.large_samples import document
from tests.perfmodel.profiles import Machine, profile

NOISY = profile(Machine(noise=(0.9, 1.0, 1.1, 1.2), residual=0.05, relative_error=0.05))


@functools.cache
def answers() -> Answers:
    """Of a calibrated machine."""
    names = {entry.workload.name: entry for entry in NOISY.workloads}
    here = OfferedMachine(
        name="here",
        typed="runs/profile.json",
        machine=NOISY,
        workloads={name: OfferedWorkload(entry=entry, typed=name) for name, entry in names.items()},
    )
    return Answers({"here": here})


@functools.cache
def layout_answers() -> Answers:
    """Of a machine that was inferred from runs."""
    inferred = OfferedMachine(
        name="inferred",
        typed="inferred.json",
        machine=document().machine,
        workloads={key: OfferedWorkload(entry=m, typed=key) for key, m in TRANSFORMERS.items()},
    )
    return Answers({"inferred": inferred})

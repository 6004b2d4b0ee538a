"""Bounds that nature sets: what n devices can give, and what a larger batch can cost."""

import dataclasses
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.answer.answer import speedups
from perfmodel.layout import Layout, Scaling, scaled_layouts
from perfmodel.machine.measured import MeasuredMachine, PhaseCurves, StepNoise
from tests.existing import existing
from tests.laws.test_prediction_laws import TOLERANCE, machines, names, num_devices, scalings
from tests.perfmodel.asking import Asking
from tests.perfmodel.profiles import MICRO_BATCHES, Machine, profile, stretched

#: As runs scatter.
HIGHEST = 1.1 * TOLERANCE
NUM_DRAWS = 40
few = settings(max_examples=12)
#: Factors on what was measured at each batch, and the noise of its steps.
uneven = st.lists(st.floats(0.5, 2.0), min_size=len(MICRO_BATCHES), max_size=len(MICRO_BATCHES))
noises = st.lists(
    st.lists(st.floats(0.8, 2.0), min_size=1, max_size=4).map(tuple),
    min_size=len(MICRO_BATCHES),
    max_size=len(MICRO_BATCHES),
)


def restless(
    machine: Machine, dips: list[float], ratios: list[tuple[float, ...]]
) -> MeasuredMachine:
    """A machine whose curves dip, and whose steps scatter otherwise at every batch."""

    def dipped(phases: PhaseCurves) -> PhaseCurves:
        return stretched(
            phases, lambda name: dips if name in ("forward", "backward") else itertools.repeat(1.0)
        )

    found = profile(machine)
    noise = tuple(
        StepNoise(micro_batch=batch, ratios=one)
        for batch, one in zip(MICRO_BATCHES, ratios, strict=True)
    )
    workloads = tuple(
        dataclasses.replace(each, phases=tuple(map(dipped, each.phases)), noise=noise)
        for each in found.workloads
    )
    return dataclasses.replace(found, workloads=workloads)


@few
@given(machine=machines, dips=uneven, ratios=noises, workload=names, n=num_devices)
def test_a_step_never_gets_shorter_with_a_larger_batch(
    machine: Machine, dips: list[float], ratios: list[tuple[float, ...]], workload: str, n: int
) -> None:
    asking = Asking(restless(machine, dips, ratios), num_draws=1)
    batches = sorted({1, 6, 20, 40, 90, *MICRO_BATCHES})
    for devices in (1, n):
        layouts = [Layout(dp=devices, micro_batch=batch) for batch in batches]
        steps_s = [float(s[0]) for s in asking.step_draws(asking.workload(workload), layouts)]
        assert all(b >= a / TOLERANCE for a, b in itertools.pairwise(steps_s)), steps_s


@few
@given(machine=machines, dips=uneven, ratios=noises, workload=names, n=num_devices, kind=scalings)
def test_no_interval_of_a_speed_up_is_above_what_the_devices_give(
    machine: Machine,
    dips: list[float],
    ratios: list[tuple[float, ...]],
    workload: str,
    n: int,
    kind: Scaling,
) -> None:
    asking = Asking(restless(machine, dips, ratios), num_draws=NUM_DRAWS)
    batch = 16 if kind == "weak" else 192
    alone, together = scaled_layouts((1, n), scaling=kind, batch=batch)
    entry = asking.workload(workload)
    before, after = (asking.step(entry, layout) for layout in (alone, together))
    point = asking.point(after, baseline=before)
    speedup, efficiency = existing(point.speedup), existing(point.scaling_efficiency)
    part = asking.step(entry, Layout(micro_batch=together.micro_batch))
    per_sample = before.step.nominal / batch / (part.step.nominal / together.micro_batch)
    most = HIGHEST * n * max(1.0, per_sample if kind == "strong" else 1.0)
    assert speedup.p95 <= max(most, speedup.nominal * TOLERANCE)
    assert efficiency.p95 <= max(most / n, efficiency.nominal * TOLERANCE)


def test_draws_above_the_bound_are_at_it() -> None:
    asking = Asking(profile(Machine()), num_draws=3)
    alone, together = Layout(micro_batch=16), Layout(dp=4, micro_batch=16)
    question = asking.question(asking.workload("heavy"), together)
    found = speedups(question, np.array([1.0, 0.5, 2.0, 0.8]), baseline=alone, before_s=np.ones(4))
    assert found.tolist() == [4.0, 4 * 1.1, 2.0, 4 * 1.1]

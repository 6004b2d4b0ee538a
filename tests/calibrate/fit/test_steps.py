"""Curves, noise, spread of ranks and single steps of repetitions; what differs between runs is none of it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.fit.steps import fit_workload, rank_spread, single_steps, smoothed
from calibrate.summary import Repetition, by_setting, estimate
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import CurvePoint
from tests.perfmodel.profiles import LIGHT

ALONE = RunSetting(
    workload="light", world_size=1, micro_batch=4, synchronisation=Synchronisation.NONE
)
NO_SYNC = replace(ALONE, world_size=2, synchronisation=Synchronisation.NO_SYNC)


def run(setting: RunSetting = ALONE, step_s: float = 0.1, index: int = 0) -> Repetition:
    """Forward a tenth of a step, backward a fifth, its update and its input next to nothing."""
    return Repetition(
        setting=setting,
        round=index,
        step_s=step_s,
        phases_s={"input": 1e-3, "forward": step_s / 10, "backward": step_s / 5, "optimizer": 2e-3},
        rank_steps_s=(step_s,) * setting.world_size,
        ratios=tuple(np.linspace(0.9, 1.1, 101)) if index == 0 else (5.0,),
        device_s=step_s,
    )


def points(*found: tuple[float, float, float]) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(at=at, time_s=t, relative_error=e) for at, t, e in found)


def test_two_points_are_no_line() -> None:
    few = points((1, 1.0, 0.2), (2, 5.0, 0.2))
    assert smoothed(few) == few


@given(
    constant=st.floats(0.0, 1.0),
    slope=st.floats(1e-3, 1.0),
    errors=st.lists(st.floats(0.0, 0.3), min_size=4, max_size=4),
)
def test_points_on_a_line_stay_on_it(constant: float, slope: float, errors: list[float]) -> None:
    """And are as much surer as the line is believed beside them: 4 % of curvature."""
    at = (1, 4, 16, 64)
    line = points(*((b, constant + slope * b, e) for b, e in zip(at, errors, strict=True)))
    for before, after in zip(line, smoothed(line), strict=True):
        assert after.time_s == pytest.approx(before.time_s, rel=1e-6)
        share = 0.04**2 / (0.04**2 + before.relative_error**2)
        assert after.relative_error == pytest.approx(math.sqrt(share) * before.relative_error)


def test_a_point_is_drawn_to_the_line_as_far_as_its_error_warrants() -> None:
    """Of four with an error of 3 % against 4 % of curvature nine parts in 25 of the way; one without error stays."""
    noisy = points((1, 2.0, 0.0), (2, 3.2, 0.03), (3, 4.0, 0.0), (4, 5.0, 0.0))
    found = smoothed(noisy)
    sure = [found[index].time_s for index in (0, 2, 3)]
    assert sure == pytest.approx([2.0, 4.0, 5.0])
    weights = np.array([1 / (0.04**2 + p.relative_error**2) / p.time_s**2 for p in noisy])
    design = np.array([[1.0, p.at] for p in noisy])
    times = np.array([p.time_s for p in noisy])
    normal = design.T @ (weights[:, None] * design)
    line = design @ np.linalg.solve(normal, design.T @ (weights * times))
    assert found[1].time_s == pytest.approx(line[1] + 16 / 25 * (3.2 - line[1]))
    # Neither a constant nor a cost per sample is below nothing.
    falling = smoothed(points((1, 4.0, 10.0), (2, 3.0, 10.0), (3, 1.0, 10.0)))
    assert falling[0].time_s == pytest.approx(falling[2].time_s, rel=0.01)


def test_compute_is_read_where_nothing_is_exchanged() -> None:
    """One rank without DDP, two that keep their gradients; steps that wait for each other tell of no phase."""
    together = replace(NO_SYNC, synchronisation=Synchronisation.DDP)
    wrapped = replace(ALONE, synchronisation=Synchronisation.DDP)
    found = fit_workload(
        LIGHT, [run(), run(NO_SYNC, 0.2), run(together, 9.0), run(wrapped, 7.0)], spread=0.03
    )
    assert [phases.world_size for phases in found.phases] == [1, 2]
    assert [phases.backward[0].time_s for phases in found.phases] == pytest.approx([0.02, 0.04])
    assert found.phases[0].forward[0].time_s == pytest.approx(0.01)
    assert found.rank_spread == 0.03
    assert [noise.micro_batch for noise in found.noise] == [4]


@pytest.mark.parametrize(("buffers", "forward_s"), [((), 0.9), ((8,), 0.02)])
def test_a_forward_pass_that_waits_for_buffers_does_not_count(
    buffers: tuple[int, ...], forward_s: float
) -> None:
    """Their broadcast is an operation of its own; other models run among exchanges, as in training."""
    together = replace(NO_SYNC, synchronisation=Synchronisation.DDP)
    workload = replace(LIGHT, buffer_bytes=buffers)
    found = fit_workload(workload, [run(), run(NO_SYNC, 0.2), run(together, 9.0)], spread=0.0)
    assert found.phases[1].forward[0].time_s == pytest.approx(forward_s)


def test_noise_is_that_of_all_repetitions_at_the_most_ranks() -> None:
    """At 64 even probabilities; of fewer ratios at as many; a slow step of another run is in it."""
    alone = fit_workload(LIGHT, [run(), run(replace(ALONE, micro_batch=16))], spread=0.0)
    assert [noise.micro_batch for noise in alone.noise] == [4, 16]
    ratios = np.array(alone.noise[0].ratios)
    assert len(ratios) == 64
    places = (np.arange(64) + 0.5) / 64
    assert ratios == pytest.approx(0.9 + 0.2 * places)
    several = fit_workload(LIGHT, [run(), run(index=1)], spread=0.0)
    assert several.noise[0].ratios[-1] > 1.1
    few = replace(run(), ratios=(0.8, 1.2))
    assert fit_workload(LIGHT, [few], spread=0.0).noise[0].ratios == pytest.approx((0.9, 1.1))


def test_single_steps_are_means_of_their_runs() -> None:
    """0.1 and 0.4 s: 0.2 s in log."""
    cap = replace(ALONE, bucket_cap_mb=4.0)
    steps = single_steps(by_setting([run(), run(step_s=0.4, index=1), run(cap, 0.3)]))
    assert [step.step_s for step in steps] == pytest.approx([0.2, 0.3])
    assert [step.bucket_cap_mb for step in steps] == [None, 4.0]
    assert {step.synchronisation for step in steps} == {"none"}
    assert steps[0].relative_error == estimate([0.1, 0.4]).relative_error


NUM_STEPS = 8


def runs(spread: float, noise: float, *, setting: RunSetting = NO_SYNC) -> list[Repetition]:
    """Four hundred runs, in each of which every rank has a pace of its own."""
    rng = np.random.default_rng(5)
    found = []
    for index in range(400):
        pace = np.exp(rng.normal(0.0, spread, (2, 1)))
        steps_s = 0.1 * pace * np.exp(rng.normal(0.0, noise, (2, NUM_STEPS)))
        typical_s = np.exp(np.log(steps_s).mean(axis=1))
        found.append(
            replace(
                run(setting, float(typical_s.max()), index),
                rank_steps_s=tuple(typical_s.tolist()),
                ratios=tuple((steps_s / typical_s[:, None]).ravel().tolist()),
            )
        )
    return found


def test_ranks_differ_whichever_is_slow_in_a_run_and_by_no_noise_of_steps() -> None:
    """Those that wait for each other tell nothing."""
    assert rank_spread(runs(0.08, 0.05)) == pytest.approx(0.08, rel=0.1)
    assert rank_spread(runs(0.0, 0.05)) < 0.01
    together = replace(NO_SYNC, synchronisation=Synchronisation.DDP)
    assert rank_spread(runs(0.08, 0.05, setting=together)) == 0.0
    assert rank_spread([]) == 0.0

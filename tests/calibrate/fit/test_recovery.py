"""Fits give back the parameters that the observations were made from."""

import datetime as dt
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import pytest

from calibrate.fit.ddp import _bucket_solution, fit_bucket_costs, fit_ddp, prior_speeds
from calibrate.fit.profile import fit_profile
from calibrate.summary import Repetition
from perfmodel.documents.observation import StepObservation, WorkloadObservation
from perfmodel.errors import IncomparableRuns, MeasurementFailed
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import DdpCosts, MeasuredMachine, OverlapProfile
from tests.calibrate.fit.synthetic import NOISE, RUN, Calibration, environment
from tests.calibrate.fit.test_steps import run
from tests.perfmodel.asking import Asking
from tests.perfmodel.profiles import PROVENANCE, Machine, profile, setting_of
from tests.played_worker import append

#: 8 MiB take 84 ms, which is more than some backward passes and less than others.
MACHINE: Final = Machine(
    latency_s=3e-4,
    s_per_byte=1e-8,
    sharing=1.2,
    bucket_s=2e-4,
    bucket_s_per_byte=2e-10,
    all_reduce_start_s=2e-3,
    compute_speed=0.7,
    comm_speed=0.8,
    noise=tuple(float(v) for v in np.exp(0.02 * np.linspace(-2, 2, 32))),
)
seeds = pytest.mark.parametrize("seed", [0, 1])


@cache
def fitted(seed: int) -> MeasuredMachine:
    with TemporaryDirectory() as folder:
        return refitted(Path(folder), Calibration(machine=MACHINE, seed=seed))


def refitted(folder: Path, calibration: Calibration, *, num_nodes: int = 1) -> MeasuredMachine:
    path = append(folder / "observations.jsonl", *calibration.observations())
    return fit_profile(path, provenance=PROVENANCE, num_nodes=num_nodes).machine


def test_steps_of_a_workload_without_a_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    entries = [*Calibration(machine=MACHINE, seed=0).observations()]
    lost = next(each for each in entries if isinstance(each, WorkloadObservation))
    append(path, *(each for each in entries if each is not lost))
    with pytest.raises(MeasurementFailed, match=f"got none of {lost.workload.name}; continue"):
        fit_profile(path, provenance=PROVENANCE)


@pytest.mark.parametrize(("started_utc", "year"), [(1.7e9, 2023), (-1e300, 1970), (1e300, None)])
def test_fitted_again_a_calibration_is_as_old_as_its_last_step(
    tmp_path: Path, started_utc: float, year: int | None
) -> None:
    """Else fitting again would start the wait for another occasion again, and hide that machines change."""
    calibration = Calibration(machine=MACHINE, seed=0, num_ranks=1)
    entries = [
        each.model_copy(update={"started_utc": started_utc})
        if isinstance(each, StepObservation)
        else each
        for each in calibration.observations()
    ]
    path = append(tmp_path / "observations.jsonl", *entries)
    found = fit_profile(path, provenance=lambda _: PROVENANCE)
    made = dt.datetime.fromisoformat(found.machine.origin.made_utc)
    assert made.year == (year or dt.datetime.now(dt.UTC).year)
    assert made <= dt.datetime.now(dt.UTC)


@seeds
def test_what_ddp_adds_is_recovered(seed: int) -> None:
    """A start of 2 ms and speeds of 0.7 and 0.8 trade off against each other: within 0.5 ms and 0.15.

    A gradient costs 0.2 ms and a byte 0.2 ns, told apart by stacks of many small and of few large ones.
    """
    document = fitted(seed)
    found = dict(zip(document.ddp.names, document.ddp.values, strict=True))
    assert all(document.ddp.determined)
    assert found["all_reduce_start_s"] == pytest.approx(MACHINE.all_reduce_start_s, abs=0.5e-3)
    assert found["compute_speed"] == pytest.approx(MACHINE.compute_speed, abs=0.15)
    assert found["comm_speed"] == pytest.approx(MACHINE.comm_speed, abs=0.15)
    assert found["bucket_s"] == pytest.approx(MACHINE.bucket_s, rel=0.05)
    assert found["bucket_s_per_byte"] == pytest.approx(MACHINE.bucket_s_per_byte, rel=0.1)
    assert np.abs(document.residual.ddp_log_errors).mean() < 0.03


@pytest.mark.parametrize("name", ["light", "heavy"])
@pytest.mark.parametrize(("micro_batch", "cap"), [(8, 2.0), (32, None)])
def test_steps_that_were_never_run_are_predicted_within_five_percent(
    name: str, micro_batch: int, cap: float | None
) -> None:
    setting = RunSetting(workload=name, world_size=2, micro_batch=micro_batch, bucket_cap_mb=cap)
    predictors = [Asking(document) for document in (fitted(0), profile(MACHINE))]
    found, truth = (p.step(p.workload(name), setting.layout).step_s[0] for p in predictors)
    assert found == pytest.approx(truth, rel=0.05)


def few() -> list[str]:
    """Lines of a short calibration."""
    calibration = Calibration(machine=MACHINE, seed=0, num_ranks=1, num_rounds=1, num_steps=3)
    return [entry.model_dump_json() for entry in calibration.observations()]


def fit_lines(path: Path, text: str) -> MeasuredMachine:
    path.write_text(text, encoding="utf-8")
    return fit_profile(path, provenance=PROVENANCE).machine


def test_two_machines_are_not_merged(tmp_path: Path) -> None:
    lines = [*few(), environment("another machine").model_dump_json()]
    with pytest.raises(IncomparableRuns, match="fingerprints another machine, one machine; use"):
        fit_lines(tmp_path / "o.jsonl", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("kept", "problem"),
    [(slice(1, None), "must name the environment"), (slice(0, 3), "holds 0 step observations")],
)
def test_too_little_to_fit_says_what_is_missing(tmp_path: Path, kept: slice, problem: str) -> None:
    with pytest.raises(MeasurementFailed, match=problem):
        fit_lines(tmp_path / "o.jsonl", "\n".join(few()[kept]) + "\n")


@seeds
def test_how_far_runs_differ_is_recovered(seed: int) -> None:
    """About 30 settings of six runs each; rounds have nothing in common. Steps add 2 % over 3."""
    found = fitted(seed).repeatability
    assert found.run_of(1) == pytest.approx(math.hypot(RUN, NOISE / 3), rel=0.25)
    assert found.round < 0.01


def test_a_setting_that_is_left_out_is_missed_by_more() -> None:
    """By its leverage: three parameters of some two dozen settings follow each of them a little."""
    machine = fitted(0)
    predictor = Asking(machine, num_draws=1)
    missed = []
    for step in machine.steps:
        if step.world_size == 2 and step.synchronisation == "ddp":
            setting = setting_of(
                step.workload, 2, step.micro_batch, bucket_cap_mb=step.bucket_cap_mb
            )
            found = predictor.step(predictor.workload(step.workload), setting.layout)
            missed.append(math.log(float(found.step_s[0]) / step.step_s))
    ratios = np.array(machine.residual.ddp_log_errors) / np.array(missed)
    assert (ratios >= 1 - 1e-6).all()
    assert (ratios <= 1 / 0.3 + 1e-6).all()
    assert 1 < np.mean(1 - 1 / ratios) * len(ratios) < 3


def test_ranks_of_several_nodes_are_shared_out_among_them(tmp_path: Path) -> None:
    calibration = Calibration(machine=MACHINE, seed=0, num_rounds=1, num_steps=3)
    found = refitted(tmp_path, calibration, num_nodes=2)
    assert (found.num_nodes, found.ranks_per_node, found.max_world_size) == (2, 1, 2)
    assert not any("only one node" in line for line in found.undetermined)


def test_what_no_step_tells_stays_as_it_is_expected() -> None:
    """Speeds beside exchanges of no time are those of a probe of all ranks, or 0.7; three settings tell nothing."""
    machine = profile(Machine(latency_s=1e-12, s_per_byte=1e-18))
    predictor = Asking(machine, num_draws=1)
    steps = []
    for name, micro_batch in (("light", 4), ("light", 64), ("heavy", 4), ("heavy", 64)):
        layout = setting_of(name, 2, micro_batch).layout
        step_s = float(predictor.step(predictor.workload(name), layout).step_s[0])
        step = replace(machine.steps[0], workload=name, micro_batch=micro_batch, step_s=step_s)
        steps.append(replace(step, world_size=2, synchronisation="ddp"))
    others = replace(steps[0], synchronisation="no_sync", step_s=9.0), machine.steps[0]
    buckets = np.tile([5e-4, 0.0], (201, 1))
    buckets[0, 0] = 1e-9

    def fit(known: MeasuredMachine) -> tuple[DdpCosts, tuple[float, ...]]:
        return fit_ddp(known, buckets=buckets, rng=np.random.default_rng(0))

    probe = OverlapProfile(world_size=2, size_bytes=1, compute_speed=0.6, comm_speed=0.45)
    beyond = replace(probe, compute_speed=1.1, comm_speed=0.01)
    assert prior_speeds(replace(machine, overlaps=(beyond,))) == pytest.approx((1.0, 0.2))
    for overlap, speeds in ((replace(probe, world_size=1), (0.7, 0.7)), (probe, (0.6, 0.45))):
        costs, errors = fit(replace(machine, steps=(*others, *steps), overlaps=(overlap,)))
        assert costs.values[:3] == pytest.approx((1e-9, 0.0, 0.0), abs=2e-5)
        assert costs.values[3:] == pytest.approx(speeds, abs=0.01)
        assert costs.determined == (True, True, True, False, False)
        assert errors == pytest.approx([0.0] * 4, abs=1e-3)
        spread = np.std(costs.draws, axis=0)
        assert len(costs.draws) == 200
        assert spread[3:] == pytest.approx([0.23, 0.23], abs=0.08)
    costs, errors = fit(replace(machine, steps=(*others, *steps[:3])))
    assert (costs.values, errors) == ((1e-9, 0.0, 0.0, 1.0, 1.0), ())
    assert costs.determined == (True, True, False, False, False)
    assert set(costs.draws) == {(5e-4, *costs.values[1:])}


def test_buckets_cost_what_ddp_adds_to_steps_of_one_rank() -> None:
    """0.1 ms a gradient and 1 ns a byte; a run without its bare twin, and two ranks, tell nothing."""
    groups: dict[RunSetting, list[Repetition]] = {}
    for name, count, size in (("light", 4, 2**18), ("heavy", 8, 2**23)):
        bare = setting_of(name, 1, 16, synchronisation=Synchronisation.NONE)
        wrapped = replace(bare, synchronisation=Synchronisation.DDP, bucket_cap_mb=4.0)
        more_s = 1e-4 * count + 1e-9 * size
        groups[bare] = [run(bare, 0.1 + index, index) for index in range(2)]
        groups[wrapped] = [run(wrapped, 0.1 + index + more_s, index) for index in range(3)]
        groups[replace(wrapped, world_size=2)] = [run(replace(wrapped, world_size=2), 9.0, 0)]
    workloads = {entry.workload.name: entry for entry in profile(Machine()).workloads}
    rng = np.random.default_rng(0)
    found = fit_bucket_costs(groups, workloads, [], rng=rng)
    assert found.shape == (201, 2)
    assert found[0] == pytest.approx([1e-4, 1e-9])
    assert not fit_bucket_costs({}, workloads, [], rng=rng).any()
    # Differences of long steps weigh less: those of steps twice as long a quarter.
    rows = np.array([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 4.0, 2.0]])
    assert _bucket_solution(rows) == pytest.approx([1.6, 0.0])

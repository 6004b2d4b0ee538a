"""What a machine inferred from runs answers: draws, intervals, stalls and other links agree with one another."""

from dataclasses import replace

import numpy as np
import pytest

from calibrate.layout_fit import infer
from perfmodel.cost.inferred import InferredModel, on_links, open_inferred
from perfmodel.cost.jobs import Jobs
from perfmodel.cost.parameters import SHEETS, stall_time_s, step_time_priors
from perfmodel.errors import CalibrationUnavailable
from perfmodel.machine import UNCERTAINTY_OF_FILE, Cluster, Tier
from tests.perfmodel.cost.large_samples import measured, some_jobs

STALL_S = 0.5


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    """On several nodes, which may stall, and on one."""
    jobs = some_jobs(most=64)
    far = np.flatnonzero(jobs.several_nodes & (jobs.pp > 1))
    return jobs.take(np.concatenate([far[::2], np.flatnonzero(~jobs.several_nodes)[::4]]))


@pytest.fixture(scope="module")
def model(jobs: Jobs) -> InferredModel:
    """Every fourth run on several nodes was disturbed."""
    late = jobs.several_nodes & (np.arange(len(jobs)) % 4 == 0)
    step_s = measured(jobs) + np.where(late, stall_time_s(jobs, STALL_S), 0.0)
    return InferredModel(machine=infer(jobs, step_s, step_time_priors(SHEETS["A100"])))


def test_draws_have_the_quantiles_of_the_prediction(model: InferredModel, jobs: Jobs) -> None:
    """Of a normal and a disturbed state: the interval by bisection, draws of a step, and joint draws."""
    found = model.predict(jobs)
    assert np.ptp(model.stall_probability(jobs)) > 0.1
    alone = model.step_draws(jobs, num_draws=20_000)
    # Joint draws take the fitted parameters as they were drawn, which a normal distribution stands for.
    together = np.exp(model.joint_logs(jobs, num_draws=20_000)).T
    for draws_s, within in ((alone, 0.01), (together, 0.07)):
        assert np.quantile(draws_s, 0.05, axis=1) == pytest.approx(found.lower_s, rel=within)
        assert np.quantile(draws_s, 0.95, axis=1) == pytest.approx(found.upper_s, rel=within)


def test_a_step_looks_like_the_state_that_it_is_near(model: InferredModel, jobs: Jobs) -> None:
    far = jobs.take(jobs.several_nodes)
    assert model.machine.degraded is not None
    normal_s = model.predict(far, stalls=False).number_s
    late_s = normal_s + stall_time_s(far, model.machine.degraded.stall_s)
    assert not model.looks_disturbed(far, normal_s).any()
    assert model.looks_disturbed(far, late_s).all()


def test_without_a_disturbed_run_nothing_stalls(model: InferredModel, jobs: Jobs) -> None:
    quiet = InferredModel(machine=replace(model.machine, degraded=None))
    assert not quiet.stall_probability(jobs).any()
    assert quiet.predict(jobs).upper_s == pytest.approx(model.predict(jobs, stalls=False).upper_s)
    # Joint draws lie around the fit, as far away as the parameters' draws are on average.
    logs = np.log(quiet.closed_form_s(jobs))
    away = (logs - logs[0]).mean(axis=0) * quiet.uncertainty_factor(jobs)
    found = quiet.joint_logs(jobs, num_draws=20_000).mean(axis=0)
    centre = logs[0] + quiet.discrepancy.at(jobs)[0]
    assert found == pytest.approx(centre + away, abs=0.003)
    assert np.abs(found - centre).max() > 0.006


def test_links_of_a_file_stand_in_for_those_between_nodes(model: InferredModel) -> None:
    """The narrowest of two tiers, and the way through all three; inside a node the runs stay right."""
    cluster = Cluster(
        name="racks",
        tiers=(
            Tier(name="node", of="device", count=8, link_bytes_per_s=4e11, latency_s=1e-6),
            Tier(name="rack", of="node", count=4, link_bytes_per_s=2e10, latency_s=5e-6, links=8),
            Tier(name="hall", of="rack", count=4, link_bytes_per_s=1e10, latency_s=7e-6, links=16),
        ),
    )
    machine = model.machine
    assert on_links(machine, cluster, num_devices=8) == machine
    changed = on_links(machine, cluster, num_devices=128)
    assert changed.degraded is None
    rate = min(level.bytes_per_s for level in cluster.levels(16, stride=8))
    for before, after in zip(machine.fitted_parameters, changed.fitted_parameters, strict=True):
        if before.name == "node_bytes_per_s":
            assert (after.value, after.determined) == (rate, True)
            assert after.draws[0] == pytest.approx(rate)
            spread = np.log(np.array(after.draws) / rate).std() / UNCERTAINTY_OF_FILE
            known = np.log(np.array(before.draws) / before.value).std() / before.log_sigma
            assert spread == pytest.approx(known)
        elif before.name == "p2p_latency_s":
            assert np.subtract(after.draws, before.draws) == pytest.approx(13e-6)
            assert after.value - before.value == pytest.approx(13e-6)
        else:
            assert after == before


def test_a_device_is_one_of_a_data_sheet(model: InferredModel) -> None:
    assert open_inferred(replace(model.machine, device_name="A100")).sheet is SHEETS["A100"]
    with pytest.raises(CalibrationUnavailable, match="profile: device"):
        open_inferred(replace(model.machine, device_name="none"))

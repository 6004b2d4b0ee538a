"""Known fitted parameters and factors of memory are recovered; what runs cannot tell is said."""

from dataclasses import replace

import numpy as np
import pytest

from calibrate.layout_fit import MEMORY_PRIORS, fit_odds, infer, infer_memory, trust_in
from perfmodel.cost.inferred import InferredModel
from perfmodel.cost.jobs import (
    SHEETS,
    Column,
    Jobs,
    jobs_from,
    medians,
    stall_probability,
    stall_time_s,
    step_time_priors,
)
from perfmodel.cost.layout_time import step_time_s
from perfmodel.cost.memory import rank_parts, tensor_bytes
from perfmodel.errors import NotFeasible
from perfmodel.layout import Layout
from tests.existing import existing
from tests.perfmodel.cost.large_samples import MODEL, measured, some_jobs, truth

PRIORS = step_time_priors(SHEETS["A100"])


def fitted(jobs: Jobs, step_s: Column) -> InferredModel:
    return InferredModel(machine=infer(jobs, step_s, PRIORS))


def test_step_times_of_unseen_layouts_are_recovered() -> None:
    jobs = some_jobs()
    order = np.random.default_rng(1).permutation(len(jobs))
    known, unknown = order[:40], order[40:]
    model = fitted(jobs.take(known), measured(jobs)[known])
    predicted = model.predict(jobs.take(unknown))
    exact = step_time_s(jobs, truth())[unknown]
    assert np.abs(predicted.number_s / exact - 1).mean() < 0.02
    inside = (predicted.lower_s <= exact) & (exact <= predicted.upper_s)
    assert inside.mean() > 0.85
    assert model.nominal["layer_host_s"] == pytest.approx(800e-6, rel=0.25)
    assert model.machine.degraded is None


def test_what_the_runs_do_not_tell_stays_at_its_prior_and_is_wide() -> None:
    jobs = some_jobs()
    alone = jobs.take(np.flatnonzero(jobs.tp * jobs.pp == 1))
    model = fitted(alone, measured(alone))
    name = "tensor_bytes_per_s"
    (parameter,) = (p for p in model.machine.fitted_parameters if p.name == name)
    assert parameter.log_sigma > 0.95 * parameter.prior_log_sigma
    assert model.nominal[name] == pytest.approx(PRIORS[name].median, rel=0.05)
    split = jobs.take(np.flatnonzero(jobs.tp == 4))
    narrow, wide = model.predict(alone), model.predict(split)
    assert (wide.upper_s / wide.lower_s).mean() > 1.2 * (narrow.upper_s / narrow.lower_s).mean()


def test_runs_inside_nodes_leave_the_network_between_them_open() -> None:
    """Within a factor of 7 of the data sheet; runs on several nodes tell it."""
    jobs = some_jobs(most=64)
    for chosen, prior, most in ((~jobs.several_nodes, 1.2, 1.2), (jobs.several_nodes, 0.5, 0.4)):
        known = jobs.take(chosen)
        found = {
            each.name: each for each in fitted(known, measured(known)).machine.fitted_parameters
        }
        rate = found["node_bytes_per_s"]
        assert rate.prior_log_sigma == prior
        assert rate.log_sigma <= most


def test_few_runs_and_far_layouts_never_narrow_the_uncertainty() -> None:
    jobs = some_jobs(most=64)
    few = jobs.take(np.arange(0, len(jobs), len(jobs) // 4)[:4])
    assert infer(few, measured(few), PRIORS).interval_widening >= 1
    near = jobs.take(np.flatnonzero(jobs.devices <= 4))
    machine = replace(infer(near, measured(near), PRIORS), interval_widening=0.3)
    model = InferredModel(machine=machine)
    # Eight times the devices of any run, and a run itself.
    chosen = np.array([int(np.argmax(jobs.devices)), 0])
    own = np.sqrt(model.parameter_variance(jobs.take(chosen)))
    far, at_run = model.uncertainty(jobs.take(chosen)).fitted / own
    assert far > 0.95
    assert at_run == pytest.approx(0.3)


def test_degraded_runs_are_told_apart_and_do_not_bend_the_fit() -> None:
    jobs = some_jobs(most=64)
    jobs = jobs.take(np.arange(0, len(jobs), 2))
    degraded = (np.arange(len(jobs)) % 3 == 0) & jobs.several_nodes & (jobs.pp > 1)
    step_s = measured(jobs) + np.where(degraded, stall_time_s(jobs, 0.5), 0.0)
    model = fitted(jobs, step_s)
    assert existing(model.machine.degraded).stall_s == pytest.approx(0.5, rel=0.05)
    normal = ~degraded
    error = step_time_s(jobs, model.nominal)[normal] / step_time_s(jobs, truth())[normal] - 1
    assert np.abs(error).mean() < 0.05
    seen = model.looks_disturbed(jobs, step_s)
    assert (seen == degraded)[jobs.several_nodes].mean() > 0.95
    typical = model.predict(jobs, stalls=False).number_s
    assert np.abs(typical / step_time_s(jobs, truth()) - 1).mean() < 0.05


def test_odds_of_a_stall_follow_the_size_of_the_job() -> None:
    jobs = some_jobs(most=64)
    jobs = jobs.take(jobs.several_nodes)
    large = jobs.devices > 16
    weights = fit_odds(jobs, large.astype(float))
    chance = stall_probability(weights, jobs)
    assert chance[large].min() > 0.5 > chance[~large].max()


def test_a_run_at_three_times_the_usual_distance_is_half_believed() -> None:
    deviation = np.array([-1.0, 0.0, 1.0, -1.0, 1.0, 3 * 1.4826])
    found = trust_in(deviation, sigma=0.0)
    assert found[-1] == pytest.approx(0.5)
    assert found[1] == 1.0
    # Among runs that agree too well the expected scatter is the measure.
    assert trust_in(np.array([0.0, 0.0, 0.3]), sigma=0.5)[-1] == pytest.approx(0.5)


def test_bad_runs_are_refused() -> None:
    jobs = some_jobs()
    with pytest.raises(NotFeasible, match="at least 3"):
        infer(jobs.take(np.arange(2)), np.ones(2), PRIORS)
    bad = measured(jobs)
    bad[4] = -1
    with pytest.raises(NotFeasible, match="row 5"):
        infer(jobs, bad, PRIORS)


def test_factors_of_unseen_jobs_are_recovered() -> None:
    jobs = some_jobs(most=64)
    truth = medians(MEMORY_PRIORS) | {"activations": 1.6, "context": 1e9}
    parts = rank_parts(jobs)
    peak = np.asarray(sum(truth[name] * parts[name] for name in truth))
    peak = peak * np.exp(np.random.default_rng(0).normal(0, 0.01, len(jobs)))
    order = np.random.default_rng(1).permutation(len(jobs))
    known, unknown = order[::2], order[1::2]
    model = infer_memory(jobs.take(known), peak[known])
    predicted, half = model.predict(jobs.take(unknown))
    assert np.abs(predicted / peak[unknown] - 1).mean() < 0.02
    assert (np.abs(np.log(predicted / peak[unknown])) <= half).mean() > 0.7
    assert model.factors["activations"] == pytest.approx(1.6, rel=0.05)
    fit = model.fit_probability(jobs, model.fullest_bytes(jobs), 20 * 2**30)
    assert fit[peak < 15 * 2**30].min() > 0.95
    assert fit[peak > 30 * 2**30].max() < 0.05


def test_the_fullest_rank_may_be_the_last_that_holds_the_logits() -> None:
    layouts = [Layout(pp=2, micro_batch=8, accumulation=1), Layout(pp=4, accumulation=8)]
    jobs = jobs_from([(MODEL, x) for x in layouts], sequence=1024, devices_per_node=8)
    known = some_jobs(most=64)
    truth = medians(MEMORY_PRIORS)
    parts = rank_parts(known)
    peak = np.asarray(sum(truth[name] * parts[name] for name in truth))
    model = infer_memory(known, peak)
    first, last = tensor_bytes(jobs, 0), tensor_bytes(jobs, jobs.pp - 1)
    assert list(last > first) == [True, False]
    fullest = model.fullest_bytes(jobs)
    printed, _ = model.predict(jobs)
    assert fullest[0] > 1.1 * printed[0]
    assert fullest[1] == pytest.approx(printed[1])

"""Parts by hand; known factors are recovered; more memory fits less often."""

import numpy as np
import pytest

from calibrate.layout_fit import MEMORY_PRIORS, infer_memory
from perfmodel.cost.jobs import jobs_from
from perfmodel.cost.layout_memory import (
    rank_parts,
    tensor_bytes,
)
from perfmodel.cost.parameters import medians
from perfmodel.layout import Layout
from tests.perfmodel.cost.large_samples import MODEL, some_jobs


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

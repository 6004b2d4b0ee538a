"""Parts by hand; known factors are recovered; more memory fits less often."""

import numpy as np
import pytest

from perfmodel.cost.jobs import jobs_from
from perfmodel.cost.latents import medians
from perfmodel.cost.memory_fit import infer_memory
from perfmodel.cost.rank_memory import MEMORY_PRIORS, rank_parts
from perfmodel.errors import NotFeasible
from perfmodel.parallelism.layout import Layout
from tests.perfmodel.cost.large_samples import MODEL, some_jobs


def test_parts_of_one_device_and_of_eight_shards_by_hand() -> None:
    layouts = [Layout(micro_batch=2), Layout(dp=8, zero=1, micro_batch=2)]
    jobs = jobs_from([(MODEL, x) for x in layouts], sequence=1024, devices_per_node=8)
    parts = rank_parts(jobs)
    held = MODEL.parameters
    assert parts["parameters"] == pytest.approx([2 * held, 2 * held])
    assert parts["gradients"] == pytest.approx([4 * held, 4 * held])
    assert parts["optimizer"] == pytest.approx([12 * held, 12 * held / 8])
    assert parts["activations"] == pytest.approx([24 * 34 * 2048 * 2048] * 2)
    assert parts["logits"] == pytest.approx([10 * 2048 * 51_200] * 2)


def test_a_pipeline_keeps_micro_batches_in_flight_but_never_more_than_there_are() -> None:
    layouts = [Layout(pp=4, accumulation=8), Layout(pp=4, accumulation=2)]
    jobs = jobs_from([(MODEL, x) for x in layouts], sequence=1024, devices_per_node=8)
    parts = rank_parts(jobs)
    assert parts["activations"][0] == pytest.approx(24 * 34 * 1024 * 2048)
    assert parts["activations"][1] == pytest.approx(parts["activations"][0] / 2)
    assert parts["logits"] == pytest.approx([0, 0])


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
    fit = model.fit_probability(jobs, 20 * 2**30)
    assert fit[peak < 15 * 2**30].min() > 0.95
    assert fit[peak > 30 * 2**30].max() < 0.05


def test_too_few_peaks_are_refused() -> None:
    with pytest.raises(NotFeasible, match="at least 3"):
        infer_memory(some_jobs().take(np.arange(2)), np.ones(2))

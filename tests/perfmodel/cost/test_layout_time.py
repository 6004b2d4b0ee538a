"""Laws of the closed-form step time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.layout_time import step_parts, step_time_s
from perfmodel.cost.parameters import SHEETS, medians, step_time_priors
from tests.perfmodel.cost.large_samples import some_jobs

FITTED = medians(step_time_priors(SHEETS["A100"]))


def test_the_parts_add_up_and_none_is_negative() -> None:
    jobs = some_jobs(most=64)
    parts = step_parts(jobs, FITTED)
    named = (parts.compute_s, parts.tensor_s, parts.pipeline_s, parts.data_s, parts.other_s)
    assert np.allclose(sum(named), parts.total_s)
    assert all(np.all(part >= -1e-12) for part in named)


def test_one_device_communicates_nothing() -> None:
    jobs = some_jobs(most=1)
    parts = step_parts(jobs, FITTED)
    for part in (parts.tensor_s, parts.pipeline_s, parts.data_s):
        assert np.allclose(part, 0)


def test_the_bubble_is_p_minus_one_stages() -> None:
    jobs = some_jobs().take(np.flatnonzero(some_jobs().pp == 4))
    free = FITTED | {"p2p_latency_s": 1e-12, "tensor_bytes_per_s": 1e18, "head_cost": 1e-9}
    free |= {"memory_bytes_per_s": 1e18, "node_bytes_per_s": 1e18, "micro_step_s": 1e-12}
    alone = jobs.take(np.flatnonzero((jobs.tp == 1) & (jobs.dp == 1)))
    parts = step_parts(alone, free)
    share = (alone.pp - 1) / alone.accumulation
    assert parts.pipeline_s / parts.compute_s == pytest.approx(share, rel=1e-3)


@settings(max_examples=25)
@given(st.sampled_from(sorted(FITTED)), st.floats(1.05, 3.0))
def test_a_faster_machine_is_never_slower(name: str, factor: float) -> None:
    jobs = some_jobs(most=64)
    faster = name.endswith("per_s") or name == "overlap"
    better = FITTED | {name: FITTED[name] * (factor if faster else 1 / factor)}
    assert np.all(step_time_s(jobs, better) <= step_time_s(jobs, FITTED) * (1 + 1e-9))


def test_recomputation_costs_a_forward_pass() -> None:
    jobs = some_jobs()
    full = replace(jobs, recompute_full=np.ones(len(jobs)))
    ratio = step_parts(full, FITTED).compute_s / step_parts(jobs, FITTED).compute_s
    assert np.all((ratio > 1.1) & (ratio < 4 / 3 + 1e-9))


def test_draws_broadcast_against_jobs() -> None:
    jobs = some_jobs()
    drawn = {name: np.full((5, 1), value) for name, value in FITTED.items()}
    assert np.allclose(step_time_s(jobs, drawn), step_time_s(jobs, FITTED)[None, :])

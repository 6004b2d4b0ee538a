"""Laws of the closed-form step time."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.layout_time import step_time_s
from perfmodel.cost.parameters import SHEETS, medians, step_time_priors
from tests.perfmodel.cost.large_samples import some_jobs

FITTED = medians(step_time_priors(SHEETS["A100"]))


@settings(max_examples=25)
@given(st.sampled_from(sorted(FITTED)), st.floats(1.05, 3.0))
def test_a_faster_machine_is_never_slower(name: str, factor: float) -> None:
    jobs = some_jobs(most=64)
    faster = name.endswith("per_s") or name == "overlap"
    better = FITTED | {name: FITTED[name] * (factor if faster else 1 / factor)}
    assert np.all(step_time_s(jobs, better) <= step_time_s(jobs, FITTED) * (1 + 1e-9))

"""A fit survives being written and read: predictions need no new fit."""

from pathlib import Path

import numpy as np

from perfmodel.cost.inferred import machine_of, model_of
from perfmodel.cost.layout_fit import infer
from perfmodel.cost.parameters import SHEETS, stall_time_s, step_time_priors
from perfmodel.documents.inferred import InferredDocument
from tests.perfmodel.cost.large_samples import document, measured, some_jobs


def test_a_read_fit_predicts_what_the_written_one_did(tmp_path: Path) -> None:
    jobs = some_jobs().take(np.arange(0, len(some_jobs()), 3))
    model = infer(jobs, measured(jobs), step_time_priors(SHEETS["A100"]))
    document().write(tmp_path / "inferred.json")
    again = model_of(InferredDocument.read(tmp_path / "inferred.json").machine)
    others = some_jobs(most=64)
    before, after = model.predict(others), again.predict(others)
    for name in ("lower_s", "number_s", "mean_s", "upper_s"):
        np.testing.assert_allclose(getattr(after, name), getattr(before, name), rtol=1e-6)


def test_degraded_runs_are_kept() -> None:
    jobs = some_jobs(most=64)
    jobs = jobs.take(np.arange(0, len(jobs), 3))
    degraded = (np.arange(len(jobs)) % 3 == 0) & jobs.several_nodes & (jobs.pp > 1)
    step_s = measured(jobs) + np.where(degraded, stall_time_s(jobs, 0.5), 0.0)
    model = infer(jobs, step_s, step_time_priors(SHEETS["A100"]))
    assert model.disturbance is not None
    again = model_of(machine_of(model, device_name="A100", step_s=step_s.tolist()))
    np.testing.assert_allclose(again.predict(jobs).upper_s, model.predict(jobs).upper_s, rtol=1e-6)

"""Jobs and step times of a machine whose fitted parameters are known."""

import functools

import numpy as np

from calibrate.layout_fit import infer
from perfmodel.cost.jobs import SHEETS, Column, Jobs, jobs_from, medians, step_time_priors
from perfmodel.cost.layout_time import step_time_s
from perfmodel.documents.profile import InferredDocument
from perfmodel.layout import Layout
from perfmodel.workload.transformer import gpt
from tests.perfmodel.profiles import PROVENANCE

MODEL = gpt(layers=24, hidden=2048, heads=16, vocabulary=51_200)


def some_jobs(*, most: int = 8) -> Jobs:
    """Layouts of one model on up to ``most`` devices."""
    layouts = [
        Layout(dp=dp, tp=tp, pp=pp, zero=zero, micro_batch=micro, accumulation=16 // micro)
        for dp in (1, 2, 4, 8, 16)
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        for zero in (0, 1)
        for micro in (1, 2, 8)
        if dp * tp * pp <= most
    ]
    return jobs_from([(MODEL, layout) for layout in layouts], sequence=1024, devices_per_node=8)


def truth() -> dict[str, float]:
    """FittedParameters away from their priors."""
    values = medians(step_time_priors(SHEETS["A100"]))
    away = {"matmul_flop_per_s": 160e12, "layer_host_s": 800e-6, "tensor_bytes_per_s": 120e9}
    return values | away


def measured(jobs: Jobs, *, seed: int = 0, noise: float = 0.01) -> Column:
    """Step times with log-normal scatter. [s]"""
    scatter = np.random.default_rng(seed).normal(0, noise, len(jobs))
    return step_time_s(jobs, truth()) * np.exp(scatter)


@functools.cache
def document() -> InferredDocument:
    """A calibration from runs of that machine."""
    jobs = some_jobs().take(np.arange(0, len(some_jobs()), 3))
    step_s = measured(jobs)
    return InferredDocument(
        provenance=PROVENANCE,
        machine=infer(jobs, step_s, step_time_priors(SHEETS["A100"]), device_name="A100"),
    )

"""A state in which exchanges between nodes stall: how long, and which jobs are likely to be in it.

Some runs on shared networks take longer by a fixed time per exchange and micro-batch, others of nearly
the same layout do not. Whether a run was disturbed is not known; how likely it was follows from the size
of the job and its layout, as far as the runs of the calibration tell.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from perfmodel.cost.jobs import Column, Jobs

_CROWDED_DOUBLINGS: Final = 5.0
"""Beyond 32 nodes nearly every run of the published cluster stalls."""
_ABRUPT: Final = 3.0
"""So that one doubling beyond them may decide alone."""
_WEIGHT_SIGMA: Final = 0.7
"""Prior width of the logistic weights: one doubling hardly decides alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Disturbance:
    """The stall of disturbed runs, and the odds of being one."""

    stall_s: float
    """Time lost per exchange. [s]"""
    weights: Column
    """Of a logistic regression on the layout; the first is the constant."""

    def probability(self, jobs: Jobs) -> Column:
        """Probability of a job to be disturbed, 0 inside one node."""
        return np.where(may_stall(jobs), expit(_features(jobs) @ self.weights), 0.0)


def may_stall(jobs: Jobs) -> NDArray[np.bool_]:
    """Whether a job exchanges anything between nodes."""
    return jobs.several_nodes


def stall_time_s(jobs: Jobs, stall_s: float) -> Column:
    """Time lost by stalls: so much per exchange between nodes. [s]

    In a pipeline a micro-batch waits for both neighbours, for one in a pipeline of two stages; while a
    longer one fills and drains it stalls about once per further stage. Without a pipeline disturbed
    runs exchange gradients after every micro-batch: twice to sum and spread them, once where the
    optimizer is sharded and summing is enough.
    """
    alone = np.where(jobs.zero == 0, 2.0, 1.0)
    each = np.where(jobs.pp == 1, alone, np.where(jobs.pp == 2, 1.0, 2.0))
    exchanges = jobs.accumulation * each + np.maximum(jobs.pp - 4, 0.0)
    return np.where(may_stall(jobs), stall_s * exchanges, 0.0)


def fit_odds(jobs: Jobs, disturbed: Column) -> Column:
    """Logistic weights that explain how likely each job was disturbed, drawn towards 0."""
    features = _features(jobs)

    def loss(weights: Column) -> tuple[float, Column]:
        score = features @ weights
        pull = np.concatenate([[0.0], weights[1:] / _WEIGHT_SIGMA**2])
        total = np.logaddexp(0, score).sum() - disturbed @ score + pull @ weights / 2
        return float(total), features.T @ (expit(score) - disturbed) + pull

    return np.asarray(minimize(loss, np.zeros(features.shape[1]), jac=True, method="BFGS").x)


def _features(jobs: Jobs) -> NDArray[np.float64]:
    """Constant, size of the job, and its layout in doublings, about one wide and centred."""
    nodes = np.log2(jobs.devices / jobs.devices_per_node)
    return np.stack(
        [
            np.ones(len(jobs)),
            nodes - 3,
            _ABRUPT * np.maximum(nodes - _CROWDED_DOUBLINGS, 0),
            jobs.zero - 0.5,
            np.log2(jobs.micro_batch) / 2 - 1,
            # Hand-overs between stages and exchanges of gradients stall at different times.
            jobs.pp == 1,
            np.log2(jobs.tp) / 2 - 1,
            np.log2(jobs.hidden) - 11.5,
        ],
        axis=1,
    )

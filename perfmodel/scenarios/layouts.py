"""One layout of a large model beside others on a machine inferred from runs, each against the first."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from perfmodel.answer.answer import layout_table
from perfmodel.answer.inferred import layout_provenance, question_jobs
from perfmodel.answer.question import Question
from perfmodel.cost.inferred import open_inferred
from perfmodel.cost.jobs import Jobs, jobs_from_columns
from perfmodel.documents.prediction import (
    Contrast,
    PredictedPoint,
    ScenarioOutcome,
    WhatIfDocument,
)
from perfmodel.layout_search import spread_against_first
from perfmodel.machine.inferred import InferredMachine
from perfmodel.scenarios.changes import Scenario
from perfmodel.statistics import DEVIATE_90, FASTER, Interval, normal_cdf


def compare_layouts(scenarios: Sequence[Scenario], *, argv: Sequence[str]) -> WhatIfDocument:
    """Predict every layout; the first is what the others are compared with.

    All are predicted from the same fitted parameters and neighbouring deviations: much of their
    uncertainty cancels.
    """
    first = scenarios[0].question
    assert isinstance(first.machine, InferredMachine), first.machine
    outcomes: list[ScenarioOutcome] = []
    caveats: dict[str, None] = {}
    for scenario in scenarios:
        document, found = layout_table(scenario.question, argv=argv)
        [point] = document.points
        outcomes.append(
            ScenarioOutcome(
                name=scenario.name,
                changes=dict(scenario.changes),
                machine_digest=document.profile_digest,
                device_name=document.device_name,
                workload=document.workload,
                scaling=document.scaling,
                point=point,
                step_draws_s=tuple(found.step_s.tolist()),
                contrast=_contrast(first, scenario.question, outcomes[0].point, point)
                if outcomes
                else None,
            )
        )
        caveats |= dict.fromkeys(document.caveats)
    return WhatIfDocument(
        provenance=layout_provenance(open_inferred(first.machine), argv),
        scenarios=tuple(outcomes),
        caveats=tuple(caveats),
    )


def _contrast(
    was: Question, asked: Question, first: PredictedPoint, other: PredictedPoint
) -> Contrast:
    """Ratio of tokens per second, and the probability that it is above 1.

    The ratio is that of the numbers that are named; its uncertainty is that of normal runs, without stalls.
    """
    assert isinstance(was.machine, InferredMachine), was.machine
    assert first.large_model is not None
    assert other.large_model is not None
    pair = [question_jobs(was), question_jobs(asked)]
    both = jobs_from_columns(
        {
            field.name: np.concatenate([getattr(jobs, field.name) for jobs in pair])
            for field in dataclasses.fields(Jobs)
        }
    )
    ratio = other.large_model.tokens_per_s.nominal / first.large_model.tokens_per_s.nominal
    spread = float(spread_against_first(open_inferred(was.machine), both)[1])
    far = float(np.exp(DEVIATE_90 * spread))
    step_s, other_s = first.step_s.nominal, other.step_s.nominal
    return Contrast(
        throughput_ratio=Interval(p5=ratio / far, nominal=ratio, p95=ratio * far),
        step_difference_s=Interval(
            p5=other_s / far - step_s, nominal=other_s - step_s, p95=other_s * far - step_s
        ),
        probability_faster=float(normal_cdf(np.log(ratio) / spread) if spread else ratio > FASTER),
        is_paired=True,
    )

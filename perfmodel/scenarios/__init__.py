"""Use case: scenarios side by side, each against the first, draw by draw.

A changed machine goes through the same model as a measured one, with the same random draws, so that two
predictions differ by the change alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from perfmodel.answer import Question, interval
from perfmodel.answer.answer import Forecast, answer, layout_table, point
from perfmodel.answer.inferred import question_jobs
from perfmodel.answer.measured import measured_caveats
from perfmodel.cost import Samples
from perfmodel.cost.inferred import open_inferred
from perfmodel.cost.jobs import Jobs
from perfmodel.documents import Provenance
from perfmodel.documents.prediction import Contrast, PredictedPoint, ScenarioOutcome, WhatIfDocument
from perfmodel.explanation import explain
from perfmodel.layout import Scaling
from perfmodel.machine import Evidence, InferredMachine
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.statistics import DEVIATE_90, FASTER, Interval, normal_cdf


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a prediction starts from, after some changes."""

    question: Question
    """Its layout counts if nothing is requested."""
    request: Forecast | None = None
    """Data parallelism on one device count."""
    changes: Mapping[str, str] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()
    """Terms that rest on what was typed and not on a measurement, by their name in the evidence."""
    remarks: tuple[str, ...] = ()
    sequence_length: int | None = None
    """Tokens of a large model that a change names; None: its own."""

    @property
    def name(self) -> str:
        """The changes in one line."""
        return ", ".join(f"{name}={value}" for name, value in self.changes.items()) or "as it is"

    @property
    def machine(self) -> MeasuredMachine:
        """The calibrated machine after the changes."""
        assert isinstance(self.question.machine, MeasuredMachine)
        return self.question.machine

    @property
    def scaling(self) -> Scaling:
        """What stays the same as devices grow in number."""
        return "weak" if self.request is None else self.request.scaling

    def questions(self) -> tuple[Question, Question]:
        """The baseline on one device, and what is asked."""
        question, request = self.question, self.request
        if request is None:
            return question.at(question.layout.alone), question
        layouts = request.layouts(question.measured)
        return question.at(layouts[0]), question.at(layouts[-1])

    def asking(self, *, assumed: str = "", remark: str = "", **edits: Any) -> "Scenario":
        """The scenario with parts of its question changed; what is assumed is named."""
        return replace(
            self,
            question=replace(self.question, **edits),
            assumed=self.assumed | ({assumed} - {""}),
            remarks=(*self.remarks, *([remark] if remark else [])),
        )


#: Said wherever something was set.
UNMEASURED: Final = "values of --set count as exact; that the rest stays as measured is assumed"


def compare_scenarios(scenarios: Sequence[Scenario]) -> WhatIfDocument:
    """Predict every scenario; the first is what the others are compared with.

    On a calibrated machine all draws are seeded by the name of the parameter, so that scenarios share the errors of
    everything that was not changed. Layouts of large models come from the same fitted parameters and neighbouring
    deviations. So a difference is less uncertain than its two sides.
    """
    origin = scenarios[0].question.machine.origin
    is_inferred = isinstance(scenarios[0].question.machine, InferredMachine)
    # DataParallel is not taken apart, and losses are compared: then nobody has any.
    with_losses = not any(each.question.layout.one_process for each in scenarios)
    predicted = [
        _layout(each) if is_inferred else _step(each, with_losses=with_losses) for each in scenarios
    ]
    first, first_s, _ = predicted[0]
    outcomes, texts = [first], dict.fromkeys(said for each in scenarios for said in each.remarks)
    texts |= dict.fromkeys(said for *_, caveats in predicted for said in caveats)
    for scenario, (outcome, step_s, _) in zip(scenarios[1:], predicted[1:], strict=True):
        batches = outcome.point.setting.global_batch / first.point.setting.global_batch
        contrast = (
            _layout_contrast(scenarios[0], scenario, first.point, outcome.point)
            if is_inferred
            else contrast_of_draws(first_s, step_s, batches=batches)
        )
        outcomes.append(outcome.model_copy(update={"contrast": contrast}))
    if any(scenario.assumed for scenario in scenarios):
        texts[UNMEASURED] = None
    return WhatIfDocument(
        provenance=Provenance.of_answer(
            host_fingerprint=origin.fingerprint, seed=origin.seed if is_inferred else 0
        ),
        scenarios=tuple(outcomes),
        caveats=tuple(texts),
    )


def _step(
    scenario: Scenario, *, with_losses: bool
) -> tuple[ScenarioOutcome, Samples, Sequence[str]]:
    """What the scenario would do on a calibrated machine, the draws of its step, and its caveats."""
    alone, asked = scenario.questions()
    baseline = answer(alone)
    found = baseline if asked.layout == alone.layout else answer(asked)
    outcome = _outcome(scenario, with_assumed(point(found, baseline=baseline), scenario))
    losses = explain(asked, scaling=scenario.scaling).losses if with_losses else ()
    lost_s = {loss.cause.value: loss.lost_s for loss in losses}
    caveats = measured_caveats(asked, {found.layout: found.evidence})
    told = outcome.model_copy(update={"lost_s": lost_s})
    return told, found.step_s, caveats


def _outcome(scenario: Scenario, found: PredictedPoint) -> ScenarioOutcome:
    return ScenarioOutcome(
        name=scenario.name,
        changes=dict(scenario.changes),
        device_name=scenario.question.machine.device_name,
        workload=scenario.question.workload_name,
        scaling=scenario.scaling,
        point=found,
        remarks=scenario.remarks,
    )


def with_assumed(point: PredictedPoint, scenario: Scenario) -> PredictedPoint:
    """The point, with what was typed called an assumption: it is no measurement."""
    terms = {
        term: Evidence.ASSUMED if term in scenario.assumed else evidence
        for term, evidence in point.evidence.items()
    }
    return point.model_copy(update={"evidence": terms})


def contrast_of_draws(before_s: Samples, after_s: Samples, *, batches: float) -> Contrast:
    """Compare two steps draw by draw; ``batches``: global batch of the second over that of the first."""
    ratio = batches * before_s / after_s
    draws = ratio[1:] if len(ratio) > 1 else ratio
    return Contrast(
        throughput_ratio=interval(ratio),
        step_difference_s=interval(after_s - before_s),
        probability_faster=float((draws > FASTER).mean()),
    )


def _layout(scenario: Scenario) -> tuple[ScenarioOutcome, Samples, Sequence[str]]:
    """What the layout of a large model would do, the draws of its step, and its caveats."""
    document, found = layout_table(scenario.question)
    return _outcome(scenario, document.points[0]), found.step_s, document.caveats


def _layout_contrast(
    was: Scenario, asked: Scenario, first: PredictedPoint, other: PredictedPoint
) -> Contrast:
    """Ratio of tokens per second, and the probability that it is above 1.

    The ratio is that of the numbers that are named; its uncertainty is that of normal runs, without stalls.
    """
    machine = was.question.machine
    assert isinstance(machine, InferredMachine), machine
    assert first.large_model is not None
    assert other.large_model is not None
    both = Jobs.joined([question_jobs(was.question), question_jobs(asked.question)])
    ratio = other.large_model.tokens_per_s.nominal / first.large_model.tokens_per_s.nominal
    spread = float(open_inferred(machine).ratio_uncertainty(both)[1])
    far = float(np.exp(DEVIATE_90 * spread))
    step_s, other_s = first.step_s.nominal, other.step_s.nominal
    return Contrast(
        throughput_ratio=Interval(p5=ratio / far, nominal=ratio, p95=ratio * far),
        step_difference_s=Interval(
            p5=other_s / far - step_s, nominal=other_s - step_s, p95=other_s * far - step_s
        ),
        probability_faster=float(normal_cdf(np.log(ratio) / spread) if spread else ratio > FASTER),
    )

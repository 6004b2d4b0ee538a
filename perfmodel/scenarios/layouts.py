"""Use case: one layout of a large model beside others, each against the first."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from scipy.special import ndtr

from perfmodel.answer.answer import layout_table
from perfmodel.answer.inferred import (
    OpenedMachine,
    layout_provenance,
    opened_machine,
    question_jobs,
)
from perfmodel.answer.question import Question
from perfmodel.cost.jobs import Jobs, jobs_from_columns
from perfmodel.documents.prediction import (
    Contrast,
    PredictedPoint,
    ScenarioOutcome,
    WhatIfDocument,
)
from perfmodel.errors import NotFeasible
from perfmodel.layout.layout import Layout, accumulation_for, parse_layout
from perfmodel.layout_search import spread_against_first
from perfmodel.machine.inferred import InferredMachine
from perfmodel.scenarios.fields import combinations, scenario_name
from perfmodel.statistics.interval import Interval
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.statistics.pairing import FASTER
from perfmodel.workload.transformer import NamedTransformer

_MODEL: Final = "model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBase:
    """The question as it is."""

    question: Question
    text: str
    """The layout as typed."""
    open_model: Callable[[str], NamedTransformer]
    """Of a model by name, for ``model=``."""


def compare_layouts(
    base: LayoutBase, settings: Sequence[str], *, argv: Sequence[str]
) -> WhatIfDocument:
    """Predict a layout, and one more for every combination of ``KEY=VALUE[,VALUE...]``.

    Devices and sequences per step stay: ``dp`` and ``accumulation`` follow, unless they are set. Both sides
    are predicted from the same fitted parameters and neighbouring deviations: much of their uncertainty cancels.

    Raises
    ------
    UsageError
        If a key is not in the grammar, or a value makes no sense.
    NotFeasible
        If the model or the number of devices does not allow a layout.
    """
    first = question_jobs(base.question)
    outcomes: list[ScenarioOutcome] = []
    caveats: dict[str, None] = {}
    for changes in [{}, *combinations(settings)]:
        question = _changed(base, changes) if changes else base.question
        document, found = layout_table(question, argv=argv)
        [point] = document.points
        contrast = None
        if outcomes:
            both = _joined(first, question_jobs(question))
            contrast = _contrast(question, both, outcomes[0].point, point)
        outcomes.append(
            ScenarioOutcome(
                name=scenario_name(changes),
                changes=changes,
                machine_digest=document.profile_digest,
                device_name=document.device_name,
                workload=document.workload,
                scaling=document.scaling,
                point=point,
                step_draws_s=tuple(found.step_s.tolist()),
                contrast=contrast,
            )
        )
        caveats |= dict.fromkeys(document.caveats)
    return WhatIfDocument(
        schema_version=WhatIfDocument.current_version,
        provenance=layout_provenance(_machine(base.question), argv),
        scenarios=tuple(outcomes),
        caveats=tuple(caveats),
    )


def _machine(question: Question) -> OpenedMachine:
    assert isinstance(question.machine, InferredMachine)
    return opened_machine(question.machine)


def _changed(base: LayoutBase, changes: Mapping[str, str]) -> Question:
    was, question = base.question.layout, base.question
    if _MODEL in changes:
        question = dataclasses.replace(question, workload=base.open_model(changes[_MODEL]))
    set_here = {key: value for key, value in changes.items() if key != _MODEL}
    words = dict(word.split("=", 1) for word in base.text.split()) | set_here
    if "dp" not in set_here:
        # First: what dp has to be divisible by, such as ep, is read together with it.
        others = _parsed(words, only=("tp", "pp", "cp")).world_size
        if was.world_size % others:
            raise NotFeasible(
                f"--set: tp x pp x cp ({others}) must divide the {was.world_size} devices; set dp as well"
            )
        words["dp"] = str(was.world_size // others)
    if "accumulation" not in set_here:
        words.pop("accumulation", None)
    layout = _parsed(words)
    if "accumulation" not in set_here:
        parts = accumulation_for(
            global_batch=was.global_batch, dp=layout.dp, micro_batch=layout.micro_batch
        )
        layout = dataclasses.replace(layout, accumulation=parts)
    return dataclasses.replace(question, layout=layout, devices=None)


def _parsed(words: Mapping[str, str], *, only: Sequence[str] | None = None) -> Layout:
    return parse_layout(
        " ".join(f"{key}={value}" for key, value in words.items() if only is None or key in only)
    )


def _joined(first: Jobs, other: Jobs) -> Jobs:
    names = [field.name for field in dataclasses.fields(Jobs)]
    return jobs_from_columns(
        {name: np.concatenate([getattr(first, name), getattr(other, name)]) for name in names}
    )


def _contrast(
    question: Question, both: Jobs, first: PredictedPoint, other: PredictedPoint
) -> Contrast:
    """Ratio of tokens per second, and the probability that it is above 1.

    The ratio is that of the numbers that are named; its uncertainty is that of normal runs, without stalls.
    """
    assert first.large_model is not None
    assert other.large_model is not None
    ratio = other.large_model.tokens_per_s.nominal / first.large_model.tokens_per_s.nominal
    spread = float(spread_against_first(_machine(question).model, both)[1])
    far = float(np.exp(DEVIATE_90 * spread))
    step_s, other_s = first.step_s.nominal, other.step_s.nominal
    return Contrast(
        throughput_ratio=Interval(p5=ratio / far, nominal=ratio, p95=ratio * far),
        step_difference_s=Interval(
            p5=other_s / far - step_s, nominal=other_s - step_s, p95=other_s * far - step_s
        ),
        probability_faster=float(ndtr(np.log(ratio) / spread) if spread else ratio > FASTER),
        is_paired=True,
    )

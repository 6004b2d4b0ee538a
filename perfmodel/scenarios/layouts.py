"""Use case: one layout of a large model beside others, each against the first."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from scipy.special import ndtr

from perfmodel.cost.jobs import Jobs, jobs_from_columns
from perfmodel.documents.prediction import (
    LayoutPredictionDocument,
    LayoutScenario,
    LayoutWhatIfDocument,
)
from perfmodel.errors import NotFeasible
from perfmodel.layout.layout import Layout, accumulation_for, parse_layout
from perfmodel.layout_search import spread_against_first
from perfmodel.predict_layout import (
    OpenedMachine,
    Training,
    layout_jobs,
    layout_provenance,
    predict_layout,
)
from perfmodel.scenarios.fields import combinations
from perfmodel.statistics.interval import Interval
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.statistics.pairing import FASTER
from perfmodel.units import Bytes
from perfmodel.workload.transformer import NamedTransformer

_MODEL: Final = "model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBase:
    """The question as it is."""

    machine: OpenedMachine
    training: Training
    text: str
    """The layout as typed."""
    layout: Layout
    """The same, with its batch."""
    capacity_bytes: Bytes | None = None
    open_model: Callable[[str], NamedTransformer]
    """Of a model by name, for ``model=``."""


def compare_layouts(
    base: LayoutBase, settings: Sequence[str], *, argv: Sequence[str]
) -> LayoutWhatIfDocument:
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
    questions = [("as it is", base.training, base.layout)]
    for changes in combinations(settings):
        name = ", ".join(f"{key}={value}" for key, value in changes.items())
        questions.append((name, *_changed(base, changes)))
    first = _jobs(base, *questions[0][1:])
    scenarios: list[LayoutScenario] = []
    for name, training, layout in questions:
        prediction, _ = predict_layout(
            base.machine, training, layout, capacity_bytes=base.capacity_bytes, argv=argv
        )
        ratio, faster = None, None
        if scenarios:
            both = _joined(first, _jobs(base, training, layout))
            ratio, faster = _contrast(base, both, scenarios[0].prediction, prediction)
        scenarios.append(
            LayoutScenario(
                name=name, prediction=prediction, throughput_ratio=ratio, probability_faster=faster
            )
        )
    return LayoutWhatIfDocument(
        schema_version=LayoutWhatIfDocument.current_version,
        provenance=layout_provenance(base.machine, argv),
        scenarios=tuple(scenarios),
    )


def _changed(base: LayoutBase, changes: Mapping[str, str]) -> tuple[Training, Layout]:
    training = base.training
    if _MODEL in changes:
        training = dataclasses.replace(training, model=base.open_model(changes[_MODEL]))
    set_here = {key: value for key, value in changes.items() if key != _MODEL}
    words = dict(word.split("=", 1) for word in base.text.split()) | set_here
    if "dp" not in set_here:
        # First: what dp has to be divisible by, such as ep, is read together with it.
        devices, others = base.layout.world_size, _parsed(words, only=("tp", "pp", "cp")).world_size
        if devices % others:
            raise NotFeasible(
                f"--set: tp x pp x cp ({others}) must divide the {devices} devices; set dp as well"
            )
        words["dp"] = str(devices // others)
    if "accumulation" not in set_here:
        words.pop("accumulation", None)
    layout = _parsed(words)
    if "accumulation" not in set_here:
        parts = accumulation_for(
            global_batch=base.layout.global_batch, dp=layout.dp, micro_batch=layout.micro_batch
        )
        layout = dataclasses.replace(layout, accumulation=parts)
    return (
        dataclasses.replace(training, devices=layout.world_size, global_batch=layout.global_batch),
        layout,
    )


def _parsed(words: Mapping[str, str], *, only: Sequence[str] | None = None) -> Layout:
    return parse_layout(
        " ".join(f"{key}={value}" for key, value in words.items() if only is None or key in only)
    )


def _jobs(base: LayoutBase, training: Training, layout: Layout) -> Jobs:
    return layout_jobs(training, layout, device=base.machine.machine.device_name)


def _joined(first: Jobs, other: Jobs) -> Jobs:
    names = [field.name for field in dataclasses.fields(Jobs)]
    return jobs_from_columns(
        {name: np.concatenate([getattr(first, name), getattr(other, name)]) for name in names}
    )


def _contrast(
    base: LayoutBase, both: Jobs, first: LayoutPredictionDocument, other: LayoutPredictionDocument
) -> tuple[Interval, float]:
    """Ratio of tokens per second, and the probability that it is above 1.

    The ratio is that of the numbers that are named; its uncertainty is that of normal runs, without stalls.
    """
    ratio = other.tokens_per_s.nominal / first.tokens_per_s.nominal
    spread = float(spread_against_first(base.machine.model, both)[1])
    if spread == 0:
        return Interval(p5=ratio, nominal=ratio, p95=ratio), float(ratio > FASTER)
    far = float(np.exp(DEVIATE_90 * spread))
    return (
        Interval(p5=ratio / far, nominal=ratio, p95=ratio * far),
        float(ndtr(np.log(ratio) / spread)),
    )

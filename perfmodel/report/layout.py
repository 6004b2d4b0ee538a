"""A predicted layout and a search over layouts as tables and lines."""

import math

from perfmodel.documents.prediction import (
    LargeModelStep,
    ParallelismPlanDocument,
    PredictedPoint,
    PredictionDocument,
    ScenarioOutcome,
    WhatIfDocument,
)
from perfmodel.machine.inferred import InferredMachine
from perfmodel.report.prediction import SMALLEST_SHARE
from perfmodel.report.tables import Table, table
from perfmodel.report.wording import (
    caveat_lines,
    count_interval,
    duration_interval,
    interval,
    percent,
)
from perfmodel.statistics.interval import Interval
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.units import Seconds, format_bytes, format_duration

_GRANTED = " sequence_parallel=yes"
"""What a search takes for granted wherever matrices are shared."""
PARTS = (
    ("compute", "compute_s"),
    ("tensor and context collectives", "tensor_s"),
    ("pipeline: fill, drain, point-to-point sends", "pipeline_s"),
    ("gradients and sharded parameters, exposed", "data_s"),
    ("optimizer, fixed costs, stragglers", "other_s"),
)


def _large(point: PredictedPoint) -> LargeModelStep:
    assert point.large_model is not None, point
    return point.large_model


def parts_table(document: PredictionDocument) -> Table:
    """Where the step goes, at the fitted parameters."""
    [point] = document.points
    large = _large(point)
    trained, parts = large.trained, large.parts_s
    return table(
        f"{trained.name} on {trained.devices} x {document.device_name}: {point.layout}",
        [(name, getattr(parts, field)) for name, field in PARTS],
        {
            "<part of the step": lambda part: part[0],
            "time": lambda part: format_duration(part[1]),
            "share": lambda part: f"{part[1] / large.formula_step_s:.1%}",
        },
    )


def memory_table(document: PredictionDocument) -> Table:
    """Memory of a rank of every stage."""
    return table(
        "Memory of one rank",
        document.points[0].memory,
        {
            "stage": lambda stage: stage.stage,
            "layers": lambda stage: stage.layers,
            "weights": lambda stage: format_bytes(stage.parts_bytes["parameters"]),
            "gradients": lambda stage: format_bytes(stage.parts_bytes["gradients"]),
            "optimizer": lambda stage: format_bytes(stage.parts_bytes["optimizer"]),
            "activations": lambda stage: format_bytes(stage.parts_bytes["activations"]),
            "logits": lambda stage: format_bytes(stage.parts_bytes["logits"]),
            "all": lambda stage: format_bytes(stage.needed_bytes),
        },
        caption="All: with the framework's context and the allocator's slack.",
    )


def layout_lines(document: PredictionDocument, *, verbose: bool) -> list[str]:
    """The answer in words, evidence and caveats."""
    [point] = document.points
    step, large = point.step_s, _large(point)
    trained = large.trained
    lines = [
        (
            f"batch: {trained.global_batch:,} sequences of {trained.sequence:,} tokens per step of all "
            "devices"
        ),
        (
            f"step: {format_duration(step.nominal)} [{format_duration(step.p5)} - "
            f"{format_duration(step.p95)}], 90 %, evidence {point.weakest_evidence}"
        ),
        (
            f"tokens/s: {large.tokens_per_s.nominal:,.0f} "
            f"[{large.tokens_per_s.p5:,.0f} - {large.tokens_per_s.p95:,.0f}]"
        ),
        f"MFU: {_percent(large.mfu)} of the dense 16-bit peak of the data sheet (perfmodel devices)",
        (
            f"simulated: {format_duration(large.simulated_step_s)}, closed form: "
            f"{format_duration(large.formula_step_s)}, both before the deviations that the runs showed"
        ),
    ]
    if point.fit_probability is not None and point.capacity_bytes is not None:
        lines.append(
            f"fits into {format_bytes(point.capacity_bytes)} with probability "
            f"{point.fit_probability:.0%}"
        )
    return [*lines, *caveat_lines(document.caveats, verbose=verbose)]


def plan_table(document: ParallelismPlanDocument) -> Table:
    """The fastest layouts, each with what it loses to the first."""
    trained = document.trained
    return table(
        f"{trained.name}, {trained.devices} x {document.device_name} of "
        f"{format_bytes(document.capacity_bytes)}, {trained.global_batch} sequences of "
        f"{trained.sequence} tokens per step",
        document.ranked,
        {
            "rank": lambda entry: f"{entry.rank}{' tie' if entry.ties and entry.loses_in else ''}",
            "step (90 %)": lambda entry: (
                f"{format_duration(entry.step_s.nominal)} ({format_duration(entry.step_s.p5)} - "
                f"{format_duration(entry.step_s.p95)})"
            ),
            "MFU": lambda entry: f"{entry.mfu:.0%}",
            "memory": lambda entry: format_bytes(entry.needed_bytes),
            "fits": lambda entry: f"{entry.fit_probability:.0%}",
            "<layout": lambda entry: entry.layout.replace(_GRANTED, ""),
            "<loses in": lambda entry: (
                f"{entry.loses_in} {format_duration(entry.loses_by_s)}" if entry.loses_in else ""
            ),
        },
        caption="With sequence_parallel=yes wherever tp > 1.",
    )


def plan_lines(document: ParallelismPlanDocument) -> list[str]:
    """How much was searched, why the runner-up lost, caveats."""
    lines = [
        (
            f"{document.num_feasible} layouts are possible, {document.num_fitting} fit; evidence "
            f"{document.evidence}"
        )
    ]
    if len(document.ranked) > 1:
        lines.append(_runner_up(document))
    lost = next((entry for entry in document.ranked if not entry.ties), None)
    ties = sum(entry.ties for entry in document.ranked) - 1
    if ties:
        lines.append(
            f"{ties} more of those shown tie with the first: the error bar cannot tell them apart"
        )
    if lost is not None and lost is not document.ranked[1]:
        lines.append(
            f"the first that loses beyond the error bar: {lost.layout}, by "
            f"{lost.step_s.nominal / document.ranked[0].step_s.nominal - 1:.1%}, most of it in {lost.loses_in} "
            f"({format_duration(lost.loses_by_s)}); slower with probability {lost.slower_probability:.0%}"
        )
    return [*lines, *(f"caveat: {caveat}" for caveat in document.caveats)]


def _runner_up(document: ParallelismPlanDocument) -> str:
    """Why the second is not the first."""
    first, second = document.ranked[:2]
    verdict = "a tie" if second.ties else "behind"
    share = second.step_s.nominal / first.step_s.nominal - 1
    where = (
        f", most of it in {second.loses_in} ({format_duration(second.loses_by_s)})"
        if second.loses_by_s > 0
        else ""
    )
    return (
        f"runner-up: {second.layout}, {verdict}: {share:+.1%}{where}; slower with probability "
        f"{second.slower_probability:.0%}"
    )


def _percent(values: Interval) -> str:
    return f"{values.nominal:.1%} [{values.p5:.1%} - {values.p95:.1%}]"


def layout_whatif_table(document: WhatIfDocument) -> Table:
    """One layout per row, each against the first."""

    def fits(scenario: ScenarioOutcome) -> str:
        probability = scenario.point.fit_probability
        return "-" if probability is None else percent(probability)

    def ratio(scenario: ScenarioOutcome) -> str:
        return "-" if scenario.contrast is None else interval(scenario.contrast.throughput_ratio)

    first = document.scenarios[0]
    return table(
        f"{first.workload} on {_large(first.point).trained.devices:,} x {first.device_name}: what if",
        document.scenarios,
        {
            "<Scenario": lambda scenario: scenario.name.replace(", ", "\n"),
            "Step": lambda scenario: duration_interval(scenario.point.step_s),
            "Tokens/s": lambda scenario: count_interval(_large(scenario.point).tokens_per_s),
            "MFU": lambda scenario: percent(_large(scenario.point).mfu.nominal),
            "Memory": lambda scenario: format_bytes(
                max(stage.needed_bytes for stage in scenario.point.memory)
            ),
            "Fits": fits,
            "Ratio to\nthe first": ratio,
        },
        caption="[p5-p95]: 90 % of outcomes should lie inside. Memory: of the fullest rank. Ratio: tokens/s "
        "over those of the first; what both rest on alike cancels.",
    )


def layout_whatif_lines(document: WhatIfDocument, *, verbose: bool) -> list[str]:
    """The layout of each scenario, which parts of the step changed, and caveats."""
    first = document.scenarios[0].point
    smallest_s = SMALLEST_SHARE * first.step_s.nominal
    lines = []
    for scenario in document.scenarios:
        trained = _large(scenario.point).trained
        lines.append(
            f"{scenario.name}: {trained.name}, {scenario.point.layout}, {trained.devices:,} devices, "
            f"{trained.global_batch:,} sequences per step"
        )
        if scenario.contrast is not None:
            lines.append(f"  more tokens/s with {percent(scenario.contrast.probability_faster)}")
            lines += _moved(scenario, first, smallest_s)
    return [*lines, *caveat_lines(document.caveats, verbose=verbose)]


def _moved(scenario: ScenarioOutcome, first: PredictedPoint, smallest_s: Seconds) -> list[str]:
    before_s, after_s = _large(first).parts_s, _large(scenario.point).parts_s
    pairs = [(name, getattr(before_s, key), getattr(after_s, key)) for name, key in PARTS]
    return [
        f"  {name}: {format_duration(max(0.0, before))} -> {format_duration(max(0.0, after))}"
        for name, before, after in sorted(pairs, key=lambda pair: -abs(pair[2] - pair[1]))
        if abs(after - before) >= smallest_s
    ]


def parameter_lines(machine: InferredMachine) -> list[str]:
    """Every parameter with the factor of its 90 % interval, and whether the runs determine it; memory."""
    lines = [f"{'parameter':20} {'value':>10}  x/ of 90 %"]
    lines += [
        f"{parameter.name:20} {parameter.value:10.4g}  x/ {math.exp(DEVIATE_90 * parameter.log_sigma):.2f}  "
        f"{'determined' if parameter.determined else 'prior kept, the runs do not tell'}: {parameter.meaning}"
        for parameter in machine.fitted_parameters
    ]
    if machine.memory is not None:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in machine.memory.factors.items())
        lines.append(
            f"memory, from {len(machine.memory.runs)} peaks, factors on its parts: {parts}"
        )
    return lines

"""A prediction, an explanation and a what-if as tables and lines."""

import csv
import io
from collections.abc import Callable, Mapping
from typing import Final

from pydantic_core import to_json

from perfmodel.answer.measured import stage_memory
from perfmodel.answer.question import Answer
from perfmodel.cost.memory import DeviceMemory
from perfmodel.documents.prediction import (
    PredictedPoint,
    PredictionDocument,
    ScenarioOutcome,
    WhatIfDocument,
)
from perfmodel.explanation import Change, Explanation, Loss, Standing, Verdict
from perfmodel.report.tables import Table, table
from perfmodel.report.wording import (
    caveat_lines,
    count_interval,
    counted,
    duration_interval,
    gradients,
    interval,
    number,
    one_line,
    percent,
    scaling_words,
    short_label,
)
from perfmodel.statistics.interval import Interval
from perfmodel.step.program import Cause
from perfmodel.units import Seconds, format_bytes, format_duration


def prediction_table(prediction: PredictionDocument) -> Table:
    """What each number of devices would do; readable on 80 columns."""
    return table(
        f"{prediction.workload} on {prediction.device_name}, {prediction.scaling} scaling",
        prediction.points,
        {
            "De-\nvices": lambda point: point.setting.world_size,
            "Global\nbatch": lambda point: (
                f"{point.setting.global_batch}\n{point.setting.local_batch} each"
            ),
            "Step": lambda point: duration_interval(point.step_s),
            "Samples/s": lambda point: count_interval(point.samples_per_s),
            "Speed-up": lambda point: interval(point.speedup),
            "Effi-\nciency": lambda point: (
                percent(point.scaling_efficiency.nominal) if point.scaling_efficiency else "-"
            ),
            "Exposed\ncomm.": lambda point: format_duration(point.exposed_comm_s.nominal),
            "<Weakest\nevidence": lambda point: point.weakest_evidence.value,
        },
        caption=_caption(prediction),
    )


def _caption(prediction: PredictionDocument) -> str:
    settings = [point.setting for point in prediction.points]
    buckets = sorted({gradients(setting) for setting in settings if setting.world_size > 1})
    *fewer, most = sorted({setting.accumulation for setting in settings})
    return (
        f"Predicted, {scaling_words(prediction)}; 'each' is the batch per device and step, "
        f"of {' or '.join((*map(str, fewer), counted(most, 'micro-batch')))}; "
        f"bucket cap: {', '.join(buckets) or '-'}. "
        "Step: from the end of one optimizer step to the end of the next, typical of a run. "
        "[p5-p95]: 90 % of outcomes should lie inside. "
        "Speed-up: samples/s over one device without DDP. Exposed: not hidden behind compute."
    )


def prediction_lines(prediction: PredictionDocument, *, verbose: bool) -> list[str]:
    """Real runs, the links that all-reduces wait for, caveats."""
    runs = [
        f"{point.world_size} x {point.micro_batch}: {format_duration(point.step_s)}"
        + ("" if point.speedup is None else f", speed-up {number(point.speedup)}")
        for point in prediction.measured
    ]
    lines = [f"measured (devices x micro-batch): {'; '.join(runs)}"] if runs else []
    shown = None
    for point in prediction.points:
        if point.bottleneck_link not in (None, shown):
            shown = point.bottleneck_link
            lines.append(
                f"from {point.setting.world_size} devices on, all-reduce waits for: {shown}"
            )
    return [*lines, *caveat_lines(prediction.caveats, verbose=verbose)]


#: Of a longer pipeline the first, the fullest and the last stage are shown.
_MOST_STAGES: Final = 6


def stage_table(answer: Answer) -> tuple[Table, ...]:
    """Memory of one rank of every pipeline stage; nothing if the workload's memory was not recorded."""
    stages = stage_memory(answer.question)
    if not stages:
        return ()
    fullest = max(range(len(stages)), key=lambda place: stages[place].needed_bytes)
    shown = range(len(stages))

    def part_of(stage: DeviceMemory) -> Callable[[str], str]:
        return lambda part: format_bytes(
            stage.needed_bytes if part == "all" else stage.parts.get(part, 0)
        )

    parts = dict.fromkeys(part for stage in stages for part in stage.parts)
    columns: dict[str, Callable[[str], object]] = {"<Part": lambda part: part}
    for place in shown if len(shown) <= _MOST_STAGES else sorted({0, fullest, shown[-1]}):
        columns[f"stage {place}"] = part_of(stages[place])
    return (table("Memory of one rank", [*parts, "all"], columns),)


def divided_lines(answer: Answer) -> list[str]:
    """Layout, its evidence, and whether it fits into a device."""
    lines = [f"layout: {answer.layout}"]
    by_evidence: dict[str, list[str]] = {}
    for term, evidence in answer.evidence.items():
        by_evidence.setdefault(evidence, []).append(term)
    lines += [f"{evidence}: {', '.join(terms)}" for evidence, terms in by_evidence.items()]
    capacity_bytes, stages = answer.question.capacity_bytes, stage_memory(answer.question)
    if capacity_bytes is not None and stages:
        least = min(stage.fit_probability(capacity_bytes) for stage in stages)
        lines.append(f"fits into {format_bytes(capacity_bytes)} with probability {least:.0%}")
    return lines


def measured_table(prediction: PredictionDocument) -> Table:
    """Real runs of the same workload."""
    return table(
        f"{prediction.workload}: real runs for comparison",
        prediction.measured,
        {
            "Devices": lambda run: run.world_size,
            "Micro-batch": lambda run: run.micro_batch,
            "Step, measured": lambda run: format_duration(run.step_s),
            "Speed-up, measured": lambda run: "-" if run.speedup is None else number(run.speedup),
        },
    )


def breakdown_table(prediction: PredictionDocument) -> Table:
    """Where the time of a step goes, by cause."""

    def spent(cause: Cause) -> Callable[[PredictedPoint], str]:
        return lambda point: format_duration(point.breakdown_s.get(cause, 0.0))

    return table(
        f"{prediction.workload}: time on the critical path by cause",
        prediction.points,
        {
            "Devices": lambda point: point.setting.world_size,
            **{cause.replace("_", " "): spent(cause) for cause in causes_of(prediction)},
            "Waiting for stragglers": lambda point: format_duration(point.straggler_s),
            "Exposed communication": lambda point: duration_interval(point.exposed_comm_s),
        },
        caption="The causes of a row sum to its step; the last two columns are parts of it, "
        "counted another way.",
    )


def causes_of(prediction: PredictionDocument) -> tuple[Cause, ...]:
    """Causes that take time anywhere in a prediction, in the order of a step."""
    return tuple(
        cause
        for cause in Cause
        if any(point.breakdown_s.get(cause, 0.0) > 0 for point in prediction.points)
    )


def evidence_table(prediction: PredictionDocument) -> Table:
    """Where each term of each point comes from."""

    def of(term: str) -> Callable[[PredictedPoint], str]:
        return lambda point: point.evidence[term].value if term in point.evidence else "-"

    terms = sorted({term for point in prediction.points for term in point.evidence})
    return table(
        f"{prediction.workload}: evidence per term",
        prediction.points,
        {
            "Devices": lambda point: point.setting.world_size,
            **{f"<{term}": of(term) for term in terms},
        },
    )


#: Less than this share of a step is rounding.
_SMALLEST_SHARE = 1e-6


def explanation_lines(explanation: Explanation, *, verbose: bool = True) -> list[str]:
    """Ranked causes with their share of the lost time, and one change to try for each.

    One device loses nothing to others: its gains are told in samples per second, not as a speed-up.
    """
    whole_s, of_whole = _whole(explanation)
    lines = [_headline(explanation)]
    for rank, loss in enumerate(explanation.losses, start=1):
        share = percent(loss.lost_s / whole_s)
        cause = loss.cause.replace("_", " ")
        lines.append(f"{rank}. {cause}: {_ms(loss.lost_s)}, {share} {of_whole} - {loss.what}")
        lines += [_advice(explanation, loss), f"   to confirm: {loss.confirm}"]
    lines.append("All that was tried, one at a time:")
    lines += [f"   {change.what}: {_effect(explanation, change)}" for change in explanation.changes]
    against = "samples/s" if _is_alone(explanation) else "speed-ups"
    lines.append(
        "Each cause is removed alone, all else as it was; causes overlap, so that they need not "
        f"add up. Gains are per global batch of the setting, {against} over the same baseline."
    )
    return [*lines, *caveat_lines(explanation.caveats, verbose=verbose)]


def explanation_json(explanation: Explanation, standing: Standing | None) -> str:
    """An explanation, and where a measured step stands, for programs; times in seconds."""
    written = {"schema_version": 1, "explanation": explanation, "standing": standing}
    return to_json(written, indent=1).decode()


def standing_line(found: Standing) -> str:
    """Whether a measured step is normal, in one line."""
    predicted = one_line(duration_interval(found.predicted_s))
    line = (
        f"measured {format_duration(found.measured_s)}: {found.verdict}; predicted {predicted}, "
        f"{percent(found.share_slower)} of outcomes take longer"
    )
    more_s = found.measured_s - found.predicted_s.nominal
    if found.verdict is Verdict.SLOWER:
        return (
            f"{line}; {format_duration(more_s)} are more than the causes below cost when calibrated: "
            "confirm them on the job; perfmodel doctor says what disturbs a machine"
        )
    if found.verdict is Verdict.FASTER:
        return f"{line}; is it the same batch of each device, precision and definition of a step?"
    return line


def _is_alone(explanation: Explanation) -> bool:
    return explanation.ideal_speedup == 1


def _whole(explanation: Explanation) -> tuple[Seconds, str]:
    """What shares refer to: the lost time, or the step where nothing is lost to other devices."""
    if not _is_alone(explanation) and explanation.lost_s > 0:
        return explanation.lost_s, "of the lost time"
    return explanation.step_s, "of the step"


def _headline(explanation: Explanation) -> str:
    name = short_label(explanation.setting)
    step = _ms(explanation.step_s)
    if _is_alone(explanation):
        return (
            f"{name}: a step takes {step}; one device waits for no other and has no speed-up to lose; "
            "what could be saved:"
        )
    return (
        f"{name}: speed-up {number(explanation.speedup)} of {explanation.ideal_speedup}; a step "
        f"takes {step}, ideal would be {_ms(explanation.ideal_step_s)}, "
        f"{_ms(explanation.lost_s)} are lost:"
    )


def _advice(explanation: Explanation, loss: Loss) -> str:
    if not loss.one_change:
        return "   nothing that was tried helps"
    return f"   try {loss.one_change}: {_ms(loss.gain_s)} less, {_gain(explanation, loss)}"


def _effect(explanation: Explanation, change: Change) -> str:
    if abs(change.gain_s) < _SMALLEST_SHARE * explanation.step_s:
        return "no difference"
    return f"step {_signed_ms(-change.gain_s)}, {_gain(explanation, change)}"


def _gain(explanation: Explanation, found: Loss | Change) -> str:
    if _is_alone(explanation):
        faster = explanation.step_s / (explanation.step_s - found.gain_s) - 1
        return f"samples/s {percent(faster, signed=True)}"
    return f"speed-up {found.gain_speedup:+.2f}"


def _ms(seconds: Seconds) -> str:
    # One unit throughout, so that the lines compare; tiny ones in full.
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-5 else format_duration(seconds)


def _signed_ms(seconds: Seconds) -> str:
    return f"{'-' if seconds < 0 else '+'}{_ms(abs(seconds))}"


#: A part of the step that changes by less than this share of the first scenario's is not worth a line.
SMALLEST_SHARE = 0.001
#: Nor is a ratio of samples per second that is nearer to 1.
_SMALLEST_RATIO = 0.001
#: Characters on one line beside the columns of numbers, on 80 columns.
_WIDEST_CHANGE = 20


def whatif_table(document: WhatIfDocument) -> Table:
    """One scenario per row, each against the first."""

    def ratio(scenario: ScenarioOutcome) -> str:
        return "-" if scenario.contrast is None else interval(scenario.contrast.throughput_ratio)

    return table(
        f"{document.scenarios[0].workload} on {document.scenarios[0].device_name}: what if",
        document.scenarios,
        {
            "<Scenario": lambda scenario: "\n".join(map(_scenario_line, scenario.name.split(", "))),
            "Step": lambda scenario: duration_interval(scenario.point.step_s),
            "Samples/s": lambda scenario: count_interval(scenario.point.samples_per_s),
            "Speed-up": lambda scenario: interval(scenario.point.speedup),
            "Ratio to\nthe first": ratio,
            "<Weakest\nevidence": lambda scenario: scenario.point.weakest_evidence.value,
        },
        caption="[p5-p95]: 90 % of outcomes should lie inside. Speed-up: over one device of the same "
        "scenario. Ratio: samples/s over those of the first, draw by draw on the same machine, so that "
        "shared errors cancel.",
    )


def _scenario_line(change: str) -> str:
    """A change that leaves room for the numbers; its value stays whole."""
    if len(change) <= _WIDEST_CHANGE:
        return change
    name, _, value = change.partition("=")
    if len(name) >= _WIDEST_CHANGE:
        name = name.replace(".", ".\n", 1)
    return f"{name}=\n{value}"


def whatif_lines(document: WhatIfDocument, *, verbose: bool) -> list[str]:
    """What each scenario runs, which causes changed, and what must be known first."""
    first = document.scenarios[0]
    lines = []
    for scenario in document.scenarios:
        point = scenario.point
        label = f"{short_label(point.setting)}, {scenario.scaling} scaling"
        lines.append(f"{scenario.name}: {label}, global batch {point.setting.global_batch}")
        lines += [] if scenario is first else _cause_lines(first, scenario)
    return [*lines, *caveat_lines(document.caveats, verbose=verbose)]


def _cause_lines(first: ScenarioOutcome, scenario: ScenarioOutcome) -> list[str]:
    """Difference of the step, and what changed, for the samples of the first scenario's step."""
    contrast = scenario.contrast
    assert contrast is not None
    ratio = contrast.throughput_ratio
    if ratio.p5 == ratio.p95 == 1 and contrast.step_difference_s.nominal == 0:
        return ["  no difference"]
    if max(abs(ratio.p5 - 1), abs(ratio.p95 - 1)) < _SMALLEST_RATIO:
        return [f"  samples/s differ by less than {100 * _SMALLEST_RATIO:g} %"]
    samples = first.point.setting.global_batch
    share = samples / scenario.point.setting.global_batch
    same = "" if share == 1 else f" (for the same {samples} samples)"
    difference = one_line(duration_interval(_magnitude(contrast.step_difference_s)))
    sign = "less" if contrast.step_difference_s.nominal < 0 else "more"
    pairing = "" if contrast.is_paired else "; another machine, not paired"
    faster = f"more samples/s with {percent(contrast.probability_faster)}"
    path = (
        {cause.value: time_s for cause, time_s in first.point.breakdown_s.items()},
        {cause.value: time_s for cause, time_s in scenario.point.breakdown_s.items()},
    )
    smallest_s = SMALLEST_SHARE * first.point.step_s.nominal
    return [
        f"  step {difference} {sign}; {faster}{pairing}",
        *(f"  on the critical path, {x}{same}" for x in _moved(*path, share, smallest_s)),
        *(f"  lost to {x}{same}" for x in _moved(first.lost_s, scenario.lost_s, share, smallest_s)),
    ]


def _moved(
    before_s: Mapping[str, float], after_s: Mapping[str, float], share: float, smallest_s: Seconds
) -> list[str]:
    """Causes that changed by more than a little, the largest change first."""
    pairs = {
        cause: (before_s.get(cause, 0.0), after_s.get(cause, 0.0) * share)
        for cause in dict.fromkeys([*before_s, *after_s])
    }
    by_size = sorted(pairs.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    return [
        f"{cause.replace('_', ' ')}: {_time(before)} -> {_time(after)}"
        for cause, (before, after) in by_size
        if abs(after - before) >= smallest_s
    ]


def _magnitude(difference: Interval) -> Interval:
    """The same difference, positive in the middle."""
    if difference.nominal >= 0:
        return difference
    return -difference


def _time(seconds: Seconds) -> str:
    return format_duration(max(0.0, seconds))


def fields_lines(fields: list[tuple[str, str, str]]) -> list[str]:
    """Name, example and meaning of every field that can be set."""
    width = max(len(f"{name}={example}") for name, example, _ in fields)
    return [f"{f'{name}={example}':{width}}  {meaning}" for name, example, meaning in fields]


#: Parts of a data-parallel step, a column each.
_CSV_CAUSES = (
    *(Cause.INPUT, Cause.DISPATCH, Cause.FORWARD, Cause.BACKWARD),
    *(Cause.BUCKET, Cause.ALL_REDUCE, Cause.BROADCAST, Cause.OPTIMIZER),
)


def csv_text(prediction: PredictionDocument) -> str:
    """Comma-separated values, one line per number of devices; SI units stand in the headings."""
    rows = [_csv_row(prediction, point) for point in prediction.points]
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _csv_row(prediction: PredictionDocument, point: PredictedPoint) -> dict[str, object]:
    setting = point.setting
    quantities = {
        ("step", "_s"): point.step_s,
        ("samples", "_per_s"): point.samples_per_s,
        ("speedup", ""): point.speedup,
        ("scaling_efficiency", "_fraction"): point.scaling_efficiency,
        ("exposed_comm", "_s"): point.exposed_comm_s,
    }
    return {
        "workload": prediction.workload,
        "device_name": prediction.device_name,
        "scaling": prediction.scaling,
        "world_size": setting.world_size,
        "micro_batch": setting.micro_batch,
        "accumulation": setting.accumulation,
        "local_batch": setting.local_batch,
        "global_batch": setting.global_batch,
        "bucket_cap_mib": setting.bucket_cap_mb,
        **{
            f"{name}_{part}{unit}": getattr(quantity, part, "")
            for (name, unit), quantity in quantities.items()
            for part in ("p5", "nominal", "p95")
        },
        "straggler_s": point.straggler_s,
        **{f"breakdown_{cause}_s": point.breakdown_s.get(cause, 0.0) for cause in _CSV_CAUSES},
        "bottleneck_link": point.bottleneck_link or "",
        "weakest_evidence": point.weakest_evidence.value,
    }

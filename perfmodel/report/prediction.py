"""Tables of a prediction."""

from collections.abc import Mapping

from perfmodel.documents.prediction import (
    Interval,
    PredictedPoint,
    PredictionDocument,
    ScenarioOutcome,
    WhatIfDocument,
)
from perfmodel.explanation import Change, Explanation, Loss, Standing, Verdict
from perfmodel.report.wording import (
    Grid,
    count_interval,
    counted,
    duration_interval,
    gradients,
    grid,
    interval,
    number,
    one_line,
    percent,
    scaling_words,
    short_label,
)
from perfmodel.step.program import Cause
from perfmodel.units import Seconds, format_duration


def prediction_grid(prediction: PredictionDocument) -> Grid:
    """Table of what each number of devices would do."""
    return grid(
        f"{prediction.workload} on {prediction.device_name}, {prediction.scaling} scaling",
        numbers=(
            "De-\nvices",
            "Global\nbatch",
            "Step",
            "Samples/s",
            "Speed-up",
            "Effi-\nciency",
            "Exposed\ncomm.",
        ),
        notes=("Weakest\nevidence",),
        rows=(_row(point) for point in prediction.points),
        caption=_caption(prediction),
    )


def _row(point: PredictedPoint) -> tuple[str, ...]:
    setting = point.setting
    return (
        str(setting.world_size),
        f"{setting.global_batch}\n{setting.local_batch} each",
        duration_interval(point.step_s),
        count_interval(point.samples_per_s),
        interval(point.speedup),
        percent(point.scaling_efficiency.nominal),
        format_duration(point.exposed_comm_s.nominal),
        point.weakest_evidence.value,
    )


def _caption(prediction: PredictionDocument) -> str:
    settings = [point.setting for point in prediction.points]
    buckets = sorted({gradients(setting) for setting in settings if setting.world_size > 1})
    *fewer, most = sorted({setting.accumulation for setting in settings})
    return " ".join(
        (
            f"Predicted, {scaling_words(prediction)}; 'each' is the batch per device and step,",
            f"of {' or '.join((*map(str, fewer), counted(most, 'micro-batch')))};",
            f"bucket cap: {', '.join(buckets) or '-'}.",
            "Step: from the end of one optimizer step to the end of the next, typical of a run.",
            "[p5-p95]: 90 % of outcomes should lie inside.",
            "Speed-up: samples/s over one device without DDP. Exposed: not hidden behind compute.",
        )
    )


def measured_grid(prediction: PredictionDocument) -> Grid:
    """Table of real runs of the same workload."""
    rows = (
        (
            str(point.world_size),
            str(point.micro_batch),
            format_duration(point.step_s),
            "-" if point.speedup is None else number(point.speedup),
        )
        for point in prediction.measured
    )
    return grid(
        f"{prediction.workload}: real runs for comparison",
        numbers=("Devices", "Micro-batch", "Step, measured", "Speed-up, measured"),
        rows=rows,
    )


def breakdown_grid(prediction: PredictionDocument) -> Grid:
    """Table of where the time of a step goes, by cause."""
    causes = causes_of(prediction)
    rows = (
        (
            str(point.setting.world_size),
            *(format_duration(point.breakdown_s.get(cause, 0.0)) for cause in causes),
            format_duration(point.straggler_s),
            duration_interval(point.exposed_comm_s),
        )
        for point in prediction.points
    )
    return grid(
        f"{prediction.workload}: time on the critical path by cause",
        numbers=(
            "Devices",
            *(cause.replace("_", " ") for cause in causes),
            "Waiting for stragglers",
            "Exposed communication",
        ),
        rows=rows,
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


def evidence_grid(prediction: PredictionDocument) -> Grid:
    """Table of where each term of each point comes from."""
    terms = sorted({term for point in prediction.points for term in point.evidence})
    rows = (
        (
            str(point.setting.world_size),
            *(point.evidence[term].value if term in point.evidence else "-" for term in terms),
        )
        for point in prediction.points
    )
    return grid(
        f"{prediction.workload}: evidence per term",
        numbers=("Devices",),
        notes=terms,
        rows=rows,
    )


#: Less than this share of a step is rounding.
_SMALLEST_SHARE = 1e-6


def explanation_lines(explanation: Explanation) -> list[str]:
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
    return lines


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


def whatif_grid(document: WhatIfDocument) -> Grid:
    """One scenario per row, each against the first."""
    return grid(
        f"{document.scenarios[0].workload} on {document.scenarios[0].device_name}: what if",
        text=("Scenario",),
        numbers=("Step", "Samples/s", "Speed-up", "Ratio to\nthe first"),
        notes=("Weakest\nevidence",),
        rows=[_row_whatif(scenario) for scenario in document.scenarios],
        caption="[p5-p95]: 90 % of outcomes should lie inside. Speed-up: over one device of the same "
        "scenario. Ratio: samples/s over those of the first, draw by draw on the same machine, so that "
        "shared errors cancel.",
    )


def _row_whatif(scenario: ScenarioOutcome) -> tuple[str, ...]:
    point, contrast = scenario.point, scenario.contrast
    return (
        "\n".join(map(_scenario_line, scenario.name.split(", "))),
        duration_interval(point.step_s),
        count_interval(point.samples_per_s),
        interval(point.speedup),
        "-" if contrast is None else interval(contrast.throughput_ratio),
        point.weakest_evidence.value,
    )


def _scenario_line(change: str) -> str:
    """A change that leaves room for the numbers; its value stays whole."""
    if len(change) <= _WIDEST_CHANGE:
        return change
    name, _, value = change.partition("=")
    if len(name) >= _WIDEST_CHANGE:
        name = name.replace(".", ".\n", 1)
    return f"{name}=\n{value}"


def whatif_lines(document: WhatIfDocument) -> list[str]:
    """What each scenario runs, which causes changed, and what must be known first."""
    first = document.scenarios[0]
    lines = []
    for scenario in document.scenarios:
        point = scenario.point
        label = f"{short_label(point.setting)}, {scenario.scaling} scaling"
        lines.append(f"{scenario.name}: {label}, global batch {point.setting.global_batch}")
        lines += [] if scenario is first else _cause_lines(first, scenario)
    return [*lines, *(f"caveat: {caveat}" for caveat in document.caveats)]


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
    return Interval(p5=-difference.p95, nominal=-difference.nominal, p95=-difference.p5)


def _time(seconds: Seconds) -> str:
    return format_duration(max(0.0, seconds))


def fields_lines(fields: list[tuple[str, str, str]]) -> list[str]:
    """Name, example and meaning of every field that can be set."""
    width = max(len(f"{name}={example}") for name, example, _ in fields)
    return [f"{f'{name}={example}':{width}}  {meaning}" for name, example, meaning in fields]

"""Scenarios side by side as tables and sentences."""

from collections.abc import Mapping

from perfmodel.documents.prediction import Interval
from perfmodel.documents.whatif import ScenarioOutcome, WhatIfDocument
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import (
    count_interval,
    duration_interval,
    interval,
    one_line,
    percent,
    short_label,
)
from perfmodel.units import Seconds, format_duration

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
        rows=[_row(scenario) for scenario in document.scenarios],
        caption="[p5-p95]: 90 % of outcomes should lie inside. Speed-up: over one device of the same "
        "scenario. Ratio: samples/s over those of the first, draw by draw on the same machine, so that "
        "shared errors cancel.",
    )


def _row(scenario: ScenarioOutcome) -> tuple[str, ...]:
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
    if ratio.p5 == ratio.p95 == 1 and contrast.step_difference_s.p50 == 0:
        return ["  no difference"]
    if max(abs(ratio.p5 - 1), abs(ratio.p95 - 1)) < _SMALLEST_RATIO:
        return [f"  samples/s differ by less than {100 * _SMALLEST_RATIO:g} %"]
    samples = first.point.setting.global_batch
    share = samples / scenario.point.setting.global_batch
    same = "" if share == 1 else f" (for the same {samples} samples)"
    difference = one_line(duration_interval(_magnitude(contrast.step_difference_s)))
    sign = "less" if contrast.step_difference_s.p50 < 0 else "more"
    pairing = "" if contrast.is_paired else "; another machine, not paired"
    faster = f"more samples/s with {percent(contrast.probability_faster)}"
    path = (
        {cause.value: time_s for cause, time_s in first.point.breakdown_s.items()},
        {cause.value: time_s for cause, time_s in scenario.point.breakdown_s.items()},
    )
    smallest_s = SMALLEST_SHARE * first.point.step_s.p50
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
    if difference.p50 >= 0:
        return difference
    return Interval(p5=-difference.p95, p50=-difference.p50, p95=-difference.p5)


def _time(seconds: Seconds) -> str:
    return format_duration(max(0.0, seconds))


def fields_lines(fields: list[tuple[str, str, str]]) -> list[str]:
    """Name, example and meaning of every field that can be set."""
    width = max(len(f"{name}={example}") for name, example, _ in fields)
    return [f"{f'{name}={example}':{width}}  {meaning}" for name, example, meaning in fields]

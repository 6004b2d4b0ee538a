"""Layouts side by side as a table and sentences."""

from perfmodel.documents.layout import (
    LayoutPredictionDocument,
    LayoutScenario,
    LayoutWhatIfDocument,
)
from perfmodel.report.grid import Grid, grid
from perfmodel.report.layout import PARTS
from perfmodel.report.whatif import SMALLEST_SHARE
from perfmodel.report.wording import count_interval, duration_interval, interval, percent
from perfmodel.units import Seconds, format_bytes, format_duration


def layout_whatif_grid(document: LayoutWhatIfDocument) -> Grid:
    """One layout per row, each against the first."""
    trained = document.scenarios[0].prediction.trained
    device = document.scenarios[0].prediction.device_name
    return grid(
        f"{trained.name} on {trained.devices:,} x {device}: what if",
        text=("Scenario",),
        numbers=("Step", "Tokens/s", "MFU", "Memory", "Fits", "Ratio to\nthe first"),
        rows=[_row(scenario) for scenario in document.scenarios],
        caption="[p5-p95]: 90 % of outcomes should lie inside. Memory: of the fullest rank. Ratio: tokens/s "
        "over those of the first; what both rest on alike cancels.",
    )


def _row(scenario: LayoutScenario) -> tuple[str, ...]:
    found, ratio = scenario.prediction, scenario.throughput_ratio
    fullest = max(stage.needed_bytes for stage in found.memory)
    fits = found.fit_probability
    return (
        scenario.name.replace(", ", "\n"),
        duration_interval(found.step_s),
        count_interval(found.tokens_per_s),
        percent(found.mfu.p50),
        format_bytes(fullest),
        "-" if fits is None else percent(fits),
        "-" if ratio is None else interval(ratio),
    )


def layout_whatif_lines(document: LayoutWhatIfDocument) -> list[str]:
    """The layout of each scenario, which parts of the step changed, and caveats."""
    first = document.scenarios[0].prediction
    smallest_s = SMALLEST_SHARE * first.step_s.p50
    lines = []
    for scenario in document.scenarios:
        found = scenario.prediction
        lines.append(
            f"{scenario.name}: {found.trained.name}, {found.layout}, {found.trained.devices:,} devices, "
            f"{found.trained.global_batch:,} sequences per step"
        )
        if scenario.probability_faster is not None:
            lines.append(f"  more tokens/s with {percent(scenario.probability_faster)}")
            lines += _moved(scenario, first, smallest_s)
    texts = dict.fromkeys(c for each in document.scenarios for c in each.prediction.caveats)
    return [*lines, *(f"caveat: {text}" for text in texts)]


def _moved(
    scenario: LayoutScenario, first: LayoutPredictionDocument, smallest_s: Seconds
) -> list[str]:
    before_s, after_s = first.parts_s, scenario.prediction.parts_s
    pairs = [(name, getattr(before_s, key), getattr(after_s, key)) for name, key in PARTS]
    return [
        f"  {name}: {format_duration(max(0.0, before))} -> {format_duration(max(0.0, after))}"
        for name, before, after in sorted(pairs, key=lambda pair: -abs(pair[2] - pair[1]))
        if abs(after - before) >= smallest_s
    ]

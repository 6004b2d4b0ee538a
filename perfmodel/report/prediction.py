"""Predictions, what-ifs and explanations as tables, lines and CSV."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any, Final

from perfmodel.documents.prediction import (
    Contrast,
    GrowthDocument,
    LargeModelStep,
    PredictedPoint,
    PredictionDocument,
    ScalingAdvice,
    ScenarioOutcome,
    WhatIfDocument,
)
from perfmodel.report import (
    Table,
    caveat_lines,
    counted,
    duration_interval,
    gradients,
    number,
    one_line,
    percent,
    scaling_words,
    short_label,
    table,
)
from perfmodel.statistics import DEVIATE_90, Interval
from perfmodel.step import Cause
from perfmodel.units import Seconds, format_bytes, format_duration, format_rate

if TYPE_CHECKING:
    from perfmodel.explanation import Change, Explanation, Loss
    from perfmodel.machine import InferredMachine

#: A part of the step that changes by less than this share of the first scenario's is not worth a line.
_SMALLEST_SHARE: Final = 0.001
#: Nor is a ratio of samples per second that is nearer to 1.
_SMALLEST_RATIO: Final = 0.001
#: Less than this share of a step is rounding.
_ROUNDING: Final = 1e-6
#: Characters on one line beside the columns of numbers, on 80 columns.
_WIDEST_CHANGE: Final = 20
#: A factor below this reads better as per cent.
_CLEARLY_MORE: Final = 1.1
#: A measurement that leaves so much of an interval halves it.
_HALF: Final = 0.5
_OUTCOMES: Final = "[p5-p95]: 90 % of outcomes should lie inside."
_PARTS: Final = {
    "compute_s": "compute",
    "tensor_s": "tensor and context collectives",
    "pipeline_s": "pipeline: fill, drain, point-to-point sends",
    "data_s": "gradients and sharded parameters, exposed",
    "other_s": "optimizer, fixed costs, stragglers",
}


def prediction_table(prediction: PredictionDocument) -> Table:
    """What each number of devices, or one layout, would do; readable on 80 columns."""
    for point in prediction.points:
        if point.large_model is not None:
            return _parts_table(prediction, point, point.large_model)
    settings = [point.setting for point in prediction.points]
    buckets = sorted({gradients(setting) for setting in settings if setting.world_size > 1})
    *fewer, most = sorted({setting.accumulation for setting in settings})
    samples = prediction.samples
    last: dict[str, str | Callable[[PredictedPoint], str]] = {
        "Exposed\ncomm.": "exposed_comm_s.nominal:s"
    }
    told = "Exposed: not hidden behind compute."
    if samples is not None:
        last = {"Time to\nsamples": lambda point: duration_interval(samples / point.samples_per_s)}
        told = f"Time: to {samples:,.0f} samples, as many at every batch (see perfmodel batch)."
    return table(
        f"{prediction.workload} on {prediction.device_name}, {prediction.scaling} scaling",
        prediction.points,
        {
            "De-\nvices": "setting.world_size",
            "Global\nbatch": lambda point: (
                f"{point.setting.global_batch}\n{point.setting.local_batch} each"
            ),
            "Step": "step_s",
            "Samples/s": "samples_per_s:k",
            "Speed-up": "speedup",
            "Effi-\nciency": lambda point: (
                percent(point.scaling_efficiency.nominal) if point.scaling_efficiency else "-"
            ),
            **last,
            "<Weakest\nevidence": "weakest_evidence.value",
        },
        caption=f"Predicted, {scaling_words(prediction)}; 'each' is the batch per device and step, "
        f"of {' or '.join((*map(str, fewer), counted(most, 'micro-batch')))}; "
        f"bucket cap: {', '.join(buckets) or '-'}"
        f"{'' if prediction.method is None else f'; {prediction.method}'}. "
        "Step: from the end of one optimizer step to the end of the next, typical of a run. "
        f"{_OUTCOMES} "
        f"Speed-up: samples/s over one device without DDP. {told}",
    )


def prediction_lines(prediction: PredictionDocument, *, verbose: bool = False) -> Iterator[str]:
    """A layout in words, real runs, the links that all-reduces wait for, caveats."""
    runs = [
        f"{point.world_size} x {point.micro_batch}: {format_duration(point.step_s)}"
        + ("" if point.speedup is None else f", speed-up {number(point.speedup)}")
        for point in prediction.measured
    ]
    for point in prediction.points:
        if point.layout:
            yield from _layout_lines(point, verbose=verbose)
    if runs:
        yield f"measured (devices x micro-batch): {'; '.join(runs)}"
    shown = None
    for point in prediction.points:
        if point.bottleneck_link not in (None, shown):
            shown = point.bottleneck_link
            yield f"from {point.setting.world_size} devices on, all-reduce waits for: {shown}"
    yield from caveat_lines(prediction.caveats, verbose=verbose)
    if prediction.scaling_advice is not None:
        yield from advice_lines(prediction.scaling_advice)


def advice_lines(advice: ScalingAdvice) -> Iterator[str]:
    """Where scaling ends and by what; the bandwidth and the measurement that would help."""
    where = f"each doubling up to {advice.devices} devices gains at least 1.5x"
    if advice.knee_devices is not None:
        where = f"beyond {counted(advice.knee_devices, 'device')} each doubling gains < 1.5x"
    limit = advice.limit.replace("_", " ")
    yield f"scaling: {where}"
    yield f"limit: {limit}, {100 * advice.limit_share:.0f} % of the loss at {advice.devices} devices"
    yield f"network: {_needed(advice)}"
    # Which counts to measure, and what keeps the interval wide if they do not halve it.
    ratio, least = advice.interval_ratio, advice.least_ratio
    scatter = "" if least is None else f"; {100 * least:.0f} % of it is scatter of runs"
    if ratio is not None:
        *fewer, most = advice.measure_devices
        counts = " and ".join((*map(str, fewer), counted(most, "device")))
        told = f"measure next: {counts}: interval {100 * (1 - ratio):.0f} % narrower"
        yield told if ratio <= _HALF else f"{told}{scatter}"
    elif least is not None:
        yield f"measure next: no count narrows the interval{scatter}"


def _needed(advice: ScalingAdvice) -> str:
    """The bandwidth that would be enough, as that of a bus."""
    factor, rate = advice.bandwidth_factor, advice.needed_busbw_bytes_per_s
    goal = f"{100 * advice.target_efficiency:.0f} % efficiency"
    if factor is None:
        return f"no bandwidth gives {goal}"
    if factor == 1:
        return f"{goal} is reached"
    speed = "" if rate is None else f"{format_rate(8 * rate, 'b')}, "
    more = f"{factor:.2g} x the" if factor >= _CLEARLY_MORE else f"{100 * (factor - 1):.1f} % more"
    return f"{goal} needs {speed}{more} bandwidth"


def _parts_table(
    document: PredictionDocument, point: PredictedPoint, large: LargeModelStep
) -> Table:
    """The step of a large model by parts."""
    trained = large.trained
    return table(
        f"{trained.name} on {trained.devices} x {document.device_name}: {point.layout}",
        [(name, getattr(large.parts_s, key)) for key, name in _PARTS.items()],
        {
            "<part of the step": "0",
            "time": "1:s",
            "share": lambda part: f"{part[1] / large.formula_step_s:.1%}",
        },
    )


def _memory_lines(point: PredictedPoint, *, verbose: bool) -> Iterator[str]:
    """What a rank of the fullest stage holds, and whether it fits; ``verbose``: of every stage."""
    fullest = max(point.memory, key=lambda stage: stage.needed_bytes, default=None)
    for stage in point.memory if verbose else filter(None, (fullest,)):
        parts = [
            f"{name.replace('_', ' ')} {format_bytes(size)}"
            for name, size in stage.parts_bytes.items()
            if size
        ]
        which = f", stage {stage.stage}" if len(point.memory) > 1 else ""
        yield f"memory of a rank{which}: {format_bytes(stage.needed_bytes)}: {', '.join(parts)}"
    if point.fit_probability is not None and point.capacity_bytes is not None:
        capacity = format_bytes(point.capacity_bytes)
        yield f"fits into {capacity} with probability {point.fit_probability:.0%}"


def _layout_lines(point: PredictedPoint, *, verbose: bool) -> Iterator[str]:
    """One layout in words: evidence, whether it fits into a device."""
    large = point.large_model
    if large is not None:
        step, tokens, mfu, trained = point.step_s, large.tokens_per_s, large.mfu, large.trained
        low, high = format_duration(step.p5), format_duration(step.p95)
        whole = f"{trained.global_batch:,} sequences of {trained.sequence:,} tokens"
        yield f"batch: {whole} a step, all devices"
        yield (
            f"step: {format_duration(step.nominal)} [{low} - {high}], 90 %, evidence "
            f"{point.weakest_evidence}"
        )
        yield f"tokens/s: {tokens.nominal:,.0f} [{tokens.p5:,.0f} - {tokens.p95:,.0f}]"
        yield f"MFU: {mfu.nominal:.1%} [{mfu.p5:.1%} - {mfu.p95:.1%}] of the dense 16-bit peak"
        yield (
            f"parts together: {format_duration(large.formula_step_s)} (simulated: "
            f"{format_duration(large.simulated_step_s)}), before the deviations of the runs"
        )
    else:
        by_evidence: dict[str, list[str]] = {}
        for term, evidence in point.evidence.items():
            by_evidence.setdefault(evidence, []).append(term)
        yield f"layout: {point.layout}"
        yield from (f"{evidence}: {', '.join(terms)}" for evidence, terms in by_evidence.items())
    yield from _memory_lines(point, verbose=verbose)


def measured_table(prediction: PredictionDocument) -> Table:
    """Real runs of the same workload."""
    return table(
        f"{prediction.workload}: real runs for comparison",
        prediction.measured,
        {
            "Devices": "world_size",
            "Micro-batch": "micro_batch",
            "Step, measured": "step_s",
            "Speed-up, measured": "speedup:number",
        },
    )


def growth_table(found: GrowthDocument) -> Table:
    """What more devices than were measured would do; of a series its model, and what tells it from the others."""
    constant = [
        (
            each.model,
            each.machine,
            each.precision,
            f"batch {each.batch:g}" if each.batch else "",
            f"{each.devices_per_node} a node",
        )
        for each in found.series
    ]
    differs = [
        column == 0 or len({*values}) > 1
        for column, values in enumerate(zip(*constant, strict=True))
    ]
    names = [", ".join(filter(None, compress(each, differs))) for each in constant]
    return table(
        "Samples per second on more devices",
        [
            (name, series, point)
            for name, series in zip(names, found.series, strict=True)
            for point in series.points
        ],
        {
            "<Runs": "0",
            "<Measured on": lambda row: ", ".join(map(str, row[1].measured)),
            "Devices": "2.devices",
            "Samples/s": "2.samples_per_s:k",
            "Efficiency": lambda row: _percentages(row[2].efficiency),
        },
        caption="Of all devices. Efficiency: of a device, over one among the fewest that were measured. "
        f"{_OUTCOMES} Evidence: extrapolated.",
    )


def _percentages(share: Interval) -> str:
    return f"{percent(share.nominal)}\n[{100 * share.p5:.1f}-{100 * share.p95:.1f}]"


def growth_lines(found: GrowthDocument, *, verbose: bool = False) -> list[str]:
    """Caveats."""
    return caveat_lines(found.caveats, verbose=verbose)


def breakdown_table(prediction: PredictionDocument) -> Table:
    """Where the time of a step goes, by cause."""

    def spent(cause: Cause) -> Callable[[PredictedPoint], str]:
        return lambda point: format_duration(point.breakdown_s.get(cause, 0.0))

    return table(
        f"{prediction.workload}: time on the critical path by cause",
        prediction.points,
        {
            "Devices": "setting.world_size",
            **{cause.replace("_", " "): spent(cause) for cause in causes_of(prediction)},
            "Waiting for stragglers": "straggler_s",
            "Exposed communication": "exposed_comm_s",
        },
        caption="The causes of a row sum to its step; the last two columns are parts of it, "
        "counted another way.",
    )


def causes_of(prediction: PredictionDocument) -> tuple[Cause, ...]:
    """Causes that take time anywhere in a prediction, in the order of a step."""
    found = {
        c for point in prediction.points for c, time_s in point.breakdown_s.items() if time_s > 0
    }
    return tuple(cause for cause in Cause if cause in found)


def evidence_table(prediction: PredictionDocument) -> Table:
    """Where each term of each point comes from."""

    def of(term: str) -> Callable[[PredictedPoint], str]:
        return lambda point: point.evidence[term].value if term in point.evidence else "-"

    terms = sorted({term for point in prediction.points for term in point.evidence})
    return table(
        f"{prediction.workload}: evidence per term",
        prediction.points,
        {"Devices": "setting.world_size", **{f"<{term}": of(term) for term in terms}},
    )


def whatif_table(document: WhatIfDocument) -> Table:
    """One scenario per row, each against the first."""
    first = document.scenarios[0]
    large = first.point.large_model
    if large is None:
        title = f"{first.workload} on {first.device_name}: what if"
        columns: dict[str, str | Callable[[ScenarioOutcome], str]] = {
            "<Scenario": lambda each: "\n".join(map(_scenario_line, each.name.split(", "))),
            "Step": "point.step_s",
            "Samples/s": "point.samples_per_s:k",
            "Speed-up": "point.speedup",
            "Ratio to\nthe first": "contrast.throughput_ratio",
            "<Weakest\nevidence": "point.weakest_evidence.value",
        }
        caption = (
            "Speed-up: over one device of the same scenario. Ratio: samples/s over those of the "
            "first, draw by draw on the same machine, so that shared errors cancel."
        )
    else:
        title = f"{first.workload} on {large.trained.devices:,} x {first.device_name}: what if"
        columns = {
            "<Scenario": lambda each: each.name.replace(", ", "\n"),
            "Step": "point.step_s",
            "Tokens/s": "point.large_model.tokens_per_s:k",
            "MFU": "point.large_model.mfu.nominal:%",
            "Memory": lambda each: format_bytes(max(s.needed_bytes for s in each.point.memory)),
            "Fits": "point.fit_probability:%",
            "Ratio to\nthe first": "contrast.throughput_ratio",
        }
        caption = (
            "Memory: of the fullest rank. Ratio: tokens/s over those of the first; what both rest "
            "on alike cancels."
        )
    return table(title, document.scenarios, columns, caption=f"{_OUTCOMES} {caption}")


def _scenario_line(change: str) -> str:
    """A change that leaves room for the numbers; its value stays whole."""
    if len(change) <= _WIDEST_CHANGE:
        return change
    name, _, value = change.partition("=")
    if len(name) >= _WIDEST_CHANGE:
        name = name.replace(".", ".\n", 1)
    return f"{name}=\n{value}"


def whatif_lines(document: WhatIfDocument, *, verbose: bool = False) -> Iterator[str]:
    """What each scenario runs, which parts of the step changed, and caveats."""
    first = document.scenarios[0]
    for scenario in document.scenarios:
        point, large = scenario.point, scenario.point.large_model
        if large is None:
            label = f"{short_label(point.setting)}, {scenario.scaling} scaling"
            yield f"{scenario.name}: {label}, global batch {point.setting.global_batch}"
        else:
            trained = large.trained
            yield (
                f"{scenario.name}: {trained.name}, {point.layout}, {trained.devices:,} devices, "
                f"{trained.global_batch:,} sequences per step"
            )
        if scenario.contrast is not None:
            yield from _changes(first, scenario, scenario.contrast)
    yield from caveat_lines(document.caveats, verbose=verbose)


def _changes(
    first: ScenarioOutcome, scenario: ScenarioOutcome, contrast: Contrast
) -> Iterator[str]:
    """Difference of the step, and what changed, for the samples of the first scenario's step."""
    large = [large for each in (first, scenario) if (large := each.point.large_model)]
    if large:
        yield f"  more tokens/s with {percent(contrast.probability_faster)}"
        before_s, after_s = (
            {name: getattr(each.parts_s, key) for key, name in _PARTS.items()} for each in large
        )
        yield from (f"  {line}" for line in _moved(before_s, after_s, first))
        return
    ratio, longer_s = contrast.throughput_ratio, contrast.step_difference_s
    if ratio.p5 == ratio.p95 == 1 and longer_s.nominal == 0:
        yield "  no difference"
        return
    if max(abs(ratio.p5 - 1), abs(ratio.p95 - 1)) < _SMALLEST_RATIO:
        yield f"  samples/s differ by less than {100 * _SMALLEST_RATIO:g} %"
        return
    samples = first.point.setting.global_batch
    share = samples / scenario.point.setting.global_batch
    same = "" if share == 1 else f"; changes below are for the same {samples} samples"
    sign = "less" if longer_s.nominal < 0 else "more"
    difference = one_line(duration_interval(-longer_s if longer_s.nominal < 0 else longer_s))
    faster = f"; more samples/s with {percent(contrast.probability_faster)}"
    if abs(longer_s.nominal) < _SMALLEST_RATIO * first.point.step_s.nominal:
        largest_s = max(abs(longer_s.p5), abs(longer_s.p95))
        difference, sign = f"unchanged [at most {format_duration(largest_s)}", "either way]"
        faster = ""
    yield f"  step {difference} {sign}{faster}{same}"
    for line in _moved(first.point.breakdown_s, scenario.point.breakdown_s, first, share=share):
        yield f"  on the critical path, {line}"
    for line in _moved(first.lost_s, scenario.lost_s, first, share=share):
        yield f"  lost to {line}"


def _moved(
    before_s: Mapping[Any, float],
    after_s: Mapping[Any, float],
    first: ScenarioOutcome,
    *,
    share: float = 1.0,
) -> list[str]:
    """Parts that changed by more than a little, the largest change first; ``share`` scales the second."""
    pairs = {
        part: (before_s.get(part, 0.0), after_s.get(part, 0.0) * share)
        for part in dict.fromkeys([*before_s, *after_s])
    }
    by_size = sorted(pairs.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    return [
        f"{part.replace('_', ' ')}: {format_duration(max(0.0, before))} -> "
        f"{format_duration(max(0.0, after))}"
        for part, (before, after) in by_size
        if abs(after - before) >= _SMALLEST_SHARE * first.point.step_s.nominal
    ]


def explanation_lines(explanation: "Explanation", *, verbose: bool = False) -> Iterator[str]:
    """Ranked causes with their share of the lost time, and one change to try for each.

    One device loses nothing to others: its gains are told in samples per second, not as a speed-up.
    """
    is_alone, step_s = _is_alone(explanation), explanation.step_s
    whole_s, of_whole = step_s, "of the step"
    if not is_alone and explanation.lost_s > 0:
        whole_s, of_whole = explanation.lost_s, "of the lost time"
    yield _headline(explanation)
    if explanation.bottleneck is not None:
        yield f"bottleneck: {explanation.bottleneck}; nothing else, made free, saves as much"
    first: dict[str, int] = {}
    for rank, loss in enumerate(explanation.losses, start=1):
        share = percent(loss.lost_s / whole_s)
        cause = loss.cause.replace("_", " ")
        yield f"{rank}. {cause}: {_ms(loss.lost_s)}, {share} {of_whole} - {loss.what}"
        advice = "nothing that was tried helps"
        same = first.setdefault(loss.one_change, rank)
        if same < rank and loss.one_change:
            advice = f"try the same as for {same}"
        elif loss.one_change:
            advice = f"try {loss.one_change}: {_ms(loss.gain_s)} less, {_gain(explanation, loss)}"
        yield f"   {advice}"
        yield f"   to confirm: {loss.confirm}"
    yield "All that was tried, one at a time:"
    for change in explanation.changes:
        effect = "no difference"
        if abs(change.gain_s) >= _ROUNDING * step_s:
            sign = "-" if change.gain_s > 0 else "+"
            effect = f"step {sign}{_ms(abs(change.gain_s))}, {_gain(explanation, change)}"
        yield f"   {change.what}: {effect}"
    against = "samples/s" if is_alone else "speed-ups"
    yield (
        "Each cause is removed alone, all else as it was; causes overlap, so that they need not "
        f"add up. Gains are per global batch of the setting, {against} over the same baseline."
    )
    yield from caveat_lines(explanation.caveats, verbose=verbose)


def _is_alone(explanation: "Explanation") -> bool:
    return explanation.ideal_speedup == 1


def _headline(explanation: "Explanation") -> str:
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


def _gain(explanation: "Explanation", found: "Loss | Change") -> str:
    if _is_alone(explanation):
        faster = explanation.step_s / (explanation.step_s - found.gain_s) - 1
        return f"samples/s {percent(faster, signed=True)}"
    return f"speed-up {found.gain_speedup:+.2f}"


def _ms(seconds: Seconds) -> str:
    # One unit throughout, so that the lines compare; tiny ones in full.
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-5 else format_duration(seconds)


def parameter_lines(machine: "InferredMachine") -> Iterator[str]:
    """Every parameter with the factor of its 90 % interval, and whether the runs determine it; memory."""
    yield f"{'parameter':20} {'value':>10}  x/ of 90 %"
    for each in machine.fitted_parameters:
        factor = math.exp(DEVIATE_90 * each.log_sigma)
        source = "determined" if each.determined else "prior kept, the runs do not tell"
        yield f"{each.name:20} {each.value:10.4g}  x/ {factor:.2f}  {source}: {each.meaning}"
    if machine.memory is not None:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in machine.memory.factors.items())
        yield f"memory, from {len(machine.memory.runs)} peaks, factors on its parts: {parts}"


def csv_text(prediction: PredictionDocument) -> str:
    """Comma-separated values, one line per number of devices; SI units stand in the headings."""
    found = rows(prediction)
    text = io.StringIO()
    if found:
        writer = csv.DictWriter(text, fieldnames=list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return text.getvalue()


#: Parts of a data-parallel step, a column each.
_CSV_CAUSES: Final = (
    *(Cause.INPUT, Cause.DISPATCH, Cause.FORWARD, Cause.BACKWARD),
    *(Cause.BUCKET, Cause.ALL_REDUCE, Cause.BROADCAST, Cause.OPTIMIZER),
)


def rows(prediction: PredictionDocument) -> list[dict[str, object]]:
    """A row per point; SI units stand in the keys."""
    return [_row(prediction, point) for point in prediction.points]


def scenario_rows(document: WhatIfDocument) -> list[dict[str, object]]:
    """A row per scenario of a what-if."""
    return [{"scenario": each.name, **_row(each, each.point)} for each in document.scenarios]


def _row(asked: PredictionDocument | ScenarioOutcome, point: PredictedPoint) -> dict[str, object]:
    """One point with its interval, parts and evidence."""
    setting = point.setting
    quantities: Mapping[tuple[str, str], Interval | None] = {
        ("step", "_s"): point.step_s,
        ("samples", "_per_s"): point.samples_per_s,
        ("speedup", ""): point.speedup,
        ("scaling_efficiency", "_fraction"): point.scaling_efficiency,
        ("exposed_comm", "_s"): point.exposed_comm_s,
    }
    sizes = ("world_size", "micro_batch", "accumulation", "local_batch", "global_batch")
    return {
        "workload": asked.workload,
        "device_name": asked.device_name,
        "scaling": asked.scaling,
        **{name: getattr(setting, name) for name in sizes},
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

"""Verdicts of all judges as tables and lines: predicted beside measured, errors, gates."""

from collections.abc import Iterable, Iterator
from typing import Final

from perfmodel.documents.verdicts import (
    OVER_NOISE,
    SPEEDUP_MAPE,
    STEP_MAPE,
    Compared,
    ErrorSummary,
    Gate,
    ModelsValidationDocument,
    NetworkVerdict,
    ProfileVerdict,
    PublishedDocument,
    StrategiesDocument,
    ValidationDocument,
    Verdict,
    scatter_alone,
)
from perfmodel.report import (
    Table,
    bucket_cap,
    gradients,
    number,
    percent,
    short_label,
    steal_lines,
    table,
)
from perfmodel.units import format_duration

#: From this share of the allowed error on, runs that differ among themselves say little.
_LARGEST_NOISE_SHARE: Final = 0.75
#: A gate that allows for more noise than this judges nothing.
_MOST_EXPECTED_NOISE: Final = 0.1
#: Further off than this, calibrated settings did not meet noise: something else is wrong.
_NO_NOISE: Final = 0.5
_SUMMARY: Final = {
    "Settings": "num_settings",
    "Bias": "bias:+%",
    "MAPE": "mape:%",
    "Median": "median_absolute:%",
    "Worst": "worst_absolute:%",
}


def _errors(path: str, *headings: str) -> dict[str, str]:
    """Columns of a summary of errors at a path."""
    return {heading: f"{path}.{_SUMMARY[heading]}" for heading in headings}


def _measured(entry: Compared) -> str:
    """A measured step; below it the standard error, and in brackets the repetitions."""
    return (
        f"{format_duration(entry.measured_s)}\n"
        f"+-{percent(entry.measured_relative_error)} ({entry.num_repetitions})"
    )


def _inside(entry: Compared) -> str:
    """Runs inside the interval, of all; of older verdicts whether their mean is."""
    if entry.num_inside is None:
        return "yes" if entry.is_covered else "NO"
    return f"{entry.num_inside}/{entry.num_repetitions}"


def coverage_line(verdict: ProfileVerdict) -> str:
    """Share of single runs inside their intervals, and of means of runs."""
    means = f"means of runs {percent(verdict.coverage)}"
    if verdict.runs_inside is None:
        return f"Coverage of 90 % intervals: {means}"
    return f"Coverage of 90 % intervals: single runs {percent(verdict.runs_inside)}, {means}"


def steps_table(validation: ValidationDocument) -> Table:
    """Each held-out setting, predicted beside measured; readable on 80 columns."""
    return table(
        "Predicted and measured, settings that calibration never saw",
        validation.settings,
        {
            "<Workload": "setting.workload",
            "Devi-\nces": "setting.world_size",
            "Batch\nx accum.": lambda entry: (
                f"{entry.setting.micro_batch} x {entry.setting.accumulation}"
            ),
            "Bucket\ncap": lambda entry: gradients(entry.setting),
            "Predicted": "predicted_s",
            "Measured": _measured,
            "<Error": "signed_error:+%",
            "Runs in\n90 %": _inside,
        },
        caption="Batch: micro-batch per device x accumulation. Measured: below it the standard "
        "error and in brackets the repetitions. Error: predicted over measured minus 1.",
    )


def speedups_table(validation: ValidationDocument) -> Table:
    """Speed-ups, predicted beside measured."""
    return table(
        "Speed-up over one device",
        validation.speedups,
        {
            "<Workload": "workload",
            "Devices": "world_size",
            "Batch x accum.": lambda entry: f"{entry.micro_batch} x {entry.accumulation}",
            "Bucket cap": lambda entry: bucket_cap(entry.bucket_cap_mb),
            "Predicted": "predicted",
            "Measured": "measured:number",
            "Error": "signed_error:+%",
        },
    )


def repeats_table(validation: ValidationDocument) -> Table:
    """Calibrated settings run again: the noise floor."""
    return table(
        "Calibrated settings run again",
        validation.repeats,
        {
            "<Setting": lambda entry: short_label(entry.setting),
            "Calibration": "calibrated_s",
            "Again": "measured_s",
            "Difference": "signed_error:+%",
        },
        caption="Setting: devices x micro-batch x accumulation, bucket cap.",
    )


def summary_lines(validation: ValidationDocument) -> Iterator[str]:
    """Verdict, errors with the noise floor beside them, coverage and gates, one per line."""
    entries: dict[str, ErrorSummary | None] = {
        "In the range": validation.summary,
        "Beyond the range": validation.summary_extrapolated,
        "Noise floor": validation.noise_floor,
        "Speed-up": validation.speedup_summary,
        "Speed-up, beyond": validation.speedup_summary_extrapolated,
        **validation.summary_by_workload,
    }
    yield verdict(validation)
    if validation.expected_noise is not None:
        yield (
            f"Gates allow for this machine's own noise: {percent(validation.expected_noise)} expected "
            "when a calibrated setting runs again"
        )
    for name, summary in entries.items():
        yield f"{name + ':':20} {errors(summary) if summary else 'not measured'}"
    if validation.speedup_scatter is not None:
        scatter = percent(validation.speedup_scatter)
        yield f"Scatter of runs alone makes speed-ups {scatter} off (MAPE)"
    if validation.speedup_noise is not None:
        said = "; too noisy to judge" if _noisy_speedups(validation) else ""
        again = percent(validation.speedup_noise)
        yield f"Noise floor of speed-ups: calibrated ones, again: {again} (MAPE){said}"
    yield coverage_line(validation)
    if validation.speedup_coverage is not None:
        yield f"The same of speed-ups: single runs {percent(validation.speedup_coverage)}"
    yield from gate_lines(validation.gates)
    yield from (f"Not run, out of memory: {label}" for label in validation.too_large)
    if validation.failed:
        yield f"Failed in every run: {len(validation.failed)} settings, not judged"
    yield from (f"failed: {entry.name}: {entry.reason}" for entry in validation.failed)
    yield from steal_lines(validation.steal)


def models_table(validation: ModelsValidationDocument) -> Table:
    """Each run of a model drawn at random, predicted from its trace beside measured."""
    words = {"measured": "measured in place", "curves": "calibrated curves alone"}
    return table(
        f"Models drawn at random (seed {validation.seed}), {words[validation.mode]}",
        validation.models,
        {
            "<Model": "setting.workload",
            "Devi-\nces": "setting.world_size",
            "Micro-\nbatch": "setting.micro_batch",
            "Predicted": "predicted_s",
            "Measured": _measured,
            "<Error": "signed_error:+%",
            "Runs in\n90 %": _inside,
        },
        caption="Model: seed-index and family. Error: predicted over measured minus 1.",
    )


def models_lines(validation: ModelsValidationDocument) -> Iterator[str]:
    """Summary of the errors, and of the gates."""
    entries = {
        f"{validation.mode}, one device": validation.summary,
        f"{validation.mode}, several devices": validation.summary_ddp,
        f"{validation.mode}, one device, last loops alone": validation.summary_later,
    }
    failed = len(validation.failed)
    scatter = scatter_alone(row for row in validation.models if row.setting.world_size == 1)
    yield from (f"{name}: {errors(summary)}" for name, summary in entries.items() if summary)
    if scatter is not None:
        yield f"scatter of runs alone: MAPE {percent(scatter)}"
    yield f"{validation.num_drawn} models drawn with seed {validation.seed}, {failed} failed"
    yield from (f"failed: {entry.name}: {entry.reason}" for entry in validation.failed)
    yield coverage_line(validation)
    yield from gate_lines(validation.gates)
    yield from steal_lines(validation.steal)


def series_table(document: PublishedDocument | NetworkVerdict) -> Table:
    """One row per series and predictor; errors are predicted over measured, minus 1."""
    beyond = {"More\ndevices": "1.mape_beyond:%"}
    return table(
        "Fitted on the small end of each series, judged at the large end"
        if isinstance(document, PublishedDocument)
        else "Collectives of this machine: fitted on a part, judged by the rest",
        [
            (f"{series.name}, {series.predicted}" if index == 0 else "", row)
            for series in document.series
            for index, row in enumerate(series.errors)
        ],
        {
            "<Series": "0",
            "<Predictor": "1.method",
            **_errors("1", "MAPE", "Median", "Worst", "Bias"),
            **(beyond if any(series.num_beyond for series in document.series) else {}),
            "In 90 %": "1.coverage:%",
        },
    )


#: Points of MAPE by which a plain rule has to be better before the product is said to lose.
_LOSES_BY: Final = 0.003


def published_lines(document: PublishedDocument) -> Iterator[str]:
    """Where a plain rule beats the product; extrapolation; every row in or out."""
    lost, num_compared = [], 0
    for series in document.series:
        ours = next((row for row in series.errors if row.method == "perfmodel"), None)
        if ours is None:
            continue
        num_compared += 1
        for rule in series.errors:
            pairs = {"": (ours.mape, rule.mape)}
            if series.num_beyond < series.num_predicted:
                pairs["on more devices "] = (ours.mape_beyond or 0, rule.mape_beyond or 0)
            lost += [
                f"{series.source}: {series.name.partition(';')[0]} ({where}{percent(own)}, "
                f"{rule.method} {percent(other)})"
                for where, (own, other) in pairs.items()
                if own > other + _LOSES_BY
            ]
    times = f"{len(lost)} times in {num_compared} series"
    named = f": {'; '.join(lost)}" if lost else ""
    yield f"a plain rule is better by over {percent(_LOSES_BY)} {times}{named}"
    many = sum(series.num_predicted for series in document.series)
    beyond = sum(series.num_beyond for series in document.series)
    yield (
        f"extrapolated to more devices than fitted: {beyond:,} of {many:,} predictions, their MAPE "
        "under More devices"
    )
    yield from (f"left out: {name}" for name in document.skipped)
    for rows in document.rows:
        out = "".join(f"; {count:,} out: {reason}" for reason, count in rows.left_out.items())
        yield f"rows for {rows.source}: {rows.num_judged:,} judged{out}"


def verdict_lines(document: Verdict) -> list[str]:
    """Each gate on a line."""
    return gate_lines(document.gates)


def strategies_table(document: StrategiesDocument) -> Table:
    """Each stack under its layout."""
    return table(
        "Stacks of layers under real layouts: predicted from the profile alone",
        sorted(document.settings, key=lambda row: (row.family, row.setting.label)),
        {
            "<Family": "family",
            "<Setting": "setting.label",
            "Predicted": "predicted_s",
            "Measured": "measured_s",
            "Error": "signed_error:+%",
            "Runs in\n90 %": _inside,
        },
    )


def families_table(document: StrategiesDocument) -> Table:
    """Errors by family."""
    return table(
        "Errors by family",
        document.families,
        {
            "<Family": "name",
            **_errors("summary", "Settings", "Bias", "MAPE", "Worst"),
            "In 90 %": "coverage:%",
        },
    )


def errors(summary: ErrorSummary) -> str:
    """Bias, MAPE, median and worst in one line."""
    return (
        f"bias {percent(summary.bias, signed=True)}, MAPE {percent(summary.mape)}, "
        f"median {percent(summary.median_absolute)}, worst {percent(summary.worst_absolute)} "
        f"(n={summary.num_settings})"
    )


def gate_lines(gates: Iterable[Gate]) -> list[str]:
    """Each gate on a line, with its value and a rule such as ``at most 6.0 %``."""

    def text(gate: Gate, value: float) -> str:
        return percent(value) if gate.unit == "fraction" else f"{number(value)} {gate.unit}"

    lines = []
    for gate in gates:
        bounds = (("at least", gate.at_least), ("at most", gate.at_most))
        rules = [f"{words} {text(gate, bound)}" for words, bound in bounds if bound is not None]
        rule, word = " and ".join(rules) or "no threshold", "pass" if gate.passed else "FAIL"
        lines.append(f"{word}  {gate.name}: {text(gate, gate.value)}, {rule}")
    return lines


def verdict(validation: ValidationDocument | None) -> str:
    """One line: passed, too noisy to judge, failed and by what, or never checked."""
    if validation is None:
        return "NOT VALIDATED: these predictions have not been checked against fresh runs"
    count = len(validation.gates)
    if noise := too_noisy(validation):
        return f"TOO NOISY TO JUDGE: {noise}"
    if validation.passed:
        return f"PASSED: {count} of {count} gates held"
    missed = [gate.name for gate in validation.gates if not gate.passed]
    names = ", ".join(missed) or "see the log of the run"
    return f"FAILED: {len(missed)} of {count} gates missed ({names})"


def _may_be_noise(validation: ValidationDocument, name: str, noise: float) -> bool:
    """Whether the error that a gate judges may be noise: neither what is allowed nor the error exceeds it by much.

        noise > 0.75 allowed,   error - noise <= margin of the gate on steps over their noise floor

    Where gates grow with the noise that is expected, the margin is what they add to it.
    """
    errors = {gate.name: gate.value for gate in validation.gates}
    allowed = {gate.name: gate.at_most for gate in validation.gates if gate.at_most is not None}
    if name not in allowed or not _LARGEST_NOISE_SHARE * allowed[name] < noise < _NO_NOISE:
        return False
    added = allowed.get(STEP_MAPE, 0.0) - (validation.expected_noise or 0.0)
    return errors[name] - noise <= allowed.get(OVER_NOISE, added)


def _noisy_speedups(validation: ValidationDocument) -> str:
    """How little speed-ups of calibrated settings repeat themselves, if no gate can judge those; else empty."""
    noise = validation.speedup_noise
    if noise is None or not _may_be_noise(validation, SPEEDUP_MAPE, noise):
        return ""
    return f"speed-ups of calibrated settings, run again, are off by {percent(noise)}"


def too_noisy(validation: ValidationDocument) -> str:
    """Which noise leaves gates on step times, or all that were missed, little to judge; empty if none does."""
    missed = {gate.name for gate in validation.gates if not gate.passed}
    return _noisy_steps(validation) or (
        _noisy_speedups(validation) if missed == {SPEEDUP_MAPE} else ""
    )


def _noisy_steps(validation: ValidationDocument) -> str:
    floor, expected = validation.noise_floor, validation.expected_noise
    if validation.passed and expected is None:
        return ""  # gates that do not grow with the noise held all the same
    if floor is None or floor.mape >= _NO_NOISE:
        return ""
    expected = expected or 0.0
    if expected <= _MOST_EXPECTED_NOISE and not _may_be_noise(validation, STEP_MAPE, floor.mape):
        return ""
    if floor.mape >= expected:
        return f"calibrated settings, run again, are off by {percent(floor.mape)}"
    return f"runs differed during calibration: one again would be off by {percent(expected)}"

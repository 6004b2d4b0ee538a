"""Verdicts of all judges as tables and lines: predicted beside measured, errors, gates."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from perfmodel.documents.testbed import JudgedFamily, JudgedStep, TestbedDocument
from perfmodel.documents.verdicts import (
    STEP_MAPE,
    ErrorSummary,
    JudgedStrategy,
    ModelsValidationDocument,
    NetworkVerdict,
    PublishedSeries,
    StrategiesDocument,
    StrategyFamily,
    ValidationDocument,
)
from perfmodel.report.tables import Table, table
from perfmodel.report.wording import (
    bucket_cap,
    duration_interval,
    errors,
    gate_lines,
    gate_rule,
    gate_value,
    gradients,
    interval,
    number,
    percent,
    short_label,
    steal_lines,
    verdict,
)
from perfmodel.units import format_duration

#: From this share of the allowed error on, runs that differ among themselves say little.
_LARGEST_NOISE_SHARE: Final = 0.75


def _signed(error: float) -> str:
    return percent(error, signed=True)


def _held(is_covered: bool) -> str:  # noqa: FBT001 - one fact, one word
    return "yes" if is_covered else "NO"


def steps_table(validation: ValidationDocument) -> Table:
    """Each held-out setting, predicted beside measured; readable on 80 columns."""
    return table(
        "Predicted and measured, settings that calibration never saw",
        validation.settings,
        {
            "<Workload": lambda entry: entry.setting.workload,
            "Devi-\nces": lambda entry: entry.setting.world_size,
            "Batch\nx accum.": lambda entry: (
                f"{entry.setting.micro_batch} x {entry.setting.accumulation}"
            ),
            "Bucket\ncap": lambda entry: gradients(entry.setting),
            "Predicted": lambda entry: duration_interval(entry.predicted_s),
            "Measured": lambda entry: (
                f"{format_duration(entry.measured_s)}\n"
                f"+-{percent(entry.measured_relative_error)} ({entry.num_repetitions})"
            ),
            "<Error": lambda entry: _signed(entry.signed_error),
            "<In\n90 %": lambda entry: _held(entry.is_covered),
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
            "<Workload": lambda entry: entry.workload,
            "Devices": lambda entry: entry.world_size,
            "Batch x accum.": lambda entry: f"{entry.micro_batch} x {entry.accumulation}",
            "Bucket cap": lambda entry: bucket_cap(entry.bucket_cap_mb),
            "Predicted": lambda entry: interval(entry.predicted),
            "Measured": lambda entry: number(entry.measured),
            "Error": lambda entry: _signed(entry.signed_error),
        },
    )


def repeats_table(validation: ValidationDocument) -> Table:
    """Calibrated settings run again: the noise floor."""
    return table(
        "Calibrated settings run again",
        validation.repeats,
        {
            "<Setting": lambda entry: short_label(entry.setting),
            "Calibration": lambda entry: format_duration(entry.calibrated_s),
            "Again": lambda entry: format_duration(entry.measured_s),
            "Difference": lambda entry: _signed(entry.signed_error),
        },
        caption="Setting: devices x micro-batch x accumulation, bucket cap.",
    )


def errors_table(validation: ValidationDocument) -> Table:
    """Errors over many settings, beside what no model could avoid."""
    entries = {
        "In the calibrated range": validation.summary,
        "Beyond the calibrated range": validation.summary_extrapolated,
        **validation.summary_by_workload,
        "Speed-ups, in range": validation.speedup_summary,
        "Speed-ups, beyond": validation.speedup_summary_extrapolated,
        "Noise floor (repeats)": validation.noise_floor,
    }
    return table(
        "Errors",
        [(name, summary) for name, summary in entries.items() if summary is not None],
        {
            "<Over": lambda entry: entry[0],
            "Settings": lambda entry: entry[1].num_settings,
            "Bias": lambda entry: _signed(entry[1].bias),
            "MAPE": lambda entry: percent(entry[1].mape),
            "Median": lambda entry: percent(entry[1].median_absolute),
            "Worst": lambda entry: percent(entry[1].worst_absolute),
        },
        caption=f"{percent(validation.coverage)} of settings lay inside the 90 % interval.",
    )


def gates_table(validation: ValidationDocument) -> Table:
    """The thresholds written down before the run."""
    return table(
        "Gates, written down before the run",
        validation.gates,
        {
            "<Gate": lambda gate: gate.name,
            "<Threshold": gate_rule,
            "Value": lambda gate: gate_value(gate, gate.value),
            "<Result": lambda gate: "pass" if gate.passed else "FAIL",
        },
    )


def summary_lines(validation: ValidationDocument) -> list[str]:
    """Verdict, errors with the noise floor beside them, coverage and gates, one per line."""
    entries: dict[str, ErrorSummary | None] = {
        "In the range": validation.summary,
        "Beyond the range": validation.summary_extrapolated,
        "Noise floor": validation.noise_floor,
        "Speed-up": validation.speedup_summary,
        "Speed-up, beyond": validation.speedup_summary_extrapolated,
        **validation.summary_by_workload,
    }
    covered = sum(entry.is_covered for entry in validation.settings)
    return [
        verdict(validation),
        *(
            f"{name + ':':20} {errors(summary) if summary else 'not measured'}"
            for name, summary in entries.items()
        ),
        (
            f"Coverage: {percent(validation.coverage)} inside the 90 % interval "
            f"({covered} of {len(validation.settings)})"
        ),
        *gate_lines(validation.gates),
        *_noise_lines(validation),
        *steal_lines(validation.steal),
    ]


def _noise_lines(validation: ValidationDocument) -> list[str]:
    """Warning if runs of one and the same setting differ too much to judge anybody."""
    allowed = [gate.at_most for gate in validation.gates if gate.name == STEP_MAPE]
    floor = validation.noise_floor
    if floor is None or not allowed or allowed[0] is None:
        return []
    if floor.mape <= _LARGEST_NOISE_SHARE * allowed[0]:
        return []
    return [
        (
            f"Too noisy to judge: calibrated settings, run again, were off by {percent(floor.mape)}; "
            f"predictions may be off by {percent(allowed[0])}. See perfmodel doctor, and measure longer."
        )
    ]


def models_table(validation: ModelsValidationDocument) -> Table:
    """Each run of an unseen model, predicted from its trace beside measured."""
    return table(
        f"Models that no fit has seen, mode {validation.mode}",
        validation.models,
        {
            "<Model": lambda entry: entry.setting.workload,
            "Devi-\nces": lambda entry: entry.setting.world_size,
            "Micro-\nbatch": lambda entry: entry.setting.micro_batch,
            "Predicted": lambda entry: duration_interval(entry.predicted_s),
            "Measured": lambda entry: format_duration(entry.measured_s),
            "<Error": lambda entry: _signed(entry.signed_error),
            "<Phases": lambda entry: " ".join(map(_signed, entry.phase_errors.values())),
        },
        caption="Error: predicted over measured minus 1. Phases: errors of forward, backward, "
        "optimizer.",
    )


def models_lines(validation: ModelsValidationDocument) -> list[str]:
    """Summary of the errors, and of the gates."""
    entries = {
        "one device": validation.summary,
        **validation.summary_by_phase,
        **validation.summary_by_optimizer,
        "several devices, from the trace alone": validation.summary_ddp,
    }
    return [
        *(f"{name}: {errors(summary)}" for name, summary in entries.items() if summary),
        *gate_lines(validation.gates),
        *steal_lines(validation.steal),
    ]


def series_table(title: str, found: Iterable[PublishedSeries]) -> Table:
    """One row per series and predictor; errors are predicted over measured, minus 1."""
    return table(
        title,
        [
            (f"{series.name}, {series.predicted}" if index == 0 else "", row)
            for series in found
            for index, row in enumerate(series.errors)
        ],
        {
            "<Series": lambda entry: entry[0],
            "<Predictor": lambda entry: entry[1].method,
            "MAPE": lambda entry: percent(entry[1].mape),
            "Median": lambda entry: percent(entry[1].median_absolute),
            "Worst": lambda entry: percent(entry[1].worst_absolute),
            "Bias": lambda entry: _signed(entry[1].bias),
            "In 90 %": lambda entry: (
                "" if entry[1].coverage is None else percent(entry[1].coverage)
            ),
        },
    )


def network_tables(document: NetworkVerdict) -> tuple[Table, Table]:
    """Errors by collective, part held out and predictor; then by the size of the arrays."""
    title = "Collectives of this machine: fitted on a part, judged by the rest"
    by_size = table(
        "By the size of the arrays; noise is what a law without errors would show",
        document.by_size,
        {
            "<Predicted": lambda entry: entry.name,
            "Points": lambda entry: entry.errors.num_settings,
            "MAPE": lambda entry: percent(entry.errors.mape),
            "Median": lambda entry: percent(entry.errors.median_absolute),
            "Bias": lambda entry: _signed(entry.errors.bias),
            "Noise": lambda entry: percent(entry.noise),
        },
    )
    return series_table(title, document.series), by_size


_ON_LINKS: Final[Mapping[str, Callable[[JudgedStep | JudgedStrategy], object]]] = {
    "<Setting": lambda entry: entry.name,
    "Predicted": lambda entry: duration_interval(entry.predicted.step_s),
    "Measured": lambda entry: format_duration(entry.measured_s),
    "Error": lambda entry: _signed(entry.signed_error) + _replayed(entry),
    "CV": lambda entry: percent(entry.variation),
    "Host\nCPU": lambda entry: (
        percent(entry.own_cpu_share) + "!" * getattr(entry, "is_host_limited", False)
    ),
    "<In\n90 %": lambda entry: _held(entry.is_covered),
}
_ON_LINKS_CAPTION: Final = (
    "Step: median of the run. Error: predicted over measured minus 1. CV: standard deviation over "
    "mean of the steps. Host CPU: what the ranks needed of the machine that plays them."
)


def _replayed(entry: JudgedStep | JudgedStrategy) -> str:
    error = getattr(entry, "replayed_error", None)
    return "" if error is None else f"\n({_signed(error)})"


def _limit(entry: JudgedStep) -> str:
    return entry.limit if entry.is_limit_named else f"{entry.limit}\nNOT {entry.predicted.limit}"


def strategies_tables(document: StrategiesDocument) -> tuple[Table, Table]:
    """Each setting over shaped links, and errors by strategy, all together last."""
    return table(
        "Real strategies over shaped links, emulated devices: predicted from runs of 2 ranks",
        sorted(document.settings, key=lambda setting: (setting.family, setting.name)),
        _ON_LINKS,
        caption=_ON_LINKS_CAPTION,
    ), table("Errors by strategy", document.families, _family_columns("Strategy"))


def testbed_tables(document: TestbedDocument) -> tuple[Table, Table]:
    """Each setting over shaped links, and errors by family, the two judged groups last."""
    settings = table(
        "Real DDP over shaped links, emulated devices: predicted from runs of 1 and 2 ranks",
        sorted(document.settings, key=lambda step: (step.family, step.name)),
        {**_ON_LINKS, "<Limited by": _limit},
        caption=f"{_ON_LINKS_CAPTION} From 60 % on it, and not links or devices, is the limit "
        "(marked !). Error in brackets: the simulation is fed the very noise of the run. Limited "
        "by: the busiest resource, measured; predicted below it where that was another by 5 % and more.",
    )
    families = table(
        "Errors by family",
        (*document.families, *document.groups),
        {
            **_family_columns("Family"),
            "Limit named": lambda family: percent(family.limits_named),
        },
    )
    return settings, families


def _family_columns(
    name: str,
) -> dict[str, Callable[[StrategyFamily | JudgedFamily], object]]:
    return {
        f"<{name}": lambda family: family.name,
        "Settings": lambda family: family.summary.num_settings,
        "Bias": lambda family: _signed(family.summary.bias),
        "MAPE": lambda family: percent(family.summary.mape),
        "Worst": lambda family: percent(family.summary.worst_absolute),
        "In 90 %": lambda family: percent(family.coverage),
    }

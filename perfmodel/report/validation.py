"""Tables of a validation."""

from perfmodel.documents.verdicts import ComparedSetting, ErrorSummary, ValidationDocument
from perfmodel.report.wording import (
    Grid,
    bucket_cap,
    duration_interval,
    gate_rule,
    gate_value,
    gradients,
    grid,
    interval,
    number,
    percent,
    short_label,
)
from perfmodel.units import format_duration


def validation_grid(validation: ValidationDocument) -> Grid:
    """Table of each held-out setting, predicted beside measured."""
    return grid(
        "Predicted and measured, settings that calibration never saw",
        text=("Workload",),
        numbers=("Devi-\nces", "Batch\nx accum.", "Bucket\ncap", "Predicted", "Measured"),
        notes=("Error", "In\n90 %"),
        rows=(_row(entry) for entry in validation.settings),
        caption="Batch: micro-batch per device x accumulation. Measured: at the machine speed of "
        "the calibration, below it as the clock showed it (raw), then the standard error and in "
        "brackets the repetitions. Error: predicted over measured minus 1, below it against raw.",
    )


def _row(entry: ComparedSetting) -> tuple[str, ...]:
    setting = entry.setting
    uncertainty = f"+-{percent(entry.measured_relative_error)} ({entry.num_repetitions})"
    raw = format_duration(entry.measured_raw_s)
    error, error_raw = (
        percent(value, signed=True) for value in (entry.signed_error, entry.signed_error_raw)
    )
    return (
        setting.workload,
        str(setting.world_size),
        f"{setting.micro_batch} x {setting.accumulation}",
        gradients(setting),
        duration_interval(entry.predicted_s),
        f"{format_duration(entry.measured_s)}\nraw {raw}\n{uncertainty}",
        f"{error}\nraw {error_raw}",
        "yes" if entry.is_covered else "NO",
    )


def speedup_grid(validation: ValidationDocument) -> Grid:
    """Table of speed-ups, predicted beside measured."""
    rows = (
        (
            entry.workload,
            str(entry.world_size),
            f"{entry.micro_batch} x {entry.accumulation}",
            bucket_cap(entry.bucket_cap_mb),
            interval(entry.predicted),
            number(entry.measured),
            percent(entry.signed_error, signed=True),
        )
        for entry in validation.speedups
    )
    return grid(
        "Speed-up over one device",
        text=("Workload",),
        numbers=("Devices", "Batch x accum.", "Bucket cap", "Predicted", "Measured", "Error"),
        rows=rows,
    )


def repeats_grid(validation: ValidationDocument) -> Grid:
    """Table of calibrated settings run again: the noise floor."""
    rows = (
        (
            short_label(entry.setting),
            format_duration(entry.calibrated_s),
            format_duration(entry.measured_s),
            format_duration(entry.measured_raw_s),
            percent(entry.signed_error, signed=True),
            percent(entry.signed_error_raw, signed=True),
        )
        for entry in validation.repeats
    )
    return grid(
        "Calibrated settings run again",
        text=("Setting",),
        numbers=("Calibration", "Again", "Again, raw", "Difference", "Difference, raw"),
        rows=rows,
        caption="Setting: devices x micro-batch x accumulation, bucket cap.",
    )


def summary_grid(validation: ValidationDocument) -> Grid:
    """Table of errors over many settings, beside what no model could avoid."""
    entries: dict[str, ErrorSummary | None] = {
        "In range, at calibrated machine speed": validation.summary,
        "In range, raw": validation.summary_raw,
        "Beyond the calibrated range": validation.summary_extrapolated,
        **validation.summary_by_workload,
        "Speed-ups, in range": validation.speedup_summary,
        "Speed-ups, beyond": validation.speedup_summary_extrapolated,
        "Noise floor (repeats)": validation.noise_floor,
    }
    slowdown = percent(validation.machine_slowdown - 1, signed=True)
    rows = (_summary(name, summary) for name, summary in entries.items() if summary is not None)
    return grid(
        "Errors",
        text=("Over",),
        numbers=("Settings", "Bias", "MAPE", "Median", "Worst"),
        rows=rows,
        caption=f"The speed probe took {slowdown} time against calibration; "
        f"{percent(validation.coverage)} of settings lay inside the 90 % "
        "interval.",
    )


def _summary(name: str, summary: ErrorSummary) -> tuple[str, ...]:
    return (
        name,
        str(summary.num_settings),
        percent(summary.bias, signed=True),
        percent(summary.mape),
        percent(summary.median_absolute),
        percent(summary.worst_absolute),
    )


def gates_grid(validation: ValidationDocument) -> Grid:
    """Table of the thresholds written down before the run."""
    rows = (
        (
            gate.name,
            gate_rule(gate),
            gate_value(gate, gate.value),
            "pass" if gate.passed else "FAIL",
        )
        for gate in validation.gates
    )
    return grid(
        "Gates, written down before the run",
        text=("Gate", "Threshold"),
        numbers=("Value",),
        notes=("Result",),
        rows=rows,
    )

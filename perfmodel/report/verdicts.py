"""Table of a validation on held-out models."""

from collections.abc import Iterable, Iterator

from rich.table import Table

from perfmodel.documents.testbed import JudgedFamily, JudgedStep, TestbedDocument
from perfmodel.documents.verdicts import (
    ComparedModel,
    ErrorSummary,
    JudgedStrategy,
    ModelsValidationDocument,
    NetworkVerdict,
    PublishedDocument,
    PublishedSeries,
    StrategiesDocument,
    StrategyFamily,
)
from perfmodel.report.tables import rich_table
from perfmodel.report.wording import (
    Grid,
    duration_interval,
    error_cells,
    gate_lines,
    grid,
    percent,
    steal_lines,
)
from perfmodel.units import format_duration


def models_table(validation: ModelsValidationDocument) -> Table:
    """Table of each held-out run, predicted from its trace beside measured."""
    return rich_table(
        grid(
            f"Models that no fit has seen, mode {validation.mode}",
            text=("Model",),
            numbers=("Devi-\nces", "Micro-\nbatch", "Predicted", "Measured"),
            notes=("Error", "Phases"),
            rows=(_row(entry) for entry in validation.models),
            caption="Measured: at the machine speed of the calibration. Error: predicted over "
            "measured minus 1; below it against processor time. Phases: errors of forward, "
            "backward, optimizer.",
        )
    )


def _row(entry: ComparedModel) -> tuple[str, ...]:
    error, against_processor = (
        percent(value, signed=True) for value in (entry.signed_error, entry.signed_error_processor)
    )
    return (
        entry.setting.workload,
        str(entry.setting.world_size),
        str(entry.setting.micro_batch),
        duration_interval(entry.predicted_s),
        format_duration(entry.measured_s),
        f"{error}\ncpu {against_processor}",
        " ".join(percent(value, signed=True) for value in entry.phase_errors.values()),
    )


def models_lines(validation: ModelsValidationDocument) -> Iterator[str]:
    """Summary of the errors, and of the gates."""
    yield _line("one device", validation.summary)
    yield _line("one device, processor time", validation.summary_processor)
    for name, summary in validation.summary_by_phase.items():
        yield _line(name, summary)
    for name, summary in validation.summary_by_optimizer.items():
        yield _line(name, summary)
    if validation.summary_ddp is not None:
        yield _line("several devices, from the trace alone", validation.summary_ddp)
    yield f"machine speed: {validation.machine_slowdown:.3f} x the probe time of the calibration"
    yield from gate_lines(validation.gates)
    yield from steal_lines(validation.steal)


def _line(name: str, summary: ErrorSummary) -> str:
    return (
        f"{name}: MAPE {percent(summary.mape)}, bias {percent(summary.bias, signed=True)}, "
        f"worst {percent(summary.worst_absolute)} ({summary.num_settings} runs)"
    )


def published_table(document: PublishedDocument) -> Table:
    """One row per series and predictor; errors are predicted over measured, minus 1."""
    title = "Fitted on the small end of each series, judged at the large end"
    return _table(title, document.series)


def network_table(document: NetworkVerdict) -> Table:
    """One row per collective, part held out, and predictor."""
    title = "Collectives of this machine: fitted on a part, judged by the rest"
    return _table(title, document.series)


def network_size_table(document: NetworkVerdict) -> Table:
    """One row per part held out and class of array sizes, all collectives together."""
    rows = [
        (
            entry.name,
            str(entry.errors.num_settings),
            percent(entry.errors.mape),
            percent(entry.errors.median_absolute),
            percent(entry.errors.bias, signed=True),
            percent(entry.noise),
        )
        for entry in document.by_size
    ]
    return rich_table(
        grid(
            "By the size of the arrays; noise is what a law without errors would show",
            text=("Predicted",),
            numbers=("Points", "MAPE", "Median", "Bias", "Noise"),
            rows=rows,
        )
    )


def _table(title: str, found: Iterable[PublishedSeries]) -> Table:
    rows = [
        (
            f"{series.name}, {series.predicted}" if index == 0 else "",
            row.method,
            percent(row.mape),
            percent(row.median_absolute),
            percent(row.worst_absolute),
            percent(row.bias, signed=True),
            "" if row.coverage is None else percent(row.coverage),
        )
        for series in found
        for index, row in enumerate(series.errors)
    ]
    return rich_table(
        grid(
            title,
            text=("Series", "Predictor"),
            numbers=("MAPE", "Median", "Worst", "Bias", "In 90 %"),
            rows=rows,
        )
    )


def strategy_settings_grid(document: StrategiesDocument) -> Grid:
    """Table of each setting, predicted beside measured."""
    settings = sorted(document.settings, key=lambda setting: (setting.family, setting.name))
    return grid(
        "Real strategies over shaped links, emulated devices: predicted from runs of 2 ranks",
        text=("Setting",),
        numbers=("Predicted", "Measured", "Error", "CV", "Host\nCPU"),
        notes=("In\n90 %",),
        rows=(_row_strategies_grids(setting) for setting in settings),
        caption="Step: median of the run. Error: predicted over measured minus 1. CV: standard deviation "
        "over mean of the steps. Host CPU: what the ranks needed of the machine that plays them.",
    )


def _row_strategies_grids(setting: JudgedStrategy) -> tuple[str, ...]:
    return (
        setting.name,
        duration_interval(setting.predicted.step_s),
        format_duration(setting.measured_s),
        percent(setting.signed_error, signed=True),
        percent(setting.variation),
        percent(setting.own_cpu_share),
        "yes" if setting.is_covered else "NO",
    )


def strategy_families_grid(document: StrategiesDocument) -> Grid:
    """Table of errors by strategy, all together last."""
    return grid(
        "Errors by strategy",
        text=("Strategy",),
        numbers=("Settings", "Bias", "MAPE", "Worst", "In 90 %"),
        rows=(_family(family) for family in document.families),
    )


def _family(family: StrategyFamily) -> tuple[str, ...]:
    return (family.name, *error_cells(family.summary), percent(family.coverage))


def settings_grid(document: TestbedDocument) -> Grid:
    """Table of each setting, predicted beside measured."""
    steps = sorted(document.settings, key=lambda step: (step.family, step.name))
    return grid(
        "Real DDP over shaped links, emulated devices: predicted from runs of 1 and 2 ranks",
        text=("Setting",),
        numbers=("Predicted", "Measured", "Error", "CV", "Host\nCPU"),
        notes=("In\n90 %", "Limited by"),
        rows=(_row_testbed_grids(step) for step in steps),
        caption="Step: median of the run. Error: predicted over measured minus 1; in brackets when the "
        "simulation is fed the very noise of the run. CV: standard deviation over mean of the steps. "
        "Host CPU: what the ranks needed of the machine that plays them; from 60 % on it, and not links "
        "or devices, is the limit (marked !). Limited by: the busiest resource, measured; predicted "
        "below it where that was another by 5 % and more.",
    )


def _row_testbed_grids(step: JudgedStep) -> tuple[str, ...]:
    error = percent(step.signed_error, signed=True)
    if step.replayed_error is not None:
        error += f"\n({percent(step.replayed_error, signed=True)})"
    limit = step.limit
    if not step.is_limit_named:
        limit += f"\nNOT {step.predicted.limit}"
    return (
        step.name,
        duration_interval(step.predicted.step_s),
        format_duration(step.measured_s),
        error,
        percent(step.variation),
        percent(step.own_cpu_share) + ("!" if step.is_host_limited else ""),
        "yes" if step.is_covered else "NO",
        limit,
    )


def families_grid(document: TestbedDocument) -> Grid:
    """Table of errors by family, the two judged groups last."""
    return grid(
        "Errors by family",
        text=("Family",),
        numbers=("Settings", "Bias", "MAPE", "Worst", "In 90 %", "Limit named"),
        rows=(_family_testbed_grids(family) for family in (*document.families, *document.groups)),
    )


def _family_testbed_grids(family: JudgedFamily) -> tuple[str, ...]:
    shares = (family.coverage, family.limits_named)
    return (family.name, *error_cells(family.summary), *map(percent, shares))

"""Tables of a verdict on strategies."""

from perfmodel.documents.strategies import JudgedStrategy, StrategiesDocument, StrategyFamily
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import duration_interval, error_cells, percent
from perfmodel.units import format_duration


def settings_grid(document: StrategiesDocument) -> Grid:
    """Table of each setting, predicted beside measured."""
    settings = sorted(document.settings, key=lambda setting: (setting.family, setting.name))
    return grid(
        "Real strategies over shaped links, emulated devices: predicted from runs of 2 ranks",
        text=("Setting",),
        numbers=("Predicted", "Measured", "Error", "CV", "Host\nCPU"),
        notes=("In\n90 %",),
        rows=(_row(setting) for setting in settings),
        caption="Step: median of the run. Error: predicted over measured minus 1. CV: standard deviation "
        "over mean of the steps. Host CPU: what the ranks needed of the machine that plays them.",
    )


def _row(setting: JudgedStrategy) -> tuple[str, ...]:
    return (
        setting.name,
        duration_interval(setting.foretold.step_s),
        format_duration(setting.measured_s),
        percent(setting.signed_error, signed=True),
        percent(setting.variation),
        percent(setting.own_cpu_share),
        "yes" if setting.is_covered else "NO",
    )


def families_grid(document: StrategiesDocument) -> Grid:
    """Table of errors by strategy, all together last."""
    return grid(
        "Errors by strategy",
        text=("Strategy",),
        numbers=("Settings", "Bias", "MAPE", "Worst", "In 90 %"),
        rows=(_family(family) for family in document.families),
    )


def _family(family: StrategyFamily) -> tuple[str, ...]:
    return (family.name, *error_cells(family.summary), percent(family.coverage))

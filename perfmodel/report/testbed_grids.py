"""Tables of a testbed verdict."""

from perfmodel.documents.testbed import JudgedFamily, JudgedStep, TestbedDocument
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import duration_interval, error_cells, percent
from perfmodel.units import format_duration


def settings_grid(document: TestbedDocument) -> Grid:
    """Table of each setting, predicted beside measured."""
    steps = sorted(document.settings, key=lambda step: (step.family, step.name))
    return grid(
        "Real DDP over shaped links, emulated devices: predicted from runs of 1 and 2 ranks",
        text=("Setting",),
        numbers=("Predicted", "Measured", "Error", "CV", "Host\nCPU"),
        notes=("In\n90 %", "Limited by"),
        rows=(_row(step) for step in steps),
        caption="Step: median of the run. Error: predicted over measured minus 1; in brackets when the "
        "simulation is fed the very noise of the run. CV: standard deviation over mean of the steps. "
        "Host CPU: what the ranks needed of the machine that plays them; from 60 % on it, and not links "
        "or devices, is the limit (marked !). Limited by: the busiest resource, measured; predicted "
        "below it where that was another by 5 % and more.",
    )


def _row(step: JudgedStep) -> tuple[str, ...]:
    error = percent(step.signed_error, signed=True)
    if step.replayed_error is not None:
        error += f"\n({percent(step.replayed_error, signed=True)})"
    limit = step.limit
    if not step.is_limit_named:
        limit += f"\nNOT {step.foretold.limit}"
    return (
        step.name,
        duration_interval(step.foretold.step_s),
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
        rows=(_family(family) for family in (*document.families, *document.groups)),
    )


def _family(family: JudgedFamily) -> tuple[str, ...]:
    shares = (family.coverage, family.limits_named)
    return (family.name, *error_cells(family.summary), *map(percent, shares))

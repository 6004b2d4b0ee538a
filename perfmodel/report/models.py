"""Table of a validation on held-out models."""

from collections.abc import Iterator

from rich.table import Table

from perfmodel.documents.models import ComparedModel, ModelsValidationDocument
from perfmodel.documents.validation import ErrorSummary
from perfmodel.report.grid import grid
from perfmodel.report.tables import rich_table
from perfmodel.report.wording import duration_interval, gate_lines, percent, stolen_lines
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
    yield from stolen_lines(validation.stolen)


def _line(name: str, summary: ErrorSummary) -> str:
    return (
        f"{name}: MAPE {percent(summary.mape)}, bias {percent(summary.bias, signed=True)}, "
        f"worst {percent(summary.worst_absolute)} ({summary.num_settings} runs)"
    )

"""Tables for the terminal and for spreadsheets."""

import csv
import io
from collections.abc import Iterator
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from perfmodel.documents.prediction import PredictedPoint, PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import STEP_MAPE, ValidationDocument
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.report.prediction import prediction_grid
from perfmodel.report.profile import (
    collective_grid,
    ddp_grid,
    machine_grid,
    overlap_grid,
    workload_grid,
)
from perfmodel.report.validation import validation_grid
from perfmodel.report.wording import (
    Grid,
    errors,
    gate_lines,
    number,
    percent,
    steal_lines,
    verdict,
)
from perfmodel.step.program import Cause
from perfmodel.units import format_duration

#: From this share of the allowed error on, runs that differ among themselves say little.
_LARGEST_NOISE_SHARE: Final = 0.75

#: Parts of a data-parallel step, a column each.
_CAUSES: Final = (
    Cause.INPUT,
    Cause.DISPATCH,
    Cause.FORWARD,
    Cause.BACKWARD,
    Cause.BUCKET,
    Cause.ALL_REDUCE,
    Cause.BROADCAST,
    Cause.OPTIMIZER,
)


def prediction_table(prediction: PredictionDocument) -> Table:
    """Table of what each number of devices would do; readable on 80 columns."""
    table = rich_table(prediction_grid(prediction))
    if prediction.measured and isinstance(table.caption, Text):
        runs = (
            f"{point.world_size} x {point.micro_batch}: {format_duration(point.step_s)}"
            + ("" if point.speedup is None else f", speed-up {number(point.speedup)}")
            for point in prediction.measured
        )
        table.caption.append(f" Measured (devices x micro-batch): {'; '.join(runs)}.")
    return table


def binding_lines(prediction: PredictionDocument) -> list[str]:
    """With a cluster: which link costs most of an all-reduce, for runs of equal answers."""
    lines, shown = [], None
    for point in prediction.points:
        if point.bottleneck_link not in (None, shown):
            shown = point.bottleneck_link
            lines.append(
                f"from {point.setting.world_size} devices on, all-reduce waits for: {shown}"
            )
    return lines


def validation_table(validation: ValidationDocument) -> Table:
    """Table of each held-out setting, predicted beside measured; readable on 80 columns."""
    return rich_table(validation_grid(validation))


def profile_table(document: ProfileDocument) -> Table:
    """Table of what was measured on a machine; readable on 80 columns."""
    table = rich_table(machine_grid(document))
    for name, what in _profile_rows(document.machine):
        table.add_row(Text(name), Text(what))
    return table


def _profile_rows(profile: MeasuredMachine) -> Iterator[tuple[str, str]]:
    for name, _, parameters, gradients, *_ in workload_grid(profile).rows:
        yield name, f"{parameters} parameters, {gradients} of gradients"
    for name, ranks, small, latency, large, time, busbw in collective_grid(profile).rows:
        yield f"{name}, {ranks}", f"{small} in {latency}; {large} in {time} (busbw {busbw})"
    for ranks, size, compute, comm in overlap_grid(profile).rows:
        yield (
            f"at once, {ranks} ranks",
            f"compute at {compute}, all-reduce of {size} at {comm} of their speeds alone",
        )
    for name, value, spread, is_determined in ddp_grid(profile).rows:
        yield name, f"{value} ({spread}), determined: {is_determined}"
    for sentence in profile.undetermined:
        yield "Not determined", sentence


def rich_table(grid: Grid) -> Table:
    """Table for a terminal; names are text, never markup."""
    table = Table(
        title=Text(grid.title, style="bold"),
        caption=Text(grid.caption) if grid.caption else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0),
    )
    for column in grid.columns:
        table.add_column(
            Text(column.name), justify="left" if column.is_text else "right", overflow="fold"
        )
    for row in grid.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def summary_lines(validation: ValidationDocument) -> list[str]:
    """Verdict, errors with the noise floor beside them, coverage and gates, one per line."""
    floor, beyond = validation.noise_floor, validation.summary_extrapolated
    speedup, speedup_raw = validation.speedup_summary, validation.speedup_summary_raw
    speedup_beyond = validation.speedup_summary_extrapolated
    covered = sum(entry.is_covered for entry in validation.settings)
    slowdown = percent(validation.machine_slowdown - 1, signed=True)
    coverage = percent(validation.coverage)
    return [
        verdict(validation),
        f"At calibrated speed: {errors(validation.summary)}",
        f"Raw (as clocked):    {errors(validation.summary_raw)}",
        f"Beyond the range:    {errors(beyond) if beyond else 'not measured'}",
        f"Noise floor:         {errors(floor) if floor else 'not measured'}",
        f"Speed-up:            {errors(speedup) if speedup else 'not measured'}",
        f"Speed-up, beyond:    {errors(speedup_beyond) if speedup_beyond else 'not measured'}",
        f"Speed-up, raw:       {errors(speedup_raw) if speedup_raw else 'not measured'}",
        *(
            f"{name + ':':20} {errors(part)}"
            for name, part in validation.summary_by_workload.items()
        ),
        f"Machine now: {slowdown} time for the speed probe, against calibration",
        f"Coverage: {coverage} inside the 90 % interval ({covered} of {len(validation.settings)})",
        f"Coverage, raw: {percent(validation.coverage_raw)}",
        *gate_lines(validation.gates),
        *_noise_lines(validation),
        *steal_lines(validation.steal),
    ]


def _noise_lines(validation: ValidationDocument) -> list[str]:
    """Say so if runs of one and the same setting differ too much to judge anybody."""
    allowed = [gate.at_most for gate in validation.gates if gate.name == STEP_MAPE]
    floor = validation.noise_floor
    if floor is None or not allowed or allowed[0] is None:
        return []
    if floor.mape <= _LARGEST_NOISE_SHARE * allowed[0]:
        return []
    line = (
        f"Too noisy to judge: calibrated settings, run again, were off by {percent(floor.mape)} "
        f"themselves, where predictions may be off by {percent(allowed[0])}: see perfmodel doctor, "
        "and measure longer"
    )
    return [line]


def csv_text(prediction: PredictionDocument) -> str:
    """Comma-separated values, one line per number of devices; SI units stand in the headings."""
    rows = [_csv_row(prediction, point) for point in prediction.points]
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _csv_row(prediction: PredictionDocument, point: PredictedPoint) -> dict[str, object]:
    setting = point.setting
    quantities = {
        ("step", "_s"): point.step_s,
        ("samples", "_per_s"): point.samples_per_s,
        ("speedup", ""): point.speedup,
        ("scaling_efficiency", "_fraction"): point.scaling_efficiency,
        ("exposed_comm", "_s"): point.exposed_comm_s,
    }
    return {
        "workload": prediction.workload,
        "device_name": prediction.device_name,
        "scaling": prediction.scaling,
        "world_size": setting.world_size,
        "micro_batch": setting.micro_batch,
        "accumulation": setting.accumulation,
        "local_batch": setting.local_batch,
        "global_batch": setting.global_batch,
        "bucket_cap_mib": setting.bucket_cap_mb,
        **{
            f"{name}_{part}{unit}": getattr(quantity, part)
            for (name, unit), quantity in quantities.items()
            for part in ("p5", "nominal", "p95")
        },
        "straggler_s": point.straggler_s,
        **{f"breakdown_{cause}_s": point.breakdown_s.get(cause, 0.0) for cause in _CAUSES},
        "bottleneck_link": point.bottleneck_link or "",
        "weakest_evidence": point.weakest_evidence.value,
    }

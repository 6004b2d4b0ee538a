"""Tables of a prediction."""

from perfmodel.documents.prediction import PredictedPoint, PredictionDocument
from perfmodel.program.operation import Cause
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import (
    count_interval,
    counted,
    duration_interval,
    gradients,
    interval,
    number,
    percent,
    scaling_words,
)
from perfmodel.units import format_duration


def prediction_grid(prediction: PredictionDocument) -> Grid:
    """Table of what each number of devices would do."""
    return grid(
        f"{prediction.workload} on {prediction.device_name}, {prediction.scaling} scaling",
        numbers=(
            "De-\nvices",
            "Global\nbatch",
            "Step",
            "Samples/s",
            "Speed-up",
            "Effi-\nciency",
            "Exposed\ncomm.",
        ),
        notes=("Weakest\nevidence",),
        rows=(_row(point) for point in prediction.points),
        caption=_caption(prediction),
    )


def _row(point: PredictedPoint) -> tuple[str, ...]:
    setting = point.setting
    return (
        str(setting.world_size),
        f"{setting.global_batch}\n{setting.local_batch} each",
        duration_interval(point.step_s),
        count_interval(point.samples_per_s),
        interval(point.speedup),
        percent(point.scaling_efficiency.p50),
        format_duration(point.exposed_comm_s.p50),
        point.weakest_evidence.value,
    )


def _caption(prediction: PredictionDocument) -> str:
    settings = [point.setting for point in prediction.points]
    buckets = sorted({gradients(setting) for setting in settings if setting.world_size > 1})
    *fewer, most = sorted({setting.accumulation for setting in settings})
    return " ".join(
        (
            f"Predicted, {scaling_words(prediction)}; 'each' is the batch per device and step,",
            f"of {' or '.join((*map(str, fewer), counted(most, 'micro-batch')))};",
            f"bucket cap: {', '.join(buckets) or '-'}.",
            "Step: from the end of one optimizer step to the end of the next, typical of a run.",
            "[p5-p95]: 90 % of outcomes should lie inside.",
            "Speed-up: samples/s over one device without DDP. Exposed: not hidden behind compute.",
        )
    )


def measured_grid(prediction: PredictionDocument) -> Grid:
    """Table of real runs of the same workload."""
    rows = (
        (
            str(point.world_size),
            str(point.micro_batch),
            format_duration(point.step_s),
            "-" if point.speedup is None else number(point.speedup),
        )
        for point in prediction.measured
    )
    return grid(
        f"{prediction.workload}: real runs for comparison",
        numbers=("Devices", "Micro-batch", "Step, measured", "Speed-up, measured"),
        rows=rows,
    )


def breakdown_grid(prediction: PredictionDocument) -> Grid:
    """Table of where the time of a step goes, by cause."""
    causes = causes_of(prediction)
    rows = (
        (
            str(point.setting.world_size),
            *(format_duration(point.breakdown_s.get(cause, 0.0)) for cause in causes),
            format_duration(point.straggler_s),
            duration_interval(point.exposed_comm_s),
        )
        for point in prediction.points
    )
    return grid(
        f"{prediction.workload}: time on the critical path by cause",
        numbers=(
            "Devices",
            *(cause.replace("_", " ") for cause in causes),
            "Waiting for stragglers",
            "Exposed communication",
        ),
        rows=rows,
        caption="The causes of a row sum to its step; the last two columns are parts of it, "
        "counted another way.",
    )


def causes_of(prediction: PredictionDocument) -> tuple[Cause, ...]:
    """Causes that take time anywhere in a prediction, in the order of a step."""
    return tuple(
        cause
        for cause in Cause
        if any(point.breakdown_s.get(cause, 0.0) > 0 for point in prediction.points)
    )


def evidence_grid(prediction: PredictionDocument) -> Grid:
    """Table of where each term of each point comes from."""
    terms = sorted({term for point in prediction.points for term in point.evidence})
    rows = (
        (
            str(point.setting.world_size),
            *(point.evidence[term].value if term in point.evidence else "-" for term in terms),
        )
        for point in prediction.points
    )
    return grid(
        f"{prediction.workload}: evidence per term",
        numbers=("Devices",),
        notes=terms,
        rows=rows,
    )

"""The course of a job as a table and sentences."""

import math

from perfmodel.documents.goodput import CheckpointIntervals, GoodputDocument
from perfmodel.program.job import Job
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import duration_interval, interval, number, one_line, percent
from perfmodel.units import format_duration


def goodput_grid(document: GoodputDocument) -> Grid:
    """Where the time of the job goes."""
    total_s = document.elapsed_mean_s
    rows = [
        (activity, format_duration(spent_s), percent(spent_s / total_s))
        for activity, spent_s in document.spent_mean_s.items()
    ]
    rows.append(("all", format_duration(total_s), percent(1.0)))
    return grid(
        "Time by activity",
        text=("Activity",),
        numbers=("Time", "Share"),
        rows=rows,
        caption=f"Mean of {document.replicas} courses.",
    )


def goodput_lines(document: GoodputDocument) -> list[str]:
    """What the courses say, one sentence per line."""
    job = document.job
    mtbf = "never" if math.isinf(job.mtbf_s) else f"every {format_duration(job.mtbf_s)}"
    effective = document.effective_fraction
    lines = [
        f"Devices: {job.devices}, simulated {document.replicas} times",
        (
            f"End: {one_line(duration_interval(document.elapsed_s))} after the start, for "
            f"{format_duration(job.work_s)} of work (median and 90 % of courses)"
        ),
        (
            f"Effective training time: {percent(effective.p50)} "
            f"[{percent(effective.p5)} - {percent(effective.p95)}]"
        ),
        f"Unplanned stops: {one_line(interval(document.unplanned_stops))}, {mtbf}"
        + _by_cause(document),
        (
            f"Checkpoints: every {format_duration(job.checkpoint_interval_s)} of work, "
            f"{format_duration(job.checkpoint_write_s)} each"
        ),
        *_interval_lines(job, document.intervals),
        _closed_form_line(document),
    ]
    if document.planned_stops_mean:
        lines.insert(4, f"Planned stops: {number(document.planned_stops_mean)}")
    if document.deadline_s is not None and document.deadline_probability is not None:
        lines.append(
            f"Done within {format_duration(document.deadline_s)}: "
            f"{percent(document.deadline_probability)} of the courses"
        )
    return lines + [f"caveat: {caveat}" for caveat in document.caveats]


def _by_cause(document: GoodputDocument) -> str:
    if len(document.stops_mean) < 2:
        return ""
    causes = (f"{name} {number(count)}" for name, count in document.stops_mean.items())
    return f" ({', '.join(causes)})"


def _interval_lines(job: Job, intervals: CheckpointIntervals | None) -> list[str]:
    if math.isinf(job.mtbf_s):
        return ["Best interval: none, as nothing ever fails"]
    if intervals is None:
        return ["Best interval: the shorter the better, as a checkpoint costs nothing"]
    lines = [
        (
            f"Best interval: {format_duration(intervals.exact_s)} by the exact formula, "
            f"{format_duration(intervals.daly_s)} Daly, {format_duration(intervals.young_s)} Young"
        )
    ]
    best = intervals.simulated_best
    if best is not None:
        good = [tried.interval_s for tried in intervals.simulated if tried.is_as_good_as_best]
        lines.append(
            f"Best interval by simulation: {format_duration(best.interval_s)}; not told apart from it: "
            f"{format_duration(min(good))} to {format_duration(max(good))}"
        )
    return lines


def _closed_form_line(document: GoodputDocument) -> str:
    closed_s = document.closed_form_elapsed_s
    if closed_s is None:
        return f"Second opinion: none, {document.closed_form_note}"
    return (
        f"Second opinion ({document.closed_form_note}): {format_duration(closed_s)} on average, the "
        f"simulation {percent(document.elapsed_mean_s / closed_s - 1, signed=True)} "
        f"(standard error {percent(document.elapsed_mean_error_s / document.elapsed_mean_s)})"
    )

"""Tables of a profile."""

import math
from collections.abc import Sequence

import numpy as np

from perfmodel.cost.collectives import bus_factor
from perfmodel.cost.memory import rate_bytes_per_s
from perfmodel.documents.acceptance import Difference, ProfileDiffDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.machine.measured import (
    CheckpointProfile,
    CollectiveProfile,
    CurvePoint,
    MeasuredMachine,
    MeasuredWorkload,
    NoiseScaleProfile,
)
from perfmodel.report.wording import (
    Grid,
    bucket_cap,
    counted,
    duration_interval,
    grid,
    interval,
    listed,
    number,
    percent,
)
from perfmodel.units import MIB, format_bytes, format_duration, format_rate


def machine_grid(document: ProfileDocument) -> Grid:
    """Table of the machine and how steady it was."""
    profile = document.machine
    runs = "behind the host" if profile.asynchronous else "in step with the host"
    facts = {
        "Device": f"{profile.device_name} ({profile.device_kind}, runs {runs})",
        "Ranks": f"{counted(profile.num_nodes, 'node')} x {profile.ranks_per_node}, {profile.backend}",
        "Software": listed(f"{name} {text}" for name, text in document.provenance.versions.items()),
        "Measured": f"{profile.num_rounds} rounds, written {profile.origin.made_utc}",
        "Speed probe": ", ".join(
            f"{format_duration(time_s)} with {counted(world_size, 'rank')} at work"
            for world_size, time_s in profile.speed_probe_s.items()
        ),
        "Steadiness": f"the probe varied by {percent(profile.speed_spread)} (standard deviation)",
        "Dispatch": f"{format_duration(profile.dispatch_s)} of host time per empty operator",
        "Fit, one device": _residual(profile.residual.single_log_errors),
        "Fit, DDP": _residual(profile.residual.ddp_log_errors),
    }
    if profile.checkpoint is not None:
        facts["Checkpoint"] = _checkpoint(profile.checkpoint)
    facts |= {f"Noise scale, {entry.workload}": _noise(entry) for entry in profile.noise_scales}
    return grid("Machine", text=("What", "Value"), rows=facts.items())


def _checkpoint(profile: CheckpointProfile) -> str:
    largest = max(profile.write, key=lambda point: point.at)
    write, read = (
        f"{format_rate(rate_bytes_per_s(points), 'B')} +- {percent(_error_of_largest(points))}"
        for points in (profile.write, profile.read)
    )
    return f"{format_bytes(round(largest.at))} written at {write}, read at {read}"


def _error_of_largest(points: Sequence[CurvePoint]) -> float:
    return max(points, key=lambda point: point.at).relative_error


def _noise(entry: NoiseScaleProfile) -> str:
    return (
        f"{number(entry.noise_scale)} samples +- {percent(entry.relative_error)}, "
        f"{number(entry.at_start)} at the start, {number(entry.at_end)} at the end of "
        f"{len(entry.steps_to_target)} trainings ({entry.samples})"
    )


def _residual(log_errors: tuple[float, ...]) -> str:
    if not log_errors:
        return "no settings were left out in turn"
    sizes = np.abs(np.expm1(np.asarray(log_errors)))
    median, worst = percent(float(np.median(sizes))), percent(float(sizes.max()))
    return (
        f"off by {median} (median), {worst} (worst), "
        f"{len(log_errors)} settings each left out in turn"
    )


def workload_grid(profile: MeasuredMachine) -> Grid:
    """Table of the models that were measured."""
    return grid(
        "Workloads measured",
        text=("Workload", "Sample"),
        numbers=(
            "Parameters",
            "Gradients",
            "FLOP/sample",
            "Operators",
            "Step noise",
            "Ranks",
            "Sensitivity",
        ),
        rows=(_workload(entry) for entry in profile.workloads),
        caption="FLOP: forward and backward. Step noise: p5-p95 of single steps over the typical one, "
        "widest micro-batch. Ranks: standard deviation between ranks. "
        "Sensitivity: share of a slow-down of the speed probe, as an exponent.",
    )


def _workload(entry: MeasuredWorkload) -> tuple[str, ...]:
    workload = entry.workload
    spreads = [np.quantile(noise.ratios, [0.05, 0.95]) for noise in entry.noise if noise.ratios]
    widest = max(spreads, key=lambda pair: float(pair[1] - pair[0]), default=None)
    flop = format_rate(workload.forward_flop + workload.backward_flop, "FLOP").removesuffix("/s")
    return (
        workload.name,
        workload.sample,
        f"{workload.num_parameters:,}",
        format_bytes(workload.gradient_bytes),
        flop,
        str(workload.num_operators),
        "-" if widest is None else f"{number(widest[0])}-{number(widest[1])}",
        percent(entry.rank_spread),
        number(entry.speed_sensitivity),
    )


def steps_grid(profile: MeasuredMachine) -> Grid:
    """Table of whole steps as calibration measured them."""
    rows = (
        (
            step.workload,
            str(step.world_size),
            str(step.micro_batch),
            step.synchronisation,
            bucket_cap(step.bucket_cap_mb) if step.synchronisation == "ddp" else "-",
            format_duration(step.step_s),
            f"+-{percent(step.relative_error)}",
        )
        for step in profile.steps
    )
    return grid(
        "Steps measured",
        text=("Workload",),
        numbers=("Devices", "Micro-batch", "Gradients", "Bucket cap", "Step", "Std. error"),
        rows=rows,
    )


def rates_grid(profile: MeasuredMachine) -> Grid:
    """Table of kernels alone."""
    rows = (
        (
            f"{rate.probe} {rate.dtype}",
            " x ".join(map(str, rate.shape)),
            format_duration(rate.time_s),
            format_rate(rate.flop_per_s, "FLOP"),
            format_rate(rate.bytes_per_s, "B"),
        )
        for rate in profile.rates
    )
    return grid(
        "Kernels alone", text=("Probe", "Shape"), numbers=("Time", "FLOP/s", "B/s"), rows=rows
    )


def collective_grid(profile: MeasuredMachine) -> Grid:
    """Table of collectives at their smallest and largest size."""
    return grid(
        "Collectives alone",
        text=("Collective",),
        numbers=("Devices", "Smallest", "Time", "Largest", "Time", "busbw"),
        rows=(_collective(entry) for entry in profile.collectives),
    )


def overlap_grid(profile: MeasuredMachine) -> Grid:
    """Table of compute and communication beside each other."""
    rows = (
        (
            str(overlap.world_size),
            format_bytes(overlap.size_bytes),
            percent(overlap.compute_speed),
            percent(overlap.comm_speed),
        )
        for overlap in profile.overlaps
    )
    return grid(
        "Compute and an all-reduce at once",
        text=("Devices",),
        numbers=("All-reduce", "Compute runs at", "All-reduce runs at"),
        rows=rows,
        caption="Each as a share of its speed alone; 100 % and 100 % is free overlap.",
    )


def _collective(entry: CollectiveProfile) -> tuple[str, ...]:
    first, last = entry.points[0], entry.points[-1]
    factor = bus_factor(entry.collective, entry.world_size)
    busbw = "-"
    if last.time_s > 0:
        busbw = format_rate(factor * last.at / last.time_s, "B")
    return (
        entry.collective,
        str(entry.world_size),
        format_bytes(first.at),
        format_duration(first.time_s),
        format_bytes(last.at),
        format_duration(last.time_s),
        busbw,
    )


def ddp_grid(profile: MeasuredMachine) -> Grid:
    """Table of what DDP adds to a step, and whether the data determine it."""
    ddp = profile.ddp
    draws = np.asarray(ddp.draws).reshape(-1, len(ddp.names))
    rows = []
    for column, (name, value, is_determined) in enumerate(
        zip(ddp.names, ddp.values, ddp.determined, strict=True)
    ):
        spread = "-"
        if len(draws):
            low, high = np.quantile(draws[:, column], [0.05, 0.95])
            spread = f"{_ddp_value(name, float(low))} to {_ddp_value(name, float(high))}"
        rows.append(
            (name, _ddp_value(name, value), spread, "yes" if is_determined else "NO: assumed")
        )
    return grid(
        "What DDP adds",
        text=("Parameter",),
        numbers=("Value", "90 % of bootstrap"),
        notes=("Determined by the data",),
        rows=rows,
    )


def _ddp_value(name: str, value: float) -> str:
    if name.endswith("_s_per_byte"):
        return f"{format_duration(value * MIB)}/MiB"
    return format_duration(value) if name.endswith("_s") else number(value)


def difference_grid(document: ProfileDiffDocument) -> Grid:
    """What changed beyond noise; the largest of the rest if nothing did."""
    changes = [entry for entry in document.differences if entry.is_change]
    shown = changes or document.differences[:5]
    heading = (
        f"{len(changes)} of {len(document.differences)} parameters changed"
        if changes
        else f"none of {len(document.differences)} parameters changed; the least likely by chance"
    )
    return grid(
        heading,
        text=("Parameter",),
        numbers=("Old", "New", "Change", "z", "q"),
        rows=[_row(entry) for entry in shown],
        caption="z: difference over the uncertainty of both profiles. q: share of chance among all that are as "
        f"unlikely (Benjamini-Hochberg); a change has q <= {document.false_discovery_rate:g}.",
    )


def _row(entry: Difference) -> tuple[str, ...]:
    if entry.is_additive:
        is_rounding = math.isclose(entry.old, entry.new, rel_tol=1e-9)
        change = f"{0.0 if is_rounding else entry.new - entry.old:+.3g}"
    else:
        change = percent(entry.new / entry.old - 1, signed=True)
    return (
        entry.what,
        _value(entry.old, entry.unit),
        _value(entry.new, entry.unit),
        change,
        f"{entry.z:+.1f}",
        f"{entry.adjusted_p:.2g}",
    )


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return format_duration(value)
    return number(value) if unit == "fraction" else f"{value:.3g} {unit}"


def moved_grid(document: ProfileDiffDocument) -> Grid:
    """Predictions with both profiles."""
    return grid(
        "Predictions, weak scaling: devices x micro-batch",
        text=("Setting",),
        numbers=("Old step", "New step", "New over old"),
        notes=("Moved",),
        rows=[
            (
                entry.what,
                duration_interval(entry.old_step_s),
                duration_interval(entry.new_step_s),
                interval(entry.ratio),
                "yes" if entry.is_moved else "no",
            )
            for entry in document.predictions
        ],
    )


def diff_lines(document: ProfileDiffDocument) -> list[str]:
    """What the environment says, what only one profile holds, and what must be known."""
    lines = [f"fact: {path}: {old} -> {new}" for path, (old, new) in document.facts.items()]
    if document.missing:
        lines.append(
            f"not compared: {len(document.missing)} parameters, such as {document.missing[0]}"
        )
    return [*lines, *(f"caveat: {caveat}" for caveat in document.caveats)]

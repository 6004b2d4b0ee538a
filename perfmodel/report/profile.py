"""A profile, the difference of two, and measured collectives beside their fit, as tables and lines."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

import numpy as np

from perfmodel.cost.collectives import bus_factor
from perfmodel.documents.acceptance import Difference, ProfileDiffDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.machine.measured import CollectiveProfile, DdpCosts, LeftOutError, MeasuredMachine
from perfmodel.report import (
    Table,
    bucket_cap,
    caveat_lines,
    counted,
    facts,
    listed,
    number,
    percent,
    table,
)
from perfmodel.units import MIB, format_bytes, format_duration, format_rate


def device_cost_lines(machine: MeasuredMachine) -> Iterator[str]:
    """What whole steps of other models say of a device, and how wrong a step of an unseen family is."""
    costs = machine.device_costs
    if costs is None:
        yield f"{machine.device_name}: measured, no steps of others"
        return
    versions = listed(f"{name} {text}" for name, text in costs.versions.items()) or "not stated"
    yield f"{machine.device_name}: inferred from {costs.num_rows} steps of {costs.num_models} models"
    yield f"source: {costs.source}"
    yield f"versions: {versions}"
    if costs.version_drift:
        drift = math.expm1(costs.version_drift)
        yield f"between versions one step in ten moved by more than {drift:.0%}"
    for each in costs.left_out:
        yield (
            f"{_precision(each.precision)}, {each.memory_format}: {each.num_rows} steps of {each.num_families} "
            f"families, each left out once: MAPE {each.mape:.1%}, 90 % within {math.expm1(each.log_error):.0%}"
        )
    if linked := _linked(machine):
        yield f"links: collectives of up to {linked} GPUs of one node, published times"
    if nodes := machine.cluster:
        yield f"other nodes: {nodes.name}, {nodes.evidence} ({nodes.tiers[-1].source})"
    unknown = len(costs.undetermined)
    known = len(costs.constants) - unknown
    yield f"constants: {known} determined by the steps, {unknown} as other devices say"


def _precision(precision: str) -> str:
    return "16 bit" if precision == "half" else precision


def machines_table(machines: Mapping[str, MeasuredMachine]) -> Table:
    """Machines that come with perfmodel, as far as whole steps of others tell of them."""
    rows = [
        (name, each)
        for name, machine in machines.items()
        if machine.device_costs is not None
        for each in machine.device_costs.left_out
    ]
    columns: dict[str, str | Callable[[tuple[str, LeftOutError]], object]] = {
        "<Machine": "0",
        "<Precision": lambda row: _precision(row[1].precision),
        "<Format": "1.memory_format",
        "<Links": lambda row: f"{links} GPUs" if (links := _linked(machines[row[0]])) else "-",
        "Steps": "1.num_rows",
        "MAPE": "1.mape:.1%",
        "90 % within": lambda row: f"{math.expm1(row[1].log_error):.0%}",
    }
    caption = (
        "Errors of model families that the fit had not seen; perfmodel machines NAME tells more. Links: "
        "of a node, from published NCCL times; -: from a cluster file."
    )
    return table("Machines inferred from whole steps", rows, columns, caption=caption)


def _linked(machine: MeasuredMachine) -> int:
    """Ranks of the largest group whose collectives are known; 0 if none are."""
    return max((group.world_size for group in machine.collectives), default=0)


def measured_lines(machines: Mapping[str, MeasuredMachine]) -> list[str]:
    """Machines that come with perfmodel and were calibrated."""
    return [
        f"measured: {name}, {machine.device_name}, ranks: {machine.max_world_size}; "
        f"{listed(entry.workload.name for entry in machine.workloads)}"
        for name, machine in machines.items()
        if machine.device_costs is None
    ]


def machines_json(machines: Mapping[str, MeasuredMachine]) -> dict[str, object]:
    """The same as JSON."""
    return {
        "measured": {
            name: {
                "device": machine.device_name,
                "ranks": machine.max_world_size,
                "workloads": [entry.workload.name for entry in machine.workloads],
            }
            for name, machine in machines.items()
            if machine.device_costs is None
        },
        "machines": {
            name: {
                "source": costs.source,
                "evidence": "inferred from whole steps",
                "rows": costs.num_rows,
                "models": costs.num_models,
                "versions": dict(costs.versions),
                "linked_gpus": _linked(machine),
                "version_drift": costs.version_drift,
                "left_out": [asdict(each) for each in costs.left_out],
            }
            for name, machine in machines.items()
            if (costs := machine.device_costs) is not None
        },
    }


def profile_table(document: ProfileDocument) -> Table:
    """What was measured on a machine; readable on 80 columns."""
    return facts("Machine", _measured(document))


def _measured(document: ProfileDocument) -> Iterator[tuple[str, str]]:
    profile = document.machine
    runs = "behind the host" if profile.asynchronous else "in step with the host"
    yield "Device", f"{profile.device_name} ({profile.device_kind}, runs {runs})"
    nodes = counted(profile.num_nodes, "node")
    yield "Ranks", f"{nodes} x {profile.ranks_per_node}, {profile.backend}"
    versions = document.provenance.versions.items()
    yield "Software", listed(f"{name} {text}" for name, text in versions)
    yield "Measured", f"{profile.num_rounds} rounds, last step {profile.origin.made_utc}"
    again = profile.repeatability
    yield (
        "Repeatability",
        ", ".join(f"{percent(each)} on {counted(n, 'rank')}" for n, each in again.run.items())
        + f" (one run), {percent(again.round)} (a round), {percent(again.occasion)} inferred (hours apart)"
        + (f", {percent(again.host)} where the host decides" if again.host else ""),
    )
    yield "Dispatch", f"{format_duration(profile.dispatch_s)} of host time per empty operator"
    yield "Fit, one device", _residual(profile.residual.single_log_errors)
    yield "Fit, DDP", _residual(profile.residual.ddp_log_errors)
    for entry in profile.workloads:
        size = format_bytes(entry.workload.gradient_bytes)
        yield (
            entry.workload.name,
            f"{entry.workload.num_parameters:,} parameters, {size} of gradients",
        )
    for group in (*profile.collectives, *profile.between_nodes):
        where = " between nodes" if group in profile.between_nodes else ""
        yield f"{group.collective}{where}, {group.world_size}", _extremes(group)
    for overlap in profile.overlaps:
        both = (
            f"compute at {percent(overlap.compute_speed)}, all-reduce of {format_bytes(overlap.size_bytes)} at "
            f"{percent(overlap.comm_speed)} of their speeds alone"
        )
        yield f"at once, {overlap.world_size} ranks", both
    yield from _ddp(profile.ddp)
    for sentence in profile.undetermined:
        yield "Not determined", sentence


def workloads_table(profile: MeasuredMachine) -> Table:
    """The models that were measured."""
    return table(
        "Models measured",
        profile.workloads,
        {
            "<Model": "workload.name",
            "<Sample": "workload.sample",
            "Parameters": "workload.num_parameters:,",
            "Gradients": "workload.gradient_bytes",
            "Operators": "workload.num_operators",
            "Ranks": "rank_spread:%",
        },
        caption="Ranks: standard deviation between them.",
    )


def steps_table(profile: MeasuredMachine) -> Table:
    """Whole steps as calibration measured them."""
    return table(
        "Steps measured",
        sorted(profile.steps, key=lambda s: (s.workload, s.micro_batch, s.world_size)),
        {
            "<Model": "workload",
            "Devices": "world_size",
            "Micro-batch": "micro_batch",
            "Gradients": "synchronisation",
            "Bucket cap": lambda step: (
                bucket_cap(step.bucket_cap_mb) if step.synchronisation == "ddp" else "-"
            ),
            "Step": "step_s",
            "Std. error": "relative_error:%",
        },
    )


def rates_table(profile: MeasuredMachine) -> Table:
    """Kernels alone."""
    return table(
        "Kernels alone",
        profile.rates,
        {
            "<Probe": lambda rate: f"{rate.probe} {rate.dtype}",
            "<Shape": lambda rate: " x ".join(map(str, rate.shape)),
            "Time": "time_s",
            "FLOP/s": "flop_per_s",
            "B/s": "bytes_per_s",
        },
    )


def _extremes(entry: CollectiveProfile) -> str:
    """A collective at its smallest and its largest size."""
    first, last = entry.points[0], entry.points[-1]
    rates = ""
    if last.time_s > 0:
        rate = last.at / last.time_s
        busbw = rate * bus_factor(entry.collective, entry.world_size)
        rates = f" (algbw {format_rate(rate, 'B')}, busbw {format_rate(busbw, 'B')})"
    return (
        f"{format_bytes(first.at)} in {format_duration(first.time_s)}; {format_bytes(last.at)} in "
        f"{format_duration(last.time_s)}{rates}"
    )


def _ddp(ddp: DdpCosts) -> Iterator[tuple[str, str]]:
    """What DDP adds to a step, with 90 % of the bootstrap, and whether the data determine it."""
    draws = np.asarray(ddp.draws).reshape(-1, len(ddp.names))
    for column, (name, value) in enumerate(zip(ddp.names, ddp.values, strict=True)):
        spread = "-"
        if len(draws):
            low, high = (
                _ddp_value(name, float(end)) for end in np.quantile(draws[:, column], [0.05, 0.95])
            )
            spread = f"{low} to {high}"
        known = "yes" if ddp.determined[column] else "NO: assumed"
        yield name, f"{_ddp_value(name, value)} ({spread}), determined: {known}"


def _residual(log_errors: tuple[float, ...]) -> str:
    if not log_errors:
        return "no settings were left out one by one"
    sizes = np.abs(np.expm1(np.asarray(log_errors)))
    return (
        f"off by {percent(float(np.median(sizes)))} (median), {percent(float(sizes.max()))} (worst), "
        f"{len(log_errors)} settings each left out one by one"
    )


def _ddp_value(name: str, value: float) -> str:
    if name.endswith("_s_per_byte"):
        return f"{format_duration(value * MIB)}/MiB"
    return format_duration(value) if name.endswith("_s") else number(value)


def differences_table(document: ProfileDiffDocument) -> Table:
    """What changed beyond noise; the largest of the rest if nothing did."""

    def change(entry: Difference) -> str:
        if not entry.is_additive:
            return percent(entry.new / entry.old - 1, signed=True)
        is_rounding = math.isclose(entry.old, entry.new, rel_tol=1e-9)
        return f"{0.0 if is_rounding else entry.new - entry.old:+.3g}"

    changes = [entry for entry in document.differences if entry.is_change]
    count = len(document.differences)
    return table(
        f"{len(changes)} of {count} parameters changed"
        if changes
        else f"none of {count} parameters changed; the least likely by chance",
        changes or document.differences[:5],
        {
            "<Parameter": "what",
            "Old": lambda entry: _value(entry.old, entry.unit),
            "New": lambda entry: _value(entry.new, entry.unit),
            "Change": change,
            "z": "z:+.1f",
            "q": "adjusted_p:.2g",
        },
        caption="z: difference over the uncertainty of both profiles. q: share of chance among all that are as "
        f"unlikely (Benjamini-Hochberg); a change has q <= {document.false_discovery_rate:g}.",
    )


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return format_duration(value)
    return number(value) if unit == "fraction" else f"{value:.3g} {unit}"


def moved_table(document: ProfileDiffDocument) -> Table:
    """Predictions with both profiles."""
    return table(
        "Predictions, weak scaling: devices x micro-batch",
        document.predictions,
        {
            "<Setting": "what",
            "Old step": "old_step_s",
            "New step": "new_step_s",
            "New over old": "ratio",
            "<Moved": lambda entry: "yes" if entry.is_moved else "no",
        },
    )


def diff_lines(document: ProfileDiffDocument) -> Iterator[str]:
    """What the environment says, what only one profile holds, and what must be known."""
    for path, (old, new) in document.facts.items():
        yield f"fact: {path}: {old} -> {new}"
    if document.missing:
        yield f"not compared: {len(document.missing)} parameters, such as {document.missing[0]}"
    yield from caveat_lines(document.caveats, verbose=True)

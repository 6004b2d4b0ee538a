"""Fields that a what-if can change: what each does to a scenario, and their table.

A new field is one row of ``FIELDS``. They are applied in the order of that table: first what is trained, then
how, then the machine.
"""

import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from perfmodel.answer import open_workload, timed_workload
from perfmodel.cost.network import Link, ring_link, tier_between_nodes
from perfmodel.cost.rescaling import rescaled_profile
from perfmodel.documents.hardware import (
    LINK_SHARE,
    LinkSheet,
    find_device,
    open_cluster,
    shipped_catalogue,
)
from perfmodel.errors import (
    CalibrationUnavailable,
    NotFeasible,
    UsageError,
    did_you_mean,
    refuse_unknown,
)
from perfmodel.layout import KEYS, Layout, accumulation_for, parse_layout
from perfmodel.machine import UNCERTAINTY_OF_FILE, InferredMachine
from perfmodel.machine.measured import (
    CollectiveProfile,
    CurvePoint,
    MeasuredMachine,
    MeasuredWorkload,
    TracedWorkload,
)
from perfmodel.models import read_model
from perfmodel.scenarios import Scenario
from perfmodel.statistics import DEVIATE_90
from perfmodel.units import (
    MIB,
    format_rate,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_factor,
    parse_number,
    parse_share,
)
from perfmodel.workload import Phase


def layout_of(words: Mapping[str, str]) -> Layout:
    """The layout of these keys and values."""
    return parse_layout(" ".join(f"{key}={value}" for key, value in words.items()))


# What is trained, and how.

Apply: TypeAlias = Callable[[Scenario, str], Scenario]
"""Raises ``ValueError`` or a user error for a value that makes no sense."""


def asked(name: str, read: Callable[[str], object]) -> Apply:
    """Set one value of the request; beside a layout its own keys are set."""

    def apply(scenario: Scenario, value: str) -> Scenario:
        if scenario.request is None:
            raise ValueError("is not set beside --layout; set a key of the layout, such as dp")
        edit: dict[str, Any] = {name: read(value)}
        return replace(scenario, request=replace(scenario.request, **edit))

    return apply


def asked_of_any(name: str, read: Callable[[str], Any]) -> Apply:
    """Set one value of the question, beside a layout too."""
    return lambda scenario, value: scenario.asking(**{name: read(value)})


def layout_key(key: str) -> Apply:
    """Set one key of the layout, in its grammar."""

    def apply(scenario: Scenario, value: str) -> Scenario:
        words = dict(word.split("=", 1) for word in str(scenario.question.layout).split())
        if key in ("ddp", "fsdp"):
            words = {name: text for name, text in words.items() if name not in ("dp", "zero")}
        return scenario.asking(layout=layout_of(words | {key: value}))

    return apply


def _with_workload(
    scenario: Scenario, workload: MeasuredWorkload, *, assumed: str = "", remark: str = ""
) -> Scenario:
    """Replace the workload here and, where it is calibrated, in the machine."""
    entries = tuple(
        workload if entry.workload.name == workload.workload.name else entry
        for entry in scenario.machine.workloads
    )
    machine = replace(scenario.machine, workloads=entries)
    return scenario.asking(machine=machine, workload=workload, assumed=assumed, remark=remark)


#: Part of forward and backward that is matrix products and convolutions, when a precision changes
#: and no operator was traced: an assumption, the whole range of which is in the interval.
_MATRIX_SHARES: Final = (0.5, 1.0)


def set_precision(scenario: Scenario, value: str) -> Scenario:
    """Matrix products by the kernels timed in both types; all else as it was (Amdahl)."""
    if value not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"must be fp32, bf16 or fp16, got {value!r}")
    if scenario.question.measured.evidence is not None:
        raise ValueError("a traced workload has its own precision; trace it with --precision")
    # On GPUs the reference models train as is usual: half of them in bf16.
    if scenario.machine.device_kind == "cuda":
        raise ValueError(
            "a calibrated workload of a GPU has the precision of its recipe; "
            "trace the model with --precision"
        )
    if value == "fp32":
        return scenario
    rates = {
        (rate.probe, rate.shape, rate.dtype): rate.flop_per_s
        for rate in scenario.machine.rates
        if rate.flop_per_s > 0
    }
    gains = [
        np.log(rates[probe, shape, value] / rate)
        for (probe, shape, dtype), rate in rates.items()
        if dtype == "fp32" and (probe, shape, value) in rates
    ]
    if not gains:
        known = ", ".join(sorted({dtype for _, _, dtype in rates})) or "none"
        raise CalibrationUnavailable(
            f"--set precision: the profile must hold kernels timed in fp32 and in {value}, got "
            f"{known}; trace the workload with --precision instead"
        )
    speed = float(np.exp(np.mean(gains)))
    logs = [math.log(share / speed + 1 - share) for share in _MATRIX_SHARES]
    workload = _scaled(
        scenario.question.measured,
        ("forward", "backward"),
        math.exp(sum(logs) / 2),
        relative_error=abs(logs[0] - logs[1]) / 2 / DEVIATE_90,
    )
    return _with_workload(
        scenario,
        workload,
        assumed="compute",
        remark=f"matrix products in {value} run {speed:.3g} times as fast as in fp32 here; they are "
        "assumed to be half to all of forward and backward",
    )


def _scaled(
    workload: MeasuredWorkload, names: Sequence[str], factor: float, *, relative_error: float = 0.0
) -> MeasuredWorkload:
    """Some phases take ``factor`` times as long, with so much more uncertainty (in log)."""

    def point(was: CurvePoint) -> CurvePoint:
        error = math.hypot(was.relative_error, relative_error)
        return replace(was, time_s=was.time_s * factor, relative_error=error if was.time_s else 0.0)

    phases = []
    for was in workload.phases:
        edits: dict[str, Any] = {name: tuple(map(point, getattr(was, name))) for name in names}
        phases.append(replace(was, **edits))
    return replace(workload, phases=tuple(phases))


# The machine.


def set_device(scenario: Scenario, value: str) -> Scenario:
    """Run on a device of the catalogue."""
    catalogue = shipped_catalogue()
    sheet = find_device(value, catalogue, flag="--set device")
    was = scenario.question.measured
    try:
        machine = rescaled_profile(scenario.machine, sheet, catalogue)
        if machine is scenario.machine:
            return scenario
        workload = (
            timed_workload(machine, was.workload, trace=was.trace, memory=was.memory)
            if isinstance(was, TracedWorkload)
            else timed_workload(machine, was.workload.name)
        )
    except (CalibrationUnavailable, UsageError) as error:
        text = str(error).removeprefix("--device: ").removeprefix("--workload: ")
        raise type(error)(f"--set device={value}: {text}") from error
    return scenario.asking(machine=machine, workload=workload, assumed="compute")


def link_of(machine: MeasuredMachine) -> Link:
    """Latency and bandwidth of the measured ring; ``CalibrationUnavailable`` if one rank was measured alone."""
    link = ring_link(machine.collectives)
    if link is None:
        raise CalibrationUnavailable(
            "--set network: needs a measured all-reduce, but the profile holds one rank; calibrate "
            "with --nproc 2 or more"
        )
    return link


#: Of what was before, either way, and of logarithms of noise: figures of anything beyond mean nothing.
MOST_FACTOR: Final = 1e6
MOST_NOISE: Final = 10.0


def _within_reach(now: float, was: float, value: str) -> float:
    """What a number becomes, unless that is out of all proportion to what it was."""
    if now > 0 and was > 0 and not 1 / MOST_FACTOR <= now / was <= MOST_FACTOR:
        raise ValueError(
            f"must be within a factor of {MOST_FACTOR:,.0f} of what it was, got {value!r}"
        )
    return now


def _with_link(scenario: Scenario, now: Link, *, remark: str = "") -> Scenario:
    """All-reduces and broadcasts over links of another latency and bandwidth.

    Each measured message is split into the shortest message's time and the rest; the first is
    scaled by the latency, the second by the bandwidth, so that regimes between them keep their form.
    """
    was = link_of(scenario.machine)
    slower, thinner = now.latency_s / was.latency_s, was.bytes_per_s / now.bytes_per_s

    def mended(entry: CollectiveProfile) -> CollectiveProfile:
        if entry.collective not in ("all_reduce", "broadcast") or entry.world_size == 1:
            return entry
        least_s = min(point.time_s for point in entry.points)
        points = tuple(
            replace(p, time_s=least_s * slower + (p.time_s - least_s) * thinner)
            for p in entry.points
        )
        return replace(entry, points=points)

    machine = scenario.machine.with_links(mended)
    return scenario.asking(machine=machine, assumed="communication", remark=remark)


def link_value(attribute: str, parse: Callable[[str], float], allowed: str) -> Apply:
    """Set the latency or the bandwidth of the links, as a value or as a factor."""

    def apply(scenario: Scenario, value: str) -> Scenario:
        link = link_of(scenario.machine)
        try:
            factor = parse_factor(value)
            wanted = parse(value) if factor is None else getattr(link, attribute) * factor
        except ValueError:
            wanted = math.nan
        if not wanted > 0:
            raise ValueError(f"must be {allowed}, got {value!r}")
        edit: dict[str, Any] = {attribute: _within_reach(wanted, getattr(link, attribute), value)}
        return _with_link(scenario, replace(link, **edit))

    return apply


def usable_links() -> tuple[LinkSheet, ...]:
    """Links of the catalogue that one device has to itself."""
    return tuple(link for link in shipped_catalogue().links if link.per != "node")


def set_link(scenario: Scenario, value: str) -> Scenario:
    """Exchange over a link of the catalogue."""
    known = {link.id: link for link in usable_links()}
    if value not in known:
        raise ValueError(
            f"must be a link of one device or port of perfmodel devices --links, got {value!r}"
            f"{did_you_mean(value, known)}"
        )
    rate = LINK_SHARE * known[value].rate.bytes_per_s
    remark = (
        f"{known[value].name}: a large all-reduce is assumed to reach {format_rate(rate, 'B')}, "
        f"{100 * LINK_SHARE:g} % of its data sheet; its latency is taken to be the measured one"
    )
    link = replace(link_of(scenario.machine), bytes_per_s=rate)
    return _with_link(scenario, link, remark=remark)


_GRADIENT_BITS: Final = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8}


def set_gradients(scenario: Scenario, value: str) -> Scenario:
    """Gradients that are a share of the bytes when they are exchanged."""
    if value not in _GRADIENT_BITS:
        raise ValueError(f"must be one of {', '.join(_GRADIENT_BITS)}, got {value!r}")
    share = _GRADIENT_BITS[value] / _GRADIENT_BITS["fp32"]
    if share == 1:
        return scenario
    return scenario.asking(
        gradient_share=share,
        assumed="communication",
        remark=f"gradients sent as {value}: converting them is assumed free",
    )


def _factor(value: str, *, example: str = "2x") -> float:
    factor = parse_factor(value)
    if factor is None:
        raise ValueError(f"must look like {example}, got {value!r}")
    return factor


def set_device_speed(scenario: Scenario, value: str) -> Scenario:
    """The device at another speed; it also copies gradients into buckets."""
    factor = _within_reach(_factor(value), 1.0, value)
    if not factor > 0:
        raise ValueError(f"must be > 0, got {factor:g}")
    copies = dict.fromkeys(("bucket_s", "bucket_s_per_byte"), 1 / factor)
    machine = replace(scenario.machine, ddp=scenario.machine.ddp.times(copies))
    scenario = scenario.asking(machine=machine)
    workload = _scaled(scenario.question.measured, [phase.value for phase in Phase], 1 / factor)
    return _with_workload(scenario, workload, assumed="compute")


def set_rank_noise(scenario: Scenario, value: str) -> Scenario:
    """Ranks and steps that differ, in log, by a factor times as much."""
    factor, was = _factor(value, example="0.5x"), scenario.question.measured
    if factor > MOST_NOISE:
        raise ValueError(f"must be at most {MOST_NOISE:g}x, got {value!r}")
    noise = tuple(
        replace(entry, ratios=tuple(ratio**factor for ratio in entry.ratios)) for entry in was.noise
    )
    workload = replace(was, noise=noise, rank_spread=was.rank_spread * factor)
    return _with_workload(scenario, workload, assumed="stragglers")


# The cluster.


def set_cluster(scenario: Scenario, value: str) -> Scenario:
    """Put the devices into the cluster of a file, or into none."""
    if value == "none":
        return scenario.asking(cluster=None)
    measured = tier_between_nodes(scenario.question.machine)
    return scenario.asking(cluster=open_cluster(value, measured=measured))


def tier_value(name: str, attribute: str, parse: Callable[[str], float]) -> Apply:
    """Set one value of a tier: ``TIER:VALUE``, or a value of the outermost one."""

    def apply(scenario: Scenario, value: str) -> Scenario:
        cluster = scenario.questions()[1].cluster
        if cluster is None:
            raise ValueError("needs a cluster file: give --cluster, or cluster=FILE before it")
        tier_name, colon, text = value.rpartition(":")
        tiers = {tier.name: tier for tier in cluster.tiers}
        wanted = tier_name if colon else cluster.tiers[-1].name
        refuse_unknown(f"--set cluster.{name}: tier", wanted, tiers)
        source = f"set by hand; else {tiers[wanted].source}"
        now = _within_reach(parse(text), getattr(tiers[wanted], attribute), text)
        edits: dict[str, Any] = {attribute: now, "source": source, "as_measured": False}
        if attribute == "link_bytes_per_s":
            edits["log_error"] = UNCERTAINTY_OF_FILE
        tiers[wanted] = replace(tiers[wanted], **edits)
        return scenario.asking(cluster=replace(cluster, tiers=tuple(tiers.values())))

    return apply


def cap_mb(value: str) -> float | None:
    """Size of a bucket; None: the default. [MiB]"""
    return None if value == "default" else parse_bytes(value) / MIB


def yes_or_no(value: str) -> bool:
    """A switch."""
    if value not in ("yes", "no"):
        raise ValueError("must be yes or no")
    return value == "yes"


_INSIDE_ALONE: Final = "network.* is inside a node; between nodes: --set cluster.bandwidth"
#: More scenarios than this are not a table any more.
MOST_SCENARIOS: Final = 12


@dataclass(frozen=True, slots=True)
class WhatIfField:
    """One thing that a what-if can change."""

    name: str
    example: str
    meaning: str
    apply: Apply


# fmt: off
FIELDS: Final = (
    WhatIfField("workload", "transformer",
        "another calibrated workload by name, or a workload file of perfmodel trace",
        lambda scenario, value: scenario.asking(
            workload=open_workload(scenario.machine, value, where="--set workload"))),
    WhatIfField("device", "h100-sxm",
        "device that is not present, by the law of steps (perfmodel devices); for traced workloads", set_device),
    WhatIfField("devices", "64", "number of devices", asked("world_sizes", lambda value: (parse_count(value),))),
    WhatIfField("batch", "128",
        "samples per forward pass of each device (weak), or per step of all (strong)", asked("batch", parse_count)),
    WhatIfField("accumulation", "4",
        "forward and backward passes per optimizer step", asked("accumulation", parse_count)),
    WhatIfField("bucket_cap", "50MiB", "size of a bucket of gradients, or default", asked("bucket_cap_mb", cap_mb)),
    WhatIfField("precision", "bf16",
        "type of forward and backward: fp32, bf16 or fp16, by the kernels that were timed in both", set_precision),
    WhatIfField("loader.samples_per_s", "2000",
        "what the input pipeline feeds one device, or none: no limit",
        asked_of_any("loader_samples_per_s", lambda value: None if value == "none" else parse_number(value))),
    WhatIfField("sync_every_step", "yes",
        "yes: every step waits for the device, as loss.item() does; no: the host runs ahead",
        asked_of_any("sync_every_step", yes_or_no)),
    WhatIfField("network.link", "eth-400",
        f"link of the catalogue (perfmodel devices --links) at {100 * LINK_SHARE:g} % of its data sheet", set_link),
    WhatIfField("network.bandwidth", "400Gb/s or 2x",
        "busbw that a large all-reduce reaches (less than the nominal rate), or a factor",
        link_value("bytes_per_s", parse_bandwidth, "a rate such as 400Gb/s above 0, or a factor such as 2x")),
    WhatIfField("network.latency", "10us or 0.5x", "time of the shortest message between two ranks, or a factor",
        link_value("latency_s", parse_duration, "a time such as 10us above 0, or a factor such as 0.5x")),
    WhatIfField("gradients", "bf16",
        "type in which gradients are sent: fp32, bf16, fp16 or fp8; converting is assumed free", set_gradients),
    WhatIfField("device.speed", "2x",
        "factor on the speed of forward, backward, optimizer and copies into buckets", set_device_speed),
    WhatIfField("ranks.noise", "0x",
        "factor on how much steps and ranks differ, in log; 0x: nobody waits for the slowest", set_rank_noise),
    WhatIfField("cluster", "FILE.toml",
        "cluster file: links between the devices; none: as without --cluster", set_cluster),
    WhatIfField("cluster.bandwidth", "400Gb/s or node:368GB/s",
        "of one link of the outermost tier, or of the one that is named before a colon",
        tier_value("bandwidth", "link_bytes_per_s", parse_bandwidth)),
    WhatIfField("cluster.latency", "10us", "of a message through that tier",
        tier_value("latency", "latency_s", parse_duration)),
    WhatIfField("cluster.links", "8", "links of each member into that tier", tier_value("links", "links", parse_count)),
    WhatIfField("cluster.oversubscription", "2", "rate of that tier's links over what it carries when all send",
        tier_value("oversubscription", "oversubscription", parse_number)),
    WhatIfField("cluster.in_switch_reduction", "node:0.85",
        "part of the rate while switches of the innermost tier add (NVLS, NCCL alone); 0: none",
        tier_value("in_switch_reduction", "in_switch_reduction", parse_share)),
)
# fmt: on
_BY_NAME: Final = {entry.name: entry for entry in FIELDS}


def scenarios_of(base: Scenario, settings: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenario as it is, then one per combination of the values of ``FIELD=VALUE[,VALUE...]``.

    Raises ``UsageError`` if a field is unknown or given twice, a value makes no sense, or there are too many
    combinations.
    """
    given: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        name = name.strip()
        found = [value.strip() for value in values.split(",")]
        if not equals or not all(found):
            raise UsageError(f"--set: must look like devices=64, got {setting!r}")
        if name in given:
            raise UsageError(f"--set {name}: must be given once; values side by side: {name}=A,B")
        given[name] = found
    number = math.prod(map(len, given.values()))
    if number > MOST_SCENARIOS:
        raise UsageError(
            f"--set: at most {MOST_SCENARIOS} combinations fit side by side, got {number}"
        )
    combined = [
        dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())
    ]
    return (base, *(changed(base, values) for values in combined if values))


def changed(base: Scenario, values: Mapping[str, str]) -> Scenario:
    """Apply changes by field name.

    Raises ``UsageError`` if a field is unknown or a value makes no sense; the fields with similar names are
    listed.
    """
    if isinstance(base.question.machine, InferredMachine):
        return replace(_changed_large_model(base, values), changes={**base.changes, **values})
    known = _BY_NAME
    if base.request is None:
        # Keys of the layout are fields as well, and come before what is set of the machine.
        keys = {key: WhatIfField(key, "2", "key of the layout", layout_key(key)) for key in KEYS}
        before = {name: keys[name] for name in keys if name not in _BY_NAME}
        known = {"workload": _BY_NAME["workload"], **before, **_BY_NAME, **keys}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise UsageError(
                f"--set: no field is named {name!r}; {hint} (perfmodel whatif --fields)"
            )
    scenario = base
    for name in known:
        if name in values:
            try:
                scenario = known[name].apply(scenario, values[name])
            except ValueError as error:
                raise UsageError(f"--set {name}: {error}") from error
    is_unnamed = scenario.question.cluster in (None, scenario.machine.cluster)
    if is_unnamed and any(name.startswith("network.") for name in values):
        joined = scenario.questions()[1].cluster
        scenario = scenario.asking(remark="" if joined is None else _INSIDE_ALONE)
    return replace(scenario, changes={**base.changes, **values})


def _changed_large_model(base: Scenario, values: Mapping[str, str]) -> Scenario:
    """Keys of the layout, and ``model``; ``dp`` and ``accumulation`` follow unless they are set.

    Devices and sequences per step stay as they were.
    """
    was, keys, edits = base.question.layout, dict(values), dict[str, Any]()
    model = keys.pop("model", None)
    if model is not None:
        edits["workload"] = read_model(model, sequence=base.sequence_length)
    words = dict(word.split("=", 1) for word in str(was).split()) | keys
    if "dp" not in keys:
        # First: what dp has to be divisible by, such as ep, is read together with it.
        others = layout_of({key: words[key] for key in ("tp", "pp", "cp") if key in words})
        if was.world_size % others.world_size:
            raise NotFeasible(
                f"--set: tp x pp x cp ({others.world_size}) must divide the {was.world_size} devices; "
                "set dp as well"
            )
        words["dp"] = str(was.world_size // others.world_size)
    if "accumulation" in keys:
        return base.asking(layout=layout_of(words), devices=None, **edits)
    words.pop("accumulation", None)
    layout = layout_of(words)
    parts = accumulation_for(
        global_batch=was.global_batch, dp=layout.dp, micro_batch=layout.micro_batch
    )
    return base.asking(layout=replace(layout, accumulation=parts), devices=None, **edits)

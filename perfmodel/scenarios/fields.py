"""Fields that a what-if can change: what each means, and what it does to a scenario.

A new field is one entry of ``FIELDS``. They are applied in the order of that table: first what is
trained, then how, then the machine.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from perfmodel.cost.rescaling import LINK_SHARE, find_device, rescaled_profile, shipped_catalogue
from perfmodel.documents.hardware import LinkSheet, read_cluster
from perfmodel.errors import CalibrationUnavailable, UsageError, did_you_mean, refuse_unknown
from perfmodel.machine.cluster import Cluster, Tier
from perfmodel.machine.measured import MeasuredWorkload
from perfmodel.predictor import Predictor, open_workload, refuse_other_jobs
from perfmodel.scenarios import machine
from perfmodel.scenarios.machine import Scenario, WhatIfField
from perfmodel.statistics.normal import DEVIATE_90
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

NO_CLUSTER: Final = "none"


def in_cluster(scenario: Scenario, cluster: Cluster) -> Scenario:
    """The scenario with its devices in a cluster.

    Raises
    ------
    UsageError
        If other jobs share the links of the cluster.
    """
    refuse_other_jobs(cluster, by="whatif")
    return dataclasses.replace(scenario, cluster=cluster)


def usable_links() -> tuple[LinkSheet, ...]:
    """Links of the catalogue that one device has to itself."""
    return tuple(link for link in shipped_catalogue().links if link.per != "node")


def _device(scenario: Scenario, value: str) -> Scenario:
    catalogue = shipped_catalogue()
    sheet = find_device(value, catalogue, flag="--set device")
    try:
        profile = rescaled_profile(scenario.profile, sheet, catalogue)
        if profile is scenario.profile:
            return scenario
        known = scenario.document or scenario.workload.workload.name
        workload = open_workload(Predictor(profile, num_draws=1), known).profile
    except (CalibrationUnavailable, UsageError) as error:
        text = str(error).removeprefix("--device: ").removeprefix("--workload: ")
        raise type(error)(f"--set device={value}: {text}") from error
    return dataclasses.replace(
        scenario,
        profile=profile,
        workload=workload,
        assumed=scenario.assumed | {"compute"},
    )


def _link(scenario: Scenario, value: str) -> Scenario:
    known = {link.id: link for link in usable_links()}
    if value not in known:
        raise ValueError(
            f"must be a link of one device or port of perfmodel devices --links, got {value!r}"
            f"{did_you_mean(value, known)}"
        )
    sheet = known[value]
    rate = LINK_SHARE * sheet.rate.bytes_per_s
    now = machine.link_of(scenario.profile)
    return dataclasses.replace(
        scenario,
        profile=machine.with_link(scenario.profile, dataclasses.replace(now, bytes_per_s=rate)),
        assumed=scenario.assumed | {"communication"},
        remarks=(
            *scenario.remarks,
            (
                f"{sheet.name}: a large all-reduce is assumed to reach {format_rate(rate, 'B')}, "
                f"{100 * LINK_SHARE:g} % of its data sheet; its latency is taken to be the measured one"
            ),
        ),
    )


def _cluster(scenario: Scenario, value: str) -> Scenario:
    if value == NO_CLUSTER:
        return dataclasses.replace(scenario, cluster=None)
    return in_cluster(scenario, read_cluster(Path(value)))


#: Field of a tier by what follows ``cluster.``, and how its value is read.
_TIER_VALUES: Final[Mapping[str, tuple[str, Callable[[str], float]]]] = MappingProxyType(
    {
        "bandwidth": ("link_bytes_per_s", parse_bandwidth),
        "latency": ("latency_s", parse_duration),
        "links": ("links", parse_count),
        "oversubscription": ("oversubscription", parse_number),
        "in_switch_reduction": ("in_switch_reduction", parse_share),
    }
)


def _tier_value(name: str) -> Callable[[Scenario, str], Scenario]:
    """What sets one value of a tier: ``TIER:VALUE``, or a value of the outermost one."""
    attribute, parse = _TIER_VALUES[name]

    def apply(scenario: Scenario, value: str) -> Scenario:
        cluster = scenario.cluster
        if cluster is None:
            raise ValueError("needs a cluster file: give --cluster, or cluster=FILE before it")
        tier_name, colon, text = value.rpartition(":")
        tiers = {tier.name: tier for tier in cluster.tiers}
        wanted = tier_name if colon else cluster.tiers[-1].name
        refuse_unknown(f"--set cluster.{name}: tier", wanted, tiers)
        changed: Tier = dataclasses.replace(
            tiers[wanted],
            **{attribute: parse(text)},  # type: ignore[arg-type]
            source=f"set by hand; else {tiers[wanted].source}",
        )
        kept = tuple(changed if tier.name == wanted else tier for tier in cluster.tiers)
        return dataclasses.replace(scenario, cluster=dataclasses.replace(cluster, tiers=kept))

    return apply


DEVICE_FIELD: Final = WhatIfField(
    name="device",
    meaning="device that is not present, by data-sheet ratios (perfmodel devices); for traced workloads",
    example="h100-sxm",
    apply=_device,
)
LINK_FIELD: Final = WhatIfField(
    name="network.link",
    meaning=f"link of the catalogue (perfmodel devices --links) at {100 * LINK_SHARE:g} % of its data sheet",
    example="eth-400",
    apply=_link,
)
CLUSTER_FIELDS: Final = (
    WhatIfField(
        name="cluster",
        meaning="cluster file: links between the devices; none: one ring of links like the measured ones",
        example="FILE.toml",
        apply=_cluster,
    ),
    WhatIfField(
        name="cluster.bandwidth",
        meaning="of one link of the outermost tier, or of the one that is named before a colon",
        example="400Gb/s or node:368GB/s",
        apply=_tier_value("bandwidth"),
    ),
    WhatIfField(
        name="cluster.latency",
        meaning="of a message through that tier",
        example="10us",
        apply=_tier_value("latency"),
    ),
    WhatIfField(
        name="cluster.links",
        meaning="links of each member into that tier",
        example="8",
        apply=_tier_value("links"),
    ),
    WhatIfField(
        name="cluster.oversubscription",
        meaning="rate of that tier's links over what it carries when all send",
        example="2",
        apply=_tier_value("oversubscription"),
    ),
    WhatIfField(
        name="cluster.in_switch_reduction",
        meaning="part of the rate while switches of the innermost tier add (NVLS, NCCL alone); 0: none",
        example="node:0.85",
        apply=_tier_value("in_switch_reduction"),
    ),
)


#: More scenarios than this are not a table any more.
MOST_SCENARIOS: Final = 12


def combinations(settings: Sequence[str]) -> list[dict[str, str]]:
    """Values by field of every combination; none without settings.

    Raises
    ------
    UsageError
        If a setting is no ``FIELD=VALUE``, a field is given twice, or there are too many combinations.
    """
    given: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        name = name.strip()
        found = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not found:
            raise UsageError(f"--set: must look like devices=64, got {setting!r}")
        if name in given:
            raise UsageError(f"--set {name}: must be given once; values side by side: {name}=A,B")
        given[name] = found
    if not given:
        return []
    number = math.prod(map(len, given.values()))
    if number > MOST_SCENARIOS:
        raise UsageError(
            f"--set: at most {MOST_SCENARIOS} combinations fit side by side, got {number}"
        )
    return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]


#: Part of forward and backward that is matrix products and convolutions, when a precision changes
#: and no operator was traced: an assumption, the whole range of which is in the interval.
_MATRIX_SHARES: Final = (0.5, 1.0)
_GRADIENT_BITS: Final = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8}


def scenarios_of(base: Scenario, settings: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenario as it is, then one per combination of the values of ``FIELD=VALUE[,VALUE...]``.

    Raises
    ------
    UsageError
        If a field is unknown or given twice, a value makes no sense, or there are too many combinations.
    """
    asked = combinations(settings)
    for name in asked[0] if asked else ():
        _field(name)
    return (base, *(changed(base, changes) for changes in asked))


def changed(base: Scenario, changes: Mapping[str, str]) -> Scenario:
    """Apply changes by field name.

    Raises
    ------
    UsageError
        If a field is unknown or a value makes no sense; the fields with similar names are listed.
    """
    unknown = [name for name in changes if name not in _BY_NAME]
    if unknown:
        _field(unknown[0])
    scenario = base
    for name, entry in _BY_NAME.items():
        if name in changes:
            try:
                scenario = entry.apply(scenario, changes[name])
            except ValueError as error:
                raise UsageError(f"--set {name}: {error}") from error
    return dataclasses.replace(scenario, changes={**base.changes, **changes})


def _field(name: str) -> WhatIfField:
    if name in _BY_NAME:
        return _BY_NAME[name]
    near = difflib.get_close_matches(name, _BY_NAME, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(_BY_NAME)}"
    raise UsageError(f"--set: no field is named {name!r}; {hint} (perfmodel whatif --fields)")


def _ask(scenario: Scenario, **changes: object) -> Scenario:
    """Change the question."""
    request = dataclasses.replace(scenario.request, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(scenario, request=request)


def _workload(scenario: Scenario, value: str) -> Scenario:
    predictor = Predictor(scenario.profile, num_draws=1)
    opened = open_workload(predictor, value, where="--set workload")
    return dataclasses.replace(scenario, workload=opened.profile, document=opened.document)


def _devices(scenario: Scenario, value: str) -> Scenario:
    return _ask(scenario, world_sizes=(parse_count(value),))


def _batch(scenario: Scenario, value: str) -> Scenario:
    return _ask(scenario, batch=parse_count(value))


def _accumulation(scenario: Scenario, value: str) -> Scenario:
    return _ask(scenario, accumulation=parse_count(value))


def _bucket_cap(scenario: Scenario, value: str) -> Scenario:
    return _ask(scenario, bucket_cap_mb=None if value == "default" else parse_bytes(value) / MIB)


def _buffers(scenario: Scenario, value: str) -> Scenario:
    if value not in ("broadcast", "local"):
        raise ValueError(f"must be broadcast or local, got {value!r}")
    if value == "broadcast":
        return scenario
    workload = dataclasses.replace(scenario.workload.workload, buffer_bytes=())
    return _with_workload(scenario, replace(scenario.workload, workload=workload))


def _gradients(scenario: Scenario, value: str) -> Scenario:
    if value not in _GRADIENT_BITS:
        raise ValueError(f"must be one of {', '.join(_GRADIENT_BITS)}, got {value!r}")
    share = _GRADIENT_BITS[value] / _GRADIENT_BITS["fp32"]
    if share == 1:
        return scenario
    return dataclasses.replace(
        scenario,
        profile=machine.with_gradient_share(scenario.profile, share),
        assumed=scenario.assumed | {"communication"},
        remarks=(*scenario.remarks, f"gradients sent as {value}: converting them is assumed free"),
    )


def _precision(scenario: Scenario, value: str) -> Scenario:
    if value not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"must be fp32, bf16 or fp16, got {value!r}")
    if scenario.workload.evidence is not None:
        raise ValueError("a traced workload has its own precision; trace it with --precision")
    if value == "fp32":
        return scenario
    speed = machine.matrix_speed(scenario.profile, value)
    logs = [math.log(share / speed + 1 - share) for share in _MATRIX_SHARES]
    factor = math.exp(sum(logs) / 2)
    spread = abs(logs[0] - logs[1]) / 2 / DEVIATE_90
    workload = machine.scaled(
        scenario.workload, ("forward", "backward"), factor, relative_error=spread
    )
    return dataclasses.replace(
        _with_workload(scenario, workload),
        assumed=scenario.assumed | {"compute"},
        remarks=(
            *scenario.remarks,
            (
                f"matrix products in {value} run {speed:.3g} times as fast as in fp32 here; they are "
                "assumed to be half to all of forward and backward"
            ),
        ),
    )


def _loader(scenario: Scenario, value: str) -> Scenario:
    return _ask(scenario, loader_samples_per_s=None if value == "none" else parse_number(value))


def _bandwidth(scenario: Scenario, value: str) -> Scenario:
    link = machine.link_of(scenario.profile)
    rate = _value_or_factor(
        value,
        link.bytes_per_s,
        parse_bandwidth,
        "a rate such as 400Gb/s above 0, or a factor such as 2x",
    )
    return _linked(scenario, dataclasses.replace(link, bytes_per_s=rate))


def _latency(scenario: Scenario, value: str) -> Scenario:
    link = machine.link_of(scenario.profile)
    latency_s = _value_or_factor(
        value,
        link.latency_s,
        parse_duration,
        "a time such as 10us above 0, or a factor such as 0.5x",
    )
    return _linked(scenario, dataclasses.replace(link, latency_s=latency_s))


def _value_or_factor(text: str, now: float, parse: Callable[[str], float], allowed: str) -> float:
    try:
        factor = parse_factor(text)
        value = parse(text) if factor is None else now * factor
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"must be {allowed}, got {text!r}")
    return value


def _linked(scenario: Scenario, link: machine.Link) -> Scenario:
    return dataclasses.replace(
        scenario,
        profile=machine.with_link(scenario.profile, link),
        assumed=scenario.assumed | {"communication"},
    )


def _device_speed(scenario: Scenario, value: str) -> Scenario:
    factor = _factor(value)
    faster = dataclasses.replace(
        scenario, profile=machine.with_device_speed(scenario.profile, factor)
    )
    workload = machine.scaled(scenario.workload, machine.DEVICE_PHASES, 1 / factor)
    return dataclasses.replace(
        _with_workload(faster, workload), assumed=scenario.assumed | {"compute"}
    )


def _host_speed(scenario: Scenario, value: str) -> Scenario:
    workload = machine.scaled(scenario.workload, machine.HOST_PHASES, 1 / _factor(value))
    return dataclasses.replace(
        _with_workload(scenario, workload), assumed=scenario.assumed | {"compute"}
    )


def _rank_noise(scenario: Scenario, value: str) -> Scenario:
    factor = parse_factor(value)
    if factor is None:
        raise ValueError(f"must look like 0.5x, got {value!r}")
    workload = machine.with_rank_noise(scenario.workload, factor)
    return dataclasses.replace(
        _with_workload(scenario, workload), assumed=scenario.assumed | {"stragglers"}
    )


def _with_workload(scenario: Scenario, workload: MeasuredWorkload) -> Scenario:
    """Replace the workload here and, where it is calibrated, in the profile."""
    entries = tuple(
        workload if entry.workload.name == workload.workload.name else entry
        for entry in scenario.profile.workloads
    )
    return dataclasses.replace(
        scenario,
        workload=workload,
        profile=replace(scenario.profile, workloads=entries),
    )


def _factor(value: str) -> float:
    factor = parse_factor(value)
    if factor is None:
        raise ValueError(f"must look like 2x, got {value!r}")
    return _positive(factor)


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError(f"must be > 0, got {value:g}")
    return value


FIELDS: Final = (
    WhatIfField(
        name="workload",
        meaning="another calibrated workload by name, or a workload file of perfmodel trace",
        example="transformer",
        apply=_workload,
    ),
    DEVICE_FIELD,
    WhatIfField(name="devices", meaning="number of devices", example="64", apply=_devices),
    WhatIfField(
        name="batch",
        meaning="samples per forward pass of each device (weak), or per step of all (strong)",
        example="128",
        apply=_batch,
    ),
    WhatIfField(
        name="accumulation",
        meaning="forward and backward passes per optimizer step",
        example="4",
        apply=_accumulation,
    ),
    WhatIfField(
        name="bucket_cap",
        meaning="size of a bucket of gradients, or default",
        example="50MiB",
        apply=_bucket_cap,
    ),
    WhatIfField(
        name="buffers",
        meaning="broadcast, or local: rank 0's buffers are not sent before each step",
        example="local",
        apply=_buffers,
    ),
    WhatIfField(
        name="precision",
        meaning="type of forward and backward: fp32, bf16 or fp16, by the kernels that were timed in both",
        example="bf16",
        apply=_precision,
    ),
    WhatIfField(
        name="loader.samples_per_s",
        meaning="what the input pipeline feeds one device, or none: no limit",
        example="2000",
        apply=_loader,
    ),
    LINK_FIELD,
    WhatIfField(
        name="network.bandwidth",
        meaning="busbw that a large all-reduce reaches (less than the nominal rate), or a factor",
        example="400Gb/s or 2x",
        apply=_bandwidth,
    ),
    WhatIfField(
        name="network.latency",
        meaning="time of the shortest message between two ranks, or a factor",
        example="10us or 0.5x",
        apply=_latency,
    ),
    # After the network: what it carries does not change how fast it is said to be.
    WhatIfField(
        name="gradients",
        meaning="type in which gradients are sent: fp32, bf16, fp16 or fp8; converting is assumed free",
        example="bf16",
        apply=_gradients,
    ),
    WhatIfField(
        name="device.speed",
        meaning="factor on the speed of forward, backward, optimizer and copies into buckets",
        example="2x",
        apply=_device_speed,
    ),
    WhatIfField(
        name="host.speed",
        meaning="factor on the speed of preparing input and, on GPUs, of issuing operators",
        example="1.5x",
        apply=_host_speed,
    ),
    WhatIfField(
        name="ranks.noise",
        meaning="factor on how much steps and ranks differ, in log; 0x: nobody waits for the slowest",
        example="0x",
        apply=_rank_noise,
    ),
    *CLUSTER_FIELDS,
)
_BY_NAME: Final = {entry.name: entry for entry in FIELDS}

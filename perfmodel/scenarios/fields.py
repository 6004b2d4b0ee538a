"""Fields that a what-if can change: what each means, and what it does to a scenario.

A new field is one entry of ``FIELDS``. They are applied in the order of that table: first what is
trained, then how, then the machine.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from perfmodel.answer.answer import Forecast
from perfmodel.answer.measured import open_workload, refuse_other_jobs, timed_workload
from perfmodel.answer.question import Question
from perfmodel.cost.rescaling import LINK_SHARE, find_device, rescaled_profile, shipped_catalogue
from perfmodel.cost.traced import TracedWorkload
from perfmodel.documents.hardware import LinkSheet, read_cluster
from perfmodel.errors import CalibrationUnavailable, UsageError, did_you_mean, refuse_unknown
from perfmodel.layout.layout import KEYS, Layout, Scaling, parse_layout
from perfmodel.machine.cluster import Cluster, Tier
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.scenarios import changes
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


def scenario_name(changes: Mapping[str, str]) -> str:
    """The changes in one line."""
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a prediction starts from, after some changes."""

    question: Question
    """About a calibrated machine; its layout counts if nothing is requested."""
    request: Forecast | None = None
    """Data parallelism on one device count."""
    changes: Mapping[str, str] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()
    """Terms that rest on what was typed and not on a measurement, by their name in the evidence."""
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The changes in one line."""
        return scenario_name(self.changes)

    @property
    def machine(self) -> MeasuredMachine:
        """The machine after the changes."""
        assert isinstance(self.question.machine, MeasuredMachine)
        return self.question.machine

    @property
    def workload(self) -> MeasuredWorkload:
        """The workload with its times on that machine."""
        assert isinstance(self.question.workload, MeasuredWorkload)
        return self.question.workload

    @property
    def scaling(self) -> Scaling:
        """What stays the same as devices grow in number."""
        return "weak" if self.request is None else self.request.scaling

    def questions(self) -> tuple[Question, Question]:
        """The baseline on one device, and what is asked."""
        if self.request is None:
            layout = self.question.layout
            alone = Layout(micro_batch=layout.micro_batch, accumulation=layout.accumulation)
            return self.question.at(alone), self.question
        layouts = self.request.layouts(self.workload)
        rate = self.request.loader_samples_per_s
        question = dataclasses.replace(self.question, loader_samples_per_s=rate)
        return question.at(layouts[0]), question.at(layouts[-1])

    def asking(self, *, assumed: str = "", remark: str = "", **edits: Any) -> "Scenario":
        """The scenario with parts of its question changed; what is assumed is named."""
        return dataclasses.replace(
            self,
            question=dataclasses.replace(self.question, **edits),
            assumed=self.assumed | ({assumed} - {""}),
            remarks=(*self.remarks, *([remark] if remark else [])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfField:
    """One thing that a what-if can change."""

    name: str
    meaning: str
    example: str
    apply: Callable[[Scenario, str], Scenario]
    """Raises ``ValueError`` or a user error for a value that makes no sense."""


def in_cluster(scenario: Scenario, cluster: Cluster) -> Scenario:
    """The scenario with its devices in a cluster.

    Raises
    ------
    UsageError
        If other jobs share the links of the cluster.
    """
    refuse_other_jobs(cluster, by="whatif")
    return scenario.asking(cluster=cluster)


def usable_links() -> tuple[LinkSheet, ...]:
    """Links of the catalogue that one device has to itself."""
    return tuple(link for link in shipped_catalogue().links if link.per != "node")


def _device(scenario: Scenario, value: str) -> Scenario:
    catalogue = shipped_catalogue()
    sheet = find_device(value, catalogue, flag="--set device")
    was = scenario.workload
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


def _link(scenario: Scenario, value: str) -> Scenario:
    known = {link.id: link for link in usable_links()}
    if value not in known:
        raise ValueError(
            f"must be a link of one device or port of perfmodel devices --links, got {value!r}"
            f"{did_you_mean(value, known)}"
        )
    sheet = known[value]
    rate = LINK_SHARE * sheet.rate.bytes_per_s
    now = changes.link_of(scenario.machine)
    return scenario.asking(
        machine=changes.with_link(scenario.machine, dataclasses.replace(now, bytes_per_s=rate)),
        assumed="communication",
        remark=f"{sheet.name}: a large all-reduce is assumed to reach {format_rate(rate, 'B')}, "
        f"{100 * LINK_SHARE:g} % of its data sheet; its latency is taken to be the measured one",
    )


def _cluster(scenario: Scenario, value: str) -> Scenario:
    if value == NO_CLUSTER:
        return scenario.asking(cluster=None)
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
        cluster = scenario.question.cluster
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
        return scenario.asking(cluster=dataclasses.replace(cluster, tiers=kept))

    return apply


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
        _field(base, name)
    return (base, *(changed(base, changes) for changes in asked))


def changed(base: Scenario, values: Mapping[str, str]) -> Scenario:
    """Apply changes by field name.

    Raises
    ------
    UsageError
        If a field is unknown or a value makes no sense; the fields with similar names are listed.
    """
    known = _fields_of(base)
    for name in values:
        _field(base, name)
    scenario = base
    for name, entry in known.items():
        if name in values:
            try:
                scenario = entry.apply(scenario, values[name])
            except ValueError as error:
                raise UsageError(f"--set {name}: {error}") from error
    return dataclasses.replace(scenario, changes={**base.changes, **values})


def _fields_of(scenario: Scenario) -> Mapping[str, WhatIfField]:
    """Fields by name; beside a layout its keys come before what is set of the machine."""
    if scenario.request is not None:
        return _BY_NAME
    return {"workload": _BY_NAME["workload"], **_LAYOUT_FIELDS, **_BY_NAME, **_AS_KEYS}


def _field(scenario: Scenario, name: str) -> WhatIfField:
    known = _fields_of(scenario)
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise UsageError(f"--set: no field is named {name!r}; {hint} (perfmodel whatif --fields)")


def _asked(**parse: Callable[[str], object]) -> Callable[[Scenario, str], Scenario]:
    """Set one value of the request; beside a layout its own keys are set."""
    [(name, read)] = parse.items()

    def apply(scenario: Scenario, value: str) -> Scenario:
        if scenario.request is None:
            raise ValueError("is not set beside --layout; set a key of the layout, such as dp")
        changed: dict[str, Any] = {name: read(value)}
        return dataclasses.replace(
            scenario, request=dataclasses.replace(scenario.request, **changed)
        )

    return apply


def _layout_key(key: str) -> Callable[[Scenario, str], Scenario]:
    """Set one key of the layout, in its grammar."""

    def apply(scenario: Scenario, value: str) -> Scenario:
        if scenario.request is not None:
            raise ValueError("needs --layout")
        words = dict(word.split("=", 1) for word in str(scenario.question.layout).split())
        if key in ("ddp", "fsdp"):
            words = {name: text for name, text in words.items() if name not in ("dp", "zero")}
        text = " ".join(f"{name}={value}" for name, value in (words | {key: value}).items())
        return scenario.asking(layout=parse_layout(text))

    return apply


def _workload(scenario: Scenario, value: str) -> Scenario:
    return scenario.asking(workload=open_workload(scenario.machine, value, where="--set workload"))


def _buffers(scenario: Scenario, value: str) -> Scenario:
    if value not in ("broadcast", "local"):
        raise ValueError(f"must be broadcast or local, got {value!r}")
    if value == "broadcast":
        return scenario
    workload = dataclasses.replace(scenario.workload.workload, buffer_bytes=())
    return _with_workload(scenario, dataclasses.replace(scenario.workload, workload=workload))


def _gradients(scenario: Scenario, value: str) -> Scenario:
    if value not in _GRADIENT_BITS:
        raise ValueError(f"must be one of {', '.join(_GRADIENT_BITS)}, got {value!r}")
    share = _GRADIENT_BITS[value] / _GRADIENT_BITS["fp32"]
    if share == 1:
        return scenario
    return scenario.asking(
        machine=changes.with_gradient_share(scenario.machine, share),
        assumed="communication",
        remark=f"gradients sent as {value}: converting them is assumed free",
    )


def _precision(scenario: Scenario, value: str) -> Scenario:
    if value not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"must be fp32, bf16 or fp16, got {value!r}")
    if scenario.workload.evidence is not None:
        raise ValueError("a traced workload has its own precision; trace it with --precision")
    if value == "fp32":
        return scenario
    speed = changes.matrix_speed(scenario.machine, value)
    logs = [math.log(share / speed + 1 - share) for share in _MATRIX_SHARES]
    factor = math.exp(sum(logs) / 2)
    spread = abs(logs[0] - logs[1]) / 2 / DEVIATE_90
    workload = changes.scaled(
        scenario.workload, ("forward", "backward"), factor, relative_error=spread
    )
    return _with_workload(
        scenario,
        workload,
        assumed="compute",
        remark=f"matrix products in {value} run {speed:.3g} times as fast as in fp32 here; they are "
        "assumed to be half to all of forward and backward",
    )


def _bandwidth(scenario: Scenario, value: str) -> Scenario:
    link = changes.link_of(scenario.machine)
    allowed = "a rate such as 400Gb/s above 0, or a factor such as 2x"
    rate = _value_or_factor(value, link.bytes_per_s, parse_bandwidth, allowed)
    return _linked(scenario, dataclasses.replace(link, bytes_per_s=rate))


def _latency(scenario: Scenario, value: str) -> Scenario:
    link = changes.link_of(scenario.machine)
    allowed = "a time such as 10us above 0, or a factor such as 0.5x"
    latency_s = _value_or_factor(value, link.latency_s, parse_duration, allowed)
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


def _linked(scenario: Scenario, link: changes.Link) -> Scenario:
    return scenario.asking(
        machine=changes.with_link(scenario.machine, link), assumed="communication"
    )


def _device_speed(scenario: Scenario, value: str) -> Scenario:
    factor = _factor(value)
    faster = scenario.asking(machine=changes.with_device_speed(scenario.machine, factor))
    workload = changes.scaled(scenario.workload, changes.DEVICE_PHASES, 1 / factor)
    return _with_workload(faster, workload, assumed="compute")


def _host_speed(scenario: Scenario, value: str) -> Scenario:
    workload = changes.scaled(scenario.workload, changes.HOST_PHASES, 1 / _factor(value))
    return _with_workload(scenario, workload, assumed="compute")


def _rank_noise(scenario: Scenario, value: str) -> Scenario:
    factor = parse_factor(value)
    if factor is None:
        raise ValueError(f"must look like 0.5x, got {value!r}")
    workload = changes.with_rank_noise(scenario.workload, factor)
    return _with_workload(scenario, workload, assumed="stragglers")


def _with_workload(
    scenario: Scenario, workload: MeasuredWorkload, *, assumed: str = "", remark: str = ""
) -> Scenario:
    """Replace the workload here and, where it is calibrated, in the machine."""
    entries = tuple(
        workload if entry.workload.name == workload.workload.name else entry
        for entry in scenario.machine.workloads
    )
    machine = dataclasses.replace(scenario.machine, workloads=entries)
    return scenario.asking(machine=machine, workload=workload, assumed=assumed, remark=remark)


def _factor(value: str) -> float:
    factor = parse_factor(value)
    if factor is None:
        raise ValueError(f"must look like 2x, got {value!r}")
    if not factor > 0:
        raise ValueError(f"must be > 0, got {factor:g}")
    return factor


def _cap_mb(value: str) -> float | None:
    return None if value == "default" else parse_bytes(value) / MIB


def _rate(value: str) -> float | None:
    return None if value == "none" else parse_number(value)


FIELDS: Final = (
    WhatIfField(
        name="workload",
        meaning="another calibrated workload by name, or a workload file of perfmodel trace",
        example="transformer",
        apply=_workload,
    ),
    WhatIfField(
        name="device",
        meaning="device that is not present, by data-sheet ratios (perfmodel devices); for traced workloads",
        example="h100-sxm",
        apply=_device,
    ),
    WhatIfField(
        name="devices",
        meaning="number of devices",
        example="64",
        apply=_asked(world_sizes=lambda value: (parse_count(value),)),
    ),
    WhatIfField(
        name="batch",
        meaning="samples per forward pass of each device (weak), or per step of all (strong)",
        example="128",
        apply=_asked(batch=parse_count),
    ),
    WhatIfField(
        name="accumulation",
        meaning="forward and backward passes per optimizer step",
        example="4",
        apply=_asked(accumulation=parse_count),
    ),
    WhatIfField(
        name="bucket_cap",
        meaning="size of a bucket of gradients, or default",
        example="50MiB",
        apply=_asked(bucket_cap_mb=_cap_mb),
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
        apply=_asked(loader_samples_per_s=_rate),
    ),
    WhatIfField(
        name="network.link",
        meaning=f"link of the catalogue (perfmodel devices --links) at {100 * LINK_SHARE:g} % of its data sheet",
        example="eth-400",
        apply=_link,
    ),
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
_BY_NAME: Final = {entry.name: entry for entry in FIELDS}
#: Keys of the layout are fields as well, where a layout is asked about.
_LAYOUT_FIELDS: Final = {
    key: WhatIfField(name=key, meaning="key of the layout", example="2", apply=_layout_key(key))
    for key in KEYS
    if key not in _BY_NAME
}
#: Names that the layout shares with the request.
_AS_KEYS: Final = {
    key: dataclasses.replace(_BY_NAME[key], apply=_layout_key(key))
    for key in KEYS
    if key in _BY_NAME
}

"""Fields that a what-if can change: what each means, and what it does to a scenario.

A new field is one entry of ``FIELDS``. They are applied in the order of that table: first what is
trained, then how, then the machine.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from perfmodel.documents.profile import WorkloadProfile
from perfmodel.errors import UsageError
from perfmodel.forecast import open_workload
from perfmodel.predictor import Predictor
from perfmodel.scenarios import machine
from perfmodel.scenarios.hardware_fields import CLUSTER_FIELDS, DEVICE_FIELD, LINK_FIELD
from perfmodel.scenarios.scenario import Scenario, WhatIfField
from perfmodel.scenarios.settings import combinations
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.units import (
    MIB,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_factor,
    parse_number,
)

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
    return _with_workload(scenario, scenario.workload.model_copy(update={"workload": workload}))


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


def _with_workload(scenario: Scenario, workload: WorkloadProfile) -> Scenario:
    """Replace the workload here and, where it is calibrated, in the profile."""
    entries = tuple(
        workload if entry.workload.name == workload.workload.name else entry
        for entry in scenario.profile.workloads
    )
    return dataclasses.replace(
        scenario,
        workload=workload,
        profile=scenario.profile.model_copy(update={"workloads": entries}),
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

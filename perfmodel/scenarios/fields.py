"""Fields that a what-if can change: their names, their meaning, and their order.

A new field is one row of ``FIELDS``; ``changes`` holds what it does. They are applied in the order of that table:
first what is trained, then how, then the machine.
"""

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from perfmodel.documents.hardware import LINK_SHARE
from perfmodel.errors import (
    NotFeasible,
    UsageError,
)
from perfmodel.layout import KEYS, accumulation_for
from perfmodel.machine import InferredMachine
from perfmodel.models import read_model
from perfmodel.scenarios import (
    DEVICE_PHASES,
    HOST_PHASES,
    Apply,
    Scenario,
    asked,
    cap_mb,
    layout_key,
    layout_of,
    link_value,
    rate_limit,
    set_buffers,
    set_cluster,
    set_device,
    set_gradients,
    set_link,
    set_precision,
    set_rank_noise,
    set_workload,
    speed_of,
    tier_value,
    yes_or_no,
)
from perfmodel.units import (
    parse_bandwidth,
    parse_count,
    parse_duration,
    parse_number,
    parse_share,
)

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
        "another calibrated workload by name, or a workload file of perfmodel trace", set_workload),
    WhatIfField("device", "h100-sxm",
        "device that is not present, by data-sheet ratios (perfmodel devices); for traced workloads", set_device),
    WhatIfField("devices", "64", "number of devices", asked("world_sizes", lambda value: (parse_count(value),))),
    WhatIfField("batch", "128",
        "samples per forward pass of each device (weak), or per step of all (strong)", asked("batch", parse_count)),
    WhatIfField("accumulation", "4",
        "forward and backward passes per optimizer step", asked("accumulation", parse_count)),
    WhatIfField("bucket_cap", "50MiB", "size of a bucket of gradients, or default", asked("bucket_cap_mb", cap_mb)),
    WhatIfField("buffers", "local",
        "broadcast, or local: rank 0's buffers are not sent before each step", set_buffers),
    WhatIfField("precision", "bf16",
        "type of forward and backward: fp32, bf16 or fp16, by the kernels that were timed in both", set_precision),
    WhatIfField("loader.samples_per_s", "2000",
        "what the input pipeline feeds one device, or none: no limit", asked("loader_samples_per_s", rate_limit)),
    WhatIfField("sync_every_step", "yes",
        "yes: every step waits for the device, as loss.item() does; no: the host runs ahead",
        asked("sync_every_step", yes_or_no)),
    WhatIfField("network.link", "eth-400",
        f"link of the catalogue (perfmodel devices --links) at {100 * LINK_SHARE:g} % of its data sheet", set_link),
    WhatIfField("network.bandwidth", "400Gb/s or 2x",
        "busbw that a large all-reduce reaches (less than the nominal rate), or a factor",
        link_value("bytes_per_s", parse_bandwidth, "a rate such as 400Gb/s above 0, or a factor such as 2x")),
    WhatIfField("network.latency", "10us or 0.5x", "time of the shortest message between two ranks, or a factor",
        link_value("latency_s", parse_duration, "a time such as 10us above 0, or a factor such as 0.5x")),
    # After the network: what it carries does not change how fast it is said to be.
    WhatIfField("gradients", "bf16",
        "type in which gradients are sent: fp32, bf16, fp16 or fp8; converting is assumed free", set_gradients),
    WhatIfField("device.speed", "2x",
        "factor on the speed of forward, backward, optimizer and copies into buckets", speed_of(DEVICE_PHASES)),
    WhatIfField("host.speed", "1.5x",
        "factor on the speed of preparing input and, on GPUs, of issuing operators", speed_of(HOST_PHASES)),
    WhatIfField("ranks.noise", "0x",
        "factor on how much steps and ranks differ, in log; 0x: nobody waits for the slowest", set_rank_noise),
    WhatIfField("cluster", "FILE.toml",
        "cluster file: links between the devices; none: one ring of links like the measured ones", set_cluster),
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

    Raises
    ------
    UsageError
        If a field is unknown or given twice, a value makes no sense, or there are too many combinations.
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

    Raises
    ------
    UsageError
        If a field is unknown or a value makes no sense; the fields with similar names are listed.
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

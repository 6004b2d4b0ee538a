"""Fields that put other hardware in place: a device or link of the catalogue, a cluster and its tiers."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from perfmodel.context import refuse_other_jobs
from perfmodel.documents.catalogue import LinkSheet
from perfmodel.documents.cluster import read_cluster
from perfmodel.errors import CalibrationUnavailable, UsageError, did_you_mean, refuse_unknown
from perfmodel.forecast import open_workload
from perfmodel.hardware.catalogue import LINK_SHARE, find_device, shipped_catalogue
from perfmodel.hardware.rescale import rescaled_profile
from perfmodel.predictor import Predictor
from perfmodel.scenarios import machine
from perfmodel.scenarios.scenario import Scenario, WhatIfField
from perfmodel.topology.cluster import Cluster, Tier
from perfmodel.units import (
    format_rate,
    parse_bandwidth,
    parse_count,
    parse_duration,
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

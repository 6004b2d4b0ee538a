"""Which resource is the busiest: devices, links, or the machine that plays them all."""

from typing import Final

import numpy as np

from perfmodel.documents.testbed import STANDS_OUT, Fabric, TrainingRun, TrainingSetting
from validate.testbed.shaped import path

HOST: Final = "host CPU"


def device_name(setting: TrainingSetting) -> str:
    """Devices as a resource: the known slow one, or all of them."""
    if not setting.noise.slow_ranks:
        return "devices"
    rank, _ = max(setting.noise.slow_ranks, key=lambda entry: entry[1])
    return f"device of rank {rank}"


def link_uses(fabric: Fabric, of_collectives: dict[str, float]) -> dict[str, float]:
    """Busy share of the busiest link of each kind; named on its own if it stands out.

    Parameters
    ----------
    of_collectives
        Busy share of each link without steady traffic, which is added here.
    """
    uses = dict(of_collectives)
    rates = [*fabric.node_bytes_per_s, *fabric.rack_bytes_per_s]
    capacity = dict(zip(uses, rates, strict=True))
    for stream in fabric.background:
        for link in path(fabric, stream.from_node, stream.to_node):
            uses[link] += stream.bytes_per_s / capacity[link]
    found = {}
    for kind in ("node", "rack"):
        ordered = sorted(
            ((use, link) for link, use in uses.items() if f" {kind} " in link), reverse=True
        )
        if not ordered:
            continue
        use, link = ordered[0]
        stands_out = len(ordered) > 1 and use > STANDS_OUT * ordered[1][0]
        found[link if stands_out else f"{kind} uplinks"] = use
    return found


def limit(uses: dict[str, float]) -> str:
    """The busiest resource."""
    return max(uses, key=lambda name: uses[name])


def observed_uses(run: TrainingRun) -> dict[str, float]:
    """Busy share of each resource as the counters saw it."""
    setting = run.setting
    steps_s = float(np.sum(run.step_s))
    slowest = np.max(run.factors, axis=0)
    busy_s = setting.model.compute_s * setting.accumulation * float(slowest.sum())
    busy_s += setting.model.optimizer_s * len(run.step_s)
    rates = [*setting.fabric.node_bytes_per_s, *setting.fabric.rack_bytes_per_s]
    # Counters hold the steady traffic already.
    quiet = setting.fabric.model_copy(update={"background": ()})
    sent = {
        link: size / run.host.window_s / rate
        for (link, size), rate in zip(run.link_bytes.items(), rates, strict=True)
    }
    return {
        device_name(setting): busy_s / steps_s,
        HOST: run.host.own_share,
        **link_uses(quiet, sent),
    }

"""Use case: measure collectives alone over message sizes and group sizes, without any training."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from calibrate.campaign import Campaign, Progress, measure
from calibrate.environment import describe_environment, place, provenance
from calibrate.experiment import doubling_sizes
from calibrate.fit.profile import collective_profiles
from calibrate.launch import Launcher
from calibrate.task import CollectiveTask, Task
from calibrate.topology import LaunchFlags
from perfmodel.documents.importers import CollectivesDocument
from perfmodel.documents.observation import CollectiveObservation, read_observations
from perfmodel.errors import UsageError
from perfmodel.machine.measured import MeasuredCollective
from perfmodel.units import Seconds

NETWORK: Final = "network.json"
MEASURABLE: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send_recv",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """Which collectives, how large, how often."""

    folder: Path
    collectives: tuple[str, ...] = ("all_reduce",)
    sizes_bytes: tuple[int, ...] = tuple(2**power for power in range(10, 25))
    num_rounds: int = 4
    target_s: Seconds = 0.1
    """Time spent on one collective of one size and group in one round. [s]"""
    device: str = "auto"
    flags: LaunchFlags = field(default_factory=LaunchFlags)
    seed: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse collectives that no probe knows, and empty plans."""
        for collective in self.collectives:
            if collective not in MEASURABLE:
                raise UsageError(
                    f"--collectives: must be among {', '.join(MEASURABLE)}, got {collective!r}"
                )
        if not self.collectives or not self.sizes_bytes or min(self.sizes_bytes) < 4:
            raise UsageError(
                "--collectives, --sizes: must name at least one collective and sizes >= 4 bytes"
            )
        if self.num_rounds < 1:
            raise UsageError(f"--rounds: must be >= 1, got {self.num_rounds}")


def measure_network(
    request: NetworkRequest, launcher: Launcher, *, on_progress: Callable[[Progress], None]
) -> CollectivesDocument:
    """Measure every collective at group sizes 2, 4, 8 ... and write the curves beside the raw times."""
    environment = describe_environment()
    here = place(environment, request.device, request.flags, may_share_cores=True)
    topology = here.topology
    groups = doubling_sizes(topology.world_size)
    plan = {
        "stage": "network",
        "collectives": request.collectives,
        "sizes_bytes": request.sizes_bytes,
        "num_rounds": request.num_rounds,
        "target_s": request.target_s,
        "device": here.device_kind,
        "seed": request.seed,
        "num_nodes": topology.num_nodes,
        "ranks_per_node": topology.ranks_per_node,
        "conditions": here.conditions,
    }
    observations = measure(
        Campaign(
            folder=request.folder,
            plan=plan,
            rounds=tuple(_round(request, groups, index) for index in range(request.num_rounds)),
            placement=here,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    found = [
        entry
        for entry in read_observations(observations)
        if isinstance(entry, CollectiveObservation)
    ]
    document = CollectivesDocument(
        provenance=provenance(environment, seed=request.seed),
        system=f"{topology.num_nodes} x {topology.ranks_per_node} ranks on this machine",
        library="nccl" if here.device_kind == "cuda" else "gloo",
        ranks_per_node=topology.ranks_per_node,
        collectives=tuple(
            MeasuredCollective(
                collective=entry.collective,
                world_size=entry.world_size,
                num_nodes=-(-entry.world_size // topology.ranks_per_node),
                points=entry.points,
            )
            for entry in collective_profiles(found, back_to_back=here.device_kind != "cpu")
        ),
        notes=(),
    )
    if topology.node_rank == 0:
        document.write(request.folder / NETWORK)
    return document


def _round(request: NetworkRequest, groups: Iterable[int], index: int) -> tuple[Task, ...]:
    """All points of one round in an order of their own."""
    tasks: list[Task] = [
        CollectiveTask(
            name=f"{index}: {collective} n={world_size} {size_bytes}",
            round=index,
            collective=collective,
            world_size=world_size,
            size_bytes=size_bytes,
            target_s=request.target_s,
        )
        for collective in request.collectives
        for world_size in groups
        for size_bytes in request.sizes_bytes
        if world_size > 1 and (collective != "send_recv" or world_size == 2)
    ]
    random.Random(f"{request.seed}-{index}").shuffle(tasks)  # noqa: S311 - an order, not a secret
    return tuple(tasks)

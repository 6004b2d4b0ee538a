"""Which device, rank or group is behind a broken clause, as far as the data say."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

from perfmodel.cost.busbw import busbw_factor
from perfmodel.documents.acceptance import Clause, ClauseKind
from perfmodel.documents.observation import Observation, StepObservation
from perfmodel.documents.profile import ProfileDocument
from perfmodel.parallelism.strategy import Setting, Synchronisation
from perfmodel.units import format_rate

#: A rank is named if its steps are longer than those of the median rank by more than this.
_SLOW_RATIO: Final = 1.02


def culprits(
    clause: Clause, profile: ProfileDocument, observations: Sequence[Observation]
) -> tuple[str, ...]:
    """Sentences; none if nothing points anywhere."""
    match clause.kind:
        case ClauseKind.SPREAD | ClauseKind.STEP:
            return tuple(_slow_ranks(profile, observations))
        case ClauseKind.BUSBW | ClauseKind.LATENCY:
            return tuple(_groups(profile))
        case ClauseKind.GOODPUT:
            return ()
        case ClauseKind.GEMM:
            return (*_slow_ranks(profile, observations), f"device: {profile.device_name}")


def unmeasured_links(profile: ProfileDocument) -> tuple[str, ...]:
    """Links that no measured all-reduce crossed, in sentences."""
    sizes = [entry.world_size for entry in profile.collectives if entry.collective == "all_reduce"]
    if not sizes:
        return ("no all-reduce was measured: nothing is said about any link",)
    found = []
    if max(sizes) <= profile.ranks_per_node:
        found.append("no group crossed nodes: nothing is said about the network between them")
    if max(sizes) < profile.max_world_size:
        found.append(
            f"the largest group had {max(sizes)} of {profile.max_world_size} ranks: the links of the "
            "others are in no collective"
        )
    return tuple(found)


def rank_ratios(observations: Sequence[Observation]) -> dict[int, float]:
    """Time of each rank over the median rank, in steps in which nobody waits for anybody.

    Ranks are compared within a visit, so that the machine's speed at that moment cancels; what
    counts is the median over visits.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for observation in observations:
        if isinstance(observation, StepObservation) and _is_local(observation.setting):
            steps_s = {rank.rank: median(rank.step_s) for rank in observation.ranks}
            middle_s = median(steps_s.values())
            for rank, step_s in steps_s.items():
                found[rank].append(step_s / middle_s)
    return {rank: median(ratios) for rank, ratios in sorted(found.items())}


def _is_local(setting: Setting) -> bool:
    """Many ranks at work, none of which waits for another."""
    return setting.world_size > 1 and setting.synchronisation is Synchronisation.NO_SYNC


def _slow_ranks(profile: ProfileDocument, observations: Sequence[Observation]) -> Iterator[str]:
    slow = {rank: ratio for rank, ratio in rank_ratios(observations).items() if ratio > _SLOW_RATIO}
    for rank, ratio in sorted(slow.items(), key=lambda item: -item[1]):
        node, local_rank = divmod(rank, profile.ranks_per_node)
        yield (
            f"rank {rank} (node {node}, {_device(profile.environment, local_rank)}) takes "
            f"{ratio:.2f} times as long as the median rank"
        )


def _device(environment: Mapping[str, object], local_rank: int) -> str:
    gpus = environment.get("gpus")
    if isinstance(gpus, list) and local_rank < len(gpus) and isinstance(gpus[local_rank], dict):
        return f"device {local_rank}: {gpus[local_rank].get('uuid') or 'without a name'}"
    return f"device {local_rank}"


def _groups(profile: ProfileDocument) -> Iterator[str]:
    """Bandwidth by group size: where it drops is where the slow link is."""
    found = {}
    for entry in profile.collectives:
        factor = busbw_factor("all_reduce", world_size=entry.world_size)
        if entry.collective == "all_reduce" and factor and entry.points:
            last = max(entry.points, key=lambda point: point.at)
            found[entry.world_size] = last.at * factor / last.time_s
    if found:
        rates = ", ".join(
            f"{n} ranks {format_rate(rate, 'B')}" for n, rate in sorted(found.items())
        )
        yield f"link: busbw of the largest all-reduce by group: {rates}"
    inside = [rate for n, rate in found.items() if n <= profile.ranks_per_node]
    across = [rate for n, rate in found.items() if n > profile.ranks_per_node]
    if inside and across and min(across) < min(inside) / 2:
        yield "link: it drops where a group leaves its node, the network between nodes is the slow one"

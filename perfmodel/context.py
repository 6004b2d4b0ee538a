"""What stands beside a prediction: real runs of the same settings, and caveats."""

import dataclasses
from collections.abc import Iterable, Sequence

from perfmodel.cost.batch_law import calibrated_law
from perfmodel.cost.traced import origin_caveats
from perfmodel.documents.age import age_caveats
from perfmodel.documents.calm import CALM
from perfmodel.documents.prediction import Evidence, MeasuredPoint, PredictedPoint
from perfmodel.documents.profile import ProfileDocument, WorkloadProfile
from perfmodel.errors import UsageError
from perfmodel.parallelism.strategy import Setting, Synchronisation
from perfmodel.topology.cluster import Cluster


def measured_points(
    profile: ProfileDocument, workload: str, settings: Sequence[Setting]
) -> tuple[MeasuredPoint, ...]:
    """Calibration runs that are the same as one of the settings, with measured speed-ups."""
    steps_s = {
        (step.world_size, step.micro_batch, step.synchronisation, step.bucket_cap_mb): step.step_s
        for step in profile.steps
        if step.workload == workload
    }
    points = []
    baseline = settings[0]
    for setting in settings:
        step_s = steps_s.get(_key(setting))
        if step_s is None or setting.accumulation != 1:
            continue
        single = dataclasses.replace(
            baseline, world_size=1, synchronisation=Synchronisation.NONE, bucket_cap_mb=None
        )
        single_s = steps_s.get(_key(single))
        speedup = (
            None
            if single_s is None
            else setting.global_batch / single.global_batch * single_s / step_s
        )
        points.append(
            MeasuredPoint(
                world_size=setting.world_size,
                micro_batch=setting.micro_batch,
                step_s=step_s,
                speedup=speedup,
            )
        )
    return tuple(points)


def _key(setting: Setting) -> tuple[int, int, str, float | None]:
    return (
        setting.world_size,
        setting.micro_batch,
        setting.synchronisation.value,
        setting.bucket_cap_mb,
    )


def caveats(
    profile: ProfileDocument,
    points: Sequence[PredictedPoint],
    *,
    workload: WorkloadProfile,
    cluster: Cluster | None = None,
) -> tuple[str, ...]:
    """What a reader must know before acting on the numbers."""
    found = [
        *age_caveats(profile.provenance.created_utc),
        *_condition_caveats(profile),
        *profile.undetermined,
        *origin_caveats(profile, workload),
    ]
    largest = max(point.setting.world_size for point in points)
    if profile.rescaling is not None:
        found += profile.rescaling.notes
        found += profile.rescaling.notes_on_groups if largest > 1 else ()
    if largest > profile.max_world_size:
        found.append(_beyond(profile, largest, cluster))
    found += critical_caveats(
        profile, workload.workload.name, [point.setting.global_batch for point in points]
    )
    if cluster is not None and profile.num_nodes > 1 and profile.ranks_per_node > 1:
        found.append(
            "collectives that crossed nodes were measured, but through two tiers at once: links "
            "between nodes are as the cluster file says"
        )
    outside = sorted(
        {
            point.setting.micro_batch
            for point in points
            if point.evidence["compute"] is Evidence.EXTRAPOLATED
        }
    )
    if outside:
        found.append(f"micro-batches outside the calibrated range: {', '.join(map(str, outside))}")
    return tuple(found)


def _condition_caveats(profile: ProfileDocument) -> list[str]:
    """What a training must set to be like the measured ones, beside its number of threads."""
    found = []
    if profile.stolen > CALM:
        found.append(
            f"while the machine was measured its hypervisor gave {100 * profile.stolen:.0f} % of the "
            "processor time that was wanted to others: calibrate again in a calmer hour, or with --patience"
        )
    kept = [f"{name}={v}" for name, v in profile.variables.items() if name.startswith("MALLOC_")]
    if kept and profile.rescaling is None:
        words = "set the same where you train: how much memory a step touches anew hangs on them"
        found.append(f"ranks were measured with {' '.join(kept)}: {words} (docs/methods.md)")
    return found


def critical_caveats(
    profile: ProfileDocument, workload: str, global_batches: Iterable[int]
) -> list[str]:
    """A sentence where batches pass the critical one, if a noise scale of the workload was measured."""
    scale = profile.noise_scale(workload)
    largest = max(global_batches)
    if scale is None or largest <= scale.noise_scale:
        return []
    reference = min(scale.batch, largest)
    spent = calibrated_law(scale).samples_ratio(largest, reference=reference)
    task = f"{workload} learning {scale.samples}"
    return [
        (
            f"global batches up to {largest} pass the critical batch of about {scale.noise_scale:.0f} "
            f"samples ({task}): {largest} needs about {spent.p50:.1f} times the samples "
            f"[{spent.p5:.1f} - {spent.p95:.1f}] of {reference} to the same loss; see perfmodel batch"
        )
    ]


def refuse_other_jobs(cluster: Cluster | None, *, by: str) -> None:
    """Refuse a cluster whose links other jobs share, where only single predictions know of them.

    Raises
    ------
    UsageError
        If the cluster file says that there are such jobs.
    """
    if cluster is not None and any(entry.jobs for entry in cluster.traffic):
        raise UsageError(
            f"{by}: cluster {cluster.name} must have no [[traffic]] jobs, which predict alone "
            "simulates; remove them, or give the traffic as a bandwidth"
        )


def _beyond(profile: ProfileDocument, largest: int, cluster: Cluster | None) -> str:
    """How groups larger than any measured one come about."""
    links = (
        "one ring of links like the measured ones"
        if cluster is None
        else f"{cluster.name}: links that were not measured are as its file says, never confirmed"
    )
    return (
        f"at most {profile.max_world_size} ranks were measured together; up to {largest} "
        f"devices are extrapolated as {links}, with stragglers drawn from the measured noise"
    )

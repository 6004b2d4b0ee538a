"""From a profile to the terms of any layout, with draws that carry the profile's uncertainty."""

import copy
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost import CurveDraws, Samples, Terms
from perfmodel.cost.network import Group, Network
from perfmodel.engine.stragglers import RankNoise
from perfmodel.errors import CalibrationUnavailable
from perfmodel.layout import Layout, RunSetting, Synchronisation
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    HEAVY_TAILED_90,
    PHASE_CURVES,
    CurvePoint,
    DdpCosts,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
    StepNoise,
)
from perfmodel.statistics import heavy_tailed_quantiles
from perfmodel.step import Cause
from perfmodel.step.stages import gradient_buckets
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import Workload

if TYPE_CHECKING:
    from perfmodel.machine import Cluster

_PHASES: tuple[tuple[Cause, str], ...] = (
    (Cause.INPUT, "input"),
    (Cause.FORWARD, "forward"),
    (Cause.BACKWARD, "backward"),
    (Cause.OPTIMIZER, "optimizer"),
)
_ISSUES: tuple[tuple[Cause, str], ...] = (
    (Cause.FORWARD, "dispatch_forward"),
    (Cause.BACKWARD, "dispatch_backward"),
    (Cause.OPTIMIZER, "dispatch_optimizer"),
)


#: Uncertainty, in log, of anything borrowed from other workloads: at least this.
_BORROWED_SPREAD = 0.5


class CostModel:
    """Draws every parameter of a profile once, so that layouts share their uncertainty.

    Two layouts that rest on the same measurement are wrong together; their ratio, a speed-up, is
    then less uncertain than either.
    """

    def __init__(
        self,
        profile: MeasuredMachine,
        *,
        num_draws: int,
        seed: int,
        cluster: "Cluster | None" = None,
    ) -> None:
        self.profile = profile
        self._cluster = cluster
        self.num_draws = num_draws
        self._seed = seed
        self._curves: dict[tuple[object, ...], CurveDraws] = {}
        self._network = Network.sample(profile, cluster=cluster, num_draws=num_draws, rng=self._rng)
        self._ddp = self._sample_ddp()
        self._device = self._sample_device()

    def with_ddp(self, ddp: DdpCosts) -> "CostModel":
        """The same with other costs of DDP; what was drawn of links and curves stays."""
        found = copy.copy(self)
        found.profile = replace(self.profile, ddp=ddp)
        found._ddp = found._sample_ddp()  # noqa: SLF001 - its own kind
        return found

    def terms(
        self, workload: MeasuredWorkload, layout: Layout, *, loader_samples_per_s: float | None
    ) -> Terms:
        """Cost terms of one layout of a calibrated workload."""
        phases = _phases_at(workload, layout.world_size)
        shared = self._shared(workload)
        compute_s = {
            cause: self._read(workload, phases, name, layout.micro_batch) * self._device * shared
            for cause, name in _PHASES
        }
        issue_s = {
            cause: self._read(workload, phases, name, layout.micro_batch) * shared
            for cause, name in _ISSUES
            if getattr(phases, name)
        }
        # Without another rank there is nothing to share the device with.
        speeds = (
            (self._ddp["compute_speed"], self._ddp["comm_speed"])
            if layout.world_size > 1
            else (np.ones(self.num_draws), np.ones(self.num_draws))
        )
        return Terms(
            compute_s=compute_s,
            issue_s=issue_s,
            bucket_s=self._ddp["bucket_s"],
            bucket_s_per_byte=self._ddp["bucket_s_per_byte"],
            all_reduce_s=lambda size_bytes: self.all_reduce_s(size_bytes, layout.world_size),
            broadcast_s=lambda size_bytes: self.broadcast_s(size_bytes, layout.world_size),
            load_s=self._load_s(layout, loader_samples_per_s),
            slowest=self.slowest(workload, layout),
            compute_speed=speeds[0],
            comm_speed=speeds[1],
            evidence=self._evidence(workload, phases, layout),
        )

    def _rng(self, name: str) -> np.random.Generator:
        """Randomness of its own for each parameter, so that the order of questions is no matter."""
        return np.random.default_rng([self._seed, zlib.crc32(name.encode())])

    def _sample_ddp(self) -> Mapping[str, Samples]:
        """Bootstrap draws, repeated as needed; draw 0 is the fitted value."""
        ddp = self.profile.ddp
        rows = self._rng("ddp").integers(0, len(ddp.draws), self.num_draws)
        table = np.array(ddp.draws)[rows]
        table[0] = ddp.values
        return {name: table[:, column] for column, name in enumerate(ddp.names)}

    def _sample_device(self) -> Samples:
        """Factors of a device that was never run: all its times are wrong together."""
        deviates = self._rng("device").standard_normal(self.num_draws)
        deviates[0] = 0.0
        rescaling = self.profile.rescaling
        factors: Samples = np.exp((0.0 if rescaling is None else rescaling.log_error) * deviates)
        return factors

    def _shared(self, workload: MeasuredWorkload) -> Samples | float:
        """Factors of a workload whose law was fitted to others: all its phases are wrong together.

        Evenly spaced quantiles of Student's distribution with four degrees of freedom, in random order.
        """
        if workload.shared_log_error == 0:
            return 1.0
        places = (np.arange(self.num_draws - 1) + 0.5) / max(1, self.num_draws - 1)
        deviates = np.concatenate(([0.0], heavy_tailed_quantiles(places)))
        self._rng(f"law {workload.workload.name}").shuffle(deviates[1:])
        factors: Samples = np.exp(workload.shared_log_error / HEAVY_TAILED_90 * deviates)
        return factors

    def _read(
        self, workload: MeasuredWorkload, phases: PhaseCurves, name: str, micro_batch: float
    ) -> Samples:
        key = (workload.workload.name, phases.world_size, name)
        points: tuple[CurvePoint, ...] = getattr(phases, name)
        # The same workload may have other times: by its trace, or after a what-if.
        if (key, points) not in self._curves:
            self._curves[key, points] = CurveDraws.sample(
                points, num_draws=self.num_draws, rng=self._rng(repr(key))
            )
        return self._curves[key, points].read(micro_batch)

    @property
    def network(self) -> Network:
        """What collectives cost."""
        if self._network is None:
            place = "" if self._cluster is None else f" inside one tier of {self._cluster.name}"
            raise CalibrationUnavailable(
                f"--devices: several devices need an all-reduce measured{place}, but the profile "
                "holds none; calibrate with --nproc 2 or correct the counts of the cluster file"
            )
        return self._network

    def all_reduce_s(
        self, size_bytes: Bytes | Samples, world_size: int, *, bandwidth: Samples | float = 1.0
    ) -> Samples:
        """Time of one all-reduce alone, if links had so many times their bandwidth. [s]"""
        alone_s = self.network.time_s("all_reduce", size_bytes, Group(world_size), rate=bandwidth)
        return alone_s * self._ddp["all_reduce_scale"]

    def broadcast_s(
        self, size_bytes: Bytes | Samples, world_size: int, *, bandwidth: Samples | float = 1.0
    ) -> Samples:
        """Time of one broadcast alone, if links had so many times their bandwidth. [s]"""
        return self.network.time_s("broadcast", size_bytes, Group(world_size), rate=bandwidth)

    def collective_s(
        self, kind: str, size_bytes: Bytes | Samples, group: Group, *, in_step: bool
    ) -> Samples:
        """Time of one collective of a kind in a group, alone or as DDP has it in a step. [s]"""
        alone_s = self.network.time_s(kind, size_bytes, group)
        return alone_s * self._ddp["all_reduce_scale"] if in_step else alone_s

    def deviates(self, name: str) -> Samples:
        """Standard normal numbers of their own for a name; draw 0 is 0."""
        found = self._rng(name).standard_normal(self.num_draws)
        found[0] = 0.0
        return found

    def _load_s(self, layout: Layout, samples_per_s: float | None) -> Samples:
        seconds = 0.0 if samples_per_s is None else layout.local_batch / samples_per_s
        return np.full(self.num_draws, seconds)

    def slowest(
        self, workload: MeasuredWorkload, layout: Layout, *, probability: float = 0.5
    ) -> Samples:
        """Slowest rank over the typical rank, at a quantile of the steps: ranks differ for good, too.

        Between calibrated batches the logarithm is linear in that of the batch. Where a smaller batch was so
        noisy that its step was longer, the step stays as long until the larger batch makes up for it.
        """
        together = layout.synchronisation is Synchronisation.DDP and layout.world_size > 1
        num_ranks = layout.world_size if together else 1
        known = 1.0 if self._cluster is None else self._cluster.slowest_device(num_ranks)
        if not together and probability == 0.5:
            return np.full(self.num_draws, known)

        def slowest_of(count: int, ratios: Sequence[float]) -> Samples:
            noise = RankNoise(
                step_ratios=np.array(ratios),
                level=1.0,
                rank_spread=workload.rank_spread if together else 0.0,
                num_ranks=self.profile.max_world_size,
            )
            return noise.slowest(
                num_ranks=count,
                probability=probability,
                num_draws=self.num_draws,
                rng=self._rng(f"noise {workload.workload.name} {layout.micro_batch}"),
            )

        by_nodes = self._slower_by_nodes(num_ranks)
        weights = _noise_weights(workload, layout.micro_batch)
        factors = _weighted([(share, slowest_of(num_ranks, one)) for one, share in weights])
        for smaller in workload.noise:
            if smaller.micro_batch < layout.micro_batch:
                grown = self._growth(workload, layout, since=smaller.micro_batch)
                factors = np.maximum(factors, slowest_of(num_ranks, smaller.ratios) / grown)
        factors = factors * by_nodes
        if known == 1.0:
            return factors
        # A device that is known to be slow has noise of its own.
        own = _weighted([(share, slowest_of(1, one)) for one, share in weights])
        return np.maximum(factors, known * own)

    def _slower_by_nodes(self, num_ranks: int) -> Samples | float:
        """How much longer a step takes by its number of nodes, where runs of others show it.

        1 + share log2(nodes)
        """
        cluster = self._cluster
        if cluster is None or not cluster.straggler_share:
            return 1.0
        nodes = -(-num_ranks // (cluster.devices_per_node or 1))
        spread = np.exp(cluster.straggler_log_error * self.deviates("slower by nodes"))
        return 1 + cluster.straggler_share * spread * math.log2(nodes)

    def _growth(self, workload: MeasuredWorkload, layout: Layout, *, since: float) -> float:
        """How much longer a rank computes than with a smaller micro-batch: hidden or not, the lesser."""
        phases = _phases_at(workload, layout.world_size)
        buckets = gradient_buckets(workload.workload, layout)
        copies_s = float(self._ddp["bucket_s"][0]) * sum(each.gradients for each in buckets)
        copies_s += float(self._ddp["bucket_s_per_byte"][0]) * sum(
            each.size_bytes for each in buckets
        )

        def times_s(micro_batch: float) -> tuple[float, float]:
            time_s = {
                name: float(self._read(workload, phases, name, micro_batch)[0])
                for _, name in _PHASES
            }
            once_s = time_s["optimizer"] + layout.accumulation * time_s["input"]
            forward_s, backward_s = (
                layout.accumulation * time_s[name] for name in ("forward", "backward")
            )
            return forward_s + once_s, backward_s + copies_s

        pairs = zip(times_s(layout.micro_batch), times_s(since), strict=True)
        return min(now_s / max(before_s, 1e-12) for now_s, before_s in pairs)

    def _evidence(
        self, workload: MeasuredWorkload, phases: PhaseCurves, layout: Layout
    ) -> dict[str, Evidence]:
        evidence = {"compute": self._compute_evidence(workload, phases, layout.micro_batch)}
        if layout.world_size == 1:
            return evidence
        beyond = layout.world_size > self.profile.max_world_size
        buckets = gradient_buckets(workload.workload, layout)
        evidence["communication"] = self.network.evidence(
            [bucket.size_bytes for bucket in buckets], Group(layout.world_size)
        )
        evidence["interference"] = (
            (Evidence.EXTRAPOLATED if beyond else Evidence.INTERPOLATED)
            if all(self.profile.ddp.determined)
            else Evidence.ASSUMED
        )
        evidence["stragglers"] = Evidence.EXTRAPOLATED if beyond else Evidence.MEASURED
        like = self._cluster is not None and self._cluster.evidence is Evidence.INFERRED
        if like and layout.world_size > self.profile.ranks_per_node:
            evidence["stragglers"] = Evidence.INFERRED
        # Published steps tell nothing of how devices differ.
        if self.profile.device_costs is not None:
            evidence["stragglers"] = Evidence.ASSUMED
        if self.profile.rescaling is not None:
            return dict.fromkeys(evidence, Evidence.ASSUMED)
        return evidence

    def _compute_evidence(
        self, workload: MeasuredWorkload, phases: PhaseCurves, micro_batch: int
    ) -> Evidence:
        if self.profile.rescaling is not None:
            return Evidence.ASSUMED
        if workload.evidence is not None:
            measured = micro_batch in workload.measured_batches and phases.world_size == 1
            return Evidence.MEASURED if measured else workload.evidence
        curve = self._curves[
            (workload.workload.name, phases.world_size, "backward"), phases.backward
        ]
        calibrated = self.profile.workload(workload.workload.name) is not None
        return curve.evidence(micro_batch) if calibrated else Evidence.EXTRAPOLATED


def _phases_at(workload: MeasuredWorkload, world_size: int) -> PhaseCurves:
    """Curves between the measured world sizes, which processors share; a full node beyond the largest."""
    low = max((p for p in workload.phases if p.world_size <= world_size), key=_ranks)
    high = min((p for p in workload.phases if p.world_size >= world_size), key=_ranks, default=low)
    if low.world_size == high.world_size:
        return _without_dips(low)
    weight = (world_size - low.world_size) / (high.world_size - low.world_size)

    def between(name: str) -> tuple[CurvePoint, ...]:
        known = {point.at: point.time_s for point in getattr(low, name)}
        return tuple(
            replace(p, time_s=known.get(p.at, p.time_s) * (1 - weight) + p.time_s * weight)
            for p in getattr(high, name)
        )

    found = {name: between(name) for name in PHASE_CURVES}
    return _without_dips(PhaseCurves(world_size=world_size, **found))


def _ranks(phases: PhaseCurves) -> int:
    return phases.world_size


def contention(workload: MeasuredWorkload, micro_batch: int, ranks: int, *, than: int) -> float:
    """Duration of compute with so many ranks at work beside each other, over that with ``than`` of them.

    Above 1 where ranks share processors or a path to memory; what a library works out on the processors is
    slowed alike.
    """

    def pass_s(world_size: int) -> Seconds:
        phases = _phases_at(workload, world_size)
        passes = zip(phases.forward, phases.backward, strict=True)
        [nearest] = sorted(passes, key=lambda pair: abs(math.log(pair[0].at / micro_batch)))[:1]
        return sum(point.time_s for point in nearest)

    return pass_s(ranks) / (pass_s(than) or 1.0)


def _without_dips(phases: PhaseCurves) -> PhaseCurves:
    """Curves in which more samples never take less time: dips are noise.

    The backward pass, which exchanges may hide, rises by itself; all that nothing hides, together.
    """
    curves = {name: sorted(getattr(phases, name), key=_at) for _, name in _PHASES}
    if len({tuple(map(_at, curve)) for curve in curves.values()}) > 1:
        return phases
    bare = [curves[name] for name in ("forward", "optimizer", "input")]
    bare_s = [sum(point.time_s for point in points) for points in zip(*bare, strict=True)]
    missing_s = {
        "forward": _to_rise(bare_s),
        "backward": _to_rise([point.time_s for point in curves["backward"]]),
    }
    if not any(any(more_s) for more_s in missing_s.values()):
        return phases
    filled: dict[str, Any] = {
        name: tuple(
            replace(point, time_s=point.time_s + more_s)
            for point, more_s in zip(curves[name], of_phase_s, strict=True)
        )
        for name, of_phase_s in missing_s.items()
    }
    return replace(phases, **filled)


def _at(point: CurvePoint) -> float:
    return point.at


def _to_rise(time_s: Sequence[Seconds]) -> list[Seconds]:
    """What each time lacks to the longest one before it. [s]"""
    highest = itertools.accumulate(time_s, max)
    return [high_s - each_s for high_s, each_s in zip(highest, time_s, strict=True)]


def _noise_weights(
    workload: MeasuredWorkload, micro_batch: int
) -> list[tuple[tuple[float, ...], float]]:
    """Ratios of the calibrated micro-batches beside one, and their shares on a logarithmic scale."""
    entries = sorted(workload.noise, key=lambda noise: noise.micro_batch)
    if not entries:
        return [((), 1.0)]
    low = max((e for e in entries if e.micro_batch <= micro_batch), key=_batch, default=entries[0])
    high = min((e for e in entries if e.micro_batch >= micro_batch), key=_batch, default=low)
    if low.micro_batch >= high.micro_batch:
        return [(low.ratios, 1.0)]
    share = math.log(micro_batch / low.micro_batch) / math.log(high.micro_batch / low.micro_batch)
    return [(low.ratios, 1 - share), (high.ratios, share)]


def _batch(noise: StepNoise) -> int:
    return noise.micro_batch


def _weighted(parts: Sequence[tuple[float, Samples]]) -> Samples:
    """Geometric mean of factors."""
    if len(parts) == 1:
        return parts[0][1]
    result: Samples = np.exp(sum(share * np.log(factors) for share, factors in parts))
    return result


def borrowed_profile(profile: MeasuredMachine, workload: Workload) -> MeasuredWorkload:
    """Curves for a workload that was never run, scaled from the calibrated ones by their flop.

    Each calibrated workload tells how long a FLOP takes at its largest batch; their spread is the
    uncertainty. A trace of the operators would do far better; until then this is an extrapolation and
    says so.
    """
    donors = profile.workloads
    batches = sorted({int(p.at) for donor in donors for p in donor.phases[0].forward})
    ends = (batches[0], batches[-1])
    # Backward issues about twice as many operators as forward.
    issue_s = profile.dispatch_s * workload.num_operators
    host = {"forward": issue_s / 3, "backward": issue_s * 2 / 3, "optimizer": 0.0}
    flop = {"forward": workload.forward_flop, "backward": workload.backward_flop}

    def line(constant_s: float, slope_s: float, spread: float) -> tuple[CurvePoint, ...]:
        return tuple(
            CurvePoint(at=batch, time_s=constant_s + slope_s * batch, relative_error=spread)
            for batch in ends
        )

    curves = {"input": line(0.0, 0.0, 0.0)}
    for name, count in flop.items():
        seconds_per_flop, spread = _seconds_per_flop(donors, name)
        constant_s = 0.0 if profile.asynchronous else host[name]
        curves[name] = line(constant_s, count * seconds_per_flop, spread)
    per_parameter_s = float(
        np.median([d.phases[0].optimizer[0].time_s / d.workload.num_parameters for d in donors])
    )
    curves["optimizer"] = line(workload.num_parameters * per_parameter_s, 0.0, _BORROWED_SPREAD)
    if profile.asynchronous:
        curves |= {
            f"dispatch_{name}": line(seconds, 0.0, _BORROWED_SPREAD)
            for name, seconds in host.items()
        }
    return MeasuredWorkload(
        workload=workload,
        phases=tuple(
            PhaseCurves(world_size=phases.world_size, **curves) for phases in donors[0].phases
        ),
        noise=max((donor.noise for donor in donors), key=len),
        rank_spread=max(donor.rank_spread for donor in donors),
    )


def _seconds_per_flop(donors: tuple[MeasuredWorkload, ...], phase: str) -> tuple[float, float]:
    """Geometric mean over workloads, at their largest batch, and its spread in log. [s/FLOP]"""
    logs = []
    for donor in donors:
        largest = getattr(donor.phases[-1], phase)[-1]
        flop = donor.workload.forward_flop if phase == "forward" else donor.workload.backward_flop
        if flop > 0:
            logs.append(math.log(largest.time_s / (largest.at * flop)))
    return math.exp(float(np.mean(logs))), max(_BORROWED_SPREAD, float(np.std(logs)))


#: Of the draws that are the same whenever the same is asked.
SEED = 0
#: Uncertainty, in log, of a workload whose times are borrowed: a prior.
_BORROWED_ERROR = 0.3
#: Of a model that was never compared with anything: a prior.
_UNKNOWN_ERROR = 0.05


def model_form(
    profile: MeasuredMachine,
    earlier: Mapping[RunSetting, float],
    workload: MeasuredWorkload,
    layout: Layout,
    *,
    num_draws: int,
    run_error: float,
) -> Samples:
    """Factors by which the model has been wrong before, in either direction; the first one is 1.

    ``earlier`` holds signed errors of a validation: predicted over measured, minus 1.

    Parameter draws already hold the uncertainty of the measurements, so that the two together are on the
    safe side. No residual tells about a step that was traced: how far its run is off what the layout
    takes in the mean of many comes on top, in log.
    """
    errors = list(
        profile.residual.single_log_errors
        if layout.world_size == 1
        else profile.residual.ddp_log_errors
    )
    errors += _earlier_errors(earlier, workload.workload.name, layout)
    is_calibrated = profile.workload(workload.workload.name) is not None
    if not is_calibrated and workload.evidence is None:
        errors.append(_BORROWED_ERROR)
    pool = np.array(errors or [_UNKNOWN_ERROR])
    # Seeded by the layout, so that the order of questions is no matter.
    rng = np.random.default_rng(
        [SEED, zlib.crc32(seed_text(workload.workload.name, layout).encode())]
    )
    signs = rng.choice([-1, 1], num_draws)
    logs = rng.choice(pool, num_draws) * signs
    # Residuals of calibrated workloads hold the noise of means over as many runs as rounds.
    run_of_one = profile.repeatability.run_of(layout.world_size)
    known = run_of_one / math.sqrt(profile.num_rounds) if is_calibrated else 0.0
    own = math.sqrt(max(0.0, run_error**2 - known**2))
    logs = logs + own * rng.standard_normal(num_draws)
    logs[0] = 0.0
    factors: Samples = np.exp(logs)
    return factors


def seed_text(workload: str, layout: Layout) -> str:
    """A text of its own for every step, which seeds the errors of its form."""
    return RunSetting.of(workload, layout).label


def _earlier_errors(
    earlier: Mapping[RunSetting, float], workload: str, layout: Layout
) -> list[float]:
    """Log errors of earlier fresh runs of the same kind, without those of this very layout."""
    asked = RunSetting.of(workload, layout)
    return [
        float(np.log1p(signed_error))
        for setting, signed_error in earlier.items()
        if (setting.world_size == 1) == (layout.world_size == 1) and setting != asked
    ]

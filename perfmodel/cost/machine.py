"""From a profile to the terms of any layout, with draws that carry the profile's uncertainty."""

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from perfmodel.cost import (
    CollectiveTime,
    CurveDraws,
    Samples,
    Terms,
    contention,
    deviates,
    phases_at,
    phases_under,
)
from perfmodel.cost.accumulation import KERNEL_ERROR, additions, calls_of_additions
from perfmodel.cost.collectives import library_of
from perfmodel.cost.network import KINDS, Network, groups
from perfmodel.errors import CalibrationUnavailable
from perfmodel.layout import Layout, RunSetting, Synchronisation
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    CurvePoint,
    LayoutCost,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
)
from perfmodel.statistics import (
    HEAVY_TAILED_90,
    expected_largest_deviate,
    heavy_tailed_quantiles,
    slowest_pace,
)
from perfmodel.step import Cause, StepProgram, gradient_buckets
from perfmodel.step.compile import compile_step
from perfmodel.units import Bytes

if TYPE_CHECKING:
    from perfmodel.machine import Cluster

#: What the host issues; with the copy of the batch, what takes the time of a phase. Curves have the same names.
_ISSUED: Final = (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER)
_PHASES: Final = (Cause.INPUT, *_ISSUED)
#: What evidence is told of, and the exchanges behind it.
_COMMUNICATION: Final = {
    "communication": (Cause.ALL_REDUCE, Cause.ALL_GATHER, Cause.REDUCE_SCATTER),
    "tensor collectives": (Cause.TENSOR,),
    "pipeline sends": (Cause.P2P,),
}
#: Uncertainty, in log, per doubling of the ranks that share matrices: shares are read from curves. A prior.
_UNCERTAINTY_PER_HALVING: Final = 0.05
#: The same of each family of parallelism that was never run on this machine: a prior.
_UNJUDGED: Final = 0.05


def noise_weights(
    workload: MeasuredWorkload, micro_batch: int
) -> list[tuple[tuple[float, ...], float]]:
    """Step ratios of the calibrated micro-batches beside one, and their shares on a logarithmic scale."""
    entries = sorted(workload.noise, key=lambda noise: noise.micro_batch)
    if not entries:
        return [((), 1.0)]
    low = next((e for e in reversed(entries) if e.micro_batch <= micro_batch), entries[0])
    high = next((e for e in entries if e.micro_batch >= micro_batch), low)
    if low.micro_batch >= high.micro_batch:
        return [(low.ratios, 1.0)]
    share = math.log(micro_batch / low.micro_batch) / math.log(high.micro_batch / low.micro_batch)
    return [(low.ratios, 1 - share), (high.ratios, share)]


PIPELINE: Final = "pipeline"
#: Families by what they exchange, and the operation that carries what they add to it.
CARRIERS: Final = {
    "fsdp": Cause.BUCKET,
    "zero": Cause.BROADCAST,
    "tensor": Cause.TENSOR,
    PIPELINE: Cause.P2P,
}


def families(layout: Layout) -> tuple[str, ...]:
    """What a layout is beyond DistributedDataParallel."""
    uses = (layout.zero > 1, layout.zero == 1, layout.tp > 1, layout.pp > 1)
    return tuple(name for name, used in zip(CARRIERS, uses, strict=True) if used)


def ranks_beside(family: str, layout: Layout) -> int:
    """Ranks that do a family's exchanges at the same time: of one pipeline stage, or the stages."""
    return layout.pp if family == PIPELINE else layout.world_size // layout.pp


def layout_cost(machine: MeasuredMachine, family: str, layout: Layout) -> LayoutCost | None:
    """What a family adds to an exchange, between the measured numbers of ranks; None if never run."""
    found = [cost for cost in machine.layouts if cost.family == family]
    if not found:
        return None
    world_size = ranks_beside(family, layout)
    ranks = [cost.world_size for cost in found]
    between = {
        name: float(np.interp(world_size, ranks, [getattr(cost, name) for cost in found]))
        for name in ("call_s", "byte_s", "log_error")
    }
    return LayoutCost(family=family, world_size=world_size, **between)


def step_program(
    machine: MeasuredMachine, workload: MeasuredWorkload, layout: Layout
) -> StepProgram:
    """The step of a layout."""
    if layout.is_ddp:
        return compile_step(workload.workload, layout, asynchronous=machine.asynchronous)
    # Operators and their division double the start of a prediction that needs neither.
    from perfmodel.cost.shares import divided_program  # noqa: PLC0415

    phases = phases_under(machine, workload, layout)
    backward = CurveDraws.sample(phases.backward, num_draws=1, rng=np.random.default_rng(SEED))
    backward_s = float(backward.read(layout.micro_batch)[0])
    return divided_program(machine, workload, layout, backward_s=backward_s)


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
        cluster: "Cluster | None" = None,
    ) -> None:
        self.profile = profile
        self._cluster = cluster
        self.num_draws = num_draws
        self._curves: dict[tuple[object, ...], CurveDraws] = {}
        self._network = Network.sample(profile, cluster=cluster, num_draws=num_draws, rng=self._rng)
        # Bootstrap draws, repeated as needed; draw 0 is the fitted value.
        ddp = profile.ddp
        table = np.array(ddp.draws)[self._rng("ddp").integers(0, len(ddp.draws), num_draws)]
        table[0] = ddp.values
        self._ddp = {name: table[:, column] for column, name in enumerate(ddp.names)}

    def terms(
        self,
        workload: MeasuredWorkload,
        layout: Layout,
        program: StepProgram,
        *,
        loader_samples_per_s: float | None = None,
    ) -> Terms:
        """Cost terms of a step: compute as with the ranks beside it at work, every exchange in its group."""
        at_work = layout.beside
        ranks = at_work.world_size
        phases = phases_under(self.profile, workload, layout)
        shared = self._shared(workload)
        compute_s = {
            cause: self._read(workload, phases, cause.value, layout.micro_batch) * shared
            for cause in _PHASES
        }
        gradients_bytes = [each.size_bytes for each in workload.workload.parameters]
        if layout.is_ddp:
            # Units of other layouts hold it in their shares.
            errors = np.exp(KERNEL_ERROR * self.deviates("additions"))
            added_s = additions(self.profile, layout, gradients_bytes) * errors
            compute_s[Cause.BACKWARD] = compute_s[Cause.BACKWARD] + added_s
        added = {
            CARRIERS[family]: cost
            for family in families(layout)
            if (cost := layout_cost(self.profile, family, layout))
        }
        if layout.tp > 1 and Cause.TENSOR not in added:
            error = _UNCERTAINTY_PER_HALVING * math.log2(layout.tp)
            factors = np.exp(error * self.deviates("tensor shares"))
            compute_s |= {c: compute_s[c] * factors for c in (Cause.FORWARD, Cause.BACKWARD)}
        bucket_s, bucket_s_per_byte = self._ddp["bucket_s"], self._ddp["bucket_s_per_byte"]
        if copied := added.get(Cause.BUCKET):
            bucket_s = np.full(self.num_draws, copied.call_s)
            bucket_s_per_byte = np.full(self.num_draws, copied.byte_s)
        # Without another rank there is nothing to share the device with.
        alone = np.ones(self.num_draws)
        loads = 0.0 if loader_samples_per_s is None else at_work.local_batch / loader_samples_per_s
        used = (Cause.ALL_REDUCE, Cause.BROADCAST) if layout.is_ddp else KINDS
        return Terms(
            compute_s=compute_s,
            issue_s=self._issue_s(workload, layout, phases),
            bucket_s=bucket_s,
            bucket_s_per_byte=bucket_s_per_byte,
            exchange_s={
                cause: self._exchange(workload, layout, cause, added.get(cause)) for cause in used
            },
            load_s=np.full(self.num_draws, loads),
            slowest=self.slowest(workload, at_work) * _slowest_stage(workload, layout),
            compute_speed=self._ddp["compute_speed"] if ranks > 1 else alone,
            comm_speed=self._ddp["comm_speed"] if ranks > 1 else alone,
            evidence=self._evidence(workload, phases, layout, program),
        )

    def _issue_s(
        self, workload: MeasuredWorkload, layout: Layout, phases: PhaseCurves
    ) -> dict[Cause, Samples]:
        """Time of the host to issue each phase in one more run, on another occasion.

        In the mean of the micro-batches; empty where it issues nothing. [s]

        DDP's hooks and buckets cost it once in a step, as with its default buckets; each more is an operator more.
        A gradient that is added is a call in place of a view:

            T = alone + (under DDP - alone) / m + calls
        """
        names = {cause: f"dispatch_{cause.value}" for cause in _ISSUED}

        def read(curves: PhaseCurves) -> dict[Cause, Samples]:
            return {
                cause: self._read(workload, curves, name, layout.micro_batch)
                for cause, name in names.items()
                if getattr(phases, name)
            }

        found = read(phases)
        alone = read(phases_at(workload, 1)) if Cause.BACKWARD in found else {}
        if alone and layout.bucket_cap_mb is not None and layout.is_ddp and layout.dp > 1:
            usual = replace(layout, bucket_cap_mb=None)
            counts = [len(gradient_buckets(workload.workload, each)) for each in (layout, usual)]
            launched_s = found[Cause.BACKWARD] + (counts[0] - counts[1]) * self.profile.dispatch_s
            found[Cause.BACKWARD] = np.maximum(alone[Cause.BACKWARD], launched_s)
        if alone and layout.accumulation > 1:
            for cause in (Cause.FORWARD, Cause.BACKWARD) if layout.zero < 2 else ():
                more_s = (found[cause] - alone[cause]) / layout.accumulation
                found[cause] = alone[cause] + more_s
            passes_s = alone[Cause.FORWARD], alone[Cause.BACKWARD]
            calls_s, log_error = calls_of_additions(self.profile, workload, layout, passes_s)
            factors = np.exp(log_error * self.deviates("calls of additions"))
            found[Cause.BACKWARD] = found[Cause.BACKWARD] + calls_s * factors
        again = np.exp(self.profile.repeatability.host_again * self.deviates("host"))
        again = again * self._shared(workload)
        return {cause: issue_s * again for cause, issue_s in found.items()}

    def _exchange(
        self, workload: MeasuredWorkload, layout: Layout, cause: Cause, added: LayoutCost | None
    ) -> CollectiveTime:
        """Time of a kind of exchange over its size.

            T = start_s + collective(size, group) + call_s + byte_s * size

        ``start_s`` is what an exchange that runs beside compute waits for, and does not when alone: a
        processor, or a queue. A library that works on the processors shares them as compute does: a collective
        of g of the n ranks of a stage was measured with g ranks at work, and runs with n.
        """
        by_processors = library_of(self.profile.backend).by_processors
        group, ranks = groups(layout)[cause], layout.beside.world_size
        slowed = 1.0
        if by_processors and cause is not Cause.P2P and group.size not in (1, ranks):
            slowed = contention(workload, layout.micro_batch, ranks, than=group.size)
        in_step = cause is Cause.ALL_REDUCE or (
            not by_processors and cause in (Cause.ALL_GATHER, Cause.REDUCE_SCATTER)
        )
        start_s = self._ddp["all_reduce_start_s"] if in_step and group.size > 1 else 0.0

        def time_s(size_bytes: Bytes | Samples) -> Samples:
            alone_s = start_s + self.network.time_s(KINDS[cause], size_bytes, group) * slowed
            return alone_s if added is None else alone_s + added.call_s + added.byte_s * size_bytes

        return time_s

    def _rng(self, name: str) -> np.random.Generator:
        """Randomness of its own for each parameter, so that the order of questions is no matter."""
        return np.random.default_rng([SEED, zlib.crc32(name.encode())])

    def _shared(self, workload: MeasuredWorkload) -> Samples | float:
        """Factors of a workload whose law was fitted to others: all its phases are wrong together."""
        return self.wrong_together(f"law {workload.workload.name}", workload.shared_log_error)

    def wrong_together(self, name: str, log_error: float) -> Samples | float:
        """Factors of which one in ten exceeds an absolute error in log.

        Evenly spaced quantiles of Student's distribution with four degrees of freedom, in random order.
        """
        if log_error == 0:
            return 1.0
        places = (np.arange(self.num_draws - 1) + 0.5) / max(1, self.num_draws - 1)
        drawn = np.concatenate(([0.0], heavy_tailed_quantiles(places)))
        self._rng(name).shuffle(drawn[1:])
        return np.asarray(np.exp(log_error / HEAVY_TAILED_90 * drawn))

    def _read(
        self, workload: MeasuredWorkload, phases: PhaseCurves, name: str, micro_batch: float
    ) -> Samples:
        key = (workload.workload.name, phases.world_size, name)
        points: tuple[CurvePoint, ...] = getattr(phases, name)
        # The same workload may have other times: by its trace, or after a what-if.
        if (key, points) not in self._curves:
            # One host issues all phases, at all micro-batches: it is fast or slow in all of them.
            is_host = name.startswith("dispatch")
            self._curves[key, points] = CurveDraws.sample(
                points,
                num_draws=self.num_draws,
                rng=self._rng(f"host {workload.workload.name}" if is_host else repr(key)),
                together=is_host,
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

    def deviates(self, name: str) -> Samples:
        """Standard normal numbers of their own for a name; draw 0 is 0."""
        return deviates(self._rng(name), self.num_draws)

    def slowest(self, workload: MeasuredWorkload, layout: Layout) -> Samples:
        """Slowest rank over the typical rank in a typical step: ranks differ for good, too.

        Between calibrated batches the logarithm is linear in that of the batch. Where a smaller batch was so
        noisy that its step was longer, the step stays as long until the larger batch makes up for it.
        """
        together = layout.synchronisation is Synchronisation.DDP and layout.world_size > 1
        if not together:
            return np.ones(self.num_draws)

        def slowest_of(count: int, ratios: Sequence[float]) -> Samples:
            return slowest_pace(
                np.array(ratios),
                rank_spread=workload.rank_spread,
                num_ranks=count,
                num_draws=self.num_draws,
                rng=self._rng(f"noise {workload.workload.name} {layout.micro_batch}"),
            )

        by_nodes = self._slower_by_nodes(layout.world_size)
        weights = noise_weights(workload, layout.micro_batch)
        # A geometric mean.
        logs = [share * np.log(slowest_of(layout.world_size, one)) for one, share in weights]
        factors: Samples = np.exp(sum(logs))
        for smaller in workload.noise:
            if smaller.micro_batch < layout.micro_batch:
                grown = self._growth(workload, layout, since=smaller.micro_batch)
                factors = np.maximum(factors, slowest_of(layout.world_size, smaller.ratios) / grown)
        return factors * by_nodes

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
        phases = phases_at(workload, layout.world_size)
        buckets = gradient_buckets(workload.workload, layout)
        call_s, byte_s = (float(self._ddp[n][0]) for n in ("bucket_s", "bucket_s_per_byte"))
        copies_s = call_s * sum(each.gradients for each in buckets)
        copies_s += byte_s * sum(each.size_bytes for each in buckets)

        def times_s(micro_batch: float) -> tuple[float, float]:
            input_s, forward_s, backward_s, optimizer_s = (
                float(self._read(workload, phases, cause.value, micro_batch)[0])
                for cause in _PHASES
            )
            once_s = optimizer_s + layout.accumulation * input_s
            hidden_s = layout.accumulation * backward_s + copies_s
            return layout.accumulation * forward_s + once_s, hidden_s

        pairs = zip(times_s(layout.micro_batch), times_s(since), strict=True)
        return min(now_s / max(before_s, 1e-12) for now_s, before_s in pairs)

    def _evidence(
        self, workload: MeasuredWorkload, phases: PhaseCurves, layout: Layout, program: StepProgram
    ) -> dict[str, Evidence]:
        """Of every term; what was never run in this form is extrapolated at best."""
        found = {"compute": self._compute_evidence(workload, phases, layout.micro_batch)}
        members = groups(layout)
        sizes: dict[Cause, list[Bytes]] = defaultdict(list)
        for operation in program.operations:
            if operation.size_bytes:
                sizes[operation.cause].append(operation.size_bytes)
        for name, causes in _COMMUNICATION.items():
            kinds = [
                self.network.evidence(sizes[cause], members[cause], kind=KINDS[cause])
                for cause in causes
                if cause in sizes and members[cause].size > 1
            ]
            if kinds:
                found[name] = Evidence.weakest(kinds)
        if used := families(layout):
            known = all(layout_cost(self.profile, family, layout) for family in used)
            found["work of the layout's library"] = (
                Evidence.INTERPOLATED if known else Evidence.ASSUMED
            )
        if layout.tp > 1:
            found["compute"] = Evidence.weakest((found["compute"], Evidence.EXTRAPOLATED))
        ranks = layout.beside.world_size
        if ranks > 1:
            beyond = ranks > self.profile.max_world_size
            known_overlap = Evidence.EXTRAPOLATED if beyond else Evidence.INTERPOLATED
            is_told = all(self.profile.ddp.determined)
            found["interference"] = known_overlap if is_told else Evidence.ASSUMED
            found["stragglers"] = self._straggler_evidence(ranks, beyond=beyond)
        if self.profile.rescaling is not None:
            return dict.fromkeys(found, Evidence.ASSUMED)
        return found

    def _straggler_evidence(self, ranks: int, *, beyond: bool) -> Evidence:
        # Published steps tell nothing of how devices differ.
        if self.profile.device_costs is not None:
            return Evidence.ASSUMED
        like = self._cluster is not None and self._cluster.evidence is Evidence.INFERRED
        if like and ranks > self.profile.ranks_per_node:
            return Evidence.INFERRED
        return Evidence.EXTRAPOLATED if beyond else Evidence.MEASURED

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
        return curve.evidence(micro_batch)


def _slowest_stage(workload: MeasuredWorkload, layout: Layout) -> float:
    """How much slower the slowest of all ranks is than that of one stage: every stage waits for it.

    exp(spread (E[max of all ranks] - E[max of a stage]))
    """
    if layout.pp == 1:
        return 1.0
    every, stage = (expected_largest_deviate(each.world_size) for each in (layout, layout.beside))
    return math.exp(workload.rank_spread * (every - stage))


#: Of the draws that are the same whenever the same is asked.
SEED = 0
#: Of a model that was never compared with anything: a prior.
_UNKNOWN_ERROR = 0.05


def model_form(  # noqa: PLR0913 - what distinguishes errors
    profile: MeasuredMachine,
    earlier: Mapping[RunSetting, float],
    workload: MeasuredWorkload,
    layout: Layout,
    *,
    num_draws: int,
    run_error: float,
    is_measured: bool = False,
) -> Samples:
    """Factors by which the model has been wrong before, in either direction; the first one is 1.

    ``earlier`` holds signed errors of a validation: predicted over measured, minus 1.

    Parameter draws already hold the uncertainty of the measurements, so that the two together are on the
    safe side. A step on several ranks that ``is_measured`` errs as those on one do. No residual tells about a step that
    was traced: how far its run is off what the layout takes in the mean of many comes on top, in log.
    """
    asked = RunSetting.of(workload.workload.name, layout)

    def missed(*, is_alone: bool) -> Samples:
        residual = profile.residual
        errors = residual.single_log_errors if is_alone else residual.ddp_log_errors
        # Earlier fresh runs of the same kind, without those of this very layout.
        fresh = [
            float(np.log1p(signed_error))
            for setting, signed_error in earlier.items()
            if (setting.world_size == 1) is is_alone and setting != asked
        ]
        return np.array([*errors, *fresh] or [_UNKNOWN_ERROR])

    is_calibrated = profile.workload(workload.workload.name) is not None
    pool = missed(is_alone=layout.world_size == 1 or is_measured)
    # Seeded by the layout, so that the order of questions is no matter.
    rng = np.random.default_rng([SEED, zlib.crc32(asked.label.encode())])
    signs = rng.choice([-1, 1], num_draws)
    logs = rng.choice(pool, num_draws) * signs
    if layout.world_size > 1 and layout.accumulation > 1:
        # What DDP adds, and with it how far that is off, comes once in a step.
        alone = rng.choice(missed(is_alone=True), num_draws) * rng.choice([-1, 1], num_draws)
        logs = alone + (logs - alone) / layout.accumulation
    # Residuals of calibrated workloads hold the noise of means over as many runs as rounds.
    run_of_one = profile.repeatability.run_of(layout.world_size)
    known = run_of_one / math.sqrt(profile.num_rounds) if is_calibrated else 0.0
    own = math.sqrt(max(0.0, run_error**2 - known**2))
    logs = logs + own * rng.standard_normal(num_draws)
    logs[0] = 0.0
    return np.asarray(np.exp(logs))


def form_factors(costs: CostModel, layout: Layout) -> Samples:
    """Factors by which steps of such layouts missed their prediction, or may. Draw 0 is 1."""
    known = [layout_cost(costs.profile, name, layout) for name in families(layout)]
    errors = [_UNJUDGED if cost is None else cost.log_error for cost in known]
    return np.asarray(np.exp(math.hypot(*errors) * costs.deviates(f"form {layout}")))

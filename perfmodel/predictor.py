"""Use case: what so many devices would do for a workload, with an interval that has been checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from perfmodel.algebra.fluid import end_times_with_interference
from perfmodel.cost.curve import Samples
from perfmodel.cost.model import CostModel, borrowed_profile
from perfmodel.cost.model_form import SEED, model_form
from perfmodel.cost.rescaling import whole_steps_refused
from perfmodel.cost.terms import Terms, paced
from perfmodel.cost.traced import traced_profile
from perfmodel.documents.prediction import Interval, PredictedPoint
from perfmodel.documents.profile import ProfileDocument, WorkloadProfile
from perfmodel.documents.validation import ValidationDocument
from perfmodel.errors import CalibrationUnavailable, NotFeasible, UsageError, did_you_mean
from perfmodel.parallelism.strategy import Setting
from perfmodel.program.ddp import compile_step
from perfmodel.program.interference import Interference
from perfmodel.program.operation import Cause, StepProgram, Stream
from perfmodel.program.trace import Trace
from perfmodel.simulation import simulate, slowdown_by_sharing
from perfmodel.statistics.critical_path import time_by_cause
from perfmodel.topology.cluster import Cluster
from perfmodel.units import Bytes, Seconds
from perfmodel.workload.step import SymbolicStep
from perfmodel.workload.workload import Workload

NUM_DRAWS = 400
#: Percentiles of the steps of a run that are told beside the typical one.
TAILS: Final = (95, 99)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrediction:
    """One setting: the simulated step, and random versions of its duration."""

    setting: Setting
    program: StepProgram
    terms: Terms
    trace: Trace
    """The simulation at nominal parameters, of the slowest rank."""
    straggler_s: Seconds
    """Nominally, the part of it that ranks as fast as the typical one would not take. [s]"""
    step_s: Samples
    """Shape ``(num_draws,)``: doubt of the parameters and of the model's form. [s]"""
    exposed_comm_s: Samples
    tail_s: Mapping[int, Samples]
    """95 and 99: that percentile over the steps of a run, shape ``(num_draws,)``. [s]"""
    binding_link: str | None = None
    """Which link costs most of the largest all-reduce, and why; None without a cluster."""


class _Priced(NamedTuple):
    """What a setting does, and how long each operation takes, on the typical and on the slowest rank."""

    program: StepProgram
    terms: Terms
    median_s: Samples
    durations_s: Samples


class Predictor:
    """Predicts settings on one profiled machine.

    Parameters
    ----------
    profile
        The machine.
    validation
        Errors of earlier predictions on this machine: they widen the intervals, never shift them.
    use_measured
        Whether operators that were measured in place count for traced workloads, or curves alone.
    cluster
        Through which links the devices reach each other; without it one ring of links like the
        measured ones.
    num_visits
        Over how many visits a step of a traced workload is meant as a mean; None for steps that take
        turns with the replays which price them: what moves the machine from one hour to another moves
        both, and is no doubt.

    Raises
    ------
    CalibrationUnavailable
        If the validation was made on another machine.
    UsageError
        If the profile has more ranks per node than the cluster has devices.
    """

    def __init__(
        self,
        profile: ProfileDocument,
        *,
        validation: ValidationDocument | None = None,
        num_draws: int = NUM_DRAWS,
        use_measured: bool = True,
        cluster: Cluster | None = None,
        num_visits: int | None = 1,
    ) -> None:
        self._num_visits = num_visits
        self._use_measured = use_measured
        _refuse_other_machine(profile, validation)
        _refuse_other_nodes(profile, cluster)
        self.cluster = cluster
        self.profile = profile
        self.validation = validation
        self._costs = CostModel(profile, num_draws=num_draws, seed=SEED, cluster=cluster)
        self._num_draws = num_draws
        # One error for all settings: it moves every step, and cancels in every speed-up. What is
        # predicted is one more round, whose own deviation comes beside the error of their mean.
        common = np.random.default_rng(SEED).standard_normal(num_draws)
        common[0] = 0.0
        spread = profile.round_error * math.sqrt(profile.num_rounds + 1)
        self._common: Samples = np.exp(spread * common)

    def workload(
        self, workload: str | Workload, trace: SymbolicStep | None = None
    ) -> WorkloadProfile:
        """A calibrated workload by name, a traced one by its operators, or any with borrowed curves.

        Raises
        ------
        UsageError
            If a name is not in the profile, a workload takes the name of another one there, or was not
            traced although the device is not the calibrated one.
        """
        if self.profile.rescaling is not None and trace is None:
            name = workload if isinstance(workload, str) else workload.name
            raise whole_steps_refused(name, self.profile.device_name)
        name = workload if isinstance(workload, str) else workload.name
        calibrated = self.profile.workload(name)
        if calibrated is not None:
            if isinstance(workload, Workload) and workload != calibrated.workload:
                raise UsageError(
                    f"--workload: {name!r} in the file differs from the calibrated workload of that "
                    "name; give it another name"
                )
            return calibrated
        operators = self.profile.operators
        if isinstance(workload, Workload) and trace is not None and operators is not None:
            return traced_profile(
                self.profile, operators, workload, trace, use_measured=self._use_measured
            )
        if isinstance(workload, Workload):
            return borrowed_profile(self.profile, workload)
        known = [entry.workload.name for entry in self.profile.workloads]
        raise UsageError(
            f"--workload: must be in the profile or a workload file, got {name!r}"
            f"{did_you_mean(name, known)} (the profile holds {', '.join(known)})"
        )

    def step(
        self,
        workload: WorkloadProfile,
        setting: Setting,
        *,
        loader_samples_per_s: float | None = None,
        tails: Sequence[int] = TAILS,
    ) -> StepPrediction:
        """Predict one setting, with these percentiles of the steps of a run beside the typical one.

        Raises
        ------
        CalibrationUnavailable
            If several ranks are asked for and none were measured together.
        NotFeasible
            If the cluster has fewer devices.
        """
        priced = self._priced(workload, setting, loader_samples_per_s)
        program, terms, median_s, durations_s = priced
        trace = simulate(
            program, durations_s[:, 0][None, :], interference=nominal_interference(terms)
        )
        late = [
            paced(program, median_s, self._slowest(workload, setting, terms, percent))
            for percent in tails
        ]
        cases_s = [durations_s, silenced(program, durations_s), median_s, *late]
        step_s, silent_s, even_s, *tails_s = all_step_times(
            program, [(terms, case_s) for case_s in cases_s]
        )
        sharing = self._sharing(program, durations_s[:, 0], setting.world_size)
        doubt = self._doubt(workload, setting)
        return StepPrediction(
            setting=setting,
            program=program,
            terms=terms,
            trace=trace,
            straggler_s=max(0.0, trace.step_s - float(even_s[0])),
            step_s=step_s * sharing * doubt,
            tail_s={
                percent: tail_s * sharing * doubt
                for percent, tail_s in zip(tails, tails_s, strict=True)
            },
            exposed_comm_s=np.maximum(0.0, step_s * sharing - silent_s),
            binding_link=self._binding(program, setting.world_size),
        )

    def step_draws(
        self,
        workload: WorkloadProfile,
        settings: Sequence[Setting],
        *,
        loader_samples_per_s: float | None = None,
    ) -> list[Samples]:
        """The ``step_s`` of many settings and nothing else: by algebra, equal programs together. [s]

        Raises
        ------
        CalibrationUnavailable, NotFeasible
            As for one step.
        """
        priced = [self._priced(workload, each, loader_samples_per_s) for each in settings]
        alike: dict[StepProgram, list[int]] = {}
        for index, of_one in enumerate(priced):
            alike.setdefault(of_one.program, []).append(index)
        draws_s: dict[int, Samples] = {}
        for program, chosen in alike.items():
            cases = [(priced[index].terms, priced[index].durations_s) for index in chosen]
            draws_s |= zip(chosen, all_step_times(program, cases), strict=True)
        return [
            draws_s[index]
            * self._sharing(of_one.program, of_one.durations_s[:, 0], setting.world_size)
            * self._doubt(workload, setting)
            for index, (of_one, setting) in enumerate(zip(priced, settings, strict=True))
        ]

    def point(self, step: StepPrediction, *, baseline: StepPrediction) -> PredictedPoint:
        """Quantities with intervals, relative to one device."""
        world_size = step.setting.world_size
        batch = step.setting.global_batch
        ratio = batch / baseline.setting.global_batch
        # The baseline's own doubt cancels where the two settings are the same.
        speedup = (
            np.ones(self._num_draws) if step is baseline else ratio * baseline.step_s / step.step_s
        )
        return PredictedPoint(
            setting=step.setting,
            step_s=interval(step.step_s),
            samples_per_s=interval(batch / step.step_s),
            speedup=interval(speedup),
            scaling_efficiency=interval(speedup / world_size),
            exposed_comm_s=interval(step.exposed_comm_s),
            breakdown_s=time_by_cause(step.trace),
            straggler_s=step.straggler_s,
            evidence=dict(step.terms.evidence),
            tail_s={f"p{percent}": interval(tail_s) for percent, tail_s in step.tail_s.items()},
            binding_link=step.binding_link,
        )

    def _priced(
        self, workload: WorkloadProfile, setting: Setting, loader_samples_per_s: float | None
    ) -> _Priced:
        """The program of a setting and what its operations cost."""
        _refuse_too_many(self.cluster, setting)
        if setting.world_size > 1 and self.profile.max_world_size == 1:
            raise CalibrationUnavailable(
                f"--devices: {setting.world_size} devices need a measured interconnect, but the "
                "profile holds one rank; calibrate with --nproc 2 or more"
            )
        terms = self._costs.terms(workload, setting, loader_samples_per_s=loader_samples_per_s)
        program = compile_step(workload.workload, setting, asynchronous=self.profile.asynchronous)
        median_s = terms.median_durations(program)
        return _Priced(program, terms, median_s, paced(program, median_s, terms.slowest))

    def _slowest(
        self, workload: WorkloadProfile, setting: Setting, terms: Terms, percent: int
    ) -> Samples:
        """How slow the slowest rank is in so many percent of all steps at most."""
        slowest = self._costs.slowest(workload, setting, probability=percent / 100)
        return np.maximum(slowest, terms.slowest)

    def _doubt(self, workload: WorkloadProfile, setting: Setting) -> Samples:
        """Factors of what parameters do not tell: one more round, and the form of the model."""
        visit_error = self.profile.visit_error_of(setting.world_size)
        form = model_form(
            self.profile,
            self.validation,
            workload,
            setting,
            num_draws=self._num_draws,
            run_error=visit_error / math.sqrt(self._num_visits) if self._num_visits else 0.0,
        )
        return form if self._num_visits is None else self._common * form

    def _sharing(self, program: StepProgram, durations_s: Samples, world_size: int) -> float:
        """Factor on the step by other jobs whose collectives cross the same links."""
        size_bytes = _largest_all_reduce(program)
        if self.cluster is None or not size_bytes:
            return 1.0
        occupied = self._costs.network.occupancy(size_bytes, world_size=world_size)
        factors = [
            slowdown_by_sharing(program, durations_s, num_jobs=1 + jobs, occupied=share)
            for tier, share in occupied.items()
            if (jobs := self.cluster.neighbours(tier))
        ]
        return max(factors, default=1.0)

    def _binding(self, program: StepProgram, world_size: int) -> str | None:
        size_bytes = _largest_all_reduce(program)
        if self.cluster is None or not size_bytes:
            return None
        return self._costs.network.binding(size_bytes, world_size=world_size)


def _largest_all_reduce(program: StepProgram) -> Bytes:
    """0 if there is none. [B]"""
    sizes = (o.size_bytes for o in program.operations if o.cause is Cause.ALL_REDUCE)
    return max(sizes, default=0)


def _refuse_other_machine(profile: ProfileDocument, validation: ValidationDocument | None) -> None:
    if validation is None:
        return
    ours, theirs = (d.provenance.host_fingerprint for d in (profile, validation))
    if ours != theirs:
        raise CalibrationUnavailable(
            f"--validation: must come from the machine of the profile (fingerprint {ours[:12]}), "
            f"got {theirs[:12]}; run perfmodel validate there"
        )


def _refuse_other_nodes(profile: ProfileDocument, cluster: Cluster | None) -> None:
    devices = None if cluster is None else cluster.devices_per_node
    if cluster is not None and devices is not None and profile.ranks_per_node > devices:
        raise UsageError(
            f"--cluster: nodes of {cluster.name} must have at least the {profile.ranks_per_node} "
            f"ranks per node of the profile, got {devices}; correct the counts up to tier node"
        )


def _refuse_too_many(cluster: Cluster | None, setting: Setting) -> None:
    if cluster is not None and setting.world_size > cluster.num_devices:
        raise NotFeasible(
            f"--devices: must be at most {cluster.num_devices}, all that {cluster.name} has, "
            f"got {setting.world_size}; ask for fewer or enlarge the cluster file"
        )


def nominal_interference(terms: Terms) -> Interference:
    """How compute and communication slow each other in the nominal draw."""
    return Interference(
        compute_speed=float(terms.compute_speed[0]), comm_speed=float(terms.comm_speed[0])
    )


def step_times(program: StepProgram, terms: Terms, durations_s: Samples) -> Samples:
    """Duration of the step in every draw, by algebra. [s]"""
    [result] = all_step_times(program, [(terms, durations_s)])
    return result


def all_step_times(program: StepProgram, cases: Sequence[tuple[Terms, Samples]]) -> list[Samples]:
    """Durations of a step in many cases, all draws of all cases together. [s]

    A few thousand draws take hardly longer than a few hundred.
    """
    ends_s = end_times_with_interference(
        program,
        np.concatenate([durations_s for _, durations_s in cases], axis=1),
        compute_speed=np.concatenate([terms.compute_speed for terms, _ in cases]),
        comm_speed=np.concatenate([terms.comm_speed for terms, _ in cases]),
    )
    return np.split(ends_s.max(axis=0), len(cases))


def silenced(program: StepProgram, durations_s: Samples) -> Samples:
    """The same durations with communication that costs nothing."""
    result = durations_s.copy()
    result[list(program.on_stream(Stream.COMM))] = 0.0
    return result


def interval(draws: Samples) -> Interval:
    """The nominal draw (the first), and the middle 90 % of all; the nominal is always inside."""
    return Interval.of(draws, nominal=float(draws[0]))

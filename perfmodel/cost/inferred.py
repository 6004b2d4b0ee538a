"""Step times on a machine that was inferred from runs: number, interval, parts, degraded runs."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.jobs import (
    SHEETS,
    Column,
    DeviceSheet,
    Discrepancy,
    Jobs,
    condition,
    jobs_from_columns,
    stall_probability,
    stall_time_s,
)
from perfmodel.cost.layout_time import StepParts, step_parts, step_time_s
from perfmodel.cost.memory import ASSUMED_MEMORY, LayoutMemory
from perfmodel.documents.hardware import LINK_SHARE
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.layout import MOST_DEVICES
from perfmodel.machine import (
    DEVICE,
    NODE,
    UNCERTAINTY_OF_FILE,
    UNKNOWN_NETWORK,
    Cluster,
    Evidence,
    FittedParameter,
    InferredMachine,
    Tier,
)
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.statistics import DEVIATE_90, FloatArray, Interval, normal_cdf
from perfmodel.units import BytesPerSecond

LOWER, UPPER = 0.05, 0.95
#: Uncertainty, in log, per doubling of the width between a job and the nearest run. Of ten published widths,
#: each left out alone, two lie a doubling apart.
_OTHER_WIDTH: Final = 0.1
_BISECTIONS: Final = 40
_JITTER: Final = 1e-9
"""Variance that keeps equal layouts apart."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInterval:
    """Predicted step times, each shape ``(num_jobs,)``. [s]"""

    number_s: Column
    """The one to name: of all numbers in the interval the one with the least expected relative error.
    Where a run is normal or takes ten times as long, the normal one unless the other is ten times as likely."""
    mean_s: Column
    """Geometric mean over the states that a run may be in: what layouts are ranked by."""
    lower_s: Column
    """5 % of outcomes should be below."""
    upper_s: Column
    """5 % of outcomes should be above."""

    def of(self, job: int) -> Interval:
        """The interval of one job around the number to name. [s]"""
        return Interval(
            p5=float(self.lower_s[job]),
            nominal=float(self.number_s[job]),
            p95=float(self.upper_s[job]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepUncertainty:
    """What the uncertainty of predicted steps consists of, each shape ``(num_jobs,)``."""

    fitted: Column
    """Standard deviation of the logarithm, by the inferred fitted parameters."""
    formula: Column
    """The same, by what the formula does not explain."""
    stall_probability: Column
    degraded_ratio: Column
    """Degraded step over normal step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InferredModel:
    """A machine inferred from runs, ready to predict.

        log step = log normal(fitted) + deviation(layout) + noise       normal state
        log step = log (normal + stall) + deviation(layout) + noise     degraded state, at its odds

    ``normal`` is the step program of a layout, or the closed form where many layouts are compared.
    """

    machine: InferredMachine

    @cached_property
    def sheet(self) -> DeviceSheet:
        """Data sheet of its devices."""
        name = self.machine.device_name
        if name in SHEETS:
            return SHEETS[name]
        from perfmodel.cost.rescaling import device_sheet  # noqa: PLC0415 - reads the catalogue

        try:
            return device_sheet(name, flag="profile: device")
        except UsageError as error:
            raise CalibrationUnavailable(f"{error}; calibrate --from-runs again") from error

    @cached_property
    def draws(self) -> dict[str, Column]:
        """Draws of every parameter, shape ``(num_draws, 1)``; the first is the fit itself."""
        return {p.name: np.array(p.draws)[:, None] for p in self.machine.fitted_parameters}

    @cached_property
    def nominal(self) -> dict[str, float]:
        """The fitted parameters."""
        return {name: float(values[0, 0]) for name, values in self.draws.items()}

    @cached_property
    def discrepancy(self) -> Discrepancy:
        """What the formula leaves unexplained of the runs, and of layouts near them."""
        machine = self.machine
        return condition(
            jobs_from_columns(machine.runs),
            np.array(machine.deviations),
            np.array(machine.trust),
            machine.spreads,
        )

    @cached_property
    def memory(self) -> LayoutMemory:
        """Memory of ranks: fitted to printed peaks, or the formula with assumed overheads."""
        peaks = self.machine.memory
        if peaks is None:
            return ASSUMED_MEMORY
        printed = self.discrepancy.runs.take(np.array(peaks.runs))
        deviations, trust = np.array(peaks.deviations), np.array(peaks.trust)
        return LayoutMemory(
            factors=peaks.factors,
            discrepancy=condition(printed, deviations, trust, peaks.spreads),
            widening=peaks.interval_widening,
        )

    def parts(self, jobs: Jobs) -> StepParts:
        """Where the time goes at the fitted parameters, by the closed form, without deviations."""
        return step_parts(jobs, self.nominal)

    def closed_form_s(self, jobs: Jobs) -> Column:
        """Normal steps in every draw of the parameters, shape ``(num_draws, num_jobs)``. [s]"""
        return step_time_s(jobs, self.draws)

    def peak_s(self, jobs: Jobs) -> Column:
        """How long the model FLOP of steps take at the dense 16-bit peak of all devices. [s]"""
        return np.asarray(jobs.model_flop / (self.sheet.matmul_flop_per_s * jobs.devices))

    def predict(
        self, jobs: Jobs, *, normal_s: Column | None = None, stalls: bool = True
    ) -> StepInterval:
        """Step times with 90 % intervals; without ``stalls`` those of runs that nothing disturbs.

        ``normal_s``: steps of the compiled programs at the fitted parameters; None: the closed form. [s]
        """
        centre, disturbed, chance, variance = self._states(jobs, normal_s)
        chance = chance if stalls else np.zeros(len(jobs))
        spread = np.sqrt(variance + self.parameter_variance(jobs)) * self.uncertainty_factor(jobs)
        lower_s, upper_s = (
            np.exp(_quantile(share, centre, disturbed, chance, spread)) for share in (LOWER, UPPER)
        )
        lower_s = np.maximum(lower_s, self._shortest_s(jobs, centre))
        # |f / y - 1| weighs an outcome y by 1 / y: the median, each state weighted by one over its time.
        weight = chance * np.exp(np.maximum(centre - disturbed, -50.0))
        late = weight / np.maximum(weight + 1 - chance, 1e-12)
        named_s = np.exp(_quantile(0.5, centre, disturbed, late, spread))
        return StepInterval(
            number_s=np.clip(named_s, lower_s, upper_s),
            mean_s=np.exp(centre + chance * (disturbed - centre)),
            lower_s=lower_s,
            upper_s=upper_s,
        )

    def mean_logs(self, jobs: Jobs) -> Column:
        """Logarithms of the closed form's mean steps, by which many layouts are ranked."""
        centre, disturbed, chance, _ = self._states(jobs)
        return np.asarray(centre + chance * (disturbed - centre))

    def step_draws(self, jobs: Jobs, *, num_draws: int, normal_s: Column | None = None) -> Column:
        """Draws of what ``predict`` gives quantiles of, shape ``(num_jobs, num_draws)``. [s]

        The first is the number to name. All jobs share their random numbers, so that they compare in pairs.
        """
        centre, disturbed, chance, variance = self._states(jobs, normal_s)
        spread = np.sqrt(variance + self.parameter_variance(jobs)) * self.uncertainty_factor(jobs)
        rng = np.random.default_rng(0)
        normal, uniform = rng.standard_normal(num_draws), rng.random(num_draws)
        degraded = uniform < chance[:, None]
        logs = np.where(degraded, disturbed[:, None], centre[:, None]) + spread[:, None] * normal
        draws_s: Column = np.maximum(np.exp(logs), self._shortest_s(jobs, centre)[:, None])
        draws_s[:, 0] = self.predict(jobs, normal_s=normal_s).number_s
        return draws_s

    def _shortest_s(self, jobs: Jobs, centre: Column) -> Column:
        """What no step falls below: the peak in its precision, unless the runs themselves were faster. [s]"""
        if not self.machine.device_name:
            return np.zeros(len(jobs))
        return np.minimum(self.peak_s(jobs) / jobs.matmul_ratio, np.exp(centre))

    def joint_logs(self, jobs: Jobs, *, num_draws: int) -> FloatArray:
        """Log steps of one run of each job, shape ``(num_draws, num_jobs)``.

        Jobs share the fitted parameters, and deviations as far as they are alike; each may be disturbed. Draws of
        parameters that the runs left open lie askew: their median stands at the fit, as that of intervals does.
        """
        rng = np.random.default_rng(0)
        logs = np.log(self.closed_form_s(jobs))
        mean, spread = self.discrepancy.joint(jobs)
        root = np.linalg.cholesky(spread + _JITTER * np.eye(len(jobs)))
        fitted = (logs - np.median(logs, axis=0))[rng.integers(0, len(logs), num_draws)]
        away = fitted + rng.standard_normal((num_draws, len(jobs))) @ root.T
        centre, disturbed, chance, _ = self._states(jobs)
        degraded = rng.random((num_draws, len(jobs))) < chance
        late = np.where(degraded, disturbed - centre, 0.0)
        # Another width than that of the runs: all jobs are off alike.
        away = away + rng.standard_normal((num_draws, 1)) * self._width_uncertainty(jobs)
        steps = logs[0] + mean + away * self.uncertainty_factor(jobs) + late
        with np.errstate(divide="ignore"):
            return np.asarray(np.maximum(steps, np.log(self._shortest_s(jobs, centre))))

    def uncertainty(self, jobs: Jobs) -> StepUncertainty:
        """What the intervals of some jobs consist of."""
        centre, disturbed, chance, variance = self._states(jobs)
        factor = self.uncertainty_factor(jobs)
        return StepUncertainty(
            fitted=np.sqrt(self.parameter_variance(jobs)) * factor,
            formula=np.sqrt(variance) * factor,
            stall_probability=chance,
            degraded_ratio=np.exp(disturbed - centre),
        )

    def uncertainty_factor(self, jobs: Jobs) -> Column:
        """Factor on the uncertainty of jobs, so that 90 % of outcomes lie inside.

        It was found among the runs. Where these say nothing of a layout, it may widen but not narrow.
        """
        unknown, near = self.discrepancy.unknown_share(jobs), self.machine.interval_widening
        far = max(near, 1.0)
        return np.asarray(np.sqrt(near**2 * (1 - unknown) + far**2 * unknown))

    def ratio_uncertainty(self, jobs: Jobs) -> Column:
        """Standard deviation of the logarithm of every step over the first, in normal runs.

        Both come from the same draws of the parameters and neighbouring deviations: errors that are alike cancel.
        ``sqrt(Var(log t - log t_0) + Var(d - d_0)) w``, ``w`` that of the layout of which the runs say less.
        """
        logs, factor = np.log(self.closed_form_s(jobs)), self.uncertainty_factor(jobs)
        variance = (logs - logs[:, :1]).var(axis=0) + self.discrepancy.difference_variance(jobs)
        return np.asarray(np.sqrt(variance) * np.maximum(factor, factor[0]))

    def parameter_variance(self, jobs: Jobs) -> Column:
        """Variance of the logarithm over the draws of the fitted parameters."""
        return np.asarray(np.log(self.closed_form_s(jobs)).var(axis=0))

    def stall_probability(self, jobs: Jobs) -> Column:
        """Probability of jobs to be degraded; 0 if no run was."""
        degraded = self.machine.degraded
        if degraded is None:
            return np.zeros(len(jobs))
        return stall_probability(np.array(degraded.weights), jobs)

    def looks_disturbed(self, jobs: Jobs, step_s: Column) -> NDArray[np.bool_]:
        """Whether a measured step is nearer to the degraded than to the normal prediction."""
        normal, late, _, _ = self._states(jobs)
        return np.abs(late - np.log(step_s)) < np.abs(normal - np.log(step_s))

    def _width_uncertainty(self, jobs: Jobs) -> Column:
        return _OTHER_WIDTH * self.discrepancy.widths_away(jobs)

    def _states(
        self, jobs: Jobs, normal_s: Column | None = None
    ) -> tuple[Column, Column, Column, Column]:
        """Logarithms of the normal and of the degraded step, odds of the latter, variance of both."""
        normal_s = step_time_s(jobs, self.nominal) if normal_s is None else normal_s
        shift, variance = self.discrepancy.at(jobs)
        variance = variance + self._width_uncertainty(jobs) ** 2
        normal = np.log(normal_s) + shift
        degraded = self.machine.degraded
        if degraded is None:
            return normal, normal, np.zeros(len(jobs)), variance
        late = np.log(normal_s + stall_time_s(jobs, degraded.stall_s)) + shift
        return normal, late, self.stall_probability(jobs), variance


@lru_cache(maxsize=16)
def open_inferred(machine: InferredMachine) -> InferredModel:
    """A machine, ready to predict; ``CalibrationUnavailable`` if nobody knows its device."""
    model = InferredModel(machine=machine)
    assert model.sheet
    return model


LINKS_OF_FILE: Final = "links between nodes are as the cluster says, and never disturbed"


def on_links(machine: InferredMachine, cluster: Cluster, *, num_devices: int) -> InferredMachine:
    """The machine with other links between its nodes; those inside a node stay as the runs show.

    A device has its share of the narrowest tier that the nodes of a job use. Nothing is known of disturbed
    runs there.
    """
    inside = cluster.devices_per_node
    if inside is None or cluster.first_between_nodes == len(cluster.tiers):
        raise UsageError(
            f"--cluster: must have a tier called node and one between nodes, got "
            f"{', '.join(tier.name for tier in cluster.tiers)}"
        )
    if num_devices > cluster.num_devices:
        raise UsageError(
            f"--layout: must be of at most {cluster.num_devices} devices, all that {cluster.name} has, got "
            f"{num_devices}; ask for fewer or enlarge the cluster file"
        )
    nodes = -(-num_devices // inside)
    if nodes == 1:
        return machine
    levels = cluster.levels(nodes, stride=inside)
    rate = min(level.bytes_per_s for level in levels)
    latency_s = max(level.latency_s for level in levels)

    def changed(known: FittedParameter) -> FittedParameter:
        if known.name == "p2p_latency_s":
            draws = tuple(draw + latency_s for draw in known.draws)
            return replace(known, value=known.value + latency_s, draws=draws)
        if known.name != "node_bytes_per_s":
            return known
        deviates = np.log(np.array(known.draws) / known.value) / known.log_sigma
        draws = tuple(float(draw) for draw in rate * np.exp(UNCERTAINTY_OF_FILE * deviates))
        return replace(
            known, value=rate, log_sigma=UNCERTAINTY_OF_FILE, draws=draws, determined=True
        )

    return replace(
        machine,
        fitted_parameters=tuple(changed(known) for known in machine.fitted_parameters),
        degraded=None,
    )


#: Of one message between nodes, all in all: NCCL's tuner (src/graph/tuning.cc, ring, simple protocol).
#: Steps of whole models do not tell it. [s]
_BETWEEN_NODES_S: Final = 14e-6
#: Devices that the model is made for.
_MOST_DEVICES: Final = 16_384


def with_nodes_of(
    machine: MeasuredMachine, nodes: InferredMachine, *, name: str
) -> MeasuredMachine:
    """A machine of one node among nodes that are joined like those of another machine.

    Every device brings the rate between nodes that runs of the other machine show, and steps grow with the
    number of nodes as theirs do. The links of the own node stay as they were measured.

    ``name``: Of the other machine.
    """
    within = machine.ranks_per_node
    if machine.num_nodes > 1 or within == 1:
        known = "several nodes" if machine.num_nodes > 1 else "one device"
        raise UsageError(
            f"--nodes-like: must come with a machine of one node that was measured with several ranks, got "
            f"{known} of {machine.device_name}; name the links with --cluster FILE"
        )
    fitted = {known.name: known for known in nodes.fitted_parameters}
    rate, slower = fitted["node_bytes_per_s"], fitted["straggler_share"]
    fabric = _fabric(
        within,
        rate.value,
        log_error=rate.log_sigma,
        source=f"{nodes.num_runs} runs on {nodes.device_name}",
    )
    cluster = Cluster(
        name=f"nodes like {name}",
        tiers=(_own_node(machine, within, otherwise=rate.value), fabric),
        evidence=Evidence.INFERRED,
        straggler_share=slower.value,
        straggler_log_error=slower.log_sigma,
    )
    unknown = tuple(said for said in machine.undetermined if "network between nodes" not in said)
    return replace(machine, cluster=cluster, undetermined=unknown)


@lru_cache(maxsize=8)
def among_usual_nodes(machine: MeasuredMachine) -> MeasuredMachine:
    """A machine of one node of GPUs among nodes that have the adapters with which such nodes ship.

    Others stay as they are: devices that the catalogue does not know, cards without links to all of a node, racks
    that are one node.
    """
    from perfmodel.cost.rescaling import SCALED_FROM, catalogued, device_sheet  # noqa: PLC0415 - the catalogue

    within = machine.devices_per_node
    known = machine.num_nodes == 1 and machine.ranks_per_node > 1 and machine.backend == "nccl"
    if not (known and within and machine.collectives):
        return machine
    device, _, _ = machine.device_name.partition(SCALED_FROM)
    try:
        sheet = catalogued(device)
        rate = device_sheet(device).node_bytes_per_s
    except UsageError:
        return machine
    if sheet.link is None or sheet.link_joins_pairs or "NVL72" in sheet.form:
        return machine
    fabric = _fabric(
        within, LINK_SHARE * rate, log_error=UNKNOWN_NETWORK, source="usual for the device"
    )
    node = _own_node(machine, within, otherwise=fabric.link_bytes_per_s)
    factor = math.exp(DEVIATE_90 * UNKNOWN_NETWORK)
    cluster = Cluster(
        name=f"usual nodes of {within}, {8e-9 * rate:.0f} Gb/s per device within {factor:.0f}x",
        tiers=(node, replace(fabric, count=-(-MOST_DEVICES // within))),
    )
    return replace(machine, cluster=cluster)


def _own_node(machine: MeasuredMachine, within: int, *, otherwise: BytesPerSecond) -> Tier:
    """Links of the node that was measured: bus rate of its largest all-reduce of all devices.

    ``otherwise``: Algorithm rate where none of them all was measured. [B/s]
    """
    inside_s = {
        group.points[-1].at / group.points[-1].time_s
        for group in machine.collectives
        if group.collective == "all_reduce" and group.world_size == within
    }
    return Tier(
        name=NODE,
        of=DEVICE,
        count=within,
        link_bytes_per_s=2 * (within - 1) / within * max(inside_s, default=otherwise),
        latency_s=0.0,
        source="measured",
    )


def _fabric(within: int, bytes_per_s: BytesPerSecond, *, log_error: float, source: str) -> Tier:
    """Links between nodes of ``within`` devices, of which each brings a rate. [B/s]"""
    return Tier(
        name="fabric",
        of=NODE,
        count=max(2, _MOST_DEVICES // within),
        link_bytes_per_s=bytes_per_s,
        links=within,
        latency_s=_BETWEEN_NODES_S,
        source=source,
        log_error=log_error,
    )


def _quantile(
    share: float, normal: Column, disturbed: Column, chance: Column, spread: Column
) -> Column:
    """Quantile of a mixture of two normal distributions of equal width, by bisection."""
    low = np.minimum(normal, disturbed) - 8 * spread
    high = np.maximum(normal, disturbed) + 8 * spread
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = (1 - chance) * normal_cdf((middle - normal) / spread)
        below += chance * normal_cdf((middle - disturbed) / spread)
        low, high = np.where(below < share, middle, low), np.where(below < share, high, middle)
    return np.asarray((low + high) / 2)

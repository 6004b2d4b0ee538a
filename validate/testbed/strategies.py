"""Use case: real FSDP2, ZeroRedundancyOptimizer, tensor parallelism and pipeline stages, judged.

They run on the testbed's emulated devices over shaped links. Two ranks calibrate; strategies on 2 to 4
are predicted with the product's own step programs, run, and judged.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from scipy.optimize import least_squares

from calibrate.campaign import Progress
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from perfmodel.arrays import FloatArray
from perfmodel.documents.testbed import (
    CollectiveRun,
    CollectiveSetting,
    EmulatedStack,
    Run,
    StrategyRun,
    StrategySetting,
    TrainingRun,
    TrainingSetting,
    read_runs,
)
from perfmodel.documents.verdicts import (
    Gate,
    JudgedStrategy,
    PredictedStrategy,
    StrategiesDocument,
    StrategyFamily,
)
from perfmodel.engine.algebra import end_times
from perfmodel.errors import MeasurementFailed
from perfmodel.layout.layout import Layout, parse_layout
from perfmodel.statistics import Interval
from perfmodel.step.compile import Execution, compile_layout, compile_step
from perfmodel.step.program import Cause, Operation, StepProgram, Stream
from perfmodel.step.stages import assign_shards
from perfmodel.units import MIB, Bytes, Seconds
from validate.judging import coverage_gate, fraction, gate, passed, step_gates, summarise
from validate.testbed import plan
from validate.testbed.campaign import (
    CALIBRATION,
    RUNS,
    CampaignRequest,
    open_campaign,
    predict_once,
    refuse_earlier_runs,
)
from validate.testbed.cluster import Setting
from validate.testbed.ring import (
    PlayingMachine,
    Saving,
    ShapedRing,
    StepCosts,
    is_collective,
    message_bytes_of,
)

Family = Literal["fsdp", "zero", "tensor", "pipeline"]
FAMILIES: Final[tuple[Family, ...]] = ("fsdp", "zero", "tensor", "pipeline")
VERDICT: Final = "strategies.json"
ALL: Final = "all"
#: Gates, as fractions; written to disk before the first run that they judge.
LIMITS: Final = {"mape": 0.10, "worst": 0.20, "covered_from": 0.85, "family_mape": 0.10}
#: Name of the all-gathers that follow one another without a pause.
BACK_TO_BACK: Final = "all-gather in turn"
NUM_DRAWS: Final = 200
#: What host work is searched in: parts of a millisecond per pass, and per megabyte. [s], [s/B]
_SCALES: Final = (1e-3, 1e-9)
_ELEMENT_BYTES: Final = 4
_PAIR: Final = 2
#: All-reduces of a layer in a micro-batch: attention and perceptron have one each way [arXiv 1909.08053].
_ALL_REDUCES: Final = 4
#: What a kernel holds of a message that the program has sent: two parts of 64 KiB and their book-keeping
#: (TCP small queues), as seen in the timelines of two runs.
_KERNEL_QUEUE_BYTES: Final = 200_000
#: Uncertainty that calibration leaves at least, as a standard deviation of the logarithm: priors, of the size of
#: the errors on the runs with which the programs were developed.
_LEAST_UNCERTAINTY: Final = {"fsdp": 0.02, "zero": 0.025, "tensor": 0.025, "pipeline": 0.015}
#: The same, more, beyond two ranks. Programs leave out how broadcasts of several ranks share links, and
#: whether what a stage announces really meets its own data on the link.
_UNCERTAINTY_BEYOND_PAIRS: Final = {"fsdp": 0.015, "zero": 0.04, "tensor": 0.015, "pipeline": 0.04}


def validate_strategies(
    request: CampaignRequest, *, on_progress: Callable[[Progress], None]
) -> StrategiesDocument:
    """Carry out the whole campaign.

    Raises
    ------
    UsageError
        If the folder holds runs and ``resume`` is not given.
    NotFeasible
        If the machine does not allow network namespaces.
    Interrupted
        If the time is up; what was measured is kept.
    """
    refuse_earlier_runs(request, CALIBRATION)
    known: tuple[Setting, ...] = (*collectives(), *trainings(), *first())
    judged_settings = judged(seed=request.seed)
    total = len(known) + len(judged_settings)
    with open_campaign(
        request, command="validate strategies", total=total, on_progress=on_progress
    ) as campaign:
        campaign.run(known, request.folder / CALIBRATION)
        calibration = calibrate(read_runs(request.folder / CALIBRATION), seed=request.seed)
        predicted = predict_once(
            request.folder,
            judged_settings,
            lambda setting: predict(setting, calibration, seed=request.seed),
            kind=PredictedStrategy,
            options={"seed": request.seed},
            terms={"gates": LIMITS, "law": law(calibration)},
        )
        campaign.run(judged_settings, request.folder / RUNS)
    return conclude(request, calibration, predicted)


def _setting(  # noqa: PLR0913 - one argument per column of the tables below
    family: Family,
    kind: str,
    layout: str,
    mbit: float,
    shape: tuple[int, int, float],
    *,
    rows: int = 256,
    prefetch: bool = False,
    cap_mb: float | None = None,
) -> StrategySetting:
    """A setting of layers of a width whose forward pass takes some ms, backward twice as long."""
    layers, hidden, layer_ms = shape
    extra = " prefetch" if prefetch else ""
    cap = "" if cap_mb is None else f" cap={cap_mb:g}MiB"
    return StrategySetting(
        name=(
            f"{family} {kind}: {layout}{extra}{cap} {mbit:g}Mbit/s "
            f"{layers}x{hidden} rows={rows} {layer_ms:g}ms"
        ),
        family=family,
        model=EmulatedStack(
            num_layers=layers,
            hidden=hidden,
            rows=rows,
            forward_s=layer_ms / 1e3,
            backward_s=2 * layer_ms / 1e3,
            optimizer_s=0.02,
        ),
        fabric=plan.flat(parse_layout(layout).world_size, mbit),
        layout=layout,
        prefetch=prefetch,
        bucket_cap_mb=cap_mb,
        num_steps=4,
    )


def collectives() -> tuple[CollectiveSetting, ...]:
    """Between two ranks: all-reduces as the testbed has them, and all-gathers one after another."""
    costs = [s for s in plan.machine_costs(0) if isinstance(s, CollectiveSetting)]
    one_by_one = CollectiveSetting(
        name=BACK_TO_BACK,
        collective="all_gather",
        fabric=plan.flat(2, 200),
        sizes_bytes=(MIB, 2 * MIB),
        repeats=8,
        pause_s=0.0,
    )
    return (*plan.collectives(), *costs, one_by_one)


def trainings() -> tuple[TrainingSetting, ...]:
    """Two ranks of plain DDP whose counters tell what messages cost on the wire."""
    pairs = [s for s in plan.trainings() if s.fabric.num_ranks == _PAIR and s.num_steps < 10]
    return tuple(pairs[:2])


#: Two ranks of each strategy, which tell what its host work costs: layers, width and ms of a layer, rows.
_FIRST: Final[tuple[tuple[Family, str, tuple[int, int, float], int], ...]] = (
    ("fsdp", "dp=2 zero=3", (3, 160, 10), 256),
    ("fsdp", "dp=2 zero=3", (6, 64, 5), 256),
    ("zero", "dp=2 zero=1", (4, 160, 10), 256),
    ("zero", "dp=2 zero=1", (8, 64, 5), 256),
    ("tensor", "tp=2", (3, 128, 20), 512),
    ("tensor", "tp=2", (6, 64, 10), 256),
    ("pipeline", "pp=2 accumulation=4 schedule=gpipe", (4, 192, 10), 512),
    ("pipeline", "pp=2 accumulation=6", (8, 64, 5), 256),
)
#: Layout, Mbit/s, shape, prefetch.
_FSDP: Final[tuple[tuple[str, float, tuple[int, int, float], bool], ...]] = (
    ("dp=2 zero=3", 200, (4, 160, 20), False),
    ("dp=2 zero=3", 200, (5, 128, 30), True),
    ("dp=3 zero=3", 400, (4, 192, 10), False),
    ("dp=3 zero=3", 400, (4, 192, 40), True),
    ("dp=4 zero=3", 400, (4, 160, 20), False),
    ("dp=4 zero=3", 400, (6, 128, 20), True),
    ("dp=4 zero=3", 200, (3, 128, 60), True),
    ("dp=4 zero=2", 400, (5, 160, 25), True),
)
#: Layout, Mbit/s, shape, bucket cap.
_ZERO: Final[tuple[tuple[str, float, tuple[int, int, float], float | None], ...]] = (
    ("dp=2 zero=1", 200, (4, 160, 20), None),
    ("dp=2 zero=1", 100, (4, 128, 40), 2.0),
    ("dp=3 zero=1", 400, (6, 160, 15), None),
    ("dp=3 zero=1", 200, (5, 128, 30), 1.0),
    ("dp=4 zero=1", 400, (6, 160, 10), None),
    ("dp=4 zero=1", 400, (8, 128, 20), 2.0),
    ("dp=4 zero=1 accumulation=2", 400, (4, 192, 15), 4.0),
)
#: Family, layout, Mbit/s, shape, rows.
_OTHERS: Final[tuple[tuple[Family, str, float, tuple[int, int, float], int], ...]] = (
    ("tensor", "tp=2", 200, (3, 256, 40), 256),
    ("tensor", "tp=2", 100, (2, 128, 40), 512),
    ("tensor", "tp=3", 200, (3, 192, 60), 256),
    ("tensor", "tp=3", 400, (4, 192, 30), 512),
    ("tensor", "tp=4", 400, (3, 256, 40), 512),
    ("tensor", "tp=4", 200, (2, 256, 80), 256),
    ("tensor", "tp=4 accumulation=2", 400, (2, 128, 40), 512),
    ("pipeline", "pp=2 accumulation=4 schedule=gpipe", 200, (4, 256, 10), 512),
    ("pipeline", "pp=2 accumulation=4", 200, (4, 256, 10), 512),
    ("pipeline", "pp=2 accumulation=6", 100, (4, 128, 10), 512),
    ("pipeline", "pp=3 accumulation=6 schedule=gpipe", 400, (6, 256, 8), 512),
    ("pipeline", "pp=3 accumulation=6", 200, (6, 256, 8), 512),
    ("pipeline", "pp=4 accumulation=4 schedule=gpipe", 400, (4, 256, 12), 768),
    ("pipeline", "pp=4 accumulation=8", 400, (8, 256, 6), 512),
    ("pipeline", "pp=4 accumulation=8", 200, (4, 256, 20), 256),
)


def first() -> tuple[StrategySetting, ...]:
    """Strategies on two ranks, for calibration."""
    return tuple(
        _setting(family, f"first {number}", layout, 400, shape, rows=rows)
        for number, (family, layout, shape, rows) in enumerate(_FIRST)
    )


def judged(*, seed: int) -> tuple[StrategySetting, ...]:
    """All settings that are predicted and run, in an order of the seed: drift is no property of a family."""
    settings: list[StrategySetting] = []
    for layout, mbit, shape, prefetch in _FSDP:
        number = str(len(settings))
        settings.append(_setting("fsdp", number, layout, mbit, shape, prefetch=prefetch))
    for layout, mbit, shape, cap_mb in _ZERO:
        settings.append(_setting("zero", str(len(settings)), layout, mbit, shape, cap_mb=cap_mb))
    for family, layout, mbit, shape, rows in _OTHERS:
        settings.append(_setting(family, str(len(settings)), layout, mbit, shape, rows=rows))
    random.Random(seed).shuffle(settings)  # noqa: S311 - an order, no secret
    return tuple(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What a strategy's own code costs beside the device, which waits for it."""

    pass_s: float = 0.0
    """Per pass of a layer. [s]"""
    byte_s: float = 0.0
    """The same, per byte that the layer communicates. [s/B]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyCalibration(PlayingMachine):
    """What runs of two ranks tell."""

    pair_gather: float
    """All-gather between two ranks over what its ring would take: both directions share a connection, in
    which the word that one may send waits behind what the other sends."""
    hosts: dict[str, HostWork]
    """By family."""
    residuals: dict[str, float]
    """Standard deviation of the logarithm of measured over predicted steps, by family."""


def calibrate(runs: Sequence[Run], *, seed: int) -> StrategyCalibration:
    """Fit the ring on collectives between two ranks, then each strategy's host work on its first runs."""
    measured = [run for run in runs if isinstance(run, CollectiveRun)]
    pairs = [run for run in runs if isinstance(run, TrainingRun)]
    own = {
        family: [r for r in runs if isinstance(r, StrategyRun) and r.setting.family == family]
        for family in FAMILIES
    }
    gathers = [run for run in measured if run.setting.name == BACK_TO_BACK]
    if not gathers or not pairs or not all(own.values()):
        raise MeasurementFailed(
            "strategies: calibration must hold collectives, DDP and all strategies; "
            "continue with --resume"
        )
    assert all(run.setting.fabric.num_ranks == _PAIR for run in runs)
    ring = ShapedRing.fit(
        [run for run in measured if run.setting.collective == "all_reduce"],
        message_bytes=message_bytes_of(pairs),
        num_draws=NUM_DRAWS,
        rng=np.random.default_rng(seed),
    )
    fabric = gathers[0].setting.fabric
    ratios = [
        float(np.median(durations_s) / ring.wire_s(size, fabric, "all_gather")[0])
        for size, durations_s in zip(
            gathers[0].setting.sizes_bytes, gathers[0].durations_s, strict=True
        )
    ]
    bare = StrategyCalibration(
        ring=ring,
        pair_gather=float(np.median(ratios)),
        hosts={},
        residuals={},
        num_cores=own["fsdp"][0].host.num_cores,
        num_draws=NUM_DRAWS,
    )
    hosts: dict[str, HostWork] = {f: _host_work(found, bare) for f, found in own.items()}
    full = dataclasses.replace(bare, hosts=hosts)
    residuals: dict[str, float] = {
        family: float(np.sqrt(np.mean(np.square(_errors(found, full)))))
        for family, found in own.items()
    }
    return dataclasses.replace(full, residuals=residuals)


def _errors(runs: Sequence[StrategyRun], calibration: StrategyCalibration) -> FloatArray:
    return np.array(
        [
            np.log(StrategyCosts.of(run.setting, calibration).step_s() / np.median(run.step_s))
            for run in runs
        ]
    )


def _host_work(runs: Sequence[StrategyRun], bare: StrategyCalibration) -> HostWork:
    """The non-negative work with which the first runs of a family are predicted best."""
    family = runs[0].setting.family
    # One draw is enough for the nominal value.
    one = {name: np.array([value]) for name, value in bare.ring.nominal().items()}
    nominal = dataclasses.replace(bare, ring=ShapedRing(**one), num_draws=1)

    def work(values: FloatArray) -> HostWork:
        pass_s, byte_s = (float(value) for value in values * _SCALES)
        return HostWork(pass_s=pass_s, byte_s=byte_s)

    def off(values: FloatArray) -> FloatArray:
        return _errors(runs, dataclasses.replace(nominal, hosts={family: work(values)}))

    return work(least_squares(off, x0=(0.3, 0.3), bounds=(0.0, np.inf)).x)


def compiled(setting: StrategySetting) -> StepProgram:
    """The step as the product sees it; gloo makes the host wait."""
    layout, model = parse_layout(setting.layout), setting.model
    if setting.family == "zero":
        # DDP, then an optimizer that is divided by parameters.
        count = model.num_layers
        sizes = [_ELEMENT_BYTES * model.layer_elements] * count
        ready = [(model.layer_elements, (number + 1) / count) for number in range(count)]
        step = Layout(
            dp=layout.dp, accumulation=layout.accumulation, bucket_cap_mb=setting.bucket_cap_mb
        )
        return compile_step(
            plan.gradients(setting.name, ready),
            step,
            asynchronous=False,
            shards_bytes=assign_shards(sizes, num_ranks=layout.dp),
        )
    if layout.zero == 3:
        layout = dataclasses.replace(layout, prefetch=int(setting.prefetch))
    return compile_layout(
        layout,
        layers=model.num_layers,
        execution=Execution.BLOCKING,
        queued=_KERNEL_QUEUE_BYTES / model.activation_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyCosts(StepCosts):
    """Sharding, tensor parallelism and pipeline stages."""

    setting: StrategySetting
    calibration: StrategyCalibration
    layout: Layout

    @classmethod
    def of(cls, setting: StrategySetting, calibration: StrategyCalibration) -> "StrategyCosts":
        """Compile the step of a setting."""
        return cls(
            setting=setting,
            layout=parse_layout(setting.layout),
            calibration=calibration,
            program=compiled(setting),
        )

    def _times(self, operation: Operation) -> float:
        if operation.cause is Cause.ALL_GATHER and self.setting.fabric.num_ranks == _PAIR:
            return self.calibration.pair_gather
        return self._all_reduces(operation) if operation.cause is Cause.TENSOR else 1.0

    def _all_reduces(self, operation: Operation) -> float:
        return _ALL_REDUCES * self._layers_per_stage * operation.share

    @property
    def _layers_per_stage(self) -> float:
        return self.setting.model.num_layers / self.layout.pp

    def _size_bytes(self, operation: Operation) -> Bytes:
        model = self.setting.model
        if operation.cause is Cause.TENSOR:
            return model.activation_bytes
        if operation.cause is Cause.P2P:
            return round(model.activation_bytes * operation.share)
        layers = self._layers_per_stage * operation.share
        return operation.size_bytes or round(_ELEMENT_BYTES * model.layer_elements * layers)

    def _compute_s(self, operation: Operation) -> Seconds:
        model, layout = self.setting.model, self.layout
        if operation.cause is Cause.OPTIMIZER:
            # A program that divides the optimizer itself says its largest part.
            divided = layout.tp * layout.pp * (layout.dp if layout.zero > 1 else 1)
            return model.optimizer_s * operation.share / divided
        if operation.cause not in (Cause.FORWARD, Cause.BACKWARD):
            return 0.0
        pass_s = model.forward_s if operation.cause is Cause.FORWARD else model.backward_s
        work = self.calibration.hosts[self.setting.family]
        sharded = self.setting.family in ("fsdp", "zero")
        moved = _ELEMENT_BYTES * model.layer_elements if sharded else model.activation_bytes
        host_s = work.pass_s + work.byte_s * moved
        return (pass_s / layout.tp + host_s) * self._layers_per_stage * operation.share

    def _savings(self, durations_s: FloatArray) -> dict[int, Saving]:
        """What the rest before each collective saves: it grows while its link is idle. [s]"""
        full_s = self.calibration.ring.burst_s(self.setting.fabric)
        ends_s = end_times(self.program, durations_s)
        state: dict[tuple[int, Stream], tuple[FloatArray, FloatArray]] = {}
        found = {}
        for position, operation in enumerate(self.program.operations):
            if not is_collective(operation):
                continue
            if operation.cause is Cause.TENSOR:
                # Compute between two all-reduces of a layer.
                (before,) = operation.after
                rest_s = durations_s[before] / self._all_reduces(operation)
                found[position] = Saving(np.minimum(full_s, rest_s))
                continue
            burst_s, free_s = state.get(operation.lane, (full_s, np.zeros_like(full_s)))
            starts_s = ends_s[position] - durations_s[position]
            burst_s = np.minimum(full_s, burst_s + np.maximum(starts_s - free_s, 0.0))
            found[position] = Saving(burst_s)
            left_s = np.maximum(burst_s - durations_s[position], 0.0)
            state[operation.lane] = (left_s, ends_s[position])
        return found


def predict(
    setting: StrategySetting, calibration: StrategyCalibration, *, seed: int
) -> PredictedStrategy:
    """Predict one setting with its interval."""
    costs = StrategyCosts.of(setting, calibration)
    steps_s = end_times(costs.program, costs.durations()).max(axis=0)
    beyond = _UNCERTAINTY_BEYOND_PAIRS[setting.family] if setting.fabric.num_ranks > _PAIR else 0.0
    spread = np.sqrt(
        calibration.residuals[setting.family] ** 2
        + _LEAST_UNCERTAINTY[setting.family] ** 2
        + beyond**2
    )
    rng = np.random.default_rng([seed, *setting.name.encode()])
    uncertainty = np.exp(spread * rng.standard_normal(calibration.num_draws))
    return PredictedStrategy(
        name=setting.name,
        step_s=Interval.of(steps_s * uncertainty, nominal=costs.step_s()),
    )


def conclude(
    request: CampaignRequest,
    calibration: StrategyCalibration,
    predicted: dict[str, PredictedStrategy],
) -> StrategiesDocument:
    """Judge what is on disk, and write the verdict."""
    settings = tuple(
        judge(predicted[run.setting.name], run)
        for run in read_runs(request.folder / RUNS)
        if isinstance(run, StrategyRun)
    )
    families = summed_up(settings)
    gates = judge_families(families)
    document = StrategiesDocument(
        provenance=provenance(describe_environment(), seed=request.seed),
        law=law(calibration),
        settings=settings,
        families=families,
        gates=gates,
        passed=passed(gates),
    )
    document.write(request.folder / VERDICT)
    return document


def judge(predicted: PredictedStrategy, run: StrategyRun) -> JudgedStrategy:
    """Compare one setting."""
    measured_s = float(np.median(run.step_s))
    return JudgedStrategy(
        name=run.setting.name,
        family=run.setting.family,
        world_size=run.setting.fabric.num_ranks,
        predicted=predicted,
        measured_s=measured_s,
        signed_error=predicted.step_s.signed_error(measured_s),
        is_covered=predicted.step_s.holds(measured_s),
        variation=float(np.std(run.step_s) / np.mean(run.step_s)),
        own_cpu_share=run.host.own_share,
    )


def summed_up(settings: Sequence[JudgedStrategy]) -> tuple[StrategyFamily, ...]:
    """Every strategy that was run, and all together."""
    groups = {
        name: [setting for setting in settings if name in (setting.family, ALL)]
        for name in (*FAMILIES, ALL)
    }
    return tuple(
        StrategyFamily(
            name=name,
            summary=summarise([setting.signed_error for setting in members]),
            coverage=fraction(setting.is_covered for setting in members),
        )
        for name, members in groups.items()
        if members
    )


def judge_families(families: Sequence[StrategyFamily]) -> tuple[Gate, ...]:
    """Compare with what was promised: all together, and each strategy's typical error."""
    gates: list[Gate] = []
    for family in families:
        summary, of = family.summary, f"{family.name}: "
        if family.name != ALL:
            gates.append(gate(f"{of}step-time MAPE", summary.mape, at_most=LIMITS["family_mape"]))
            continue
        gates += step_gates(summary, mape=LIMITS["mape"], worst=LIMITS["worst"], of=of)
        gates.append(coverage_gate(family.coverage, at_least=LIMITS["covered_from"], of=of))
    return tuple(gates)


def law(calibration: StrategyCalibration) -> dict[str, float]:
    """Fitted parameters by name."""
    found = {f"ring_{name}": value for name, value in calibration.ring.nominal().items()}
    found["pair_gather"] = calibration.pair_gather
    for family, work in calibration.hosts.items():
        found |= {f"{family}_pass_s": work.pass_s, f"{family}_byte_s": work.byte_s}
        found[f"{family}_residual"] = calibration.residuals[family]
    return found

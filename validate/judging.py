"""What every judge does: sum up signed errors, count intervals that held, compare with what was promised."""

import datetime as dt
import itertools
import math
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from scipy.special import bdtrik

from calibrate.campaign import PLAN, Progress, read_plan
from calibrate.experiment import doubling_sizes, is_short
from calibrate.summary import Estimate, calibrated_setting, estimate
from calibrate.task import StepTask, Task
from perfmodel.documents import file_sha256
from perfmodel.documents.observation import LoopObservation, Observation
from perfmodel.documents.verdicts import (
    COVERAGE_OF_RUNS,
    OVER_NOISE,
    SPEEDUP_MAPE,
    STEP_MAPE,
    Compared,
    ComparedStrategy,
    ErrorSummary,
    Gate,
    JudgedFamily,
)
from perfmodel.errors import UsageError
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.statistics import FloatArray, Interval
from perfmodel.units import Seconds, format_duration

#: Below this many settings a coverage above the upper bound is no sign of intervals that are too wide.
_ENOUGH_FOR_UPPER_COVERAGE: Final = 24
#: Sooner after a calibration, a machine is in the mode that it was calibrated in. [s]
_ANOTHER_OCCASION_S: Final = 20 * 60.0
#: Folder of the first stage of a judge: operators of what is judged, timed on one rank.
IN_PLACE: Final = "in-place"
#: Seeds below belong to development; a record uses one of the others, once.
_FIRST_SEED_OF_RECORDS: Final = 1000
_SEEDS: Final = 1_000_000
#: What each rank of a judged run is.
PLAIN_LOOP: Final = "validate.plain_loop"

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What the user asked for: the profile that is judged, how thoroughly, and where runs are kept."""

    profile: MeasuredMachine
    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False
    soon: bool = False
    """Whether to run now, however fresh the calibration is."""


def wait_for_another_occasion(
    request: ProfileRequest, on_progress: Callable[[Progress], None]
) -> None:
    """Wait until 20 minutes after the last step of the calibration, unless told to run soon."""
    if request.soon or not request.profile.origin.made_utc:
        return
    made_s = dt.datetime.fromisoformat(request.profile.origin.made_utc).timestamp()
    # A date to come is that of another clock.
    while 0 < (left_s := _ANOTHER_OCCASION_S - (time.time() - made_s)) <= _ANOTHER_OCCASION_S:
        words = f"waiting {format_duration(left_s)} for another occasion; --soon runs now"
        on_progress(Progress(done=0, total=1, task=words, is_waiting=True))
        time.sleep(min(left_s, 5.0))


def campaign_seed(folder: Path, given: int | None) -> int:
    """Seed that the user gave, that of a campaign which began in the folder, or a new one."""
    if given is not None:
        return given
    in_place = folder / IN_PLACE
    if (in_place / PLAN).exists():
        return int(read_plan(in_place)["seed"])
    return _FIRST_SEED_OF_RECORDS + secrets.randbelow(_SEEDS)


def shuffled(entries: Sequence[Entry], seed: str) -> list[Entry]:
    """Entries in an order of the seed's own."""
    return random.Random(seed).sample(entries, len(entries))  # noqa: S311 - an order, no secret


def launches(
    repetitions: Sequence[Sequence[Task]], request: ProfileRequest
) -> Sequence[Sequence[Task]]:
    """Tasks of each start of the ranks: every run is a copy of a rank, and copies of one lie alike in memory.

    Each repetition has new ranks; of the quick budget all have the same, to save the seconds that starting takes.
    """
    if request.budget == "quick":
        return (tuple(itertools.chain.from_iterable(repetitions)),)
    return repetitions


def measured_runs(entries: Iterable[Observation]) -> dict[RunSetting, dict[int, Seconds]]:
    """Steps of every setting by the round that ran it."""
    found: dict[RunSetting, dict[int, Seconds]] = defaultdict(dict)
    for entry in entries:
        if isinstance(entry, LoopObservation):
            found[entry.setting][entry.round] = entry.step_s
    return found


def measured_steps(
    runs: Mapping[RunSetting, Mapping[int, Seconds]],
) -> dict[RunSetting, Estimate]:
    """Step time of every setting, over its repetitions."""
    return {setting: estimate([*by_round.values()]) for setting, by_round in runs.items()}


def compared(
    setting: RunSetting,
    predicted_s: Interval,
    runs_s: Sequence[Seconds],
    *,
    measured_s: Seconds | None = None,
) -> dict[str, Any]:
    """Fields of a predicted step beside its runs; measured is their estimate unless told otherwise."""
    found = estimate(runs_s)
    measured_s = found.value_s if measured_s is None else measured_s
    return {
        "setting": setting,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "num_repetitions": found.num_repetitions,
        "measured_relative_error": found.relative_error,
        "signed_error": predicted_s.signed_error(measured_s),
        "is_covered": predicted_s.holds(measured_s),
        "num_inside": sum(map(predicted_s.holds, runs_s)),
    }


def judged(
    profile: MeasuredMachine, observations: Path, gates: Sequence[Gate], rows: Sequence[Compared]
) -> dict[str, Any]:
    """Fields of every verdict on predictions from a profile: whose, what intervals held, whether gates passed."""
    return {
        "coverage": fraction(row.is_covered for row in rows),
        "coverage_of_runs": coverage_of_runs(rows),
        "profile_digest": profile.digest,
        "observations_sha256": file_sha256(observations),
        "gates": tuple(gates),
        "passed": passed(gates),
    }


def coverage_of_runs(rows: Sequence[Compared]) -> float:
    """Share of single runs that their intervals hold; every run counts alike."""
    return sum(row.num_inside or 0 for row in rows) / sum(row.num_repetitions for row in rows)


#: Mean size of a normal error over its standard deviation, and the size that the largest of eight exceeds
#: once in twenty times over that mean.
_MEAN_SIZE: Final = math.sqrt(2 / math.pi)
_WORST_OF_EIGHT: Final = 3.4
#: What a quick calibration may be off beside its noise. A standard one may be off by 2.5 points, from 6 rounds
#: of 4 batches; errors fall with the root of the data, and quick has 4 rounds of 2 batches.
_QUICK_OVER_NOISE: Final = 0.025 * math.sqrt(6 * 4 / (4 * 2))
#: How often honest intervals may miss the gate on coverage.
_UNLUCKY: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """What the tool promises, as fractions; written down before anything is measured."""

    step_mape: float = 0.07
    step_worst: float = 0.20
    speedup_mape: float = 0.045
    over_noise: float = 0.025
    """Step-time MAPE beyond that of calibrated settings run again."""
    coverage_at_least: float = 0.85
    coverage_at_most: float = 0.97
    expected_noise: float | None = None
    """Error of repeated settings that the calibration leads to expect, if the other gates rest on it."""

    @classmethod
    def of_quick(
        cls, profile: MeasuredMachine, *, num_repetitions: int, num_settings: int
    ) -> "Tolerances":
        """Gates of a quick validation: what this machine repeats itself to, and a margin.

        mape    <= noise + margin                         noise = sqrt(2 / pi) sigma(calibrated - run again)
        worst   <= 3.4 mape                               largest of eight normal errors, 19 times in 20
        speedup <= sqrt(2) noise + margin                 a ratio of two steps
        covered >= 5 % quantile of Binomial(n, 0.9) / n   n settings: runs of one err together

        Were they independent, honest intervals would miss less often yet.
        """
        again = profile.repeatability.again(profile.num_rounds, num_repetitions)
        noise = _MEAN_SIZE * again
        mape = noise + _QUICK_OVER_NOISE
        return cls(
            step_mape=mape,
            step_worst=_WORST_OF_EIGHT * mape,
            speedup_mape=math.sqrt(2) * noise + _QUICK_OVER_NOISE,
            over_noise=_QUICK_OVER_NOISE,
            coverage_at_least=fewest_covered(num_settings) / num_settings,
            expected_noise=noise,
        )

    def judge(
        self,
        *,
        summary: ErrorSummary,
        rows: Sequence[Compared],
        speedups: ErrorSummary | None = None,
        noise: ErrorSummary | None = None,
    ) -> tuple[Gate, ...]:
        """Compare errors, and the share of single runs inside the intervals of rows, with what was promised."""
        enough = summary.num_settings >= _ENOUGH_FOR_UPPER_COVERAGE
        high = self.coverage_at_most if enough else None
        gates = [
            gate(STEP_MAPE, summary.mape, at_most=self.step_mape),
            gate("worst step-time error", summary.worst_absolute, at_most=self.step_worst),
            gate(
                COVERAGE_OF_RUNS,
                coverage_of_runs(rows),
                at_least=self.coverage_at_least,
                at_most=high,
            ),
        ]
        # Gates that rest on the expected noise hold this one with them.
        if noise is not None and self.expected_noise is None:
            over = summary.mape - noise.mape
            gates.append(gate(OVER_NOISE, over, at_most=self.over_noise))
        if speedups is not None:
            gates.append(gate(SPEEDUP_MAPE, speedups.mape, at_most=self.speedup_mape))
        return tuple(gates)


def fewest_covered(num_settings: int) -> int:
    """Fewest 90 % intervals that hold, but for once in twenty."""
    return math.ceil(bdtrik(_UNLUCKY, num_settings, 0.9))


def gate(
    name: str, value: float, *, at_least: float | None = None, at_most: float | None = None
) -> Gate:
    """Compare one value with its bounds."""
    above = at_least is None or value >= at_least
    below = at_most is None or value <= at_most
    return Gate(
        name=name,
        unit="fraction",
        at_least=at_least,
        at_most=at_most,
        value=value,
        passed=above and below,
    )


def passed(gates: Sequence[Gate]) -> bool:
    """Whether every gate passed."""
    return all(gate.passed for gate in gates)


def summarise(signed_errors: Sequence[float] | FloatArray) -> ErrorSummary:
    """Sum up at least one error."""
    errors = np.asarray(signed_errors, dtype=np.float64)
    if not errors.size:
        raise ValueError("signed_errors must hold at least one error, got none")
    return ErrorSummary(
        num_settings=errors.size,
        bias=float(errors.mean()),
        mape=float(np.abs(errors).mean()),
        median_absolute=float(np.median(np.abs(errors))),
        worst_absolute=float(np.abs(errors).max()),
    )


def summarise_any(signed_errors: Sequence[float]) -> ErrorSummary | None:
    """Sum up errors; None without any."""
    return summarise(signed_errors) if signed_errors else None


def families(rows: Sequence[ComparedStrategy]) -> tuple[JudgedFamily, ...]:
    """Errors by family, in their order, and of all together as the last."""
    found: dict[str, list[ComparedStrategy]] = defaultdict(list)
    for row in rows:
        found[row.family].append(row)
    return tuple(
        JudgedFamily(
            name=name,
            summary=summarise([row.signed_error for row in of_one]),
            coverage=coverage_of_runs(of_one),
        )
        for name, of_one in (found | {"all": list(rows)}).items()
    )


def fraction(flags: Iterable[bool]) -> float:
    """Share of what is true, such as intervals that held what was measured; of at least one."""
    return float(np.mean(list(flags)))


# Settings that calibration never used; disjoint by construction, and checked.
@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutBudget:
    """How many held-out settings, and how often each is measured."""

    num_batches: int
    """Held-out micro-batches per workload inside the calibrated range."""
    goes_beyond: bool
    """Whether one micro-batch above the calibrated range is held out as well."""
    num_repetitions: int
    """Of every setting, each in processes of its own, one after all settings have run once."""
    repetition_s: Seconds
    min_steps: int

    @classmethod
    def of(cls, name: str, device_kind: str) -> "HoldoutBudget":
        """Of a name on a kind of device; a borrowed GPU has little time."""
        budget = BUDGETS[name]
        return replace(budget, num_repetitions=2) if is_short(name, device_kind) else budget


BUDGETS: Final = {
    "quick": HoldoutBudget(
        num_batches=1, goes_beyond=False, num_repetitions=3, repetition_s=0.8, min_steps=4
    ),
    "standard": HoldoutBudget(
        num_batches=2, goes_beyond=True, num_repetitions=10, repetition_s=0.8, min_steps=4
    ),
}

#: Bucket caps that calibration does not use. [MiB]
BUCKET_CAPS_MB: Final = (2.0, 10.0)
ACCUMULATIONS: Final = (2, 3)
#: The held-out micro-batch above the calibrated range, over the largest one in it.
_BEYOND: Final = 1.25


def holdout_settings(
    profile: MeasuredMachine, *, num_batches: int, goes_beyond: bool = False
) -> tuple[RunSetting, ...]:
    """Held-out settings of every calibrated workload: single device first, then several ranks.

    Micro-batches lie between the calibrated ones, and one above them; bucket caps and accumulations
    are others; so is a number of ranks, where there is one between the calibrated ones.
    """
    settings = tuple(
        setting
        for workload in profile.workloads
        for setting in _of_workload(
            workload, profile.max_world_size, num_batches=num_batches, goes_beyond=goes_beyond
        )
    )
    if not settings:
        raise UsageError(
            "--profile: must hold a calibrated workload to be validated, got none; calibrate again"
        )
    calibrated = calibrated_settings(profile)
    for setting in settings:
        if setting in calibrated:
            raise ValueError(f"holdout: {setting.label} must not be part of the calibration")
    return settings


def calibrated_settings(profile: MeasuredMachine) -> frozenset[RunSetting]:
    """Every setting whose steps went into the profile."""
    return frozenset(calibrated_setting(step) for step in profile.steps)


def repeated_settings(profile: MeasuredMachine) -> tuple[RunSetting, ...]:
    """Calibrated settings to run again, one single and one synchronised per workload.

    Their errors hold no model at all: only noise, drift, and what changes between processes.
    """
    repeats = []
    for workload in profile.workloads:
        batches = [int(point.at) for point in workload.phases[0].forward]
        name, middle = workload.workload.name, batches[len(batches) // 2]
        repeats.append(_single(name, middle))
        if profile.max_world_size > 1:
            repeats.append(_parallel(name, middle, profile.max_world_size))
    return tuple(setting for setting in repeats if setting in calibrated_settings(profile))


def rounds(
    settings: Sequence[RunSetting],
    *,
    repeated: Sequence[RunSetting] = (),
    budget: HoldoutBudget,
    seed: int,
) -> tuple[tuple[Task, ...], ...]:
    """Runs of each repetition: all settings and repeats once, in a new random order."""
    result = []
    for index in range(budget.num_repetitions):
        order = [*settings, *repeated]
        random.Random(f"{seed}-{index}").shuffle(order)  # noqa: S311 - an order, no secret
        result.append(
            tuple(
                StepTask(
                    name=f"{index}: {setting.label}",
                    round=index,
                    setting=setting,
                    target_s=budget.repetition_s,
                    min_steps=budget.min_steps,
                )
                for setting in order
            )
        )
    return tuple(result)


def _of_workload(
    workload: MeasuredWorkload, world_size: int, *, num_batches: int, goes_beyond: bool
) -> Iterable[RunSetting]:
    name = workload.workload.name
    middles = _between(workload)[:num_batches]
    for index, micro_batch in enumerate(middles):
        yield from _block(name, micro_batch, index, world_size)
    if middles and (between := _world_size_between(world_size)) is not None:
        yield _parallel(name, middles[0], between)
    if goes_beyond or not middles:
        beyond = math.ceil(max(point.at for point in workload.phases[0].forward) * _BEYOND)
        yield _single(name, beyond)
        if world_size > 1:
            yield _parallel(name, beyond, world_size)


def _between(workload: MeasuredWorkload) -> tuple[int, ...]:
    """Micro-batches in the gaps of the calibrated ones, widest gap first, none of them calibrated."""
    calibrated = sorted(int(point.at) for point in workload.phases[0].forward)
    gaps = sorted(itertools.pairwise(calibrated), key=lambda gap: gap[0] / gap[1])
    middles = [round((low * high) ** 0.5) for low, high in gaps]
    return tuple(middle for middle in middles if middle not in calibrated)


def _world_size_between(largest: int) -> int | None:
    """A number of ranks that calibration skips: three quarters of all."""
    candidate = 3 * largest // 4
    return None if candidate in doubling_sizes(largest) or candidate < 2 else candidate


def _block(name: str, micro_batch: int, index: int, world_size: int) -> Iterable[RunSetting]:
    single, parallel = _single(name, micro_batch), _parallel(name, micro_batch, world_size)
    accumulation = ACCUMULATIONS[index % len(ACCUMULATIONS)]
    yield single
    if world_size == 1:
        yield replace(single, accumulation=accumulation)
        return
    yield parallel
    yield replace(parallel, bucket_cap_mb=BUCKET_CAPS_MB[index % len(BUCKET_CAPS_MB)])
    yield replace(parallel, accumulation=accumulation)


def _single(name: str, micro_batch: int) -> RunSetting:
    alone = _parallel(name, micro_batch, 1)
    return replace(alone, synchronisation=Synchronisation.NONE)


def _parallel(name: str, micro_batch: int, world_size: int) -> RunSetting:
    return RunSetting(workload=name, world_size=world_size, micro_batch=micro_batch)

"""Judge recorded runs with the code of today: no proof, but shows what a change, or a part of the fit, is worth.

``python -m tests.benchmarks.rejudge docs/records/network``, or ``validation``, which fits ``docs/records/calibration``
again first. ``... validation --without PART``, or ``all``, fits it without one part at a time. A part pays if it gains
0.5 points of MAPE or 5 points of coverage. ``... FILE.jsonl.xz``: how well plain loops predict plain loops.
``docs/records/others``: how many runs of each campaign intervals hold, by estimators like today's of all others, and
by curves if recorded widths are scaled to hold 90 % of all others.
"""

import argparse
import contextlib
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from scipy.optimize import minimize
from scipy.stats import multivariate_normal, t

from calibrate.fit.ddp import NUM_DRAWS
from calibrate.fit.profile import fit_profile
from perfmodel.documents.observation import LoopObservation, read_observations
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import (
    ComparedSetting,
    ModelsValidationDocument,
    ValidationDocument,
)
from perfmodel.machine.measured import MeasuredMachine, Repeatability
from perfmodel.statistics import FloatArray, Interval
from tests.regression.cases import unpacked
from validate import validate
from validate.judging import Tolerances, summarise
from validate.testbed import network
from validate.testbed.cluster import read_runs

CALIBRATION: Final = Path("docs/records/calibration")


def _constant(value: object) -> Callable[..., Any]:
    return lambda *_arguments, **_named: value


#: What stands for each part while it is off: names that are replaced, and by what.
PARTS: Final[Mapping[str, Mapping[str, object]]] = {
    "nothing": {},
    "smoothed phase curves": {"calibrate.fit.steps.smoothed": tuple},
    "overlap probe": {"calibrate.fit.ddp.prior_speeds": _constant((0.7, 0.7))},
    "start of an all-reduce": {"calibrate.fit.ddp._PRIOR_START_S": {True: 1e-9, False: 1e-9}},
    "spread of ranks": {"calibrate.fit.profile.rank_spread": _constant(0.0)},
    "host cost per bucket": {
        "calibrate.fit.profile.fit_bucket_costs": _constant(np.zeros((1 + NUM_DRAWS, 2)))
    },
    "runs, rounds and hours": {
        "calibrate.fit.profile.repeatability": _constant(
            Repeatability(run={}, round=0.0, occasion=0.0)
        )
    },
}


def say(name: str, errors: Sequence[float], covered: Sequence[bool] = ()) -> None:
    """Print a summary in a line."""
    if errors:
        found = summarise(errors)
        inside = f"  inside {sum(covered)} of {len(covered)}" if covered else ""
        sys.stdout.write(
            f"{name:40} {found.num_settings:4d}  bias {found.bias:+.1%}  MAPE {found.mape:.1%}  "
            f"worst {found.worst_absolute:.1%}{inside}\n"
        )


def _network(record: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = read_runs(unpacked(record / "runs.jsonl", Path(folder) / "runs.jsonl"))
    found = network.points(runs)
    known = {name: network.splits(every)[0] for name, every in found.items()}
    rows = network.predict(known, (run.setting for run in runs if ": judged" in run.setting.name))
    predicted = {(row["collective"], row["ranks"], row["size_bytes"]): row for row in rows}
    for judged in network.judge(found, predicted):
        say(judged.series.name, judged.errors)


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    """A fit without one part."""
    with contextlib.ExitStack() as stack:
        for name, replacement in PARTS[part].items():
            stack.enter_context(patch(name, replacement))
        yield


def _profile(folder: Path) -> MeasuredMachine:
    """The recorded calibration, fitted by the code of today."""
    recorded = ProfileDocument.read(CALIBRATION / "profile.json")
    observations = unpacked(CALIBRATION / "observations.jsonl", folder / "calibration.jsonl")
    return fit_profile(observations, provenance=recorded.provenance).machine


def _say_steps(name: str, rows: Sequence[ComparedSetting]) -> None:
    """Inside and beyond the calibrated micro-batches."""
    for where, is_beyond in (("inside", False), ("beyond", True)):
        own = [row for row in rows if row.is_extrapolated is is_beyond]
        # Older verdicts counted means of runs.
        held = [
            at < row.num_inside
            for row in own
            if row.num_inside is not None
            for at in range(row.num_repetitions)
        ]
        held = held or [row.is_covered for row in own]
        say(f"{name}, {where}", [row.signed_error for row in own], held)


def _judged_again(record: Path, before: ValidationDocument) -> ValidationDocument:
    """Settings that calibration never saw, at another hour, predicted by the code of today."""
    with tempfile.TemporaryDirectory() as name:
        profile = _profile(Path(name))
        settings = [row.setting for row in before.settings]
        steps_s, speedups = validate.predict(profile, settings)
        plan = validate.Plan(
            budget="standard",
            seed=before.provenance.seed,
            profile_digest=profile.digest,
            gates=Tolerances(),
            predicted_s=steps_s,
            predicted_speedups=speedups,
        )
        runs = unpacked(record / "observations.jsonl", Path(name) / "runs.jsonl")
        return validate.judge(profile, plan, settings, runs, before.provenance)


def _validation(record: Path) -> None:
    before = ValidationDocument.read(record / validate.VALIDATION)
    found = _judged_again(record, before)
    _say_steps("as recorded", before.settings)
    _say_steps("today", found.settings)
    within = {
        (row.setting.workload, row.setting.micro_batch)
        for row in found.settings
        if not row.is_extrapolated
    }
    speedups = [row for row in found.speedups if (row.workload, row.micro_batch) in within]
    held = [row.predicted.holds(row.measured) for row in speedups]
    say("today, inside: speed-ups", [row.signed_error for row in speedups], held)


def _ablation(record: Path, part: str) -> None:
    """Two rows: the recorded validation by a fit without one part."""
    before = ValidationDocument.read(record / validate.VALIDATION)
    with without(part):
        _say_steps(f"without {part}", _judged_again(record, before).settings)


def _halves(record: Path) -> None:
    """Errors of the first half of a setting's runs as a prediction of the second: of the host, not of a model."""
    runs = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "runs.jsonl"
        for entry in read_observations(unpacked(record.parent / record.name[:-3], target)):
            if isinstance(entry, LoopObservation):
                runs[entry.setting].append((entry.started_utc, entry.step_s))
    halves = (np.array_split([step_s for _, step_s in sorted(of)], 2) for of in runs.values())
    say("first half predicts second", [float(a.mean() / b.mean() - 1) for a, b in halves])


def _say_held(name: str, before: int, held: int, count: int, parts: FloatArray) -> None:
    sys.stdout.write(
        f"{name:32} recorded {before:3d}, left out {held:3d} of {count}  {np.round(parts, 3)}\n"
    )


def _verdicts(folder: Path, own: str, kind: str) -> Iterator[Path]:
    """Of every campaign, the record's first."""
    for name in (own, "others"):
        yield from sorted((folder / name).glob(f"{kind}*.json"))


def _curves(folder: Path) -> None:
    """Drawn models by curves: by how much intervals, of older code, are too wide or too narrow.

    The mean half-width of each campaign, in log, and the share of theirs within which 90 % of all others lie.
    """
    campaigns = []
    for path in _verdicts(folder, "models", "models-curves"):
        rows = ModelsValidationDocument.read(path).models
        reaches = [_reach(row.predicted_s, row.measured_s) for row in rows]
        half = float(np.mean([_log_half(row.predicted_s) for row in rows]))
        campaigns.append((path.stem, np.array(reaches), half, sum(row.is_covered for row in rows)))
    for left, (name, own, half, before) in enumerate(campaigns):
        others = np.concatenate([r for at, (_, r, *_) in enumerate(campaigns) if at != left])
        scale = float(np.quantile(others, 0.9))
        _say_held(name, before, int((own < scale).sum()), len(own), np.array([half, scale]))


def _reach(predicted: Interval, measured: float) -> float:
    """How far a run lies from the nominal, over how far the interval reaches on its side; in log."""
    end = predicted.p95 if measured > predicted.nominal else predicted.p5
    return math.log(measured / predicted.nominal) / math.log(end / predicted.nominal)


def _in_place(folder: Path) -> None:
    """Steps trained in place, by an estimator like theirs: the scatter of the judged loops in place of the trainings'.

    Variance = a scatter^2 + c, heavy tailed. Predictions have 1.43 run_log_error^2 + 0.05^2 and know no loop.
    """
    campaigns = []
    for path in _verdicts(folder, "models", "models-measured"):
        rows = ModelsValidationDocument.read(path).models
        squares = [row.measured_relative_error**2 * row.num_repetitions for row in rows]
        errors = np.log1p([row.signed_error for row in rows])
        held = sum(row.is_covered for row in rows)
        campaigns.append((path.stem, errors, float(np.mean(squares)), held))

    def spread(logs: FloatArray, square: float) -> float:
        return math.sqrt(math.exp(logs[0]) * square + math.exp(logs[1]))

    for left, (name, missed, square, before) in enumerate(campaigns):
        others = [(e, s) for at, (_, e, s, _) in enumerate(campaigns) if at != left]

        def misfit(logs: FloatArray, seen: Sequence[tuple[FloatArray, float]] = others) -> float:
            return -sum(float(t.logpdf(e, 4, scale=spread(logs, s)).sum()) for e, s in seen)

        logs = minimize(misfit, (-1.0, -6.0), method="Nelder-Mead").x
        sizes = np.concatenate([np.abs(e) / spread(logs, s) for e, s in others])
        reach = float(np.quantile(sizes, 0.9)) * spread(logs, square)
        _say_held(name, before, int((np.abs(missed) < reach).sum()), len(missed), np.exp(logs))


def _steps(folder: Path) -> None:
    """Reference steps and their speed-ups: variance = (k + s) c^2 + own, of which s c^2 by the number of ranks.

    ``c``: What the campaign's predictions, of older code, had in common, since it cancels in a speed-up:
    2 c^2 = alone^2 + together^2 - speed-up^2. Two campaigns of a law without noise take the median of the others.
    """
    campaigns = []
    for path in _verdicts(folder, "validation", "validation"):
        verdict = ValidationDocument.read(path)
        steps = {row.setting: row for row in verdict.settings}
        pairs = [
            (steps[validate.baseline_of(row.setting)], row)
            for row in verdict.settings
            if row.setting.world_size > 1 and validate.baseline_of(row.setting) in steps
        ]
        ratios = [_log_half(row.predicted) for row in verdict.speedups]
        common = float(
            np.median(
                [
                    (_log_half(a.predicted_s) ** 2 + _log_half(b.predicted_s) ** 2 - r**2) / 2
                    for (a, b), r in zip(pairs, ratios, strict=True)
                ]
            )
        )
        campaigns.append((path.stem, verdict, common / _NINETY**2))
    usual = float(np.median([c for _, _, c in campaigns if c > _WITH_NOISE]))
    known = [(name, verdict, c if c > _WITH_NOISE else usual) for name, verdict, c in campaigns]

    def density(logs: FloatArray, verdict: ValidationDocument, common: float) -> float:
        k, s, own = np.exp(logs)
        ranks = np.array([row.setting.world_size for row in verdict.settings])
        alike = ranks[:, np.newaxis] == ranks
        covariance = own * np.eye(len(ranks)) + common * (k + s * alike)
        errors = np.log1p([row.signed_error for row in verdict.settings])
        return float(multivariate_normal.logpdf(errors, np.zeros(len(ranks)), covariance))

    for left, (name, verdict, common) in enumerate(known):
        others = [each for at, each in enumerate(known) if at != left]

        def misfit(logs: FloatArray, seen: Sequence[Any] = others) -> float:
            return -sum(density(logs, of, c) for _, of, c in seen)

        k, s, own = parts = np.exp(minimize(misfit, (-1.0, -2.0, -6.0), method="Nelder-Mead").x)
        for rows, square, words in (
            (verdict.settings, own + (k + s) * common, name),
            (
                verdict.speedups,
                2 * (own + s * common),
                f"  speed-ups, noise {verdict.speedup_noise:.1%}",
            ),
        ):
            errors = np.log1p([row.signed_error for row in rows])
            before = sum(
                row.is_covered
                if isinstance(row, ComparedSetting)
                else row.predicted.holds(row.measured)
                for row in rows
            )
            held = int((np.abs(errors) < _NINETY * math.sqrt(square)).sum())
            _say_held(words, before, held, len(rows), parts)


#: Normal deviate of a 90 % interval; and the least common variance of a law that knew of occasions.
_NINETY: Final = 1.645
_WITH_NOISE: Final = 0.05**2


def _log_half(interval: Interval) -> float:
    return math.log(interval.p95 / interval.p5) / 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.benchmarks.rejudge")
    parser.add_argument("record", type=Path)
    parser.add_argument("--without", choices=["all", *PARTS])
    asked = parser.parse_args()
    if asked.record.suffix == ".xz":
        _halves(asked.record)
    elif asked.record.name == "others":
        _in_place(asked.record.parent)
        _curves(asked.record.parent)
        _steps(asked.record.parent)
    elif asked.without is None:
        (_network if asked.record.name == "network" else _validation)(asked.record)
    else:
        for each in PARTS if asked.without == "all" else [asked.without]:
            _ablation(asked.record, each)

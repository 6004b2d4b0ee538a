"""How steady the machine was during a recorded campaign: of the testbed, or of models that were never run.

``python -m tests.benchmarks.restless docs/records/testbed/third``
``python -m tests.benchmarks.restless docs/records/operators/sixth``
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.replays import steps_over_replays
from calibrate.task import replay_name
from calibrate.visits import Values, trimmed_mean
from perfmodel.documents.observation import (
    RankSteps,
    ReplayObservation,
    StepObservation,
    read_observations,
)
from perfmodel.documents.testbed import JudgedStep, TestbedDocument, TrainingRun
from tests.benchmarks.rejudge import recorded_runs
from tests.benchmarks.rejudge_models import unpacked
from validate.testbed.resources import HOST

#: A run of the testbed that lost more of its cores is measured again.
_LOST: Final = 0.02
#: Share of the cores that a busy machine gives to the testbed.
_BUSY: Final = 0.95
_QUANTILES: Final = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def main() -> None:
    """Print what other guests took, or how fast the processor was from visit to visit."""
    folder = Path(sys.argv[1])
    verdict = folder / "testbed.json"
    if verdict.exists():
        _say_testbed(TestbedDocument.read(verdict).settings, _runs(folder))
        return
    with tempfile.TemporaryDirectory() as name:
        observations = read_observations(unpacked(folder, Path(name) / "runs.jsonl"))
    steps = [e for e in observations if isinstance(e, StepObservation) and len(e.ranks) == 1]
    replays = {e.task: e for e in observations if isinstance(e, ReplayObservation)}
    _say_visits(steps)
    _say_turns([(e, replays[replay_name(e.task)]) for e in steps if replay_name(e.task) in replays])


def _runs(folder: Path) -> Mapping[str, TrainingRun]:
    runs = recorded_runs(folder / "runs.jsonl.gz")
    return {run.setting.name: run for run in runs if isinstance(run, TrainingRun)}


def _say_testbed(judged: Sequence[JudgedStep], runs: Mapping[str, TrainingRun]) -> None:
    lost = {
        name: run.host.stolen_cpu_s / (run.host.window_s * run.host.num_cores)
        for name, run in runs.items()
    }
    disturbed = sorted(share for share in lost.values() if share > _LOST)
    _say(
        f"{len(disturbed)} of {len(lost)} runs lost more than {_LOST:.0%} of the cores"
        + (f": {disturbed[0]:.1%} to {disturbed[-1]:.1%}" if disturbed else "")
    )
    for step in judged:
        if not step.limit == step.foretold.limit == HOST:
            continue
        host = runs[step.name].host
        cores_s = _BUSY * host.window_s * host.num_cores
        charged = step.uses[HOST] * step.measured_s
        foretold = step.foretold.uses[HOST] * step.foretold.step_s.p50
        _say(
            f"{step.name}: error {step.signed_error:+.1%}, a step charged the cores "
            f"{charged / foretold:.2f} times what was foretold; CPU time over {_BUSY} of the cores, "
            f"own {host.own_cpu_s / cores_s - 1:+.1%}, with that of other processes "
            f"{(host.own_cpu_s + host.foreign_cpu_s) / cores_s - 1:+.1%}"
        )


def _say_visits(steps: Sequence[StepObservation]) -> None:
    probes_s = np.concatenate([entry.ranks[0].speed_probe_s for entry in steps])
    _say(
        "speed probe [ms]: "
        + ", ".join(f"{1e3 * np.quantile(probes_s, q):.3f} ({q:.0%})" for q in _QUANTILES)
    )
    for name, typical in (("medians", _median), ("trimmed means", trimmed_mean)):
        raw, left = _scatter(steps, typical)
        _say(
            f"{name} of a visit: {raw:.1%} from visit to visit, {left:.1%} at one speed of the probe"
        )


def _median(values: Values) -> float:
    return float(np.median(values))


def _scatter(
    steps: Sequence[StepObservation], typical: Callable[[Values], float]
) -> tuple[float, float]:
    """Standard deviation, in log, of visits to one setting: as measured, and as the probe explains it."""
    groups: dict[object, list[RankSteps]] = {}
    for entry in steps:
        groups.setdefault(entry.setting, []).append(entry.ranks[0])
    columns = []
    for group in groups.values():
        logs = np.log([(typical(e.speed_probe_s), typical(e.step_s)) for e in group])
        columns.append(logs - logs.mean(axis=0))
    probe, step = np.concatenate(columns).T
    left = step - (probe @ step / (probe @ probe)) * probe
    freedom = len(steps) - len(groups)
    return float(np.sqrt(step @ step / freedom)), float(np.sqrt(left @ left / freedom))


def _say_turns(pairs: Sequence[tuple[StepObservation, ReplayObservation]]) -> None:
    groups: dict[str, list[tuple[RankSteps, ReplayObservation]]] = {}
    for entry, replay in pairs:
        groups.setdefault(entry.setting.label, []).append((entry.ranks[0], replay))
    for label, found in sorted(groups.items()):
        apart = [
            _median(steps.step_s)
            / _median(np.sum([r.forward_s, r.backward_s, r.optimizer_s], axis=0))
            for steps, r in found
        ]
        together = steps_over_replays(found)
        _say(
            f"{label}: steps over replays, medians of visits "
            + ", ".join(f"{ratio:.2f}" for ratio in apart)
            + f"; pass by pass {together.value_s:.3f} (scatter {together.relative_error:.1%})"
        )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()

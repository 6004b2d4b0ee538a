"""Judge recorded runs of strategies with the model of today, and without its parts: no proof.

``python -m tests.benchmarks.rejudge_strategies docs/records/strategies/first``
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from perfmodel.documents.testbed import StrategyRun, StrategySetting
from perfmodel.layout.layout import parse_layout
from perfmodel.step.compile import compile_layout
from perfmodel.step.program import StepProgram
from tests.benchmarks.rejudge import recorded_runs
from validate.strategies.calibration import calibrate
from validate.strategies.plan import FAMILIES
from validate.strategies.predict import HostWork, StrategyCalibration, StrategyPrices, compiled


def main() -> None:
    """Print bias, MAPE and worst error of every strategy for the model and for less of it."""
    folder = Path(sys.argv[1])
    found = calibrate(recorded_runs(folder / "calibration.jsonl.gz"), seed=1)
    runs = [run for run in recorded_runs(folder / "runs.jsonl.gz") if isinstance(run, StrategyRun)]
    bare = dataclasses.replace(found, hosts=dict.fromkeys(FAMILIES, HostWork()))
    _say("as it is", runs, found, compiled)
    _say("no host work", runs, bare, compiled)
    _say("streams, ZeRO as DDP with broadcasts", runs, found, _on_streams_but_zero)
    _say("streams, ZeRO as reduce-scatter and gather", runs, found, _on_streams)


def _on_streams(setting: StrategySetting) -> StepProgram:
    return compile_layout(parse_layout(setting.layout), layers=setting.model.num_layers)


def _on_streams_but_zero(setting: StrategySetting) -> StepProgram:
    return compiled(setting) if setting.family == "zero" else _on_streams(setting)


def _say(
    name: str,
    runs: list[StrategyRun],
    calibration: StrategyCalibration,
    program: Callable[[StrategySetting], StepProgram],
) -> None:
    sys.stdout.write(f"{name}\n")
    errors = np.array([_error(run, calibration, program(run.setting)) for run in runs])
    for family in (*FAMILIES, "all"):
        own = errors[[family in (run.setting.family, "all") for run in runs]]
        sys.stdout.write(
            f"  {family:10} {len(own):3d} settings  bias {own.mean():+.1%}  "
            f"MAPE {np.abs(own).mean():.1%}  worst {np.abs(own).max():.1%}\n"
        )


def _error(run: StrategyRun, calibration: StrategyCalibration, program: StepProgram) -> float:
    prices = StrategyPrices(
        setting=run.setting,
        layout=parse_layout(run.setting.layout),
        calibration=calibration,
        program=program,
    )
    return prices.step_s() / float(np.median(run.step_s)) - 1


if __name__ == "__main__":
    main()

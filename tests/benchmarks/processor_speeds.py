"""How fast the processor was while a campaign of unseen models ran, and what that made of its repetitions.

``python -m tests.benchmarks.processor_speeds docs/records/operators/sixth``
"""

import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.fit.steps import Values, exponent_within, trimmed_mean
from calibrate.replays import Pair, replayed_s, steps_over_replays
from calibrate.task import replay_name
from perfmodel.documents.observation import (
    RankSteps,
    ReplayObservation,
    StepObservation,
    read_observations,
)
from perfmodel.layout.setting import Setting
from tests.benchmarks.rejudge_models import unpacked

_QUANTILES: Final = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def main() -> None:
    """Print the speed probe, the scatter of repetitions by two statistics, and steps over their replays."""
    with tempfile.TemporaryDirectory() as name:
        observations = read_observations(unpacked(Path(sys.argv[1]), Path(name) / "runs.jsonl"))
    replays = {e.task: e for e in observations if isinstance(e, ReplayObservation)}
    repetitions: dict[Setting, list[RankSteps]] = defaultdict(list)
    pairs: dict[Setting, list[Pair]] = defaultdict(list)
    for entry in observations:
        if isinstance(entry, StepObservation) and len(entry.ranks) == 1:
            (rank,) = entry.ranks
            repetitions[entry.setting].append(rank)
            if beside := replays.get(replay_name(entry.task)):
                pairs[entry.setting].append((rank, beside))
    groups = [*repetitions.values()]
    probes_s = np.concatenate([rank.speed_probe_s for group in groups for rank in group])
    quantiles = ", ".join(f"{1e3 * np.quantile(probes_s, q):.3f} ({q:.0%})" for q in _QUANTILES)
    _say(f"speed probe [ms]: {quantiles}")
    _say_scatter("medians", groups, lambda values: float(np.median(values)))
    _say_scatter("trimmed means", groups, trimmed_mean)
    for setting, found in sorted(pairs.items(), key=lambda item: item[0].label):
        _say(_turns(setting, found))


def _say_scatter(
    name: str, groups: Sequence[Sequence[RankSteps]], typical: Callable[[Values], float]
) -> None:
    typical_s = [
        ([typical(rank.speed_probe_s) for rank in group], [typical(rank.step_s) for rank in group])
        for group in groups
    ]
    exponent = exponent_within(typical_s, otherwise=0.0)
    raw, at_speed = (scatter(typical_s, exponent=by) for by in (0.0, exponent))
    _say(
        f"{name}: {raw:.1%} from repetition to repetition, {at_speed:.1%} at one speed ({exponent:.2f})"
    )


def scatter(groups: Sequence[tuple[Values, Values]], *, exponent: float) -> float:
    """Standard deviation within groups of the log of times, which follow their probes by an exponent."""
    left = [np.log(times_s) - exponent * np.log(probes_s) for probes_s, times_s in groups]
    squares = sum(float(np.square(logs - logs.mean()).sum()) for logs in left)
    return math.sqrt(squares / sum(len(logs) - 1 for logs in left))


def _turns(setting: Setting, pairs: Sequence[Pair]) -> str:
    apart = [trimmed_mean(steps.step_s) / replayed_s([replay]) for steps, replay in pairs]
    together = steps_over_replays(pairs)
    return (
        f"{setting.label}: steps over replays, repetition by repetition "
        + ", ".join(f"{ratio:.2f}" for ratio in apart)
        + f"; pass by pass {together.value_s:.3f} (known to {together.relative_error:.1%})"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()

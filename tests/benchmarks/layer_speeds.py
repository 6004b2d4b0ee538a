"""How far speed probes explain why the same layers take longer at another time.

``python -m tests.benchmarks.layer_speeds`` times 200 layers five times, in some five minutes.
"""

import sys
from collections import defaultdict
from typing import Final, NamedTuple

import numpy as np
import torch

from calibrate.layers import planned_layers
from calibrate.probes.chain import measure_layers
from calibrate.probes.optimizers import Evictor
from calibrate.probes.session import Session
from calibrate.visits import exponent_within, trimmed_mean
from perfmodel.units import Seconds

_ROUNDS: Final = 5
#: Layers of one task of a calibration.
_TASK: Final = 17
_CPU: Final = torch.device("cpu")


class _Timed(NamedTuple):
    """One operator in one round. [s]"""

    time_s: Seconds
    own_probe_s: Seconds
    """Before its layer."""
    task_probe_s: Seconds
    """Before and after its task."""
    pooled_probe_s: Seconds
    """Before all layers of its task."""


def main() -> None:
    """Print the scatter of operators from round to round: as timed, and at one speed of either probe."""
    torch.set_num_threads(1)
    session = Session(rank=0, world_size=1, device=_CPU, control={}, data={})
    evictor = Evictor(_CPU)
    layers = planned_layers(share=0.25, optimizer_share=0.0, seed=5)
    timed: dict[object, list[_Timed]] = defaultdict(list)
    for _ in range(_ROUNDS):
        for start in range(0, len(layers), _TASK):
            before_s = session.speed_probe(0.0)
            found = measure_layers(session, layers[start : start + _TASK], evictor)
            task_probe_s = trimmed_mean([before_s, session.speed_probe(0.0)])
            pooled_probe_s = trimmed_mean([p for entry in found for p in entry.speed_probe_s])
            for entry in found:
                timed[start, entry.operator, entry.phase].append(
                    _Timed(
                        time_s=trimmed_mean(entry.times_s),
                        own_probe_s=trimmed_mean(entry.speed_probe_s),
                        task_probe_s=task_probe_s,
                        pooled_probe_s=pooled_probe_s,
                    )
                )
    groups = [group for group in timed.values() if len(group) == _ROUNDS]
    sys.stdout.write(f"{len(layers)} layers, {len(groups)} operators, {_ROUNDS} rounds\n")
    _say("as timed", groups, None)
    _say("at the speed of the probes around its task", groups, "task_probe_s")
    _say("at the speed of all probes of its task", groups, "pooled_probe_s")
    _say("at the speed of the probes before its layer", groups, "own_probe_s")


def _say(name: str, groups: list[list[_Timed]], probe: str | None) -> None:
    times_s = [[entry.time_s for entry in group] for group in groups]
    exponent = 0.0
    factors = np.ones((len(groups), _ROUNDS))
    if probe is not None:
        probes_s = [[float(getattr(entry, probe)) for entry in group] for group in groups]
        exponent = exponent_within(zip(probes_s, times_s, strict=True), otherwise=0.0)
        factors = np.array(probes_s) ** -exponent
    logs = np.log(np.array(times_s) * factors)
    scatter = float(np.sqrt(logs.var(axis=1, ddof=1).mean()))
    sys.stdout.write(f"{name}: {scatter:.1%} from round to round, exponent {exponent:.2f}\n")


if __name__ == "__main__":
    main()

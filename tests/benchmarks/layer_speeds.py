"""How far speed probes explain why the same layers take longer at another time.

``python -m tests.benchmarks.layer_speeds`` times 200 layers five times, in some five minutes.
"""

import sys
from collections import defaultdict
from typing import Final, NamedTuple

import torch

from calibrate.fit.steps import exponent_within, trimmed_mean
from calibrate.layers import planned_layers
from calibrate.probes.chain import measure_layers
from calibrate.probes.optimizers import Evictor
from calibrate.probes.session import Session
from perfmodel.units import Seconds
from tests.benchmarks.processor_speeds import scatter

_ROUNDS: Final = 5
#: Layers of one task of a calibration.
_TASK: Final = 17
_CPU: Final = torch.device("cpu")
_PROBES: Final = {
    "probes around its task": "task_probe_s",
    "all probes of its task": "pooled_probe_s",
    "probes before its layer": "own_probe_s",
}


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
    """Print the scatter of operators from round to round: as timed, and at one speed by each probe."""
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
    times_s = [[entry.time_s for entry in group] for group in groups]
    for name, probe in _PROBES.items():
        probes_s = [[float(getattr(entry, probe)) for entry in group] for group in groups]
        pairs = [*zip(probes_s, times_s, strict=True)]
        exponent = exponent_within(pairs, otherwise=0.0)
        raw, at_speed = (scatter(pairs, exponent=by) for by in (0.0, exponent))
        sys.stdout.write(
            f"{name}: {raw:.1%} from round to round, {at_speed:.1%} at one speed ({exponent:.2f})\n"
        )


if __name__ == "__main__":
    main()

"""Was a calibration disturbed by other guests of the host? Pure: decided from its runs alone.

Two signs: what the hypervisor took from the cores during a run, and the same work that costs the machine
something else from moment to moment. No prediction is looked at.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import numpy as np

from perfmodel.documents.testbed import CollectiveRun, Run, TrainingRun
from perfmodel.errors import MeasurementFailed
from perfmodel.statistics.normal import MEDIAN_OVER_MEAN
from validate.testbed.cluster import STEAL_LIMIT
from validate.testbed.ring import undisturbed_s

#: With a run that lost more, even at its quietest, a calibration is refused.
_MOST_STEAL: Final = 0.1
#: Uncertainty of the machine's costs, in log, with which a calibration is refused: they decide on their own
#: where the machine is the limit.
_MOST_UNCERTAINTY: Final = 0.1


def quietest_of_each(runs: Iterable[Run]) -> list[Run]:
    """Of runs with the same name the one that lost least to other guests."""
    found: dict[str, Run] = {}
    for run in runs:
        known = found.get(run.setting.name)
        if known is None or run.host.steal_share < known.host.steal_share:
            found[run.setting.name] = run
    return list(found.values())


def disturbed(runs: Iterable[Run]) -> list[Run]:
    """Runs that lost too much to other guests, though the quietest of their name."""
    return [run for run in quietest_of_each(runs) if run.host.steal_share > STEAL_LIMIT]


def cost_uncertainty(runs: Iterable[Run]) -> float:
    """Standard error, in log, of medians over the moments at which the same work was measured.

    Settings that differ in nothing but their name are the same work; without any it is 0.
    """
    costs: dict[str, list[float]] = defaultdict(list)
    for run in quietest_of_each(runs):
        if isinstance(run, CollectiveRun | TrainingRun):
            work = run.setting.model_copy(update={"name": ""}).model_dump_json()
            for place, cost_s in enumerate(_costs_s(run)):
                costs[f"{work} {place}"].append(float(np.log(cost_s)))
    variances = [float(np.var(logs, ddof=1)) / len(logs) for logs in costs.values() if logs[1:]]
    return MEDIAN_OVER_MEAN * float(np.sqrt(np.mean(variances))) if variances else 0.0


def _costs_s(run: CollectiveRun | TrainingRun) -> tuple[float, ...]:
    """What calibration reads off a run: CPU time of steps and crowded collectives, else durations. [s]"""
    if isinstance(run, TrainingRun):
        return (run.host.own_cpu_s / len(run.step_s),)
    if run.setting.copies > 1:
        return run.cpu_s
    is_warm = run.setting.pause_s == 0
    return tuple(
        undisturbed_s(durations_s) if is_warm else float(np.median(durations_s))
        for durations_s in run.durations_s
    )


def refuse_disturbed(runs: Iterable[Run], *, where: str) -> None:
    """Refuse a calibration that no prediction should rest on."""
    quietest = quietest_of_each(runs)
    worst = max(quietest, key=lambda run: run.host.steal_share)
    if worst.host.steal_share > _MOST_STEAL:
        raise MeasurementFailed(
            f"{where}: calibration must lose at most {_MOST_STEAL:.0%} of the cores to other guests of "
            f"the host, but {worst.setting.name!r} lost {worst.host.steal_share:.0%} at its quietest; "
            "continue with --resume in a quieter hour"
        )
    uncertainty = cost_uncertainty(quietest)
    if uncertainty > _MOST_UNCERTAINTY:
        raise MeasurementFailed(
            f"{where}: the same work must cost the machine the same at every moment of the calibration "
            f"(to {_MOST_UNCERTAINTY:.0%}), but that is known to {uncertainty:.0%} only; something else uses the "
            "host: measure again in another folder, in a quieter hour"
        )

"""Use case: measure collectives of 2 to 16 ranks here, fit some, predict the others, judge.

Every finished setting is one line on disk before the next begins, so that an interrupted campaign
continues where it stopped, and a complete one can be judged again without measuring. Of a blind
campaign gates and predictions are on disk before the first collective that they judge.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from calibrate.campaign import PLAN, Progress, read_plan, write_plan
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from perfmodel.documents.testbed import CollectiveRun, CollectiveSetting, read_runs
from perfmodel.documents.verdicts import NetworkVerdict
from perfmodel.errors import UsageError, refuse_unknown
from perfmodel.units import Seconds
from validate.gates import passed
from validate.network import plan, verdict
from validate.testbed.campaign import RUNS, CampaignRequest, open_campaign, refuse_earlier_runs

VERDICT: Final = "network.json"
#: Predictions that differ by less, relatively, are of the same law.
_SAME_LAW: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest(CampaignRequest):
    """What the user asked for."""

    budget: str = "standard"
    mbit: float = plan.LINK_MBIT
    """Rate of the links of a blind campaign. [Mbit/s]"""


def validate_network(
    request: NetworkRequest, *, on_progress: Callable[[Progress], None]
) -> NetworkVerdict:
    """Measure what is missing, then judge.

    Raises
    ------
    UsageError
        If the budget is unknown, or the folder holds runs and ``resume`` is not given, or a blind
        campaign was predicted by another law than this version's.
    NotFeasible
        If something is missing and the machine does not allow network namespaces.
    Interrupted
        If the time is up; what was measured is kept.
    """
    refuse_unknown("--budget", request.budget, plan.BUDGETS)
    if request.budget != plan.BLIND and request.mbit != plan.LINK_MBIT:
        raise UsageError(
            f"--mbit: must be given with --budget blind, got --budget {request.budget}; the others "
            f"measure at {plan.LINK_MBIT:g} Mbit/s"
        )
    refuse_earlier_runs(request, RUNS)
    _refuse_another_campaign(request)
    parts = plan.settings(request.budget, seed=request.seed, mbit=request.mbit)
    settings = [setting for part in parts for setting in part]
    output = request.folder / RUNS
    finished = {run.setting.name for run in read_runs(output)}
    if not finished.issuperset(setting.name for setting in settings):
        with open_campaign(
            request,
            command="validate network",
            total=len(settings),
            on_progress=on_progress,
        ) as campaign:
            campaign.run(parts[0], output)
            for part in parts[1:]:
                _predict(request, part)
                campaign.run(part, output)
    return conclude(request)


def _runs(request: NetworkRequest) -> list[CollectiveRun]:
    return [run for run in read_runs(request.folder / RUNS) if isinstance(run, CollectiveRun)]


def _refuse_another_campaign(request: NetworkRequest) -> None:
    path = request.folder / PLAN
    if not path.exists():
        return
    earlier = read_plan(request.folder)
    for option, value in (("budget", request.budget), ("mbit", request.mbit)):
        if earlier.get(option) != value:
            raise UsageError(
                f"--{option}: must be as in {path}, got {value}; or choose another folder"
            )


def _predict(request: NetworkRequest, part: Sequence[CollectiveSetting]) -> None:
    """Write gates and predictions, unless an earlier start has."""
    if (request.folder / PLAN).exists():
        return
    content = {
        "budget": request.budget,
        "mbit": request.mbit,
        "seed": request.seed,
        "gates": verdict.LIMITS,
        "predicted": verdict.predict(verdict.points(_runs(request)), part),
    }
    write_plan(request.folder, content)


def _refuse_another_law(request: NetworkRequest) -> None:
    """A blind verdict is one on the predictions that were on disk, and not on a law written since."""
    known, judged = plan.settings(request.budget, seed=request.seed, mbit=request.mbit)
    names = {setting.name for setting in known}
    fitted = [run for run in _runs(request) if run.setting.name in names]
    then = _times_s(read_plan(request.folder).get("predicted", ()))
    today = _times_s(verdict.predict(verdict.points(fitted), judged))
    if today.keys() != then.keys() or any(
        abs(time_s / then[key] - 1) > _SAME_LAW for key, time_s in today.items()
    ):
        raise UsageError(
            f"--resume: predictions of a blind campaign must be those in {request.folder / PLAN}, but "
            "this version predicts others; judge it with the version that wrote them"
        )


def _times_s(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, int], Seconds]:
    return {(row["collective"], row["ranks"], row["size_bytes"]): row["time_s"] for row in rows}


def conclude(request: NetworkRequest) -> NetworkVerdict:
    """Judge what is on disk, and write the verdict."""
    if request.budget == plan.BLIND:
        _refuse_another_law(request)
    split_by = verdict.blind_splits if request.budget == plan.BLIND else verdict.splits
    judged = verdict.judge(verdict.points(_runs(request)), split_by)
    gates = verdict.gates(judged)
    document = NetworkVerdict(
        schema_version=NetworkVerdict.current_version,
        provenance=provenance(describe_environment(), seed=request.seed),
        series=tuple(entry.series for entry in judged),
        by_size=verdict.by_size(judged),
        gates=gates,
        passed=passed(gates),
    )
    document.write(request.folder / VERDICT)
    return document

"""Use case: measure collectives of 2 to 16 ranks here, fit some, predict the others, judge.

Every finished setting is one line on disk before the next begins, so that an interrupted campaign
continues where it stopped, and a complete one can be judged again without measuring.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from calibrate.campaign import Progress
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from perfmodel.documents.network_verdict import NetworkVerdict
from perfmodel.documents.testbed import CollectiveRun, read_runs
from perfmodel.errors import refuse_unknown
from validate.gates import passed
from validate.network import plan, verdict
from validate.testbed.campaign import (
    RUNS,
    CampaignRequest,
    open_campaign,
    refuse_earlier_runs,
)

VERDICT: Final = "network.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest(CampaignRequest):
    """What the user asked for."""

    budget: str = "standard"


def validate_network(
    request: NetworkRequest, *, on_progress: Callable[[Progress], None]
) -> NetworkVerdict:
    """Measure what is missing, then judge.

    Raises
    ------
    UsageError
        If the budget is unknown, or the folder holds runs and ``resume`` is not given.
    NotFeasible
        If something is missing and the machine does not allow network namespaces.
    Interrupted
        If the time is up; what was measured is kept.
    """
    refuse_unknown("--budget", request.budget, plan.BUDGETS)
    refuse_earlier_runs(request, RUNS)
    settings = plan.settings(request.budget, seed=request.seed)
    output = request.folder / RUNS
    finished = {run.setting.name for run in read_runs(output)}
    if not finished.issuperset(setting.name for setting in settings):
        with open_campaign(
            request,
            command="validate network",
            total=len(settings),
            on_progress=on_progress,
        ) as campaign:
            campaign.run(settings, output)
    return conclude(request)


def conclude(request: NetworkRequest) -> NetworkVerdict:
    """Judge what is on disk, and write the verdict."""
    runs = [run for run in read_runs(request.folder / RUNS) if isinstance(run, CollectiveRun)]
    judged = verdict.judge(verdict.points(runs))
    gates = verdict.gates(judged)
    document = NetworkVerdict(
        schema_version=NetworkVerdict.current_version,
        provenance=provenance(describe_environment(), seed=request.seed),
        series=tuple(entry.series for entry in judged),
        gates=gates,
        passed=passed(gates),
    )
    document.write(request.folder / VERDICT)
    return document

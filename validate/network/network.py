"""Use case: measure collectives of 2 to 16 ranks here, fit some, predict the others, judge.

Every finished setting is one line on disk before the next begins, so that an interrupted campaign
continues where it stopped, and a complete one can be judged again without measuring.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from calibrate.campaign import Progress
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from calibrate.turns import machine_to_itself
from perfmodel.documents.network_verdict import NetworkVerdict
from perfmodel.documents.testbed import CollectiveRun, read_runs
from perfmodel.errors import UsageError
from perfmodel.units import Seconds
from validate.gates import passed
from validate.network import plan, verdict
from validate.testbed.campaign import Campaign
from validate.testbed.client import refuse_without_rights, running_server

RUNS: Final = "runs.jsonl"
VERDICT: Final = "network.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """What the user asked for."""

    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False
    limit_s: Seconds | None = None
    """Stop, to be continued, when this much time has passed. [s]"""


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
    _check(request)
    settings = plan.settings(request.budget, seed=request.seed)
    output = request.folder / RUNS
    finished = {run.setting.name for run in read_runs(output)}
    if not finished.issuperset(setting.name for setting in settings):
        refuse_without_rights()
        with (
            machine_to_itself(
                lambda words: on_progress(Progress(done=0, total=len(settings), task=words))
            ),
            running_server() as cluster,
        ):
            Campaign(
                command="validate network",
                cluster=cluster,
                deadline_s=time.monotonic() + (request.limit_s or float("inf")),
                total=len(settings),
                on_progress=on_progress,
            ).run(settings, output)
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


def _check(request: NetworkRequest) -> None:
    if request.budget not in plan.BUDGETS:
        raise UsageError(
            f"--budget: must be one of {', '.join(plan.BUDGETS)}, got {request.budget!r}"
        )
    if not request.resume and (request.folder / RUNS).exists():
        raise UsageError(
            f"--out: must hold no runs yet, got {request.folder / RUNS}; "
            "continue with --resume, or choose another folder"
        )

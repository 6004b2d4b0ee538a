"""Commands that accept a machine: clauses for a contract, and the judgement of a delivery."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perfmodel.cli import options as opt
from perfmodel.cli import show_answer, working
from perfmodel.errors import OutOfTolerance

if TYPE_CHECKING:
    from perfmodel.documents.observation import Observation
    from perfmodel.documents.profile import ProfileDocument

DEFAULT_CLAUSES: Final = Path("clauses.toml")

_REFERENCE = opt.machine("Profile of the reference machine, or a name of perfmodel machines.")
_STEPS = typer.Option(
    "--workload",
    help="Calibrated workload whose step is a clause; repeatable. Default: all. With --layout: what is "
    "trained, as perfmodel diagnose takes it.",
)
_CONFIDENCE = typer.Option(help="With which a machine as good passes all clauses.")
_OBSERVED = typer.Option(
    help="A run of the job: '64 GPUs 8 nodes 0.48 s'; repeatable, three are meant. To write: on a part of such "
    "a machine."
)
_LOGS = typer.Option(
    "--log", help="nccl-tests log; repeatable. To write: of a part of such a machine."
)
_RUNS = typer.Option("--run", help="Folder of pm.write_run, with every rank; repeatable.")
_PARTS = typer.Option(
    "--part",
    help="The job on one of equal parts: 'node 3, 8 GPUs: 0.52 s'; repeatable. Finds the slow one.",
)
_GOODPUT = typer.Option(help="From perfmodel goodput --json: adds a clause on useful time.")


def acceptance_write(
    context: typer.Context,
    *,
    profile: Annotated[Path, _REFERENCE],
    workload: Annotated[list[str] | None, _STEPS] = None,
    layout: opt.LayoutText = None,
    cluster: opt.ClusterFile = None,
    nodes_like: opt.NodesLike = None,
    observed: Annotated[list[str] | None, _OBSERVED] = None,
    log: Annotated[list[Path] | None, _LOGS] = None,
    confidence: Annotated[float, _CONFIDENCE] = 0.95,
    goodput: Annotated[Path | None, _GOODPUT] = None,
    output: Annotated[Path, typer.Option(help="File of clauses to write (TOML).")] = (
        DEFAULT_CLAUSES
    ),
    as_json: opt.Json = False,
) -> None:
    """Write clauses for a contract: what a machine like the reference does, or what a job takes on a new one."""
    if layout is None:
        only = dict.fromkeys(("cluster", "nodes_like", "observed", "log"), "give --layout")
        opt.refuse_typed(context, only, beside="clauses of a calibration")
    from perfmodel.api import acceptance_terms, with_nodes_of
    from perfmodel.documents.budget import GoodputDocument
    from perfmodel.files import write_atomically

    machine = profile if nodes_like is None else with_nodes_of(profile, nodes_like)
    with working("acceptance"):
        terms = acceptance_terms(
            machine,
            workload,
            layout=layout,
            cluster=cluster,
            observed=observed or (),
            logs=log or (),
            confidence=confidence,
            goodput=None if goodput is None else GoodputDocument.read(goodput),
        )
    write_atomically(output, terms.toml())
    show_answer(terms, as_json=as_json, written={"written": output})


def acceptance_judge(
    clauses: Annotated[Path, typer.Argument(help="Clauses, from perfmodel acceptance write.")],
    *,
    profile: Annotated[Path | None, typer.Option(help="Profile of the delivered machine.")] = None,
    observed: Annotated[list[str] | None, _OBSERVED] = None,
    run: Annotated[list[Path] | None, _RUNS] = None,
    part: Annotated[list[str] | None, _PARTS] = None,
    log: Annotated[list[Path] | None, _LOGS] = None,
    goodput: Annotated[Path | None, _GOODPUT] = None,
    as_json: opt.Json = False,
) -> None:
    """Judge a delivered machine by the clauses of a contract."""
    from perfmodel.api import judge
    from perfmodel.documents.acceptance import AcceptanceTerms, Verdict
    from perfmodel.documents.budget import GoodputDocument
    from perfmodel.documents.profile import ProfileDocument

    terms = AcceptanceTerms.read(clauses)
    delivered = None if profile is None else ProfileDocument.read(profile)
    document = judge(
        terms,
        None if delivered is None else delivered.machine,
        observations=_observations_of(delivered, profile),
        observed=observed or (),
        runs=run or (),
        parts=part or (),
        logs=log or (),
        goodput=None if goodput is None else GoodputDocument.read(goodput),
    )
    show_answer(document, as_json=as_json)
    broken = [
        f"{verdict}: {'; '.join(names)}"
        for verdict in (Verdict.FAILED, Verdict.NOT_MEASURED)
        if (names := document.having(verdict))
    ]
    if broken:
        raise OutOfTolerance(f"acceptance: {'; '.join(broken)}")


def _observations_of(
    delivered: "ProfileDocument | None", profile: Path | None
) -> "list[Observation]":
    """Raw times beside a profile, which name a slow rank; others than it was fitted from are refused."""
    if delivered is None or profile is None:
        return []
    source = profile.with_name("observations.jsonl")
    if not source.is_file():
        return []
    from perfmodel.documents import file_sha256
    from perfmodel.documents.observation import read_observations
    from perfmodel.errors import InvalidDocument

    found = read_observations(source)
    if file_sha256(source) != delivered.observations_sha256:
        raise InvalidDocument(
            f"{source}: must be what the profile was fitted from, got edited or other observations; "
            "judge with those of the same calibration, or fit it again"
        )
    return found

"""Commands that compare machines: diff, and clauses of an acceptance."""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from perfmodel.cli import options as opt
from perfmodel.cli.output import show, show_document, show_lines
from perfmodel.errors import OutOfTolerance

DEFAULT_CLAUSES: Final = Path("clauses.toml")

_STEPS = typer.Option(
    "--workload", help="Calibrated workload whose step is a clause; repeatable. Default: all."
)
_CONFIDENCE = typer.Option(help="With which a machine as good passes each clause.")
_OBSERVATIONS = typer.Option(
    help="Raw times of the delivered machine, which name a slow rank; default: beside the profile."
)
_GOODPUT = typer.Option(help="From perfmodel goodput --json: adds a clause on useful time.")


def diff(
    old: Annotated[Path, typer.Argument(help="Profile before, such as with the old driver.")],
    new: Annotated[Path, typer.Argument(help="Profile after.")],
    *,
    as_json: opt.Json = False,
) -> None:
    """Compare two profiles: what changed beyond noise, and which predictions move."""
    from perfmodel.api import compare_profiles, read_profile
    from perfmodel.report.profile import diff_lines, differences_table, moved_table

    document = compare_profiles(read_profile(old), read_profile(new), argv=sys.argv)
    tables = (differences_table(document), moved_table(document))
    show_document(document, tables, diff_lines(document), as_json=as_json)


def acceptance_write(
    *,
    profile: Annotated[Path, typer.Option(help="Profile of the reference machine.")],
    workload: Annotated[list[str] | None, _STEPS] = None,
    confidence: Annotated[float, _CONFIDENCE] = 0.95,
    goodput: Annotated[Path | None, _GOODPUT] = None,
    output: Annotated[Path, typer.Option(help="File of clauses to write (TOML).")] = (
        DEFAULT_CLAUSES
    ),
) -> None:
    """Write clauses for a contract: what a machine like the one of the profile does."""
    from perfmodel.api import acceptance_terms, read_profile
    from perfmodel.documents.base import write_atomically
    from perfmodel.documents.goodput import GoodputDocument
    from perfmodel.report.batch import terms_lines, terms_table

    terms = acceptance_terms(
        read_profile(profile),
        workload,
        confidence=confidence,
        goodput=None if goodput is None else GoodputDocument.read(goodput),
    )
    write_atomically(output, terms.toml())
    show(terms_table(terms))
    show_lines([*terms_lines(terms), f"written: {output}"])


def acceptance_judge(
    clauses: Annotated[Path, typer.Argument(help="Clauses, from perfmodel acceptance write.")],
    *,
    profile: Annotated[Path, typer.Option(help="Profile of the delivered machine.")],
    observations: Annotated[Path | None, _OBSERVATIONS] = None,
    goodput: Annotated[Path | None, _GOODPUT] = None,
    as_json: opt.Json = False,
) -> None:
    """Judge a delivered machine by the clauses of a contract."""
    from perfmodel.api import judge, read_profile
    from perfmodel.documents.acceptance import AcceptanceTerms, Verdict
    from perfmodel.documents.goodput import GoodputDocument
    from perfmodel.documents.observation import read_observations
    from perfmodel.report.batch import judgement_lines, judgement_table

    beside = profile.with_name("observations.jsonl")
    source = observations or (beside if beside.is_file() else None)
    document = judge(
        AcceptanceTerms.read(clauses),
        read_profile(profile),
        observations=() if source is None else read_observations(source),
        goodput=None if goodput is None else GoodputDocument.read(goodput),
        argv=sys.argv,
    )
    show_document(document, judgement_table(document), judgement_lines(document), as_json=as_json)
    broken = [
        f"{verdict}: {'; '.join(names)}"
        for verdict in (Verdict.FAILED, Verdict.NOT_MEASURED)
        if (names := document.having(verdict))
    ]
    if broken:
        raise OutOfTolerance(f"acceptance: {'; '.join(broken)}")

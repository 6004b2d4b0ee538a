"""perfmodel diff and perfmodel acceptance: what a machine was, should be, and is."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.terminal import show, show_document, show_lines
from perfmodel.errors import OutOfTolerance

DEFAULT_CLAUSES = Path("clauses.toml")

_OLD = typer.Argument(help="Profile before, such as with the old driver.")
_NEW = typer.Argument(help="Profile after.")
_CLAUSES = typer.Argument(help="Clauses in TOML, from perfmodel acceptance write.")
_STEPS = typer.Option(
    "--workload", help="Calibrated workload whose step is a clause; repeatable. Default: all."
)
_OBSERVATIONS = typer.Option(
    help="Raw times of the delivered machine, which name a slow rank; default: beside the profile."
)
_GOODPUT = typer.Option(
    help="From perfmodel goodput --json for the job that is meant: adds a clause on its useful time."
)
_DELIVERED_GOODPUT = typer.Option(
    help="From perfmodel goodput --json with the stops that the delivered machine showed (--mtbf-stops)."
)


def diff(
    old: Annotated[Path, _OLD],
    new: Annotated[Path, _NEW],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Compare two profiles: what changed beyond noise, and which predictions move."""
    from perfmodel.api import compare_profiles, read_profile  # noqa: PLC0415 - keeps --help fast
    from perfmodel.report.profile_diff import (  # noqa: PLC0415
        diff_lines,
        difference_grid,
        moved_grid,
    )
    from perfmodel.report.tables import rich_table  # noqa: PLC0415

    document = compare_profiles(read_profile(old), read_profile(new), argv=sys.argv)
    if not as_json:
        show(rich_table(difference_grid(document)))
    table = rich_table(moved_grid(document))
    show_document(document, table, diff_lines(document), as_json=as_json)


def acceptance_write(
    *,
    profile: Annotated[Path, typer.Option(help="Profile of the reference machine.")],
    workload: Annotated[list[str] | None, _STEPS] = None,
    confidence: Annotated[
        float, typer.Option(help="With which a machine as good passes each clause.")
    ] = 0.95,
    goodput: Annotated[Path | None, _GOODPUT] = None,
    out: Annotated[Path, typer.Option(help="Where to write the clauses.")] = DEFAULT_CLAUSES,
) -> None:
    """Write clauses for a contract: what a machine like the one of the profile does."""
    from perfmodel.api import acceptance_terms, read_profile  # noqa: PLC0415 - keeps --help fast
    from perfmodel.documents.base import write_atomically  # noqa: PLC0415
    from perfmodel.documents.goodput import GoodputDocument  # noqa: PLC0415
    from perfmodel.report.acceptance import terms_grid, terms_lines  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415

    terms = acceptance_terms(
        read_profile(profile),
        workload,
        confidence=confidence,
        goodput=None if goodput is None else GoodputDocument.read(goodput),
    )
    write_atomically(out, terms.toml())
    show(rich_table(terms_grid(terms)))
    show_lines(terms_lines(terms))
    typer.echo(f"written: {out}")


def acceptance_judge(
    clauses: Annotated[Path, _CLAUSES],
    *,
    profile: Annotated[Path, typer.Option(help="Profile of the delivered machine.")],
    observations: Annotated[Path | None, _OBSERVATIONS] = None,
    goodput: Annotated[Path | None, _DELIVERED_GOODPUT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Judge a delivered machine by the clauses of a contract."""
    from perfmodel.api import judge, read_profile  # noqa: PLC0415 - keeps --help fast
    from perfmodel.documents.acceptance import AcceptanceTerms, Verdict  # noqa: PLC0415
    from perfmodel.documents.goodput import GoodputDocument  # noqa: PLC0415
    from perfmodel.documents.observation import read_observations  # noqa: PLC0415
    from perfmodel.report.acceptance import judgement_grid, judgement_lines  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415

    beside = profile.with_name("observations.jsonl")
    source = observations or (beside if beside.is_file() else None)
    document = judge(
        AcceptanceTerms.read_toml(clauses),
        read_profile(profile),
        observations=() if source is None else read_observations(source),
        goodput=None if goodput is None else GoodputDocument.read(goodput),
        argv=sys.argv,
    )
    table = rich_table(judgement_grid(document))
    show_document(document, table, judgement_lines(document), as_json=as_json)
    broken = [
        f"{verdict}: {'; '.join(names)}"
        for verdict in (Verdict.FAILED, Verdict.NOT_MEASURED)
        if (names := document.having(verdict))
    ]
    if broken:
        raise OutOfTolerance(f"acceptance: {'; '.join(broken)}")

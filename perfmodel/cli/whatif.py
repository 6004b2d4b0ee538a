"""perfmodel whatif: some fields changed, side by side."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import at_least_one, one_of
from perfmodel.cli.predict import CLUSTER, SCALINGS
from perfmodel.cli.sources import Sources
from perfmodel.cli.terminal import show_document, show_lines

_SET = typer.Option(
    "--set",
    help="FIELD=VALUE, such as network.bandwidth=400Gb/s or devices=64. Several make one scenario; "
    "FIELD=A,B makes one for each value.",
)
_AGAINST = typer.Option(
    help="Scenarios saved with --output, of this or another machine; repeatable."
)


def whatif(  # noqa: PLR0913 - one parameter per flag
    *,
    settings: Annotated[list[str] | None, _SET] = None,
    profile: Annotated[Path, typer.Option(help="Profile of the machine.")] = DEFAULT_PROFILE,
    workload: Annotated[
        str, typer.Option(help="Calibrated workload by name, or a workload file (JSON).")
    ] = "resnet18",
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 8,
    scaling: Annotated[str, typer.Option(help="weak or strong.")] = "weak",
    batch: Annotated[
        int | None, typer.Option(help="As for predict; default: the middle calibrated one.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(help="A validation, whose errors widen the intervals.")
    ] = None,
    cluster: Annotated[Path | None, CLUSTER] = None,
    against: Annotated[list[Path] | None, _AGAINST] = None,
    output: Annotated[Path | None, typer.Option(help="Write the scenarios.")] = None,
    fields: Annotated[bool, typer.Option("--fields", help="List what can be set.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Change fields of the machine, the workload or the strategy: before, after, and why."""
    from perfmodel.cli.files import read_inputs  # noqa: PLC0415 - keeps --help fast
    from perfmodel.documents.whatif import WhatIfDocument  # noqa: PLC0415
    from perfmodel.forecast import Forecast  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415
    from perfmodel.report.whatif import fields_lines, whatif_grid, whatif_lines  # noqa: PLC0415
    from perfmodel.scenarios import (  # noqa: PLC0415
        FIELDS,
        Scenario,
        compare_scenarios,
        scenarios_of,
        with_saved,
    )

    if fields:
        show_lines(fields_lines([(f.name, f.example, f.meaning) for f in FIELDS]))
        return
    sources = Sources(profile=profile, workload=workload, validation=validation, cluster=cluster)
    inputs = read_inputs(sources)
    request = Forecast(
        world_sizes=(at_least_one("--devices", devices),),
        scaling=one_of("--scaling", scaling, SCALINGS),
        batch=batch,
    )
    base = Scenario(
        profile=inputs.predictor.profile,
        workload=inputs.workload,
        request=request,
        machine_digest=inputs.predictor.profile.digest,
        validation=inputs.predictor.validation,
        document=inputs.document,
        cluster=inputs.predictor.cluster,
    )
    document = compare_scenarios(scenarios_of(base, settings or ()), argv=sys.argv)
    if output is not None:
        document.write(output)
    saved = [(path.stem, WhatIfDocument.read(path)) for path in against or ()]
    shown = with_saved(document, saved) if saved else document
    show_document(shown, rich_table(whatif_grid(shown)), whatif_lines(shown), as_json=as_json)

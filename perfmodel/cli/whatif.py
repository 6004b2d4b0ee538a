"""perfmodel whatif: some fields changed, side by side."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from perfmodel.cli.files import Sources
from perfmodel.cli.layouts import (
    LAYOUT,
    MEMORY,
    MODEL,
    PER_NODE,
    SEQUENCE,
    LargeFlags,
    whatif_layouts,
)
from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import at_least_one, one_of, refuse_typed
from perfmodel.cli.output import show_document, show_lines
from perfmodel.cli.predict import CLUSTER, SCALINGS

_SET = typer.Option(
    "--set",
    help="FIELD=VALUE, such as network.bandwidth=400Gb/s or devices=64. Several make one scenario; "
    "FIELD=A,B makes one for each value. With --layout: its keys, such as tp=4,8, and model.",
)
_AGAINST = typer.Option(
    help="Scenarios saved with --output, of this or another machine; repeatable."
)
#: Parameters that layouts do not have.
_ONLY_WITHOUT_LAYOUT: Final = dict.fromkeys(
    ("workload", "devices", "scaling", "validation", "cluster", "against"), "leave it out"
)


def whatif(  # noqa: PLR0913 - one parameter per flag
    *,
    context: typer.Context,
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
    layout: Annotated[str | None, LAYOUT] = None,
    model: Annotated[str | None, MODEL] = None,
    sequence_length: Annotated[int | None, SEQUENCE] = None,
    devices_per_node: Annotated[int | None, PER_NODE] = None,
    device_memory: Annotated[str | None, MEMORY] = None,
) -> None:
    """Change fields of the machine, the workload or the strategy: before, after, and why."""
    if fields:
        _show_fields()
        return
    large = LargeFlags(model, sequence_length, devices_per_node, device_memory, None, None)
    if layout is not None:
        refuse_typed(context, _ONLY_WITHOUT_LAYOUT, beside="--layout")
        whatif_layouts(
            profile, layout, large, batch=batch, settings=settings or (), saved=(output, as_json)
        )
        return
    large.refuse_without_layout()
    sources = Sources(profile=profile, workload=workload, validation=validation, cluster=cluster)
    asked = _Asked(settings=settings or (), devices=devices, scaling=scaling, batch=batch)
    _compare(sources, asked, against=against or (), output=output, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The question, as typed."""

    settings: Sequence[str]
    devices: int
    scaling: str
    batch: int | None


def _show_fields() -> None:
    from perfmodel.report.prediction import fields_lines
    from perfmodel.scenarios.fields import FIELDS

    show_lines(fields_lines([(f.name, f.example, f.meaning) for f in FIELDS]))


def _compare(
    sources: Sources,
    asked: _Asked,
    *,
    against: Sequence[Path],
    output: Path | None,
    as_json: bool,
) -> None:
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.files import read_inputs
    from perfmodel.documents.prediction import WhatIfDocument
    from perfmodel.predictor import Forecast
    from perfmodel.report.prediction import whatif_grid, whatif_lines
    from perfmodel.report.tables import rich_table
    from perfmodel.scenarios.compare import compare_scenarios, with_saved
    from perfmodel.scenarios.fields import scenarios_of
    from perfmodel.scenarios.machine import Scenario

    inputs = read_inputs(sources)
    base = Scenario(
        profile=inputs.predictor.profile,
        workload=inputs.workload,
        request=Forecast(
            world_sizes=(at_least_one("--devices", asked.devices),),
            scaling=one_of("--scaling", asked.scaling, SCALINGS),
            batch=asked.batch,
        ),
        machine_digest=inputs.predictor.profile.digest,
        validation=inputs.predictor.validation,
        document=inputs.document,
        cluster=inputs.predictor.cluster,
    )
    document = compare_scenarios(scenarios_of(base, asked.settings), argv=sys.argv)
    if output is not None:
        document.write(output)
    saved = [(path.stem, WhatIfDocument.read(path)) for path in against]
    shown = with_saved(document, saved) if saved else document
    show_document(shown, rich_table(whatif_grid(shown)), whatif_lines(shown), as_json=as_json)

"""Commands about layouts of large models: a prediction of one, a search over all."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from perfmodel.cli.options import at_least_one, bandwidth_bytes_per_s, size_bytes
from perfmodel.cli.output import show, show_document
from perfmodel.errors import UsageError
from perfmodel.machine.cluster import DEVICES_PER_NODE

if TYPE_CHECKING:
    from perfmodel.documents.prediction import LayoutPredictionDocument
    from perfmodel.layout.layout import Layout
    from perfmodel.predict_layout import Training
    from perfmodel.step.program import Trace

_PICTURES: Final[tuple[Literal["png", "svg", "html"], ...]] = ("png", "svg", "html")

INFERRED = typer.Option(help="Calibration from runs, from perfmodel calibrate --from-runs.")
LAYOUT = typer.Option(
    help='Layout of a large model, such as "dp=8 tp=4 pp=2 zero=1 micro_batch=2"; with --model and a '
    "profile from calibrate --from-runs. --batch then counts sequences per step of all devices. Further "
    "keys: cp, ep, imbalance, accumulation, interleave, stage_layers, schedule, recompute, "
    "sequence_parallel, shard, prefetch, overlap, offload, precision, order, one_process, data_centres, sync_every."
)
MODEL = typer.Option(help="Transformer: a Hugging Face config.json, or a name such as llama3-70b.")
SEQUENCE = typer.Option(
    help="Tokens per sequence; default: what the model is usually trained with."
)
PER_NODE = typer.Option(help="Devices of a node, which share its fast links; default 8.")
SCHEDULER = typer.Option(
    help="Dask scheduler whose workers share the search, such as tcp://host:8786; needs the extra "
    "distributed."
)
DATA_CENTRE_LINK = typer.Option(
    help="Bandwidth between data centres, all devices of one together, such as 10Gbit/s; with data_centres=2 in "
    "--layout."
)
TIMELINE = typer.Option(
    help="Draw the simulated step of --layout, .png, .svg or .html: lanes per stage, bubbles grey."
)
MEMORY = typer.Option(help="Memory of one device, such as 80GiB: says whether a layout fits.")

#: Parameters of ``predict`` that layouts do not have, and what to do instead.
ONLY_WITHOUT_LAYOUT: Final = {
    "workload": "--model says what is trained",
    "device": "a calibration from runs has its device; --device-memory says what fits",
    "scaling": "--batch counts the sequences of all devices",
    "accumulation": "write accumulation=N into the layout, or give --batch",
    "bucket_cap_mb": "leave it out, the closed forms have no buckets",
    "loader_samples_per_s": "leave it out, the closed forms have no input pipeline",
    "cluster": "links are inferred from the runs; --devices-per-node says where a node ends",
    "validation": "leave it out, a calibration from runs has its own intervals",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """In which forms a prediction is wanted."""

    as_json: bool
    as_csv: bool
    output: Path | None
    plot: Path | None
    trace: Path | None

    def tell(self, what: str, path: Path) -> None:
        """Say what was written; not among JSON or CSV."""
        typer.echo(f"{what}: {path}", err=self.as_json or self.as_csv)


@dataclass(frozen=True, slots=True)
class LargeFlags:
    """Flags that only large models have."""

    model: str | None
    sequence_length: int | None
    devices_per_node: int | None
    device_memory: str | None
    data_centre_link: str | None
    timeline: Path | None

    def refuse_without_layout(self) -> None:
        """Refuse flags that would be ignored."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                flag = f"--{field.name.replace('_', '-')}"
                raise UsageError(f"{flag}: must come with --layout, got {value} alone")


def predict_layout(
    profile: Path,
    text: str,
    large: LargeFlags,
    *,
    devices: tuple[int, ...] | None,
    batch: int | None,
    answers: Answers,
) -> None:
    """Predict one layout of a large model.

    Raises
    ------
    UsageError
        If a flag makes no sense, or the layout is not in the grammar.
    NotFeasible
        If the model or the number of devices does not allow the layout.
    CalibrationUnavailable
        If the profile is no calibration from runs.
    """
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.layout_inputs import read_machine
    from perfmodel.predict_layout import predict_layout as use_case

    if answers.as_csv or answers.plot is not None:
        raise UsageError(
            "--layout: excludes --csv and --plot; take --json, --output, --trace or --timeline"
        )
    if devices is not None and len(devices) != 1:
        raise UsageError(f"--devices: must be one count with --layout, got {len(devices)}")
    timeline_form = None if large.timeline is None else _picture_form(large.timeline)
    layout, training = asked_training(text, large, devices=devices, batch=batch)
    limit = capacity_bytes(large.device_memory)
    machine = read_machine(profile)
    document, step = use_case(machine, training, layout, capacity_bytes=limit, argv=sys.argv)
    _print_prediction(document, as_json=answers.as_json)
    if answers.output is not None:
        document.write(answers.output)
        answers.tell("prediction", answers.output)
    if answers.trace is not None:
        _write_trace(answers.trace, step, f"{training.model.name} {layout}")
        answers.tell("trace", answers.trace)
    if large.timeline is not None and timeline_form is not None:
        _write_timeline(large.timeline, step, f"{training.model.name} {layout}", timeline_form)
        answers.tell("timeline", large.timeline)


def asked_training(
    text: str, large: LargeFlags, *, devices: tuple[int, ...] | None, batch: int | None
) -> "tuple[Layout, Training]":
    """The layout with its batch, and what is trained on which devices."""
    from perfmodel.cli.layout_inputs import read_model
    from perfmodel.layout.layout import parse_layout
    from perfmodel.predict_layout import Training

    if not text.strip():
        raise UsageError('--layout: must be such as "dp=8 tp=4", got nothing; one device is "dp=1"')
    if large.model is None:
        raise UsageError("--layout: must come with --model, got it alone")
    layout = _with_batch(parse_layout(text), batch)
    return layout, Training(
        model=read_model(large.model, sequence=large.sequence_length),
        devices=layout.world_size if devices is None else devices[0],
        devices_per_node=DEVICES_PER_NODE
        if large.devices_per_node is None
        else at_least_one("--devices-per-node", large.devices_per_node),
        global_batch=layout.global_batch,
        data_centre_bytes_per_s=_data_centre_link(large.data_centre_link, layout),
    )


def plan_parallelism(  # noqa: PLR0913 - one parameter per flag
    *,
    profile: Annotated[Path, INFERRED],
    model: Annotated[str, MODEL],
    devices: Annotated[int, typer.Option(help="Devices of the cluster.")],
    global_batch: Annotated[int, typer.Option(help="Sequences per step of all devices.")],
    device_memory: Annotated[str, typer.Option(help="Memory of one device.")] = "80GiB",
    sequence_length: Annotated[int | None, SEQUENCE] = None,
    devices_per_node: Annotated[int, PER_NODE] = DEVICES_PER_NODE,
    interleave: Annotated[int, typer.Option(help="Most pipeline stages per device.")] = 1,
    top: Annotated[int, typer.Option(help="How many layouts to show.")] = 10,
    processes: Annotated[int, typer.Option(help="Processes that share the search.")] = 1,
    scheduler: Annotated[str | None, SCHEDULER] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan document.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the plan document.")] = None,
) -> None:
    """Rank all layouts of a large model on a cluster; say which ones tie, and why others lose."""
    from perfmodel.cli.layout_inputs import read_machine, read_model
    from perfmodel.layout_search import (
        Request,
        Workers,
    )
    from perfmodel.layout_search import plan_parallelism as use_case
    from perfmodel.predict_layout import Training
    from perfmodel.report.layout import plan_grid, plan_lines
    from perfmodel.report.tables import rich_table

    training = Training(
        model=read_model(model, sequence=sequence_length),
        devices=at_least_one("--devices", devices),
        devices_per_node=at_least_one("--devices-per-node", devices_per_node),
        global_batch=at_least_one("--global-batch", global_batch),
    )
    request = Request(
        training=training,
        capacity_bytes=size_bytes("--device-memory", device_memory),
        interleave=at_least_one("--interleave", interleave),
        top=at_least_one("--top", top),
    )
    if scheduler is not None and processes != 1:
        raise UsageError(f"--processes: excludes --scheduler, got {processes} beside {scheduler}")
    workers = Workers(processes=at_least_one("--processes", processes), scheduler=scheduler)
    document = use_case(read_machine(profile), request, argv=sys.argv, workers=workers)
    if output is not None:
        document.write(output)
    table = rich_table(plan_grid(document))
    show_document(document, table, plan_lines(document), as_json=as_json)


def _data_centre_link(text: str | None, layout: "Layout") -> float | None:
    if text is None:
        return None
    if layout.data_centres == 1:
        raise UsageError(
            f"--data-centre-link: must come with data_centres > 1 in --layout, got {text} on one data centre"
        )
    return bandwidth_bytes_per_s("--data-centre-link", text)


def capacity_bytes(text: str | None) -> int | None:
    """Memory of one device as ``--device-memory`` says it; None if nothing was typed. [B]"""
    return None if text is None else size_bytes("--device-memory", text)


def _with_batch(layout: "Layout", batch: int | None) -> "Layout":
    """The layout with the accumulation that makes up the global batch, if that is given."""
    from perfmodel.layout.layout import accumulation_for

    if batch is None:
        return layout
    needed = accumulation_for(global_batch=batch, dp=layout.dp, micro_batch=layout.micro_batch)
    if layout.accumulation not in (1, needed):
        raise UsageError(
            f"--batch: must be {layout.global_batch} with accumulation={layout.accumulation} in "
            f"--layout, got {batch}; give one of the two"
        )
    return replace(layout, accumulation=needed)


def _write_trace(path: Path, step: "Trace", name: str) -> None:
    from perfmodel.documents.base import write_atomically
    from perfmodel.report.timeline import chrome_trace_text

    write_atomically(path, chrome_trace_text(step, name=name))


def _picture_form(path: Path) -> Literal["png", "svg", "html"]:
    for form in _PICTURES:
        if path.suffix == f".{form}":
            return form
    raise UsageError(f"--timeline: must end in .png, .svg or .html, got {str(path)!r}")


def _write_timeline(
    path: Path, step: "Trace", name: str, form: Literal["png", "svg", "html"]
) -> None:
    from perfmodel.documents.base import write_bytes_atomically
    from perfmodel.report.timeline import timeline_bytes

    write_bytes_atomically(path, timeline_bytes(step, title=name, form=form))


def _print_prediction(document: "LayoutPredictionDocument", *, as_json: bool) -> None:
    from perfmodel.report.layout import layout_lines, memory_grid, parts_grid
    from perfmodel.report.tables import rich_table

    if not as_json:
        show(rich_table(parts_grid(document)))
    table = rich_table(memory_grid(document))
    show_document(document, table, layout_lines(document), as_json=as_json)


def whatif_layouts(
    profile: Path,
    text: str,
    large: LargeFlags,
    *,
    batch: int | None,
    settings: Sequence[str],
    saved: tuple[Path | None, bool],
) -> None:
    """Compare a layout with others.

    Parameters
    ----------
    saved
        Where to write the document, and whether to print it.

    Raises
    ------
    UsageError
        If a flag makes no sense, or a layout is not in the grammar.
    NotFeasible
        If the model or the number of devices does not allow a layout.
    CalibrationUnavailable
        If the profile is no calibration from runs.
    """
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.layout_inputs import read_machine, read_model
    from perfmodel.report.layout import layout_whatif_grid, layout_whatif_lines
    from perfmodel.report.tables import rich_table
    from perfmodel.scenarios.layouts import LayoutBase, compare_layouts

    layout, training = asked_training(text, large, devices=None, batch=batch)
    base = LayoutBase(
        machine=read_machine(profile),
        training=training,
        text=text,
        layout=layout,
        capacity_bytes=capacity_bytes(large.device_memory),
        open_model=lambda name: read_model(name, sequence=large.sequence_length),
    )
    document = compare_layouts(base, settings, argv=sys.argv)
    output, as_json = saved
    if output is not None:
        document.write(output)
    table = rich_table(layout_whatif_grid(document))
    show_document(document, table, layout_whatif_lines(document), as_json=as_json)

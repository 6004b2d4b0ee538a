"""Commands that predict: predict and explain. They must start fast, so plots are imported lazily."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from perfmodel.cli.files import Sources
from perfmodel.cli.layouts import (
    DATA_CENTRE_LINK,
    LAYOUT,
    MEMORY,
    MODEL,
    ONLY_WITHOUT_LAYOUT,
    PER_NODE,
    SEQUENCE,
    TIMELINE,
    Answers,
    LargeFlags,
    predict_layout,
)
from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import at_least_one, device_counts, duration_s, one_of, refuse_typed
from perfmodel.cli.output import show_lines
from perfmodel.errors import UsageError

DEFAULT_DEVICES = "1,2,4,8,16,32,64,128,256,512,1024"
SCALINGS: Final[tuple[Literal["weak", "strong"], ...]] = ("weak", "strong")

_PROFILE = typer.Option(help="Profile of the machine, from perfmodel calibrate.")
_WORKLOAD = typer.Option(help="Calibrated workload by name, or a workload file (JSON).")
_DEVICE = typer.Option(
    help="Device that is not present, such as h100-sxm (perfmodel devices): a traced workload is scaled "
    "to it by data-sheet ratios."
)
_BATCH = typer.Option(
    help="Weak scaling: samples per forward pass of each device; strong: per step of all together. "
    "Default: the middle calibrated micro-batch (weak), the largest (strong)."
)
_ACCUMULATION = typer.Option(help="Micro-steps per optimizer step.")
_BUCKET_CAP = typer.Option(help="DDP's bucket_cap_mb, in MiB; default: PyTorch's.")
_LOADER = typer.Option(help="Samples per second that the input pipeline feeds one device.")
CLUSTER = typer.Option(
    help="Cluster file (TOML): links between the devices; default: one ring of the measured ones."
)
_VALIDATION = typer.Option(help="A validation, whose errors widen the intervals.")
_MEASURED = typer.Option(
    help="What a step of yours takes, such as 480ms: is that normal? Median or trimmed mean of a run, "
    "from the end of one optimizer step to the end of the next."
)


def predict(  # noqa: PLR0913 - one parameter per flag
    *,
    context: typer.Context,
    profile: Annotated[Path, _PROFILE] = DEFAULT_PROFILE,
    workload: Annotated[str, _WORKLOAD] = "resnet18",
    device: Annotated[str | None, _DEVICE] = None,
    devices: Annotated[str, typer.Option(help="Device counts, separated by commas.")] = (
        DEFAULT_DEVICES
    ),
    scaling: Annotated[str, typer.Option(help="weak or strong.")] = "weak",
    batch: Annotated[int | None, _BATCH] = None,
    accumulation: Annotated[int, _ACCUMULATION] = 1,
    bucket_cap_mb: Annotated[float | None, _BUCKET_CAP] = None,
    loader_samples_per_s: Annotated[float | None, _LOADER] = None,
    cluster: Annotated[Path | None, CLUSTER] = None,
    validation: Annotated[Path | None, _VALIDATION] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the prediction document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the prediction document.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot, .svg or .png.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the step at the largest count as a Chrome trace.")
    ] = None,
    layout: Annotated[str | None, LAYOUT] = None,
    model: Annotated[str | None, MODEL] = None,
    sequence_length: Annotated[int | None, SEQUENCE] = None,
    devices_per_node: Annotated[int | None, PER_NODE] = None,
    device_memory: Annotated[str | None, MEMORY] = None,
    data_centre_link: Annotated[str | None, DATA_CENTRE_LINK] = None,
    timeline: Annotated[Path | None, TIMELINE] = None,
) -> None:
    """Predict speed-up and step time for any number of devices, or one layout of a large model."""
    if as_json and as_csv:
        raise UsageError("--json: excludes --csv, got both; --output writes JSON beside --csv")
    answers = Answers(as_json=as_json, as_csv=as_csv, output=output, plot=plot, trace=trace)
    large = LargeFlags(
        model, sequence_length, devices_per_node, device_memory, data_centre_link, timeline
    )
    if layout is not None:
        refuse_typed(context, ONLY_WITHOUT_LAYOUT, beside="--layout")
        only = None if devices == DEFAULT_DEVICES else device_counts(devices)
        predict_layout(profile, layout, large, devices=only, batch=batch, answers=answers)
        return
    large.refuse_without_layout()
    request = _Request(
        devices=devices,
        scaling=scaling,
        batch=batch,
        accumulation=accumulation,
        bucket_cap_mb=bucket_cap_mb,
        loader_samples_per_s=loader_samples_per_s,
    )
    sources = Sources(
        profile=profile,
        workload=workload,
        validation=validation,
        cluster=cluster,
        device=device,
    )
    _predict_workload(sources, request, answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What to predict of a workload, as typed."""

    devices: str
    scaling: str
    batch: int | None
    accumulation: int
    bucket_cap_mb: float | None
    loader_samples_per_s: float | None


def _predict_workload(sources: Sources, asked: _Request, answers: Answers) -> None:
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.files import print_prediction, read_inputs, write_plot, write_trace
    from perfmodel.predictor import Forecast, forecast

    plot_format = None if answers.plot is None else _plot_format(answers.plot)
    request = Forecast(
        world_sizes=device_counts(asked.devices),
        scaling=one_of("--scaling", asked.scaling, SCALINGS),
        batch=asked.batch,
        accumulation=at_least_one("--accumulation", asked.accumulation),
        bucket_cap_mb=asked.bucket_cap_mb,
        loader_samples_per_s=asked.loader_samples_per_s,
    )
    inputs = read_inputs(sources)
    document, largest = forecast(inputs.predictor, inputs.workload, request, argv=sys.argv)
    if answers.as_json:
        typer.echo(document.model_dump_json(indent=1))
    elif answers.as_csv:
        from perfmodel.report.tables import csv_text

        typer.echo(csv_text(document), nl=False)
    else:
        print_prediction(document)
    if answers.output is not None:
        document.write(answers.output)
        answers.tell("prediction", answers.output)
    if answers.plot is not None and plot_format is not None:
        write_plot(document, answers.plot, plot_format)
        answers.tell("plot", answers.plot)
    if answers.trace is not None:
        write_trace(largest, answers.trace)
        answers.tell("trace", answers.trace)


def explain(  # noqa: PLR0913 - one parameter per flag
    *,
    profile: Annotated[Path, _PROFILE] = DEFAULT_PROFILE,
    workload: Annotated[str, _WORKLOAD] = "resnet18",
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 2,
    scaling: Annotated[str, typer.Option(help="weak or strong.")] = "weak",
    batch: Annotated[int | None, _BATCH] = None,
    accumulation: Annotated[int, _ACCUMULATION] = 1,
    bucket_cap_mb: Annotated[float | None, _BUCKET_CAP] = None,
    loader_samples_per_s: Annotated[float | None, _LOADER] = None,
    cluster: Annotated[Path | None, CLUSTER] = None,
    validation: Annotated[Path | None, _VALIDATION] = None,
    measured: Annotated[str | None, _MEASURED] = None,
) -> None:
    """Rank what costs the speed-up, and what one change would gain."""
    from perfmodel.cli.files import read_inputs
    from perfmodel.explanation import explain as use_case
    from perfmodel.explanation import standing
    from perfmodel.predictor import Forecast, forecast_layouts
    from perfmodel.report.prediction import explanation_lines, standing_line

    request = Forecast(
        world_sizes=(devices,),
        scaling=one_of("--scaling", scaling, SCALINGS),
        batch=batch,
        accumulation=at_least_one("--accumulation", accumulation),
        bucket_cap_mb=bucket_cap_mb,
        loader_samples_per_s=loader_samples_per_s,
    )
    measured_s = None if measured is None else duration_s("--measured", measured)
    inputs = read_inputs(
        Sources(profile=profile, workload=workload, cluster=cluster, validation=validation)
    )
    layout = forecast_layouts(inputs.workload, request)[-1]
    explanation = use_case(
        inputs.predictor,
        workload=inputs.workload,
        layout=layout,
        scaling=request.scaling,
        loader_samples_per_s=loader_samples_per_s,
    )
    if measured_s is not None:
        found = standing(
            inputs.predictor,
            workload=inputs.workload,
            layout=layout,
            measured_s=measured_s,
            loader_samples_per_s=loader_samples_per_s,
        )
        show_lines([standing_line(found)])
    show_lines(explanation_lines(explanation))


def _plot_format(path: Path) -> Literal["svg", "png"]:
    if path.suffix == ".svg":
        return "svg"
    if path.suffix == ".png":
        return "png"
    raise UsageError(f"--plot: must end in .svg or .png, got {str(path)!r}")

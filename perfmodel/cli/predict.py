"""Commands that predict: predict and explain. They must start fast, so plots are imported lazily."""

import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import at_least_one, device_counts, one_of
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
_VALIDATION = typer.Option(help="A validation, whose errors widen the intervals.")


def predict(  # noqa: PLR0913 - one parameter per flag
    *,
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
    validation: Annotated[Path | None, _VALIDATION] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the prediction document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the prediction document.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot, .svg or .png.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the step at the largest count as a Chrome trace.")
    ] = None,
) -> None:
    """Predict speed-up and step time for any number of devices."""
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.files import (  # noqa: PLC0415
        print_prediction,
        read_inputs,
        write_plot,
        write_trace,
    )
    from perfmodel.forecast import Forecast, forecast  # noqa: PLC0415
    from perfmodel.report.tables import csv_text  # noqa: PLC0415

    plot_format = None if plot is None else _plot_format(plot)
    request = Forecast(
        world_sizes=device_counts(devices),
        scaling=one_of("--scaling", scaling, SCALINGS),
        batch=batch,
        accumulation=at_least_one("--accumulation", accumulation),
        bucket_cap_mb=bucket_cap_mb,
        loader_samples_per_s=loader_samples_per_s,
    )
    inputs = read_inputs(profile, workload, validation, device=device)
    document, largest = forecast(inputs.predictor, inputs.workload, request, argv=sys.argv)
    if as_json:
        typer.echo(document.model_dump_json(indent=1))
    elif as_csv:
        typer.echo(csv_text(document), nl=False)
    else:
        print_prediction(document)
    if output is not None:
        document.write(output)
    if plot is not None and plot_format is not None:
        write_plot(document, plot, plot_format)
    if trace is not None:
        write_trace(largest, trace)


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
) -> None:
    """Rank what costs the speed-up, and what one change would gain."""
    from perfmodel.cli.files import read_inputs  # noqa: PLC0415 - keeps --help fast
    from perfmodel.explanation import explain as use_case  # noqa: PLC0415
    from perfmodel.forecast import Forecast, forecast_settings  # noqa: PLC0415
    from perfmodel.report.explanation import explanation_lines  # noqa: PLC0415

    request = Forecast(
        world_sizes=(devices,),
        scaling=one_of("--scaling", scaling, SCALINGS),
        batch=batch,
        accumulation=at_least_one("--accumulation", accumulation),
        bucket_cap_mb=bucket_cap_mb,
        loader_samples_per_s=loader_samples_per_s,
    )
    inputs = read_inputs(profile, workload, None)
    settings = forecast_settings(inputs.workload, request)
    explanation = use_case(
        inputs.predictor,
        workload=inputs.workload,
        setting=settings[-1],
        scaling=request.scaling,
        loader_samples_per_s=loader_samples_per_s,
    )
    for line in explanation_lines(explanation):
        typer.echo(line)


def _plot_format(path: Path) -> Literal["svg", "png"]:
    if path.suffix == ".svg":
        return "svg"
    if path.suffix == ".png":
        return "png"
    raise UsageError(f"--plot: must end in .svg or .png, got {str(path)!r}")

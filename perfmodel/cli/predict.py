"""Commands that predict: predict, explain, whatif, plan parallelism, serve, report; they import the model late."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from perfmodel.cli import options as opt
from perfmodel.cli import printing, show_answer, show_lines, working
from perfmodel.cli.progress import measurement
from perfmodel.errors import Interrupted, NotFeasible, PerfModelError, UsageError
from perfmodel.machine import DEVICES_PER_NODE
from perfmodel.units import GIB, Bytes, format_duration

if TYPE_CHECKING:
    from perfmodel.answer import Answer, Question
    from perfmodel.answer.answer import Forecast
    from perfmodel.documents.prediction import PredictionDocument
    from perfmodel.layout import Layout
    from perfmodel.machine import Cluster
    from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload

#: Where a command keeps its machine.
_MACHINE: Final = "perfmodel.machine"
#: The same of what a workload file was traced from.
_CODE: Final = "perfmodel.code"
_SAMPLES = opt.positive("--samples", "Samples of the whole training: says the time to them.")
_NO_MEASURE = typer.Option(
    "--no-measure",
    help="Read calibrated curves instead of timing what a traced workload has new (40 s).",
)
_PLOT = opt.picture("--plot", "Write a plot, .svg or .png.")
_TRACE = opt.file("--trace", "Write the step at the largest count as a Chrome trace.")
_SET = typer.Option(
    "--set",
    help="FIELD=VALUE, such as network.bandwidth=400Gb/s or devices=64. Several make one scenario; "
    "FIELD=A,B makes one for each value. With --layout: its keys, such as tp=4,8, and model.",
)

#: Parameters that only layouts have.
_ONLY_WITH_LAYOUT: Final = ("model", "sequence_length", "devices_per_node", "device_memory")
#: Parameters that layouts of traced workloads do not have.
_ONLY_OF_TABLES: Final = {
    "samples": "perfmodel plan options takes the samples or tokens of a training",
    "scaling": "--batch counts the samples of all devices",
    "accumulation": "write accumulation=N into the layout, or give --batch",
    "bucket_cap_mb": "write bucket_cap=N into the layout",
}
#: Parameters that layouts of large models do not have, and what to do instead.
_ONLY_WITHOUT_LAYOUT: Final = {
    **_ONLY_OF_TABLES,
    "workload": "--model says what is trained",
    "device": "a calibration from runs has its device; --device-memory says what fits",
    **dict.fromkeys(
        ("bucket_cap_mb", "loader_samples_per_s", "sync_every_step", "no_measure"),
        "leave it out, the closed forms know whole steps alone",
    ),
    **dict.fromkeys(
        ("validation", "nodes_like", "torch", "nccl"),
        "leave it out, a calibration from runs has nodes and intervals of its own",
    ),
}
#: Parameters of large models that are known by their shape.
_ONLY_OF_MODELS: Final = {
    "sequence_length": "the trace has its own",
    "devices_per_node": "--cluster says where a node ends",
}


def _refuse_beside_layout(context: typer.Context, excluded: dict[str, str]) -> None:
    """Refuse what would be ignored, with or without a layout."""
    if context.params["layout"] is not None and opt.typed(context, "model"):
        opt.refuse_typed(context, excluded, beside="--layout")
        return
    if context.params["layout"] is not None:
        opt.refuse_typed(context, _ONLY_OF_TABLES, beside="--layout")
        opt.refuse_typed(context, _ONLY_OF_MODELS, beside="--workload")
        return
    for name in _ONLY_WITH_LAYOUT:
        if opt.typed(context, name):
            flag = f"--{name.replace('_', '-')}"
            text = opt.typed_texts(flag, sys.argv)[-1]
            raise UsageError(f"{flag}: must come with --layout, got {text} alone")


def predict(
    *,
    context: typer.Context,
    profile: opt.Machine = opt.DEFAULT_PROFILE,
    workload: opt.Workload = opt.USUAL_WORKLOAD,
    device: opt.Device = None,
    devices: opt.DeviceCounts = opt.DEFAULT_DEVICES,
    scaling: opt.Scaling = "weak",
    batch: opt.Batch = None,
    accumulation: opt.Accumulation = 1,
    bucket_cap_mb: opt.BucketCap = None,
    samples: Annotated[float | None, _SAMPLES] = None,
    loader_samples_per_s: opt.LoaderRate = None,
    sync_every_step: opt.SyncEveryStep = False,
    cluster: opt.ClusterFile = None,
    nodes_like: opt.NodesLike = None,
    validation: opt.Validation = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    plot: Annotated[Path | None, _PLOT] = None,
    trace: Annotated[Path | None, _TRACE] = None,
    layout: opt.LayoutText = None,
    model: opt.Model = None,
    sequence_length: opt.SequenceLength = None,
    devices_per_node: opt.DevicesPerNode = None,
    device_memory: opt.DeviceMemory = None,
    no_measure: Annotated[bool, _NO_MEASURE] = False,
    torch: opt.TorchVersion = None,
    nccl: opt.NcclVersion = None,
    throughput: opt.Throughput = None,
) -> None:
    """Predict speed-up and step time for any number of devices, or one layout of a large model."""
    if throughput is not None:
        from perfmodel.growth import growth

        taken = {"throughput", "devices", "as_json", "verbose", "output"}
        excluded = dict.fromkeys(sorted({*context.params} - taken), "the table says what ran")
        opt.refuse_typed(context, excluded, beside="--throughput")
        show_answer(growth(throughput, context.params["devices"]))
        return
    as_json, _, output = printing.get()
    if as_json and as_csv:
        raise UsageError("--json: excludes --csv, got both; --output writes JSON beside --csv")
    _refuse_beside_layout(context, _ONLY_WITHOUT_LAYOUT)
    if layout is not None and (as_csv or plot is not None):
        raise UsageError("--layout: excludes --csv and --plot; take --json, --output or --trace")
    document, largest = (_of_counts if layout is None else _of_layout)(context)
    if as_csv:
        from perfmodel.report.prediction import csv_text

        typer.echo(csv_text(document), nl=False)
        if output is not None:
            document.write(output)
    else:
        show_answer(document)
    if plot is not None:
        from perfmodel.files import write_atomically
        from perfmodel.report.figures import figure_bytes, speedup_figure

        form: Literal["svg", "png"] = "svg" if plot.suffix == ".svg" else "png"
        write_atomically(plot, figure_bytes(speedup_figure([document]), format=form))
    if trace is not None:
        from perfmodel.files import write_atomically
        from perfmodel.report.chrome_trace import chrome_trace_text

        step, name = largest.trace, largest.setting.label
        if document.points[0].large_model:
            name = f"{document.workload} {largest.layout}"
        name = f"{name} on {document.device_name}"
        if step.skipped_s:
            left_out = format_duration(sum(step.skipped_s.values()))
            name += f", without {left_out} of equal micro-batches"
            step = replace(step, skipped_s={})
        write_atomically(trace, chrome_trace_text(step, name=name))
    written = {"prediction": output, "plot": plot, "trace": trace}
    show_lines((f"{kind}: {at}" for kind, at in written.items() if at), err=as_json or as_csv)


def _of_counts(context: typer.Context) -> "tuple[PredictionDocument, Answer]":
    """The table of some device counts, and the answer for the largest."""
    _open_workload(context)
    from perfmodel.answer.answer import table
    from perfmodel.scaling import with_advice

    request = _forecast(context)
    _time_workload(
        context,
        lambda found: request.layouts(found)[0].micro_batch,
        is_together=max(request.world_sizes) > 1,
    )
    question = _question(context)
    with working("predict"):
        document, largest = table(question, request)
        document = with_advice(document, question, request)
    return document.model_copy(update={"samples": context.params["samples"]}), largest


def _of_layout(context: typer.Context) -> "tuple[PredictionDocument, Answer]":
    """One layout, of a traced workload or of a large model."""
    from perfmodel.answer.answer import layout_table

    if opt.typed(context, "workload") and not opt.typed(context, "model"):
        layout = _asked_layout(context)
        _open_workload(context)
        is_together = layout.is_ddp and layout.world_size > 1
        _time_workload(context, lambda _: layout.micro_batch, is_together=is_together)
    question = _question(context)
    with working("predict"):
        return layout_table(question)


def _open_workload(context: typer.Context) -> None:
    """Put the document of a file, or of the trace of a model, in the place of its name.

    A model is traced again each time: nothing tells whether what a factory imports has changed.
    """
    given, machine = context.params, _profiled(context)
    if not opt.typed(context, "workload") and machine.workloads:
        known = [each.workload.name for each in machine.workloads]
        given["workload"] = opt.USUAL_WORKLOAD if opt.USUAL_WORKLOAD in known else known[0]
    name = given["workload"]
    if isinstance(name, str) and (machine.workload(name) is None or machine.device_costs):
        from perfmodel.models import is_workload_file, workload_of  # calibrated ones need no traces

        with working("trace"):
            given["workload"] = workload_of(machine, name, where="--workload")
        context.meta[_CODE] = None if is_workload_file(name) else name


def _profiled(context: typer.Context) -> "MeasuredMachine":
    """The machine of ``--profile``, which a command reads once."""
    if _MACHINE not in context.meta:
        context.meta[_MACHINE] = opt.profiled(context.params["profile"])
    machine: MeasuredMachine = context.meta[_MACHINE]
    return machine


def _time_workload(
    context: typer.Context, batch_of: Callable[["MeasuredWorkload"], int], *, is_together: bool
) -> None:
    """Time the step of a traced workload that nothing was timed of, if this is its machine.

    A model whose code is at hand, such as FILE.py:FACTORY, trains for some seconds. What was timed stays beside the
    profile, in ``workloads/``, by operator, shapes, type and memory layout: the next model that has the same operators
    need not be timed. So the profile must lie where calibrate wrote it. Nothing is measured, and nothing said, on
    another machine: curves answer there.
    ``batch_of`` says at which micro-batch. ``is_together``: Whether the model trains under DistributedDataParallel as
    well, on the ranks of a node that were calibrated; on a processor alone.
    """
    given, document, machine = context.params, context.params["workload"], _profiled(context)
    if isinstance(document, str) or given["device"] is not None or given["no_measure"]:
        return
    from importlib.util import find_spec
    from tempfile import TemporaryDirectory

    from calibrate.workloads import in_place, is_unfinished, measure_workload, with_stored_workloads
    from perfmodel.answer import open_workload
    from perfmodel.cost.operators import OperatorDurations

    trace, folder = document.trace, given["profile"].parent
    if machine.operators is None or trace.method.device_kind != machine.traced_kind:
        return
    machine = with_stored_workloads(machine, folder)
    micro_batch = batch_of(open_workload(machine, document))
    code = context.meta[_CODE]
    assert machine.operators is not None
    known, step = OperatorDurations(machine.operators), trace.at(micro_batch=micro_batch)
    may_train = code is not None and step.method.checkpointing == "none"
    trained = known.trained(step) if may_train else None
    is_known = trained is not None if may_train else known.holds(step)
    ranks = {1, *(trained.ddp_s if trained else ())}
    together = may_train and is_together and not machine.asynchronous
    world_size = machine.ranks_per_node if together else 1
    wanted = in_place(document, micro_batch=micro_batch, code=code, world_size=world_size)
    if is_known and not is_unfinished(document, folder, wanted, profile=machine, known_ranks=ranks):
        return
    if any(find_spec(name) is None for name in ("torch", "psutil")):
        return
    from calibrate.environment import describe_environment

    here = describe_environment(observe_s=0.0)["host"]["fingerprint"]
    if here != machine.origin.fingerprint:
        return
    try:
        with TemporaryDirectory() as name, measurement("timing in place") as on_progress:
            file = Path(name, "workload.json")
            document.write(file)
            untrained = measure_workload(
                file, wanted, folder=folder, profile=machine, on_progress=on_progress
            )
    except Interrupted:
        words = "stopped by the user; what was measured is kept; repeat the command, or add --no-measure"
        raise Interrupted(f"timing in place: {words}") from None
    except PerfModelError as error:
        typer.echo(f"not timed in place, curves answer: {error}", err=True)
    else:
        if untrained:
            typer.echo(f"not trained in every round: {untrained}", err=True)


def _forecast(context: typer.Context) -> "Forecast":
    """Device counts and what stays the same, as far as the command has options for it."""
    from perfmodel.answer.answer import Forecast

    counts = context.params["devices"]
    world_sizes = tuple(counts) if isinstance(counts, Sequence) else (counts,)
    return opt.asked(Forecast, context, world_sizes=world_sizes)


def _question(context: typer.Context) -> "Question":
    """What is asked: a workload on a calibrated machine, a layout of it, or one of a large model."""
    from perfmodel.answer import Question, open_question
    from perfmodel.documents.profile import InferredDocument

    given = context.params
    if given["layout"] is not None and opt.typed(context, "model"):
        from perfmodel.models import read_model

        layout, count = _asked_layout(context), _one_count(context)
        model = read_model(given["model"], sequence=given["sequence_length"])
        cluster = _links(context)
        inside = given["devices_per_node"] if cluster is None else cluster.devices_per_node
        return Question(
            machine=InferredDocument.named(opt.made(given["profile"])).machine,
            workload=model,
            layout=layout,
            cluster=cluster,
            devices=count,
            devices_per_node=inside or DEVICES_PER_NODE,
            capacity_bytes=given["device_memory"],
        )
    divided = None if given["layout"] is None else _asked_layout(context)
    if divided is not None and not opt.typed(context, "workload"):
        raise UsageError(
            "--layout: must come with --model, or with a traced --workload on a calibrated machine, got it alone"
        )
    _open_workload(context)
    machine = opt.converted(
        _profiled(context), device=given["device"], torch=given.get("torch"), nccl=given.get("nccl")
    )
    if given["cluster"] is not None:
        opt.refuse_typed(
            context, {"nodes_like": "the file says how nodes are joined"}, beside="--cluster"
        )
    workload, folder = given["workload"], given["profile"].parent
    if not isinstance(workload, str) and (folder / "workloads").is_dir():
        from calibrate.workloads import with_stored_workloads

        machine = with_stored_workloads(machine, folder)
    if given["cluster"] is None and given["nodes_like"] is not None:
        from perfmodel.cost.inferred import with_nodes_of

        name = given["nodes_like"]
        others = InferredDocument.named(name, flag="--nodes-like").machine
        machine = with_nodes_of(machine, others, name=name)
    question = replace(
        open_question(machine, workload, validation=given["validation"], cluster=given["cluster"]),
        loader_samples_per_s=given.get("loader_samples_per_s"),
        sync_every_step=given.get("sync_every_step", False),
    )
    if divided is None:
        return question
    count = _one_count(context)
    if count is not None and count != divided.world_size:
        raise NotFeasible(
            f"--devices: must be the {divided.world_size} of --layout (dp x tp x pp x cp), got {count}"
        )
    return replace(question, layout=divided, capacity_bytes=given.get("device_memory"))


def _links(context: typer.Context) -> "Cluster | None":
    """Links between the nodes of a large model."""
    path = context.params.get("cluster")
    if path is None:
        return None
    opt.refuse_typed(
        context, {"devices_per_node": "the cluster file says where a node ends"}, beside="--cluster"
    )
    from perfmodel.documents.hardware import open_cluster

    return open_cluster(path)


def _one_count(context: typer.Context) -> int | None:
    """Devices as typed beside a layout; only where they could be several do they belong to it."""
    counts = context.params["devices"]
    if not opt.typed(context, "devices") or not isinstance(counts, Sequence):
        return None
    if len(counts) > 1:
        raise UsageError(
            f"--devices: must be one count with --layout, got {len(counts)}; ask once for each"
        )
    return int(counts[0])


def _asked_layout(context: typer.Context) -> "Layout":
    """The layout, with the accumulation that makes up the global batch if that is given."""
    from perfmodel.layout import accumulation_for, parse_layout

    text, batch = context.params["layout"], context.params["batch"]
    if not text.strip():
        raise UsageError('--layout: must be such as "dp=8 tp=4", got nothing; one device is "dp=1"')
    layout = parse_layout(text)
    if batch is None:
        return layout
    needed = accumulation_for(global_batch=batch, dp=layout.dp, micro_batch=layout.micro_batch)
    if layout.accumulation not in (1, needed):
        raise UsageError(
            f"--batch: must be {layout.global_batch} with accumulation={layout.accumulation} in "
            f"--layout, got {batch}; give one of the two"
        )
    return replace(layout, accumulation=needed)


def explain(
    *,
    context: typer.Context,
    profile: opt.Machine = opt.DEFAULT_PROFILE,
    workload: opt.Workload = opt.USUAL_WORKLOAD,
    device: opt.Device = None,
    devices: opt.Devices = 2,
    scaling: opt.Scaling = "weak",
    batch: opt.Batch = None,
    accumulation: opt.Accumulation = 1,
    bucket_cap_mb: opt.BucketCap = None,
    loader_samples_per_s: opt.LoaderRate = None,
    cluster: opt.ClusterFile = None,
    nodes_like: opt.NodesLike = None,
    validation: opt.Validation = None,
    layout: opt.LayoutText = None,
) -> None:
    """Rank what costs the speed-up, and what one change would gain."""
    if layout is not None:
        excluded = {**_ONLY_OF_TABLES, "devices": "the layout says how many"}
        opt.refuse_typed(context, excluded, beside="--layout")
    from perfmodel.explanation import explain as use_case

    question = _question(context)
    if layout is None:
        question = _forecast(context).at_largest(question)
    with working("explain"):
        explanation = use_case(question, scaling=scaling)
    show_answer({"explanation": explanation}, explanation)


def whatif(
    *,
    context: typer.Context,
    settings: Annotated[list[str] | None, _SET] = None,
    profile: opt.Machine = opt.DEFAULT_PROFILE,
    workload: opt.Workload = opt.USUAL_WORKLOAD,
    device: opt.Device = None,
    devices: opt.Devices = 8,
    scaling: opt.Scaling = "weak",
    batch: opt.Batch = None,
    validation: opt.Validation = None,
    cluster: opt.ClusterFile = None,
    nodes_like: opt.NodesLike = None,
    fields: Annotated[bool, typer.Option("--fields", help="List what can be set.")] = False,
    layout: opt.LayoutText = None,
    model: opt.Model = None,
    sequence_length: opt.SequenceLength = None,
    devices_per_node: opt.DevicesPerNode = None,
    device_memory: opt.DeviceMemory = None,
) -> None:
    """Change fields of the machine, the workload or the strategy: before, after, and why."""
    if fields:
        from perfmodel.scenarios.fields import FIELDS

        named = [{"field": f.name, "example": f.example, "meaning": f.meaning} for f in FIELDS]
        width = max(len(f"{f.name}={f.example}") for f in FIELDS)
        lines = [f"{f'{f.name}={f.example}':{width}}  {f.meaning}" for f in FIELDS]
        show_answer({"fields": named}, lines=lines)
        return
    _refuse_beside_layout(context, {**_ONLY_WITHOUT_LAYOUT, "devices": "leave it out"})
    from perfmodel.scenarios import Scenario, compare_scenarios
    from perfmodel.scenarios.fields import scenarios_of

    request = _forecast(context)
    base = Scenario(
        question=_question(context),
        request=request if layout is None else None,
        sequence_length=sequence_length,
    )
    with working("whatif"):
        document = compare_scenarios(scenarios_of(base, settings or ()))
    show_answer(document)


_INFERRED = opt.machine(
    "Calibration from runs, from perfmodel calibrate --from-runs, or a name of perfmodel machines."
)


def plan_parallelism(
    *,
    context: typer.Context,
    profile: Annotated[Path, _INFERRED],
    model: Annotated[str, typer.Option(help="Transformer: a config.json, or a name.")],
    devices: opt.Devices,
    global_batch: Annotated[int, opt.count("--global-batch", "Sequences per step of all devices.")],
    device_memory: Annotated[
        Bytes | None, opt.size("--device-memory", "Memory of one device; default: 80GiB.")
    ] = None,
    sequence_length: opt.SequenceLength = None,
    devices_per_node: opt.DevicesPerNode = None,
    cluster: opt.ClusterFile = None,
    interleave: Annotated[int, opt.count("--interleave", "Most pipeline stages per device.")] = 1,
    top: Annotated[int, opt.count("--top", "How many layouts to show.")] = 10,
) -> None:
    """Rank all layouts of a large model on a cluster; say which ones tie, and why others lose."""
    from perfmodel.api import search

    links = _links(context)
    with working("plan parallelism"):
        document = opt.asked(
            search,
            context,
            machine=profile,
            cluster=links,
            capacity_bytes=device_memory or 80 * GIB,
        )
    show_answer(document)


DEFAULT_PORT: Final = 8765

_PROFILES = opt.machine(
    f"Profile, or a name of perfmodel machines; repeatable. Default: {opt.DEFAULT_PROFILE}, or "
    "these machines where there is none."
)
_WORKLOADS = typer.Option(
    "--workload",
    help="Workload file from perfmodel trace, whose memory is then known; on perfmodel machines also a "
    "model, such as torchvision:resnet50; repeatable. Calibrated workloads are always there.",
)
_CLUSTERS = opt.file("--cluster", "Cluster file, whose links can then be chosen; repeatable.")
_PORT = opt.bounded(0, 65_535)("--port", "Port on 127.0.0.1; 0 takes any that is free.")


def serve(
    *,
    profile: Annotated[list[Path] | None, _PROFILES] = None,
    workload: Annotated[list[str] | None, _WORKLOADS] = None,
    cluster: Annotated[list[Path] | None, _CLUSTERS] = None,
    validation: opt.Validation = None,
    port: Annotated[int, _PORT] = DEFAULT_PORT,
) -> None:
    """Open a page on this machine: move devices, batch, bandwidth, layout; see what happens."""
    from perfmodel.page import read_machines, unmeasured_machines
    from perfmodel.page.answers import Answers
    from perfmodel.page.server import HOST, listening, start
    from perfmodel.page.server import serve as run

    if not profile and not opt.DEFAULT_PROFILE.exists():
        profile = unmeasured_machines()
        typer.echo(f"no {opt.DEFAULT_PROFILE}: machines inferred from steps of others", err=True)
    machines = read_machines(
        profile or [opt.DEFAULT_PROFILE],
        workload or [],
        validation=validation,
        clusters=cluster or [],
    )
    answers, on = Answers(machines), listening(port)
    first = start(answers.catalogue)
    with working("first answer"):
        answers.answer(first)  # so that the first page does not wait for it
        answers.detail(first)
    typer.echo(f"http://{HOST}:{on.getsockname()[1]}/ (Ctrl-C ends)")
    try:
        run(answers, on)
    except KeyboardInterrupt:
        typer.echo("ended", err=True)


def report(
    *,
    profile: opt.Profile = opt.DEFAULT_PROFILE,
    validation: opt.Validation = None,
    devices: opt.DeviceCounts = opt.DEFAULT_DEVICES,
    out: opt.Folder = Path("runs/report"),
) -> None:
    """Write one self-contained HTML report, and every plot as SVG."""
    from perfmodel.answer import open_question
    from perfmodel.answer.answer import Forecast, table
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.documents.verdicts import ValidationDocument
    from perfmodel.files import write_atomically
    from perfmodel.report.html import report_html

    document = ProfileDocument.read(profile)
    machine = document.machine
    judged = None if validation is None else ValidationDocument.read(validation)
    request = Forecast(world_sizes=tuple(devices), scaling="weak")
    with working("report"):
        predictions = [
            table(open_question(machine, entry.workload.name, validation=judged), request)[0]
            for entry in machine.workloads
        ]
        page, pictures = report_html(document, predictions=predictions, judged=judged)
        write_atomically(out / "report.html", page)
        figures = {out / "figures" / f"{each.name}.svg": each.svg_file for each in pictures}
        for path, content in figures.items():
            write_atomically(path, content)
    found = {"figures": [*map(str, figures)], "predictions": predictions}
    show_answer(found, written={"report": out / "report.html"})

"""Commands that judge what others measured: diagnose, network check."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options as opt
from perfmodel.cli import printing, show, show_answer, show_lines, show_verdict, working
from perfmodel.errors import OutOfTolerance, UsageError, refuse_unknown
from perfmodel.units import BytesPerSecond

if TYPE_CHECKING:
    from perfmodel.machine import Cluster
    from perfmodel.machine.measured import MeasuredCollective, MeasuredMachine

_COLLECTIVE = opt.text("--collective", "Only for old logs that leave it open: all_gather.")
_ADAPTER = opt.bandwidth("--nic-bandwidth", "Of one network adapter of a node: 400Gb/s.")
_ADAPTERS = opt.count("--nics", "Network adapters of a node.")
_CHECKED = opt.machine(
    "Machine whose own collectives are expected: a name of perfmodel machines, or a profile."
)
_BUCKETS_OF = typer.Option(
    help="Model whose DDP buckets are marked: a workload file (JSON), FILE.py:FACTORY, "
    "torchvision:NAME, timm:NAME, a Hugging Face config.json."
)


def network_check(
    context: typer.Context,
    log: Annotated[Path, opt.file("LOG", "Output of nccl-tests.")],
    *,
    device: opt.Device = None,
    profile: Annotated[Path | None, _CHECKED] = None,
    nic_bandwidth: Annotated[BytesPerSecond | None, _ADAPTER] = None,
    nics: Annotated[int | None, _ADAPTERS] = None,
    cluster: Annotated[
        Path | None, opt.file("--cluster", "Cluster file (TOML) in place of data sheets.")
    ] = None,
    collective: Annotated[str | None, _COLLECTIVE] = None,
    workload: Annotated[str | None, _BUCKETS_OF] = None,
    bucket_cap_mb: opt.BucketCap = None,
) -> None:
    """Compare an nccl-tests log with what its links should reach; exit code 4 if they are slow."""
    from perfmodel.documents.importers import COLLECTIVES, read_nccl_paste
    from perfmodel.layout import Layout
    from perfmodel.models import read_workload
    from perfmodel.network_check import Verdict, check_network
    from perfmodel.report.diagnosis import check_json, check_lines, check_table
    from perfmodel.step import gradient_buckets

    if collective is not None:
        refuse_unknown("--collective", collective, COLLECTIVES)
    _refuse_ignored(context)
    tests, notes = read_nccl_paste(log, collective=collective)
    with working("trace"):
        model = None if workload is None else read_workload(workload).workload
    machine = None if profile is None else opt.profiled(profile)
    links_of = _links(context.params, machine)
    checks = []
    for measured in tests:
        name, links = links_of(measured)
        buckets: tuple[int, ...] = ()
        if model is not None:
            layout = Layout(dp=measured.world_size, bucket_cap_mb=bucket_cap_mb)
            buckets = tuple(piece.size_bytes for piece in gradient_buckets(model, layout))
        checks.append(
            check_network(measured, links, name=name, machine=machine, buckets_bytes=buckets)
        )
    if printing.get().as_json:
        show_answer(check_json(checks, notes))
    else:
        for check in checks:
            show(check_table(check))
            line, *lines = check_lines(check)
            show_verdict(line, is_good=check.verdict is Verdict.NORMAL)
            show_lines(lines)
        show_lines(f"note: {note}" for note in notes)
    if any(check.verdict is Verdict.SLOW for check in checks):
        raise OutOfTolerance(f"network check: {log}: slower than its links allow; see the causes")


def _refuse_ignored(context: typer.Context) -> None:
    """Refuse options of ``network check`` that others leave without a meaning."""
    given = context.params
    if given["cluster"] is not None:
        excluded = dict.fromkeys(
            ("device", "nic_bandwidth", "nics", "profile"), "the file names the links"
        )
        opt.refuse_typed(context, excluded, beside="--cluster")
    if given["profile"] is not None:
        opt.refuse_typed(context, {"device": "the machine has its own"}, beside="--machine")
    cap_mb = given["bucket_cap_mb"]
    if given["workload"] is None and cap_mb is not None:
        raise UsageError(f"--bucket-cap-mb: must come with --workload, got {cap_mb:g} alone")


def _links(
    given: dict[str, Any], machine: "MeasuredMachine | None"
) -> "Callable[[MeasuredCollective], tuple[str, Cluster]]":
    """Name of the machine of a log, and links of each test: of a cluster file, the machine or the data sheet."""
    if given["cluster"] is not None:
        from perfmodel.documents.hardware import open_cluster

        cluster = open_cluster(given["cluster"])
        return lambda _: (cluster.name, cluster)
    from perfmodel.documents.hardware import LINK_SHARE, find_device, shipped_catalogue
    from perfmodel.documents.importers import read_device_names
    from perfmodel.network_check import node_links

    catalogue = shipped_catalogue()
    names = read_device_names(given["log"])
    if machine is not None:
        sheet = find_device(machine.device_name, catalogue, flag="--machine")
        for name in names:
            if find_device(name, catalogue) != sheet:
                raise UsageError(
                    f"--machine: must have the {name} of {given['log']}, got {sheet.name}"
                )
    else:
        if given["device"] is None and len(names) != 1:
            told = " and ".join(names) or "none"
            raise UsageError(
                f"--device: must name the device of {given['log']}, whose header names {told}; see "
                "perfmodel devices, or give --machine"
            )
        sheet = find_device(given["device"] or names[0], catalogue)

    def links(measured: "MeasuredCollective") -> "tuple[str, Cluster]":
        nic, nics = given["nic_bandwidth"], given["nics"]
        if measured.num_nodes > 1 and (nic is None or nics is None):
            if machine is not None and machine.cluster is not None:
                adapter = machine.cluster.tiers[-1]
                nics = nics or adapter.links
                nic = nic or adapter.link_bytes_per_s / LINK_SHARE
            else:
                raise UsageError(
                    f"--nic-bandwidth and --nics: must be given for a log of {measured.num_nodes} nodes, because "
                    "it does not say them; for example --nic-bandwidth 400Gb/s --nics 8"
                )
        rate = None if nic is None else LINK_SHARE * nic
        found = node_links(sheet, catalogue, measured, adapters=nics or 0, adapter_bytes_per_s=rate)
        return sheet.name, found

    return links


_MODEL = typer.Argument(
    help="What is trained: a name such as llama2-7b, a size (7b), a Hugging Face config.json, FILE.py:FACTORY, "
    "torchvision:NAME, timm:NAME, a workload file, or the YAML or TOML of a trainer."
)
_OBSERVED = typer.Option(
    help="A setting and what was logged: '8 GPUs 1 node 2.5 s', '2 nodes of 4: 8.7 s', '64 GPUs, tp=2: "
    "1,000 tokens/s per GPU'; repeatable."
)
_LOG_FORMAT = typer.Option(
    "--log-format",
    help="Default: recognised. lightning, hf, megatron, torchtitan, llm-foundry, or regex:PATTERN with a "
    "group s, ms, it_per_s, tokens_per_s, tokens_per_s_per_gpu, samples_per_s or tflops.",
)
_GLOBAL = opt.count("--global-batch", "Samples per optimizer step of all devices.")
_ACCUMULATED = opt.count("--accumulation", "Micro-steps per optimizer step.")
_PRECISION = opt.choice("--precision", ("bf16", "fp16", "tf32", "fp32"), "Of matrix products.")
_STRATEGY = opt.choice(
    "--strategy", ("ddp", "zero1", "zero2", "zero3", "fsdp"), "Data parallelism of several devices."
)
_MACHINE = opt.machine(
    "Calibrated machine that is expected of, or a name of perfmodel machines; else --device."
)
_NAMED = typer.Option("--name", help="What the model is called, such as mpt-7b, to check its size.")


def diagnose(
    context: typer.Context,
    model: Annotated[str, _MODEL],
    *,
    device: opt.Device = None,
    profile: Annotated[Path | None, _MACHINE] = None,
    cluster: opt.ClusterFile = None,
    observed: Annotated[list[str] | None, _OBSERVED] = None,
    log: Annotated[Path | None, opt.file("--log", "Log of the training, of --devices.")] = None,
    log_format: Annotated[str | None, _LOG_FORMAT] = None,
    devices: Annotated[
        int | None, opt.count("--devices", "Devices of runs that do not say.")
    ] = None,
    devices_per_node: opt.DevicesPerNode = None,
    micro_batch: Annotated[
        int | None, opt.count("--micro-batch", "Samples per forward pass of one device.")
    ] = None,
    global_batch: Annotated[int | None, _GLOBAL] = None,
    accumulation: Annotated[int | None, _ACCUMULATED] = None,
    sequence_length: opt.SequenceLength = None,
    precision: Annotated[str | None, _PRECISION] = None,
    strategy: Annotated[str | None, _STRATEGY] = None,
    nic_bandwidth: Annotated[BytesPerSecond | None, _ADAPTER] = None,
    nics: Annotated[int | None, _ADAPTERS] = None,
    name: Annotated[str | None, _NAMED] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Adapters alone are trained.")] = False,
) -> None:
    """Say whether logged step times are normal, which causes fit, and what to measure next."""
    from perfmodel.diagnosis.asked import diagnosed
    from perfmodel.diagnosis.cases import Case
    from perfmodel.report.diagnosis import diagnosis_json, diagnosis_lines, diagnosis_table

    machine = links = None
    if cluster is not None:
        from perfmodel.documents.hardware import open_cluster

        links = open_cluster(cluster)
    if profile is not None:
        from calibrate.workloads import with_stored_workloads

        machine = with_stored_workloads(opt.profiled(profile), profile.parent)
    case = opt.asked(Case, context, machine=machine, cluster=links)
    with working("diagnose"):
        found = diagnosed(case)
    if printing.get().as_json:
        show_answer(diagnosis_json(found))
        return
    show(diagnosis_table(found))
    said, *lines = diagnosis_lines(found)
    show_verdict(said, is_good="NOT" not in said and "WRONG" not in said)
    show_lines(lines)

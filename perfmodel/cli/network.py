"""Commands about collectives alone: measure them, or show what was measured and what was fitted."""

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import at_least_one, bandwidth_bytes_per_s, names, one_of
from perfmodel.cli.output import measurement
from perfmodel.cli.output import show as show_table


def measure(
    *,
    out: Annotated[Path, typer.Option(help="Folder for raw times and the curves.")] = Path(
        "runs/network"
    ),
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this node; on a CPU more than cores, too.")
    ] = None,
    collectives: Annotated[
        str, typer.Option(help="Collectives to measure, separated by commas.")
    ] = "all_reduce",
    rounds: Annotated[int, typer.Option(help="Fresh process groups.")] = 4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue in the folder.")] = False,
) -> None:
    """Measure collectives alone at group sizes 2, 4, 8 ... and message sizes 1 KiB to 16 MiB."""
    from calibrate import network as use_case
    from calibrate.launch import TorchrunLauncher
    from calibrate.topology import LaunchFlags

    request = use_case.NetworkRequest(
        folder=out,
        collectives=names(collectives),
        num_rounds=rounds,
        device=device,
        flags=LaunchFlags(nproc_per_node=nproc),
        resume=resume,
    )
    with measurement("network") as on_progress:
        use_case.measure_network(request, TorchrunLauncher(), on_progress=on_progress)
    typer.echo(f"collectives: {out / use_case.NETWORK}")


def show(
    files: Annotated[list[Path], typer.Argument(help="Files of measure, or nccl-tests logs.")],
    *,
    collective: Annotated[
        str | None, typer.Option(help="What an nccl-tests text log holds, such as all_reduce.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON.")] = False,
) -> None:
    """Show algbw, busbw, the fit and its residuals."""
    import json

    from perfmodel.documents.importers import COLLECTIVES
    from perfmodel.report.network import curve_grid, curve_rows, read_curves
    from perfmodel.report.tables import rich_table

    if collective is not None:
        one_of("--collective", collective, COLLECTIVES)
    rows = curve_rows(read_curves(files, collective=collective))
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, "rows": rows}, indent=1))
    else:
        show_table(rich_table(curve_grid(rows)))


def import_topology(
    file: Annotated[Path, typer.Argument(help="Output of nvidia-smi topo -m or NCCL_DEBUG=INFO.")],
    *,
    output: Annotated[Path, typer.Option(help="Cluster file to write (TOML).")],
    nodes: Annotated[int | None, typer.Option(help="Nodes like this one.")] = None,
    link_bandwidth: Annotated[
        str | None, typer.Option(help="Of a device inside its node, each way, such as 368GB/s.")
    ] = None,
    nic_bandwidth: Annotated[
        str | None, typer.Option(help="Of one network adapter, such as 400Gb/s.")
    ] = None,
) -> None:
    """Write a cluster file from what a machine says about its links."""
    from perfmodel.documents.base import write_atomically
    from perfmodel.documents.hardware import cluster_text
    from perfmodel.documents.importers import as_cluster, read_topology

    def rate(option: str, text: str | None) -> float | None:
        return None if text is None else bandwidth_bytes_per_s(option, text)

    cluster = as_cluster(
        read_topology(file),
        name=file.stem,
        nodes=None if nodes is None else at_least_one("--nodes", nodes),
        link_bytes_per_s=rate("--link-bandwidth", link_bandwidth),
        adapter_bytes_per_s=rate("--nic-bandwidth", nic_bandwidth),
    )
    write_atomically(output, cluster_text(cluster, comments=(f"imported from {file.name}",)))
    typer.echo(f"cluster: {output}, {cluster.num_devices} devices")
    for tier in cluster.tiers:
        typer.echo(f"  {tier.name}: {tier.source}")

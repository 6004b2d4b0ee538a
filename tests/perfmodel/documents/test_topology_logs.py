"""Logs of topology, as the tools print them."""

from pathlib import Path

import pytest

from perfmodel.documents.clusters import cluster_text, read_cluster
from perfmodel.documents.importers import as_cluster, read_topology
from perfmodel.errors import InvalidDocument, UsageError

#: Two devices, two adapters beside them and one for storage behind the other processor.
MATRIX = """\
\x1b[4m\tGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\tNODE\tSYS\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tPIX\tSYS\t0-51\t0\t\tN/A
NIC0\tPXB\tNODE\t X \tNODE\tSYS\t\t\t\t
NIC1\tNODE\tPIX\tNODE\t X \tSYS\t\t\t\t
NIC2\tSYS\tSYS\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
"""
NCCL = """\
NCCL version 2.21.5+cuda12.4
a:11:21 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
a:11:21 [0] NCCL INFO comm 0x1 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 7000 commId 0xf - Init START
a:12:22 [1] NCCL INFO comm 0x2 rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId f000 commId 0xf - Init START
b:11:21 [0] NCCL INFO comm 0x3 rank 2 nranks 4 cudaDev 0 nvmlDev 0 busId 7000 commId 0xf - Init START
b:12:22 [1] NCCL INFO comm 0x4 rank 3 nranks 4 cudaDev 1 nvmlDev 1 busId f000 commId 0xf - Init START
a:11:21 [0] NCCL INFO   + PCI[24.0] - GPU/7000 (0)
a:11:21 [0] NCCL INFO                 + NVL[240.0] - NVS/0
a:11:21 [0] NCCL INFO   + NET[25.0] - NET/0 (aa/1/25.0)
"""


def log(folder: Path, text: str) -> Path:
    path = folder / "log.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_matrix_names_devices_links_and_near_adapters(tmp_path: Path) -> None:
    found = read_topology(log(tmp_path, MATRIX))
    assert (found.devices_per_node, found.adapters) == (2, 2)
    assert found.link_bytes_per_s == 18 * 25e9
    cluster = as_cluster(found, name="x", nodes=4, adapter_bytes_per_s=50e9)
    inside, between = cluster.tiers
    assert (inside.count, between.count, between.links) == (2, 4, 2)
    copy = tmp_path / "cluster.toml"
    copy.write_text(cluster_text(cluster), encoding="utf-8")
    assert read_cluster(copy).num_devices == 8


def test_the_weakest_pair_of_a_matrix_counts(tmp_path: Path) -> None:
    found = read_topology(log(tmp_path, MATRIX.replace("NV18", "SYS")))
    assert found.link_bytes_per_s == 27e9
    assert "SYS; assumed PCIe" in found.link_source


def test_a_log_of_nccl_names_nodes_adapters_and_rates(tmp_path: Path) -> None:
    found = read_topology(log(tmp_path, NCCL))
    assert (found.devices_per_node, found.nodes, found.adapters) == (2, 2, 2)
    assert (found.link_bytes_per_s, found.adapter_bytes_per_s) == (240e9, 25e9)
    assert as_cluster(found, name="x").levels(4)[1].bytes_per_s == 50e9


def test_a_log_of_nccl_says_whether_switches_add(tmp_path: Path) -> None:
    line = (
        "a:11:21 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)\n"
    )
    blackwell = NCCL.replace("NVL[240.0]", "NVL[721.8]")
    found = [
        as_cluster(read_topology(log(tmp_path, text)), name="x").tiers[0].in_switch_reduction
        for text in (
            NCCL,
            NCCL + line,
            blackwell + line,
            NCCL + line.replace("is available", "is not available"),
        )
    ]
    assert found == [0.0, 0.85, 0.74, 0.0]


def test_a_rate_that_no_log_tells_has_to_be_given(tmp_path: Path) -> None:
    found = read_topology(log(tmp_path, MATRIX))
    with pytest.raises(UsageError, match="--nic-bandwidth"):
        as_cluster(found, name="x", nodes=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "got neither"),
        (MATRIX[:90], "row of GPU0 must have 5 cells"),
        (MATRIX.replace("NV18", "NVX"), "a cell must be"),
        ("\n".join(NCCL.splitlines()[:4]), "names 2 of 4 ranks"),
        (NCCL.replace("b:11:21 [0] NCCL INFO comm", "a:11:21 [0] NCCL INFO comm"), "a: 3, b: 1"),
        ("NCCL INFO nothing", "nranks"),
    ],
)
def test_truncated_logs_and_ranks_that_do_not_add_up_are_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidDocument, match=message):
        read_topology(log(tmp_path, text))

"""Texts as ``nvidia-smi`` prints them on four kinds of machine."""

import subprocess
from pathlib import Path

import pytest

from calibrate import environment as gpus
from calibrate.environment import parse_gpu_processes, parse_gpu_topology, parse_gpus

UUIDS = [f"GPU-5f2b1c3d-0a1b-2c3d-4e5f-{index:012d}" for index in range(8)]
H100 = "\n".join(
    f"{index}, NVIDIA H100 80GB HBM3, {uuid}, 00000000:{bus}:00.0, 5, 5, 16, 16, 81559, 700.00, "
    f"1980, 1980, {30 + index}, Default, Disabled, Enabled, 0, 550.54.15"
    for index, (uuid, bus) in enumerate(
        zip(UUIDS, ("19", "3B", "4C", "5D", "9B", "BB", "CB", "DB"), strict=True)
    )
)
PCIE_BOX = (
    "0, NVIDIA GeForce RTX 4090, GPU-aaaaaaaa-0000-0000-0000-000000000000, 00000000:01:00.0, "
    "1, 4, 8, 16, 24564, 450.00, 210, 3105, 34, Default, [N/A], Disabled, [N/A], 560.35.03\n"
    "1, NVIDIA RTX A6000, GPU-bbbbbbbb-0000-0000-0000-000000000000, 00000000:02:00.0, "
    "4, 4, 16, 16, 49140, 300.00, 1800, 2100, 85, Prohibited, [N/A], Disabled, 2, 560.35.03\n"
)
MIG = (
    "0, NVIDIA A100-SXM4-40GB, GPU-cccccccc-0000-0000-0000-000000000000, 00000000:07:00.0, "
    "4, 4, 16, 16, 40960, 400.00, 1410, 1410, 33, Default, Enabled, Enabled, 0, 535.161.08\n"
)
HIDDEN = (
    "0, Tesla K80, GPU-dddddddd-0000-0000-0000-000000000000, 00000000:00:1E.0, [N/A], [N/A], "
    "[Unknown Error], [N/A], 11441, [Not Supported], [N/A], 875, ERR!, Default, [N/A], [N/A], "
    "[Not Supported], 470.82.01\n"
)
H100_TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tPIX\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNODE\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tSYS\tPXB\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\t X \tSYS\n"
    "NIC1\tSYS\tSYS\tPXB\tSYS\t X \n"
    "\n"
    "Legend:\n"
    "\n"
    "  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes\n"
    "\n"
    "NIC Legend:\n"
    "\n"
    "  NIC0: mlx5_0\n"
    "  NIC1: mlx5_1\n"
)
PCIE_TOPOLOGY = (
    "        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
    "GPU0     X      PHB     0-31    0               N/A\n"
    "GPU1    PHB      X      0-31    0               N/A\n"
)


def test_eight_h100_are_read_with_si_units() -> None:
    """81559 MiB x 1048576 = 85520809984 B; 1980 MHz = 1.98e9 Hz."""
    found = parse_gpus(H100)
    assert [gpu["index"] for gpu in found] == list(range(8))
    assert [gpu["uuid"] for gpu in found] == UUIDS
    first = found[0]
    assert first["name"] == "NVIDIA H100 80GB HBM3"
    assert first["memory_bytes"] == 85_520_809_984
    assert first["max_clock_hz"] == 1.98e9
    assert first["power_limit_w"] == 700.0
    assert (first["pcie_generation"], first["pcie_width"]) == (5, 16)
    assert (first["mig_mode"], first["driver"]) == ("Disabled", "550.54.15")


def test_a_pcie_box_shows_current_and_greatest_link() -> None:
    first, second = parse_gpus(PCIE_BOX)
    assert (first["pcie_generation"], first["max_pcie_generation"]) == (1, 4)
    assert (first["pcie_width"], first["max_pcie_width"]) == (8, 16)
    assert first["mig_mode"] is None
    assert first["uncorrected_ecc_errors"] is None
    assert (second["uncorrected_ecc_errors"], second["compute_mode"]) == (2, "Prohibited")


def test_mig_is_seen() -> None:
    assert parse_gpus(MIG)[0]["mig_mode"] == "Enabled"


def test_unknown_values_become_none() -> None:
    gpu = parse_gpus(HIDDEN)[0]
    assert gpu["memory_bytes"] == 11_441 * 2**20
    unknown = ("pcie_generation", "pcie_width", "power_limit_w", "clock_hz", "temperature_c")
    assert {name: dict(gpu)[name] for name in unknown} == dict.fromkeys(unknown)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "\n\n", "a, b\n"])
def test_text_without_rows_has_no_gpus(text: str) -> None:
    assert parse_gpus(text) == []


def test_the_matrix_of_an_nvlink_node_is_read() -> None:
    topology = parse_gpu_topology(H100_TOPOLOGY)
    assert list(topology["paths"]) == ["GPU0", "GPU1", "GPU2", "NIC0", "NIC1"]
    assert topology["paths"]["GPU0"] == {
        "GPU0": "X",
        "GPU1": "NV18",
        "GPU2": "NV18",
        "NIC0": "PIX",
        "NIC1": "SYS",
    }
    assert topology["paths"]["NIC1"]["GPU2"] == "PXB"
    assert "\x1b" not in topology["raw"]


def test_the_matrix_survives_copy_and_paste() -> None:
    assert parse_gpu_topology(PCIE_TOPOLOGY)["paths"] == {
        "GPU0": {"GPU0": "X", "GPU1": "PHB"},
        "GPU1": {"GPU0": "PHB", "GPU1": "X"},
    }


def test_the_matrix_of_symmetric_paths_is_symmetric() -> None:
    paths = parse_gpu_topology(H100_TOPOLOGY)["paths"]
    assert all(paths[a][b] == paths[b][a] for a in paths for b in paths)


def test_processes_are_read() -> None:
    text = f"{UUIDS[0]}, 4242, python3, 71234\n{UUIDS[1]}, 77, [N/A], [N/A]\n"
    first, second = parse_gpu_processes(text)
    assert (first["pid"], first["name"], first["memory_bytes"]) == (4242, "python3", 71_234 * 2**20)
    assert (second["name"], second["memory_bytes"]) == (None, None)


def _play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answer").write_text(PCIE_BOX)
    _play(tmp_path, monkeypatch, f'[ "$1" != topo ] && cat {tmp_path}/answer')
    assert [gpu["index"] for gpu in gpus.query_gpus()] == [0, 1]
    assert gpus.query_gpu_topology() is None


def test_a_program_that_fails_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(tmp_path, monkeypatch, "echo 'Failed to initialize NVML'; exit 9")
    assert gpus.query_gpus() == []
    assert gpus.query_gpu_processes() is None


def test_a_program_that_hangs_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(tmp_path, monkeypatch, "exec sleep 30")
    monkeypatch.setattr(gpus, "_TIMEOUT_S", 0.1)
    assert gpus.query_gpus() == []


def test_without_the_program_there_are_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.query_gpus() == []
    assert gpus.query_gpu_processes() is None
    with pytest.raises(FileNotFoundError):
        subprocess.run(["nvidia-smi"], check=False)


def test_a_driver_that_refuses_a_field_still_names_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old drivers refuse the whole query for one unknown field."""
    row = f"0, Tesla K80, {UUIDS[0]}, 11441, 390.30"
    script = f'case "$1" in *mig.mode*) exit 2;; --query-gpu=*) echo "{row}";; esac'
    _play(tmp_path, monkeypatch, script)
    (gpu,) = gpus.query_gpus()
    assert (gpu["name"], gpu["uuid"], gpu["driver"]) == ("Tesla K80", UUIDS[0], "390.30")
    assert gpu["memory_bytes"] == 11441 * 2**20
    assert gpu["mig_mode"] is None

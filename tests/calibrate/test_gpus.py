"""Texts as ``nvidia-smi`` prints them on four kinds of machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from calibrate import environment as gpus
from calibrate.environment import Facts, parse_gpu_topology
from calibrate.placement import place
from calibrate.topology import LaunchFlags
from perfmodel.errors import UsageError

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


def _play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def _gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> list[Facts]:
    (tmp_path / "answer").write_text(answer)
    _play(tmp_path, monkeypatch, f'[ "$1" != topo ] && cat {tmp_path}/answer')
    return gpus.query_gpus()


def test_eight_h100_are_read_with_si_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """81559 MiB x 1048576 = 85520809984 B; 1980 MHz = 1.98e9 Hz."""
    found = _gpus(tmp_path, monkeypatch, H100)
    assert [gpu["index"] for gpu in found] == list(range(8))
    assert [gpu["uuid"] for gpu in found] == UUIDS
    expected = {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 85_520_809_984,
        "max_clock_hz": 1.98e9,
        "power_limit_w": 700.0,
        "pcie_generation": 5,
        "pcie_width": 16,
        "mig_mode": "Disabled",
        "driver": "550.54.15",
    }
    assert expected.items() <= found[0].items()
    assert gpus.query_gpu_topology() is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            PCIE_BOX,
            {
                "pcie_generation": 1,
                "max_pcie_generation": 4,
                "pcie_width": 8,
                "max_pcie_width": 16,
                "mig_mode": None,
                "uncorrected_ecc_errors": None,
            },
        ),
        (MIG, {"mig_mode": "Enabled"}),
        (
            HIDDEN,
            {
                "memory_bytes": 11_441 * 2**20,
                **dict.fromkeys(("pcie_generation", "pcie_width", "power_limit_w", "clock_hz")),
                "temperature_c": None,
            },
        ),
    ],
)
def test_what_a_driver_does_not_know_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: Facts
) -> None:
    assert expected.items() <= _gpus(tmp_path, monkeypatch, answer)[0].items()


@pytest.mark.parametrize("text", ["", "No devices were found\n", "\n\n", "a, b\n"])
def test_text_without_rows_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    assert _gpus(tmp_path, monkeypatch, text) == []


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


def test_processes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{UUIDS[0]}, 4242, python3, 71234\n{UUIDS[1]}, 77, [N/A], [N/A]\n"
    _gpus(tmp_path, monkeypatch, text)
    found = gpus.query_gpu_processes()
    assert found == [
        {"gpu_uuid": UUIDS[0], "pid": 4242, "name": "python3", "memory_bytes": 71_234 * 2**20},
        {"gpu_uuid": UUIDS[1], "pid": 77, "name": None, "memory_bytes": None},
    ]
    _gpus(tmp_path, monkeypatch, "")
    assert gpus.query_gpu_processes() == []


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


@pytest.mark.parametrize(("says", "count"), [("3", 3), ("", 0), ("a warning", 0)])
def test_torch_says_how_many_gpus_it_can_use(
    says: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\necho '{says}'\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    assert gpus.usable_gpus() == count


def test_a_gpu_that_torch_cannot_use_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that lists its GPUs does not make torch see them."""
    monkeypatch.setattr("calibrate.placement.query_gpus", lambda: [{"name": "H100"}])
    monkeypatch.setattr("calibrate.placement.usable_gpus", lambda: 0)
    environment = {"host": {"fingerprint": "0"}}
    assert place(environment, "auto", LaunchFlags(nproc_per_node=1)).device_kind == "cpu"
    with pytest.raises(UsageError, match="that torch can use"):
        place(environment, "cuda", LaunchFlags())

"""A machine without fault, of which tests change one thing; tables as files."""

import csv
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from calibrate.environment import Facts

GIB: Final = 2**30


def plain_environment(num_gpus: int = 0) -> Facts:
    return {
        "time_utc": "2026-01-02T03:04:05+00:00",
        "variables": {},
        "host": {
            "name": "node1",
            "fingerprint": "0123456789abcdef",
            "os": "Rocky Linux 9.4",
            "kernel": "5.14.0",
            "is_virtual": False,
        },
        "cpu": {
            "model": "AMD EPYC 9654",
            "usable_cores": 16,
            "logical_cores": 16,
            "quota_cores": None,
            "busy_cores": 0.2,
        },
        "memory": {"total_bytes": 64 * GIB, "available_bytes": 60 * GIB, "limit_bytes": None},
        "software": {
            "python": "3.11.7",
            "torch": "2.9.0",
            "torchvision": "0.24.0",
            "numpy": "2.1.0",
            "cuda_runtime": "12.8" if num_gpus else None,
            "cuda_driver": "550.54.15" if num_gpus else None,
            "nccl": "2.27.5" if num_gpus else None,
            "has_gloo": True,
            "git_commit": None,
        },
        "gpus": [plain_gpu(index) for index in range(num_gpus)],
        "gpu_processes": [] if num_gpus else None,
        "p2p": [[True] * num_gpus] * num_gpus if num_gpus else None,
    }


def plain_gpu(index: int) -> Facts:
    return {
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-{index}",
        "pcie_width": 16,
        "max_pcie_width": 16,
        "memory_bytes": 80 * GIB,
        "memory_used_bytes": 0,
        "compute_mode": "Default",
        "mig_mode": "Disabled",
        "uncorrected_ecc_errors": 0,
        "driver": "550.54.15",
    }


def table_of(path: Path, *rows: Mapping[str, object]) -> Path:
    """A table of these rows, packed if its name says so."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path

"""Provenance of a measurement: where and with what it ran, as plain JSON.

Torch is not imported here: a worker, which has it anyway, calls ``torch_facts`` and sends them.
"""

import hashlib
import importlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from calibrate.facts import (
    CpuFacts,
    Environment,
    GpuFacts,
    HostFacts,
    MemoryFacts,
    SoftwareFacts,
    TorchFacts,
)
from calibrate.gpus import query_gpu_processes, query_gpu_topology, query_gpus
from calibrate.host import cpu_facts, is_virtual, memory_facts, os_name
from perfmodel.documents.base import command_line
from perfmodel.units import GIB, Seconds

_CHECKOUT: Final = Path(__file__).resolve().parent.parent
# A whole environment holds passwords; only these can change what is measured.
_VARIABLES: Final = ("OMP_NUM_THREADS", "MALLOC_", "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES")
_GIT_TIMEOUT_S: Final = 10.0


def describe_environment(
    torch: TorchFacts | None = None, *, observe_s: Seconds = 0.3, load_s: Seconds = 0.0
) -> Environment:
    """Describe this node now.

    Parameters
    ----------
    torch
        What a worker said about torch; without it the versions that are installed are taken.
    observe_s
        How long to watch how busy the cores are. [s]
    load_s
        How long to keep them all busy, to see how much of that a hypervisor gives to others. [s]
    """
    cpu = cpu_facts(observe_s=observe_s, load_s=load_s)
    memory, gpus = memory_facts(), query_gpus()
    return Environment(
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        command_line=list(command_line(sys.argv)),
        variables=relevant_variables(os.environ),
        host=HostFacts(
            name=socket.gethostname(),
            fingerprint=fingerprint(cpu, memory=memory, gpus=gpus),
            os=os_name(),
            kernel=platform.release(),
            is_virtual=is_virtual(),
        ),
        cpu=cpu,
        memory=memory,
        software=_software(torch, gpus=gpus),
        gpus=gpus,
        gpu_topology=query_gpu_topology(),
        gpu_processes=query_gpu_processes(),
        p2p=None if torch is None else torch["p2p"],
    )


def fingerprint(cpu: CpuFacts, *, memory: MemoryFacts, gpus: Sequence[GpuFacts]) -> str:
    """Hash what stays the same until someone opens the case.

    Two machines of one model without GPUs share it; what software or neighbours do is left out.
    """
    parts = [
        str(cpu["model"]),
        str(cpu["logical_cores"]),
        str(round(memory["total_bytes"] / GIB)),
        *sorted(str(gpu["uuid"]) for gpu in gpus),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables that change what is measured, and nothing else."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(_VARIABLES)}


def torch_facts() -> TorchFacts:
    """Ask torch; call this in a worker only, where importing it costs nothing more."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    num_devices = int(torch.cuda.device_count())
    return TorchFacts(
        torch=str(torch.__version__),
        cuda_runtime=torch.version.cuda,
        nccl=_nccl_version(torch) if num_devices else None,
        has_gloo=bool(distributed.is_available() and distributed.is_gloo_available()),
        num_cuda_devices=num_devices,
        p2p=_p2p(torch, num_devices=num_devices) if num_devices else None,
    )


def git_commit(checkout: Path = _CHECKOUT) -> str | None:
    """Commit of a checkout, ``-dirty`` if files differ from it; None outside one."""
    if not (checkout / ".git").exists():
        return None
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
        return done.stdout.strip() or None
    return None


def _software(torch: TorchFacts | None, *, gpus: Sequence[GpuFacts]) -> SoftwareFacts:
    return SoftwareFacts(
        python=platform.python_version(),
        torch=_installed("torch") if torch is None else torch["torch"],
        torchvision=_installed("torchvision"),
        numpy=_installed("numpy"),
        cuda_runtime=None if torch is None else torch["cuda_runtime"],
        cuda_driver=gpus[0]["driver"] if gpus else None,
        nccl=None if torch is None else torch["nccl"],
        has_gloo=None if torch is None else torch["has_gloo"],
        git_commit=git_commit(),
    )


def _installed(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _nccl_version(torch: Any) -> str | None:
    with suppress(AttributeError, RuntimeError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def _p2p(torch: Any, *, num_devices: int) -> list[list[bool]]:
    devices = range(num_devices)
    return [
        [i == j or bool(torch.cuda.can_device_access_peer(i, j)) for j in devices] for i in devices
    ]

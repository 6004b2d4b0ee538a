"""Provenance of a measurement: where and with what it ran, as plain JSON.

Torch is not imported here: a worker, which has it anyway, calls ``torch_facts`` and sends them.
"""

import hashlib
import importlib
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from calibrate.gpus import (
    query_gpu_processes,
    query_gpu_topology,
    query_gpus,
    seen_by_torch,
    unfit,
    usable_gpus,
)
from calibrate.launch import (
    THREADS,
    LaunchFlags,
    Topology,
    default_ranks,
    governing,
    resolve_topology,
)
from calibrate.processes import answer_of, usable_cores
from calibrate.virtual import with_truth
from perfmodel.documents import Provenance, installed_version
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.units import GIB, Seconds

DeviceKind = Literal["cpu", "cuda", "virtual"]
#: Plain JSON; a value is None where the machine does not tell.
Facts: TypeAlias = dict[str, Any]

_CHECKOUT: Final = Path(__file__).resolve().parent.parent
# A whole environment holds passwords; only these can change what is measured.
_VARIABLES: Final = (
    *("OMP_NUM_THREADS", "MALLOC_", "GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_CUDNN_", "CUDA_"),
    *("CUDNN_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)


def describe_environment(
    truth: str | None = None, torch: Facts | None = None, *, observe_s: Seconds = 0.3
) -> Facts:
    """Describe this node now.

    Parameters
    ----------
    truth
        The file that says what a virtual device costs, if one is to be described besides.
    torch
        What a worker said about torch; without it the versions that are installed are taken.
    observe_s
        How long to watch how busy the cores are. [s]
    """
    cpu, memory, gpus = cpu_facts(observe_s=observe_s), memory_facts(), query_gpus()
    known = torch or {}
    by_uuid = {gpu["uuid"]: gpu for gpu in gpus}
    seen = [by_uuid[gpu["uuid"]] for gpu in known.get("gpus", ()) if gpu["uuid"] in by_uuid]
    found = {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "variables": relevant_variables(os.environ),
        "host": {
            "name": socket.gethostname(),
            "fingerprint": fingerprint(cpu, memory=memory, gpus=gpus),
            "os": _os_name(),
            "kernel": platform.release(),
            "is_virtual": is_virtual(),
        },
        "cpu": cpu,
        "memory": memory,
        "software": {
            "python": platform.python_version(),
            "torch": known.get("torch", installed_version("torch")),
            "torchvision": installed_version("torchvision"),
            "timm": installed_version("timm"),
            "numpy": installed_version("numpy"),
            "cuda_runtime": known.get("cuda_runtime"),
            "cuda_driver": gpus[0]["driver"] if gpus else None,
            "nccl": known.get("nccl"),
            "has_gloo": known.get("has_gloo"),
            "git_commit": git_commit(),
        },
        # Those that CUDA_VISIBLE_DEVICES shows to torch, where it has been asked.
        "gpus": seen or gpus,
        "gpu_topology": query_gpu_topology(),
        "gpu_processes": query_gpu_processes(),
        "gpu_words": known.get("words"),
        "gpu_flags": known.get("flags"),
        "p2p": known.get("p2p"),
    }
    return found if truth is None else with_truth(found, truth)


def fingerprint(cpu: Facts, *, memory: Facts, gpus: Sequence[Facts]) -> str:
    """Hash what stays the same until someone opens the case.

    Two machines of one model share it, with as many GPUs of one kind; software and neighbours are left out.
    """
    parts = [
        str(cpu["model"]),
        str(cpu["logical_cores"]),
        str(round(memory["total_bytes"] / GIB)),
        *sorted(f"{gpu['name']} {gpu['memory_bytes']}" for gpu in gpus),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables that change what is measured, and nothing else."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(_VARIABLES)}


def torch_facts() -> Facts:
    """Ask torch, in a process that is not forked later: this initialises CUDA.

    ``p2p[i][j]`` is whether GPU i reads the memory of GPU j. ``flags`` say what torch's own switches are.
    """
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    seen = seen_by_torch()
    devices = range(len(seen["gpus"]))
    nccl = None
    with suppress(AttributeError, RuntimeError):
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if devices else None
    reaches = torch.cuda.can_device_access_peer
    return {
        "torch": str(torch.__version__),
        "cuda_runtime": torch.version.cuda,
        "nccl": nccl,
        "has_gloo": bool(distributed.is_available() and distributed.is_gloo_available()),
        **seen,
        "flags": {
            "matmul_tf32": bool(torch.backends.cuda.matmul.allow_tf32),
            "cudnn_tf32": bool(torch.backends.cudnn.allow_tf32),
            "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
            "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
        }
        if devices
        else None,
        "p2p": [[i == j or bool(reaches(i, j)) for j in devices] for i in devices] or None,
    }


def git_commit(checkout: Path = _CHECKOUT) -> str | None:
    """Commit of a checkout, ``-dirty`` if files differ from it; None outside one."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return (answer_of(command, checkout) or "").strip() or None


def _os_name() -> str | None:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def processor_time() -> tuple[Seconds, Seconds]:
    """Busy time of all processors since the start of the machine, and what a hypervisor gave to other guests. [s]"""
    import psutil  # noqa: PLC0415 - an extra; what measures nothing does without

    times = psutil.cpu_times()
    busy = (getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return sum(busy), getattr(times, "steal", 0.0)


def cpu_facts(*, observe_s: Seconds) -> Facts:
    """Describe the processor; takes ``observe_s`` to see how busy it is."""
    import psutil  # noqa: PLC0415 - an extra; what measures nothing does without

    logical = psutil.cpu_count()
    busy_fraction = psutil.cpu_percent(interval=observe_s) / 100 if observe_s > 0 else None
    return {
        "model": cpu_model(_text(Path("/proc/cpuinfo")) or "") or platform.processor() or None,
        "usable_cores": usable_cores(),
        "logical_cores": logical,
        "quota_cores": quota_cores(),
        "busy_cores": None if busy_fraction is None else busy_fraction * (logical or 1),
    }


def cpu_model(cpuinfo: str) -> str | None:
    """Find the name of the processor in the text of ``/proc/cpuinfo``."""
    match = re.search(r"^(?:model name|Hardware|Processor)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else None


def is_virtual(root: Path = Path("/")) -> bool | None:
    """Whether a hypervisor shares the machine; None if the processor does not tell."""
    flags = re.search(r"^flags\s*:\s*(.+)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return None if flags is None else "hypervisor" in flags[1].split()


def memory_facts() -> Facts:
    """Describe memory; ``limit_bytes`` is that of the control group."""
    import psutil  # noqa: PLC0415 - an extra; what measures nothing does without

    memory = psutil.virtual_memory()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "limit_bytes": memory_limit_bytes(),
    }


def quota_cores(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control group may use; None without a limit."""
    limits = []
    for folder in _control_groups(root, "cpu"):
        words = (_text(folder / "cpu.max") or "").split() or [
            _text(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        if all(word.isdecimal() and int(word) for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the control group may use; None without a limit. [B]"""
    texts = [
        _text(folder / name) or ""
        for folder in _control_groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    # The first version of control groups writes nearly 2^63 where nothing is limited.
    limits = [int(text) for text in texts if text.isdecimal() and int(text) < 2**60]
    return min(limits, default=None)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those around it: each may set a limit.

    The first version has a folder per controller, the second one for all.
    """
    base = root / "sys/fs/cgroup"
    yield base
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        controllers, path = line.split(":", 2)[1:]
        if not controllers or controller in controllers.split(","):
            folder = base / controllers
            yield folder
            for part in path.split("/"):
                folder = folder if part in ("", "..") else folder / part
                yield folder


def _text(path: Path) -> str | None:
    """A small file, stripped; None if it is missing, unreadable or empty."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip() or None
    return None


# Where a measurement runs, and who made it: shared by calibration and validation.
#: Ranks that may share a core if the user asks for it: they show what a layout of more ranks costs.
_RANKS_PER_CORE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What the ranks of a campaign run on, and under."""

    topology: Topology
    device_kind: DeviceKind
    conditions: Mapping[str, str]
    """Variables of the environment of every rank."""
    fingerprint: str
    """Of this machine."""
    truth: str | None = None
    """What a virtual device costs."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of the ranks on this node, as far as torch tells."""


def chosen_conditions(environ: Mapping[str, str], *, topology: Topology) -> dict[str, str]:
    """What the ranks of a calibration run under: the user's environment, and a thread per own core."""
    own = governing(environ)
    threads = max(1, usable_cores() // topology.ranks_per_node)
    return {**own, THREADS: own.get(THREADS) or str(threads)}


def recorded_conditions(profile: MeasuredMachine) -> dict[str, str]:
    """What the ranks of a calibration ran under, whatever is set now."""
    return governing(profile.variables)


def place(
    environment: Facts,
    device: str,
    flags: LaunchFlags,
    *,
    conditions: Mapping[str, str] | None = None,
) -> Placement:
    """Which ranks run where, on which kind of device.

    Parameters
    ----------
    environment
        This machine, described.
    conditions
        Those of a calibration; default: chosen here.

    Raises
    ------
    UsageError
        If the device does not exist here or is unfit, torch is missing, or there are more ranks than devices.
    """
    if find_spec("torch") is None:
        raise UsageError(
            "calibrate: torch must be installed, got none; pip install '.[calibrate]' in the clone"
        )
    if device not in ("auto", "cpu", "cuda", "virtual"):
        raise UsageError(f"--device-kind: must be auto, cpu, cuda or virtual, got {device!r}")
    virtual = environment["virtual"] if device == "virtual" else None
    gpus = usable_gpus(device) if device in ("auto", "cuda") else ()
    device_kind: DeviceKind = "virtual" if virtual else "cuda" if gpus else "cpu"
    num_devices = virtual["devices"] if virtual else len(gpus) or usable_cores()
    topology = resolve_topology(
        os.environ,
        flags=flags,
        num_local_devices=num_devices,
        default_ranks_per_node=1
        if virtual
        else default_ranks(device_kind, num_devices=num_devices),
        allow_oversubscription=device_kind == "cpu"
        and (flags.nproc_per_node or 0) <= _RANKS_PER_CORE * num_devices,
    )
    own = gpus[: topology.ranks_per_node]
    if problem := unfit(own, query_gpus()) if own else "":
        raise UsageError(problem)
    if conditions is None:
        # Nothing is computed on a virtual device.
        one = {THREADS: "1"}
        conditions = one if virtual else chosen_conditions(os.environ, topology=topology)
    return Placement(
        topology=topology,
        device_kind=device_kind,
        conditions=conditions,
        fingerprint=environment["host"]["fingerprint"],
        truth=virtual and virtual["truth"],
        gpus=tuple(gpu["uuid"] for gpu in own if gpu["uuid"] is not None),
    )


def placement_of(
    profile: MeasuredMachine, *, num_ranks: int | None = None, where: str = "--profile"
) -> Placement:
    """Where the ranks of a calibration ran, for what is judged by it or added to it.

    ``num_ranks`` are those on this node, by default all that were calibrated; ``where`` named the profile.
    """
    environment = describe_environment(profile.truth)
    refuse_other_machine(profile, environment["host"]["fingerprint"], where=where)
    return place(
        environment,
        profile.device_kind,
        LaunchFlags(nproc_per_node=num_ranks or profile.ranks_per_node),
        conditions=recorded_conditions(profile),
    )


def refuse_other_machine(
    profile: MeasuredMachine, fingerprint: str, *, where: str = "--profile"
) -> None:
    """Raise ``CalibrationUnavailable`` unless the profile has the fingerprint of this machine."""
    found = profile.origin.fingerprint
    if found != fingerprint:
        raise CalibrationUnavailable(
            f"{where}: must describe this machine (fingerprint {fingerprint[:12]}), got "
            f"{found[:12]} ({profile.device_name}); run perfmodel calibrate here"
        )


def provenance(environment: Facts, *, seed: int) -> Provenance:
    """Who made a document, here and now."""
    software = environment["software"]
    found = Provenance.of_answer(host_fingerprint=environment["host"]["fingerprint"], seed=seed)
    versions = {name: str(value) for name, value in software.items() if value is not None}
    return found.model_copy(
        update={"git_commit": software["git_commit"], "versions": versions | found.versions}
    )

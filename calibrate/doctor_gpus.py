"""What the GPUs say about a measurement; each check is a pure function."""

from collections.abc import Callable
from typing import Final, TypeAlias

from calibrate.facts import Environment, GpuFacts
from calibrate.finding import Finding, bad, ok, warn

Check: TypeAlias = Callable[[Environment], Finding | None]

_HOT_C: Final = 80.0


def check_second_device(environment: Environment) -> Finding | None:
    """One device says nothing about communication."""
    gpus = environment["gpus"]
    cores = environment["cpu"]["usable_cores"]
    if len(gpus) > 1 or (not gpus and cores > 1):
        return None
    device = "GPU" if gpus else "CPU core"
    return warn(
        f"only one {device}",
        why="links, collectives, overlap and stragglers between devices cannot be determined; "
        "they will be assumed from data sheets",
        advice="measure a node with two or more devices too, or give the link's data sheet",
    )


def check_no_gpu(environment: Environment) -> Finding | None:
    """Without GPUs the profile describes the processor."""
    if environment["gpus"]:
        return None
    return ok("no GPU: the processor is measured, ranks talk through gloo")


def check_mixed_models(environment: Environment) -> Finding | None:
    """Different devices in one group run at the pace of the slowest."""
    names = sorted({gpu["name"] or "unknown" for gpu in environment["gpus"]})
    if not environment["gpus"]:
        return None
    if len(names) == 1:
        return ok(f"{len(environment['gpus'])} x {names[0]}")
    return bad(
        f"GPUs of {len(names)} models: {', '.join(names)}",
        why="one profile describes one kind of device; the slowest sets the pace",
        advice="choose one kind with CUDA_VISIBLE_DEVICES",
    )


def check_gpu_processes(environment: Environment) -> Finding | None:
    """Another process shares clock, memory and bandwidth."""
    processes = environment["gpu_processes"]
    if processes is None or not environment["gpus"]:
        return None
    if not processes:
        return ok("no other process on the GPUs")
    names = sorted({f"{process['name']} (pid {process['pid']})" for process in processes})
    return bad(
        f"{len(processes)} other processes on the GPUs: {', '.join(names[:3])}",
        why="they take compute, memory and bandwidth during the measurement",
        advice="end them, or choose free GPUs with CUDA_VISIBLE_DEVICES",
    )


def check_p2p(environment: Environment) -> Finding | None:
    """Without peer access GPUs copy through host memory."""
    p2p = environment["p2p"]
    if p2p is None or len(p2p) < 2:
        return None
    pairs = [(i, j) for i, row in enumerate(p2p) for j, reaches in enumerate(row) if not reaches]
    if not pairs:
        return ok("every GPU reaches every other directly")
    return warn(
        f"peer access is off for {len(pairs)} of {len(p2p) * (len(p2p) - 1)} pairs of GPUs",
        why="collectives go through host memory at a fraction of the link's speed",
        advice="check nvidia-smi topo -p2p r, IOMMU/ACS settings, and NCCL_P2P_DISABLE",
    )


def check_pcie(environment: Environment) -> Finding | None:
    """Look for narrow slots; a low generation alone may only be resting."""
    gpus = environment["gpus"]
    narrow = _where(gpus, lambda gpu: _below(gpu["pcie_width"], gpu["max_pcie_width"]))
    if narrow:
        return warn(
            f"PCIe link narrower than the device allows on {narrow}",
            why="copies between host and device run at a fraction of their speed",
            advice="reseat the card or check slot and riser; measured values stay true for it",
        )
    slow = _where(gpus, lambda gpu: _below(gpu["pcie_generation"], gpu["max_pcie_generation"]))
    return ok(f"PCIe link at a low generation on {slow}: normal while idle") if slow else None


def check_mig(environment: Environment) -> Finding | None:
    """Look for slices: each is another device, and they cannot talk over NVLink."""
    enabled = _where(environment["gpus"], lambda gpu: gpu["mig_mode"] == "Enabled")
    if not enabled:
        return None
    return bad(
        f"MIG is on for {enabled}",
        why="a slice has a fraction of the device, and no peer access",
        advice="ask the administrator for whole GPUs; a profile of a slice is true for that slice",
    )


def check_temperature(environment: Environment) -> Finding | None:
    """Look for hot devices, which lower their clock during the measurement."""
    hot = _where(environment["gpus"], lambda gpu: (gpu["temperature_c"] or 0) >= _HOT_C)
    if not hot:
        return None
    return warn(
        f"{hot} at {_HOT_C:.0f} C or more before the measurement",
        why="the clock drops under load, so early probes look faster than training",
        advice="let it cool, check fans and airflow",
    )


def check_ecc(environment: Environment) -> Finding | None:
    """Memory errors cost time and end jobs."""
    faulty = _where(environment["gpus"], lambda gpu: bool(gpu["uncorrected_ecc_errors"]))
    if not faulty:
        return None
    return bad(
        f"uncorrected memory errors on {faulty}",
        why="jobs on it will crash, and retired pages slow it",
        advice="drain the node and run the vendor's diagnostics (dcgmi diag -r 3)",
    )


def check_persistence(environment: Environment) -> Finding | None:
    """Without persistence the driver starts anew for each process."""
    off = _where(environment["gpus"], lambda gpu: gpu["persistence_mode"] == "Disabled")
    if not off:
        return None
    return warn(
        f"persistence mode is off on {off}",
        why="start-up takes seconds longer and clocks begin cold",
        advice="sudo nvidia-smi -pm 1",
    )


def check_compute_mode(environment: Environment) -> Finding | None:
    """Look for devices that nobody may use."""
    closed = _where(environment["gpus"], lambda gpu: gpu["compute_mode"] == "Prohibited")
    if not closed:
        return None
    return bad(
        f"compute mode is Prohibited on {closed}",
        why="no process may compute there",
        advice="sudo nvidia-smi -c DEFAULT",
    )


GPU_CHECKS: Final[tuple[Check, ...]] = (
    check_no_gpu,
    check_mixed_models,
    check_second_device,
    check_gpu_processes,
    check_p2p,
    check_pcie,
    check_mig,
    check_temperature,
    check_ecc,
    check_persistence,
    check_compute_mode,
)


def _where(gpus: list[GpuFacts], applies: Callable[[GpuFacts], bool]) -> str:
    found = [str(gpu["index"]) for gpu in gpus if applies(gpu)]
    return f"GPU {', '.join(found)}" if found else ""


def _below(value: int | None, limit: int | None) -> bool:
    return value is not None and limit is not None and value < limit

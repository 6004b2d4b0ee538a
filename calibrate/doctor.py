"""Is this machine fit to be measured? The answer is a value; nothing is printed or changed."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from calibrate.environment import Environment, GpuFacts
from calibrate.topology import default_ranks
from perfmodel.documents.base import QUIET
from perfmodel.units import GIB, format_bytes

Severity: TypeAlias = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact that bears on a measurement.

    Attributes
    ----------
    severity
        ``ok`` is fine, ``warn`` widens the uncertainty, ``bad`` makes numbers that mislead.
    what
        The fact, with its value.
    why
        How it spoils a measurement; empty if it does not.
    advice
        What to do; empty if there is nothing to do.
    """

    severity: Severity
    what: str
    why: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        if self.severity != "ok" and not (self.why and self.advice):
            raise ValueError(f"why and advice must be given with {self.severity!r}, got neither")


def ok(what: str) -> Finding:
    """Report what was checked and is fine."""
    return Finding(severity="ok", what=what)


def warn(what: str, *, why: str, advice: str) -> Finding:
    """Report what widens the uncertainty."""
    return Finding(severity="warn", what=what, why=why, advice=advice)


def bad(what: str, *, why: str, advice: str) -> Finding:
    """Report what makes numbers misleading."""
    return Finding(severity="bad", what=what, why=why, advice=advice)


Check: TypeAlias = Callable[[Environment], Finding | None]

_BUSY_WARN: Final = 0.10
_BUSY_BAD: Final = 0.40
_STEAL_BAD: Final = 0.20
_MIN_AVAILABLE_BYTES: Final = 2 * GIB
_MIN_AVAILABLE_FRACTION: Final = 0.10
_SWAP_FRACTION: Final = 0.01


def check_busy_cores(environment: Environment) -> Finding | None:
    """Other work takes cores away and makes times scatter."""
    cpu = environment["cpu"]
    busy, cores = cpu["busy_cores"], cpu["logical_cores"] or cpu["usable_cores"]
    if busy is None:
        return None
    what = f"{busy:.1f} of {cores} cores busy before the measurement"
    if busy <= _BUSY_WARN * cores:
        return ok(what)
    report = bad if busy > _BUSY_BAD * cores else warn
    why = "ranks wait for cores, and every step waits for the slowest rank"
    return report(what, why=why, advice="stop other jobs, or ask for the node exclusively")


def check_load(environment: Environment) -> Finding | None:
    """Look for a long run queue: the quiet of this moment would not last."""
    cpu = environment["cpu"]
    load, cores = cpu["load_average_1min"], cpu["logical_cores"] or cpu["usable_cores"]
    if load is None or load <= cores:
        return None
    return warn(
        f"load average {load:.1f} on {cores} cores",
        why="more processes want to run than there are cores",
        advice="wait until it is below the number of cores",
    )


def check_governor(environment: Environment) -> Finding | None:
    """Look for a governor that changes the clock during the measurement."""
    governor = environment["cpu"]["governor"]
    if governor is None:
        return None
    if governor == "performance":
        return ok("CPU governor performance")
    return warn(
        f"CPU governor {governor}",
        why="the clock follows the load, so short probes run slower than long steps",
        advice="sudo cpupower frequency-set -g performance",
    )


def check_quota(environment: Environment) -> Finding | None:
    """Look for a quota, which stops all threads for part of each period."""
    cpu = environment["cpu"]
    quota = cpu["quota_cores"]
    if quota is None or quota >= cpu["usable_cores"]:
        return None
    return bad(
        f"control group allows {quota:.1f} of {cpu['usable_cores']} usable cores",
        why="the kernel freezes all ranks together for tens of milliseconds",
        advice=f"use at most {max(1, int(quota))} threads, or lift the container's CPU limit",
    )


def check_smt(environment: Environment) -> Finding | None:
    """Two hardware threads on one core are not two cores."""
    threads = environment["cpu"]["threads_per_core"]
    if threads is None or threads <= 1:
        return None
    return warn(
        f"{threads} hardware threads per core",
        why="ranks that share a core slow each other, so CPU ranks do not scale evenly",
        advice="keep CPU ranks x OMP_NUM_THREADS <= physical cores"
        f" ({environment['cpu']['physical_cores']})",
    )


def check_virtual(environment: Environment) -> Finding | None:
    """Neighbours on the same host are seen only as far as the hypervisor tells."""
    virtual = environment["host"]["is_virtual"]
    if virtual is None:
        return None
    if not virtual:
        return ok("no hypervisor")
    return warn(
        "virtual machine",
        why="the host may give cores to neighbours; steal time looks like a straggler",
        advice="prefer a dedicated host; otherwise measure longer and at two times of day",
    )


def check_steal(environment: Environment) -> Finding | None:
    """Look for neighbours at work: the kernel counts what they take."""
    steal = environment["cpu"]["steal"]
    if steal is None:
        return None
    share = f"{100 * steal:.0f} % of the processor time"
    what = f"{share} goes to other guests of the host when all cores work"
    if steal <= QUIET:
        return ok(what)
    report = bad if steal > _STEAL_BAD else warn
    why = "steps, collectives and probes stop at any moment for as long as the neighbours want"
    advice = "wait for a quieter hour, or take a dedicated host"
    return report(what, why=why, advice=advice)


def check_memory(environment: Environment) -> Finding | None:
    """Too little memory ends in swapping or a killed rank."""
    memory = environment["memory"]
    total = min(memory["total_bytes"], memory["limit_bytes"] or memory["total_bytes"])
    available = min(memory["available_bytes"], total)
    what = f"{format_bytes(available)} of {format_bytes(total)} memory available"
    if available >= max(_MIN_AVAILABLE_BYTES, _MIN_AVAILABLE_FRACTION * total):
        return ok(what)
    return bad(
        what,
        why="ranks may swap or be killed",
        advice="end what holds memory, or start fewer ranks",
    )


def check_swap(environment: Environment) -> Finding | None:
    """Memory in swap returns slowly, and at any time."""
    memory = environment["memory"]
    used = memory["swap_used_bytes"]
    if used is None or used < _SWAP_FRACTION * memory["total_bytes"]:
        return None
    return warn(
        f"{format_bytes(used)} in swap",
        why="a page that comes back from disk stalls a step",
        advice="sudo swapoff -a && sudo swapon -a once memory is free",
    )


def check_torch(environment: Environment) -> Finding | None:
    """Without torch nothing can be measured."""
    version = environment["software"]["torch"]
    if version is not None:
        return ok(f"torch {version}")
    return bad(
        "torch is not installed",
        why="measuring runs real training",
        advice="pip install 'perfmodel[calibrate]', or use a profile from another machine",
    )


def check_torchvision(environment: Environment) -> Finding | None:
    """Look for torchvision, where some reference models come from."""
    software = environment["software"]
    if software["torch"] is None or software["torchvision"] is not None:
        return None
    return warn(
        "torchvision is not installed",
        why="its reference models (ResNet and others) cannot be measured",
        advice="install the torchvision that belongs to this torch",
    )


def check_gloo(environment: Environment) -> Finding | None:
    """CPU ranks talk through gloo."""
    if environment["software"]["has_gloo"] is not False or environment["gpus"]:
        return None
    return bad(
        "torch was built without gloo",
        why="CPU ranks have no other way to communicate",
        advice="install a torch build with gloo",
    )


HOST_CHECKS: Final[tuple[Check, ...]] = (
    check_busy_cores,
    check_load,
    check_governor,
    check_quota,
    check_smt,
    check_virtual,
    check_steal,
    check_memory,
    check_swap,
    check_torch,
    check_torchvision,
    check_gloo,
)


GpuCheck: TypeAlias = Callable[[Environment], Finding | None]

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
    """Without persistence the driver starts again for each process."""
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


GPU_CHECKS: Final[tuple[GpuCheck, ...]] = (
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


_ORDER: Final[tuple[Severity, ...]] = ("bad", "warn", "ok")
_LABEL_WIDTH: Final = 10
_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Findings, the gravest first."""

    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        """The gravest severity; ``ok`` without findings."""
        return self.findings[0].severity if self.findings else "ok"


def diagnose(environment: Environment, *, num_ranks: int | None = None) -> Diagnosis:
    """Judge whether measurements in this environment can be trusted.

    Parameters
    ----------
    num_ranks
        Ranks that will run on this node; if not given, as many as ``default_ranks`` says.
    """
    if num_ranks is None:
        num_ranks = len(environment["gpus"]) or default_ranks(
            "cpu", num_devices=environment["cpu"]["usable_cores"]
        )
    found = [check(environment) for check in (*HOST_CHECKS, *GPU_CHECKS)]
    found.append(_check_cores(environment, num_ranks=num_ranks))
    findings = [finding for finding in found if finding is not None]
    findings.sort(key=lambda finding: _ORDER.index(finding.severity))
    return Diagnosis(findings=tuple(findings))


def render(diagnosis: Diagnosis, *, environment: Environment) -> str:
    """Lay facts and findings out as one block of plain text that can be pasted into a ticket."""
    facts = [f"{label:<{_LABEL_WIDTH}}{text}" for label, text in _facts(environment)]
    findings = [line for finding in diagnosis.findings for line in _finding_lines(finding)]
    return "\n".join([*facts, "", *findings, "", _verdict(diagnosis)])


def _check_cores(environment: Environment, *, num_ranks: int) -> Finding | None:
    cores = environment["cpu"]["usable_cores"]
    if num_ranks <= cores:
        return ok(f"{cores} usable cores for {num_ranks} ranks")
    return bad(
        f"{cores} usable cores for {num_ranks} ranks",
        why="each rank needs a core of its own to feed its device; they would take turns",
        advice="start fewer ranks, or ask for more cores (Slurm: --cpus-per-task)",
    )


def _facts(environment: Environment) -> Iterator[tuple[str, str]]:
    host, software = environment["host"], environment["software"]
    yield "host", f"{host['name']} [{host['fingerprint'][:12]}], {environment['time_utc']}"
    yield "system", f"{host['os'] or _UNKNOWN}, kernel {host['kernel']}"
    yield "CPU", _cpu_line(environment)
    yield "memory", format_bytes(environment["memory"]["total_bytes"])
    for (name, memory_bytes), count in _gpu_models(environment).items():
        yield "GPU", f"{count} x {name}, {format_bytes(memory_bytes) if memory_bytes else _UNKNOWN}"
    if paths := _path_summary(environment):
        yield "topology", paths
    left_out = ("has_gloo", "git_commit")
    known = [f"{name} {version}" for name, version in software.items() if version]
    known = [text for text in known if not text.startswith(left_out)]
    yield "software", ", ".join(known)
    yield "commit", software["git_commit"] or _UNKNOWN
    if environment["variables"]:
        yield "variables", " ".join(f"{k}={v}" for k, v in environment["variables"].items())


def _cpu_line(environment: Environment) -> str:
    cpu = environment["cpu"]
    threads = (
        f", {cpu['threads_per_core']} threads per core"
        if (cpu["threads_per_core"] or 1) > 1
        else ""
    )
    return (
        f"{cpu['model'] or _UNKNOWN}, {cpu['usable_cores']} of "
        f"{cpu['logical_cores'] or _UNKNOWN} cores usable{threads}"
    )


def _gpu_models(environment: Environment) -> Counter[tuple[str, int | None]]:
    return Counter((gpu["name"] or _UNKNOWN, gpu["memory_bytes"]) for gpu in environment["gpus"])


def _path_summary(environment: Environment) -> str:
    topology = environment["gpu_topology"]
    if topology is None:
        return ""
    gpus = [name for name in topology["paths"] if name.startswith("GPU")]
    words = Counter(
        topology["paths"][a].get(b, "?") for i, a in enumerate(gpus) for b in gpus[i + 1 :]
    )
    return ", ".join(f"{count} pairs {word}" for word, count in words.most_common())


def _finding_lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.severity:<6}{finding.what}"
    if finding.why:
        yield f"      why: {finding.why}"
    if finding.advice:
        yield f"      do:  {finding.advice}"


def _verdict(diagnosis: Diagnosis) -> str:
    count = Counter(finding.severity for finding in diagnosis.findings)
    numbers = f"{count['bad']} bad, {count['warn']} warn, {count['ok']} ok"
    return {
        "bad": f"Not fit to be measured: {numbers}",
        "warn": f"Fit to be measured, with wider uncertainty: {numbers}",
        "ok": f"Fit to be measured: {numbers}",
    }[diagnosis.severity]

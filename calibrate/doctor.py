"""Is this machine fit to be measured? The answer is a value; nothing is printed or changed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from calibrate.environment import Facts
from calibrate.gpus import unfit, users
from calibrate.launch import default_ranks
from perfmodel.units import GIB, format_bytes

Severity: TypeAlias = Literal["ok", "warn", "bad"]
_ORDER: Final[tuple[Severity, ...]] = ("bad", "warn", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact that bears on a measurement."""

    severity: Severity
    """``ok`` is fine, ``warn`` widens the uncertainty, ``bad`` makes numbers that mislead."""
    what: str
    """The fact, with its value."""
    why: str = ""
    """How it spoils a measurement; empty if it does not."""
    advice: str = ""


def _ok(what: str) -> Finding:
    return Finding("ok", what)


def diagnose(environment: Facts) -> tuple[Finding, ...]:
    """Judge whether measurements in this environment can be trusted; the gravest finding first.

    As many ranks will run on this node as ``default_ranks`` says.
    """
    cores = environment["cpu"]["usable_cores"]
    num_ranks = len(environment["gpus"]) or default_ranks("cpu", num_devices=cores)
    what = f"{cores} usable cores for {num_ranks} ranks"
    ranks = _ok(what)
    if num_ranks > cores:
        ranks = Finding(
            "bad",
            what,
            "each rank needs a core of its own to feed its device; they would take turns",
            "start fewer ranks, or ask for more cores (Slurm: --cpus-per-task)",
        )
    parts = (_processor, _memory, _software, _devices, _gpus)
    findings = [*(finding for part in parts for finding in part(environment)), ranks]
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))


def _processor(environment: Facts) -> Iterator[Finding]:
    cpu, is_virtual = environment["cpu"], environment["host"]["is_virtual"]
    usable = cpu["usable_cores"]
    cores = cpu["logical_cores"] or usable
    if (busy := cpu["busy_cores"]) is not None:
        yield Finding(
            "bad" if busy > 0.40 * cores else "warn" if busy > 0.10 * cores else "ok",
            f"{busy:.1f} of {cores} cores busy before the measurement",
            "ranks wait for cores, and every step waits for the slowest rank",
            "stop other jobs, or ask for the node exclusively",
        )
    if (quota := cpu["quota_cores"]) is not None and quota < usable:
        yield Finding(
            "bad",
            f"control group allows {quota:.1f} of {usable} usable cores",
            "the kernel freezes all ranks together for tens of milliseconds",
            f"use at most {max(1, int(quota))} threads, or lift the container's CPU limit",
        )
    if is_virtual is not None:
        yield Finding(
            "warn" if is_virtual else "ok",
            "virtual machine" if is_virtual else "no hypervisor",
            "the host may give cores to neighbours; steal time looks like a straggler",
            "prefer a dedicated host; otherwise measure longer and at two times of day",
        )


def _memory(environment: Facts) -> Iterator[Finding]:
    memory = environment["memory"]
    total = min(memory["total_bytes"], memory["limit_bytes"] or memory["total_bytes"])
    available = min(memory["available_bytes"], total)
    yield Finding(
        "ok" if available >= max(2 * GIB, 0.10 * total) else "bad",
        f"{format_bytes(available)} of {format_bytes(total)} memory available",
        "ranks may swap or be killed",
        "end what holds memory, or start fewer ranks",
    )


def _software(environment: Facts) -> Iterator[Finding]:
    software = environment["software"]
    if software["torch"] is None:
        yield Finding(
            "bad",
            "torch is not installed",
            "measuring runs real training",
            "pip install '.[calibrate]' in the clone, or use a profile from another machine",
        )
        return
    yield _ok(f"torch {software['torch']}")
    if software["torchvision"] is None:
        yield Finding(
            "warn",
            "torchvision is not installed",
            "its reference models (ResNet and others) cannot be measured",
            "install the torchvision that belongs to this torch",
        )
    if software["has_gloo"] is False and not environment["gpus"]:
        yield Finding(
            "bad",
            "torch was built without gloo",
            "CPU ranks have no other way to communicate",
            "install a torch build with gloo",
        )


def _devices(environment: Facts) -> Iterator[Finding]:
    gpus, processes = environment["gpus"], environment["gpu_processes"]
    names = sorted({gpu["name"] or "unknown" for gpu in gpus})
    # What refuses a calibration says why and what to do.
    if problem := environment.get("gpu_problem") or unfit(gpus, gpus):
        what, _, advice = problem.rpartition("; ")
        yield Finding("bad", what, "perfmodel calibrate refuses it", advice)
    elif gpus:
        yield _ok(f"{len(gpus)} x {names[0]}")
    else:
        yield _ok("no GPU: the processor is measured, ranks talk through gloo")
    for fault in environment.get("gpu_faults", ()):
        yield Finding(
            "warn",
            fault,
            "the GPU is slower than it is in good order, or about to fail",
            "mend cooling, power or card before measuring; dmesg and nvidia-smi -q say more",
        )
    if (len(gpus) or environment["cpu"]["usable_cores"]) <= 1:
        yield Finding(
            "warn",
            f"only one {'GPU' if gpus else 'CPU core'}",
            "links, collectives, overlap and stragglers between devices cannot be determined; "
            "they will be assumed from data sheets",
            "measure a node with two or more devices too, or give the link's data sheet",
        )
    if gpus and processes is not None:
        used = dict(users(gpus, processes))
        busy = [f"GPU {gpu['index']}: {used[gpu['uuid']]}" for gpu in gpus if gpu["uuid"] in used]
        yield Finding(
            "bad" if busy else "ok",
            f"other processes on {len(busy)} GPUs: {', '.join(busy[:3])}"
            if busy
            else "no other process on the GPUs",
            "they take compute, memory and bandwidth during the measurement",
            "end them, or choose free GPUs with CUDA_VISIBLE_DEVICES",
        )
    p2p = environment["p2p"] or ()
    if len(p2p) > 1:
        apart = sum(not reaches for row in p2p for reaches in row)
        yield Finding(
            "warn" if apart else "ok",
            f"peer access is off for {apart} of {len(p2p) * (len(p2p) - 1)} pairs of GPUs"
            if apart
            else "every GPU reaches every other directly",
            "collectives go through host memory at a fraction of the link's speed",
            "check nvidia-smi topo -p2p r, IOMMU/ACS settings, and NCCL_P2P_DISABLE",
        )


def _gpus(environment: Facts) -> Iterator[Finding]:
    """Faults of single GPUs."""
    gpus = environment["gpus"]
    if found := [g for g in gpus if 0 < (g["pcie_width"] or 0) < (g["max_pcie_width"] or 0)]:
        yield Finding(
            "warn",
            f"PCIe link narrower than the device allows on {_named(found)}",
            "copies between host and device run at a fraction of their speed",
            "reseat the card or check slot and riser; measured values stay true for it",
        )
    if found := [gpu for gpu in gpus if gpu["uncorrected_ecc_errors"]]:
        yield Finding(
            "bad",
            f"uncorrected memory errors on {_named(found)}",
            "jobs on it will crash, and retired pages slow it",
            "drain the node and run the vendor's diagnostics (dcgmi diag -r 3)",
        )
    if found := [gpu for gpu in gpus if gpu["compute_mode"] == "Prohibited"]:
        yield Finding(
            "bad",
            f"compute mode is Prohibited on {_named(found)}",
            "no process may compute there",
            "sudo nvidia-smi -c DEFAULT",
        )


def _named(gpus: list[Facts]) -> str:
    return f"GPU {', '.join(str(gpu['index']) for gpu in gpus)}"


_UNKNOWN: Final = "unknown"


def render(findings: tuple[Finding, ...], *, environment: Facts) -> str:
    """Lay facts and findings out as one block of plain text that can be pasted into a ticket."""
    lines = [f"{label:<10}{text}" for label, text in _facts(environment)] + [""]
    for finding in findings:
        lines.append(f"{finding.severity:<6}{finding.what}")
        if finding.severity != "ok":
            lines += [f"      why: {finding.why}", f"      do:  {finding.advice}"]
    count = Counter(finding.severity for finding in findings)
    verdict = {
        "bad": "Not fit to be measured",
        "warn": "Fit to be measured, with wider uncertainty",
        "ok": "Fit to be measured",
    }[findings[0].severity]
    numbers = ", ".join(f"{count[severity]} {severity}" for severity in _ORDER)
    return "\n".join([*lines, "", f"{verdict}: {numbers}"])


def _facts(environment: Facts) -> Iterator[tuple[str, str]]:
    host, software, cpu = environment["host"], environment["software"], environment["cpu"]
    yield "host", f"{host['name']} [{host['fingerprint'][:12]}], {environment['time_utc']}"
    yield "system", f"{host['os'] or _UNKNOWN}, kernel {host['kernel']}"
    cores = f"{cpu['usable_cores']} of {cpu['logical_cores'] or _UNKNOWN} cores usable"
    yield "CPU", f"{cpu['model'] or _UNKNOWN}, {cores}"
    yield "memory", format_bytes(environment["memory"]["total_bytes"])
    models = Counter((gpu["name"] or _UNKNOWN, gpu["memory_bytes"]) for gpu in environment["gpus"])
    for (name, size), count in models.items():
        yield "GPU", f"{count} x {name}, {format_bytes(size) if size else _UNKNOWN}"
    known = [
        f"{name} {version}"
        for name, version in software.items()
        if version and name not in ("has_gloo", "git_commit")
    ]
    yield "software", ", ".join(known)
    yield "commit", software["git_commit"] or _UNKNOWN
    if environment["variables"]:
        yield "variables", " ".join(f"{k}={v}" for k, v in environment["variables"].items())

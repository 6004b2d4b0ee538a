"""Is this machine fit to be measured? The answer is a value; nothing is printed or changed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from calibrate.doctor_gpus import GPU_CHECKS
from calibrate.doctor_host import HOST_CHECKS
from calibrate.facts import Environment
from calibrate.finding import Finding, Severity, bad, ok
from calibrate.topology import default_ranks
from perfmodel.units import format_bytes

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
        "warn": f"Fit to be measured, with wider doubt: {numbers}",
        "ok": f"Fit to be measured: {numbers}",
    }[diagnosis.severity]

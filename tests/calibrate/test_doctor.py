"""One fault at a time: the doctor sees it, says why it matters, and what to do."""

from collections.abc import Callable

import pytest

from calibrate.doctor import Finding, Severity, diagnose, render
from calibrate.environment import Facts
from tests.calibrate.samples import GIB, plain_environment

Change = Callable[[Facts], object]


def without_gpus(environment: Facts, part: str, **facts: object) -> None:
    environment.update({"gpus": [], "gpu_processes": None, "p2p": None})
    environment[part].update(facts)


ONE_CORE = {"usable_cores": 1, "logical_cores": 1, "busy_cores": 0.0}
HELD = {"gpu_uuid": "GPU-0", "pid": 42, "name": "python3", "memory_bytes": GIB}
FAULTS: list[tuple[Change, Severity, str]] = [
    (lambda e: e["cpu"].update({"busy_cores": 3.0}), "warn", "3.0 of 16 cores busy"),
    (lambda e: e["cpu"].update({"busy_cores": 9.0}), "bad", "9.0 of 16 cores busy"),
    (lambda e: e["cpu"].update({"quota_cores": 2.5}), "bad", "allows 2.5 of 16 usable cores"),
    (lambda e: e["cpu"].update({"usable_cores": 2}), "bad", "2 usable cores for 4 ranks"),
    (lambda e: e["host"].update({"is_virtual": True}), "warn", "virtual machine"),
    (lambda e: e["memory"].update({"available_bytes": GIB}), "bad", "1 GiB of 64 GiB memory"),
    (lambda e: e["memory"].update({"limit_bytes": GIB}), "bad", "1 GiB of 1 GiB memory"),
    (lambda e: e["software"].update({"torch": None}), "bad", "torch is not installed"),
    (lambda e: e["software"].update({"torchvision": None}), "warn", "torchvision is not installed"),
    (
        lambda e: e["gpus"][1].update({"name": "NVIDIA A100"}),
        "bad",
        "of one kind, got 3 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100",
    ),
    (lambda e: e.update({"gpus": e["gpus"][:1]}), "warn", "only one GPU"),
    (lambda e: e.update({"p2p": [[True, False], [True, True]]}), "warn", "off for 1 of 2 pairs"),
    (
        lambda e: e["gpus"][2].update({"pcie_width": 8}),
        "warn",
        "narrower than the device allows on GPU 2",
    ),
    (
        lambda e: e["gpus"][0].update({"mig_mode": "Enabled"}),
        "bad",
        "must be whole, got NVIDIA H100",
    ),
    (lambda e: e.update({"gpu_problem": "torch: sees none; do it"}), "bad", "torch: sees none"),
    (lambda e: e.update({"gpu_faults": ["Xid 79 on GPU 0"]}), "warn", "Xid 79 on GPU 0"),
    (lambda e: e["gpus"][2].update({"memory_used_bytes": 9 * GIB}), "bad", "GPU 2: 9 GiB held by"),
    (lambda e: e["gpus"][3].update({"uncorrected_ecc_errors": 2}), "bad", "errors on GPU 3"),
    (lambda e: e["gpus"][1].update({"compute_mode": "Prohibited"}), "bad", "Prohibited on GPU 1"),
    (lambda e: e["gpu_processes"].append(HELD), "bad", "GPU 0: python3 (pid 42) with 1 GiB"),
    (lambda e: without_gpus(e, "software", has_gloo=False), "bad", "without gloo"),
    (lambda e: without_gpus(e, "cpu", **ONE_CORE), "warn", "only one CPU core"),
]


def _texts(findings: tuple[Finding, ...], severity: Severity) -> str:
    return "\n".join(finding.what for finding in findings if finding.severity == severity)


@pytest.mark.parametrize(("change", "severity", "words"), FAULTS, ids=[f[2] for f in FAULTS])
def test_a_fault_is_seen_and_is_the_only_one(
    change: Change, severity: Severity, words: str
) -> None:
    environment = plain_environment(num_gpus=4)
    change(environment)
    diagnosis = diagnose(environment)
    assert words in _texts(diagnosis, severity)
    faults = [finding for finding in diagnosis if finding.severity != "ok"]
    assert len(faults) == (severity != "ok")
    assert all(finding.why and finding.advice for finding in faults)


def test_an_environment_of_unknowns_is_no_fault() -> None:
    environment = plain_environment(num_gpus=2)
    environment["cpu"].update({"logical_cores": None, "busy_cores": None})
    environment["host"]["is_virtual"] = None
    environment.update({"gpu_processes": None, "p2p": None})
    known = ("index", "name", "uuid", "memory_bytes", "driver")
    for gpu in environment["gpus"]:
        gpu.update({name: None for name in gpu if name not in known})
    assert {finding.severity for finding in diagnose(environment)} == {"ok"}


def test_the_block_can_be_pasted() -> None:
    environment = plain_environment(num_gpus=2)
    environment["variables"] = {"NCCL_DEBUG": "INFO"}
    environment["host"]["is_virtual"] = True
    block = render(diagnose(environment), environment=environment)
    for line in (
        "host      node1 [0123456789ab], 2026-01-02T03:04:05+00:00",
        "CPU       AMD EPYC 9654, 16 of 16 cores usable",
        "GPU       2 x NVIDIA H100 80GB HBM3, 80 GiB",
        "variables NCCL_DEBUG=INFO",
        "warn  virtual machine",
        "      why: the host may give cores to neighbours; steal time looks like a straggler",
        "Fit to be measured, with wider uncertainty: 0 bad, 1 warn, 7 ok",
    ):
        assert line in block.splitlines()

"""Provenance: complete, plain JSON, and silent about what is none of its business."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.environment import (
    Facts,
    chosen_conditions,
    cpu_model,
    fingerprint,
    git_commit,
    is_virtual,
    memory_limit_bytes,
    quota_cores,
    recorded_conditions,
    relevant_variables,
)
from calibrate.launch import worker_environ
from tests.calibrate.played import ALONE
from tests.calibrate.samples import GIB, plain_environment, plain_gpu
from tests.existing import existing
from tests.perfmodel.profiles import Machine, profile


@pytest.mark.parametrize(
    "does",
    [
        "from calibrate.environment import describe_environment as d; d(observe_s=0)",
        "import validate.validate",
    ],
)
def test_neither_a_description_nor_the_judge_imports_torch(does: str) -> None:
    code = f"import sys; {does}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_variables_that_matter_are_kept() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "HOME": "/root",
    }
    assert list(relevant_variables(environ)) == [
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
    ]


def _print_of(environment: Facts) -> str:
    return fingerprint(environment["cpu"], memory=environment["memory"], gpus=environment["gpus"])


def test_the_fingerprint_ignores_load_software_and_the_order_of_gpus() -> None:
    one, other = plain_environment(), plain_environment()
    one["gpus"] = [plain_gpu(0), plain_gpu(1)]
    other["gpus"] = [plain_gpu(1), plain_gpu(0)]
    other["cpu"]["busy_cores"] = 3.0
    other["cpu"]["usable_cores"] = 1
    other["memory"]["total_bytes"] += 10_000_000
    other["gpus"][0]["driver"] = "999"
    assert _print_of(one) == _print_of(other)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("cpu", {"model": "another"}),
        ("cpu", {"logical_cores": 99}),
        ("memory", {"total_bytes": 72 * GIB}),
        (None, {"gpus": [plain_gpu(0)]}),
    ],
)
def test_the_fingerprint_sees_other_hardware(part: str | None, change: Facts) -> None:
    one, other = plain_environment(), plain_environment()
    (other if part is None else other[part]).update(change)
    assert _print_of(one) != _print_of(other)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores", "size_bytes"),
    [
        (
            # 300000 us in 100000 us = 3 cores at the outer level; the inner one allows 3.5.
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/pod/box/cpu.max": "350000 100000\n",
                "sys/fs/cgroup/pod/memory.max": "max\n",
                "sys/fs/cgroup/pod/box/memory.max": "1073741824\n",
            },
            3.0,
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            1.5,
            None,
        ),
        *(
            ({"sys/fs/cgroup/cpu.max": text}, None, None)
            for text in ("max 100000", "nonsense", "100000 0", "nan 100000")
        ),
    ],
)
def test_limits_of_both_kinds_of_control_groups_are_read_at_every_level(
    tmp_path: Path, files: dict[str, str], cores: float | None, size_bytes: int | None
) -> None:
    root = _write(tmp_path, files)
    assert (quota_cores(root), memory_limit_bytes(root)) == (cores, size_bytes)


def test_the_processor_is_named() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: AMD EPYC 9654\n") == "AMD EPYC 9654"
    assert cpu_model("") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [("flags\t\t: fpu hypervisor vme", True), ("flags : fpu vme", False), ("Features : fp", None)],
)
def test_a_hypervisor_is_seen(tmp_path: Path, *, text: str, answer: bool | None) -> None:
    assert is_virtual(_write(tmp_path, {"proc/cpuinfo": text})) is answer


def test_the_commit_of_a_checkout_is_told_with_its_changes(tmp_path: Path) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path))
    assert git_commit(tmp_path) is None
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "--no-verify", "-m", "one"], check=True)
    commit = existing(git_commit(tmp_path))
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"


# Ranks are judged under the conditions that they were calibrated under.
def test_threads_are_shared_among_ranks_and_all_else_is_the_users() -> None:
    cores = len(os.sched_getaffinity(0))
    chosen = chosen_conditions({}, topology=ALONE)
    assert chosen == {"OMP_NUM_THREADS": str(max(1, cores // 2))}
    given = {"OMP_NUM_THREADS": "7", "MALLOC_ARENA_MAX": "1"}
    assert chosen_conditions({**given, "HOME": "/root"}, topology=ALONE) == given


def test_a_validation_repeats_what_its_calibration_ran_under() -> None:
    variables = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"}
    found = replace(profile(Machine()), environment={"variables": variables})
    now = {"OMP_NUM_THREADS": "2", "MALLOC_TOP_PAD_": "1", "HOME": "/root", "NCCL_ALGO": "Tree"}
    environ = worker_environ(recorded_conditions(found), now)
    expected = {"OMP_NUM_THREADS": "1", "HOME": "/root", "NCCL_ALGO": "Tree"}
    assert expected.items() <= environ.items()
    assert "MALLOC_TOP_PAD_" not in environ

"""Ranks are judged under the conditions that they were calibrated under."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from calibrate.launch import worker_environ
from calibrate.placement import (
    KEPT_MEMORY,
    chosen_conditions,
    keeps_memory,
    recorded_conditions,
    under,
)
from tests.calibrate.played import ALONE
from tests.perfmodel.profiles import Machine, profile

#: A step of a training: blocks of which the larger one is beyond what glibc takes from its heap.
_STEPS = """
import resource
def step():
    made = [b"x" * size for size in (1_000_000, 64_000_000)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(), step()
before = step()
print(step() - before)
"""


def test_threads_are_shared_among_ranks_unless_the_user_decided() -> None:
    cores = len(os.sched_getaffinity(0))
    chosen = chosen_conditions({}, topology=ALONE, device_kind="cuda")
    assert chosen == {"OMP_NUM_THREADS": str(max(1, cores // 2))}
    given = {"OMP_NUM_THREADS": "7", "HOME": "/root"}
    assert chosen_conditions(given, topology=ALONE, device_kind="cuda") == {"OMP_NUM_THREADS": "7"}


def test_memory_is_kept_on_a_cpu_unless_the_user_decided() -> None:
    chosen = chosen_conditions({}, topology=ALONE, device_kind="cpu")
    assert KEPT_MEMORY.items() <= chosen.items()
    given = {"MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    assert chosen_conditions(given, topology=ALONE, device_kind="cpu") == given
    arenas = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    assert chosen_conditions(arenas, topology=ALONE, device_kind="cpu") == {**arenas, **KEPT_MEMORY}


def test_variables_of_another_heap_are_not_set() -> None:
    preloaded = {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2", "OMP_NUM_THREADS": "1"}
    chosen = chosen_conditions(preloaded, topology=ALONE, device_kind="cpu")
    assert chosen == {"OMP_NUM_THREADS": "1"}
    assert not keeps_memory(chosen, device_kind="cpu")
    assert keeps_memory(chosen, device_kind="cuda")
    assert keeps_memory({**KEPT_MEMORY, "HOME": "/root"}, device_kind="cpu")


def test_a_validation_repeats_what_its_calibration_ran_under() -> None:
    variables = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"}
    found = replace(profile(Machine()), environment={"variables": variables})
    now = {"OMP_NUM_THREADS": "2", **KEPT_MEMORY, "HOME": "/root", "NCCL_ALGO": "Tree"}
    environ = worker_environ(now, recorded_conditions(found))
    assert environ["OMP_NUM_THREADS"] == "1"
    assert environ["HOME"] == "/root"
    assert environ["NCCL_ALGO"] == "Tree"
    assert not KEPT_MEMORY.keys() & environ.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="the variables are those of glibc")
def test_kept_memory_is_not_touched_anew() -> None:
    faults = {
        bool(kept): int(
            subprocess.run(
                [sys.executable, "-c", _STEPS],
                env=under(os.environ, kept),
                capture_output=True,
                check=True,
                text=True,
            ).stdout
        )
        for kept in ({}, KEPT_MEMORY)
    }
    assert faults[False] > 64_000_000 / 4096 / 2
    assert faults[True] < 100

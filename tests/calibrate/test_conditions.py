"""Ranks are judged under the conditions that they were calibrated under."""

import os
from dataclasses import replace

from calibrate.environment import chosen_conditions, recorded_conditions
from calibrate.launch import worker_environ
from tests.calibrate.played import ALONE
from tests.perfmodel.profiles import Machine, profile


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

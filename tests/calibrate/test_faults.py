"""A campaign in which one call of the system fails, and one that is cut off at any byte.

Whatever fails, the message is one line, nothing measured is lost, and ``resume`` measures the rest once.
"""

import os
import shutil
from pathlib import Path

import pytest

from calibrate.campaign import OBSERVATIONS, measure
from calibrate.launch import Launch
from calibrate.locks import FOLDER_LOCK
from calibrate.processes import ProcessTree
from calibrate.task import WorkOrder
from perfmodel.documents.observation import (
    EnvironmentObservation,
    ProcessorObservation,
    read_observations,
    refuse_repeated,
    tasks_done,
)
from perfmodel.errors import EXIT_FAILURE, MeasurementFailed, PerfModelError
from perfmodel.files import append_line
from perfmodel.tracing.fork import Fork
from tests.calibrate.played import played_campaign
from tests.fakes import FakeLauncher
from tests.faults import KILLED, NEVER, Faults, injected

TASKS = ("0-1", "0-2", "1-1")


def play(call: Launch) -> None:
    """Rank 0 of the worker: reads its order, and writes as the real one does."""
    order = WorkOrder.read(Path(call.arguments[0]))
    output = Path(order.output)
    facts = {"host": {"fingerprint": "here"}}
    # one of each launch, named by the clock in the real one
    name = f"environment-{output.stat().st_size}"
    append_line(output, EnvironmentObservation(task=name, round=0, facts=facts).model_dump_json())
    for task in order.tasks:
        seen = ProcessorObservation(task=task.name, round=0, busy_s=1.0, steal_s=0.0)
        append_line(output, seen.model_dump_json())


def copied() -> None:
    """A copy of this process, as a rank makes one for each task; without one it ends, as its launcher says."""
    try:
        with Fork(os.getpid) as copy:
            copy.result()
    except BlockingIOError as error:
        raise MeasurementFailed(f"rank 0 must exit with 0, got {error.strerror}") from error


def run(folder: Path, faults: Faults, *, resume: bool, forks: bool = False) -> None:
    def start(call: Launch) -> None:
        ProcessTree().start(["true"], environ={}).communicate()
        if forks:
            copied()
        play(call)

    with injected(faults):
        measure(
            played_campaign(folder, ("0-1", "0-2"), ("1-1",)),
            FakeLauncher(behave=start),
            resume=resume,
            on_progress=lambda _progress: None,
        )


def recorded(folder: Path) -> list[str]:
    """Tasks that are in the file, once each."""
    path = folder / OBSERVATIONS
    # half of a first line alone is refused by readers, and cut off by --resume
    has_lines = path.exists() and b"\n" in path.read_bytes()
    observations = read_observations(path) if has_lines else []
    refuse_repeated(path, observations)
    return sorted(name for name in tasks_done(observations) if not name.startswith("env"))


def all_calls(folder: Path) -> list[str]:
    faults = Faults(NEVER, folder)
    run(folder, faults, resume=False, forks=True)
    assert recorded(folder) == list(TASKS)
    return faults.calls


def test_every_call_may_fail_once(tmp_path: Path) -> None:
    calls = all_calls(tmp_path / "whole")
    kinds = {call.split()[0] for call in calls}
    assert kinds == {"open", "read", "write", "fsync", "rename", "spawn", "fork"}
    for at, call in enumerate(calls, start=1):
        folder = tmp_path / str(at)
        faults = Faults(at, folder)
        with pytest.raises(PerfModelError) as caught:
            run(folder, faults, resume=False, forks=True)
        assert "\n" not in str(caught.value), call
        assert str(caught.value).startswith(
            (str(folder), "true: cannot be started", "rank 0 must exit with 0")
        ), call
        assert caught.value.exit_code == EXIT_FAILURE
        kept = recorded(folder)
        # nothing that was on disk before the fault is gone, and nothing is half there
        assert kept == list(TASKS[: len(kept)]), call
        lies = {path.name for path in folder.rglob("*") if path.is_file()}
        assert not any(name.startswith(".") and name != FOLDER_LOCK for name in lies), (call, lies)
        run(folder, Faults(NEVER, folder), resume=True)
        assert recorded(folder) == list(TASKS), call


def killed(folder: Path, at: int, *, resume: bool) -> None:
    """A run in a process of its own, which ends at a call as if it was killed."""
    copy = os.fork()
    if not copy:
        try:
            run(folder, Faults(at, folder, ends=True), resume=resume)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == KILLED


def test_a_kill_at_any_call_loses_nothing(tmp_path: Path) -> None:
    whole = Faults(NEVER, tmp_path / "whole")
    run(tmp_path / "whole", whole, resume=False)
    for at, call in enumerate(whole.calls, start=1):
        folder = tmp_path / str(at)
        killed(folder, at, resume=False)
        kept = recorded(folder)
        assert kept == list(TASKS[: len(kept)]), call
        run(folder, Faults(NEVER, folder), resume=True)
        assert recorded(folder) == list(TASKS), call


def test_cutting_off_half_a_line_may_fail_too(tmp_path: Path) -> None:
    all_calls(tmp_path / "whole")
    content = (tmp_path / "whole" / OBSERVATIONS).read_bytes()[:-9]
    (tmp_path / "whole" / OBSERVATIONS).write_bytes(content)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    faults = Faults(NEVER, tmp_path / "whole")
    run(tmp_path / "whole", faults, resume=True)
    at = faults.calls.index("truncate") + 1
    with pytest.raises(PerfModelError, match="cannot be continued"):
        run(tmp_path / "again", Faults(at, tmp_path / "again"), resume=True)
    assert (tmp_path / "again" / OBSERVATIONS).read_bytes() == content


def test_a_record_that_ends_at_any_byte_is_continued(tmp_path: Path) -> None:
    """What a crash leaves of the file is a prefix of what was written."""
    all_calls(tmp_path / "whole")
    content = (tmp_path / "whole" / OBSERVATIONS).read_bytes()
    ends = [at for at, byte in enumerate(content, start=1) if byte == ord("\n")]
    for length in range(1, len(content) + 1):
        folder = tmp_path / "run"
        shutil.copytree(tmp_path / "whole", folder)
        (folder / OBSERVATIONS).write_bytes(content[:length])
        kept = recorded(folder)
        assert kept == list(TASKS[: len(kept)])
        run(folder, Faults(NEVER, folder), resume=True)
        assert recorded(folder) == list(TASKS)
        assert (
            (folder / OBSERVATIONS)
            .read_bytes()
            .startswith(content[: max((end for end in ends if end <= length), default=0)])
        )
        shutil.rmtree(folder)

"""What a rank makes of a task that fails: which failures are data, and which end the launch."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from calibrate import ranks as module
from calibrate.ranks import Ranks, join
from calibrate.task import (
    CollectiveTask,
    ReplayTask,
    StepTask,
    Task,
    WorkOrder,
    failure_of,
    num_ranks,
)
from calibrate.worker import _alone, _carried_out
from perfmodel.documents.observation import FailedObservation, read_observations
from perfmodel.files import append_line
from perfmodel.layout import RunSetting, Synchronisation

ALONE = RunSetting(
    workload="gpt2", world_size=1, micro_batch=64, synchronisation=Synchronisation.NONE
)
STEP = StepTask(name="0: gpt2", round=0, setting=ALONE, target_s=0.1)
BOTH = STEP.model_copy(
    update={"setting": RunSetting(workload="gpt2", world_size=2, micro_batch=64)}
)
REDUCE = CollectiveTask(
    name="0: all_reduce", round=0, collective="all_reduce", world_size=2, size_bytes=4, target_s=0.1
)
REPLAY = ReplayTask(name="0: replay", round=0, workload="gpt2", micro_batch=4, target_s=0.1)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
STICKY = RuntimeError("CUDA error: an illegal memory access was encountered")


def carried_out(
    task: Task,
    error: Exception,
    folder: Path,
    *,
    clear: Callable[[], None] = lambda: None,
    ranks: Ranks | None = None,
) -> FailedObservation:
    def fails(_task: Task) -> str:
        raise error

    ranks = ranks or Ranks(rank=0, world_size=2, store=HashStore())
    text = _carried_out(fails, clear, task, ranks, folder / "observations.jsonl")
    return FailedObservation.model_validate_json(text)


def test_ranks_that_stand_apart_need_no_group_of_all_between_them() -> None:
    """Two ranks, one on each of two nodes of 8: nine take part, and no probe uses a group of nine."""
    apart = REDUCE.model_copy(update={"stride": 8})
    assert num_ranks(apart) == 9
    order = WorkOrder(device_kind="cuda", output="", tasks=(STEP, REDUCE, apart))
    assert order.world_sizes == {1, 2}


def test_a_first_step_that_memory_does_not_hold_ends_no_launch(tmp_path: Path) -> None:
    cleared: list[bool] = []
    found = carried_out(STEP, FULL, tmp_path, clear=lambda: cleared.append(True))
    assert (found.setting, found.is_too_large, cleared) == (ALONE, True, [True])
    replay = carried_out(REPLAY, FULL, tmp_path)
    # A replay holds other memory than the step: it tells nothing of that.
    assert (replay.is_too_large, replay.setting.micro_batch) == (False, 4)


@pytest.mark.parametrize("task", [BOTH, REDUCE])
def test_memory_of_one_rank_alone_is_told_once(task: Task, tmp_path: Path) -> None:
    """Other ranks wait for it in a collective: new processes go on without the task."""
    store, output = HashStore(), tmp_path / "observations.jsonl"

    def fails(_task: Task) -> str:
        raise FULL

    for rank in (1, 0):
        ranks = Ranks(rank=rank, world_size=2, store=store)
        with pytest.raises(torch.OutOfMemoryError):
            _carried_out(fails, lambda: None, task, ranks, output)
    (entry,) = read_observations(output)
    assert isinstance(entry, FailedObservation)
    assert entry.is_too_large
    assert entry.setting.world_size == 2


def test_a_replay_that_fails_is_told_unless_the_device_is_poisoned(tmp_path: Path) -> None:
    found = carried_out(REPLAY, ValueError("no kernel"), tmp_path)
    assert found.reason == "replay: ValueError: no kernel"
    together = REPLAY.model_copy(update={"world_size": 2})
    # Copies of other ranks fail with this one, or are given up: the launch goes on.
    found = carried_out(together, FULL, tmp_path)
    assert (found.reason[:24], found.is_too_large) == ("under DDP: out of memory", False)
    assert found.setting == replace(BOTH.setting, micro_batch=4)

    def poisoned() -> None:
        raise STICKY

    with pytest.raises(RuntimeError, match="illegal memory access"):
        carried_out(REPLAY, STICKY, tmp_path, clear=poisoned)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        carried_out(STEP, STICKY, tmp_path)


def test_a_rank_that_lost_another_one_says_why_that_failed_if_it_tells(tmp_path: Path) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("timed out")

    together, gone = REPLAY.model_copy(update={"world_size": 2}), RuntimeError("gloo/transport/tcp")
    ranks = Ranks(rank=0, world_size=2, store=HashStore())
    for error in (ValueError("diverged"), gone):
        found = carried_out(together, error, tmp_path, ranks=ranks)
        assert found.reason == "under DDP: ValueError: diverged"
    silent: Any = SimpleNamespace(wait=lost)
    found = carried_out(together, gone, tmp_path, ranks=replace(ranks, store=silent))
    assert found.reason == "under DDP: another rank was gone"


def test_a_model_whose_ranks_take_too_long_is_not_trained_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither by the same ranks nor by those of a later start."""
    limits_s: list[float | None] = []

    def never(_ranks: Ranks, _act: object, *, within_s: float | None = None) -> str:
        limits_s.append(within_s)
        raise TimeoutError

    monkeypatch.setattr(Ranks, "carry_out", never)
    output = tmp_path / "observations.jsonl"
    output.touch()
    order = WorkOrder(device_kind="cpu", output=str(output), tasks=(REPLAY,))
    ranks = Ranks(rank=0, world_size=2, store=HashStore())
    carry_out, _ = _alone(order, ranks, in_place=True)
    together = REPLAY.model_copy(update={"world_size": 2})
    other = together.model_copy(update={"workload": "other"})
    ends = "ranks may wait for each other"
    for task, end in ((together, ends), (together, "earlier round[)]"), (other, ends)):
        with pytest.raises(TimeoutError, match=f"longer than 60 s.*{end}$") as said:
            carry_out(task)
    append_line(output, failure_of(together, f"under DDP: {said.value}").model_dump_json())
    carry_out, _ = _alone(order, ranks, in_place=True)
    with pytest.raises(TimeoutError, match="earlier round"):
        carry_out(together)
    assert limits_s == [60, 60]


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_runs_of_the_judge_use_the_collectives_of_their_device(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []
    monkeypatch.setattr(module, "init_process_group", lambda name, **_: joined.append(name))
    monkeypatch.setattr(module, "TCPStore", lambda *_: HashStore())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    join("task", rank=0, world_size=2, device_kind=kind)
    assert joined == [backend]


MODELS = """
import torch
from torch import nn



def narrow(features=4):
    return nn.Linear(features, 2), torch.randn(4, features)


def wide():
    return narrow(10_000)
"""
NEW_PAGES = """
import resource
import sys
from types import SimpleNamespace

import torch

from calibrate.device import Cpu
from calibrate.probes import Session
from calibrate.probes.training import trained
from calibrate.task import WorkOrder
from calibrate.worker import _alone
from perfmodel.tracing.fork import Fork
from tests.perfmodel.tracing.method import SGD_LOOP

code, output = sys.argv[1:]


def new_pages(name):
    session = Session(rank=0, world_size=1, measured=Cpu(), control={}, data={})
    step = SimpleNamespace(micro_batch=4, method=SGD_LOOP)
    trained(session, f"{code}:{name}", step, target_s=0.01)
    torch.ones(2**21)  # The C library has learned to keep 8 MiB if the next ones lie there.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**21)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def in_a_copy(name):
    with Fork(lambda: new_pages(name)) as copy:
        print(copy.result(within_s=60))


in_a_copy("narrow")
in_a_copy("wide")
_alone(WorkOrder(device_kind="cpu", output=output, tasks=()), None, in_place=True)
in_a_copy("narrow")
"""


def test_training_in_place_meets_new_pages_as_a_plain_loop_does(tmp_path: Path) -> None:
    """Neither batches that were drawn elsewhere nor a file of earlier rounds teach the C library to keep memory."""
    code, output = tmp_path / "models.py", tmp_path / "observations.jsonl"
    code.write_text(MODELS)
    output.write_text(f"{'':100000}\n" * 200)
    command = (sys.executable, "-c", NEW_PAGES, str(code), str(output))
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    plain, with_batches, with_rounds = map(int, told.stdout.split())
    assert min(with_batches, with_rounds) >= plain / 2

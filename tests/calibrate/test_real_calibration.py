"""Real ranks under torchrun: a calibration of which a rank is killed and that is resumed, and what interrupts one."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any, Final

import psutil
import pytest

from calibrate import experiment, workloads
from calibrate.calibrate import PROFILE, CalibrationRequest, calibrate, refit
from calibrate.campaign import OBSERVATIONS, Progress, read_plan
from calibrate.experiment import BUCKET_CAPS_MB, BUDGETS, Budget, Experiment
from calibrate.launch import LaunchFlags, TorchrunLauncher
from calibrate.layers import planned_layers
from calibrate.processes import usable_cores
from calibrate.task import StepTask, Task, TraceTask
from perfmodel.answer.answer import Forecast, table
from perfmodel.documents.observation import (
    EnvironmentObservation,
    Observation,
    ReplayObservation,
    StepObservation,
    WorkloadObservation,
    read_observations,
)
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import MeasurementFailed
from perfmodel.layout import Layout, RunSetting, Synchronisation
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.step import gradient_buckets
from perfmodel.tracing.reference import REFERENCES
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.trace import trace_model
from tests.existing import existing
from tests.perfmodel.asking import Asking

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(usable_cores() < 2, reason="two ranks need two usable cores"),
]
ROOT = Path(__file__).resolve().parent.parent.parent
TINY = Budget(
    num_rounds=1,
    other_rounds=1,
    has_layouts=True,
    repetition_s=0.02,
    min_steps=4,
    num_batches=2,
    collective_sizes=(1024, 2**20),
    replay_rounds=1,
    layer_share=0.0,
    optimizer_share=0.05,
    num_models=1,
)
DEADLINE_S = 180.0
OWN: Final = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU()), torch.zeros(1, 6)
"""
#: Models of several buckets, on one rank.
WITH_BUCKETS: Final = ("resnet18", "mlp")
CAPPED: Final = tuple(
    RunSetting(workload=model, world_size=1, micro_batch=1, bucket_cap_mb=cap_mb)
    for model in WITH_BUCKETS
    for cap_mb in BUCKET_CAPS_MB
)
BARE: Final = tuple(
    RunSetting(workload=model, world_size=1, micro_batch=1, synchronisation=Synchronisation.NONE)
    for model in WITH_BUCKETS
)


def _lenet(name: str, world_size: int) -> Task:
    """A second of steps in which every rank is at work."""
    how = Synchronisation.NO_SYNC if world_size > 1 else Synchronisation.NONE
    setting = RunSetting(
        workload="lenet", world_size=world_size, micro_batch=2, synchronisation=how
    )
    return StepTask(name=name, round=0, setting=setting, target_s=1.0)


class _WithBuckets(Experiment):
    """The tasks of a calibration between two that a rank is killed in, and steps of models with buckets."""

    def rounds(self) -> tuple[tuple[Task, ...], ...]:
        [own] = super().rounds()
        first = (_lenet("two", 2), _lenet("again", 2), _lenet("one", 1))
        traces = (TraceTask(name=f"trace {each}", round=0, workload=each) for each in WITH_BUCKETS)
        steps = (
            StepTask(name=setting.label, round=0, setting=setting, target_s=0.0)
            for setting in (*CAPPED, *BARE)
        )
        return ((*first, *own, *traces, *steps),)


def workers(folder: Path) -> list[psutil.Process]:
    """Ranks and their launchers at work for a folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(each.startswith(f"{folder}/orders/") for each in process.info["cmdline"] or ())
    ]


def rank_process(folder: Path, rank: int) -> psutil.Process:
    """One rank of the running group, found among our own descendants."""
    own, of_folder = psutil.Process().children(recursive=True), workers(folder)
    # It comes before the copies of itself that carry out its tasks.
    return next(p for p in own if p in of_folder and p.environ().get("RANK") == str(rank))


def observations_in(folder: Path) -> list[Observation]:
    return read_observations(folder / OBSERVATIONS)


def tasks_in(observations: list[Observation]) -> list[str]:
    """What was measured, in order."""
    return [e.task for e in observations if e.kind not in ("environment", "processor")]


@dataclass(frozen=True)
class Resumed:
    """A calibration whose second rank was killed, and that was resumed."""

    folder: Path
    profile: ProfileDocument
    names: list[str]
    """Of all tasks."""
    said: str
    kept: list[str]
    """Tasks on disk when it had ended."""
    seen: list[int]
    """Tasks done, as told after it was resumed."""

    @property
    def observations(self) -> list[Observation]:
        return observations_in(self.folder)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    """Two starts of the ranks serve all: importing torch takes longer than the tasks."""
    request = CalibrationRequest(
        folder=tmp_path_factory.mktemp("real") / "calibration",
        budget="tiny",
        device="cpu",
        models=("lenet",),
        flags=LaunchFlags(nproc_per_node=2),
    )
    seen: list[int] = []

    def kill(progress: Progress) -> None:
        # torchrun may take the lower rank, which it ends itself, for the first
        if progress.done == 1 and not progress.is_waiting:
            rank_process(request.folder, 1).kill()

    def see(progress: Progress) -> None:
        if not progress.is_waiting:
            seen.append(progress.done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUDGETS, "tiny", TINY)
        patch.setattr(experiment, "planned_layers", lambda **how: planned_layers(**how)[::6])
        patch.setattr(experiment, "_STACKS", experiment._STACKS[:1])
        wrapped = experiment._WRAPPED[:1] + experiment._WRAPPED[-1:]
        patch.setattr(experiment, "_WRAPPED", wrapped)
        patch.setitem(experiment._MICRO_BATCHES["cpu"], "lenet", (64, 128))
        probes = tuple(experiment._planned_probes("cpu"))[::3]
        patch.setattr(experiment, "_planned_probes", lambda _kind: probes)
        patch.setattr("calibrate.calibrate.Experiment", _WithBuckets)
        planned = _WithBuckets(
            device_kind="cpu", world_sizes=(1, 2), models=("lenet",), budget=TINY, seed=0
        )
        names = [task.name for tasks in planned.rounds() for task in tasks]
        with pytest.raises(MeasurementFailed) as caught:
            calibrate(request, TorchrunLauncher(), on_progress=kill)
        assert workers(request.folder) == []
        kept = tasks_in(observations_in(request.folder))
        again = replace(request, resume=True)
        profile = calibrate(again, TorchrunLauncher(), on_progress=see)
        yield Resumed(request.folder, profile, names, str(caught.value), kept, seen)


def assert_steps_are_complete(entry: StepObservation) -> None:
    assert [rank.rank for rank in entry.ranks] == list(range(entry.setting.world_size))
    for rank in entry.ranks:
        assert rank.memory is None  # only devices with memory of their own say
        fields = rank.model_dump(exclude={"rank", "memory"})
        assert {len(values) for values in fields.values()} == {len(entry.ranks[0].step_s)}
        assert len(rank.step_s) >= 4
        parts_s = (rank.input_s, rank.forward_s, rank.backward_s, rank.optimizer_s)
        assert [sum(parts) for parts in zip(*parts_s, strict=True)] == pytest.approx(rank.step_s)


def test_a_calibration_measures_every_rank_and_predicts_itself(resumed: Resumed) -> None:
    assert tasks_in(resumed.observations) == resumed.names
    assert resumed.seen == list(range(len(resumed.kept) + 1, len(resumed.names) + 1))
    for entry in resumed.observations:
        if isinstance(entry, StepObservation):
            assert_steps_are_complete(entry)
    written = ProfileDocument.read(resumed.folder / PROFILE)
    assert written.model_dump() == resumed.profile.model_dump()
    assert_prediction_is_plausible(resumed.profile.machine)
    environment: dict[str, Any] = resumed.profile.machine.environment
    assert environment["software"]["has_gloo"] is True
    again = refit(resumed.folder)
    assert again.digest == resumed.profile.digest
    assert workers(resumed.folder) == []


def assert_prediction_is_plausible(profile: MeasuredMachine) -> None:
    """A tiny budget promises no accuracy; it must not be absurd either."""
    predictor = Asking(profile)
    document, _ = table(
        predictor.question(predictor.workload("lenet"), Layout()),
        Forecast(world_sizes=(1, 2), scaling="weak", batch=64),
    )
    one, two = document.points
    assert existing(one.speedup).nominal == pytest.approx(1.0)
    measured_s = {
        (step.world_size, step.synchronisation): step.step_s
        for step in profile.steps
        if step.workload == "lenet" and step.micro_batch == 64 and step.bucket_cap_mb is None
    }
    assert 1 / 3 < one.step_s.nominal / measured_s[1, "none"] < 3
    assert 1 / 3 < two.step_s.nominal / measured_s[2, "ddp"] < 3


def test_a_killed_rank_is_named_and_the_rest_can_be_resumed(resumed: Resumed) -> None:
    assert "rank 1 must exit with 0, got SIGKILL" in resumed.said
    assert "--resume" in resumed.said
    assert "\n" not in resumed.said
    assert "two" in resumed.kept
    assert "one" not in resumed.kept
    assert tasks_in(resumed.observations)[: len(resumed.kept)] == resumed.kept


def test_predicted_buckets_are_those_that_ddp_forms(resumed: Resumed) -> None:
    """From its second step on DDP reduces gradients in the order in which they became ready."""
    traced = (e.workload for e in resumed.observations if isinstance(e, WorkloadObservation))
    models = {workload.name: workload for workload in traced}
    synchronised = [
        entry
        for entry in resumed.observations
        if isinstance(entry, StepObservation)
        and entry.setting.synchronisation is Synchronisation.DDP
    ]
    assert len(synchronised) == 3 + len(CAPPED)
    for entry in synchronised:
        ours = gradient_buckets(models[entry.setting.workload], entry.setting.layout)
        assert entry.bucket_bytes == tuple(bucket.size_bytes for bucket in ours)
    for name in WITH_BUCKETS:
        default, capped = (
            len(gradient_buckets(models[name], setting.layout))
            for setting in CAPPED
            if setting.workload == name
        )
        assert 1 < default <= capped


def test_a_step_is_traced_and_replayed(resumed: Resumed) -> None:
    replays = [e for e in resumed.observations if isinstance(e, ReplayObservation)]
    own = [replay for replay in replays if replay.workload == "lenet"]
    assert own
    for replay in own:
        assert len(replay.forward_s) == len(replay.backward_s) >= 2
        assert replay.failed == ()
    assert any(replay.traced is not None for replay in own)


def test_a_model_trains_in_several_starts_of_processes(
    resumed: Resumed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds in two starts, each of which says what it runs on."""
    monkeypatch.setattr(workloads, "_NUM_ROUNDS", 3)
    file, code = tmp_path / "trace.json", f"{tmp_path / 'own.py'}:make"
    (tmp_path / "own.py").write_text(OWN)
    traced = trace_model(find_source(code), REFERENCES["lenet"].method("cpu"), micro_batch=2)
    WorkloadDocument(workload=traced.workload, trace=traced.step, memory=traced.memory).write(file)
    document = WorkloadDocument.read(file)
    task = workloads.in_place(document, micro_batch=2, code=code, world_size=1)
    untrained = workloads.measure_workload(
        file,
        task.model_copy(update={"target_s": 0.02}),
        folder=resumed.folder,
        profile=resumed.profile.machine,
        on_progress=lambda _: None,
    )
    assert untrained == ""
    [stored] = (resumed.folder / workloads.WORKLOADS).glob(f"*/{OBSERVATIONS}")
    found = read_observations(stored)
    assert [e.round for e in found if isinstance(e, ReplayObservation) and e.trained_s] == [0, 1, 2]
    assert sum(isinstance(e, EnvironmentObservation) for e in found) == 2


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.05)


QUICK = ("calibrate", "--models", "lenet", "--device-kind", "cpu", "--budget", "quick")


def stopped_early(folder: Path, *commands: list[str]) -> tuple[int, list[str]]:
    """Interrupt commands of one folder after a few observations; exit code of the first, and its last words."""
    start = partial(subprocess.Popen, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(start([sys.executable, *line])) for line in commands]
        output = folder / OBSERVATIONS
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 4)
        assert len(workers(folder)) >= 2
        for process in processes:
            process.send_signal(signal.SIGINT)
        _, stderr = processes[0].communicate(timeout=DEADLINE_S)
        for process in processes[1:]:
            process.communicate(timeout=DEADLINE_S)
    wait_until(lambda: workers(folder) == [])
    assert len(observations_in(folder)) >= 4
    told = [line for line in stderr.splitlines() if not line.startswith("calibrate: ")]
    return processes[0].returncode, told


def test_two_nodes_measure_one_group_and_an_interrupted_command_says_one_line(
    tmp_path: Path,
) -> None:
    """Both on this machine, one rank each: they meet over loopback."""
    folder = tmp_path / "calibration"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = (*QUICK, "--out", str(folder), "--nnodes", "2", "--nproc", "1")
    meeting = ("--master-addr", "127.0.0.1", "--master-port", port)
    first = ["-m", "perfmodel", *shared, *meeting, "--node-rank", "0"]
    second = [*first[:-1], "1"]
    exit_code, told = stopped_early(folder, first, second)
    plan = read_plan(folder)
    assert (plan["num_nodes"], plan["ranks_per_node"]) == (2, 1)
    assert exit_code == 130
    assert told == [
        "perfmodel: stopped by the user; what was measured is kept; repeat the command with --resume"
    ]

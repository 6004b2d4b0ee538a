"""Real ranks under torchrun: a calibration from end to end, and what interrupts one."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from calibrate import experiment
from calibrate.calibrate import PROFILE, CalibrationRequest, calibrate, refit
from calibrate.campaign import OBSERVATIONS, Progress
from calibrate.experiment import BUDGETS, Budget, Experiment
from calibrate.launch import TorchrunLauncher
from calibrate.layers import planned_layers
from calibrate.topology import LaunchFlags
from perfmodel.answer.answer import Forecast, table
from perfmodel.documents.observation import StepObservation
from perfmodel.documents.profile import ProfileDocument
from perfmodel.layout import Layout
from perfmodel.machine.measured import MeasuredMachine
from tests.calibrate.real_ranks import (
    NEEDS_TWO_RANKS,
    assert_buckets_are_those_of_ddp,
    observations_in,
    tasks_in,
    workers,
)
from tests.perfmodel.asking import Asking

pytestmark = NEEDS_TWO_RANKS
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


@pytest.fixture
def request_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationRequest:
    """A calibration of one small model, a few layers and the lightest stack: it takes seconds."""
    monkeypatch.setitem(BUDGETS, "tiny", TINY)
    monkeypatch.setattr(experiment, "planned_layers", lambda **how: planned_layers(**how)[::6])
    monkeypatch.setattr(experiment, "_STACKS", experiment._STACKS[:1])
    monkeypatch.setattr(experiment, "_WRAPPED", experiment._WRAPPED[:1] + experiment._WRAPPED[-1:])
    return CalibrationRequest(
        folder=tmp_path / "calibration",
        budget="tiny",
        device="cpu",
        models=("lenet",),
        flags=LaunchFlags(nproc_per_node=2),
    )


def run(
    request: CalibrationRequest, on_progress: Callable[[Progress], None] = lambda _progress: None
) -> ProfileDocument:
    return calibrate(request, TorchrunLauncher(), on_progress=on_progress)


def assert_steps_are_complete(entry: StepObservation) -> None:
    assert [rank.rank for rank in entry.ranks] == list(range(entry.setting.world_size))
    for rank in entry.ranks:
        assert rank.memory is None  # only devices with memory of their own say
        fields = rank.model_dump(exclude={"rank", "memory"})
        assert {len(values) for values in fields.values()} == {len(entry.ranks[0].step_s)}
        assert len(rank.step_s) >= 4
        parts_s = (rank.input_s, rank.forward_s, rank.backward_s, rank.optimizer_s)
        assert [sum(parts) for parts in zip(*parts_s, strict=True)] == pytest.approx(rank.step_s)


def test_a_calibration_measures_every_rank_and_predicts_itself(
    request_: CalibrationRequest,
) -> None:
    seen: list[Progress] = []
    profile = run(request_, seen.append)
    observations = observations_in(request_.folder)
    planned = Experiment(
        device_kind="cpu", world_sizes=(1, 2), models=("lenet",), budget=TINY, seed=0
    )
    names = [task.name for tasks in planned.rounds() for task in tasks]
    assert tasks_in(observations) == names
    assert [progress.done for progress in seen] == list(range(1, len(names) + 1))
    for entry in observations:
        if isinstance(entry, StepObservation):
            assert_steps_are_complete(entry)
    assert assert_buckets_are_those_of_ddp(observations) == 3
    assert ProfileDocument.read(request_.folder / PROFILE).model_dump() == profile.model_dump()
    assert_prediction_is_plausible(profile.machine)
    again = refit(request_.folder)
    assert again.digest == profile.digest
    assert workers(request_.folder) == []


def assert_prediction_is_plausible(profile: MeasuredMachine) -> None:
    """A tiny budget promises no accuracy; it must not be absurd either."""
    predictor = Asking(profile)
    document, _ = table(
        predictor.question(predictor.workload("lenet"), Layout()),
        Forecast(world_sizes=(1, 2), scaling="weak", batch=64),
        argv=(),
    )
    one, two = document.points
    assert one.speedup is not None
    assert one.speedup.nominal == pytest.approx(1.0)
    measured_s = {
        (step.world_size, step.synchronisation): step.step_s
        for step in profile.steps
        if step.micro_batch == 64 and step.bucket_cap_mb is None
    }
    assert 1 / 3 < one.step_s.nominal / measured_s[1, "none"] < 3
    assert 1 / 3 < two.step_s.nominal / measured_s[2, "ddp"] < 3


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.05)


QUICK = ("calibrate", "--models", "lenet", "--device-kind", "cpu", "--budget", "quick")


def stopped_early(folder: Path, *commands: list[str]) -> tuple[int, list[str]]:
    """Interrupt commands of one folder after a few observations; exit code of the first, and its last words."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *line],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for line in commands
        ]
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


def ranks_per_node_in(folder: Path) -> tuple[int, int]:
    plan = json.loads((folder / "plan.json").read_text())
    return plan["num_nodes"], plan["ranks_per_node"]


def test_under_torchrun_one_rank_measures_for_all(tmp_path: Path) -> None:
    folder = tmp_path / "calibration"
    outer = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    stopped_early(folder, [*outer, "-m", "perfmodel", *QUICK, "--out", str(folder)])
    assert ranks_per_node_in(folder) == (1, 2)


def test_two_nodes_measure_one_group_and_an_interrupted_command_says_one_line(
    tmp_path: Path,
) -> None:
    """Both on this machine, one rank each: they meet over loopback."""
    folder = tmp_path / "calibration"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    nodes = [
        [
            *("-m", "perfmodel", *QUICK, "--out", str(folder), "--nnodes", "2", "--nproc", "1"),
            *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port),
        ]
        for node in (0, 1)
    ]
    exit_code, told = stopped_early(folder, *nodes)
    assert ranks_per_node_in(folder) == (2, 1)
    assert exit_code == 130
    assert told == [
        "perfmodel: stopped by the user; what was measured is kept; repeat the command with --resume"
    ]

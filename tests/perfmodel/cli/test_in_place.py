"""``perfmodel predict`` of a model that the machine at hand has not timed yet."""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import calibrate.launch
from calibrate.campaign import OBSERVATIONS
from calibrate.environment import describe_environment
from calibrate.launch import Launch
from calibrate.locks import LOCK_VARIABLE, machine_to_itself
from calibrate.task import ReplayTask, Task, WorkOrder, failure_of, num_ranks
from perfmodel.documents.observation import Observation, ReplayObservation, TimedOperator
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import EXIT_CALIBRATION, EXIT_INTERRUPTED, EXIT_OK, Interrupted
from perfmodel.files import unseal_line
from perfmodel.machine import Evidence
from perfmodel.workload import Phase
from perfmodel.workload.step import calls_signature, parameters_signature, signature
from tests.existing import existing
from tests.fakes import FakeLauncher
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import PROVENANCE, Machine, as_file, profile
from tests.played_worker import append

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="models are traced: needs torch")
OWN = """
import torch
from torch import nn

class Repeated(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.block, self.times = nn.Linear(6, 6), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.block(x).relu()
        return x

def shallow(): return Repeated(2), torch.zeros(1, 6)
def deep(): return Repeated(9), torch.zeros(1, 6)
def renamed(): return small()
def small(): return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.zeros(1, 6)
"""
CALL_S = 0.001
TRAINED_S = 0.0315
#: Of processes, in which a model is trained twice each.
STARTS = 4


def replay(task: ReplayTask) -> Observation:
    """Every call takes a millisecond; several ranks train alone."""
    trace = WorkloadDocument.read(Path(existing(task.document))).trace
    step = trace.at(micro_batch=task.micro_batch)
    counts = {key: n for key, n in step.call_counts().items() if key[1] is not Phase.OPTIMIZER}
    sums = {phase: sum(n for (_, at), n in counts.items() if at is phase) for phase in Phase}
    return ReplayObservation(
        task=task.name,
        round=task.round,
        workload=task.workload,
        micro_batch=task.micro_batch,
        parameters=parameters_signature(step),
        calls=calls_signature(step),
        operators=tuple(
            TimedOperator(
                signature=signature(step.operators[at]),
                phase=phase,
                num_calls=count,
                times_s=(CALL_S,),
            )
            for (at, phase), count in counts.items()
            if task.world_size == 1
        ),
        forward_s=(CALL_S * sums[Phase.FORWARD],),
        backward_s=(CALL_S * sums[Phase.BACKWARD],),
        optimizer_s=(CALL_S,),
        trained_s=TRAINED_S * task.world_size if task.code else None,
        world_size=task.world_size,
        failed=(),
        traced=None,
    )


def stopped(task: ReplayTask) -> Observation:
    """The user has enough after three rounds."""
    if task.round == 3:
        raise Interrupted("stopped by the user; repeat the command with --resume")
    return replay(task)


def failed(task: ReplayTask) -> Observation:
    return failure_of(task, "no kernel")


def failed_first(task: ReplayTask) -> Observation:
    """Later rounds of a GPU only train."""
    bare = dict.fromkeys(("operators", "forward_s", "backward_s", "optimizer_s"), ())
    return replay(task).model_copy(update=bare) if task.round else failed(task)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> FakeLauncher:
    """Ranks that replay without taking time."""
    played = FakeLauncher(behave=lambda call: play(call, replay))
    monkeypatch.setattr(calibrate.launch, "TorchrunLauncher", lambda: played)
    return played


def tasks_of(call: Launch) -> tuple[Task, ...]:
    return WorkOrder.read(Path(call.arguments[0])).tasks


def play(call: Launch, act: Callable[[ReplayTask], Observation]) -> None:
    output = Path(WorkOrder.read(Path(call.arguments[0])).output)
    for task in tasks_of(call):
        assert isinstance(task, ReplayTask)
        append(output, act(task))


@pytest.fixture
def asked(tmp_path: Path) -> tuple[object, ...]:
    """A question about a model of one's own, on the machine at hand."""
    model, machine = tmp_path / "own.py", tmp_path / "profile.json"
    model.write_text(OWN, encoding="utf-8")
    (tmp_path / OBSERVATIONS).touch()
    here = str(describe_environment(observe_s=0.0)["host"]["fingerprint"])
    calibrated = replace(profile(Machine()), operators=costs_of_the_made_up_machine())
    as_file(calibrated, provenance=PROVENANCE.model_copy(update={"host_fingerprint": here})).write(
        machine
    )
    asked = ("predict", "--profile", machine, "--workload", f"{model}:small")
    return (*asked, "--batch", 4, "--devices", 1)


def step_of(run: Run, *arguments: object) -> tuple[float, Evidence]:
    result = run(*arguments, "--json")
    assert result.exit_code == EXIT_OK, result
    (point,) = PredictionDocument.of_text(result.stdout).points
    return point.step_s.nominal, point.weakest_evidence


def test_what_was_never_timed_is_timed_once(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher, tmp_path: Path
) -> None:
    step_s, evidence = step_of(run, *asked)
    assert evidence is Evidence.MEASURED
    assert step_s == pytest.approx(TRAINED_S)
    assert step_of(run, *asked) == (step_s, evidence)
    assert len(launcher.calls) == STARTS
    # A traced file holds the same operators; other batches are timed too.
    file = tmp_path / "traced.json"
    assert run("trace", f"{tmp_path / 'own.py'}:small", "--output", file).exit_code == EXIT_OK
    by_file = (*asked[:3], "--workload", file, "--devices", 1)
    assert step_of(run, *by_file, "--batch", 4) == (step_s, evidence)
    assert len(launcher.calls) == STARTS
    step_s, evidence = step_of(run, *by_file, "--batch", 6)
    assert evidence is Evidence.MEASURED
    assert step_s / CALL_S == pytest.approx(round(step_s / CALL_S))
    assert len(launcher.calls) == 2 * STARTS
    # Its code says more than its operators.
    assert step_of(run, *asked[:6], 6, *asked[7:])[0] == pytest.approx(TRAINED_S)
    assert len(launcher.calls) == 3 * STARTS


def test_times_of_an_older_version_have_no_seals_and_are_refused(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher, tmp_path: Path
) -> None:
    step_s, _ = step_of(run, *asked)
    [timed] = tmp_path.glob(f"workloads/*/{OBSERVATIONS}")
    lines = [unseal_line(line)[0] for line in timed.read_bytes().splitlines()]
    timed.write_bytes(b"".join(line + b"\n" for line in lines))
    said = complaint(run(*asked), EXIT_CALIBRATION)
    assert f"{timed}: its lines carry no seals: an older version measured them; remove" in said
    taken = json.loads(run(*asked, "--json", "--unsealed").stdout)
    assert taken["unsealed"] == [str(timed)]
    timed.unlink()
    assert step_of(run, *asked)[0] == step_s
    assert len(launcher.calls) == 2 * STARTS


def test_a_question_of_several_devices_trains_on_the_calibrated_ranks_as_well(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher
) -> None:
    """Once, after what was measured on one rank or with it; nothing where one device is asked for."""
    step_of(run, *asked)
    two = (*asked[:-1], 2)
    step_s, evidence = step_of(run, *two)
    assert (round(step_s / TRAINED_S, 6), evidence) == (2, Evidence.MEASURED)
    assert step_of(run, *two) == (step_s, evidence)
    assert [call.topology.ranks_per_node for call in launcher.calls] == [1] * STARTS + [2] * STARTS
    added = [t for call in launcher.calls[STARTS:] for t in tasks_of(call)]
    assert [num_ranks(task) for task in added] == [2] * 8


def test_a_model_of_another_name_that_trained_on_one_rank_trains_under_ddp(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher, tmp_path: Path
) -> None:
    step_of(run, *asked)
    renamed = (*asked[:4], f"{tmp_path / 'own.py'}:renamed", *asked[5:-1])
    assert step_of(run, *renamed, 1)[0] == pytest.approx(TRAINED_S)
    assert len(launcher.calls) == STARTS
    for _ in range(2):
        assert step_of(run, *renamed, 2)[0] == pytest.approx(2 * TRAINED_S)
        assert len(launcher.calls) == 2 * STARTS


def test_ranks_that_memory_does_not_hold_do_not_train(
    run: Run,
    asked: tuple[object, ...],
    launcher: FakeLauncher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    psutil = pytest.importorskip("psutil")
    left = psutil.virtual_memory()._replace(available=2**20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    assert "of memory needed, 1 MiB left" in run(*asked[:-1], 2).stderr
    assert [call.topology.ranks_per_node for call in launcher.calls] == [1] * STARTS


def test_why_a_model_did_not_train_under_ddp_is_said_once_and_one_rank_answers(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher
) -> None:
    launcher.behave = lambda call: play(call, lambda t: (failed if t.world_size > 1 else replay)(t))
    result = run(*asked[:-1], 2)
    assert result.exit_code == EXIT_OK
    assert result.stderr.count("not trained in every round: no kernel") == 1
    assert step_of(run, *asked)[0] == pytest.approx(TRAINED_S)


def test_a_model_that_applies_its_block_more_often_is_trained_itself(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher, tmp_path: Path
) -> None:
    """Equal operators and parameters: what one takes says nothing of the other; each is trained once."""
    for count, name in enumerate(("shallow", "deep", "shallow", "deep"), start=1):
        question = (*asked[:4], f"{tmp_path / 'own.py'}:{name}", *asked[5:])
        step_s, evidence = step_of(run, *question)
        assert evidence is Evidence.MEASURED
        assert step_s == pytest.approx(TRAINED_S)
        assert len(launcher.calls) == min(count, 2) * STARTS


def test_who_stops_the_timing_gets_no_answer_and_the_next_call_ends_it(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher
) -> None:
    """The second start ends in its second round, which a third makes up for."""
    launcher.behave = lambda call: play(call, stopped)
    result = run(*asked)
    assert result.exit_code == EXIT_INTERRUPTED
    assert result.stdout == ""
    assert "--resume" not in result.stderr
    launcher.behave = lambda call: play(call, replay)
    assert step_of(run, *asked)[1] is Evidence.MEASURED
    assert len(launcher.calls) == STARTS + 1
    assert step_of(run, *asked)[1] is Evidence.MEASURED
    assert len(launcher.calls) == STARTS + 1


def test_why_a_model_did_not_train_is_said(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher
) -> None:
    untrained = {"trained_s": None, "untrained": "KeyError: 'x'"}
    launcher.behave = lambda call: play(call, lambda t: replay(t).model_copy(update=untrained))
    result = run(*asked)
    assert result.exit_code == EXIT_OK
    assert "not trained in every round: KeyError: 'x'" in result.stderr


def test_a_layout_is_timed_in_place_as_well(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher
) -> None:
    """Once for all layouts of a model at a micro-batch; a layout that is none costs no time."""
    layout = (*asked[:5], "--layout")
    assert run(*layout, "dp=0 micro_batch=4").exit_code != EXIT_OK
    assert run(*layout, "dp=1 micro_batch=4", "--no-measure").exit_code == EXIT_OK
    assert launcher.calls == []
    assert step_of(run, *layout, "dp=1 micro_batch=4")[1] is Evidence.MEASURED
    assert len(launcher.calls) == STARTS
    assert step_of(run, *asked)[1] is Evidence.MEASURED
    assert len(launcher.calls) == STARTS


@pytest.mark.parametrize("elsewhere", [("--no-measure",), ("--device", "h100-sxm")])
def test_curves_answer_where_nothing_is_to_be_timed(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher, elsewhere: tuple[str, ...]
) -> None:
    assert step_of(run, *asked, *elsewhere)[1] is not Evidence.MEASURED
    assert launcher.calls == []


def test_on_another_machine_nothing_is_timed(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher, tmp_path: Path
) -> None:
    machine = replace(profile(Machine()), operators=costs_of_the_made_up_machine())
    as_file(machine).write(tmp_path / "profile.json")
    assert step_of(run, *asked)[1] is not Evidence.MEASURED
    assert launcher.calls == []


def test_beside_a_profile_that_lies_alone_nothing_is_timed_or_written(
    run: Run, asked: tuple[object, ...], launcher: FakeLauncher, tmp_path: Path
) -> None:
    (tmp_path / OBSERVATIONS).unlink()
    assert f"curves answer: {tmp_path} holds no {OBSERVATIONS}" in run(*asked).stderr
    assert launcher.calls == []
    assert not (tmp_path / "workloads").exists()


@pytest.mark.parametrize("lacking", ["torch", "psutil"])
def test_without_the_extra_that_measures_curves_answer(
    run: Run,
    asked: tuple[object, ...],
    launcher: FakeLauncher,
    monkeypatch: pytest.MonkeyPatch,
    lacking: str,
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == lacking else find_spec(name)
    )
    monkeypatch.setitem(sys.modules, "calibrate.environment", None)
    monkeypatch.setattr("perfmodel.models.refuse_without_torch", lambda *_: None)
    assert step_of(run, *asked)[1] is not Evidence.MEASURED
    assert launcher.calls == []


def test_a_machine_that_is_measured_is_not_waited_for(
    run: Run,
    asked: tuple[object, ...],
    launcher: FakeLauncher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = tmp_path / "lock"
    monkeypatch.setenv(LOCK_VARIABLE, str(lock))
    with machine_to_itself(print, path=lock):
        result = run(*asked, "--json")
    assert "not timed in place, curves answer" in result.stderr
    assert result.exit_code == EXIT_OK
    assert launcher.calls == []


@pytest.mark.parametrize("act", [failed, failed_first])
def test_what_cannot_be_replayed_is_said_and_read_from_curves(
    run: Run,
    asked: tuple[object, ...],
    launcher: FakeLauncher,
    act: Callable[[ReplayTask], Observation],
) -> None:
    launcher.behave = lambda call: play(call, act)
    result = run(*asked, "--json")
    assert "not timed in place, curves answer: own:small cannot be replayed: no kernel" in (
        result.stderr
    )
    (point,) = PredictionDocument.of_text(result.stdout).points
    assert point.evidence["compute"] is not Evidence.MEASURED

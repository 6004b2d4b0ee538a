"""A traced step repeated without its model: every call once per pass, and the sums that follow."""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch
from torch import nn

from calibrate.device import Cpu
from calibrate.fit.profile import failed_replays
from calibrate.probes import Session
from calibrate.probes.replay import (
    Passes,
    Replay,
    ReplayedOperator,
    bound_by_python,
    measure_replay,
)
from calibrate.probes.training import trained
from calibrate.ranks import one_line_of
from calibrate.replays import (
    event_s,
    first_failure_in,
    measured_steps,
    replays_in,
    without_events,
)
from calibrate.task import ReplayTask
from perfmodel.documents.observation import (
    QUEUE_PROBE,
    FailedObservation,
    ReplayObservation,
    TimedOperator,
)
from perfmodel.layout import RunSetting
from perfmodel.tracing.source import Batch, ModelSource, classification_loss
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.trace import trace_model
from perfmodel.workload import Phase
from perfmodel.workload.step import StepMethod, TracedStep
from tests.existing import existing
from tests.perfmodel.profiles import compute_rate
from tests.perfmodel.tracing.method import SGD_LOOP
from tests.played_worker import REPLAY, append


def alone() -> Session:
    return Session(rank=0, world_size=1, measured=Cpu(), control={}, data={})


def stepped(
    build: Callable[[], nn.Module],
    draw: Callable[[int], torch.Tensor],
    *,
    micro_batch: int = 2,
    method: StepMethod = SGD_LOOP,
) -> TracedStep:
    """The step of a classifier of what ``draw`` returns for a number of samples."""
    source = ModelSource(
        name="classifier",
        build=build,
        draw_batch=lambda samples: Batch(
            positional=(draw(samples),),
            keyword={},
            targets=torch.zeros(samples, dtype=torch.int64),
        ),
        loss=classification_loss,
    )
    return trace_model(source, method, micro_batch=2).step.at(micro_batch=micro_batch)


@pytest.fixture(scope="module")
def lenet() -> TracedStep:
    source = find_source("lenet")
    return trace_model(source, SGD_LOOP, micro_batch=2).step.at(micro_batch=2)


def test_every_operator_of_a_step_is_repeated(lenet: TracedStep) -> None:
    replay = Replay(alone(), lenet)
    replay.for_about(0.0)
    expected = {key for key in lenet.call_counts() if key[1] is not Phase.OPTIMIZER}
    assert replay.failed == set()
    assert set(replay.calls_s) == expected
    passes = len(replay.phases_s[Phase.FORWARD])
    assert {len(values) for values in replay.calls_s.values()} == {passes}
    counts = lenet.call_counts()
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for index in range(passes):
            total_s = sum(
                counts[key] * values[index]
                for key, values in replay.calls_s.items()
                if key[1] is phase
            )
            assert total_s == pytest.approx(replay.phases_s[phase][index])


class _LastOutput(nn.Module):
    """Classifies the last output of an LSTM: nobody asks for the gradients of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.recurrent(inputs)[0][:, -1])
        return scores


def test_a_fused_operator_that_leaves_results_undefined_is_repeated() -> None:
    step = stepped(_LastOutput, lambda samples: torch.randn(samples, 5, 8))
    replay = Replay(alone(), step)
    assert replay.failed == set()


class _Column(nn.Module):
    """Bags of one of three columns of indices, which are copied on the way."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, 4)

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bag(columns[:, 1])
        return found


@pytest.mark.parametrize(
    ("of_indices", "shape"), [(lambda rows: nn.EmbeddingBag(rows, 4), (20,)), (_Column, (3, 20))]
)
def test_tables_are_looked_up_all_over_whatever_view_of_the_indices_is_used(
    of_indices: Callable[[int], nn.Module], shape: tuple[int, ...]
) -> None:
    """An ``EmbeddingBag`` reads a flat view of its indices; rows of zeros would stay in the cache."""
    rows = 1000
    step = stepped(
        lambda: nn.Sequential(of_indices(rows), nn.Linear(4, 10)),
        lambda samples: torch.randint(0, rows, (samples, *shape)),
        micro_batch=8,
    )
    passes = Passes(alone(), step)
    [indices] = (t for t in passes.lasting.values() if t.shape == (8, *shape))
    assert len(set(indices.flatten().tolist())) > 100
    assert indices.max() < rows


def test_parameters_gradients_and_states_are_laid_out_as_those_of_the_model() -> None:
    """Two kernels of one shape, channels last, between others: AdamW over lists wants all alike."""
    last = torch.channels_last

    def build() -> nn.Module:
        kernels = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)))
        for weight in (p for p in kernels.parameters() if p.dim() == 4):
            weight.data = weight.data.contiguous(memory_format=last)
        return nn.Sequential(kernels, nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(36, 4))

    method = replace(SGD_LOOP, optimizer="adamw", optimizer_implementation="foreach")
    step = stepped(
        build,
        lambda samples: torch.randn(samples, 4, 5, 5).contiguous(memory_format=last),
        method=method,
    )
    replay = Replay(alone(), step)
    laid_out = [parameter.is_contiguous(memory_format=last) for parameter in replay._parameters]
    named = dict(zip((p.name for p in step.parameters), laid_out, strict=True))
    assert [named[f"{name}.weight"] for name in ("0.0", "0.1", "1")] == [True, True, False]
    for parameter in replay._parameters:
        state = replay._optimizer.state[parameter]
        for other in (state["exp_avg"], state["exp_avg_sq"]):
            assert other.stride() == parameter.stride()


def test_views_are_free_and_others_take_their_time(
    lenet: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that moves by 1 s in every operator."""
    spent = [0.0]
    original = ReplayedOperator.bound

    def bound(self: ReplayedOperator, tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
        act = original(self, tensors)

        def slow() -> Any:
            spent[0] += 1.0
            return act()

        return slow

    monkeypatch.setattr(ReplayedOperator, "bound", bound)
    monkeypatch.setattr(Cpu, "now", lambda _: spent[0])
    passes = Passes(alone(), lenet)
    clock = passes.new_clock()
    with torch.no_grad():
        passes.run(clock)
    calls = [call for call in lenet.calls() if call.phase is not Phase.OPTIMIZER]
    views = [lenet.operators[call.operator].view for call in calls]
    durations_s = passes.durations_s(clock)
    assert set(zip(views, durations_s, strict=True)) == {(True, 0.0), (False, 1.0)}


def test_operators_are_called_as_modules_call_them() -> None:
    assert bound_by_python("aten.add.Tensor") is not None
    assert bound_by_python("aten.tanh_backward.default") is None


def test_an_operator_that_this_torch_does_not_know_is_left_out(lenet: TracedStep) -> None:
    first, *others = lenet.operators
    odd = replace(lenet, operators=(replace(first, name="nobody.odd.default"), *others))
    assert Replay(alone(), odd).failed == {0}


def test_what_a_replay_raises_names_the_operator(
    lenet: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr("calibrate.probes.replay.returned_tensors", refuse)
    with pytest.raises(
        RuntimeError, match=r"^aten\.\w+\.\w+ in the forward pass: NotImpl.*no kernel"
    ):
        Replay(alone(), lenet)


def test_a_failed_replay_is_one_line_and_the_rest_counts(tmp_path: Path) -> None:
    setting = RunSetting(workload="9-3 unet", world_size=1, micro_batch=4)
    failed = FailedObservation(
        task="0: replay 9-3 unet", round=0, setting=setting, reason="replay: aten.odd.default"
    )
    path = append(tmp_path / "observations.jsonl", failed)
    assert replays_in(path) == []
    assert first_failure_in(path) == "replay: aten.odd.default"
    assert len(replays_in(append(path, replayed(0.1)))) == 1
    assert failed_replays([failed, failed]) == (
        "9-3 unet, micro-batch 4, failed 2 times: replay: aten.odd.default",
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ArithmeticError("diverged: the loss is nan after 9 steps"), "diverged: the loss is nan"),
        (
            RuntimeError("DefaultCPUAllocator: can't\nallocate memory: 9 bytes"),
            "out of memory: Def",
        ),
        (RuntimeError("must answer before it ends, got SIGKILL"), "out of memory: must answer"),
        (KeyError("weight"), "KeyError: 'weight'"),
    ],
)
def test_what_ends_a_run_is_told_in_one_line(error: Exception, line: str) -> None:
    assert one_line_of(error).startswith(line)
    assert "\n" not in one_line_of(error)


def replayed(*passes_s: float) -> ReplayObservation:
    """An operator that is called twice, three times as long as another one."""
    one = TimedOperator(signature="b", phase=Phase.FORWARD, num_calls=1, times_s=passes_s)
    thrice = {"signature": "a", "num_calls": 2, "times_s": tuple(3 * t for t in passes_s)}
    return REPLAY.model_copy(
        update={
            "operators": (one.model_copy(update=thrice), one),
            "forward_s": tuple(7 * t for t in passes_s),
            "backward_s": tuple(0.0 for _ in passes_s),
            "optimizer_s": tuple(0.5 for _ in passes_s),
        }
    )


def test_times_of_operators_add_up_to_the_typical_sum() -> None:
    (step,) = measured_steps([replayed(0.01, *[0.02] * 4, 0.04)])
    times_s = {operator.signature: operator.time_s for operator in step.operators}
    assert 2 * times_s["a"] + times_s["b"] == pytest.approx(7 * 0.02)
    assert times_s["a"] == pytest.approx(3 * times_s["b"])


def test_events_take_what_a_row_of_kernels_does_not() -> None:
    """1.5 us beside kernels of 2 us: 3.5 us of one, 35.5 us of 17; without the probe nothing is known."""
    rates = [
        compute_rate(QUEUE_PROBE, shape=(count,), time_s=time_s)
        for count, time_s in ((17, 35.5e-6), (1, 3.5e-6))
    ]
    assert event_s(rates) == pytest.approx(1.5e-6)
    assert event_s(rates[:1]) == event_s([]) == 0.0


def test_what_events_take_is_taken_off_every_call() -> None:
    """Of three calls of 60, 60 and 20 us 5 us each, by the lower quartile; what takes less keeps a thousandth."""
    without = without_events(replayed(20e-6, 1e-3, 19e-6, 2e-3, 3e-3), 5e-6)
    assert [o.times_s[0] for o in without.operators] == pytest.approx([55e-6, 15e-6])
    assert without.forward_s == pytest.approx((125e-6,))
    assert without.optimizer_s == pytest.approx((0.5 - 5e-6,), rel=1e-9)
    shorter = without_events(replayed(2e-6), 5e-6).operators
    assert [o.times_s[0] for o in shorter] == pytest.approx([1e-6, 2e-9])


def test_how_far_a_replay_is_off_is_pooled_over_steps() -> None:
    """Logs of one step are 0.2 apart, of the other equal: 0.1 rms, by the root of two rounds."""
    first, second = (0.5 * math.expm1(x) / 7 for x in (0.2, 0.4))
    steps = [replayed(first), replayed(second), *(replayed(first),) * 2]
    renamed = [s.model_copy(update={"workload": f"{i // 2}"}) for i, s in enumerate(steps)]
    for step in measured_steps(renamed):
        assert step.relative_error == pytest.approx(0.1 / math.sqrt(2))


@pytest.mark.parametrize(
    ("logs", "variance"),
    [
        # Starts are 0.4 apart, runs of one alike: 4 x 0.2^2 / (2 - 1), over 4 runs.
        ((0.0, 0.0, 0.4, 0.4), 0.04),
        # Starts alike, runs 0.4 apart: as far as single runs tell, 4 x 0.2^2 / 3, over 4 runs.
        ((0.0, 0.4, 0.0, 0.4), 0.04 / 3),
        # A single start tells nothing of another.
        ((0.0, 0.4), 0.04),
    ],
)
def test_a_mean_is_as_uncertain_as_starts_of_processes_differ(
    logs: tuple[float, ...], variance: float
) -> None:
    trained = [
        replayed(0.01).model_copy(update={"round": at, "trained_s": math.exp(log)})
        for at, log in enumerate(logs)
    ]
    (step,) = measured_steps(trained)
    assert step.relative_error == pytest.approx(math.sqrt(variance))
    # Whatever starts and runs are, the next one is off by both.
    assert step.run_log_error == pytest.approx(stdev(logs))


def test_a_training_counts_more_than_replays_without_one() -> None:
    """Two that took 2 and 8 s: 4 s, off by log 4 over the root of 2 and of two rounds."""
    trained = [replayed(0.01).model_copy(update={"trained_s": each_s}) for each_s in (2.0, 8.0)]
    (step,) = measured_steps([replayed(0.9), *trained])
    assert step.trained_s == pytest.approx(4.0)
    assert step.relative_error == pytest.approx(math.log(4) / 2)
    assert step.operators == measured_steps(trained)[0].operators
    # On a GPU later rounds repeat no operators.
    bare = trained[1].model_copy(
        update=dict.fromkeys(("operators", "forward_s", "backward_s", "optimizer_s"), ())
    )
    assert measured_steps([trained[0], without_events(bare, 1e-6)]) == (step,)


def test_trainings_on_several_ranks_of_the_same_calls_are_kept_by_their_number() -> None:
    alone = replayed(0.01).model_copy(update={"trained_s": 1.0, "calls": "c"})
    several: list[dict[str, Any]] = [
        *({"world_size": 2, "trained_s": each_s} for each_s in (2.0, 8.0)),
        {"world_size": 3, "trained_s": 9.0, "calls": "of another depth"},
        {"world_size": 4, "trained_s": None},
    ]
    bare = alone.model_copy(update={"operators": ()})
    (step,) = measured_steps([alone, *(bare.model_copy(update=each) for each in several)])
    assert step.trained_s == 1.0
    assert [*step.ddp_s] == [2]
    assert step.ddp_s[2] == pytest.approx((4.0, math.log(4) / 2))
    assert step.relative_error == 0.01  # not of two ranks
    again = alone.model_copy(update={"trained_s": 4.0})
    (step,) = measured_steps([alone, again, bare.model_copy(update=several[0])])
    assert step.relative_error == pytest.approx(math.log(4) / 2)
    assert step.ddp_s[2] == pytest.approx((2.0, math.log(4) / math.sqrt(2)))


def test_replays_of_an_earlier_trace_of_a_step_do_not_count() -> None:
    """A version of before called something else."""
    old = replayed(0.9)
    other = old.operators[1].model_copy(update={"signature": "c"})
    old = old.model_copy(update={"operators": (old.operators[0], other)})
    (step,) = measured_steps([old, replayed(0.01), replayed(0.01)])
    assert {operator.signature for operator in step.operators} == {"a", "b"}
    assert step.optimizer_s == pytest.approx(0.5)


LOOKS_UP = """
import torch
from torch import nn


def make(indices=None):
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3))
    return model, torch.randint(0, 50, (2, 3)) if indices is None else indices


def without_values():
    return make(torch.full((2, 3), 50))


def told():
    print("built")
    model, example = make()
    model.register_forward_pre_hook(lambda _, given: print(int(given[0].sum())))
    return model, example


def penalised():
    model, example = make()
    model[0].register_forward_hook(lambda *called: setattr(model, "aux", called[-1].mean()))
    return model, example, lambda scores: scores.sum() + model.aux
"""


def test_a_model_trains_if_its_code_is_at_hand_and_runs(
    tmp_path: Path, lenet: TracedStep, capsys: pytest.CaptureFixture[str]
) -> None:
    """Indices beyond their table are enough for a trace. A model of before would leave pages to its gradients."""
    file = tmp_path / "looks_up.py"
    file.write_text(LOOKS_UP)
    trained(alone(), f"{file}:told", lenet, target_s=0.01)
    said = "".join(capsys.readouterr()).split()  # what builds it writes to standard error
    assert said.count("built") == 1
    assert len({*said}) > 3  # batches
    # A loss may hold its model, such as what its experts leave there.
    for name in ("make", "penalised"):
        assert existing(trained(alone(), f"{file}:{name}", lenet, target_s=0.01)[0]) > 0
    with pytest.raises(IndexError):
        trained(alone(), f"{file}:without_values", lenet, target_s=0.01)
    assert trained(alone(), None, lenet, target_s=0.01) == (None, None)


TOGETHER = """
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import torch.distributed as dist

from calibrate.device import Cpu
from calibrate.probes import Session
from calibrate.probes.training import trained
from calibrate.ranks import one_line_of
from perfmodel.tracing.fork import Fork
from tests.perfmodel.tracing.method import SGD_LOOP

code, folder = sys.argv[1:]
step = SimpleNamespace(micro_batch=4, method=SGD_LOOP)


def train(rank, name, world_size=2):
    dist.init_process_group("gloo", f"file://{folder}/{name}", rank=rank, world_size=world_size)
    session = Session.open(Cpu(), group_sizes=(world_size,))
    return trained(session, f"{code}:{name}", step, target_s=0.01, world_size=world_size)[0]


for name in ("make", "unused"):
    with ExitStack() as stack:
        copies = [stack.enter_context(Fork(lambda: train(rank, name))) for rank in (0, 1)]
        for copy in copies:
            try:
                print(copy.result(within_s=60))
            except RuntimeError as error:
                print(one_line_of(error)[:60])
"""
UNUSED = """

def unused():
    model, example = make()
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: model[:3](x)
    return model, example
"""


def test_ranks_that_train_together_take_equally_long_and_raise_what_ddp_does(
    tmp_path: Path,
) -> None:
    file = tmp_path / "looks_up.py"
    file.write_text(LOOKS_UP + UNUSED)
    command = (sys.executable, "-c", TOGETHER, str(file), str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    one_s, other_s, *failed = done.stdout.splitlines()
    assert float(one_s) == float(other_s) > 0
    assert failed == ["RuntimeError: Expected to have finished reduction in the prior"[:60]] * 2


def test_a_model_that_does_not_train_is_replayed_and_says_why() -> None:
    task = ReplayTask(
        name="0: lenet",
        round=0,
        workload="lenet",
        micro_batch=2,
        code="none.py:make",
        target_s=0.01,
    )
    found = measure_replay(alone(), task)
    assert found.trained_s is None
    assert "none.py" in found.untrained
    assert found.operators


def test_rows_of_a_table_that_no_index_names_have_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 samples of 3 indices touch at most 6 of 50 rows; every other parameter is touched whole."""
    step = stepped(
        lambda: nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3)),
        lambda samples: torch.randint(0, 50, (samples, 3)),
    )
    monkeypatch.setattr(torch.optim.SGD, "zero_grad", lambda _: None)
    for parameter in Replay(alone(), step)._parameters:
        touched = (existing(parameter.grad) != 0).reshape(len(parameter), -1).any(dim=1)
        assert int(touched.sum()) == (6 if tuple(parameter.shape) == (50, 4) else len(parameter))

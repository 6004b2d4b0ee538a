"""Whatever happens to a campaign, finished tasks stay finished and nothing is mixed."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.campaign import (
    BEGIN_PREFIX,
    OBSERVATIONS,
    PLAN,
    Campaign,
    Progress,
    is_too_large,
    measure,
    read_plan,
)
from calibrate.launch import Launch
from calibrate.locks import folder_to_itself
from calibrate.task import WorkOrder, failure_of
from perfmodel.documents.observation import (
    FailedObservation,
    LoopObservation,
    failures,
    read_observations,
    refuse_repeated,
)
from perfmodel.errors import (
    IncomparableRuns,
    InvalidDocument,
    MeasurementFailed,
    PerfModelError,
    UsageError,
)
from perfmodel.files import unsealed
from perfmodel.layout import RunSetting, Synchronisation
from tests.calibrate.played import ALONE, played_campaign
from tests.fakes import FakeLauncher
from tests.played_worker import PlayedWorker, append

CRASH = MeasurementFailed("rank 1 must exit with 0, got SIGKILL")


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return played_campaign(tmp_path / "run", ("0-1", "0-2", "0-3"), ("1-1", "1-2", "1-3"))


def run(
    campaign: Campaign,
    worker: Callable[[Launch], None],
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> FakeLauncher:
    launcher = FakeLauncher(behave=worker)
    measure(campaign, launcher, resume=resume, on_progress=on_progress)
    return launcher


def crash_after(campaign: Campaign, num_tasks: int) -> None:
    with pytest.raises(MeasurementFailed) as caught:
        run(campaign, PlayedWorker(fails_after=num_tasks, failure=CRASH))
    assert caught.value is CRASH


def measured_tasks(campaign: Campaign) -> list[str]:
    observations = read_observations(campaign.folder / OBSERVATIONS)
    return [entry.task for entry in observations if isinstance(entry, LoopObservation)]


# A whole observation without its end of line may be half of a longer one; 0xc3 is half a letter.
@pytest.mark.parametrize("torn", [b'{"kind":"step","task":"0-3', b"{", b'{"task":"\xc3'])
def test_a_half_written_line_is_cut_off_before_resuming(campaign: Campaign, torn: bytes) -> None:
    crash_after(campaign, 2)
    output = campaign.folder / OBSERVATIONS
    before = output.read_bytes()
    output.write_bytes(before + torn)
    run(campaign, PlayedWorker(), resume=True)
    assert output.read_bytes().startswith(before + b'{"task":"environment-')
    assert measured_tasks(campaign) == ["0-1", "0-2", "0-3", "1-1", "1-2", "1-3"]


def test_a_folder_that_another_campaign_fills_is_refused(campaign: Campaign) -> None:
    """Whichever lock of the machine either of them uses."""
    worker = PlayedWorker()
    with (
        folder_to_itself(campaign.folder),
        pytest.raises(UsageError, match=r"is being filled by another .*process \d+ since 20"),
    ):
        run(campaign, worker, resume=True)
    assert worker.finished == []


def test_ranks_that_never_started_leave_nothing_to_resume(campaign: Campaign) -> None:
    """A busy port is refused by the launcher: the same command works once the port is free."""

    def refuse(_call: Launch) -> None:
        raise UsageError("--master-port: must be free, got 29500")

    with pytest.raises(UsageError, match="must be free"):
        run(campaign, refuse)
    other = replace(campaign, plan={"what": "another"})
    # Every round runs in processes of its own.
    assert [call.topology for call in run(other, PlayedWorker()).calls] == [ALONE, ALONE]
    assert read_plan(campaign.folder) == {"what": "another"}


def in_the_way(folder: Path) -> None:
    (folder / OBSERVATIONS).unlink()
    (folder / OBSERVATIONS).mkdir()


@pytest.mark.parametrize(
    ("change", "spoil", "error", "words"),
    [
        ({"plan": {"what": "the other"}}, None, UsageError, "another plan"),
        ({"fingerprint": "there"}, None, IncomparableRuns, "here, this one is there"),
        ({"folder": "orders/round-0.json/run"}, None, PerfModelError, r"run: cannot.*: Not a dir"),
        ({}, in_the_way, PerfModelError, r"observations\.jsonl: .*Is a directory"),
        ({"resume": False}, None, UsageError, "holds observations already; add --resume"),
    ],
)
def test_what_cannot_be_continued_is_refused_in_one_line_and_stays_as_it_is(
    campaign: Campaign,
    change: dict[str, Any],
    spoil: Callable[[Path], None] | None,
    error: type[PerfModelError],
    words: str,
) -> None:
    crash_after(campaign, 1)
    before = (campaign.folder / OBSERVATIONS).read_bytes()
    if spoil is not None:
        spoil(campaign.folder)
    other = replace(
        campaign,
        folder=campaign.folder / change.get("folder", ""),
        plan=change.get("plan", campaign.plan),
        placement=replace(campaign.placement, fingerprint=change.get("fingerprint", "here")),
    )
    worker = PlayedWorker()
    with pytest.raises(error, match=words) as caught:
        run(other, worker, resume=change.get("resume", True))
    assert "\n" not in str(caught.value)
    assert worker.finished == []
    assert spoil is not None or (campaign.folder / OBSERVATIONS).read_bytes() == before


@pytest.mark.parametrize("interrupted_after", [0, 4])
def test_progress_counts_every_task_once_and_goes_on(
    campaign: Campaign, interrupted_after: int
) -> None:
    crash_after(campaign, interrupted_after)
    seen: list[Progress] = []
    run(campaign, PlayedWorker(), resume=True, on_progress=seen.append)
    assert [(progress.done, progress.total, progress.task) for progress in seen] == [
        (done, 6, f"{(done - 1) // 3}-{(done - 1) % 3 + 1}")
        for done in range(interrupted_after + 1, 7)
    ]


def test_other_lines_of_the_ranks_are_no_progress(campaign: Campaign) -> None:
    seen: list[Progress] = []

    def chat(call: Launch) -> None:
        before_s = call.last_progress()
        call.on_line("a library says hello\n")
        assert call.last_progress() == before_s

    run(campaign, chat, on_progress=seen.append)
    assert seen == []


def test_what_memory_does_not_hold_is_data(campaign: Campaign) -> None:
    """The second of three batches fails: it and the larger one are never tried again, the rest goes on."""
    small = PlayedWorker(holds=lambda setting: setting.micro_batch < 2)
    launcher = run(campaign, small)
    assert small.finished == ["0-1", "1-1"]
    assert len(launcher.calls) == 2
    found = read_observations(campaign.folder / OBSERVATIONS)
    failed = [entry for entry in found if isinstance(entry, FailedObservation)]
    assert [entry.task for entry in failed] == ["0-2"]
    assert failed[0].is_too_large
    assert run(campaign, small, resume=True).calls == []


def test_a_module_alone_may_fit_where_ddp_does_not() -> None:
    alone, wrapped = (
        RunSetting(workload="light", world_size=1, micro_batch=8, synchronisation=how)
        for how in (Synchronisation.NONE, Synchronisation.DDP)
    )
    assert is_too_large(wrapped, {alone})
    assert not is_too_large(alone, {wrapped})
    assert not is_too_large(replace(alone, micro_batch=7), {alone})
    assert not is_too_large(replace(alone, workload="heavy"), {alone})


STICKY = "rank 0 must exit with 0, got exit code 1: AcceleratorError: CUDA error: an illegal memory access"


@dataclass(slots=True, kw_only=True)
class PlayedGpu:
    """Ranks on a GPU: each of the first failures of a task ends them all, as a poisoned context or a hang does."""

    fails: dict[str, int]
    worker: PlayedWorker = field(default_factory=PlayedWorker)

    def __call__(self, call: Launch) -> None:
        order = WorkOrder.read(Path(call.arguments[0]))
        for task in order.tasks:
            call.on_line(f"{BEGIN_PREFIX}{task.name}\n")
            if self.fails.get(task.name, 0) > 0:
                self.fails[task.name] -= 1
                raise MeasurementFailed(f"{STICKY}; what was measured is kept; mend the cause")
            one = order.model_copy(update={"tasks": (task,)})
            path = Path(call.arguments[0]).with_name("one.json")
            one.write(path)
            self.worker(replace(call, arguments=(str(path),)))
            path.unlink()


@pytest.fixture
def on_gpu(campaign: Campaign) -> Campaign:
    return replace(campaign, placement=replace(campaign.placement, device_kind="cuda"))


def test_a_task_that_ends_the_ranks_of_a_gpu_is_tried_again(on_gpu: Campaign) -> None:
    ranks = PlayedGpu(fails={"0-2": 1})
    waited: list[Progress] = []
    launcher = run(on_gpu, ranks, on_progress=waited.append)
    assert len(launcher.calls) == 3
    assert measured_tasks(on_gpu) == ["0-1", "0-2", "0-3", "1-1", "1-2", "1-3"]
    assert [entry.task for entry in waited if entry.is_waiting] == [
        "0-2 ended the ranks; it is tried again in new processes"
    ]


def test_a_task_that_fails_twice_is_named_and_the_campaign_goes_on(on_gpu: Campaign) -> None:
    """What comes after it runs in processes of its own: no poisoned context is left to it."""
    ranks = PlayedGpu(fails={"0-2": 2, "1-1": 2})
    run(on_gpu, ranks)
    assert measured_tasks(on_gpu) == ["0-1", "0-3", "1-2", "1-3"]
    found = failures(read_observations(on_gpu.folder / OBSERVATIONS))
    assert [(entry.task, entry.reason) for entry in found] == [("0-2", STICKY), ("1-1", STICKY)]
    # Whoever resumes tries again: the GPU may have been mended.
    run(on_gpu, ranks, resume=True)
    assert sorted(measured_tasks(on_gpu))[1] == "0-2"
    output = on_gpu.folder / OBSERVATIONS
    assert failures(read_observations(output)) == []
    refuse_repeated(output, read_observations(output))


def test_a_gpu_that_is_of_no_use_ends_the_campaign(on_gpu: Campaign) -> None:
    ranks = PlayedGpu(fails={"0-1": 9, "0-2": 9, "0-3": 9})
    with pytest.raises(MeasurementFailed, match="illegal memory access"):
        run(on_gpu, ranks)
    assert sum(ranks.fails.values()) == 3 * 9 - 3 * 2

    def refuse(_call: Launch) -> None:
        raise CRASH

    # So does one whose ranks do not even begin.
    launcher = FakeLauncher(behave=refuse)
    with pytest.raises(MeasurementFailed):
        measure(on_gpu, launcher, resume=True, on_progress=lambda _: None)
    assert len(launcher.calls) == 1


def test_a_gpu_in_use_is_refused_before_anything_runs(
    on_gpu: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(uuids: tuple[str, ...]) -> None:
        raise MeasurementFailed(f"{uuids[0]}: must be free")

    monkeypatch.setattr("calibrate.campaign.refuse_used", used)
    taken = replace(on_gpu, placement=replace(on_gpu.placement, gpus=("GPU-0",)))
    ranks = PlayedGpu(fails={})
    with pytest.raises(MeasurementFailed, match="GPU-0: must be free"):
        run(taken, ranks)
    assert ranks.worker.finished == []


def test_what_failed_on_its_own_is_tried_again_by_resume(campaign: Campaign) -> None:
    """A replay, or a run of the judge; who only asks for a prediction does not wait for it again."""

    def fails(call: Launch) -> None:
        order = WorkOrder.read(Path(call.arguments[0]))
        for task in order.tasks:
            append(Path(order.output), failure_of(task, "replay: no kernel"))

    run(campaign, fails)
    assert run(replace(campaign, tries_again=False), fails, resume=True).calls == []
    run(campaign, PlayedWorker(), resume=True)
    assert measured_tasks(campaign) == ["0-1", "0-2", "0-3", "1-1", "1-2", "1-3"]
    assert run(campaign, PlayedWorker(), resume=True).calls == []


def test_a_plan_that_is_a_pipe_is_not_waited_for(campaign: Campaign) -> None:
    run(campaign, PlayedWorker())
    path = campaign.folder / PLAN
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidDocument, match="must be a regular file"):
        run(campaign, PlayedWorker(), resume=True)


def test_an_edited_plan_is_refused(campaign: Campaign) -> None:
    run(campaign, PlayedWorker())
    path = campaign.folder / PLAN
    path.write_text(path.read_text().replace("the plan", "a plan"))
    with pytest.raises(InvalidDocument, match=r"plan\.json: was changed after it was written"):
        read_plan(campaign.folder)
    with unsealed():
        assert read_plan(campaign.folder) == {"what": "a plan"}

"""Whatever happens to a campaign, finished tasks stay finished and nothing is mixed."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.campaign import (
    OBSERVATIONS,
    Campaign,
    Progress,
    is_too_large,
    measure,
    read_plan,
)
from calibrate.locks import FOLDER_LOCK, folder_to_itself
from calibrate.placement import Placement
from calibrate.task import StepTask
from perfmodel.documents.observation import (
    FailedObservation,
    StepObservation,
    read_observations,
)
from perfmodel.errors import (
    IncomparableRuns,
    MeasurementFailed,
    PerfModelError,
    UsageError,
)
from perfmodel.layout.layout import RunSetting, Synchronisation
from tests.calibrate.played import ALONE
from tests.fakes import FakeLauncher, LaunchCall
from tests.played_worker import PlayedWorker, orders_of

CRASH = MeasurementFailed("rank 1 must exit with 0, got SIGKILL")


def tasks_of(index: int) -> tuple[StepTask, ...]:
    return tuple(
        StepTask(
            name=f"{index}-{micro_batch}",
            round=index,
            setting=RunSetting(workload="light", world_size=2, micro_batch=micro_batch),
            target_s=0.1,
        )
        for micro_batch in (1, 2, 3)
    )


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """Two rounds of three tasks."""
    return Campaign(
        folder=tmp_path / "run",
        plan={"what": "the plan"},
        rounds=(tasks_of(0), tasks_of(1)),
        placement=Placement(
            device_kind="cpu",
            topology=ALONE,
            conditions={"OMP_NUM_THREADS": "1"},
            fingerprint="here",
        ),
    )


def run(
    campaign: Campaign,
    worker: Callable[[LaunchCall], None],
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> FakeLauncher:
    launcher = FakeLauncher(behave=worker)
    measure(campaign, launcher, resume=resume, on_progress=on_progress)
    return launcher


def crash_after(campaign: Campaign, num_tasks: int, failure: PerfModelError = CRASH) -> None:
    worker = PlayedWorker(fails_after=num_tasks, failure=failure)
    with pytest.raises(type(failure)) as caught:
        run(campaign, worker)
    assert caught.value is failure


def measured_tasks(campaign: Campaign) -> list[str]:
    observations = read_observations(campaign.folder / OBSERVATIONS)
    return [entry.task for entry in observations if isinstance(entry, StepObservation)]


def test_every_round_runs_in_processes_of_its_own(campaign: Campaign) -> None:
    launcher = run(campaign, PlayedWorker())
    assert len(launcher.calls) == 2
    assert {call.topology for call in launcher.calls} == {ALONE}
    assert orders_of(campaign.folder) == [["0-1", "0-2", "0-3"], ["1-1", "1-2", "1-3"]]
    assert measured_tasks(campaign) == ["0-1", "0-2", "0-3", "1-1", "1-2", "1-3"]


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


def test_observations_are_never_overwritten_without_a_word(campaign: Campaign) -> None:
    crash_after(campaign, 1)
    before = (campaign.folder / OBSERVATIONS).read_bytes()
    with pytest.raises(UsageError, match="holds observations already; add --resume"):
        run(campaign, PlayedWorker())
    assert (campaign.folder / OBSERVATIONS).read_bytes() == before


def test_a_folder_that_another_campaign_fills_is_refused(campaign: Campaign) -> None:
    """Whichever lock of the machine either of them uses."""
    worker = PlayedWorker()
    with (
        folder_to_itself(campaign.folder),
        pytest.raises(UsageError, match="is being filled by another measurement"),
    ):
        run(campaign, worker, resume=True)
    assert worker.finished == []


def test_ranks_that_never_started_leave_nothing_to_resume(campaign: Campaign) -> None:
    """A busy port is refused by the launcher: the same command works once the port is free."""

    def refuse(_call: LaunchCall) -> None:
        raise UsageError("--master-port: must be free, got 29500")

    with pytest.raises(UsageError, match="must be free"):
        run(campaign, refuse)
    other = replace(campaign, plan={"what": "another"})
    assert len(run(other, PlayedWorker()).calls) == 2
    assert read_plan(campaign.folder) == {"what": "another"}


def test_another_plan_is_refused(campaign: Campaign) -> None:
    crash_after(campaign, 1)
    with pytest.raises(UsageError, match="another plan"):
        run(replace(campaign, plan={"what": "the other"}), PlayedWorker(), resume=True)


def test_observations_of_another_machine_are_refused(campaign: Campaign) -> None:
    crash_after(campaign, 1)
    elsewhere = replace(campaign, placement=replace(campaign.placement, fingerprint="there"))
    with pytest.raises(IncomparableRuns, match="fingerprint here, this one is there"):
        run(elsewhere, PlayedWorker(), resume=True)


def test_progress_counts_every_task_once(campaign: Campaign) -> None:
    seen: list[Progress] = []
    run(campaign, PlayedWorker(), on_progress=seen.append)
    assert [(progress.done, progress.total) for progress in seen] == [
        (done, 6) for done in range(1, 7)
    ]
    assert seen[3].task == "1-1"


def test_progress_continues_where_it_was_interrupted(campaign: Campaign) -> None:
    crash_after(campaign, 4)
    seen: list[Progress] = []
    run(campaign, PlayedWorker(), resume=True, on_progress=seen.append)
    assert [progress.done for progress in seen] == [5, 6]


def test_other_lines_of_the_ranks_are_no_progress(campaign: Campaign) -> None:
    seen: list[Progress] = []

    def chat(call: LaunchCall) -> None:
        before_s = call.last_progress()
        call.on_line("a library says hello\n")
        assert call.last_progress() == before_s

    run(campaign, chat, on_progress=seen.append)
    assert seen == []


def test_a_folder_that_cannot_be_made_is_told_in_one_line(
    campaign: Campaign, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = replace(campaign, folder=tmp_path / "file" / "run")
    with pytest.raises(PerfModelError, match=r"run: cannot be written: Not a dir") as caught:
        run(blocked, PlayedWorker())
    assert "\n" not in str(caught.value)


def test_observations_that_cannot_be_opened_are_told_in_one_line(campaign: Campaign) -> None:
    crash_after(campaign, 1)
    (campaign.folder / OBSERVATIONS).unlink()
    (campaign.folder / OBSERVATIONS).mkdir()
    with pytest.raises(PerfModelError, match=r"observations\.jsonl: .*Is a directory") as caught:
        run(campaign, PlayedWorker(), resume=True)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_told_in_one_line_before_anything_starts(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    worker = PlayedWorker()
    with pytest.raises(PerfModelError, match="No space left on device") as caught:
        run(campaign, worker)
    assert "\n" not in str(caught.value)
    assert worker.finished == []
    assert list(campaign.folder.iterdir()) == [campaign.folder / FOLDER_LOCK]


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

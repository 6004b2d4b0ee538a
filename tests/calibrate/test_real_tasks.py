"""One campaign of real ranks, one of which is killed: buckets, a replay."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from calibrate.campaign import OBSERVATIONS, Campaign, Progress, measure
from calibrate.experiment import BUCKET_CAPS_MB
from calibrate.launch import TorchrunLauncher
from calibrate.task import ReplayTask, StepTask
from perfmodel.convergence import noise_scale
from perfmodel.documents.observation import (
    ReplayObservation,
    read_observations,
)
from perfmodel.errors import MeasurementFailed
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.plan.batch import read_gradient_norms
from perfmodel.step.stages import gradient_buckets
from tests.calibrate.real_ranks import (
    NEEDS_TWO_RANKS,
    assert_buckets_are_those_of_ddp,
    campaign_of,
    observations_in,
    rank_process,
    steps_of,
    tasks_in,
    traced,
    workers,
)

pytestmark = NEEDS_TWO_RANKS
ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = [
    RunSetting(workload=model, world_size=1, micro_batch=1, bucket_cap_mb=cap_mb)
    for model in ("resnet18", "mlp", "transformer")
    for cap_mb in BUCKET_CAPS_MB
]


REPLAYED = ReplayTask(
    name="replayed",
    round=0,
    workload="lenet",
    micro_batch=2,
    target_s=0.0,
)


@dataclass(frozen=True)
class Interrupted:
    """A campaign whose second rank was killed, and that was resumed."""

    campaign: Campaign
    said: str
    kept: list[str]
    """Tasks on disk when it had ended."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Two starts of the ranks serve all: importing torch takes longer than the tasks."""
    campaign = campaign_of(
        tmp_path_factory.mktemp("tasks"),
        *(
            StepTask(
                name=name,
                round=0,
                setting=RunSetting(
                    workload="lenet",
                    world_size=world_size,
                    micro_batch=2,
                    synchronisation=Synchronisation.NO_SYNC
                    if world_size > 1
                    else Synchronisation.NONE,
                ),
                target_s=1.0,
            )
            for name, world_size in (("two", 2), ("again", 2), ("one", 1))
        ),
        *steps_of(*SETTINGS),
        REPLAYED,
    )

    def kill(progress: Progress) -> None:
        # torchrun may take the lower rank, which it ends itself, for the first
        if progress.done == 1:
            rank_process(campaign.folder, 1).kill()

    with pytest.raises(MeasurementFailed) as caught:
        measure(campaign, TorchrunLauncher(), resume=False, on_progress=kill)
    assert workers(campaign.folder) == []
    kept = [entry.task for entry in observations_in(campaign.folder)]
    measure(campaign, TorchrunLauncher(), resume=True, on_progress=lambda _: None)
    return Interrupted(campaign, str(caught.value), kept)


@pytest.fixture
def observations(interrupted: Interrupted) -> Path:
    return interrupted.campaign.folder / OBSERVATIONS


def test_a_killed_rank_is_named_and_the_rest_can_be_resumed(interrupted: Interrupted) -> None:
    assert "rank 1 must exit with 0, got SIGKILL" in interrupted.said
    assert "--resume" in interrupted.said
    assert "\n" not in interrupted.said
    folder, kept = interrupted.campaign.folder, interrupted.kept
    assert "two" in kept
    assert "one" not in kept
    found = observations_in(folder)
    assert [entry.task for entry in found][: len(kept)] == kept
    assert tasks_in(found) == [task.name for task in interrupted.campaign.rounds[0]]
    assert workers(folder) == []


def test_predicted_buckets_are_those_that_ddp_forms(observations: Path) -> None:
    """From its second step on DDP reduces gradients in the order in which they became ready."""
    found = read_observations(observations)
    assert assert_buckets_are_those_of_ddp(found) == len(SETTINGS)
    models = traced(found).values()
    assert len(models) == 3
    for model in models:
        default, capped = (
            len(gradient_buckets(model, setting.layout))
            for setting in SETTINGS
            if setting.workload == model.name
        )
        assert 1 < default <= capped


def test_a_step_is_traced_and_replayed(observations: Path) -> None:
    found = read_observations(observations)
    [replay] = [e for e in found if isinstance(e, ReplayObservation)]
    assert (replay.workload, replay.micro_batch) == ("lenet", 2)
    assert len(replay.forward_s) == len(replay.backward_s) >= 3
    assert replay.failed == ()
    assert replay.traced is not None


def test_the_example_for_own_trainings_writes_what_the_command_reads(tmp_path: Path) -> None:
    script = ROOT / "docs" / "log_gradient_norms.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    command = (sys.executable, *launch, "--nproc-per-node", "2", str(script))
    ended = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    steps = read_gradient_norms(tmp_path / "norms.csv")
    assert len(steps) == 100
    # a distance of 1 along each of 20 axes shrinks while the noise of the targets stays
    first, last = (noise_scale(part) for part in (steps[:20], steps[-20:]))
    assert first is not None
    assert last is None or last.batch > first.batch

"""The testbed for real: namespaces, shaped links, DistributedDataParallel. Under a minute."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from perfmodel.errors import MeasurementFailed
from perfmodel.layout import RunSetting
from perfmodel.step.stages import gradient_buckets
from validate.testbed import plan
from validate.testbed.campaign import (
    Cluster,
    obstacle,
    play,
    running_server,
)
from validate.testbed.links import BURST_BYTES
from validate.testbed.records import (
    CollectiveRun,
    CollectiveSetting,
    Fabric,
    Job,
    TrainingRun,
    TrainingSetting,
)

MBIT = 125_000.0
ROOT = Path(__file__).resolve().parent.parent.parent.parent
OBSTACLE = "torch is not installed" if find_spec("torch") is None else obstacle()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no shaped namespaces here: {OBSTACLE}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_server() as server:
        yield server


def collect(cluster: Cluster, setting: CollectiveSetting) -> CollectiveRun:
    run = play(cluster, setting)
    assert isinstance(run, CollectiveRun)
    return run


def train(cluster: Cluster, setting: TrainingSetting) -> TrainingRun:
    run = play(cluster, setting)
    assert isinstance(run, TrainingRun)
    return run


def training(name: str, fabric: Fabric, **changes: object) -> TrainingSetting:
    given = {
        "name": name,
        "family": "test",
        "model": plan.emulated("resnet20", compute_s=0.06),
        "fabric": fabric,
        "bucket_cap_mb": 0.5,
        "num_steps": 6,
    }
    return TrainingSetting.model_validate(given | changes)


def test_a_large_all_reduce_takes_the_time_of_its_ring(cluster: Cluster) -> None:
    """4 MiB at 200 Mbit/s between two: 168 ms, plus 1 % of headers, less the shaper's burst."""
    setting = CollectiveSetting(
        name="ring", fabric=plan.flat(2, 200), sizes_bytes=(4 * 2**20,), repeats=3
    )
    run = collect(cluster, setting)
    assert np.median(run.durations_s[0]) == pytest.approx(0.168, rel=0.05)


@pytest.mark.parametrize(
    ("collective", "passes"),
    [
        ("all_reduce", 1.0),
        ("reduce_scatter", 1.0),  # torch's is an all-reduce of which a part is kept
        ("all_gather", 0.5),
        ("all_to_all", 0.5),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_collectives_send_over_their_links_what_they_are_said_to(
    cluster: Cluster, collective: str, passes: float
) -> None:
    """1 MiB at 200 Mbit/s between two: each link carries this part of the array.

    Large all-gathers and all-to-alls of two ranks take up to twice as long; why is not known. The rest
    of the upper bound is for machines that are busy.
    """
    setting = CollectiveSetting.model_validate(
        {
            "name": collective,
            "collective": collective,
            "fabric": plan.flat(2, 200),
            "sizes_bytes": (1000, 2**20),
            "target_s": 0.02,
            "pause_s": 0.0,
        }
    )
    run = collect(cluster, setting)
    assert [len(durations_s) >= 3 for durations_s in run.durations_s] == [True, True]
    wire_s = passes * 2**20 / (200 * MBIT)
    assert 0.85 * wire_s < np.median(run.durations_s[1]) < 3 * wire_s


def test_ddp_buckets_bytes_and_time_are_those_of_the_model(cluster: Cluster) -> None:
    fabric = plan.flat(4, 100)
    setting = training("ddp", fabric)
    run = train(cluster, setting)
    workload = plan.as_workload(setting.model)
    buckets = gradient_buckets(
        workload, RunSetting(workload="w", world_size=4, micro_batch=1, bucket_cap_mb=0.5).layout
    )
    assert run.bucket_bytes == tuple(bucket.size_bytes for bucket in buckets)
    ring = 2 * 3 / 4 * setting.model.gradient_bytes * setting.num_steps
    for sent in run.link_bytes.values():
        assert sent == pytest.approx(ring, rel=0.03)
    # The wire needs 131 ms; a first part of backward is not hidden, so that the step is longer.
    step_s = float(np.median(run.step_s))
    assert ring / setting.num_steps / (100 * MBIT) < step_s
    assert step_s < ring / setting.num_steps / (100 * MBIT) + setting.model.compute_s + 0.03


def test_a_rank_that_fails_is_named_and_the_server_goes_on(cluster: Cluster) -> None:
    # Four petabytes of a gradient.
    layer = {"num_elements": 10**15, "forward_s": 1e-3, "backward_s": 1e-3}
    broken = training("broken", plan.flat(2, 1000), model={"name": "huge", "layers": (layer,)})
    with pytest.raises(MeasurementFailed, match=r"rank \d failed: RuntimeError"):
        cluster.play(Job(setting=broken, limit_s=20.0))
    assert train(cluster, training("after", plan.flat(2, 1000))).step_s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "perfmodel", "validate", "testbed", "--out", str(tmp_path))
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        children: list[psutil.Process] = []
        deadline_s = time.monotonic() + 120
        while len(children) < 3 and time.monotonic() < deadline_s:
            children = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        assert len(children) >= 3
        time.sleep(0.5)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, number)
        process.wait(timeout=20)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    if number is not signal.SIGKILL:
        assert process.returncode == 130
    assert not list(Path("/run/netns").glob("node*"))


def test_a_warm_up_uses_the_burst_of_idle_links_up(cluster: Cluster) -> None:
    """16 KiB at 120 Mbit/s take 1.1 ms; the first four fit into what idle links let through at once."""
    setting = CollectiveSetting.model_validate(
        {
            "name": "burst",
            "collective": "send_recv",
            "fabric": plan.flat(2, 120),
            "sizes_bytes": (16_384,),
            "repeats": 12,
            "pause_s": 0.0,
        }
    )
    warming = setting.model_copy(update={"warm_up_bytes": 4 * BURST_BYTES})
    # A busy machine that pauses for 5 ms lets links save up again: one of many attempts is spared.
    for _ in range(40):
        cold, warm = (collect(cluster, each).durations_s[0] for each in (setting, warming))
        steady_s = np.median(warm)
        if min(cold[:3]) < 0.5 * steady_s and np.median(warm[:3]) > 0.7 * steady_s:
            break
    assert min(cold[:3]) < 0.5 * steady_s
    assert np.median(warm[:3]) > 0.7 * steady_s

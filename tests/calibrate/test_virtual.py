"""A virtual GPU, whose truth is known, end to end; ``tests.benchmarks.virtual`` is the long version."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calibrate.experiment import BUDGETS, Experiment
from calibrate.fit.profile import _rate
from calibrate.launch import Launch, LaunchFlags, TorchrunLauncher, resolve_topology
from calibrate.probes import Session, compute, training
from calibrate.probes.training import host_steps
from calibrate.random_models import Inputs, Sketch, draw
from calibrate.replays import event_s, replayed_s, without_events
from calibrate.summary import typical
from calibrate.task import CollectiveTask, OverlapTask, WorkOrder
from calibrate.virtual import SHIPPED, Device, Host, Network, Noise, Truth
from calibrate.virtual.gpu import Memory, VirtualEvent, VirtualGpu, Work
from perfmodel.documents import installed_version
from perfmodel.documents.hardware import shipped_catalogue
from perfmodel.documents.observation import (
    CollectiveObservation,
    ComputeObservation,
    OperatorsObservation,
    ReplayObservation,
    StepObservation,
    gpu_faults,
    read_observations,
)
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import CampaignDocument, ValidationDocument
from perfmodel.units import KIB, MIB
from perfmodel.workload import Phase
from tests.benchmarks.virtual import (
    calibrated,
    judged_law,
    judged_memory,
    judged_steps,
    random_truth,
)
from tests.benchmarks.virtual_record import HELD_OUT, RECORDED, loaded
from tests.benchmarks.virtual_report import is_named
from tests.existing import existing
from tests.virtual_ranks import Team, TeamSession, begun, plain_loop_s, play

ROOT = Path(__file__).resolve().parent.parent.parent
TRUTH = Truth(
    name="made up",
    host=Host(launch_s=1e-5, event_s=0.0, queue=4),
    device=Device(flop_per_s={"fp32": 1e13}, bytes_per_s=1e12),
)


def issued(gpu: VirtualGpu, *costs_s: float) -> None:
    for cost_s in costs_s:
        gpu.issue(cost_s, host_s=1e-5)


def test_a_stream_executes_in_order_behind_the_host() -> None:
    gpu = VirtualGpu(TRUTH)
    start, end = VirtualEvent(gpu), VirtualEvent(gpu)
    start.record()
    issued(gpu, 3e-5, 1e-5)
    end.record()
    assert gpu.host_s == pytest.approx(2e-5)
    assert end.seconds_since(start) == pytest.approx(1e-5 + 3e-5 + 1e-5)
    gpu.synchronise()
    assert gpu.host_s == pytest.approx(5e-5)


def test_operators_of_a_truth_differ_and_a_host_varies_by_run_apart_from_its_device() -> None:
    """Log of launches and rates of 2,000 operators, and of 2,000 runs: standard deviations 0.3, 0.2, 0.1."""
    host, device = replace(TRUTH.host, spread=0.3), replace(TRUTH.device, spread=0.2, kernel_s=0.0)
    truth = replace(TRUTH, host=host, device=device, noise=Noise(host=0.1))
    gpu, names = VirtualGpu(truth), [f"aten::{number}" for number in range(2000)]
    works = [Work(kind="kernel", operator=name, size_bytes=10**9) for name in ("", *names)]
    costs_s = np.log([gpu.cost_of(work) for work in works])
    assert (costs_s[1:] - costs_s[0]).std(axis=0) == pytest.approx((0.2, 0.3), rel=0.05)
    assert gpu.cost_of(works[1]) == VirtualGpu(truth, occasion="later").cost_of(works[1])
    factors = []
    for name in names:
        gpu.begin(name)
        factors.append((gpu.factor, gpu.host_factor))
    assert np.log(factors).std(axis=0) == pytest.approx((0.0, 0.1), rel=0.05)


def test_a_full_queue_stops_the_host() -> None:
    gpu = VirtualGpu(TRUTH)
    issued(gpu, *[1e-3] * 5)
    assert gpu.host_s == pytest.approx(1e-5 + 1e-3)


class Issuing(nn.Module):
    """Starts equal kernels in its forward pass, at 10 us each of the host."""

    def __init__(self, gpu: VirtualGpu, num_kernels: int, kernel_s: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.gpu, self.costs_s = gpu, [kernel_s] * num_kernels

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        issued(self.gpu, *self.costs_s)
        return self.gain * inputs


@pytest.mark.parametrize(
    ("num_kernels", "behind"), [(500, 1.15), (500, 2.0), (900, 2.0), (3000, 0.5), (3000, 2.0)]
)
def test_a_full_queue_is_no_time_of_the_host(
    num_kernels: int, behind: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that takes so much of its host's time; 3,000 kernels of twice that fill the queue."""
    gpu = VirtualGpu(replace(TRUTH, host=replace(TRUTH.host, queue=1024)))
    one = Inputs(shape=(1,))
    sketch = Sketch(
        build=lambda: Issuing(gpu, num_kernels, behind * 1e-5),
        inputs=(one,),
        targets=one,
        loss=nn.functional.mse_loss,
    )
    model = replace(draw(0, 0), sketch=sketch, optimizer="sgd", flags="default", precision="fp32")
    counts = {Phase.FORWARD: num_kernels, Phase.BACKWARD: 0, Phase.OPTIMIZER: 0}
    monkeypatch.setattr(training, "issued", lambda _, phase: {f"{phase.value}_s": counts[phase]})
    session = Session(rank=0, world_size=1, measured=gpu, control={}, data={})
    step: Any = None  # its counts are those above
    found = host_steps(session, model, step, target_s=0.1)
    if (num_kernels, behind) == (3000, 2.0):
        assert found is None
    else:
        forward_s = existing(found).dispatch_s[Phase.FORWARD]
        assert forward_s == pytest.approx([num_kernels * 1e-5] * len(forward_s))


def test_a_collective_starts_with_the_last_rank_and_slows_compute_down() -> None:
    gpu = VirtualGpu(
        Truth(
            name="slow",
            host=TRUTH.host,
            device=TRUTH.device,
            network=Network(compute_slowdown=2.0),
        )
    )
    gpu.latest = lambda _, ready_s: max(ready_s, 5e-4)
    end_s = gpu.issue_collective(1e-3, group_size=2)
    assert end_s == pytest.approx(1.5e-3)
    gpu.wait_for(5e-4)
    # 1 ms beside the collective does half of it.
    gpu.issue(1e-3, host_s=0.0)
    gpu.synchronise()
    assert gpu.host_s == pytest.approx(2e-3)


def test_a_switch_adds_what_devices_of_a_node_send() -> None:
    """2 MB to 8 devices at 0.8 of 100 GB/s, 9/8 of it each, after 25 us; a ring takes 14/8 at 100 GB/s."""
    network = Network(
        inner_bytes_per_s=1e11,
        inner_latency_s=1e-5,
        launch_s=1e-5,
        switch_share=0.8,
        memory_passes=0.0,
    )
    truth = Truth(
        name="switch",
        host=TRUTH.host,
        device=TRUTH.device,
        network=network,
    )
    switched_s = 1e-5 + 2.5e-5 + 2e6 * 9 / 8 / 0.8e11
    assert truth.collective_s("all_reduce", 2_000_000, 8) == pytest.approx(switched_s)
    assert truth.collective_s("all_gather", 2_000_000, 8) > switched_s
    ring = replace(truth, network=replace(truth.network, switch_share=0.0))
    assert ring.collective_s("all_reduce", 2_000_000, 8) > switched_s


def test_a_group_of_one_rank_on_each_node_has_the_links_between_them() -> None:
    """Eight ranks of two nodes: the first of each reduce over one card, which starts later; two of one inside it."""
    truth = Truth.read("two-nodes")
    apart_s = truth.collective_s("all_reduce", 2**28, 2, num_nodes=2)
    assert apart_s == pytest.approx(2**28 / truth.network.outer_bytes_per_s, rel=0.05)
    assert truth.collective_s("all_reduce", 2**28, 2) < apart_s / 4
    network = replace(truth.network, outer_launch_s=1e-3)
    later = replace(truth, network=network)
    more_s = 1e-3 - truth.network.outer_launch_s
    assert later.collective_s("all_reduce", 2**28, 2, num_nodes=2) == pytest.approx(
        apart_s + more_s
    )


def test_heat_slows_kernels_down_and_is_told() -> None:
    hot = replace(TRUTH, device=replace(TRUTH.device, throttled=0.5, throttled_share=1.0))
    gpu = VirtualGpu(hot)
    issued(gpu, 3e-5)
    gpu.synchronise()
    assert gpu.host_s == pytest.approx(1e-5 + 6e-5)
    assert TRUTH.throttling is None
    assert hot.throttling is not None
    [words] = gpu_faults([hot.throttling])
    assert words.startswith("GPU clocks were lowered by heat in 100 % of the samples")


def test_memory_is_held_in_blocks_and_ends() -> None:
    memory = Memory(limit_bytes=4 * MIB)
    first = memory.hold(1000)
    second = memory.hold(3 * MIB)
    assert (first, memory.peak_bytes, memory.reserved_bytes) == (1024, 3 * MIB + 1024, 4 * MIB)
    with pytest.raises(MemoryError, match="beside 3,146,752 B of 4,194,304 B"):
        memory.hold(2 * MIB)
    memory.release(second)
    memory.reset_peak()
    assert (memory.peak_bytes, memory.reserved_bytes) == (1024, 4 * MIB)


def test_shipped_truths_can_be_read() -> None:
    names = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    assert names
    for name in names:
        truth = Truth.read(name)
        ring_s = [truth.collective_s("all_reduce", 2**20, n) for n in (2, 4, 8)]
        assert ring_s == sorted(ring_s)


#: What every process of a campaign imports first: a few of the layers, one round, one short run of what is judged.
LIGHT = """
from dataclasses import replace
from calibrate import experiment
from validate import judging
layers = experiment.planned_layers
experiment.planned_layers = lambda **how: layers(**how)[::24]
quick = replace(experiment.BUDGETS["quick"], num_rounds=1, other_rounds=1, repetition_s=0.05)
experiment.BUDGETS["quick"] = quick
judging.BUDGETS["quick"] = replace(judging.BUDGETS["quick"], num_repetitions=1, repetition_s=0.2)
"""


@pytest.mark.long
def test_a_campaign_calibrates_judges_and_packs(tmp_path: Path) -> None:
    """One light model on one device: batches that were not calibrated, in a plain loop, and the archive at home."""
    folder = tmp_path / "lent"
    (tmp_path / "sitecustomize.py").write_text(LIGHT)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH") or str(ROOT)))

    def output(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "perfmodel", *command],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    # Models drawn at random take minutes.
    folder.mkdir()
    CampaignDocument(
        version=installed_version("perfmodel") or "unknown",
        device_kind="virtual",
        truth="balanced",
        models=("mlp",),
        num_ranks=1,
        skipped={"doctor": "no machine", "models": "too long", "memory": "too long"},
    ).write(folder / "campaign.json")
    campaign = ("calibrate", "--campaign", str(folder), "--minutes", "20", "--models", "mlp")
    there = output(*campaign, "--device-kind", "virtual", "--truth", "balanced")
    machine = ProfileDocument.read(folder / "calibration" / "profile.json").machine
    assert (machine.device_kind, machine.asynchronous) == ("virtual", True)
    verdict = ValidationDocument.read(folder / "steps" / "validation.json")
    assert verdict.summary.worst_absolute < 0.06
    assert verdict.coverage == 1.0
    assert json.loads((folder / "smoke.json").read_text())["ranks"][0]["step_s"] > 0
    home = output("validate", "--from", str(folder / "campaign.tar.gz"))
    assert home in there


@pytest.mark.long
def test_operators_add_up_to_their_step_without_the_time_that_events_take(tmp_path: Path) -> None:
    """Events of 1.5 us around each of some 13 and 20 short kernels, and of some 9 and 31 views."""
    truth, output = tmp_path / "with-events.toml", tmp_path / "observations.jsonl"
    truth.write_text(
        "[host]\nlaunch_s = 2e-5\n"
        "[device]\nflop_per_s = { fp32 = 1.9e13 }\nbytes_per_s = 1.5e12\nevent_s = 1.5e-6\n"
    )
    command = (sys.executable, "-m", "tests.calibrate.virtual_replay", str(truth), str(output))
    subprocess.run(command, check=True)
    *queues, replay, steps, drawn, trained, again = read_observations(output)
    each_s = event_s(_rate(entry) for entry in queues if isinstance(entry, ComputeObservation))
    assert each_s == pytest.approx(1.5e-6, abs=2e-10)
    assert isinstance(replay, ReplayObservation)
    assert isinstance(steps, StepObservation)
    without = without_events(replay, each_s)
    streams = existing(without_events(steps, each_s).device_streams)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        step_s = typical(getattr(streams, f"dense_{phase.value}_s"))
        assert replayed_s([without], phase.value) == pytest.approx(step_s, rel=0.005)
        if phase is not Phase.OPTIMIZER:
            assert replayed_s([replay], phase.value) > 1.1 * step_s
    # What the host takes for a drawn model: 20 us for an operator, 16 us where autograd issues it, 0.5 us for a view.
    assert isinstance(drawn, OperatorsObservation)
    host = existing(drawn.host)
    for phase, launch_s in ((Phase.FORWARD, 2e-5), (Phase.BACKWARD, 1.6e-5)):
        counts = host.issued[phase]
        expected_s = launch_s * counts[f"{phase.value}_s"] + 5e-7 * counts["view_s"]
        assert typical(host.dispatch_s[phase]) == pytest.approx(expected_s, rel=0.02)
    # A second backward pass adds each gradient, which takes the place of a view.
    more_s = typical(host.adding_s) - typical(host.dispatch_s[Phase.BACKWARD])
    assert more_s == pytest.approx(host.num_gradients * (1.6e-5 - 5e-7), rel=0.05)
    assert host.num_gradients > 0
    # In place it trains as a whole: its host issues what it issued then, its device has what was replayed.
    assert isinstance(trained, ReplayObservation)
    own_s = sum(typical(host.dispatch_s[phase]) for phase in Phase)
    device_s = replayed_s([without_events(trained, each_s)])
    assert trained.issued_s == pytest.approx(own_s, rel=0.05)
    assert trained.trained_s == pytest.approx(max(own_s, device_s), rel=0.05)
    # In later rounds it trains alone.
    assert isinstance(again, ReplayObservation)
    assert again.trained_s == pytest.approx(trained.trained_s, rel=0.05)
    assert not again.operators


@pytest.mark.parametrize("queue", [4, 1024])
def test_many_ranks_as_arrays_do_what_each_would_do_alone(queue: int) -> None:
    """Kernels of two sizes, views and copies before and behind collectives, which slow them down; a full queue."""
    truth = Truth(
        name="eight",
        host=replace(TRUTH.host, queue=queue),
        device=replace(TRUTH.device, speed=(1.0, 0.9, 0.95, 1.1, 1.0)),
        network=Network(compute_slowdown=1.3, launch_s=2e-4),
    )
    kernels = [Work(kind="kernel", flop=flop, in_backward=flop > 1e9) for flop in (1e8, 3e9)] * 6
    reduced = Work(kind="collective", collective="all_reduce", size_bytes=2**22)
    others = Work(kind="view"), Work(kind="copy", size_bytes=2**20)
    items = (*others, *kernels, reduced, *kernels, reduced, *kernels, Work(kind="wait"), *kernels)
    team = Team(truth=truth, size=8)

    def ends_s(rank: int) -> list[float]:
        """After loops of 4, 4 and 12 steps."""
        gpu, found = team.gpus[rank], []
        for count in (4, 4, 12):
            play(gpu, items * count, world_size=8, mark=lambda: None)
            gpu.synchronise()
            found.append(gpu.host_s)
        return found

    first_s, short_s, long_s = np.max(team.run(8, ends_s), axis=0)
    alone_s = ((long_s - short_s) - (short_s - first_s)) / 8
    as_arrays_s = plain_loop_s(truth, "step", items, world_size=8, occasion="")
    assert as_arrays_s == pytest.approx(alone_s, rel=1e-9)


def test_drawn_gpus_are_like_those_of_the_catalogue() -> None:
    """Memory of 0.3 to 8 TB/s, at most what data sheets say of products, and no more FLOP per byte than they tell."""
    sheets = [s for s in shipped_catalogue().devices if s.bandwidth and "fp32" in s.peaks]
    most = max(
        peak.flop_per_s / sheet.bandwidth.bytes_per_s
        for sheet in sheets
        if sheet.bandwidth
        for peak in sheet.peaks.values()
    )
    for seed in range(100):
        device = random_truth(seed).device
        assert 3e11 <= device.bytes_per_s <= 8e12
        assert 3e12 < device.flop_per_s["fp32"] < device.flop_per_s["bf16"] < 3e15
        assert device.flop_per_s["bf16"] / device.bytes_per_s < 1.5 * most


def test_judged_batches_lie_between_those_of_a_calibration() -> None:
    for model, judged in HELD_OUT.items():
        experiment = Experiment(
            device_kind="virtual", models=(model,), world_sizes=(1,), budget=BUDGETS["standard"]
        )
        calibrated_batches = experiment.micro_batches(model)
        assert RECORDED[model] == (calibrated_batches[0], calibrated_batches[-1])
        assert not set(judged) & set(calibrated_batches)
        assert min(calibrated_batches) < min(judged) <= max(judged) < max(calibrated_batches)


@pytest.mark.long
def test_two_ranks_are_predicted_from_recorded_steps(tmp_path: Path) -> None:
    """As ``tests.benchmarks.virtual``, with one truth and a light model."""
    # Its process group is that of a whole process, and a process that has trained cannot be copied.
    command = (sys.executable, "-m", "tests.benchmarks.virtual_record", str(tmp_path), "mlp")
    subprocess.run(command, check=True)
    models = {"mlp": loaded(tmp_path, "mlp")}
    truth = random_truth(2, models.values())
    assert not truth.noise.host
    machine = calibrated(truth, models, 2, tmp_path)
    rows = list(judged_steps(truth, models, machine))
    assert {row["ranks"] for row in rows} == {1, 2, 4}
    for row in rows:
        # One group does not tell launches from latencies, nor links from memory: of larger ones beliefs tell.
        known = row["ranks"] <= row["calibrated"]
        assert row["nominal"] == pytest.approx(row["step_s"], rel=0.08 if known else 0.15), row
        assert is_named(row), row
    known_law = [row["error"] for row in judged_law(truth, machine) if row["ranks"] == 2]
    assert statistics.fmean(map(abs, known_law)) < 0.03
    for row in judged_memory("mlp", models["mlp"], machine):
        assert row["error"] == pytest.approx(0.0, abs=0.01), row


@pytest.mark.long
def test_ranks_of_several_nodes_reduce_over_the_links_between_them(tmp_path: Path) -> None:
    """Three ranks on nodes of two: the first two are on one, the first and the third are not."""
    truth = replace(
        TRUTH, network=Network(devices_per_node=2, inner_bytes_per_s=1e11, outer_bytes_per_s=1e9)
    )
    file, output = tmp_path / "made-up.toml", tmp_path / "observations.jsonl"
    file.write_text(
        "devices = 4\n"
        "[host]\nlaunch_s = 1e-5\nevent_s = 0.0\nqueue = 4\n"
        "[device]\nflop_per_s = { fp32 = 1e13 }\nbytes_per_s = 1e12\n"
        "[network]\ndevices_per_node = 2\ninner_bytes_per_s = 1e11\nouter_bytes_per_s = 1e9\n"
    )
    size_bytes = 16 * MIB
    tasks = tuple(
        CollectiveTask(
            name=f"{collective} {stride}",
            round=0,
            collective=collective,
            world_size=2,
            size_bytes=size_bytes,
            stride=stride,
            target_s=0.0,
        )
        for collective in ("all_reduce", "all_gather")
        for stride in (1, 2)
    )
    order = tmp_path / "order.json"
    WorkOrder(device_kind="virtual", truth=str(file), output=str(output), tasks=tasks).write(order)
    topology = resolve_topology({}, flags=LaunchFlags(nproc_per_node=3), num_local_devices=3)
    TorchrunLauncher().run(
        Launch(arguments=(str(order),), topology=topology, conditions={}, stall_timeout_s=120.0)
    )
    found = {
        (entry.collective, entry.stride): entry.durations_s
        for entry in read_observations(output)
        if isinstance(entry, CollectiveObservation)
    }
    for (collective, stride), durations_s in found.items():
        true_s = truth.collective_s(collective, size_bytes, 2, num_nodes=stride)
        assert len(durations_s) == 2
        assert min(map(min, durations_s)) == pytest.approx(true_s, rel=1e-3), (collective, stride)
    assert len(found) == len(tasks)


def product(session: TeamSession, width: int) -> Callable[[], object]:
    work = Work(kind="kernel", flop=2.0 * width**3, size_bytes=3 * 2 * width**2, dtype="bf16")
    return lambda: session.gpu.execute(work)


@pytest.mark.parametrize("name", ["nvlink-node", "balanced", "slow-pcie"])
def test_what_compute_loses_beside_an_all_reduce_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = Truth.read(name)
    monkeypatch.setattr(compute, "_product", product)
    team = Team(truth=truth, size=2)
    sessions = [TeamSession(team, rank) for rank in range(2)]

    def beside(session: TeamSession, **sizes: int) -> Any:
        width = session.agree(compute._device_width(session), world_size=2)
        return product(session, width), lambda: begun(session, "all_reduce", sizes["size_bytes"], 2)

    monkeypatch.setattr(compute, "_beside", beside)
    task = OverlapTask(name="", round=0, world_size=2, size_bytes=32 * MIB, target_s=0.0)
    found = team.run(2, lambda rank: compute.measure_overlap(sessions[rank], task))[0]
    middle = {
        key: statistics.median(values_s)
        for key, values_s in found.model_dump().items()
        if key.endswith("_s")
    }
    # Long enough for the host to stay ahead, short enough to be counted; a slow GPU takes longer for the least.
    assert middle["compute_alone_s"] >= 0.9e-5
    if name == "nvlink-node":
        assert middle["compute_alone_s"] < 2.5e-5
    assert middle["comm_alone_s"] / middle["compute_alone_s"] > 5
    slowdown = truth.network.compute_slowdown
    ratio = middle["compute_together_s"] / middle["compute_alone_s"]
    assert ratio == pytest.approx(slowdown, rel=0.03)
    assert middle["comm_together_s"] == pytest.approx(middle["comm_alone_s"], rel=0.1)


def test_a_collective_is_the_mean_of_many_back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of them costs one wait for the last rank and no launch; two ranks of unlike hosts agree."""
    truth = Truth.read("nvlink-node")
    team = Team(truth=truth, size=2)
    sessions = [TeamSession(team, rank) for rank in range(2)]
    num_begun = [0, 0]

    def begins(session: TeamSession, *_: str, **sizes: int) -> Any:
        def begin() -> Any:
            num_begun[session.rank] += 1
            return begun(session, "all_reduce", sizes["size_bytes"], 2)

        return [begin]

    monkeypatch.setattr(compute, "_begins", begins)
    task = CollectiveTask(
        name="", round=0, collective="all_reduce", world_size=2, size_bytes=KIB, target_s=0.0
    )
    found = team.run(2, lambda rank: compute.measure_collective(sessions[rank], task))
    true_s = truth.collective_s("all_reduce", KIB, 2)
    for times_s in found[0].durations_s:
        assert list(times_s) == [pytest.approx(true_s, rel=0.1)]
    assert min(num_begun) >= 12

"""Machines that come with perfmodel."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel.answer import Question, timed_workload
from perfmodel.answer.answer import answer, layout_table
from perfmodel.cost import step_curves
from perfmodel.cost.machine import CostModel
from perfmodel.cost.network import Group
from perfmodel.cost.step_curves import LawDurations, shipped_threads
from perfmodel.documents.hardware import open_cluster
from perfmodel.documents.profile import (
    InferredDocument,
    ProfileDocument,
    inferred_machines,
    shipped_machines,
)
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import NotFeasible
from perfmodel.layout import Layout, parse_layout
from perfmodel.machine import Cluster, Evidence, Tier
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.models import SHIPPED_TRACES, read_model
from tests.benchmarks.machines import MACHINES, sha256_of, tables_of
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced

NODES = Cluster(
    name="eight nodes at 100 Gb/s",
    tiers=(
        Tier(name="node", of="device", count=8, link_bytes_per_s=25e9, links=12, latency_s=2e-6),
        Tier(name="fabric", of="node", count=8, link_bytes_per_s=12.5e9, latency_s=5e-6),
    ),
)


def shipped(name: str) -> MeasuredMachine:
    return ProfileDocument.read(shipped_machines()[name]).machine


def asked(machine: MeasuredMachine, dp: int = 1, **more: Any) -> Question:
    """Of the linear layer that tests price by hand."""
    workload = timed_workload(machine, WORKLOAD, trace=traced())
    layout = Layout(dp=dp, micro_batch=64)
    return Question(machine=machine, workload=workload, layout=layout, **more)


def test_a_gpu_that_was_calibrated_predicts_itself_and_others_with_links() -> None:
    """An H200 trained GPT-2 at 32 samples in 191 ms; what it never ran is read from its operators."""
    machine = shipped("h200")
    workload = timed_workload(machine, existing(machine.workload("gpt2")).workload)
    alone = Question(machine=machine, workload=workload, layout=Layout(micro_batch=32))
    one = answer(alone)
    many = answer(replace(alone, layout=Layout(dp=64, micro_batch=32), cluster=NODES))
    assert one.evidence["compute"] is Evidence.MEASURED
    assert one.step.nominal == pytest.approx(0.191, rel=0.02)
    assert many.evidence["communication"] is Evidence.ASSUMED
    assert many.step.nominal > one.step.nominal


@pytest.mark.parametrize("name", inferred_machines())
def test_one_device_is_inferred_and_in_seconds_that_can_be(name: str) -> None:
    found = answer(asked(shipped(name)))
    assert found.evidence["compute"] is Evidence.INFERRED
    assert 1e-6 < found.step.p5 < found.step.nominal < found.step.p95 < 1.0


def test_a_machine_from_records_names_them_by_their_digest() -> None:
    document = ProfileDocument.read(inferred_machines()["dgx-h100"])
    tables = tables_of(MACHINES["dgx-h100"], ROOT)
    assert existing(document.machine.device_costs).source == "docs/records/dgx-h100"
    assert {str(table.parent.relative_to(ROOT)) for table in tables} == {"docs/records/dgx-h100"}
    assert document.observations_sha256 == sha256_of(tables)


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100"])
def test_a_node_has_the_links_of_published_times_and_others_those_of_the_file(name: str) -> None:
    machine = shipped(name)
    inside, across = (answer(asked(machine, dp, cluster=NODES)) for dp in (8, 64))
    assert inside.evidence["communication"] is Evidence.INTERPOLATED
    assert across.evidence["communication"] is Evidence.ASSUMED
    assert across.step.nominal > inside.step.nominal


@pytest.mark.parametrize(("name", "rate_bytes_per_s"), [("dgx-a100", 20e9), ("dgx-h100", 40e9)])
def test_nodes_that_ship_are_joined_by_the_adapters_of_their_data_sheet(
    name: str, rate_bytes_per_s: float
) -> None:
    """Eight adapters of 200 or 400 Gb/s, 80 % of them reached; inside the node nothing changes."""
    machine = shipped(name)
    question = asked(machine, 16)
    between = existing(question.cluster).tiers[1]
    assert between.links == 8
    assert between.link_bytes_per_s == pytest.approx(rate_bytes_per_s)
    assert answer(question).evidence["communication"] is Evidence.ASSUMED
    ring = replace(machine, cluster=None)
    inside, alone = (
        answer(replace(question, machine=one, cluster=None, layout=Layout(dp=8, micro_batch=64)))
        for one in (machine, ring)
    )
    assert inside.step_s.tolist() == alone.step_s.tolist()
    network = existing(CostModel(machine, num_draws=20, cluster=machine.cluster).network)
    sent_s = 2 * 15 / 16 * 2**33 / (8 * rate_bytes_per_s)
    [spent_s, *_] = network.time_s("all_reduce", 2**33, Group(16))
    assert spent_s == pytest.approx(sent_s, rel=0.1)
    assert network.bottleneck(2**33, Group(16)) == "fabric (bandwidth, ring of 2)"


def test_the_switch_of_a_node_adds_gradients() -> None:
    """Eight H100 reach 445 GB/s in 16 bit, as published; in int8, which the switch does not add, 352."""
    machine = replace(shipped("dgx-h100"), cluster=None)
    network = existing(CostModel(machine, num_draws=20).network)
    rate = 2 * 7 / 8 * 2**29 / network.time_s("all_reduce", 2**29, Group(8))[0]
    assert rate == pytest.approx(445e9, rel=0.02)


def large(name: str, cluster: Cluster | None) -> Question:
    return Question(
        machine=InferredDocument.named(name).machine,
        workload=read_model("llama3-8b", sequence=None),
        layout=parse_layout("fsdp=64"),
        cluster=cluster,
    )


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100"])
def test_links_of_a_file_reach_large_models(name: str) -> None:
    """All weights pass every node's adapter three times a step: backward and forward hide a part at most."""
    slow = replace(NODES, tiers=(NODES.tiers[0], replace(NODES.tiers[1], link_bytes_per_s=1e9)))
    fast, some, most = (answer(large(name, of)).step for of in (None, NODES, slow))
    assert fast.nominal < some.nominal < most.nominal
    moved_s = 3 * 2 * 8.03e9 / 1e9
    assert most.nominal == pytest.approx(moved_s, rel=0.3)
    assert most.p95 / most.nominal > fast.p95 / fast.nominal


@pytest.mark.parametrize(
    ("constants", "times_alone", "more_s", "copied_s"),
    [
        ((0.5, 0.0, 0.0, 0.0), 0, 4 * 2 * 0.5, 0.0),
        ((0.0, 0.5, 0.0, 0.0), 1, 2 * 0.5, 2 * 0.5),
        ((0.0, 0.0, 1e-6, 0.0), 1, 0.262144, 0.262144),
        ((0.0, 0.0, 0.0, 2.0), 7, 0.0, 0.0),
    ],
)
def test_one_process_calls_modules_copies_them_and_their_bytes_and_slows_devices(
    monkeypatch: pytest.MonkeyPatch,
    constants: tuple[float, ...],
    times_alone: int,
    more_s: float,
    copied_s: float,
) -> None:
    """Four devices, two modules, a matrix of 256 KiB."""
    monkeypatch.setattr(step_curves, "shipped_threads", lambda _: (np.array(constants), 0.1, True))
    machine, step = shipped("titan-rtx"), traced()
    [segment] = step.segments
    calls = tuple(replace(call, module="block.linear") for call in segment.calls)
    trace = replace(step, segments=(replace(segment, calls=calls),))
    workload = timed_workload(machine, WORKLOAD, trace=trace)
    question = Question(machine=machine, workload=workload, layout=Layout(micro_batch=64))
    alone_s = answer(question).step.nominal
    found = answer(question.at(replace(question.layout, dp=4, one_process=True)))
    assert found.step.nominal == pytest.approx(times_alone * alone_s + more_s)
    assert found.exposed_comm_s[0] == pytest.approx(copied_s)


@pytest.mark.parametrize("name", ["titan-rtx", "dgx-a100"])
def test_the_error_of_one_process_comes_beside_that_of_a_step_alone(name: str) -> None:
    machine = shipped(name)
    question = asked(machine)
    many = question.at(replace(question.layout, dp=4, one_process=True))
    found = answer(many)
    law = existing(machine.device_costs).left_out[0].log_error
    both = math.hypot(shipped_threads(name)[1], law)
    assert 0.6 * both < math.log(found.step.p95 / found.step.nominal) < 1.6 * both
    assert found.evidence["nn.DataParallel"] is Evidence.INFERRED
    # One loader feeds all four.
    slow = answer(replace(many, loader_samples_per_s=4 * 64 / 2.0))
    assert slow.step.nominal == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("device", "known"),
    [
        ("NVIDIA TITAN Xp", "on this card"),
        ("NVIDIA TITAN RTX (scaled from NVIDIA H200)", "on this card"),
        ("NVIDIA H200", "other cards"),
        ("nobody's card", "other cards"),
    ],
)
def test_a_card_whose_steps_were_published_leads_as_those_do(device: str, known: str) -> None:
    question = asked(replace(shipped("titan-rtx"), device_name=device))
    found = question.at(replace(question.layout, dp=2, one_process=True))
    [said] = [each for each in layout_table(found)[0].caveats if "DataParallel" in each]
    assert known in said


def test_one_process_needs_a_gpu_and_a_trace() -> None:
    calibrated, cpu = shipped("h200"), profile(Machine())
    workload = timed_workload(calibrated, existing(calibrated.workload("gpt2")).workload)
    layout = parse_layout("dp=4 one_process=yes")
    for machine, trained in ((calibrated, workload), (cpu, timed_workload(cpu, "heavy"))):
        with pytest.raises(NotFeasible, match="is known of traced models on GPUs, got"):
            answer(Question(machine=machine, workload=trained, layout=layout))
    links = open_cluster("2 pcie3-x16, 2 eth-100")
    pair = asked(shipped("titan-rtx"), cluster=links).at(parse_layout("dp=2 one_process=yes"))
    assert answer(pair).step.nominal > 0
    node = replace(links, tiers=links.tiers[:1])
    four = pair.at(layout)
    for question, said in (
        (four, "must lie in one node, 2 devices of 2 pcie3-x16, 2 eth-100, got dp=4"),
        (replace(four, cluster=node), "must be at most 2, all that"),
        (replace(pair, gradient_share=0.5), "sends gradients whole, got 0.5 of them"),
    ):
        with pytest.raises(NotFeasible, match=said):
            answer(question)


def test_a_part_of_the_parameters_is_updated_in_less_time() -> None:
    """As FSDP divides them; their kernels take time in proportion, beside what each starts with."""
    path = SHIPPED_TRACES / "torchvision-resnet50-fp32.json.gz"
    step = WorkloadDocument.read(path).trace.at(micro_batch=8)
    law = LawDurations(
        costs=existing(shipped("rtx-3090").device_costs), step=step, memory_format="contiguous"
    )
    half = replace(step, parameters=step.parameters[::2])
    assert 0 < law.optimizer_work_s(half) < law.optimizer_work_s(step)
    assert law.optimizer_work_s(replace(half, segments=())) == law.optimizer_work_s(half)

"""Predictions on a machine whose every parameter is known."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.answer import Question, open_question, timed_workload
from perfmodel.answer.answer import answer, measured_points, memory_caveats
from perfmodel.answer.answer import point as predicted_point
from perfmodel.answer.measured import measured_caveats
from perfmodel.cost.network import tier_between_nodes
from perfmodel.documents.hardware import open_cluster
from perfmodel.documents.prediction import PredictedPoint
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.engine.algebra import step_times
from perfmodel.errors import CalibrationUnavailable, NotFeasible, UsageError
from perfmodel.layout import Layout, Scaling, Synchronisation, parse_layout, scaled_layouts
from perfmodel.machine.measured import MeasuredMachine, Repeatability
from perfmodel.statistics import Interval
from perfmodel.step import Stream, with_waiting_host
from perfmodel.step.compile import compile_step
from perfmodel.units import GIB
from tests.existing import existing
from tests.perfmodel.asking import Asking
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import HEAVY, Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced
from tests.perfmodel.workload.memory_samples import step_memory, step_trace


def points(
    machine: Machine,
    *world_sizes: int,
    workload: str = "heavy",
    scaling: Scaling = "weak",
    batch: int = 16,
    bucket_cap_mb: float | None = None,
) -> list[PredictedPoint]:
    predictor = Asking(profile(machine))
    settings = scaled_layouts(
        (1, *world_sizes), scaling=scaling, batch=batch, bucket_cap_mb=bucket_cap_mb
    )
    steps = [predictor.step(predictor.workload(workload), setting) for setting in settings]
    found = [predicted_point(step, baseline=steps[0]) for step in steps]
    return found if not world_sizes else found[1:]


def test_a_single_device_takes_the_sum_of_its_phases() -> None:
    """At 16: 0.2 + (1 + 80) + (2 + 160) + 4 = 247.2 ms."""
    (point,) = points(Machine())
    assert point.step_s.nominal == pytest.approx(0.2472)
    assert point.samples_per_s.nominal == pytest.approx(16 / 0.2472)
    assert point.speedup == Interval(1.0, 1.0, 1.0)
    assert point.exposed_comm_s.nominal == 0.0
    assert point.straggler_s == 0.0


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_draws_of_many_settings_are_those_of_each_alone(scaling: Scaling) -> None:
    """To the last digit, whichever settings share a program."""
    machine = Machine(noise=(0.9, 1.0, 1.2), residual=0.05, relative_error=0.05)
    predictor = Asking(profile(machine))
    settings = scaled_layouts((1, 2, 4, 16), scaling=scaling, batch=64, accumulation=2)
    workload = predictor.workload("heavy")
    together = predictor.step_draws(workload, settings)
    for setting, step_s in zip(settings, together, strict=True):
        assert np.array_equal(step_s, predictor.step(workload, setting).step_s)


def test_stragglers_are_reported_as_part_of_the_step() -> None:
    """Ranks that differ by exp(0.1 * 0.5895) = 1.0607 in compute: 247.2 * 0.0607 = 15.0 ms.

    Alike they take 247.2 + 8.588608 + 0.104096 ms: speed-up 2 * 247.2 / 255.892704 = 1.93206.
    """
    [alike], [late] = (points(Machine(rank_spread=s), 2, bucket_cap_mb=100) for s in (0, 0.1))
    assert alike.step_s.nominal == pytest.approx(0.255892704)
    assert existing(alike.speedup).nominal == pytest.approx(1.93206, abs=1e-5)
    assert existing(alike.scaling_efficiency).nominal == pytest.approx(0.96603, abs=1e-5)
    assert alike.exposed_comm_s.nominal == pytest.approx(0.008692704)
    assert late.straggler_s == pytest.approx(0.0150, abs=1e-4)
    assert late.step_s.nominal == pytest.approx(0.255892704 + late.straggler_s)


def test_several_devices_need_links_and_a_batch_that_divides() -> None:
    with pytest.raises(CalibrationUnavailable, match="2 devices need links between them"):
        points(Machine(world_size=1), 2)
    for batch, accumulation in ((16, 1), (3, 2)):
        with pytest.raises(NotFeasible, match=f"got {batch}"):
            scaled_layouts([3], scaling="strong", batch=batch, accumulation=accumulation)


def test_weak_scaling_fixes_the_micro_batch_and_strong_the_global_batch() -> None:
    weak = scaled_layouts([1, 4], scaling="weak", batch=16, accumulation=2)
    strong = scaled_layouts([1, 4], scaling="strong", batch=64, accumulation=2)
    assert [(s.micro_batch, s.global_batch) for s in weak] == [(16, 32), (16, 128)]
    assert [(s.micro_batch, s.global_batch) for s in strong] == [(32, 64), (8, 64)]
    assert [s.synchronisation for s in weak] == [Synchronisation.NONE, Synchronisation.DDP]


def test_calibration_runs_stand_beside_the_prediction() -> None:
    """The profile holds one run: heavy alone at 16."""
    settings = scaled_layouts([1, 2], scaling="weak", batch=16)
    (point,) = measured_points(profile(Machine()), "heavy", settings)
    assert (point.world_size, point.step_s, point.speedup) == (1, 0.25, 1.0)


def test_runs_of_ddp_do_not_stand_beside_sharded_layouts() -> None:
    machine = profile(Machine())
    ran = replace(machine.steps[0], world_size=2, synchronisation="ddp")
    layouts = [parse_layout(f"{kind}=2 micro_batch=16") for kind in ("ddp", "fsdp")]
    (point,) = measured_points(replace(machine, steps=(ran,)), "heavy", layouts)
    assert (point.world_size, point.step_s) == (2, ran.step_s)


def caveats_of(
    machine: MeasuredMachine, devices: int, batch: int = 16, *, links: str | None = None
) -> tuple[str, ...]:
    named = links and open_cluster(links, measured=tier_between_nodes(machine))
    asking = Asking(machine, cluster=named or None)
    answer = asking.step(asking.workload("heavy"), Layout(dp=devices, micro_batch=batch))
    return measured_caveats(answer.question, {answer.layout: answer.evidence})


@pytest.mark.parametrize(
    ("devices", "limit_bytes", "said"),
    [
        (1, None, ()),
        (1, 100 * GIB, ("8 per device do not fit: 204 GiB of the machine's 100 GiB",)),
        (2, None, ("8 per device do not fit: 449 GiB of the machine's 300 GiB",)),
        (4, None, ("8 per device do not fit: 449 GiB of the machine's 300 GiB",)),
    ],
)
def test_ranks_of_a_processor_share_its_memory(
    devices: int, limit_bytes: int | None, said: tuple[str, ...]
) -> None:
    """40 + 8 x 20 GiB, of several ranks 20 GiB of buckets, and 2 % of slack; a node holds two."""
    memory = {"total_bytes": 300 * GIB, "available_bytes": GIB, "limit_bytes": limit_bytes}
    machine = replace(
        profile(Machine()),
        operators=costs_of_the_made_up_machine(),
        environment={"memory": memory},
    )
    large = WorkloadDocument(workload=WORKLOAD, trace=step_trace(GIB), memory=step_memory(GIB))
    question = open_question(machine, large).at(Layout(dp=devices, micro_batch=8))
    found = memory_caveats([answer(question)])
    assert tuple(text.partition(";")[0] for text in found) == said


def test_what_was_not_measured_is_said() -> None:
    found = caveats_of(profile(Machine()), 8, batch=100)
    assert any("8 devices assume equal links" in line for line in found)
    assert any("outside the calibrated range: 100" in line for line in found)
    assert caveats_of(profile(Machine()), 2) == ()


def test_which_links_between_nodes_count_is_said() -> None:
    machine = profile(Machine())
    machine = replace(machine, between_nodes=machine.collectives, num_nodes=2)
    named = caveats_of(machine, 16, links="2 10GB/s, 8 1GB/s")
    assert any("16 devices assume links as in the cluster file" in line for line in named)
    assert any("node links are the cluster file's; 'measured' names" in line for line in named)
    found = caveats_of(machine, 16, links="2 10GB/s, 8 measured")
    assert any("16 devices assume links between nodes as measured" in line for line in found)
    assert not any("cluster file" in line for line in found)


def test_a_workload_that_was_never_run_has_no_calibrated_range_to_leave() -> None:
    unknown = ("only two ranks were measured", "only one node was measured")
    machine = replace(profile(Machine()), undetermined=unknown)
    asking = Asking(replace(machine, operators=costs_of_the_made_up_machine()))
    answer = asking.step(asking.workload(WORKLOAD, traced()), Layout(dp=2, micro_batch=100))
    found = measured_caveats(answer.question, {answer.layout: answer.evidence})
    # Three lines are shown: what is said of every answer comes behind.
    (rests_on,) = (line for line in found if "was never run" in line)
    assert found.index(rests_on) < found.index(unknown[0])
    assert not any("calibrated range" in line for line in found)


@pytest.mark.parametrize(("scatter", "count"), [(0.09, 0), (0.17, 1)])
def test_predictions_repeat_that_runs_of_the_calibration_scattered(
    scatter: float, count: int
) -> None:
    restless = Repeatability(run={1: 0.02, 2: scatter}, round=0.01, occasion=0.01)
    said = caveats_of(replace(profile(Machine()), repeatability=restless), 2)
    assert sum(c.startswith("runs of one setting differed by 17 %") for c in said) == count


@pytest.mark.parametrize(("steal", "words"), [(0.04, ()), (0.37, ("CPU steal time was 37 %",))])
def test_a_prediction_tells_that_others_had_the_processors_of_its_calibration(
    steal: float, words: tuple[str, ...]
) -> None:
    machine = replace(profile(Machine()), steal=steal)
    found = caveats_of(machine, 2)
    assert len(found) == len(words)
    assert all(word in caveat for word, caveat in zip(words, found, strict=True))


@pytest.mark.parametrize(("issued", "larger_s"), [(0.2, 0.2472), (1, 0.2472), (5, 1.235)])
def test_a_host_that_waits_in_every_step_costs_its_first_launches(
    issued: float, larger_s: float
) -> None:
    """The device works on what was issued; only the first and the last kernels find nobody beside them."""
    machine = profile(Machine(asynchronous=True, issued=issued))
    question = Question(
        machine=machine,
        workload=timed_workload(machine, "heavy"),
        layout=Layout(micro_batch=16),
        sync_every_step=True,
    )
    step_s = answer(question).step_s[0]
    assert larger_s < step_s < 1.03 * larger_s
    trace = answer(question).trace
    assert trace.step_s == pytest.approx(step_s)


def test_a_file_with_the_name_of_a_calibrated_workload_is_told_what_differs() -> None:
    machine = profile(Machine())
    first, *others = HEAVY.parameters
    for given, words in (
        (replace(HEAVY, sample="28 words"), f"sample is {HEAVY.sample}, not 28 words"),
        (replace(HEAVY, num_operators=7), f"num_operators is {HEAVY.num_operators}, not 7"),
        (
            replace(HEAVY, parameters=(replace(first, ready_fraction=0.0), *others)),
            "ready at other times",
        ),
    ):
        with pytest.raises(UsageError, match=f"{words}.*torchvision:NAME"):
            timed_workload(machine, given, trace=traced())


def test_slices_keep_all_work_and_its_dependencies() -> None:
    program = compile_step(HEAVY, Layout(dp=2), asynchronous=True)
    sliced = with_waiting_host(program)
    for cause in {operation.cause for operation in program.operations}:
        before = [entry.share for entry in program.operations if entry.cause is cause]
        after = [entry.share for entry in sliced.operations if entry.cause is cause]
        assert sum(after) == pytest.approx(sum(before))
    durations_s = np.ones((len(sliced.operations), 1))
    assert step_times(sliced, durations_s) >= len(sliced.on_stream(Stream.COMPUTE))

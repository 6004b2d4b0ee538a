"""The search over layouts: complete, ranked as single predictions are, honest about ties."""

from dataclasses import replace

import numpy as np
import pytest

from calibrate.layout_fit import infer_memory, peaks_of
from perfmodel import layout_search
from perfmodel.answer import Question
from perfmodel.answer.answer import answer
from perfmodel.answer.inferred import Training, layout_caveats, layout_document, layout_jobs
from perfmodel.cost.inferred import InferredModel, open_inferred
from perfmodel.cost.jobs import Jobs, jobs_from
from perfmodel.cost.memory import FITS_ABOVE, tensor_bytes
from perfmodel.documents.prediction import ParallelismPlanDocument, PredictionDocument
from perfmodel.layout import Layout, Limits, feasible_layouts, impossible, parse_layout
from perfmodel.layout_search import NEAR_FASTEST, Request, plan_parallelism, to_test
from perfmodel.statistics import DEVIATE_90
from perfmodel.workload.transformer import NamedTransformer
from tests.existing import existing
from tests.perfmodel.cost.large_samples import MODEL, document

GIB = 2**30


@pytest.fixture(scope="module")
def machine() -> InferredModel:
    return open_inferred(document().machine)


def asked(machine: InferredModel, layout: str) -> PredictionDocument:
    question = Question(
        machine=machine.machine,
        workload=training().model,
        layout=parse_layout(layout),
        capacity_bytes=80 * GIB,
    )
    return layout_document(answer(question))


def training(*, devices: int = 8, global_batch: int = 16) -> Training:
    return Training(
        model=NamedTransformer(name="gpt-1.3b", shape=MODEL, sequence=1024),
        devices=devices,
        devices_per_node=8,
        global_batch=global_batch,
    )


SMALL = Limits(layers=4, heads=4, sequence=64, devices=4)


def test_every_layout_of_a_small_space_is_found_once() -> None:
    """Brute force over all numbers, with the rules of one layout."""
    found = feasible_layouts(SMALL, global_batch=4, interleave=2)
    layouts = [found.layout(index) for index in range(len(found))]
    assert len(set(layouts)) == len(layouts)
    expected = {
        Layout(
            dp=4 // (tp * pp * cp),
            tp=tp,
            pp=pp,
            cp=cp,
            zero=zero,
            micro_batch=micro_batch,
            accumulation=4 // (4 // (tp * pp * cp)) // micro_batch,
            recompute=recompute,
            interleave=interleave,
            sequence_parallel=tp > 1,
        )
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        for cp in (1, 2, 4)
        if tp * pp * cp in (1, 2, 4)
        for micro_batch in (1, 2, 4)
        if (4 // (4 // (tp * pp * cp))) % micro_batch == 0
        for zero in ((0, 1) if pp > 1 else (0, 1, 2, 3))
        if zero == 0 or (4 // (tp * pp)) > 1
        for recompute in {layout.recompute for layout in layouts}
        for interleave in ((1, 2) if pp > 1 else (1,))
        if interleave == 1 or 4 // (4 // (tp * pp * cp)) // micro_batch % pp == 0
        if 4 % (pp * interleave) == 0
    }
    assert set(layouts) == expected
    for layout in layouts:
        assert impossible(layout, SMALL) is None
        assert layout.global_batch == 4


def test_the_best_of_a_search_is_the_best_of_single_predictions(machine: InferredModel) -> None:
    few = training(devices=4, global_batch=8)
    request = Request(training=few, capacity_bytes=16 * GIB, top=5)
    plan = plan_parallelism(machine, request)
    found = feasible_layouts(request.training.limits, global_batch=8)
    assert plan.num_feasible == len(found)
    times = {}
    for index in range(len(found)):
        jobs = layout_jobs(request.training, found.layout(index))
        needed = machine.memory.fullest_bytes(jobs)
        if machine.memory.fit_probability(jobs, needed, 16 * GIB)[0] >= FITS_ABOVE:
            times[str(found.layout(index))] = float(machine.predict(jobs).mean_s[0])
    assert 5 < plan.num_fitting == len(times) < len(found)
    ordered = sorted(times.values())[:5]
    assert [entry.step_s.nominal for entry in plan.ranked] == pytest.approx(ordered)
    first = plan.ranked[0]
    [alone] = asked(machine, first.layout).points
    assert alone.step_s.nominal == pytest.approx(first.step_s.nominal, rel=0.02)
    assert existing(alone.large_model).mfu.nominal == pytest.approx(first.mfu, rel=0.02)


def test_losers_say_in_which_term_and_ties_share_the_first_rank(machine: InferredModel) -> None:
    request = Request(training=training(), capacity_bytes=40 * GIB, top=200)
    plan = plan_parallelism(machine, request)
    first = plan.ranked[0]
    assert (first.rank, first.ties, first.loses_in) == (1, True, "")
    losers = [entry for entry in plan.ranked if not entry.ties]
    assert losers
    assert {entry.rank for entry in plan.ranked if entry.ties} == {1}
    for entry in losers:
        assert entry.rank > 1
        assert entry.slower_probability > 0.95
        assert entry.loses_in
    again = ParallelismPlanDocument.model_validate_json(plan.model_dump_json())
    assert again == plan


def test_printed_peaks_reach_predictions_and_searches(machine: InferredModel) -> None:
    """Runs that print a GiB more than their tensors take make every layout need about as much more."""
    runs = machine.discrepancy.runs
    peaks = tensor_bytes(runs, 0) + GIB
    memory = peaks_of(infer_memory(runs, peaks), np.arange(len(runs)))
    printed = open_inferred(replace(machine.machine, memory=memory))
    layout = parse_layout("dp=4 tp=2 zero=1 micro_batch=2 accumulation=2 sequence_parallel=yes")
    found = asked(printed, str(layout))
    (stage,) = found.points[0].memory
    tensors = float(tensor_bytes(layout_jobs(training(), layout))[0])
    assert stage.needed_bytes == pytest.approx(tensors + GIB, rel=0.15)
    assert found.points[0].fit_probability == pytest.approx(1.0, abs=0.01)
    assert any("fitted to the peaks of" in caveat for caveat in found.caveats)
    plan = plan_parallelism(printed, Request(training=training(), capacity_bytes=80 * GIB, top=500))
    needed = {entry.layout: entry.needed_bytes for entry in plan.ranked}
    assert needed[str(layout)] == pytest.approx(stage.needed_bytes, rel=1e-6)


def left_open(machine: InferredModel, jobs: Jobs) -> set[str]:
    """Names of the parameters whose meanings a caveat tells as unknown."""
    begin = "the runs do not tell: "
    [said] = [each for each in layout_caveats(machine, jobs) if each.startswith(begin)]
    names = {each.meaning: each.name for each in machine.machine.fitted_parameters}
    return {names[meaning] for meaning in said.removeprefix(begin).split("; ")}


@pytest.mark.parametrize("zero", [0, 1])
def test_parameters_that_the_runs_left_open_are_named(machine: InferredModel, zero: int) -> None:
    jobs = layout_jobs(training(), parse_layout(f"dp=4 tp=2 accumulation=4 zero={zero}"))
    left = {p.name for p in machine.machine.fitted_parameters if not p.determined}
    said = left_open(machine, jobs)
    own, other = ("overlap", "overlap_sharded")[:: -1 if zero else 1]
    for name in ("tensor_latency_s", "tensor_bytes_per_s", "data_bytes_per_s", own):
        assert (name in said) is (name in left)
    assert other not in said


@pytest.mark.parametrize(
    ("layout", "used"),
    [
        ("tp=8", ()),
        ("dp=2 tp=8", ("node_bytes_per_s",)),
        ("tp=8 pp=2", ("crowded_s", "node_bytes_per_s")),
        ("tp=16", ("tensor_node_s", "node_bytes_per_s")),
    ],
)
def test_parameters_between_nodes_are_named_where_a_job_uses_them(
    machine: InferredModel, layout: str, used: tuple[str, ...]
) -> None:
    asked = parse_layout(f"{layout} accumulation=8")
    unknown = open_inferred(
        replace(
            machine.machine,
            fitted_parameters=tuple(
                replace(known, determined=False) for known in machine.machine.fitted_parameters
            ),
        )
    )
    jobs = layout_jobs(training(devices=asked.world_size), asked)
    said = left_open(unknown, jobs)
    assert said & {"tensor_node_s", "crowded_s", "node_bytes_per_s"} == set(used)


def test_draws_of_runs_agree_with_the_intervals_of_each(machine: InferredModel) -> None:
    layouts = ("dp=4 tp=2 accumulation=4", "dp=8 zero=1 accumulation=2", "dp=2 tp=4 accumulation=8")
    for layout in layouts:
        jobs = layout_jobs(training(), parse_layout(layout))
        drawn = machine.joint_logs(jobs, num_draws=20_000)[:, 0]
        said = machine.predict(jobs)
        # Few draws of the parameters lie far out: quantiles differ with the processor, the spread does not.
        spread = (np.log(said.upper_s[0]) - np.log(said.lower_s[0])) / (2 * DEVIATE_90)
        assert drawn.std() == pytest.approx(spread, rel=0.03)
        assert np.median(drawn) == pytest.approx(np.log(said.number_s[0]), abs=0.1 * spread)


def test_layouts_to_test_first_are_worth_what_is_said(machine: InferredModel) -> None:
    """Among copies of nearly one layout a few hold the fastest; one far behind the others is never tested."""
    names = ("dp=8 zero=0 accumulation=2", "dp=8 zero=1 accumulation=2", "pp=8 accumulation=16")
    jobs = jobs_from(
        [(MODEL, parse_layout(name)) for name in names], sequence=1024, devices_per_node=8
    )
    chosen, chances = to_test(machine, jobs)
    assert set(chosen) <= {0, 1}
    assert chances == sorted(chances)
    assert chances[-1] > 0.9
    logs = machine.joint_logs(jobs, num_draws=5000)
    near = logs[:, chosen].min(axis=1) <= logs.min(axis=1) + np.log1p(NEAR_FASTEST)
    assert chances[-1] == pytest.approx(near.mean(), abs=0.03)


def test_the_size_of_the_pieces_does_not_matter(
    machine: InferredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(training=training(), capacity_bytes=80 * GIB, top=50)
    whole = plan_parallelism(machine, request)
    assert whole.num_feasible > 14
    monkeypatch.setattr(layout_search, "_PIECE", 7)
    in_pieces = plan_parallelism(machine, request)
    assert in_pieces == whole.model_copy(update={"provenance": in_pieces.provenance})

"""What must hold of any layout: schedules are exact where closed forms are, and never contradict them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.jobs import Column, Jobs, jobs_from
from perfmodel.cost.layout_time import layout_durations, step_parts, step_time_s, unit_times
from perfmodel.cost.memory import ASSUMED_MEMORY, in_flight, tensor_bytes
from perfmodel.engine.algebra import step_times
from perfmodel.layout import Layout, Precision
from perfmodel.step import Cause, Work, stage_order
from perfmodel.step.compile import BUCKETS, compile_layout
from perfmodel.workload import Phase
from perfmodel.workload.transformer import Transformer
from tests.laws.strategies import pipelines
from tests.perfmodel.cost.large_samples import MODEL, some_jobs, truth

TOLERANCE = 1 + 1e-9
seconds = st.floats(1e-3, 10.0)
LAYERS = 48


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of the sample model that can be run."""
    pipeline = draw(st.one_of(st.just(Layout(accumulation=3)), pipelines()))
    if pipeline.pp * pipeline.interleave not in (1, 2, 3, 4, 6, 8, 12, 24):
        pipeline = replace(pipeline, interleave=1)
    dp = draw(st.sampled_from([1, 2, 16]))
    zero = draw(st.sampled_from([0, 1] if pipeline.pp > 1 else [0, 1, 2, 3]))
    layout = replace(
        pipeline,
        dp=dp,
        tp=draw(st.sampled_from([1, 4])),
        zero=zero,
        micro_batch=draw(st.sampled_from([1, 4])),
    )
    return replace(layout, **draw(options(layout)))


@st.composite
def options(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
    """Any option that the layout allows."""
    chosen: dict[str, Any] = {"precision": draw(st.sampled_from(Precision))}
    if layout.zero == 3:
        chosen["shard"] = draw(st.sampled_from([0, 1, 2])) if layout.dp > 1 else 0
    if layout.dp > 1 and not chosen.get("shard"):
        chosen["ep"] = draw(st.sampled_from([1, 2, 8]))
    if layout.dp % chosen.get("ep", 1):
        chosen["ep"] = 1
    return chosen


def model_of(layout: Layout) -> Transformer:
    """The sample model, with experts where they are divided, and with a layer more for some pipelines."""
    model = replace(MODEL, layers=MODEL.layers + is_uneven(layout))
    return replace(model, experts=8, experts_per_token=2) if layout.ep > 1 else model


def is_uneven(layout: Layout) -> bool:
    return layout.pp > 1 and layout.interleave == 1 and layout.micro_batch > 1


def jobs_of(layout: Layout) -> Jobs:
    return jobs_from([(model_of(layout), layout)], sequence=1024, devices_per_node=8)


def _arrays(times: Mapping[Cause, float]) -> dict[Cause, Column]:
    return {cause: np.array(time_s) for cause, time_s in times.items()}


@given(layout=pipelines(), stage=st.integers(0, 7))
def test_a_stage_does_everything_once_and_keeps_what_the_formula_says(
    layout: Layout, stage: int
) -> None:
    stage %= layout.pp
    order = stage_order(layout, stage)
    assert len(order) == len(set(order))
    assert set(order) == {
        Work(kind, index, chunk)
        for kind in (Phase.FORWARD, Phase.BACKWARD)
        for index in range(layout.accumulation)
        for chunk in range(layout.interleave)
    }
    changes = {Phase.FORWARD: 1, Phase.BACKWARD: -1}
    kept = np.cumsum([changes[work.kind] for work in order]).max() / layout.interleave
    assert in_flight(jobs_of(layout), stage)[0] == pytest.approx(kept)


@given(layout=layouts())
@settings(max_examples=120)
def test_simulation_and_closed_form_are_close(layout: Layout) -> None:
    """They differ by what the formula simplifies.

    It lets every stage wait for the head, gives all stages the gradients of the fullest, rounds point-to-point
    sends up to two (none where stages interleave), hides gradients behind layers without their collectives, and
    forgets the tail of the last bucket. Of 1,400 layouts drawn like this the farthest was 10.3 % off, of those
    without such a trait 4.2 %.
    """
    program = compile_layout(layout, layers=model_of(layout).layers)
    jobs = jobs_of(layout)
    durations_s = layout_durations(program, unit_times(layout, jobs, truth()))
    formula_s = float(step_parts(jobs, truth()).total_s[0])
    loose = layout.interleave > 1 or is_uneven(layout) or layout.ep > 1
    loose = loose or (layout.tp > 1 and layout.dp > 1)
    assert step_times(program, durations_s) == pytest.approx(formula_s, rel=0.12 if loose else 0.06)


@given(
    replicas=st.integers(2, 64),
    accumulation=st.integers(1, 4),
    forward_s=seconds,
    backward_s=seconds,
    exchange_s=st.floats(0, 20),
)
def test_replicas_alone_take_what_data_parallelism_takes(
    replicas: int, accumulation: int, forward_s: float, backward_s: float, exchange_s: float
) -> None:
    """The last bucket follows the backward pass, or all of them queue behind the first."""
    layout = Layout(dp=replicas, accumulation=accumulation)
    times = dict.fromkeys(Cause, 0.0)
    times |= {Cause.FORWARD: forward_s, Cause.BACKWARD: backward_s, Cause.ALL_REDUCE: exchange_s}
    program = compile_layout(layout, layers=LAYERS)
    step_s = step_times(program, layout_durations(program, _arrays(times)))
    last = max(backward_s + exchange_s / BUCKETS, backward_s / BUCKETS + exchange_s)
    expected = accumulation * forward_s + (accumulation - 1) * backward_s + last
    assert step_s == pytest.approx(expected, rel=1e-9)


@given(layout=layouts(), zero=st.sampled_from([1, 2, 3]))
@settings(max_examples=30)
def test_sharding_among_one_changes_nothing(layout: Layout, zero: int) -> None:
    alone = replace(layout, dp=1, zero=0, shard=0, ep=1)
    sharded = replace(alone, zero=zero if alone.pp == 1 else 1)
    first, second = jobs_of(alone), jobs_of(sharded)
    assert step_parts(first, truth()).total_s == pytest.approx(step_parts(second, truth()).total_s)
    assert tensor_bytes(first, 0) == pytest.approx(tensor_bytes(second, 0))
    programs = [compile_layout(one, layers=MODEL.layers) for one in (alone, sharded)]
    for one, other in zip(*(program.operations for program in programs), strict=True):
        assert one._replace(share=1.0) == other._replace(share=1.0)
        assert one.share == pytest.approx(other.share, rel=1e-12)


@given(powers=st.lists(st.floats(-2, 2), min_size=len(truth()), max_size=len(truth())))
@settings(max_examples=25)
def test_more_work_slower_parts_and_more_replicas_never_shorten_a_step(powers: list[float]) -> None:
    """Nor do more ranks that share matrices shorten their work; a backward pass takes as long as a forward pass."""
    jobs, values = some_jobs(most=64), truth().items()
    fitted = {name: value * 2**power for (name, value), power in zip(values, powers, strict=True)}
    fitted["backward_ratio"] = max(1.0, fitted["backward_ratio"])
    step_s = step_time_s(jobs, fitted)
    for name in ("accumulation", "micro_batch", "dp", "tp"):
        more_s = step_time_s(replace(jobs, **{name: 2 * getattr(jobs, name)}), fitted)
        ranks = 2 if name == "tp" else 1
        # Replicas share a sharded optimizer.
        assert ((ranks * more_s * TOLERANCE >= step_s) | (name == "dp") & (jobs.zero > 0)).all()
        assert (more_s <= 2 * step_s * TOLERANCE).all() or name != "accumulation"
    for name, value in fitted.items():
        changed_s = step_time_s(jobs, fitted | {name: 2 * value})
        helps = name.endswith("_per_s") or name.startswith("overlap")
        less_s, more_s = (changed_s, step_s) if helps else (step_s, changed_s)
        assert (less_s <= more_s * TOLERANCE).all(), name


def test_memory_rises_with_what_is_kept_falls_with_sharing_and_more_never_fits_less() -> None:
    jobs = some_jobs(most=64)
    held = tensor_bytes(jobs)
    assert (tensor_bytes(replace(jobs, micro_batch=2 * jobs.micro_batch)) > held).all()
    for shared in ({"dp": 2 * jobs.dp}, {"tp": 2 * jobs.tp}, {"recompute_full": jobs.tp > 0}):
        assert (tensor_bytes(replace(jobs, **shared)) <= held).all()
    needed = ASSUMED_MEMORY.fullest_bytes(jobs)
    fits = [ASSUMED_MEMORY.fit_probability(jobs, needed, 2.0**gib) for gib in range(30, 40)]
    assert (np.diff(fits, axis=0) >= 0).all()
    assert np.ptp(fits) > 0.9


@given(layout=layouts())
def test_sharding_more_never_takes_more_memory(layout: Layout) -> None:
    stages = range(layout.pp)
    layout = replace(layout, shard=0)
    levels = (0, 1) if layout.pp > 1 else (0, 1, 2)
    for stage in stages:
        held = [
            float(tensor_bytes(jobs_of(replace(layout, zero=zero)), stage)[0]) for zero in levels
        ]
        assert held == sorted(held, reverse=True)

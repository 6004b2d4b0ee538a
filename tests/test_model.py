"""The page against sums by hand, and the product's engine against the page."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import model
from perfmodel.answer.measured import steady_sides
from perfmodel.cost.collectives import (
    LevelCost,
    SwitchedSum,
    all_reduce_s,
    broadcast_s,
    message_bytes,
    num_messages,
)
from perfmodel.cost.jobs import jobs_from
from perfmodel.cost.layout_time import layout_durations
from perfmodel.cost.link_law import LinkLaw, paths
from perfmodel.cost.memory import in_flight, rank_parts
from perfmodel.engine import algebra
from perfmodel.engine.algebra import end_times_with_interference, step_times
from perfmodel.engine.job import FailureCause, Job, expected_elapsed_s
from perfmodel.engine.simulate import simulate
from perfmodel.layout import Layout, Schedule
from perfmodel.model import Tier
from perfmodel.statistics import expected_largest_deviate
from perfmodel.step import Cause, Interference, StepProgram, Stream
from perfmodel.step.compile import compile_layout, compile_step
from perfmodel.units import MIB
from perfmodel.workload import Parameter, Workload
from perfmodel.workload.transformer import gpt
from tests.laws.strategies import pipelines

EXACT = 1e-9
seconds = st.just(0.0) | st.floats(1e-6, 1.0) | st.sampled_from([0.1, 0.2, 0.5])
positive = st.floats(1e-3, 10.0)
speeds = st.floats(0.1, 1.0)
tiers = st.builds(
    Tier,
    st.integers(2, 70),
    st.floats(0, 1e-3),
    st.floats(1e6, 1e12),
    start_s=st.just(0.0),
    own_bytes_per_s=st.just(math.inf),
    later_start_s=st.just(0.0),
    half_bytes=st.just(1.0),
)
Case = tuple[Workload, Layout, dict[Cause, float]]


@st.composite
def ddp_cases(draw: st.DrawFn) -> Case:
    """Any buckets and times: seconds of a phase, of a hook for each gradient, of an all-reduce per byte."""
    ready = st.floats(0, 1) | st.sampled_from([0.0, 0.5, 1.0])
    gradients = draw(st.lists(st.tuples(ready, st.integers(1, 2**23)), min_size=1, max_size=12))
    parameters = tuple(
        Parameter(name="p", num_elements=size, ready_fraction=at) for at, size in sorted(gradients)
    )
    work: dict[str, Any] = {"forward_flop": 0.0, "backward_flop": 0.0, "num_operators": 0}
    workload = Workload(name="any", sample="", parameters=parameters, **work)
    m, cap = draw(st.integers(1, 3)), draw(st.none() | st.floats(0.001, 64))
    layout = Layout(dp=4, accumulation=m, bucket_cap_mb=cap)
    causes = (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER, Cause.BUCKET, Cause.DISPATCH)
    times = {cause: draw(seconds) for cause in causes}
    return workload, layout, times | {Cause.ALL_REDUCE: draw(st.floats(0, 1e-7))}


def durations(program: StepProgram, times: Mapping[Cause, float]) -> np.ndarray:
    works = [
        operation.size_bytes if operation.cause is Cause.ALL_REDUCE else operation.share
        for operation in program.operations
    ]
    return np.array(works) * [times.get(entry.cause, 0.0) for entry in program.operations]


def page_step_s(case: Case, **others: Any) -> float:
    workload, layout, times = case
    gradients = [parameter.size_bytes for parameter in workload.parameters]
    cap = None if layout.bucket_cap_mb is None else int(layout.bucket_cap_mb * MIB)
    buckets = model.ddp_buckets(gradients, cap)
    return model.ddp_step_s(
        *[times[cause] for cause in (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER)],
        ready=[workload.parameters[bucket[-1]].ready_fraction for bucket in buckets],
        all_reduce_s=[times[Cause.ALL_REDUCE] * sum(gradients[i] for i in b) for b in buckets],
        hook_s=[times[Cause.BUCKET] * len(b) for b in buckets],
        micro_batches=layout.accumulation,
        **others,
    )


@given(case=ddp_cases(), slow=st.builds(Interference, compute_speed=speeds, comm_speed=speeds))
def test_ddp_is_what_the_engine_says(case: Case, slow: Interference) -> None:
    program = compile_step(case[0], case[1], asynchronous=False)
    durations_s = durations(program, case[2])
    for speed in (Interference(), slow):
        both = {"compute_speed": speed.compute_speed, "comm_speed": speed.comm_speed}
        step_s = pytest.approx(page_step_s(case, speeds=tuple(both.values())), rel=EXACT)
        fluid_s = end_times_with_interference(program, durations_s[:, np.newaxis], **both)
        assert fluid_s.max() == step_s
        assert simulate(program, durations_s[np.newaxis], interference=speed).step_s == step_s
    assert step_times(program, durations_s) == pytest.approx(page_step_s(case), rel=EXACT)


@given(case=ddp_cases())
def test_host_that_runs_ahead_binds_only_if_it_is_slower(case: Case) -> None:
    """The second of two steps adds the slower of host and device; the first one waits for dispatch too."""
    step = compile_step(case[0], case[1], asynchronous=True)
    count = len(step.operations)
    again = [o._replace(after=tuple(i + count for i in o.after)) for o in step.operations]
    durations_s = durations(step, case[2])
    twice = StepProgram((*step.operations, *again))
    ends_s = algebra.trace(twice, np.tile(durations_s, 2)).end_s[0]
    host_s = durations_s[list(step.on_stream(Stream.HOST))].sum()
    step_s = page_step_s(case, host_s=host_s)
    alone_s = ends_s[:count].max()
    sides_s = [step_times(step, side_s) for side_s in steady_sides(step, durations_s)]
    assert max(sides_s) == pytest.approx(step_s, rel=EXACT, abs=1e-12)
    assert ends_s.max() - alone_s == pytest.approx(step_s, rel=EXACT, abs=1e-12)
    assert alone_s >= step_s * (1 - EXACT)


def layout_step_s(layout: Layout, times: Mapping[Cause, float], layers: int = 24) -> float:
    """The engine's two opinions on a layout."""
    program = compile_layout(layout, layers=layers)
    table = {cause: np.array(times.get(cause, 0.0)) for cause in Cause}
    durations_s = layout_durations(program, table)
    simulated_s = simulate(program, durations_s[np.newaxis]).step_s
    assert step_times(program, durations_s) == pytest.approx(simulated_s, rel=EXACT)
    return simulated_s


@given(
    counts=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    shard=st.sampled_from([0, 2]),
    parts=st.tuples(*[seconds] * 6),
)
def test_sharded_step_is_what_the_engine_says(
    counts: tuple[int, int], shard: int, parts: tuple[float, ...]
) -> None:
    """Even layers, no interference; with HSDP too."""
    layers, micro_batches = counts
    layout = Layout(dp=8, zero=3, shard=shard, accumulation=micro_batches)
    of_layers = (Cause.FORWARD, Cause.BACKWARD, Cause.ALL_GATHER, Cause.REDUCE_SCATTER)
    times = dict(zip((*of_layers, Cause.ALL_REDUCE), [layers * s for s in parts[:5]], strict=True))
    *each_s, scatter_s, across_s, optimizer_s = parts
    each_s += [scatter_s + (across_s if shard else 0.0), optimizer_s]
    step_s = model.sharded_step_s(layers, *each_s, micro_batches=micro_batches)
    found_s = layout_step_s(layout, {**times, Cause.OPTIMIZER: optimizer_s}, layers)
    assert found_s == pytest.approx(step_s, rel=EXACT)


@given(layout=pipelines(), forward=positive, backward=positive, share=st.floats(0, 1))
def test_pipeline_is_exact_without_sends_and_a_bound_with_them(
    layout: Layout, forward: float, backward: float, share: float
) -> None:
    p, m, v = layout.pp, layout.accumulation, layout.interleave
    times = {Cause.FORWARD: forward, Cause.BACKWARD: backward}
    step_s = model.pipeline_s(p, m, forward, backward, interleave=v)
    assert layout_step_s(layout, times) == pytest.approx(step_s, rel=EXACT)
    p2p = share * min(forward, backward)
    with_sends_s = layout_step_s(layout, {**times, Cause.P2P: p2p})
    bound_s = model.pipeline_s(p, m, forward, backward, p2p_s=p2p, interleave=v)
    if layout.schedule is Schedule.GPIPE:
        assert with_sends_s == pytest.approx(bound_s, rel=EXACT)
    assert with_sends_s >= bound_s * (1 - EXACT)
    if v == 1:
        assert with_sends_s <= model.pipeline_s(p, m, forward + p2p, backward + p2p) * (1 + EXACT)
        assert layout_step_s(layout, times, layers=23) <= step_s * (1 + EXACT)


def level(tier: Tier, **others: Any) -> LevelCost:
    return LevelCost(
        tier="links",
        members=tier.n,
        latency_s=np.array([tier.p2p_s]),
        transfer_s=lambda size: np.atleast_1d(size / tier.bytes_per_s),
        **{"crossings": tier.n - 1, **others},
    )


@given(tier=tiers, size=st.floats(1, 1e10))
def test_collectives_of_one_tier(tier: Tier, size: float) -> None:
    """A library takes the fastest algorithm that it has."""
    switched = tier._replace(p2p_s=25e-6)
    switch = SwitchedSum(
        latency_s=np.array([switched.p2p_s]),
        transfer_s=lambda whole: np.atleast_1d(whole * (1 + 1 / tier.n) / tier.bytes_per_s),
    )
    ring_s = model.collective_s("ring", size, tier)
    for library, algorithm, more in (
        ("gloo", "ring", {}),
        ("MPI", "halving_doubling", {}),
        ("nccl", "tree", {}),
        ("nccl", "nvls", {"inside_node": True, "switch": switch}),
    ):
        other_s = model.collective_s(algorithm, size, switched if more else tier)
        found_s = all_reduce_s([level(tier, **more)], size, library=library)[0]
        assert min(ring_s, other_s) == pytest.approx(found_s)
    for name in ("all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        message_s = tier.p2p_s + message_bytes(name, size, tier.n) / tier.bytes_per_s
        found_s = num_messages(name, tier.n) * message_s
        assert model.collective_s(name, size, tier) == pytest.approx(found_s)
    for library, algorithm in (("gloo", "broadcast"), ("nccl", "chain")):
        found_s = broadcast_s([level(tier)], size, library=library)[0]
        assert model.collective_s(algorithm, size, tier) == pytest.approx(found_s)


@given(
    tier=tiers,
    start_s=st.floats(1e-6, 1e-3),
    later=st.tuples(st.floats(1e-9, 1e-3), st.floats(1, 1e9)),
    own=st.floats(0.1, 10),
    size=st.floats(1, 1e10),
    inside=st.booleans(),
)
def test_collectives_of_links_that_were_measured(
    tier: Tier, start_s: float, later: tuple[float, float], own: float, size: float, *, inside: bool
) -> None:
    """The law that is fitted to NCCL and MPI: a launch, own bytes, and the later start of large arrays."""
    tier = tier._replace(
        p2p_s=max(tier.p2p_s, 1e-9),
        start_s=start_s,
        own_bytes_per_s=own * tier.bytes_per_s,
        later_start_s=later[0],
        half_bytes=later[1],
    )
    constants = (start_s, tier.p2p_s, tier.bytes_per_s, tier.own_bytes_per_s, *later)
    law = LinkLaw(logs=np.log(constants)[:, np.newaxis])

    def found_s(collective: str, library: str) -> float:
        ways = paths(collective, tier.n, 1 if inside else tier.n, library)
        return float(law.time_s(np.array([[size]]), ways)[0, 0])

    ring_s = model.collective_s("ring", size, tier)
    assert found_s("all_reduce", "gloo") == pytest.approx(ring_s)
    assert found_s("all_gather", "nccl") == pytest.approx(
        model.collective_s("all_gather", size, tier)
    )
    if inside:
        assert found_s("all_reduce", "nccl") == pytest.approx(ring_s)
    elif tier.n > 2:
        tree_s = model.collective_s("tree", size, tier)
        assert found_s("all_reduce", "nccl") == pytest.approx(min(ring_s, tree_s))


@given(layout=pipelines(), tp=st.sampled_from([1, 2, 8]), zero=st.integers(0, 3))
def test_memory_of_a_rank(layout: Layout, tp: int, zero: int) -> None:
    trained = gpt(layers=24, hidden=2048, heads=16, vocabulary=51_200)
    rows = [(trained, layout), (trained, Layout(dp=4, tp=tp, zero=zero))]
    piped, sharded = (jobs_from([row], sequence=1, devices_per_node=8) for row in rows)
    for stage in range(layout.pp):
        kept = float(layout.accumulation)
        if layout.schedule is not Schedule.GPIPE:
            kept = model.in_flight(layout.pp, stage, layout.accumulation, layout.interleave)
        assert in_flight(piped, stage)[0] == pytest.approx(kept)
    gathered = (2 * 2 + 4) * trained.layer_parameters / tp if zero == 3 else 0.0
    more: dict[str, Any] = {"zero": zero, "shards": 4, "gathered_bytes": gathered}
    states = model.memory_bytes(trained.parameters / tp, 0.0, **more)
    held = rank_parts(sharded, 0)
    found = held["parameters"] + held["gradients"] + held["optimizer"]
    assert states == pytest.approx(found[0])


@given(write=st.floats(1, 100), mtbf=st.floats(1e4, 1e6), restart=positive, n=st.integers(2, 9))
def test_stragglers_and_failures(write: float, mtbf: float, restart: float, n: int) -> None:
    assert math.log(model.straggler_factor(n, 1.0)) == pytest.approx(expected_largest_deviate(n))
    interval = model.checkpoint_interval_s(write, mtbf / n)
    fails = (FailureCause(name="any", mtbf_device_s=mtbf),)
    times_s: dict[str, Any] = {"checkpoint_interval_s": interval, "checkpoint_write_s": write}
    job = Job(devices=n, work_s=5 * interval, causes=fails, restart_s=restart, **times_s)
    share = model.goodput(interval, write, mtbf / n, restart)
    assert share == pytest.approx(job.work_s / expected_elapsed_s(job))


def test_sums_by_hand() -> None:
    rates = {"flop_per_s": 1e12, "bytes_per_s": 1e9}
    assert model.operator_s(2e12, 1e9, **rates, launch_s=0.5) == 2.5
    assert model.ddp_buckets([MIB, 20 * MIB, 20 * MIB, 4]) == [[0], [1, 2], [3]]
    assert model.ddp_buckets([MIB, 20 * MIB, 20 * MIB, 4], 25 * MIB) == [[0, 1, 2], [3]]
    tier = Tier(8, 1e-3, 1e6)
    times_ms = {"ring": 14 + 14, "halving_doubling": 6 + 14, "all_gather": 7 + 7, "nvls": 1 + 9}
    for algorithm, time_ms in times_ms.items():
        assert model.collective_s(algorithm, 8000, tier) == pytest.approx(time_ms * 1e-3)
    found_ms = [1e3 * model.collective_s("tree", 368, Tier(n, 1e-3, 1e6)) for n in (2, 8)]
    assert found_ms == pytest.approx([2 + 1, 6 + 2])
    # 4 messages of 1 ms and 8 kB inside; 2 of 4 ms and 6 kB at half the rate across.
    both = model.hierarchical_all_reduce_s(6000, Tier(3, 1e-3, 1e6), Tier(2, 4e-3, 5e5))
    assert both == pytest.approx((4 + 8 + 8 + 12) * 1e-3)
    tiers_of_6 = [level(Tier(3, 1e-3, 1e6), crossings=4), level(Tier(2, 4e-3, 5e5))]
    assert all_reduce_s(tiers_of_6, 6000, library="mpi")[0] == pytest.approx(both)
    # Buckets full at 2 and 3; the first reduction ends at 4, the second at 6; a slower host binds.
    step: dict[str, Any] = {"ready": (0.5, 1.0), "all_reduce_s": (2.0, 2.0)}
    assert model.ddp_step_s(1, 2, 1, **step) == 7
    assert model.ddp_step_s(1, 2, 1, **step, micro_batches=3, host_s=9) == 13
    assert model.ddp_step_s(1, 2, 1, **step, host_s=9) == 9
    # Half speed from 2 to 4: the second half of the pass ends at 4, half of the reduction is left.
    assert model.ddp_step_s(1, 2, 1, **step, speeds=(0.5, 0.5)) == 1 + 1 + 2 + 1 + 2 + 1
    # Gathers 0.5 ahead of the first layer; 2 layers, all else hidden but the last reduction.
    assert model.sharded_step_s(2, 1, 2, 0.5, 0.5, 0.25) == 0.5 + 2 + 4 + 0.5 + 0.25
    # Two passes of 3 layers with 2 all-reduces of 28 ms each.
    assert model.tensor_parallel_s(3, 8000, tier) == pytest.approx(12 * 28e-3)
    assert model.pipeline_s(4, 8, 1, 2) == 33
    assert model.pipeline_s(4, 8, 1, 2, interleave=3) == 27
    assert model.memory_bytes(1e9, 1e9, kept=4, zero=1, shards=6) == 12e9
    assert model.speed_up(64, 2.0, 8, 1.0) == model.speed_up(8, 0.25, 8, 1.0) == 4

"""What no prediction may do, whatever the machine."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.documents.prediction import PredictedPoint
from perfmodel.layout import Scaling, scaled_layouts
from tests.existing import existing
from tests.perfmodel.asking import Asking
from tests.perfmodel.profiles import Machine, profile

TOLERANCE = 1 + 1e-9
#: Enough for quantiles to differ, few enough for many machines.
NUM_DRAWS = 20

names = st.sampled_from(["light", "heavy"])
scalings = st.sampled_from(["weak", "strong"])
caps = st.sampled_from([None, 1.0, 4.0, 100.0])
num_devices = st.sampled_from([2, 3, 4, 8, 64])
machines = st.builds(
    Machine,
    latency_s=st.floats(1e-7, 1e-2),
    s_per_byte=st.floats(1e-12, 1e-7),
    bucket_s=st.floats(0, 1e-3),
    bucket_s_per_byte=st.floats(0, 1e-9),
    sharing=st.floats(1.0, 2.0),
    compute_speed=st.floats(0.5, 1.0),
    comm_speed=st.floats(0.5, 1.0),
    noise=st.lists(st.floats(0.8, 2.0), max_size=8).map(tuple),
    rank_spread=st.floats(0, 0.1),
    relative_error=st.floats(0, 0.2),
    residual=st.floats(0, 0.2),
)
few = settings(max_examples=30)


def predicted(
    machine: Machine,
    *world_sizes: int,
    workload: str,
    scaling: Scaling = "weak",
    bucket_cap_mb: float | None = None,
) -> list[PredictedPoint]:
    predictor = Asking(profile(machine), num_draws=NUM_DRAWS)
    batch = 16 if scaling == "weak" else 192
    asked = scaled_layouts(
        (1, *world_sizes), scaling=scaling, batch=batch, bucket_cap_mb=bucket_cap_mb
    )
    steps = [predictor.step(predictor.workload(workload), setting) for setting in asked]
    return [predictor.point(step, baseline=steps[0]) for step in steps]


@few
@given(machine=machines, workload=names, cap=caps, n=num_devices, faster=st.floats(0.01, 1.0))
def test_faster_messages_never_slow_a_step(
    machine: Machine, workload: str, cap: float | None, n: int, faster: float
) -> None:
    better = dataclasses.replace(machine, message_scale=faster)
    slow = predicted(machine, n, workload=workload, bucket_cap_mb=cap)[1]
    fast = predicted(better, n, workload=workload, bucket_cap_mb=cap)[1]
    assert fast.step_s.nominal <= slow.step_s.nominal * TOLERANCE


@few
@given(machine=machines, workload=names, cap=caps)
def test_throughput_of_a_rank_never_grows_with_their_number(
    machine: Machine, workload: str, cap: float | None
) -> None:
    points = predicted(machine, 2, 3, 4, 8, 64, 1024, workload=workload, bucket_cap_mb=cap)
    steps_s = [point.step_s.nominal for point in points]
    assert all(after_s * TOLERANCE >= before_s for before_s, after_s in itertools.pairwise(steps_s))


@few
@given(machine=machines, workload=names, n=num_devices, scale=st.floats(0.01, 100.0))
def test_a_machine_slower_in_everything_is_slower_by_that_factor(
    machine: Machine, workload: str, n: int, scale: float
) -> None:
    slower = dataclasses.replace(machine, time_scale=scale)
    before, after = (predicted(each, n, workload=workload)[1] for each in (machine, slower))
    assert after.step_s.nominal == pytest.approx(scale * before.step_s.nominal, rel=1e-9)
    assert after.step_s.p95 == pytest.approx(scale * before.step_s.p95, rel=1e-9)
    assert after.speedup is not None
    assert after.speedup.nominal == pytest.approx(existing(before.speedup).nominal, rel=1e-9)


@few
@given(machine=machines, workload=names, scaling=scalings, n=num_devices)
def test_quantiles_are_in_order_and_causes_sum_to_the_step(
    machine: Machine, workload: str, scaling: Scaling, n: int
) -> None:
    for point in predicted(machine, n, workload=workload, scaling=scaling):
        for quantity in (point.step_s, point.samples_per_s, point.speedup, point.exposed_comm_s):
            assert quantity is not None
            assert quantity.p5 <= quantity.nominal <= quantity.p95
        assert sum(point.breakdown_s.values()) == pytest.approx(point.step_s.nominal, rel=1e-6)
        assert 0 <= point.straggler_s < point.step_s.nominal

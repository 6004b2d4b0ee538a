"""Protocols of small models and of memory: sums by hand."""

import csv
from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost.jobs import Jobs, jobs_from
from perfmodel.layout.layout import Layout
from tests.perfmodel.cost.large_samples import MODEL
from validate.published import memory, notebooks, scaling
from validate.published.series import Series


def series(*steps: float, gpus: tuple[int, ...]) -> Series:
    return Series(
        name="a model",
        gpus=np.array(gpus, dtype=float),
        per_node=8.0,
        step=np.array(steps, dtype=float),
    )


def test_two_devices_that_lose_much_predict_a_ring() -> None:
    one = series(1.0, 1.5, 9.0, gpus=(1, 2, 8))
    low, middle, high = scaling.predict_growth(one, (np.log(0.5), 10.0))
    # The prior is vague: the loss of 50 % at two is 87.5 % at eight (2 x 7/8).
    assert middle[2] == pytest.approx(1 + 0.5 * 2 * 7 / 8, rel=1e-3)
    assert low[2] < middle[2] < high[2]


def test_one_device_alone_keeps_the_prior_and_is_wide() -> None:
    prior = (np.log(0.04), 0.7)
    alone = scaling.predict_growth(series(1.0, 9.0, gpus=(1, 8)), prior)
    seen = scaling.predict_growth(series(1.0, 1.04, 9.0, gpus=(1, 2, 8)), prior)
    assert alone[1][1] == pytest.approx(1 + 0.04 * 2 * 7 / 8)
    assert alone[2][1] - alone[0][1] > 1.5 * (seen[2][2] - seen[0][2])


def test_the_prior_is_the_median_loss_of_all_series() -> None:
    losses = (0.02, 0.03, 0.05, 0.08, 0.2)
    found = scaling.loss_prior([series(1.0, 1 + x, gpus=(1, 2)) for x in losses])
    assert found[0] == pytest.approx(np.log(0.05))
    few = scaling.loss_prior([series(1.0, 2.0, gpus=(1, 2))])
    assert few == scaling._LOSS_PRIOR


def test_from_one_node_on_a_doubling_costs_what_the_second_count_shows() -> None:
    one = series(1.0, 1.06, 9.0, gpus=(8, 16, 64))
    low, middle, high = scaling.predict_from_several(one, (np.log(0.04), 0.7), (0.0, 10.0))
    # The prior is vague: 6 % for one doubling of the nodes are 18 % for three.
    assert middle == pytest.approx([1.0, 1.06, 1.18], rel=1e-3)
    assert low[2] < middle[2] < high[2]
    alone = scaling.predict_from_several(
        series(1.0, 9.0, gpus=(8, 16)), (np.log(0.04), 0.7), (0.02, 0.01)
    )
    assert alone[1][1] == pytest.approx(1.02)


def throughput(**cells: object) -> dict[str, object]:
    usual = dict.fromkeys(
        (
            *(
                "path",
                "table",
                "framework",
                "model",
                "precision",
                "scaling_kind",
                "throughput_unit",
            ),
            *("tp", "pp", "cp", "ep", "zero_stage", "activation_checkpointing", "seq_len", "gpu"),
            *("micro_batch", "global_batch", "step_time_s", "throughput_per_gpu", "gpus_per_node"),
            *("throughput", "notes"),
        ),
        "",
    )
    return usual | {"source": "acme", "kind": "measured", "hardware": "box"} | cells


def test_any_source_with_a_batch_has_a_verdict(tmp_path: Path) -> None:
    rows = [
        throughput(hardware=f"{n}x box", gpus=n, global_batch=4 * n, step_time_s=1 + 0.1 * (n > 1))
        for n in (1, 2, 8)
    ]
    no_batch = [throughput(model="other", gpus=n, throughput=n) for n in (1, 2, 8)]
    wrong = [throughput(model="ncf", gpus=n, micro_batch=1, throughput=n * n) for n in (1, 2, 8)]
    with (tmp_path / "throughput.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([*rows, *no_batch, *wrong])
    (verdict,), skipped = scaling.judge(tmp_path)
    assert (verdict.name, verdict.num_predicted) == ("acme, 1 and 2 devices", 1)
    assert verdict.errors[1].method == "linear scaling"
    assert verdict.errors[1].mape == pytest.approx(1 - 1 / 1.1)
    assert skipped == ["scaling: acme: ncf on box: devices are 8 times as fast together as alone"]


def test_builds_that_agree_predict_the_others() -> None:
    single = np.linspace(1.0, 2.0, 20)
    known = np.stack([single, 1.2 * single], axis=1)
    predicted, half = notebooks.predict_second(known, np.array([3.0]))
    assert predicted == pytest.approx([3.6])
    assert half == pytest.approx([0.0], abs=1e-12)


def test_builds_of_the_same_step_tell_their_scatter() -> None:
    steps = np.array([(1.0, 2.0), (1.0, 4.0)] * 5 + [(3.0, 9.0)])
    found = notebooks.judge_repeats("a model", steps)
    assert found is not None
    # Without itself the median of ten is the other number; what stands alone tells nothing.
    assert (found.num_fitted, found.num_predicted) == (1, 10)
    assert found.errors[0].worst_absolute == pytest.approx(1.0)
    assert found.errors[0].bias == pytest.approx((1.0 - 0.5) / 2)
    assert notebooks.judge_repeats("a model", steps[-2:]) is None


def test_area_under_curve_by_hand() -> None:
    # Of four pairs three are in order.
    assert memory.area_under_curve(np.array([1.0, 3.0]), np.array([2.0, 4.0])) == 0.75


def test_a_failure_smaller_than_a_run_is_not_memory() -> None:
    def jobs(*layouts: Layout) -> Jobs:
        return jobs_from([(MODEL, x) for x in layouts], sequence=1024, devices_per_node=8)

    ran = jobs(Layout(tp=2, dp=4, zero=1, micro_batch=4, accumulation=2))
    failed = jobs(
        Layout(tp=2, dp=8, zero=1, micro_batch=2, accumulation=2),
        Layout(tp=2, dp=2, zero=1, micro_batch=2, accumulation=2),
        Layout(tp=2, dp=8, zero=1, micro_batch=8, accumulation=2),
        Layout(tp=1, dp=8, zero=1, micro_batch=2, accumulation=2),
        Layout(tp=2, dp=8, zero=0, micro_batch=2, accumulation=2),
    )
    found = memory._smaller_than_one_that_ran(failed, ran)
    assert found.tolist() == [True, False, False, False, False]

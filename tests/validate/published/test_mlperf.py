"""MLPerf's protocol on submissions whose law is known."""

from pathlib import Path

import numpy as np
import pytest

from tests.validate.published.test_published import write
from validate.published import mlperf
from validate.published.scaling import grow_linearly, growth_terms
from validate.published.series import Series

#: Of the first step: what a ring loses, a doubling of the nodes costs, and no sample is needed for.
TRUTH = (0.03, 0.02, 0.15)
NODES = (1, 2, 8, 32)
BATCHES = (512, 512, 1024, 2048)


def series() -> Series:
    gpus = 8.0 * np.array(NODES)
    plain = Series(
        name="box",
        gpus=gpus,
        per_node=8.0,
        step=np.ones(len(gpus)),
        batch=np.array(BATCHES) / gpus,
    )
    grown = 1 + growth_terms(plain) @ np.array(TRUTH)
    return Series(name="box", gpus=gpus, per_node=8.0, step=grown, batch=plain.batch)


def rows(submitter: str, **cells: object) -> list[dict[str, object]]:
    """Four sizes of a system: 40 epochs of 100 device-seconds at the first size."""
    return [
        {
            "round": "1.0",
            "division": "closed",
            "submitter": submitter,
            "benchmark": "resnet",
            "hardware": "chip",
            "gpus_per_node": 8,
            "framework": "f",
            "system": f"{nodes}xbox" if nodes > 1 else "box",
            "gpus": 8 * nodes,
            "global_batch": batch,
            "train_only_median_s": 40 * 100 * growth / (8 * nodes),
            "ttt_median_s": 40 * 100 * growth / (8 * nodes),
            "stop_epoch_median": 40,
            "throughput_median": "",
        }
        | cells
        for nodes, batch, growth in zip(NODES, BATCHES, series().step, strict=True)
    ]


def test_what_a_step_costs_is_paid_more_often_by_smaller_batches() -> None:
    # From 64 samples per device on one node to 32 on two: what a step costs counts twice per sample.
    terms = growth_terms(series())
    assert terms[0] == pytest.approx([0, 0, 0])
    assert terms[1] == pytest.approx([0, 1, 1])


def test_batches_beyond_the_known_ones_are_uncertain() -> None:
    # Known are 64 and 32 samples per device: 16 and 8 lie half an octave and more outside.
    found = mlperf._beyond(series())
    assert found[:2] == pytest.approx([0, 0])
    assert found[2:] == pytest.approx(1.645 * 0.2 * np.log([2, 4]) ** 0.5, rel=1e-3)


def test_known_coefficients_give_the_growth() -> None:
    low, middle, high = grow_linearly(series(), np.array(TRUTH), np.zeros((3, 3)))
    assert middle == pytest.approx(series().step)
    assert (low < middle).all()
    assert (middle < high).all()


def test_systems_of_one_kind_predict_their_larger_submissions(tmp_path: Path) -> None:
    write(tmp_path / "mlperf_scaling.csv", [row for name in "abcdef" for row in rows(name)])
    found, skipped = mlperf.judge(tmp_path)
    every, resnet = found
    assert (every.num_fitted, every.num_predicted) == (6, 12)
    assert resnet.name.startswith("device-seconds per sample, resnet, two smallest counts")
    ours, linear, _ = every.errors
    # One pair of counts does not tell three coefficients apart; their prior is near the truth.
    assert ours.mape < 0.1
    assert linear.mape > 0.4
    assert ours.coverage == 1.0
    assert skipped == [
        "mlperf_scaling: time to train of resnet: samples or reference points are missing"
    ]


def test_larger_batches_need_the_samples_of_the_reference_points(tmp_path: Path) -> None:
    write(tmp_path / "mlperf_scaling.csv", rows("a"))
    points: list[dict[str, object]] = [
        {
            "benchmark": "resnet",
            "round": "training_1.0.0",
            "global_batch": batch,
            "mean": 40 * (1 + batch / 2048),
            "olympic_mean": "",
        }
        for batch in (256, 512, 1024, 2048, 4096)
    ]
    write(tmp_path / "convergence.csv", points)
    found, _ = mlperf.judge(tmp_path)
    whole = next(one for one in found if one.name.startswith("time to train"))
    steps = next(one for one in found if one.name.startswith("device-seconds"))
    # The submissions stop after 40 epochs whatever their batch: with 1,024 and 2,048 samples instead
    # of 512 the reference needs 1.2 and 1.6 times as many.
    ratio = (1 + whole.errors[0].bias) / (1 + steps.errors[0].bias)
    assert ratio == pytest.approx(1.4, abs=0.08)


def test_submissions_that_tell_no_samples_are_named(tmp_path: Path) -> None:
    silent = rows("a", stop_epoch_median=1, benchmark="bert")
    write(tmp_path / "mlperf_scaling.csv", [*rows("b"), *silent, *rows("c", gpus="")])
    _, skipped = mlperf.judge(tmp_path)
    assert skipped[:2] == [
        "mlperf_scaling: rows that tell no devices or no time: 4",
        "mlperf_scaling: systems that tell neither samples nor a rate: 1",
    ]


@pytest.mark.parametrize(
    "name", ["2xR750xa", "R750xa", "dgx_n8_ngc", "dgx_ngc", "HLS-N32-PT", "HLS-PT"]
)
def test_counts_are_no_part_of_a_systems_name(name: str) -> None:
    assert mlperf._COUNTS.sub("", name) in {"R750xa", "dgx_ngc", "HLS-PT"}

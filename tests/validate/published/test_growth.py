"""Protocols of small models and of memory: sums by hand."""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.documents.verdicts import CARRIED
from tests.validate.published.judged import judged, opened, write
from validate.published import mlperf, scaling, steps
from validate.published.scaling import Series, grow_linearly, growth_terms


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
    assert few == scaling.LOSS_PRIOR


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
            *("throughput", "notes", "sharding"),
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
    write(tmp_path / "throughput.csv", [*rows, *no_batch, *wrong])
    (verdict,), skipped, counted = judged(tmp_path, "scaling")
    assert (verdict.name, verdict.num_predicted) == ("acme, 1 and 2 devices", 1)
    assert verdict.errors[1].method == "linear scaling"
    assert verdict.errors[1].mape == pytest.approx(1 - 1 / 1.1)
    assert skipped == ["scaling: acme: ncf on box: devices are 8 times as fast together as alone"]
    assert verdict.num_beyond == 1
    carried = verdict.errors[2]
    assert carried.method == CARRIED
    assert carried.mape == pytest.approx(0.0)
    assert (counted.num_judged, counted.left_out) == (
        3,
        {
            "devices faster together than alone": 3,
            "no time, or neither batch nor kind of scaling": 3,
        },
    )


def test_shards_among_all_devices_and_in_groups_are_two_series(tmp_path: Path) -> None:
    counts = {64: "FSDP64", 128: "FSDP128", 256: "FSDP256", 512: "FSDP128", 1024: "FSDP128"}
    rows = [
        throughput(model="m", gpus=n, micro_batch=2, throughput=n, sharding=sharding)
        for n, sharding in (counts | {2048: "FSDP128"}).items()
    ]
    write(tmp_path / "throughput.csv", rows)
    table = opened(tmp_path, "scaling")
    sources = scaling.read_series(table)
    assert [list(one.gpus) for one in sources["acme"]] == [[64, 128, 256], [512, 1024, 2048]]
    assert table.counted().num_judged == 6


def test_builds_that_agree_predict_the_others(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        dict.fromkeys(("path", "commit"), "")
        | {"source": "d2l-ai", "model": "m"}
        | {"date": index, "gpus": gpus, "step_time_s": (1 + index / 20) * (1.2 if gpus == 2 else 1)}
        for index in range(20)
        for gpus in (1, 2)
    ]
    write(tmp_path / "throughput.csv", rows)
    (verdict, *_), skipped, counted = judged(tmp_path, "notebooks")
    assert skipped == []
    assert (counted.num_judged, counted.left_out) == (40, {})
    assert verdict.num_beyond == 0
    assert verdict.num_predicted == 10 * steps.DRAWS
    assert verdict.errors[0].worst_absolute == pytest.approx(0.0, abs=1e-9)
    assert verdict.errors[1].bias == pytest.approx(1 / 1.2 - 1)


def test_builds_of_the_same_step_tell_their_scatter() -> None:
    builds = np.array([(1.0, 2.0), (1.0, 4.0)] * 5 + [(3.0, 9.0)])
    found = steps.judge_repeats("notebooks", "a model", builds)
    assert found is not None
    # Without itself the median of ten is the other number; what stands alone tells nothing.
    assert (found.num_fitted, found.num_predicted) == (1, 10)
    assert found.errors[0].worst_absolute == pytest.approx(1.0)
    assert found.errors[0].bias == pytest.approx((1.0 - 0.5) / 2)
    assert steps.judge_repeats("notebooks", "a model", builds[-2:]) is None


#: Of the first step: what a ring loses, a doubling of the nodes costs, and no sample is needed for.
TRUTH = (0.03, 0.02, 0.15)
NODES = (1, 2, 8, 32)
BATCHES = (512, 512, 1024, 2048)


def system() -> Series:
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
        for nodes, batch, growth in zip(NODES, BATCHES, system().step, strict=True)
    ]


def test_what_a_step_costs_is_paid_more_often_by_smaller_batches() -> None:
    # From 64 samples per device on one node to 32 on two: what a step costs counts twice per sample.
    terms = growth_terms(system())
    assert terms[0] == pytest.approx([0, 0, 0])
    assert terms[1] == pytest.approx([0, 1, 1])


def test_batches_beyond_the_known_ones_are_uncertain() -> None:
    # Known are 64 and 32 samples per device: 16 and 8 lie half an octave and more outside.
    found = mlperf.beyond(system())
    assert found[:2] == pytest.approx([0, 0])
    assert found[2:] == pytest.approx(1.645 * 0.2 * np.log([2, 4]) ** 0.5, rel=1e-3)


def test_known_coefficients_give_the_growth() -> None:
    low, middle, high = grow_linearly(system(), np.array(TRUTH), np.zeros((3, 3)))
    assert middle == pytest.approx(system().step)
    assert (low < middle).all()
    assert (middle < high).all()


def test_systems_of_one_kind_predict_their_larger_submissions(tmp_path: Path) -> None:
    write(tmp_path / "mlperf_scaling.csv", [row for name in "abcdef" for row in rows(name)])
    found, skipped, _ = judged(tmp_path, "mlperf")
    every, resnet = found
    assert (every.num_fitted, every.num_predicted) == (6, 12)
    assert resnet.name.startswith("device-seconds per sample, resnet, two smallest counts")
    ours, linear, *_ = every.errors
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
    found, *_ = judged(tmp_path, "mlperf")
    whole = next(one for one in found if one.name.startswith("time to train"))
    steps = next(one for one in found if one.name.startswith("device-seconds"))
    # The submissions stop after 40 epochs whatever their batch: with 1,024 and 2,048 samples instead
    # of 512 the reference needs 1.2 and 1.6 times as many.
    ratio = (1 + whole.errors[0].bias) / (1 + steps.errors[0].bias)
    assert ratio == pytest.approx(1.4, abs=0.08)


def test_submissions_that_tell_no_samples_are_named(tmp_path: Path) -> None:
    silent = rows("a", stop_epoch_median=1, benchmark="bert")
    write(tmp_path / "mlperf_scaling.csv", [*rows("b"), *silent, *rows("c", gpus="")])
    counted = judged(tmp_path, "mlperf")[2]
    assert (counted.num_judged, counted.left_out) == (
        4,
        {"no devices or no time": 4, "systems that tell neither samples nor a rate": 4},
    )


@pytest.mark.parametrize(
    "name", ["2xR750xa", "R750xa", "dgx_n8_ngc", "dgx_ngc", "HLS-N32-PT", "HLS-PT"]
)
def test_counts_are_no_part_of_a_systems_name(name: str) -> None:
    assert mlperf._COUNTS.sub("", name) in {"R750xa", "dgx_ngc", "HLS-PT"}

"""Protocols of small models and of memory: sums by hand."""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.documents.verdicts import CARRIED
from tests.validate.published.judged import judged, opened
from validate.published import scaling
from validate.published.scaling import Series, grow_linearly, growth_terms


def series(
    *steps: float, gpus: tuple[int, ...], model: str = "a model", machine: str = "a box"
) -> Series:
    return Series(
        model=model,
        machine=machine,
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
    found = scaling.loss_prior(losses)
    assert found[0] == pytest.approx(np.log(0.05))
    assert scaling.loss_prior([]) == scaling.LOSS_PRIOR


def test_other_models_on_the_same_machine_tell_what_is_lost() -> None:
    """5 % on this machine, 20 % on others; sizes of the same model tell nothing, nor do few series."""
    here = [series(1.0, 1.05, gpus=(1, 2), model=f"m{i}") for i in range(5)]
    there = [series(1.0, 1.2, gpus=(1, 2), model=f"m{i}", machine="other") for i in range(9)]
    own = [series(1.0, 3.0, gpus=(1, 2), model=f"a model [{i}]") for i in range(9)]
    one = series(1.0, 9.0, gpus=(1, 8))
    known = scaling.nearest(one, [*here, *there, *own], scaling.inside_loss)
    assert known == pytest.approx([0.05] * 5)
    # Four on this machine are too few: both machines are of one source.
    more = scaling.nearest(one, [*here[1:], *there], scaling.inside_loss)
    assert sorted(more) == pytest.approx([0.05] * 4 + [0.2] * 9)
    assert scaling.nearest(one, [*here[1:], *own], scaling.inside_loss) == []


def test_the_spread_of_losses_has_heavy_tails_and_no_median_gains() -> None:
    """Quartiles of -1 and +1 %, tails of 33 %: a tenth lies beyond, so that 0.33 is 1.645 spreads away."""
    losses = [-0.33, *[-0.01] * 8, 0.0, 0.0, *[0.01] * 8, 0.33]
    middle, spread = scaling.spread_prior(losses, scaling.INSIDE)
    assert middle == pytest.approx(0.0)
    assert spread == pytest.approx(float(np.quantile(losses, 0.95)) / 1.645, rel=1e-3)
    assert scaling.spread_prior([-0.1] * 5, scaling.INSIDE) == pytest.approx((0.0, 0.005))
    assert scaling.spread_prior([], scaling.INSIDE) == scaling.INSIDE


def test_losses_inside_and_between_nodes() -> None:
    """Ring of 8: 2 x 7/8; 16 and 64 devices are one and three doublings of a node of 8."""
    one = series(1.0, 1.35, 1.65, gpus=(1, 8, 64))
    assert scaling.inside_loss(one) == pytest.approx(0.35 / (2 * 7 / 8))
    assert scaling.between_loss(one) == pytest.approx(0.1)
    assert scaling.inside_loss(series(1.0, 1.2, gpus=(8, 16))) is None
    assert scaling.between_loss(series(2.0, 2.2, gpus=(8, 16))) == pytest.approx(0.1)
    assert scaling.between_loss(series(1.0, 1.2, gpus=(1, 8))) is None


def test_from_one_node_on_a_doubling_costs_what_the_second_count_shows() -> None:
    one = series(1.0, 1.06, 9.0, gpus=(8, 16, 64))
    low, middle, high = scaling.predict_from_several(one, scaling.INSIDE, (0.0, 10.0))
    # The prior is vague: 6 % for one doubling of the nodes are 18 % for three.
    assert middle == pytest.approx([1.0, 1.06, 1.18], rel=1e-3)
    assert low[2] < middle[2] < high[2]
    alone = scaling.predict_from_several(
        series(1.0, 9.0, gpus=(8, 16)), scaling.INSIDE, (0.02, 0.01)
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
    (verdict,), skipped, counted = judged(tmp_path, "scaling", [*rows, *no_batch, *wrong])
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
    table = opened(tmp_path, "scaling", rows)
    sources = scaling.read_series(table)
    assert [list(one.gpus) for one in sources["acme"]] == [[64, 128, 256], [512, 1024, 2048]]
    assert table.counted().num_judged == 6


def test_known_coefficients_give_the_growth() -> None:
    gpus = 8.0 * np.array((1, 2, 8, 32))
    box = Series(model="m", machine="box", gpus=gpus, per_node=8.0, step=np.ones(len(gpus)))
    assert growth_terms(box)[1] == pytest.approx([0, 1])
    low, middle, high = grow_linearly(box, np.array([0.04, 0.02]), np.zeros((2, 2)))
    assert middle == pytest.approx(1 + 0.02 * np.array([0, 1, 3, 5]))
    assert (low < middle).all()
    assert (middle < high).all()

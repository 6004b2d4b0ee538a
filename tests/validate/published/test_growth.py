"""Protocols of small models and of memory: sums by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfmodel.documents.verdicts import CARRIED
from tests.validate.published.judged import judged, opened
from validate.published import scaling
from validate.published.scaling import Series


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


def many(name: str, *losses: float, first: int = 8, batch: float | None = None) -> list[Series]:
    """Models that lose so much on twice as many devices."""
    steps = {name.format(i): 1 + loss for i, loss in enumerate(losses)}
    found = [series(1.0, step, gpus=(first, 2 * first), model=m) for m, step in steps.items()]
    return [replace(each, batch=batch) for each in found]


def test_two_devices_that_lose_much_predict_a_ring() -> None:
    one = series(1.0, 1.5, 9.0, gpus=(1, 2, 8))
    low, middle, high = scaling.predict_growth(one, (0.04, 10.0), scaling.BETWEEN_NODES, known=2)
    # The prior is vague: the loss of 50 % at two is 87.5 % at eight (2 x 7/8).
    assert middle[2] == pytest.approx(1 + 0.5 * 2 * 7 / 8, rel=1e-3)
    assert low[2] < middle[2] < high[2]


def test_one_device_alone_keeps_the_prior_and_is_wide() -> None:
    """What another count shows is no matter where it is not known."""
    one = series(1.0, 1.05, 9.0, gpus=(1, 2, 8))
    alone, seen = (
        scaling.predict_growth(one, (0.04, 0.2), scaling.BETWEEN_NODES, known=known)
        for known in (1, 2)
    )
    assert alone[1] == pytest.approx([1, 1.04, 1 + 0.04 * 2 * 7 / 8])
    assert alone[2][2] - alone[0][2] > 1.5 * (seen[2][2] - seen[0][2])


def test_other_models_on_the_same_machine_tell_what_a_doubling_of_nodes_costs() -> None:
    """5 % on this machine, 20 % on others; sizes of the same model tell nothing, nor do few series."""
    here, own = many("m{}", *[0.05] * 5), many("a model [{}]", *[2.0] * 9)
    there = [replace(each, machine="other") for each in many("m{}", *[0.2] * 9)]
    one = series(1.0, 9.0, gpus=(1, 8))
    assert scaling.between_prior(one, [*here, *there, *own]) == pytest.approx((0.05, 0.005))
    # Four on this machine are too few.
    more = scaling.between_prior(one, [*here[1:], *there])
    assert more == pytest.approx((0.2, 0.15 / 1.35))
    assert scaling.between_prior(one, [*here[1:], *own]) == scaling.BETWEEN_NODES


def test_models_alike_tell_what_a_node_loses() -> None:
    """Steps of 20 ms lose 3 ms, those of 2 s nothing; 16 bit and machines that lose tell more."""
    short = many("s{}", *[0.15] * 9, first=1, batch=0.02)
    long = many("l{}", *[0.0] * 9, first=1, batch=2.0)
    own = many("a model [{}]", *[8.0] * 9, first=1)
    others = [*short, *long, *own]
    one = series(1.0, 9.0, gpus=(1, 8))
    found = {s: scaling.expected_loss(replace(one, batch=s), others) for s in (0.02, 2.0)}
    assert found[0.02][0] == pytest.approx(0.15, rel=0.2)
    assert found[2.0][0] == pytest.approx(0.005, rel=0.2)
    elsewhere = [replace(other, machine="other", in_half=True) for other in short]
    slow = replace(one, batch=2.0)
    for alike in (replace(slow, in_half=True), replace(slow, machine="other")):
        assert scaling.expected_loss(alike, [*elsewhere, *long])[0] > 0.007
    # The spread grows with the loss; few tell nothing.
    assert found[2.0][1] == scaling.INSIDE[1] < found[0.02][1]
    assert scaling.expected_loss(one, [*short[:4], *own]) == scaling.INSIDE


def test_tails_of_losses_are_no_matter_and_no_median_gains() -> None:
    """Quartiles of a normal distribution are 1.35 spreads apart."""
    losses = [-0.33, *[-0.01] * 8, 0.0, 0.0, *[0.01] * 8, 0.33]
    one = series(1.0, 9.0, gpus=(1, 8))
    for told, prior in ((losses, (0.0, 0.02 / 1.35)), ([-0.1] * 5, (0.0, 0.005))):
        assert scaling.between_prior(one, many("m{}", *told)) == pytest.approx(prior)


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
    low, middle, high = scaling.predict_growth(one, scaling.INSIDE, (0.0, 10.0), known=2)
    # The prior is vague: 6 % for one doubling of the nodes are 18 % for three.
    assert middle == pytest.approx([1.0, 1.06, 1.18], rel=1e-3)
    assert low[2] < middle[2] < high[2]
    alone = scaling.predict_growth(one, scaling.INSIDE, (0.02, 0.01), known=1)
    assert alone[1] == pytest.approx([1.0, 1.02, 1.06])


def test_losses_may_grow_faster_or_slower_than_the_law() -> None:
    """By 90 % of an exponent of 0.6 with others of a node, and of 0.3 with the doublings of nodes."""
    sure = (0.1, 1e-9), (0.1, 1e-9)
    inside = scaling.predict_growth(series(1, 1.1, 9, gpus=(1, 2, 8)), *sure, known=2, noise=1e-9)
    between = scaling.predict_growth(
        series(1, 1.1, 9, gpus=(8, 16, 64)), *sure, known=2, noise=1e-9
    )
    for (low, middle, high), steeper in (
        (inside, 7 ** (1.645 * 0.6)),
        (between, 3 ** (1.645 * 0.3)),
    ):
        lost = middle[2] - 1
        assert (low[2], high[2]) == pytest.approx(
            (1 + lost / steeper, 1 + lost * steeper), rel=1e-3
        )


def test_second_counts_that_gain_tell_scatter() -> None:
    pairs = [series(1.0, step, 1.0, gpus=(1, 2, 4)) for step in (0.92, 1.3, 0.94)]
    assert scaling.noise_of(pairs) == pytest.approx(np.sqrt((0.08**2 + 0.06**2) / 2))
    assert scaling.noise_of(pairs[1:2]) == scaling.NOISE


def throughput(**cells: object) -> dict[str, object]:
    usual = dict.fromkeys((*scaling.COLUMNS, "notes"), "")
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
        {"devices faster together than alone": 3, "neither a batch nor a kind of scaling": 3},
    )


def test_shards_among_all_devices_and_in_groups_are_two_series(tmp_path: Path) -> None:
    counts = {64: "FSDP64", 128: "FSDP128", 256: "FSDP256", 512: "FSDP128", 1024: "FSDP128"}
    rows = [
        throughput(model="m", gpus=n, micro_batch=2, throughput=n, sharding=sharding)
        for n, sharding in (counts | {2048: "FSDP128"}).items()
    ]
    apart = [
        throughput(source="s", micro_batch=2, gpus=n, nodes=n, throughput=n) for n in (1, 2, 4)
    ]
    table = opened(tmp_path, "scaling", [*rows, *apart])
    sources = scaling.read_series(table)
    # One device of each node.
    assert [list(one.doublings) for one in sources["s"]] == [[0, 1, 2]]
    assert [list(one.gpus) for one in sources["acme"]] == [[64, 128, 256], [512, 1024, 2048]]
    assert table.counted().num_judged == 9


# A cluster that was measured again with every version: what others showed, and what nobody did.
def repeated(version: int, *, second_node: float = 1.04) -> list[dict[str, object]]:
    """A node of four is 2 % slower than one device, a second node another 4 %; runs scatter by 1 %."""
    return [
        {
            "benchmark": "DDP, synthetic",
            "framework": f"PyTorch 2.{version}",
            "cluster": "mahti",
            "gpu": "A100",
            "gpus": gpus,
            "images_per_s": gpus * 800 / slower * run,
        }
        for gpus, slower in ((1, 1.0), (2, 1.01), (4, 1.02), (8, 1.02 * second_node))
        for run in (0.99, 1.0, 1.01)
    ]


def test_other_versions_tell_what_a_second_node_costs(tmp_path: Path) -> None:
    horovod = repeated(0)[-1] | {"benchmark": "Horovod, synthetic"}
    single = repeated(9)[0] | {"framework": "PyTorch 3"}
    table = [row for version in range(8) for row in repeated(version)]
    (with_others, alone), _, counted = judged(
        tmp_path, "ddp_repeated", [*table, horovod, single, single | {"gpus": ""}]
    )
    assert (with_others.num_predicted, with_others.num_beyond) == (8, 8)
    assert with_others.errors[0].mape < 0.005
    assert with_others.errors[0].coverage == 1
    by_method = {row.method: row.mape for row in alone.errors}
    assert by_method["efficiency carried on"] == pytest.approx(1 - 1 / 1.04, rel=1e-6)
    assert alone.errors[0].coverage == 1
    assert alone.errors[0].mape == pytest.approx(0.03, abs=0.01)
    assert counted.num_judged == 8 * 9
    assert counted.left_out == {
        "benchmarks of 8 GPUs alone": 1,
        "no 8 GPUs, or nothing beside them": 1,
        "no rate or no count of devices": 1,
        "two GPUs, which are neither fitted nor asked for": 8 * 3,
    }


def test_much_loss_inside_a_node_widens_what_lies_between_nodes(tmp_path: Path) -> None:
    """20 % inside, and as much again outside, where no other version was measured."""
    slower = {1: 1.0, 4: 1.2, 8: 1.2 * 1.2}
    table = [
        row | {"benchmark": "run_clm", "images_per_s": int(str(row["gpus"])) / slower[gpus]}
        for row in repeated(0)
        if (gpus := int(str(row["gpus"]))) in slower
    ]
    for series in judged(tmp_path, "ddp_repeated", table)[0]:
        ours = series.errors[0]
        assert ours.mape == pytest.approx(0.16, abs=0.02)
        assert ours.coverage == 1

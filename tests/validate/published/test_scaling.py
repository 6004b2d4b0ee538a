"""Protocols of published series: which rows are known, which are asked for."""

from pathlib import Path

import pytest

from perfmodel.documents.verdicts import CARRIED
from tests.validate.published.judged import judged, opened
from validate.published import scaling


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
    (verdict, alone), skipped, counted = judged(tmp_path, "scaling", [*rows, *no_batch, *wrong])
    assert (verdict.name, verdict.num_predicted) == ("acme, others known, 1 and 2 devices", 1)
    assert alone.name == "acme, nothing else known, 1 and 2 devices"
    assert verdict.errors[1].method == "linear scaling"
    assert verdict.errors[1].mape == pytest.approx(1 - 1 / 1.1)
    assert skipped == [
        "scaling: acme: ncf on box, batch 1: devices are 8 times as fast together as alone"
    ]
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
    assert [list(one.doublings(one.devices)) for one in sources["s"]] == [[0, 1, 2]]
    assert [list(one.devices) for one in sources["acme"]] == [[64, 128, 256], [512, 1024, 2048]]
    assert table.counted().num_judged == 9


def test_precisions_and_releases_of_one_model_are_no_other_models(tmp_path: Path) -> None:
    """Else its own losses would be known as those of others."""
    models = ("Llama 3.1 405b 24.09 BF16", "Llama3.1 405b FP8", "Llama 3.1 405b FP8 GB200")
    rows = [
        throughput(model=model, gpus=n, micro_batch=1, throughput=n)
        for model in models
        for n in (8, 16, 32)
    ]
    [found] = scaling.read_series(opened(tmp_path, "scaling", rows)).values()
    assert [one.family for one in found] == ["llama31405b"] * 3


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

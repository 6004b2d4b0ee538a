"""A cluster that was measured again with every version: what others showed, and what nobody did."""

from pathlib import Path

import pytest

from tests.validate.published.judged import judged


def rows(version: int, *, second_node: float = 1.04) -> list[dict[str, object]]:
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
    horovod = rows(0)[-1] | {"benchmark": "Horovod, synthetic"}
    single = rows(9)[0] | {"framework": "PyTorch 3"}
    table = [row for version in range(8) for row in rows(version)]
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
        for row in rows(0)
        if (gpus := int(str(row["gpus"]))) in slower
    ]
    for series in judged(tmp_path, "ddp_repeated", table)[0]:
        ours = series.errors[0]
        assert ours.mape == pytest.approx(0.16, abs=0.02)
        assert ours.coverage == 1

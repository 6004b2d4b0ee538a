"""Published protocols on tables whose truth is known."""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.documents.verdicts import CARRIED
from perfmodel.errors import UsageError
from perfmodel.report.validation import published_lines
from tests.calibrate.samples import table_of
from tests.validate.published.judged import judged
from validate.published import harness, judge_published
from validate.published.collectives import Point, log_scatter

LATENCY_S = 1e-5
S_PER_BYTE = 1e-10


def ring_rows() -> list[dict[str, object]]:
    return [
        {
            "source": "s",
            "hardware": f"{n // 8}x box",
            "op": "all_reduce",
            "bytes": size,
            "ranks": n,
            "nodes": 1,
            "gpus_per_node": 8,
            "time_us": 2 * (n - 1) * (LATENCY_S + size / n * S_PER_BYTE) * 1e6,
        }
        for n in (2, 4, 8)
        for size in 4 ** np.arange(5, 15)
    ]


def placement_rows() -> list[dict[str, object]]:
    """The host serves the devices of the fullest node one by one: 10 ms each; no network."""
    return [
        {
            "cluster": "c",
            "gpu": "g",
            "app": "a",
            "local_batch": batch,
            "placement": str(per_node) * nodes,
            "nodes": nodes,
            "gpus": nodes * per_node,
            "step_time_s": 0.05 + 0.01 * batch + 0.01 * (per_node - 1),
        }
        for nodes in (1, 2, 3, 4)
        for per_node in (1, 2, 4)
        for batch in (1, 2, 4, 8)
    ]


def test_a_textbook_ring_is_recovered_and_counts_in_names_do_not_split_a_system(
    tmp_path: Path,
) -> None:
    (series,), skipped, counted = judged(tmp_path, "collectives", ring_rows())
    assert skipped == []
    assert counted.num_judged == len(ring_rows())
    assert series.name == "s: box: all_reduce"
    assert (series.fitted, series.predicted) == ("ranks 2, 4", "ranks 8")
    assert series.errors[0].mape < 0.05


def test_groups_of_eight_follow_from_those_of_two_and_four(tmp_path: Path) -> None:
    """By size band, and apart on two nodes; rows that no protocol judges are counted."""
    usual = {"source": "s", "device": "card", "nccl": "2.27", "collective": "all_reduce"}
    rows: list[dict[str, object]] = [
        usual
        | {"gpus": n, "nodes": nodes, "size_bytes": size}
        | {"time_us": 5 + 2 * n + 2 * (n - 1) / n * size / 2e5}
        for nodes in (1, 2)
        for n in (2, 4, 8)
        for size in 4 ** np.arange(5, 16)
    ]
    few, empty = rows[0] | {"device": "other"}, rows[0] | {"time_us": ""}
    series, skipped, counts = judged(tmp_path, "nccl_times", [*rows, few, empty])
    bands = ["below 1 MiB", "1 to 64 MiB", "from 64 MiB"]
    assert [one.name.split(": ")[-1] for one in series] == bands * 2
    assert [", two nodes:" in one.name for one in series] == [False] * 3 + [True] * 3
    for one in series[:3]:
        ours, carried = one.errors
        assert ours.mape < 0.03
        assert carried.method == "bus bandwidth carried on"
    assert "fewer than three groups" in skipped[0]
    assert counts.num_judged == 66
    assert counts.left_out == {
        "a cell is empty or no number": 1,
        "fewer than three groups of their kind": 1,
    }


def test_several_nodes_follow_from_one_whose_network_nobody_named(tmp_path: Path) -> None:
    """4 or 8 A100 per node: adapters at 80 % of 200 Gb/s each bound large arrays; links inside alone do not."""
    rows = [
        row | {"hardware": "A100 box", "ranks": each * nodes, "nodes": nodes}
        | {"time_us": 100 + 2 * int(str(row["bytes"])) / (each * 20e3)}
        for each, nodes in ((4, 2), (8, 2), (8, 4))
        for row in ring_rows()[-3:]
    ]  # fmt: skip
    series, *_ = judged(tmp_path, "collectives", rows)
    (unnamed,) = (one for one in series if one.name.endswith("the network not named"))
    ours, carried = unnamed.errors
    assert (unnamed.num_fitted, unnamed.num_predicted) == (42, 9)
    assert ours.mape < 0.2 < carried.mape
    assert ours.coverage == 1.0


def test_steps_of_more_nodes_follow_from_two_as_a_command_predicts_them(tmp_path: Path) -> None:
    placed = placement_rows()
    # Five devices of which two share a node fill three nodes; nobody measured three devices of one node.
    sparse = placed[0] | {"placement": "1112", "nodes": 4, "gpus": 5}
    unseen = placed[0] | {"placement": "3333", "nodes": 4, "gpus": 12}
    (series,), _, rows = judged(tmp_path, "steptime_placements", [*placed, sparse, unseen])
    by_method = {entry.method: entry.mape for entry in series.errors}
    assert set(by_method) == {"perfmodel", "linear scaling", CARRIED, "nearest placement"}
    # Without a network as many devices on the fullest node take as long.
    assert by_method["nearest placement"] == pytest.approx(0.0)
    assert by_method["perfmodel"] < 0.05
    assert by_method["perfmodel"] < by_method["linear scaling"]
    # 9, 12 and 16 devices, where 8 were fitted.
    assert (series.num_predicted, series.num_beyond) == (24, 8)
    assert rows.num_judged == len(placed)
    assert list(rows.left_out.values()) == [1, 1]


def test_carrying_on_reads_the_most_devices_of_each_batch_and_linear_scaling_the_fewest() -> None:
    batch = np.array([1.0, 4.0, 1.0, 1.0])
    gpus, step_s = np.array([1.0, 1.0, 8.0, 8.0]), np.array([1.0, 4.0, 2.0, 2.0])
    found = harness.carried_on(batch, gpus, step_s, np.array([1.0, 2.0, 4.0]))
    assert found == pytest.approx([2.0, np.sqrt(8), 4.0])
    fewest = harness.carried_on(batch, gpus, step_s, np.array([1.0, 2.0]), count=np.min)
    assert fewest == pytest.approx([1.0, 2.0])


def test_a_verdict_says_where_a_plain_rule_is_better(tmp_path: Path) -> None:
    found = []
    for method, ours, plain in (
        ("perfmodel", 1.1, 1.0),
        ("perfmodel", 1.0, 1.1),
        ("a law of no command", 1.1, 1.0),
    ):
        part = harness.Part(
            measured=np.ones(4),
            predicted={method: np.full(4, ours), CARRIED: np.full(4, plain)},
            beyond=np.array([False, False, True, True]),
        )
        name = {"name": f"ours {ours}; worst none", "fitted": "a", "predicted": "b"}
        found.append(harness.verdict("acme", parts=[part], num_fitted=1, **name))
    table_of(tmp_path / "steptime_placements.csv", *placement_rows())
    whole = judge_published(tmp_path, ("steptime_placements",))
    lines = list(published_lines(whole.model_copy(update={"series": tuple(found)})))
    assert lines[0].endswith(
        "by over 0.3 % 2 times in 2 series: acme: ours 1.1 (10.0 %, efficiency carried on 0.0 %); "
        "acme: ours 1.1 (on more devices 10.0 %, efficiency carried on 0.0 %)"
    )
    assert lines[1].startswith("extrapolated to more devices than fitted: 6 of 12 predictions")
    assert lines[-1] == "rows for steptime_placements: 48 judged"


def test_a_source_without_protocol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be among"):
        judge_published(tmp_path, ("weather",))


def test_every_table_that_was_judged_is_named_by_its_content(tmp_path: Path) -> None:
    table_of(tmp_path / "collectives.csv", *ring_rows())
    lines = [f"{1 << k} 1 float {1000 + (1 << k)} 1.0" for k in range(10, 20)]
    table_of(
        tmp_path / "vtrain_allreduce.csv",
        *({"source": "v", "ranks": n, "raw": line} for n in (2, 4) for line in lines),
    )
    found = judge_published(tmp_path, ("collectives", "vtrain_allreduce", "memory"))
    assert set(found.data_sha256) == {"collectives", "vtrain_allreduce"}
    assert {series.source for series in found.series} == set(found.data_sha256)
    assert found.skipped == (f"memory: {tmp_path / 'memory.csv'} is missing",)


def test_a_pair_that_falls_by_a_factor_lies_half_of_it_on_either_side() -> None:
    """Of 4 timings two trade places by a factor of 4: log 2 for each of them, mean over all four."""
    rows = [
        Point(size, 2, 1, time_s)
        for size, time_s in ((1.0, 1.0), (2.0, 8.0), (4.0, 2.0), (8.0, 16.0))
    ]
    assert log_scatter(rows) == pytest.approx(np.log(2) / np.sqrt(2))

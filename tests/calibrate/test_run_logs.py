"""Steps from logs and records, by hand."""

import json
from pathlib import Path

import pytest

from calibrate.run_logs import read_run_rows
from calibrate.runs import read_runs
from perfmodel.documents.profile import RunColumns
from perfmodel.errors import InvalidDocument


def mllog(*events: tuple[str, float, object, dict[str, float]]) -> str:
    return "\n".join(
        "rank0: :::MLLOG "
        + json.dumps({"key": key, "time_ms": ms, "value": value, "metadata": metadata})
        for key, ms, value, metadata in events
    )


def test_the_mapping_says_what_a_log_does_not(tmp_path: Path) -> None:
    path = tmp_path / "result.log"
    begin, end = {"samples_count": 0.0}, {"samples_count": 160.0}
    blocks = (("block_start", 0, None, begin), ("block_stop", 20_000, None, end))
    path.write_text(mllog(("global_batch_size", 0, 16, {}), *blocks))
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "feed_forward": 14336}
    rest = {"vocabulary": 131_072, "sequence": 4096, "micro_batch": 1, "dp": 16}
    runs = read_runs(path, RunColumns.model_validate({"constants": shape | rest}))
    assert (float(runs.jobs.accumulation[0]), float(runs.jobs.hidden[0])) == (1.0, 4096.0)
    assert runs.step_s == pytest.approx([2.0])
    with pytest.raises(InvalidDocument, match=r"result\.log: column layers is missing"):
        read_runs(path, RunColumns())


def test_an_mlperf_log_counts_blocks_and_not_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(
        "noise\n"
        + mllog(
            ("global_batch_size", 0, 32, {}),
            ("tensor_parallelism", 0, 4, {}),
            ("block_start", 1_000, None, {"samples_count": 0}),
            ("block_stop", 11_000, None, {"samples_count": 320}),
            ("block_start", 61_000, None, {"samples_count": 320}),
            ("block_stop", 71_000, None, {"samples_count": 640}),
        )
    )
    ((_, row),) = read_run_rows(tmp_path)
    # 20 s of blocks, 640 samples = 20 steps; the 50 s of evaluation between them do not count.
    assert float(row["step_time_s"]) == pytest.approx(1.0)
    assert (row["tp"], row["global_batch"]) == ("4", "32")


def test_run_records_are_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    record = {
        "parallel": {"tp": 2, "zero": None},
        "steps_s": [0.9, 0.5, 0.5],
        "sp": True,
        "tags": ["a"],
    }
    path.write_text(json.dumps(record) + "\n\n" + json.dumps({"steps_s": 2}) + "\n")
    first, second = read_run_rows(path)
    # Nested names are joined, lists of times count by their median, empty values do not.
    assert first.cells == {"parallel.tp": "2", "steps_s": "0.5", "sp": "True"}
    assert second.where.endswith("runs.jsonl: line 3")


@pytest.mark.parametrize("name", ["t.json", "t.pt.trace.json", "t.json.gz"])
def test_a_trace_in_json_is_no_table(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"traceEvents": []}')
    with pytest.raises(InvalidDocument, match=r"must be a table .* got JSON, such as a trace"):
        read_run_rows(path)


@pytest.mark.parametrize("between", [",", ";", "\t"])
def test_tables_of_commas_semicolons_and_tabs(tmp_path: Path, between: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"\ufeffa{between}b\n1{between}2\n", encoding="utf-8")
    ((where, cells),) = read_run_rows(path)
    assert (where, cells) == (f"{path}: line 2", {"a": "1", "b": "2"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            mllog(("global_batch_size", 0, 8, {}), ("block_stop", 9, None, {"samples_count": 8}))
            + '\n:::MLLOG {"key": "block_start", "metadata": null}',
            "time_ms of block_start: must be a number, got None",
        ),
        (
            mllog(
                ("global_batch_size", 0, 32, {}),
                ("block_start", 1_000, None, {}),
                ("block_stop", 11_000, None, {}),
            ),
            "samples_count",
        ),
    ],
)
def test_broken_files_are_refused_with_their_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mlperf.log"
    path.write_text(text)
    with pytest.raises(InvalidDocument, match=said):
        read_run_rows(path)


def test_a_folder_that_holds_itself_is_refused(tmp_path: Path) -> None:
    """Two links would be 2^40 folders before the system says no."""
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(tmp_path)
    with pytest.raises(InvalidDocument, match="a: must be no link to a folder"):
        read_run_rows(tmp_path)

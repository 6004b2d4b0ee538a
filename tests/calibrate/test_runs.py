"""Foreign tables of runs: mapping, units, contradictions; steps from logs and records, by hand."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.runs import (
    MOST_RUNS,
    RunTable,
    calibrate_from_runs,
    read_run_rows,
    read_runs,
)
from perfmodel.cost.inferred import InferredModel
from perfmodel.cost.jobs import Jobs
from perfmodel.cost.memory import tensor_bytes
from perfmodel.documents.profile import InferredDocument, RunColumns
from perfmodel.errors import IncomparableRuns, InvalidDocument, PerfModelError
from tests.calibrate.samples import table_of
from tests.perfmodel.cost.large_samples import measured, some_jobs


def write(
    path: Path, *, step: str = "step_time_s", scale: float = 1.0, twice: bool = False
) -> Path:
    jobs = some_jobs()
    step_s = measured(jobs)
    rows = [
        {field.name: getattr(jobs, field.name)[i] for field in fields(Jobs)}
        | {step: scale * step_s[i]}
        for i in range(0, len(jobs), 2)
    ]
    if twice:
        rows.append(rows[0] | {step: 3 * float(rows[0][step])})
    return table_of(path, *rows)


def test_milliseconds_under_another_name(tmp_path: Path) -> None:
    table = write(tmp_path / "runs.csv", step="ms", scale=1000)
    mapping = tmp_path / "columns.toml"
    mapping.write_text('[columns]\nstep_time_s = "ms"\n[units]\nstep_time_s = "ms"\n')
    document, _ = calibrate_from_runs(table, columns=mapping, device="A100")
    document.write(tmp_path / "inferred.json")
    again = InferredDocument.read(tmp_path / "inferred.json")
    fitted = {parameter.name: parameter for parameter in again.machine.fitted_parameters}
    assert fitted["layer_host_s"].value == pytest.approx(800e-6, rel=0.25)
    assert not fitted["straggler_share"].determined
    assert (
        InferredModel(machine=again.machine).nominal["layer_host_s"] == fitted["layer_host_s"].value
    )


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"scale": 1e-3}, InvalidDocument, "column step_time_s.*1000x too small"),
        ({"scale": 1e3}, InvalidDocument, "column step_time_s.*1000x too large"),
        ({"scale": 1e5}, InvalidDocument, "column step_time_s.*1000x too large"),
        ({"twice": True}, IncomparableRuns, "line 2 and line .* are the same job"),
        ({"step": "s"}, InvalidDocument, "column step_time_s is missing; needed: layers"),
    ],
)
def test_a_bad_table_is_refused(
    tmp_path: Path, how: dict[str, Any], error: type[PerfModelError], said: str
) -> None:
    with pytest.raises(error, match=said):
        calibrate_from_runs(write(tmp_path / "runs.csv", **how), columns=None, device="A100")


RUN: dict[str, float] = {
    "layers": 24,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 16,
    "feed_forward": 8192,
    "vocabulary": 51200,
    "sequence": 1024,
    "dp": 2,
    "micro_batch": 2,
    "accumulation": 4,
    "step_time_s": 1.0,
}


def without(*names: str, **more: float) -> dict[str, float]:
    return {key: value for key, value in RUN.items() if key not in names} | more


def test_the_global_batch_says_how_often_gradients_are_accumulated(tmp_path: Path) -> None:
    rows = [
        without("accumulation", global_batch=batch) | {"step_time_s": batch / 16}
        for batch in (16, 64)
    ]
    # Four times the batch takes four times as long: no contradiction, but another job.
    runs = read_runs(table_of(tmp_path / "runs.csv", *rows), RunColumns())
    assert runs.jobs.accumulation.tolist() == [4, 16]
    assert runs.step_s.tolist() == [1, 4]


LOG = {"model": "llama3-8b", "gpus": "16", "tp": "2", "mbs": "1", "gbs": "64", "seq": "8192"}
NAMES = {"devices": "gpus", "micro_batch": "mbs", "global_batch": "gbs", "sequence": "seq"}


def read_log(tmp_path: Path, *, names: dict[str, str], **cells: str) -> RunTable:
    path = table_of(tmp_path / "log.csv", LOG | cells)
    return read_runs(path, RunColumns(columns=NAMES | names), device="H100")


def test_a_log_of_names_devices_and_rates(tmp_path: Path) -> None:
    words = {"recompute": "Full", "precision": "fp8"}
    runs = read_log(tmp_path, names={"tokens_per_s": "tok/s"}, **words, **{"tok/s": "131072"})
    jobs = runs.jobs
    assert (jobs.layers[0], jobs.kv_heads[0], jobs.gated[0]) == (32, 8, 1)
    # 16 devices are 8 replicas of 2; 64 sequences are 8 micro-batches of each.
    assert (jobs.dp[0], jobs.accumulation[0], jobs.recompute_full[0]) == (8, 8, 1)
    assert jobs.matmul_ratio[0] == pytest.approx(2.0, rel=0.01)
    assert runs.step_s == pytest.approx([64 * 8192 / 131072])


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens_per_s_per_device", "8192"), ("samples_per_s", "16"), ("step_time_s", "4.0")],
)
def test_every_rate_means_the_same_step(tmp_path: Path, name: str, value: str) -> None:
    assert read_log(tmp_path, names={}, **{name: value}).step_s == pytest.approx([4.0])


def test_what_was_not_read_and_what_was_taken_for_granted_is_said(tmp_path: Path) -> None:
    unread, taken = read_log(tmp_path, names={}, step_time_s="4.0", zero_stage="3").notes
    assert unread.startswith("columns not read: zero_stage ")
    assert "zero = 0" in taken
    assert "tp = " not in taken
    assert "dp = " not in taken


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"gpus": "15"}, "line 2: devices must be a multiple of tp x pp x cp = 2, got 15"),
        ({"model": "Lama3-8B"}, "model must be one of .* did you mean llama3-8b"),
        ({"recompute": "some"}, "recompute must be one of none, selective, full, got 'some'"),
        ({"precision": "int4"}, "precision must be one of .*, got 'int4'"),
        ({"sequence_parallel": "2"}, "column sequence_parallel: must be 0, 1, yes or no, got 2"),
    ],
)
def test_words_that_make_no_sense(tmp_path: Path, cells: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        read_log(tmp_path, names={}, step_time_s="4.0", **cells)


def test_runs_faster_than_their_device_are_refused(tmp_path: Path) -> None:
    slow, fast = RUN | {"step_time_s": 1.0}, RUN | {"accumulation": 8, "step_time_s": 0.2}
    table = table_of(tmp_path / "runs.csv", slow, RUN | {"dp": 4}, fast)
    with pytest.raises(InvalidDocument, match=r"line 4, .* times the peak of A100; say the device"):
        calibrate_from_runs(table, columns=None, device="A100")


def test_a_device_of_the_catalogue_has_priors_too(tmp_path: Path) -> None:
    document, _ = calibrate_from_runs(write(tmp_path / "runs.csv"), columns=None, device="H200 SXM")
    assert document.machine.device_name == "h200-sxm"
    prior = {parameter.name: parameter.prior for parameter in document.machine.fitted_parameters}
    # 4.8 TB/s by its data sheet, of which a prior expects 70 %.
    assert prior["memory_bytes_per_s"] == pytest.approx(0.7 * 4.8e12)


def test_two_precisions_of_one_layout_do_not_contradict_each_other(tmp_path: Path) -> None:
    rows = [
        LOG | {"precision": "bf16", "step_time_s": "8"},
        LOG | {"precision": "fp8", "step_time_s": "4"},
    ]
    path = table_of(tmp_path / "log.csv", *rows)
    assert len(read_runs(path, RunColumns(columns=NAMES), device="H100").jobs) == 2


def test_printed_peaks_move_the_memory_of_predictions(tmp_path: Path) -> None:
    jobs = some_jobs()
    peaks = tensor_bytes(jobs, 0) + 5 * 2**30
    rows = [
        {field.name: getattr(jobs, field.name)[i] for field in fields(Jobs)}
        | {"step_time_s": measured(jobs)[i], "GB": peaks[i] / 2**30}
        for i in range(0, len(jobs), 2)
    ]
    mapping = tmp_path / "columns.toml"
    mapping.write_text('[columns]\npeak_memory_bytes = "GB"\n[units]\npeak_memory_bytes = "GiB"\n')
    table = table_of(tmp_path / "runs.csv", *rows)
    document, _ = calibrate_from_runs(table, columns=mapping, device="A100")
    document.write(tmp_path / "inferred.json")
    model = InferredModel(machine=InferredDocument.read(tmp_path / "inferred.json").machine)
    assert model.memory is not None
    unseen = jobs.take(np.arange(1, len(jobs), 2))
    assert model.memory.predict(unseen)[0] == pytest.approx(peaks[1::2], rel=0.1)
    # Half a terabyte is enough for all of them, half of what each needs for none.
    needed = model.memory.fullest_bytes(unseen)
    assert model.memory.fit_probability(unseen, needed, 2**39).min() > 0.99
    assert model.memory.fit_probability(unseen, needed, float(peaks.min() / 2)).max() < 0.01


def test_one_run_far_behind_the_others_is_named(tmp_path: Path) -> None:
    lines = "".join(f"llama2-7b,{step},8,1,{k},4096\n" for k, step in ((1, 1), (2, 2), (4, 4000)))
    path = tmp_path / "runs.csv"
    path.write_text("model,step_time_s,dp,micro_batch,accumulation,sequence\n" + lines)
    (note,) = (note for note in read_runs(path, RunColumns()).notes if "line 4" in note)
    assert "step time 4000 s is 1,000 times that of the other runs" in note


def test_more_runs_than_a_fit_can_take_are_refused(tmp_path: Path) -> None:
    heading, run, *_ = Path("docs/runs/h100.csv").read_text(encoding="utf-8").splitlines()
    table = tmp_path / "runs.csv"
    table.write_text("\n".join([heading, *[run] * (MOST_RUNS + 1), ""]), encoding="utf-8")
    with pytest.raises(InvalidDocument, match=r"at most 1,000 runs, got 1,001"):
        read_runs(table, RunColumns(), device="H100")


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

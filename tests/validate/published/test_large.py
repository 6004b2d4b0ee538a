"""Stages that balance their work, against filling them piece by piece; steps of MLPerf's layouts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.calibrate.samples import table_of
from tests.perfmodel.cost.large_samples import measured, some_jobs
from tests.validate.published.judged import judged, opened
from validate.published.large import Runs, _sizes, balanced_stages, mlperf_runs

#: Layers, and the output head in layers: Llama-like 1B and 8B with 131,072 words.
SHAPES = ((16, 4.0), (32, 131_072 * 4096 / (4 * 4096**2 + 3 * 4096 * 14336)))


def filled(layers: int, stages: int, head: float) -> list[list[str]]:
    """Pieces of every stage: layers, head, cast, loss; the next stage begins once a share is reached."""
    share = (layers + head) / stages
    pieces = [("layer", 1.0)] * layers + [("head", head), ("cast", 0.0), ("loss", 0.0)]
    result: list[list[str]] = [[] for _ in range(stages)]
    stage, done = 0, 0.0
    for name, work in pieces:
        result[stage].append(name)
        done += work
        if done >= share * (stage + 1) and stage + 1 < stages:
            stage += 1
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stages", [2, 4, 8, 16, 32])
def test_stages_hold_what_filling_them_in_turn_gives(shape: tuple[int, float], stages: int) -> None:
    layers, head = shape
    pieces = filled(layers, stages, head)
    counts = [stage.count("layer") for stage in pieces]
    found = balanced_stages(layers, stages, head=head)
    with_head = next(index for index, stage in enumerate(pieces) if "head" in stage)
    assert found["first_layers"] == counts[0]
    assert found["most_layers"] == max(counts)
    assert found["last_layers"] == pytest.approx(counts[with_head], abs=1e-6)


def test_without_a_pipeline_nothing_is_said() -> None:
    assert balanced_stages(16, 1, head=4.0) == {}


def mlperf_folder(folder: Path, *counts: int) -> Path:
    """Configurations of GPT-3 and 100 steps of 12 s, 4 sequences for every device."""
    told: dict[str, object] = {"round": "3.0", "benchmark": "gpt3"}
    configs = [
        told | {"gpus": n, "tp": 4, "pp": 8, "micro_batch": 1, "gpus_per_node": 8, "fp": "fp8"}
        for n in counts
    ]
    runs = [
        told
        | {
            "gpus": n,
            "gpus_per_node": 8,
            "global_batch": 4 * n,
            "train_only_median_s": 1200.0,
            "stop_epoch_median": 100 * 4 * n * 2048,
        }
        for n in counts
    ]
    table_of(folder / "mlperf_llm_configs.csv", *configs)
    table_of(folder / "mlperf_scaling.csv", *runs, runs[0] | {"benchmark": "bert"})
    return folder


def test_mlperf_tells_layouts_and_tokens(tmp_path: Path) -> None:
    table = opened(mlperf_folder(tmp_path, 512, 768), "mlperf_layouts")
    runs = mlperf_runs(table)
    assert table.skipped == []
    assert runs.step_s == pytest.approx([12.0, 12.0])
    jobs = runs.jobs
    assert jobs.dp.tolist() == [16, 24]
    # 4 sequences for each of 32 devices that share the model, one at a time.
    assert jobs.accumulation.tolist() == [128, 128]
    # 8 bit at twice the peak of 16 bit.
    assert jobs.matmul_ratio == pytest.approx([2.0, 2.0], rel=1e-2)


def test_layouts_of_fewer_devices_predict_those_of_more(tmp_path: Path) -> None:
    few, skipped, _ = judged(mlperf_folder(tmp_path, 512, 768), "mlperf_layouts")
    assert few == []
    assert skipped == ["mlperf_layouts: 2 runs"]
    found, *_ = judged(mlperf_folder(tmp_path, 256, 512, 768, 1024, 1536, 2048), "mlperf_layouts")
    assert [(one.num_fitted, one.num_predicted) for one in found] == [(3, 3), (3, 3)]
    # Each device does the same work whatever their number.
    assert found[0].errors[0].mape < 0.05
    assert found[0].errors[0].coverage == 1.0


def test_each_width_is_left_out() -> None:
    """A machine that does as the formula says: widths that were not seen follow."""
    jobs = some_jobs()
    wide = replace(jobs, hidden=2 * jobs.hidden, feed_forward=2 * jobs.feed_forward)
    runs = Runs(
        jobs=type(jobs).joined([jobs, wide]),
        step_s=np.concatenate([measured(each) for each in (jobs, wide)]),
        memory_bytes=np.full(2 * len(jobs), np.nan),
    )
    [series] = _sizes("s", runs, "hidden", device="A100")
    assert series.num_predicted == len(runs)
    assert series.name.startswith("2 values of hidden")
    assert series.errors[0].mape < 0.1

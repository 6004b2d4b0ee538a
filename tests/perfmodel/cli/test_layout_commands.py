"""The commands about layouts: answers, exit codes, one-line complaints."""

import json
from pathlib import Path

import pytest

from perfmodel.documents.prediction import PredictionDocument
from tests.existing import existing
from tests.perfmodel.cli.command import Run
from tests.perfmodel.cost.large_samples import document
from tests.perfmodel.tracing.configs import llama_config

LLAMA = llama_config(2048, 8192, 16, 32, 32000, 4096) | {"num_key_value_heads": 8}


@pytest.fixture
def inferred(tmp_path: Path) -> Path:
    path = tmp_path / "inferred.json"
    document().write(path)
    return path


def test_a_layout_is_predicted_from_a_configuration(
    run: Run, inferred: Path, tmp_path: Path
) -> None:
    config, output, traced = (tmp_path / f"{name}.json" for name in ("config", "answer", "trace"))
    config.write_text(json.dumps(LLAMA))
    asked = f"predict --profile {inferred} --model {config} --device-memory 40GiB --batch 32 --json"
    layout = "dp=2 tp=2 pp=2 micro_batch=2 zero=1"
    result = run(f"{asked} --layout '{layout}' --output {output} --trace {traced}")
    assert result.exit_code == 0, result
    document = PredictionDocument.of_text(result.stdout)
    assert document == PredictionDocument.read(output)
    [answer] = document.points
    large = existing(answer.large_model)
    assert large.trained.devices == 8
    assert "accumulation=8" in answer.layout
    assert large.tokens_per_s.nominal == pytest.approx(32 * 4096 / answer.step_s.nominal)
    assert sum(large.parts_s.model_dump().values()) == pytest.approx(large.formula_step_s)
    assert large.simulated_step_s == pytest.approx(large.formula_step_s, rel=0.06)
    first = answer.memory[0]
    assert sum(first.parts_bytes.values()) == pytest.approx(first.needed_bytes)
    assert [stage.stage for stage in answer.memory] == [0, 1]
    assert answer.fit_probability is not None
    events = json.loads(traced.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    spans = [event for event in events if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * large.simulated_step_s)


def test_the_table_says_evidence_and_caveats(run: Run, inferred: Path) -> None:
    asked = f"predict --profile {inferred} --verbose --model"
    many = "gpt2-xl --devices 4096 --layout 'dp=4096 zero=3' --devices-per-node 8"
    result = run(f"{asked} {many}")
    assert result.exit_code == 0, result
    assert "evidence inferred" in result.stdout
    assert "caveat: no run used zero=3" in result.stdout
    assert "caveat: 4096 devices: no run had more than 8" in result.stdout
    assert "doublings away: the formula alone answers; distance of" in result.words
    result = run(f"{asked} mixtral-8x7b --batch 64 --layout 'dp=16 tp=2 pp=3 ep=8 zero=1'")
    assert "caveat: uneven stages: 11, 11, 10 layers" in result.words

"""The commands about layouts: answers, exit codes, one-line complaints."""

import json
from pathlib import Path

import pytest

from perfmodel.documents.prediction import PredictionDocument
from tests.existing import existing
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.cost.large_samples import document

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def inferred(tmp_path: Path) -> Path:
    path = tmp_path / "inferred.json"
    document().write(path)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_a_layout_is_predicted_from_a_configuration(
    run: Run, inferred: Path, config: Path, tmp_path: Path
) -> None:
    result = run(
        *("predict", "--profile", inferred, "--model", config, "--device-memory", "40GiB"),
        *("--layout", "dp=2 tp=2 pp=2 micro_batch=2 zero=1", "--batch", "32", "--json"),
        *("--output", tmp_path / "answer.json", "--trace", tmp_path / "trace.json"),
    )
    assert result.exit_code == 0, result
    document = PredictionDocument.of_text(result.stdout)
    assert document == PredictionDocument.read(tmp_path / "answer.json")
    [answer] = document.points
    large = existing(answer.large_model)
    assert large.trained.devices == 8
    assert "accumulation=8" in answer.layout
    assert large.tokens_per_s.nominal == pytest.approx(32 * 4096 / answer.step_s.nominal)
    assert sum(large.parts_s.model_dump().values()) == pytest.approx(large.formula_step_s)
    assert large.simulated_step_s == pytest.approx(large.formula_step_s, rel=0.06)
    assert sum(answer.memory[0].parts_bytes.values()) == pytest.approx(
        answer.memory[0].needed_bytes
    )
    assert [stage.stage for stage in answer.memory] == [0, 1]
    assert answer.fit_probability is not None
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    spans = [event for event in events if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * large.simulated_step_s)


def test_the_table_says_evidence_and_caveats(run: Run, inferred: Path) -> None:
    result = run(
        *("predict", "--profile", inferred, "--model", "gpt2-xl", "--devices", "4096"),
        *("--layout", "dp=4096 zero=3", "--devices-per-node", "8", "--verbose"),
    )
    assert result.exit_code == 0, result
    assert "evidence inferred" in result.stdout
    assert "caveat: no run used zero=3" in result.stdout
    assert "caveat: 4096 devices: no run had more than 8" in result.stdout
    assert "doublings away: the formula alone answers; distance of" in result.words
    result = run(
        *("predict", "--profile", inferred, "--model", "mixtral-8x7b", "--batch", "64"),
        *("--layout", "dp=16 tp=2 pp=3 ep=8 zero=1", "--verbose"),
    )
    assert "caveat: uneven stages: 11, 11, 10 layers" in result.words


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bert"}, "model_type: must be one of"),
        ({"head_dim": 128}, "head_dim x num_attention_heads"),
    ],
)
def test_models_outside_the_closed_forms_are_refused(
    run: Run, inferred: Path, config: Path, changes: dict[str, object], said: str
) -> None:
    config.write_text(json.dumps(LLAMA | changes))
    result = run("predict", "--profile", inferred, "--layout", "dp=2", "--model", config)
    assert said in complaint(result, 2)

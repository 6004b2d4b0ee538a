"""The commands about layouts: answers, exit codes, one-line complaints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perfmodel.documents.prediction import LayoutPredictionDocument, ParallelismPlanDocument
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
    answer = LayoutPredictionDocument.model_validate_json(result.stdout)
    assert answer == LayoutPredictionDocument.read(tmp_path / "answer.json")
    assert answer.trained.devices == 8
    assert "accumulation=8" in answer.layout
    assert answer.tokens_per_s.nominal == pytest.approx(32 * 4096 / answer.step_s.nominal)
    assert sum(answer.parts_s.model_dump().values()) == pytest.approx(answer.formula_step_s)
    assert answer.simulated_step_s == pytest.approx(answer.formula_step_s, rel=0.06)
    assert [stage.stage for stage in answer.memory] == [0, 1]
    assert answer.fit_probability is not None
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    spans = [event for event in events if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * answer.simulated_step_s)


def test_the_table_says_evidence_and_caveats(run: Run, inferred: Path) -> None:
    result = run(
        *("predict", "--profile", inferred, "--model", "gpt2-xl", "--devices", "4096"),
        *("--layout", "dp=4096 zero=3", "--devices-per-node", "8", "--verbose"),
    )
    assert result.exit_code == 0, result
    assert "evidence inferred" in result.stdout
    assert "caveat: no run used zero=3" in result.stdout
    assert "caveat: 4096 devices, more than the 8 of any run" in result.stdout


def test_experts_on_two_data_centres_are_predicted_and_drawn(
    run: Run, inferred: Path, tmp_path: Path
) -> None:
    result = run(
        *("predict", "--profile", inferred, "--model", "mixtral-8x7b", "--batch", "64"),
        *("--layout", "dp=16 tp=2 pp=3 ep=8 zero=1 imbalance=1.2 data_centres=2 sync_every=50"),
        *("--data-centre-link", "10Gbit/s", "--timeline", tmp_path / "step.html", "--verbose"),
    )
    assert result.exit_code == 0, result
    assert "batch: 64 sequences of 4,096 tokens per step" in result.stdout
    assert "caveat: uneven stages: 11, 11, 10 layers" in result.stdout
    assert "caveat: data centres drift" in result.stdout
    assert "stage 2" in (tmp_path / "step.html").read_text()


def test_a_search_is_shared_in_one_way(run: Run, inferred: Path) -> None:
    size = ("--model", "gpt2", "--devices", "4", "--global-batch", "8")
    search = ("plan", "parallelism", "--profile", inferred, *size)
    line = complaint(run(*search, "--processes", "2", "--scheduler", "tcp://host:1"), 2)
    assert "--processes: excludes --scheduler" in line
    assert "runner-up: " in run(*search).stdout


def test_a_cluster_is_searched(run: Run, inferred: Path, config: Path, tmp_path: Path) -> None:
    flags = ("plan", "parallelism", "--profile", inferred, "--model", config)
    size = ("--devices", "16", "--global-batch", "64", "--top", "3")
    result = run(*flags, *size, "--output", tmp_path / "plan.json")
    assert result.exit_code == 0, result
    plan = ParallelismPlanDocument.read(tmp_path / "plan.json")
    assert len(plan.ranked) == 3
    assert f"{plan.num_feasible} layouts are possible" in result.stdout
    assert json.loads(run(*flags, *size, "--json").stdout)["ranked"][0]["rank"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--layout", "tp=3", "--model", "gpt2-xl"), 3, "tp must divide the 25 heads"),
        (("--layout", "pp=49", "--model", "gpt2-xl"), 3, "at most the 48 layers"),
        (("--layout", "dp=2 ep=2", "--model", "gpt2-xl"), 3, "without experts"),
        (
            ("--layout", "dp=2 precision=fp8", "--model", "gpt2-xl"),
            3,
            "must be one of bf16, tf32, fp32 on A100",
        ),
        (("--layout", "dp=2", "--model", "gpt2", "--timeline", "a.gif"), 2, ".png, .svg or .html"),
        (("--timeline", "a.png"), 2, "must come with --layout"),
        (
            ("--layout", "dp=2 data_centres=2", "--model", "gpt2-xl"),
            2,
            "must come with --data-centre-link",
        ),
        (
            ("--layout", "dp=2", "--model", "gpt2-xl", "--data-centre-link", "10Gbit/s"),
            2,
            "must come with data_centres > 1",
        ),
        (
            ("--layout", "dp=4", "--model", "gpt2-xl", "--devices-per-node", "0"),
            2,
            "--devices-per-node: must be >= 1, got 0",
        ),
        (("--layout", "dp=4", "--model", "gpt2-xl", "--devices", "8"), 3, "must be 8 devices"),
        (("--layout", "dp=4", "--model", "gpt2-xl", "--batch", "6"), 3, "global batch"),
        (("--layout", f"dp={10**20}", "--model", "gpt2-xl"), 2, "must be <= 1,048,576"),
        (("--layout", "micro_bach=2", "--model", "gpt2-xl"), 2, "did you mean micro_batch?"),
        (("--layout", "recompute=half", "--model", "gpt2-xl"), 2, "none, selective, full"),
        (("--layout", "schedule=gpipe pp=2 interleave=2", "--model", "gpt2"), 2, "schedule must"),
        (("--layout", "dp=4", "--model", "gpt3-157b"), 2, "did you mean gpt3-175b?"),
        (("--layout", "dp=4"), 2, "must come with --model"),
        (("--model", "gpt2"), 2, "must come with --layout"),
        (("--device-memory", "80GiB"), 2, "must come with --layout"),
        (("--layout", "dp=4", "--model", "gpt2", "--csv"), 2, "excludes --csv"),
        (("--layout", "", "--model", "gpt2"), 2, '--layout: must be such as "dp=8 tp=4"'),
        (("--layout", "dp=4", "--model", "gpt2", "--device-memory", "80"), 2, "--device-memory"),
        (("--layout", "dp=4", "--model", "gpt2", "--devices", "4,8"), 2, "must be one count"),
        (("--layout", "dp=4", "--model", "missing/config.json"), 2, "cannot be read"),
        (
            ("--layout", "dp=2 accumulation=3", "--model", "gpt2", "--batch", "8"),
            2,
            "give one of the two",
        ),
    ],
)
def test_nonsense_is_one_line(
    run: Run, inferred: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    assert said in complaint(run("predict", "--profile", inferred, *arguments), code)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--workload", "resnet18"),
        ("--device", "h100-sxm"),
        ("--scaling", "weak"),
        ("--accumulation", "1"),
        ("--bucket-cap-mb", "25"),
        ("--loader-samples-per-s", "100"),
        ("--cluster", "cluster.toml"),
        ("--validation", "validation.json"),
    ],
)
def test_a_flag_that_a_layout_would_ignore_is_refused(
    run: Run, inferred: Path, flag: str, value: str
) -> None:
    layout = ("--layout", "dp=2", "--model", "gpt2")
    line = complaint(run("predict", "--profile", inferred, *layout, flag, value), 2)
    assert f"{flag}: excludes --layout, got {value}" in line


def test_profiles_of_the_other_kind_are_told_apart(run: Run, stored: Path, inferred: Path) -> None:
    search = ("plan", "parallelism", "--devices", "2", "--global-batch", "2")
    for command in (("predict", "--layout", "dp=2"), search):
        line = complaint(run(*command, "--model", "gpt2", "--profile", stored), 5)
        assert "got the profile of a machine; perfmodel calibrate --from-runs writes one" in line
    for arguments in (
        ("predict", "--profile", inferred),
        ("explain", "--profile", inferred),
        ("diff", inferred, stored),
    ):
        line = complaint(run(*arguments), 5)
        assert "got a calibration from runs, which is for perfmodel predict --layout" in line


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


def test_no_torch_is_needed(inferred: Path, config: Path) -> None:
    code = (
        "import sys; from perfmodel.cli.app import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    command = (sys.executable, "-c", code, "predict", "--profile", str(inferred))
    done = subprocess.run(
        (*command, "--model", str(config), "--layout", "dp=2"), check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr

"""``perfmodel diagnose``: public questions, and what it makes of logs and models."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.perfmodel.cli.command import Run

Diagnose = Callable[..., dict[str, Any]]
LLAMA = "llama2-7b --device h100-sxm --precision bf16 --sequence-length 2048"


def typed(words: str, *observed: str) -> list[str]:
    """A command line, with what was seen."""
    return [
        "diagnose",
        *shlex.split(words),
        *(w for text in observed for w in ("--observed", text)),
    ]


@pytest.fixture
def diagnose(run: Run) -> Diagnose:
    def diagnose(words: str, *observed: str) -> dict[str, Any]:
        result = run(*typed(words, *observed), "--json")
        assert result.exit_code == 0, result
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return diagnose


def odds(found: dict[str, Any]) -> dict[str, float]:
    """Of every cause; shares of all."""
    shares = {fit["cause"]: fit["odds"] for fit in found["causes"]}
    assert not shares or sum(shares.values()) == pytest.approx(1)
    return shares


def test_a_device_may_stand_in_the_observation(diagnose: Diagnose) -> None:
    asked = "llama3-8b --micro-batch 1 --precision bf16 --strategy fsdp"
    seen = "1,000 tokens/s per GPU on 8x8 H200-SXM"
    found = diagnose(asked, seen)
    assert found == diagnose(f"{asked} --device h200-sxm", seen)
    assert found["observations"][0]["devices"] == 64


def test_mfu_is_expected_as_mfu(run: Run) -> None:
    """989.4 TFLOP/s in bf16: the share of it that is expected, and the rate."""
    expected = []
    for observed in ("1 GPU 40 % MFU", "1 GPU 395.8 TFLOP/s"):
        result = run(*typed(f"{LLAMA} --micro-batch 1", observed))
        found = re.search(r" ([0-9.]+) +normal", result.stdout)
        assert found
        expected.append(float(found[1]))
    assert expected[0] / 100 * 989.4 == pytest.approx(expected[1], rel=0.02)


def test_a_calibrated_machine_is_expected_to_do_what_it_was_measured_to_do(
    run: Run, diagnose: Diagnose, stored: Path
) -> None:
    asked = f"heavy --profile {stored} --micro-batch 16 --strategy ddp"
    words = f"predict --profile {stored} --workload heavy --devices 2 --batch 16 --json"
    predicted = json.loads(run(*words.split()).stdout)["points"][0]["step_s"]
    step_s = predicted["nominal"]
    found = diagnose(asked, f"1 node of 2: {step_s:.6f} s")
    [judged] = found["observations"]
    assert judged["expected_s"]["p5"] == pytest.approx(predicted["p5"], rel=0.02)
    assert judged["expected_s"]["p95"] == pytest.approx(predicted["p95"], rel=0.02)
    assert found["verdict"] == "normal"
    assert "data sheet" not in run(*typed(asked, "1 node of 2: 3 s")).stdout
    seen = (f"1 node of 2: {4 * step_s:.6f} s", "1 GPU: 0.25 s")
    in_words = run(*typed(asked, "; ".join(seen))).words
    assert re.search(r"slow links inside the node \([0-9.]+ x\)", in_words), "no rate is known"
    slow = diagnose(asked, *seen)
    assert slow["verdict"] == "NOT NORMAL"
    assert odds(slow)["slow links inside the node"] > 100 * odds(slow)["loader"]
    assert "host-bound" not in odds(slow), "a processor that is its own host launches nothing ahead"


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("openai-community/gpt2-large", 774),
        ("gpt2", 124),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 8030),
    ],
)
def test_a_trainer_names_a_model_of_one_size(
    diagnose: Diagnose, tmp_path: Path, name: str, millions: float
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(f"model_name_or_path: {name}\nper_device_train_batch_size: 2\nbf16: true\n")
    told = diagnose(f"{path} --device h100-sxm", "1 GPU 3 s")["model"]
    [size, prefix] = re.findall(r"\((\S+) ([MG]) parameters", told)[0]
    assert float(size) * {"M": 1, "G": 1000}[prefix] == pytest.approx(millions, rel=0.01)

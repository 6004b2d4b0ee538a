"""``perfmodel diagnose``: public questions, and what it makes of logs and models."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.cli.test_memory_command import document as workload

Diagnose = Callable[..., dict[str, Any]]
LLAMA = "llama2-7b --device h100-sxm --precision bf16 --sequence-length 2048"
GPT2 = "gpt2-xl --device rtx-3090 --strategy ddp --micro-batch 2 --precision bf16"


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


def first(found: dict[str, Any]) -> str:
    name: str = found["causes"][0]["cause"]
    return name


def test_a_global_batch_alone_is_told_as_it_is_read(diagnose: Diagnose) -> None:
    asked, seen = f"{LLAMA} --strategy fsdp --global-batch 64", "8 GPUs 1 node 2 s"
    [note] = diagnose(asked, seen)["notes"]
    assert "global batch 64 is read as one micro-batch of each replica" in note
    assert "8 on 8" in note
    assert not diagnose(f"{asked} --micro-batch 4", seen)["notes"]
    assert not diagnose(f"{asked} --accumulation 2", seen)["notes"]


def test_the_run_of_fewer_devices_may_be_the_slow_one(diagnose: Diagnose) -> None:
    asked = f"{LLAMA} --strategy ddp --lora --micro-batch 4"
    found = diagnose(asked, "1 node of 4: 2 s", "1 node of 8: 0.6 s")
    assert first(found) == "other hardware in some runs"


def test_the_next_measurement_is_of_the_largest_run(diagnose: Diagnose) -> None:
    """In whatever order runs are typed."""
    found = diagnose(GPT2, "1 node of 3: 9 s; 1 GPU: 1.2 s")["next"]
    assert "-g 3" in found["command"]
    assert 0 <= found["information"] <= 1
    assert found["name"] == diagnose(GPT2, "1 GPU: 1.2 s; 1 node of 3: 9 s")["next"]["name"]


def test_the_precision_is_shown_as_typed(diagnose: Diagnose) -> None:
    asked = "llama2-7b --device h100-sxm --precision fp16 --micro-batch 1"
    assert ", fp16, " in diagnose(asked, "1 GPU 2 s")["model"]


def test_what_is_normal_is_called_normal(diagnose: Diagnose) -> None:
    """The README of llm-foundry: 10,643 tokens/s per GPU on 8 H100 (7B, sequences of 2048)."""
    found = diagnose(
        f"{LLAMA} --strategy fsdp --micro-batch 4 --nic-bandwidth 400Gb/s --nics 8",
        *("8 GPUs 1 node: 10,643 tokens/s per GPU", "16x8: 10,475 tokens/s per GPU"),
    )
    assert (found["verdict"], found["fits"], first(found)) == ("normal", True, "normal")


def test_what_two_devices_alone_lose_is_the_link(diagnose: Diagnose) -> None:
    found = odds(diagnose(GPT2, "1 GPU: 1.2 s", "1 node of 3: 9 s"))
    assert max(found["normal"], found["host-bound"]) < 0.05
    assert found["slow links inside the node"] > 0.2


def test_what_no_device_holds_is_told_first(diagnose: Diagnose) -> None:
    """1.56 G parameters x 18 bytes are 28 GB without activations, a device has 24 GiB."""
    asked = "gpt2-xl --device a10 --strategy ddp --micro-batch 10 --precision bf16"
    found = diagnose(asked, "1 node of 2: 2.5 s")
    assert found["verdict"].startswith("DOES NOT FIT in memory; on a larger device: ")
    assert not found["fits"]
    assert "even with recompute=full: a device has 24 GiB, needed are" in found["notes"][0]


def test_what_is_measured_next_fits_in_memory(diagnose: Diagnose) -> None:
    """16 bytes of each of 6.74 G parameters are more than one device has."""
    asked = f"{LLAMA} --strategy fsdp --micro-batch 4 --nic-bandwidth 400Gb/s --nics 8"
    found = diagnose(asked, "8 nodes of 8: 8.2 s")["next"]["name"]
    assert found == "one node, the same batch of each device"


def test_faster_than_the_device_computes_is_never_normal(diagnose: Diagnose) -> None:
    """8,192 tokens x (6 N without the input embedding + 12 layers hidden tokens) in 0.52 s on 989 TFLOP/s."""
    rest = "--strategy fsdp --micro-batch 1 --sequence-length 8192 --precision bf16"
    asked = f"llama3-8b --device h100-sxm {rest}"
    flop = 8192 * (6 * (8.03e9 - 128_256 * 4096) + 12 * 32 * 8192 * 4096)
    found = diagnose(asked, "1 node of 8: 0.521 s")
    assert odds(found)["normal"] < 1e-6
    assert f"means {100 * flop / 0.521 / 989.4e12:.0f} % of the dense peak" in found["notes"][0]
    assert odds(diagnose(asked, "1 node of 8: 0.7 s"))["normal"] > 0.3


def test_a_traced_model_and_a_log(diagnose: Diagnose, tmp_path: Path) -> None:
    model, log = tmp_path / "workload.json", tmp_path / "run.log"
    workload().write(model)
    lines = (f" {n}%|x| {n}/100 [00:25<03:45,  2.00it/s]" for n in range(1, 12))
    log.write_text("\n".join(lines))
    found = diagnose(
        f"{model} --device a10 --strategy ddp --micro-batch 16 --precision fp32 "
        f"--log {log} --log-format hf --devices 2 --devices-per-node 2"
    )
    assert found["observations"][0]["step_s"] == pytest.approx(0.5)
    assert any("left out as warm-up" in note for note in found["notes"])


def test_what_hf_prints_of_its_batch_is_read(run: Run, diagnose: Diagnose, tmp_path: Path) -> None:
    """8 samples x 4 micro-batches of 256 a step: 8 devices."""
    log = tmp_path / "hf.log"
    head = (
        "  Instantaneous batch size per device = 8\n"
        "  Total train batch size (w. parallel, distributed & accumulation) = 256\n"
        "  Gradient Accumulation steps = 4\n"
    )
    bars = (f"{n}%|x| {n}/100 [00:25<03:45,  2.0s/it]" for n in range(1, 12))
    log.write_text(head + "\n".join(bars))
    given = f"{LLAMA} --log {log} --log-format hf --devices-per-node 8 --strategy fsdp"
    found = diagnose(given)
    assert found["observations"][0]["devices"] == 8
    assert "micro_batch=8 accumulation=4" in found["observations"][0]["layout"]
    assert f"read from {log}: micro-batch 8, accumulation 4, 8 devices" in found["notes"]
    refused = complaint(run(*typed(f"{given} --micro-batch 4")), 2)
    assert f"--micro-batch: must be the 8 of {log}, got 4" in refused


def test_a_log_that_says_how_it_shards_is_asked_for_nothing_more(
    run: Run, diagnose: Diagnose, tmp_path: Path
) -> None:
    log = tmp_path / "titan.log"
    log.write_text(
        "Applied FSDP to the model\nlocal batch size 2, global batch size 16, gradient accumulation steps 1\n"
        + "\n".join(f"step: {n:2}  loss: 8  tps: 9,000" for n in range(1, 12))
    )
    asked = f"{LLAMA} --log {log} --devices-per-node 8"
    assert diagnose(asked)["observations"][0]["layout"] == "dp=8 zero=3 micro_batch=2"
    refused = complaint(run(*typed(f"{asked} --strategy ddp")), 2)
    assert f"--strategy: must be the zero=3 of {log}, got ddp; leave it out" in refused


def test_a_log_of_several_replicas_asks_how_they_share(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "megatron.log"
    step = "iteration {0}/ 90 | elapsed time per iteration (ms): 900.0 | global batch size: 16 |"
    head = "using world size: 16, tensor-model-parallel size: 4\n"
    log.write_text(head + "\n".join(step.format(n) for n in range(1, 12)))
    line = complaint(run(*typed(f"llama2-7b --precision bf16 --micro-batch 1 --log {log}")), 2)
    for option in ("--device (", "--devices-per-node", "--strategy"):
        assert option in line


def test_batches_that_lightning_counts_are_told_as_they_are_read(
    diagnose: Diagnose, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    log.write_text("\r".join(f"Epoch 0: 1%|x| {n}/90 [00:2<0:5, 2.0s/it]" for n in range(1, 20)))
    asked = f"{LLAMA} --micro-batch 1 --log {log} --devices 1"
    assert any("one is read as a step; --accumulation" in n for n in diagnose(asked)["notes"])
    found = diagnose(f"{asked} --accumulation 4")
    assert any("counts batches: 4 are a step" in note for note in found["notes"])
    assert found["observations"][0]["step_s"] == pytest.approx(8)


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


def test_more_than_the_peak_is_not_normal(diagnose: Diagnose) -> None:
    """104 % MFU, as sparse peaks and other devices make them."""
    found = diagnose(f"{LLAMA} --strategy fsdp --micro-batch 4", "8 GPUs 1 node 104 % MFU")
    assert found["observations"][0]["is_normal"] is False
    assert first(found) in {"other hardware", "wrong units", "wrong model size"}
    fast = odds(found)
    for slows in ("normal", "host-bound", "loader", "straggler", "slow links inside the node"):
        assert fast[slows] < 1e-3, "nothing that lengthens a step explains one that is too short"


@pytest.mark.parametrize("size", ["125m", "1.5b", "7B", "405b"])
def test_a_size_alone_is_a_model_that_is_named(diagnose: Diagnose, size: str) -> None:
    rest = "--device h100-sxm --precision bf16 --micro-batch 1 --sequence-length 2048"
    told = diagnose(f"{size} {rest}", "1 GPU 3 s")
    parameters = told["observations"][0]["memory_bytes"]["optimizer"] / 12
    expected = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1].lower()]
    assert parameters == pytest.approx(expected, rel=0.02)
    assert f"{size} as Llama, " in told["model"]


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


def test_the_batch_that_comes_with_a_model_is_taken_and_told(run: Run) -> None:
    net = ROOT / "docs" / "cases" / "net.py"
    asked = typed(f"{net}:model --device a10 --precision bf16", "1 GPU 12 ms")
    assert "note: micro-batch 16: the batch that came with the model" in run(*asked).words
    assert "came with" not in run(*asked, "--micro-batch", 8).words


def test_a_traced_model_between_nodes_has_a_network_that_is_enough(run: Run) -> None:
    rest = "--precision bf16 --micro-batch 32 --strategy ddp --nics 1 --nic-bandwidth 25Gb/s"
    asked = f"torchvision:resnet18 --device rtx-4090 {rest}"
    found = run(*typed(asked, "12 GPUs 3 nodes 0.4 s"))
    assert found.exit_code == 0, found
    assert "a node keep 90 % of the speed of one node" in found.words

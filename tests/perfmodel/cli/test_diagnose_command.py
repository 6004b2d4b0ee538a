"""``perfmodel diagnose``: public questions, and what it refuses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.cli.test_memory_command import document as workload

Diagnose = Callable[..., dict[str, Any]]
LLAMA = ("llama2-7b", "--device", "h100-sxm", "--precision", "bf16", "--sequence-length", 2048)
FAST = ("--nic-bandwidth", "400Gb/s", "--nics", 8)


@pytest.fixture
def diagnose(run: Run) -> Diagnose:
    def diagnose(model: object, *arguments: object) -> dict[str, Any]:
        result = run("diagnose", model, *arguments, "--json")
        assert result.exit_code == 0, result
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return diagnose


def odds(found: dict[str, Any]) -> dict[str, float]:
    return {fit["cause"]: fit["odds"] for fit in found["causes"]}


def first(found: dict[str, Any]) -> str:
    name: str = found["causes"][0]["cause"]
    return name


def test_a_global_batch_alone_is_told_as_it_is_read(diagnose: Diagnose) -> None:
    asked = (*LLAMA, "--strategy", "fsdp", "--global-batch", 64, "--observed", "8 GPUs 1 node 2 s")
    [note] = diagnose(*asked)["notes"]
    assert "global batch 64 is read as one micro-batch of each replica" in note
    assert "8 on 8" in note
    assert not diagnose(*asked, "--micro-batch", 4)["notes"]
    assert not diagnose(*asked, "--accumulation", 2)["notes"]


def test_a_batch_that_cannot_be_split_names_the_run(run: Run) -> None:
    asked = (*LLAMA, "--strategy", "fsdp", "--global-batch", 128, "--micro-batch", 4)
    line = complaint(run("diagnose", *asked, "--observed", "8 nodes of 8: 2 s"), 2)
    assert "--observed '8 nodes of 8: 2 s': global batch must be a multiple of" in line


def test_the_run_of_fewer_devices_may_be_the_slow_one(diagnose: Diagnose) -> None:
    found = diagnose(
        *LLAMA, "--strategy", "ddp", "--lora", "--micro-batch", 4,
        "--observed", "1 node of 4: 2 s", "--observed", "1 node of 8: 0.6 s",
    )  # fmt: skip
    assert first(found) == "other hardware in some runs"


def test_the_next_measurement_is_of_the_largest_run(diagnose: Diagnose) -> None:
    """In whatever order runs are typed."""
    asked = (
        "gpt2-xl", "--device", "rtx-3090", "--strategy", "ddp", "--micro-batch", 2, "--precision", "bf16",
        "--observed",
    )  # fmt: skip
    found = diagnose(*asked, "1 node of 3: 9 s; 1 GPU: 1.2 s")["next"]
    assert "-g 3" in found["command"]
    assert found["name"] == diagnose(*asked, "1 GPU: 1.2 s; 1 node of 3: 9 s")["next"]["name"]


def test_the_precision_is_shown_as_typed(diagnose: Diagnose) -> None:
    asked = ("llama2-7b", "--device", "h100-sxm", "--precision", "fp16", "--micro-batch", 1)
    assert ", fp16, " in diagnose(*asked, "--observed", "1 GPU 2 s")["model"]


def test_odds_are_shares_and_one_measurement_is_next(diagnose: Diagnose) -> None:
    found = diagnose(
        *LLAMA, "--strategy", "fsdp", "--micro-batch", 4, "--observed", "8 GPUs 1 node 3 s"
    )
    assert sum(odds(found).values()) == pytest.approx(1)
    assert isinstance(found["next"]["command"], str)
    assert 0 <= found["next"]["information"] <= 1


def test_what_is_normal_is_called_normal(diagnose: Diagnose) -> None:
    """The README of llm-foundry: 10,643 tokens/s per GPU on 8 H100 (7B, sequences of 2048)."""
    found = diagnose(
        *LLAMA, "--strategy", "fsdp", "--micro-batch", 4, *FAST,
        "--observed", "8 GPUs 1 node: 10,643 tokens/s per GPU",
        "--observed", "16x8: 10,475 tokens/s per GPU",
    )  # fmt: skip
    assert (found["verdict"], found["fits"]) == ("normal", True)
    assert first(found) == "normal"


def test_what_two_devices_alone_lose_is_the_link(diagnose: Diagnose) -> None:
    found = diagnose(
        "gpt2-xl", "--device", "rtx-3090", "--strategy", "ddp", "--micro-batch", 2,
        "--precision", "bf16", "--observed", "1 GPU: 1.2 s", "--observed", "1 node of 3: 9 s",
    )  # fmt: skip
    assert odds(found)["normal"] < 0.05
    assert odds(found)["slow links inside the node"] > 0.2
    assert odds(found)["host-bound"] < 0.05


def test_what_no_device_holds_is_told_first(diagnose: Diagnose) -> None:
    """1.56 G parameters x 18 bytes are 28 GB without activations, a device has 24 GiB."""
    found = diagnose(
        "gpt2-xl", "--device", "a10", "--strategy", "ddp", "--micro-batch", 10, "--precision", "bf16",
        "--observed", "1 node of 2: 2.5 s",
    )  # fmt: skip
    assert found["verdict"].startswith("DOES NOT FIT in memory; on a larger device: ")
    assert not found["fits"]
    assert "even with recompute=full: a device has 24 GiB, needed are" in found["notes"][0]


def test_what_is_measured_next_fits_in_memory(diagnose: Diagnose) -> None:
    """16 bytes of each of 6.74 G parameters are more than one device has."""
    asked = (*LLAMA, "--strategy", "fsdp", "--micro-batch", 4, *FAST)
    found = diagnose(*asked, "--observed", "8 nodes of 8: 8.2 s")["next"]["name"]
    assert found == "one node, the same batch of each device"


def test_faster_than_the_device_computes_is_never_normal(diagnose: Diagnose) -> None:
    """8,192 tokens x (6 N without the input embedding + 12 layers hidden tokens) in 0.52 s on 989 TFLOP/s."""
    asked = (
        "llama3-8b", "--device", "h100-sxm", "--strategy", "fsdp", "--micro-batch", 1, "--sequence-length", 8192,
        "--precision", "bf16", "--observed",
    )  # fmt: skip
    flop = 8192 * (6 * (8.03e9 - 128_256 * 4096) + 12 * 32 * 8192 * 4096)
    found = diagnose(*asked, "1 node of 8: 0.521 s")
    assert odds(found)["normal"] < 1e-6
    assert f"means {100 * flop / 0.521 / 989.4e12:.0f} % of the dense peak" in found["notes"][0]
    assert odds(diagnose(*asked, "1 node of 8: 0.7 s"))["normal"] > 0.3


def test_a_traced_model_and_a_log(diagnose: Diagnose, tmp_path: Path) -> None:
    model, log = tmp_path / "workload.json", tmp_path / "run.log"
    workload().write(model)
    lines = (f" {n}%|x| {n}/100 [00:25<03:45,  2.00it/s]" for n in range(1, 12))
    log.write_text("\n".join(lines))
    found = diagnose(
        model, "--device", "a10", "--strategy", "ddp", "--micro-batch", 16, "--precision", "fp32",
        "--log", log, "--log-format", "hf", "--devices", 2, "--devices-per-node", 2,
    )  # fmt: skip
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
    log.write_text(
        head + "\n".join(f"{n}%|x| {n}/100 [00:25<03:45,  2.0s/it]" for n in range(1, 12))
    )
    given = (
        *LLAMA,
        "--log",
        log,
        "--log-format",
        "hf",
        "--devices-per-node",
        8,
        "--strategy",
        "fsdp",
    )
    found = diagnose(*given)
    assert found["observations"][0]["devices"] == 8
    assert "micro_batch=8 accumulation=4" in found["observations"][0]["layout"]
    assert f"read from {log}: micro-batch 8, accumulation 4, 8 devices" in found["notes"]
    refused = complaint(run("diagnose", *given, "--micro-batch", 4), 2)
    assert f"--micro-batch: must be the 8 of {log}, got 4" in refused


def test_a_log_that_says_how_it_shards_is_asked_for_nothing_more(
    run: Run, diagnose: Diagnose, tmp_path: Path
) -> None:
    log = tmp_path / "titan.log"
    log.write_text(
        "Applied FSDP to the model\nlocal batch size 2, global batch size 16, gradient accumulation steps 1\n"
        + "\n".join(f"step: {n:2}  loss: 8  tps: 9,000" for n in range(1, 12))
    )
    asked = (*LLAMA, "--log", log, "--devices-per-node", 8)
    assert diagnose(*asked)["observations"][0]["layout"] == "dp=8 zero=3 micro_batch=2"
    refused = complaint(run("diagnose", *asked, "--strategy", "ddp"), 2)
    assert f"--strategy: must be the zero=3 of {log}, got ddp; leave it out" in refused


def test_a_log_of_several_replicas_asks_how_they_share(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "megatron.log"
    step = "iteration {0}/ 90 | elapsed time per iteration (ms): 900.0 | global batch size: 16 |"
    head = "using world size: 16, tensor-model-parallel size: 4\n"
    log.write_text(head + "\n".join(step.format(n) for n in range(1, 12)))
    asked = ("llama2-7b", "--precision", "bf16", "--micro-batch", 1, "--log", log)
    line = complaint(run("diagnose", *asked), 2)
    for option in ("--device (", "--devices-per-node", "--strategy"):
        assert option in line


def test_batches_that_lightning_counts_are_told_as_they_are_read(
    diagnose: Diagnose, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    log.write_text("\r".join(f"Epoch 0: 1%|x| {n}/90 [00:2<0:5, 2.0s/it]" for n in range(1, 20)))
    asked = (*LLAMA, "--micro-batch", 1, "--log", log, "--devices", 1)
    assert any("one is read as a step; --accumulation" in n for n in diagnose(*asked)["notes"])
    found = diagnose(*asked, "--accumulation", 4)
    assert any("counts batches: 4 are a step" in note for note in found["notes"])
    assert found["observations"][0]["step_s"] == pytest.approx(8)


def test_a_device_may_stand_in_the_observation(diagnose: Diagnose) -> None:
    typed = ("llama3-8b", "--micro-batch", 1, "--precision", "bf16", "--strategy", "fsdp")
    rest = diagnose(*typed, "--observed", "1,000 tokens/s per GPU on 8x8 H200-SXM")
    assert rest == diagnose(
        *typed, "--device", "h200-sxm", "--observed", "1,000 tokens/s per GPU on 8x8 H200-SXM"
    )
    assert rest["observations"][0]["devices"] == 64


def test_mfu_is_expected_as_mfu(run: Run) -> None:
    """989.4 TFLOP/s in bf16: the share of it that is expected, and the rate."""
    expected = []
    for observed in ("1 GPU 40 % MFU", "1 GPU 395.8 TFLOP/s"):
        result = run("diagnose", *LLAMA, "--micro-batch", 1, "--observed", observed)
        found = re.search(r" ([0-9.]+) +normal", result.stdout)
        assert found
        expected.append(float(found[1]))
    assert expected[0] / 100 * 989.4 == pytest.approx(expected[1], rel=0.02)


def test_a_calibrated_machine_is_expected_to_do_what_it_was_measured_to_do(
    run: Run, diagnose: Diagnose, stored: Path
) -> None:
    asked = ("heavy", "--profile", stored, "--micro-batch", 16, "--strategy", "ddp", "--observed")
    predicted = json.loads(
        run("predict", "--profile", stored, "--workload", "heavy", "--devices", 2, "--batch", 16, "--json").stdout
    )["points"][0]["step_s"]  # fmt: skip
    step_s = predicted["nominal"]
    found = diagnose(*asked, f"1 node of 2: {step_s:.6f} s")
    [judged] = found["observations"]
    assert judged["expected_s"]["p5"] == pytest.approx(predicted["p5"], rel=0.02)
    assert judged["expected_s"]["p95"] == pytest.approx(predicted["p95"], rel=0.02)
    assert found["verdict"] == "normal"
    assert "data sheet" not in run("diagnose", *asked, "1 node of 2: 3 s").stdout
    in_words = run("diagnose", *asked, f"1 node of 2: {4 * step_s:.6f} s; 1 GPU: 0.25 s").words
    assert re.search(r"slow links inside the node \([0-9.]+ x\)", in_words), "no rate is known"
    slow = diagnose(*asked, f"1 node of 2: {4 * step_s:.6f} s", "--observed", "1 GPU: 0.25 s")
    assert slow["verdict"] == "NOT NORMAL"
    assert odds(slow)["slow links inside the node"] > 100 * odds(slow)["loader"]
    assert "host-bound" not in odds(slow), "a processor that is its own host launches nothing ahead"


def test_more_than_the_peak_is_not_normal(diagnose: Diagnose) -> None:
    """104 % MFU, as sparse peaks and other devices make them."""
    found = diagnose(
        *LLAMA, "--strategy", "fsdp", "--micro-batch", 4, "--observed", "8 GPUs 1 node 104 % MFU"
    )
    assert found["observations"][0]["is_normal"] is False
    assert first(found) in {"other hardware", "wrong units", "wrong model size"}
    fast = odds(found)
    for slows in ("normal", "host-bound", "loader", "straggler", "slow links inside the node"):
        assert fast[slows] < 1e-3, "nothing that lengthens a step explains one that is too short"


@pytest.mark.parametrize("size", ["125m", "1.5b", "7B", "405b"])
def test_a_size_alone_is_a_model_that_is_named(diagnose: Diagnose, size: str) -> None:
    asked = ("--device", "h100-sxm", "--precision", "bf16", "--micro-batch", 1, "--observed")
    told = diagnose(size, *asked, "1 GPU 3 s", "--sequence-length", 2048)
    [found] = told["observations"]
    parameters = found["memory_bytes"]["optimizer"] / 12
    assert parameters == pytest.approx(
        float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1].lower()], rel=0.02
    )
    assert f"{size} as Llama, " in told["model"]


def test_a_size_needs_a_sequence_and_has_bounds(run: Run) -> None:
    asked = ("--device", "h100-sxm", "--precision", "bf16", "--micro-batch", 1, "--observed")
    line = complaint(run("diagnose", "7b", *asked, "1 GPU 3 s"), 2)
    assert "--sequence-length: must be given for a size alone, 7b" in line
    line = complaint(run("diagnose", "0b", *asked, "1 GPU 3 s", "--sequence-length", 8), 2)
    assert "MODEL: 0b: size must be 30 M to 3 T parameters" in line


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
    told = diagnose(path, "--device", "h100-sxm", "--observed", "1 GPU 3 s")["model"]
    [size, prefix] = re.findall(r"\((\S+) ([MG]) parameters", told)[0]
    assert float(size) * {"M": 1, "G": 1000}[prefix] == pytest.approx(millions, rel=0.01)


def test_a_shape_that_cannot_be_names_its_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        "max_seq_len: 10\nmodel:\n  d_model: 100\n  n_layers: 3\n  n_heads: 3\n", encoding="utf-8"
    )
    given = ("--device", "a10", "--micro-batch", 1, "--precision", "bf16")
    found = run("diagnose", path, *given, "--observed", "1 GPU 3 s")
    assert "train.yaml: model: hidden must be a multiple of heads (3), got 100" in complaint(
        found, 2
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mine.json", '{"a": 1}', "mine.json: must have model_type, got none; a config.json"),
        (
            "mine.yaml",
            "lr: 0.1",
            "holds no shape of a model (d_model, n_layers, n_heads), and no name of gpt2",
        ),
        (
            "mine.yaml",
            "model:\n  d_model: 8\n  n_layers: 2\n  n_heads: 2\n",
            "--sequence-length: must be given",
        ),
    ],
)
def test_a_file_that_is_no_model_says_what_it_lacks(
    run: Run, tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    typed = (
        "--device",
        "h100-sxm",
        "--precision",
        "bf16",
        "--micro-batch",
        1,
        "--observed",
        "1 GPU 3 s",
    )
    line = complaint(run("diagnose", path, *typed), 2)
    assert words in line
    assert f"MODEL{tmp_path}" not in line


def test_the_batch_that_comes_with_a_model_is_taken_and_told(run: Run) -> None:
    asked = ("diagnose", f"{ROOT / 'docs' / 'cases' / 'net.py'}:model", "--device", "a10")
    told = ("--precision", "bf16", "--observed", "1 GPU 12 ms")
    assert "note: micro-batch 16: the batch that came with the model" in run(*asked, *told).words
    assert "came with" not in run(*asked, *told, "--micro-batch", 8).words


def test_a_traced_model_between_nodes_has_a_network_that_is_enough(run: Run) -> None:
    typed = (
        "--device",
        "rtx-4090",
        "--precision",
        "bf16",
        "--micro-batch",
        32,
        "--strategy",
        "ddp",
    )
    network = ("--nics", 1, "--nic-bandwidth", "25Gb/s", "--observed", "12 GPUs 3 nodes 0.4 s")
    found = run("diagnose", "torchvision:resnet18", *typed, *network)
    assert found.exit_code == 0, found
    assert "a node keep 90 % of the speed of one node" in found.words

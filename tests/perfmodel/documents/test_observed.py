"""Speeds as people write them, and logs of trainers."""

import re
import signal
import time
from pathlib import Path

import pytest

from perfmodel import files
from perfmodel.documents import observed
from perfmodel.documents.observed import Logged, Unit, read_log, read_observed
from perfmodel.errors import InvalidDocument, UsageError


@pytest.mark.parametrize(
    ("text", "value", "unit", "setting"),
    [
        ("8 GPUs 1 node 2.5 s", 2.5, Unit.STEP, {"devices": 8, "nodes": 1}),
        ("2 nodes of 4: 8.7 s", 8.7, Unit.STEP, {"nodes": 2, "per_node": 4}),
        ("one GPU: 3 s/it", 3.0, Unit.STEP, {"devices": 1}),
        ("64 GPUs: 1,000 tokens/s per GPU", 1e3, Unit.TOKENS, {"devices": 64, "per_device": True}),
        ("8x8: 7.5k tokens/s/GPU", 7500.0, Unit.TOKENS, {"nodes": 8, "per_node": 8}),
        ("64 GPUs: 1.5 ktok/s per GPU", 1500.0, Unit.TOKENS, {"devices": 64, "per_device": True}),
        ("32 GPUs 200 words/s in total", 200.0, Unit.WORDS, {"per_device": False}),
        ("MFU 13.5%, 8 GPUs", 0.135, Unit.MFU, {"devices": 8}),
        ("0.135 MFU on 8 GPUs", 0.135, Unit.MFU, {"devices": 8}),
        ("13.5 MFU", 0.135, Unit.MFU, {"devices": None}),
        ("16 GPUs tp=2 pp=4: 130 TFLOP/s", 130e12, Unit.FLOP, {"layout": "tp=2 pp=4"}),
        ("2 GPUs 0.4 it/s", 0.4, Unit.STEPS, {"devices": 2}),
        ("4 cards, 480 ms", 0.48, Unit.STEP, {"devices": 4}),
        ("4 GPUs in total: 0.5 PFLOPs", 0.5e15, Unit.FLOP, {"devices": 4, "per_device": False}),
        ("1 GPU: 20 GB", 20e9, Unit.MEMORY, {"devices": 1}),
        ("1 GPU: 2 min", 120.0, Unit.STEP, {"devices": 1}),
        ("three RTX 3090: 90 images per second", 90.0, Unit.SAMPLES, {"devices": 3}),
        ("2 nodes of 8: 70 GiB reserved", 70 * 2**30, Unit.MEMORY, {"nodes": 2}),
        ("2 nodes of 8", None, None, {"nodes": 2, "per_node": 8}),
        ("8x8 H100: 1k tokens/s", 1e3, Unit.TOKENS, {"nodes": 8, "per_node": 8, "device": "h100"}),
        ("3 RTX 3090, 4.1 s", 4.1, Unit.STEP, {"devices": 3, "device": "rtx 3090"}),
        ("8x A100-SXM4-80 0.4 it/s", 0.4, Unit.STEPS, {"devices": 8, "device": "a100-sxm4-80"}),
    ],
)
def test_what_people_type(
    text: str, value: float | None, unit: Unit | None, setting: dict[str, object]
) -> None:
    found = read_observed(text)
    assert (found.value, found.unit) == (None if value is None else pytest.approx(value), unit)
    assert {name: getattr(found, name) for name in setting} == setting


def read(folder: Path, text: str, name: str | None = None) -> tuple[Logged, tuple[str, ...]]:
    path = folder / "log"
    path.write_text(text)
    return read_log(path, name=name)


LINES = {
    "lightning": "Epoch 0:  {n}%|x| {n}/100 [00:25<03:45,  2.50s/it, v_num=0]",
    "hf": " {n}%|x| {n}/100 [00:25<03:45,  2.50s/it]",
    "megatron": " iteration {n}/ 100 | consumed samples: 9 | elapsed time per iteration (ms): 2500.0 |",
    "torchtitan": "step: {n}  loss: 7.1  memory: 38.5GiB(40%)  tps: 7,500  tflops: 300  mfu: 30.5%",
    "llm-foundry": "Train throughput/device/tokens_per_sec: 7500.0",
    "regex:step (?P<step>[0-9]+) took (?P<ms>[0-9.]+) ms": "step {n} took 2500 ms",
}


def ten(*names: str) -> str:
    """As many lines of each trainer."""
    return "\n".join(LINES[name].format(n=n) for name in names for n in range(1, 11))


@pytest.mark.parametrize("name", LINES)
def test_logs_of_trainers(tmp_path: Path, name: str) -> None:
    found, notes = read(tmp_path, ten(name), name)
    assert found.value == pytest.approx(7500 if found.unit is Unit.TOKENS else 2.5)
    assert found.per_device is (True if found.unit is Unit.TOKENS else None)
    assert "first 3 lines left out as warm-up" in notes[0]


@pytest.mark.parametrize("name", [name for name in LINES if not name.startswith("regex")])
def test_trainers_are_recognised_by_their_lines(tmp_path: Path, name: str) -> None:
    """Lightning shows validations too, here of more batches than the training."""
    bar = "\nValidation DataLoader 0: 1%|x| {}/90 [00:01<00:01, 9.5it/s]"
    text = ten(name) + "".join(map(bar.format, range(1, 91))) * (name == "lightning")
    found, notes = read(tmp_path, text)
    assert f"read as a log of {name};" in notes[0]
    assert found.value == read(tmp_path, ten(name), name)[0].value


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("megatron", "torchtitan"), "of one trainer, but holds lines of megatron and torchtitan"),
        ((), "holds no step of lightning, hf, megatron"),
    ],
)
def test_lines_of_two_trainers_or_none_are_refused(
    tmp_path: Path, names: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(InvalidDocument, match=problem):
        read(tmp_path, ten(*names))


MEGATRON = """
using world size: 16, data-parallel size: 4, tensor-model-parallel size: 4, pipeline-model-parallel size: 1
  global_batch_size ............................... 128
  micro_batch_size ................................ 2
  seq_length ...................................... 4096
"""
HF = """
  Instantaneous batch size per device = 8
  Gradient Accumulation steps = 4
  Total train batch size (w. parallel, distributed & accumulation) = {}
"""
TITAN = (
    "Training starts at step 1, with local batch size 2, global batch size 16, sequence length 8192"
)


@pytest.mark.parametrize(
    ("name", "head", "told"),
    [
        ("megatron", MEGATRON, {"micro_batch": 2, "global_batch": 128, "devices": 16}),
        ("megatron", MEGATRON, {"layout": "tp=4", "sequence_length": 4096}),
        ("megatron", "| global batch size:  1024 |", {"global_batch": 1024, "micro_batch": None}),
        ("hf", HF.format("1,024"), {"devices": 32, "accumulation": 4, "global_batch": None}),
        ("hf", HF.format(100), {"devices": None, "micro_batch": 8}),
        ("hf", HF.format(64) + "tensor-model-parallel size: 2", {"devices": None}),
        ("torchtitan", TITAN, {"micro_batch": 2, "global_batch": 16, "sequence_length": 8192}),
        ("torchtitan", "root - INFO - Applied FSDP to the model", {"layout": "zero=3"}),
        (
            "megatron",
            "  use_distributed_optimizer ....... True\n  tensor_model_parallel_size ...... 1",
            {"layout": "zero=1"},
        ),
        (
            "lightning",
            "distributed processes registered. Starting with 4 processes",
            {"devices": 4},
        ),
    ],
)
def test_heads_of_logs_tell_batch_and_devices(
    tmp_path: Path, name: str, head: str, told: dict[str, object]
) -> None:
    found, _ = read(tmp_path, f"{head}\n{ten(name)}", name)
    assert {key: getattr(found, key) for key in told} == told


def test_of_a_long_log_the_last_part_is_read_and_the_beginning_tells_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many lines, and too many bytes."""
    text = MEGATRON + of(*((n, 9e3 if n < 900 else 2e3) for n in range(1, 1001)))
    for limit, most in (("_MOST_LAST_LINES", 50), ("_MOST_LAST_BYTES", 4000)):
        with monkeypatch.context() as changed:
            changed.setattr(files, limit, most)
            found, notes = read(tmp_path, text, "megatron")
        assert (found.value, found.devices, found.layout) == (2.0, 16, "tp=4")
        count = int(re.search(r"the last (\d+) lines are read, (\d+) are", notes[0])[1])  # type: ignore[index]
        assert f"the last {count} lines are read, {1005 - count} are left out" in notes[0]
        assert count == (50 if most == 50 else pytest.approx(4000 / 66, abs=3))


def test_a_line_of_a_long_log_is_named_by_its_place_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_LAST_LINES", 20)
    text = of(*((n, 1e3) for n in (*range(1, 100), 7)))
    with pytest.raises(InvalidDocument, match="line 100 goes from step 99 back to 7"):
        read(tmp_path, text, "megatron")


@pytest.mark.parametrize("mark", ["\f", "\x85", "\u2028"])
def test_only_ends_of_lines_of_terminals_end_a_line(tmp_path: Path, mark: str) -> None:
    text = of(*((n, 1e3) for n in range(1, 11))).replace("| elapsed", f"{mark}| elapsed")
    assert read(tmp_path, text, "megatron")[0].value == 1.0


def test_the_longest_log_is_read_in_seconds(tmp_path: Path) -> None:
    """190,000 lines as Megatron-LM prints them took 27 s; many pauses, the square of their number.

    Every fifth step is a pause.
    """
    line = (
        " [2026-11-26 10:00:00] iteration {n:8d}/  500000 | consumed samples: 99999 | elapsed time per "
        "iteration (ms): {ms} | global batch size:  1024 | lm loss: 2.1E+00 |"
    )
    times_ms = ((n, n + (9e6 if n % 5 == 0 else 1e6)) for n in range(1, 190_001))
    text = "\n".join(line.format(n=n, ms=ms) for n, ms in times_ms)
    start_s = time.process_time()
    assert read(tmp_path, text)[0].global_batch == 1024
    assert time.process_time() - start_s < 10


#: Of bars that turn from seconds to rates, run on after an epoch, are drawn in full or have no end; of colours and
#: thousands; of utilisation alone; of a summary.
TURNING = "\n".join(
    f"Epoch 0: 1%|x| {n}/90 [00:1<0:1, {'1.5s/it' if n < 5 else '2.0it/s'}]" for n in range(1, 30)
)
ENDLESS, DRAWN = (
    "\r".join(line.format(e=e, n=n) for e in (0, 1) for n in range(1, 21))
    for line in (
        "Epoch {e}: : {n}it [00:25,  1.25it/s, v_num=0]",
        "Epoch {e}/9  ━━━━━╸━━━ {n}/20 0:00:25 • 0:00:34 1.25it/s v_num: 0.000",
    )
)
COLOURS = "\n".join(
    f"\x1b[31mstep: {n:,}  \x1b[34mtps: 7,123  \x1b[35mmfu: 37 %" for n in range(998, 1010)
)
UTILISED = "\n".join(f"step: {n}  mfu: 37%" for n in range(12))


@pytest.mark.parametrize(
    ("text", "name", "value", "unit", "said"),
    [
        (TURNING, "lightning", 0.5, Unit.MICRO_STEP, ""),
        (ENDLESS, None, 0.8, Unit.MICRO_STEP, ""),
        (DRAWN, None, 0.8, Unit.MICRO_STEP, ""),
        (COLOURS, "torchtitan", 7123, Unit.TOKENS, "log: median of 11 lines"),
        (UTILISED, "torchtitan", 0.37, Unit.MFU, ""),
        ("{'train_steps_per_second': 0.4}", "hf", 0.4, Unit.STEPS, "log: its summary"),
        ("  train_steps_per_second   =        0.4", "hf", 0.4, Unit.STEPS, "log: its summary"),
    ],
    ids=range(7),
)
def test_other_lines_of_trainers(
    tmp_path: Path, text: str, name: str | None, value: float, unit: Unit, said: str
) -> None:
    found, _ = read(tmp_path, text, name)
    assert found.value == pytest.approx(value)
    assert found.unit is unit
    assert found.text == said or not said


def bars(*runs: tuple[int, int, float]) -> str:
    return "\n".join(
        f" 1%|x| {n}/{total} [00:25<03:45, {seconds}s/it]"
        for steps, total, seconds in runs
        for n in range(1, steps + 1)
    )


def test_bars_of_other_lengths_are_told(tmp_path: Path) -> None:
    found, notes = read(tmp_path, bars((20, 100, 2.5), (9, 13, 0.4), (30, 200, 5.0)), "hf")
    assert found.value == 5.0
    assert "evaluation or another run: 20 of 100 steps, 9 of 13 steps" in notes[-1]


@pytest.mark.parametrize("evaluations", [1, 3])
def test_evaluations_with_more_bars_than_the_training_are_left_out(
    tmp_path: Path, evaluations: int
) -> None:
    """Of HF Trainer: each evaluation starts again, and one at the end is over soon."""
    evaluated = [(625, 625, 0.1)] * evaluations
    found, notes = read(tmp_path, bars((60, 60, 2.5), *evaluated), "hf")
    assert found.value == 2.5
    assert f"evaluation or another run: {625 * evaluations} of 625 steps" in notes[-1]


def test_a_log_whose_speed_changes_is_told(tmp_path: Path) -> None:
    fast, slow = (of(*((n, ms if n < 20 else 1e3) for n in range(1, 60))) for ms in (1.1e3, 2e3))
    _, notes = read(tmp_path, slow, "megatron")
    assert "speed changes from 2 to 1 s per step along the log" in notes[-1]
    assert len(read(tmp_path, fast, "megatron")[1]) == 1


def of(*pairs: tuple[int, float]) -> str:
    return "\n".join(
        f" iteration {n}/ 100 | elapsed time per iteration (ms): {ms} |" for n, ms in pairs
    )


def test_pauses_are_left_out_and_told(tmp_path: Path) -> None:
    """Four times the time, or a quarter of the speed."""
    times = of(*((n, 4000.0 if n == 8 else 1000.0) for n in range(1, 12)))
    rates = "\n".join(f"throughput/batches_per_sec: {1 - 0.75 * (n == 8)}" for n in range(12))
    for text, name in ((times, "megatron"), (rates, "llm-foundry")):
        found, notes = read(tmp_path, text, name)
        assert (found.value, found.text) == (
            1.0,
            f"log: median of {8 - (name == 'megatron')} lines",
        )
        assert "1 slow line left out as pauses" in notes[1]


def test_a_pattern_names_what_its_number_counts(tmp_path: Path) -> None:
    counted = {
        "s": (2.0, Unit.STEP, None),
        "ms": (2e-3, Unit.STEP, None),
        "it_per_s": (2.0, Unit.STEPS, None),
        "tokens_per_s": (2.0, Unit.TOKENS, False),
        "tokens_per_s_per_gpu": (2.0, Unit.TOKENS, True),
        "samples_per_s": (2.0, Unit.SAMPLES, None),
        "tflops": (2e12, Unit.FLOP, True),
    }
    for group, told in counted.items():
        found, _ = read(tmp_path, "took 2\n" * 6, f"regex:took (?P<{group}>[0-9.]+)")
        assert (found.value, found.unit, found.per_device) == told
        assert found.text == "log: median of 3 lines"


@pytest.mark.parametrize(
    ("text", "name", "seconds"),
    [
        (of((10, 9000.0), (20, 1000.0), (30, 1002.0)), "megatron", 1.001),
        (of((1, 9000.0), (10, 1000.0), (20, 1002.0)), "megatron", 1.001),
        ("took 9 s\ntook 2 s\ntook 2.2 s", "regex:took (?P<s>[0-9.]+) s", 2.1),
    ],
)
def test_a_pasted_log_of_three_lines_is_enough(
    tmp_path: Path, text: str, name: str, seconds: float
) -> None:
    """Trainers print every tenth step: only the first line holds warm-up."""
    found, notes = read(tmp_path, text, name)
    assert found.value == pytest.approx(seconds)
    assert "first line left out" in notes[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nothing here", "holds no step that --log-format megatron knows"),
        (of((1, 9000.0), (2, 1000.0)), "must go on after its warm-up .* got 0 of 2"),
        (of(*((n, 1e3) for n in (1, 2, 3, 4, 5, 1, 2))), "goes from step 5 back to 1"),
    ],
)
def test_logs_that_say_nothing_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidDocument, match=problem):
        read(tmp_path, text, "megatron")


def test_a_pattern_that_tries_every_way_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^60 ways to divide the line; who was to be called at an alarm is so again."""
    monkeypatch.setattr(observed, "_MOST_SEARCH_S", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(UsageError, match=r"within 0.2 s; leave out a repetition .* got '\(a\+\)\+"):
        read(tmp_path, "a" * 60, "regex:(a+)+ (?P<s>[0-9]+)")
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

"""``perfmodel diagnose`` and ``network check``: public questions, and what they make of logs and models."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.files import read_text
from perfmodel.machine.measured import CurvePoint
from perfmodel.network_check import Dip, _dip
from perfmodel.units import MIB
from tests.perfmodel.cli.command import Run
from tests.perfmodel.cli.test_trace_command import document as workload
from tests.perfmodel.nccl_logs import HEALTHY_US, nccl_log

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


Check = Callable[..., dict[str, Any]]
NICS = ("--nic-bandwidth", "400Gb/s", "--nics", 8)
GEFORCE = "NVIDIA GeForce RTX 3090"


@pytest.fixture
def check(run: Run, tmp_path: Path) -> Check:
    def check(text: str, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
        path = tmp_path / "log.txt"
        path.write_text(text)
        result = run("network", "check", path, *arguments, "--json")
        assert result.exit_code == exit_code, result
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return check


def slower(factor: float, *, least: int = 0, most: float = float("inf")) -> dict[int, float]:
    return {s: us * (factor if least <= s <= most else 1) for s, us in HEALTHY_US.items()}


def test_a_paste_without_its_end_is_judged_by_the_lines_it_has(check: Check) -> None:
    whole = nccl_log()
    *rows, last = whole[: whole.index("# Out of bounds")].rstrip().split("\n")
    cut = check("\n".join([*rows, last[: len(last) // 2]]))
    assert cut["checks"] == check("\n".join([*rows, *whole.split("\n")[-3:]]))["checks"]
    assert cut["notes"] == [
        "the all_reduce log ends before its summary: its largest size is 128 MiB"
    ]


@pytest.mark.parametrize(
    ("text", "arguments", "cause"),
    [
        (nccl_log(slower(15, least=MIB)), (), "NVLink is not used"),
        (nccl_log(slower(3, least=MIB)), (), "some NVLinks are down"),
        (nccl_log(slower(20, most=MIB - 1)), (), "latency"),
        (nccl_log(slower(25, least=2 * MIB, most=64 * MIB)), (), "algorithm or protocol"),
        (nccl_log(slower(150, least=MIB), nodes=2), NICS, "TCP instead of RDMA"),
        (nccl_log(slower(8, least=MIB), nodes=2), NICS, "about 1 of 8 adapters"),
        (nccl_log(slower(40, least=MIB), per_node=2, device=GEFORCE), (), "no peer-to-peer"),
    ],
)
def test_a_slow_log_names_its_cause(
    check: Check, text: str, arguments: tuple[object, ...], cause: str
) -> None:
    found = check(text, *arguments, exit_code=4)
    assert cause in found["checks"][0]["causes"][0]


def test_a_dip_among_fast_arrays_is_slow(check: Check) -> None:
    """The mean of a band hides it: 16 MiB alone take as long as 128 MiB should."""
    found = check(nccl_log(slower(6, least=16 * MIB, most=16 * MIB)), exit_code=4)["checks"][0]
    band = next(band for band in found["bands"] if band["verdict"] == "slow")
    assert band["share"] > 0.25
    assert band["dip"][:2] == [16 * MIB, 128 * MIB]
    assert "16 MiB take 1.3 x as long as 128 MiB" in found["causes"][0]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.lists(st.integers(1, 9), min_size=8))
def test_the_worst_dip_is_that_of_all_pairs(sizes: list[int], times: list[int]) -> None:
    every = [
        CurvePoint(at=float(size * MIB), time_s=float(time_s), relative_error=0.02)
        for size, time_s in zip(sorted(sizes), times, strict=False)
    ]
    pairs = [Dip(a.at, b.at, a.time_s / b.time_s) for a in every for b in every if a.at < b.at]
    worst = max(pairs, key=lambda pair: pair.ratio, default=None)
    assert _dip(every, every) == (worst if worst and worst.ratio > 1.2 else None)


def test_a_log_is_read_as_often_for_many_tests_as_for_one(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def read(path: Path) -> str:
        reads.append(path)
        return read_text(path)

    monkeypatch.setattr("perfmodel.documents.importers.read_text", read)
    check(nccl_log())
    of_one = len(reads)
    assert len(check(nccl_log() * 20)["checks"]) == 20
    assert len(reads) == 2 * of_one > 0


def test_buckets_are_marked_and_cost_is_told(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    workload().write(path)
    found = check(nccl_log(slower(10, least=MIB)), "--workload", path, exit_code=4)
    step = found["checks"][0]["step"]
    assert sum(band["buckets"] for band in found["checks"][0]["bands"]) == step["num_buckets"] > 0
    assert step["measured_s"] > step["expected_s"] > 0


@pytest.mark.parametrize(
    ("device", "per_node", "time_us"),
    [
        ("NVIDIA A100-SXM4-80GB", 8, (38.85, 216.5, 1169.1, 4225.9)),
        ("NVIDIA B200", 8, (28.95, 100.0, 398.1, 1339.8)),
        ("NVIDIA B200", 8, (29.0, 101.1, 397.6, 1340.8)),
    ],
)
def test_published_healthy_nodes_are_normal(
    check: Check, device: str, per_node: int, time_us: tuple[float, ...]
) -> None:
    """All-reduces of ai-dynamo/aiconfigurator."""
    sizes = (MIB, 16 * MIB, 128 * MIB, 512 * MIB)
    log = nccl_log(dict(zip(sizes, time_us, strict=True)), per_node=per_node, device=device)
    assert check(log)["verdict"] == "normal"


def test_every_test_of_a_paste_is_judged(check: Check) -> None:
    """Eight H100 move 480 GB in an all-gather and an all-to-all in half the time of an all-reduce."""
    half = {size: us / 2 for size, us in HEALTHY_US.items()}
    good = [nccl_log(half, collective=name) for name in ("all_gather", "all_to_all")]
    found = check("\n".join([nccl_log(), *good]))
    assert [each["collective"] for each in found["checks"]] == [
        "all_reduce", "all_gather", "all_to_all",
    ]  # fmt: skip
    assert found["verdict"] == "normal"
    slow = nccl_log(slower(6, least=MIB), collective="all_to_all")
    found = check(f"{nccl_log()}\n{slow}", exit_code=4)
    assert found["verdict"] == "slow"
    assert not found["checks"][0]["causes"]
    assert found["checks"][1]["causes"]


def test_a_machine_by_name_tells_what_its_own_collectives_reach(check: Check) -> None:
    """Published all-reduces of the same node; beyond it the adapters of its data sheet."""
    found = check(nccl_log(), "--machine", "dgx-h100")["checks"][0]
    assert "expected as 8 x h100-sxm5 were measured" in found["links"][-1]
    assert found["bands"] != check(nccl_log())["checks"][0]["bands"]
    slow = nccl_log(slower(150, least=MIB), nodes=2)
    causes = check(slow, "--machine", "dgx-h100", exit_code=4)["checks"][0]["causes"]
    assert "TCP instead of RDMA" in causes[0]
    typed = check(slow, "--machine", "dgx-h100", "--nic-bandwidth", "100Gb/s", exit_code=4)
    assert "8 x 10 GB/s each way" in typed["checks"][0]["links"][1]

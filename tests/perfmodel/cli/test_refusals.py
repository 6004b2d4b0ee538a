"""Whatever a user gets wrong is one line that names the place and the value, and an exit code."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.cli.test_layout_commands import LLAMA
from tests.perfmodel.cli.test_memory_command import document as workload
from tests.perfmodel.cost.large_samples import document as inferred
from tests.perfmodel.nccl_logs import nccl_log
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.plan.budgets import budget_text
from tests.perfmodel.plan.budgets import written as written_budget
from tests.perfmodel.plan.plans import written as written_plan
from tests.perfmodel.profiles import Machine, as_file, profile

ROWS: Final = tuple(
    line
    for line in Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
_ABBREVIATIONS: Final = {
    "{predict}": "predict --profile {stored} --workload light",
    "{layout}": "predict --profile {inferred} --model gpt2-xl --layout",
    "{job}": "goodput --devices 100 --work-days 10",
    "{memory}": "memory --workload {traced}",
    "{calibrate}": "calibrate --out {tmp}/out --device-kind cpu",
    "{counts}": ",".join(map(str, range(1, 514))),
    "{search}": "plan parallelism --model gpt2 --devices 8 --global-batch 64",
    "{llama}": "diagnose llama2-7b --device h100-sxm --precision bf16 --sequence-length 2048 --micro-batch 1",
    "{one}": "--device h100-sxm --precision bf16 --micro-batch 1 --observed '1 GPU 3 s'",
}
#: Files that are text.
_TEXTS: Final = {
    "two_nodes": nccl_log(nodes=2),
    "unclear_device": nccl_log(device="NVIDIA H100"),
    "unknown_device": nccl_log(device="NVIDIA H1000 XS"),
    "healthy": nccl_log(),
    "mine.json": '{"a": 1}',
    "bert.json": json.dumps(LLAMA | {"model_type": "bert"}),
    "wide_heads.json": json.dumps(LLAMA | {"head_dim": 128}),
    "shapeless.yaml": "lr: 0.1",
    "endless.yaml": "model:\n  d_model: 8\n  n_layers: 2\n  n_heads: 2\n",
    "uneven.yaml": "max_seq_len: 10\nmodel:\n  d_model: 100\n  n_layers: 3\n  n_heads: 3\n",
}
#: What measures or traces imports torch.
_WITH_TORCH: Final = ("calibrate", "validate", "trace")


_WRITERS: Final[dict[str, Callable[[Path], object]]] = {
    "stored": lambda path: as_file(profile(Machine())).write(path),
    "inferred": lambda path: inferred().write(path),
    "curves": lambda path: as_file(
        replace(profile(Machine()), operators=costs_of_the_made_up_machine())
    ).write(path),
    "traced": lambda path: workload().write(path),
    "traced.json": lambda path: workload().write(path),
    "bare": lambda path: workload(with_memory=False).write(path),
    "plan": lambda path: written_plan(path.parent).rename(path),
    "budget": lambda path: written_budget(path.parent, budget_text()).rename(path),
    "tmp": Path.mkdir,
} | {name: partial(Path.write_text, data=text) for name, text in _TEXTS.items()}


@pytest.mark.parametrize(
    ("source", "flag", "command"),
    [
        ("runs/calibration/profile.json", "--profile", "predict --workload lenet"),
        ("runs/calibration/profile.json", "--profile", "whatif --workload lenet --set link.gbps=1"),
        ("n.log", "--log", "acceptance write --profile p --layout dp=8 --log o.log --log n.log"),
        ("mytrain.py", "MODEL", "trace mytrain.py:make"),
    ],
)
def test_no_answer_replaces_a_file_that_it_is_made_from(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, flag: str, command: str
) -> None:
    """Neither a default, nor one of several, nor one that holds a factory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / source
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("what was measured")
    line = complaint(run(*shlex.split(command), "--output", path), 2)
    assert f"--output: must be another file than {flag}" in line
    assert path.read_text() == "what was measured"


@pytest.mark.parametrize("row", ROWS)
def test_a_mistake_is_one_line(run: Run, tmp_path: Path, row: str) -> None:
    code, words, command = (part.strip() for part in row.split(" | ", 2))
    if command.startswith(_WITH_TORCH) and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    for name, text in _ABBREVIATIONS.items():
        command = command.replace(name, text)

    for name, write in _WRITERS.items():
        if f"{{{name}}}" in command:
            write(tmp_path / name)
            command = command.replace(f"{{{name}}}", str(tmp_path / name))
    assert words in complaint(run(*shlex.split(command)), int(code))

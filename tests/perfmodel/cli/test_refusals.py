"""Whatever a user gets wrong is one line that names the place and the value, and an exit code."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.cli.test_memory_command import document as workload
from tests.perfmodel.cost.large_samples import document as inferred
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
    "{search}": "plan parallelism --model gpt2 --devices 8 --global-batch 64",
    "{llama}": "diagnose llama2-7b --device h100-sxm --precision bf16 --sequence-length 2048 --micro-batch 1",
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
}


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

"""Tables of command lines: what answers hold, and what is refused in one line that names the place and the value."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from tests.calibrate.test_runs import RUN
from tests.perfmodel.cli.command import Result, Run, complaint
from tests.perfmodel.cli.test_predict_command import LLAMA
from tests.perfmodel.cli.test_trace_command import FACTORIES
from tests.perfmodel.cli.test_trace_command import document as workload
from tests.perfmodel.cost.large_samples import document as inferred
from tests.perfmodel.documents.test_hardware import GOOD
from tests.perfmodel.documents.test_importers import NCCL
from tests.perfmodel.nccl_logs import nccl_log
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.plan.budgets import written as written_budget
from tests.perfmodel.plan.plans import LARGE
from tests.perfmodel.plan.plans import written as written_plan
from tests.perfmodel.profiles import Machine, as_file, profile
from tests.perfmodel.tracing.configs import llama_config


def rows(name: str) -> list[str]:
    """Exit code, words and command of every line of a table."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


_ABBREVIATIONS: Final = {
    "{predict}": "predict --profile {stored} --workload light",
    "{layout}": "predict --profile {inferred} --model gpt2-xl --layout",
    "{job}": "goodput --devices 100 --work-days 10",
    "{memory}": "memory --workload {traced}",
    "{calibrate}": "calibrate --out {tmp}/out --device-kind cpu",
    "{counts}": ",".join(map(str, range(1, 514))),
    "{search}": "plan parallelism --model gpt2 --devices 8 --global-batch 64",
    "{today}": "--today 2026-11-21",
    "{whatif}": "whatif --profile {stored} --workload heavy --devices 8 --batch 16 --set",
    "{if}": "whatif --machine dgx-h100 --model llama2-7b --device-memory 80GiB --layout 'dp=64 zero=1 micro_batch=1 "
    "accumulation=16' --set",
    "{on}": "predict --profile {stored} --workload heavy --devices 16 --cluster",
    "{judge}": "{promise} --workload heavy --layout 'dp=16 micro_batch=16' && acceptance judge {tmp}/c.toml",
    "{four}": "--part 'a, 2 GPUs: 1 s' --part 'b, 2 GPUs: 1 s' --part 'c, 2 GPUs: 1 s' --part 'd, 2 GPUs: 1 s'",
    "{dgx_job}": "acceptance write --machine dgx-h100 --output {tmp}/c.toml",
    "{promise}": "acceptance write --profile {loose} --output {tmp}/c.toml --cluster '2 100GB/s, 8 10GB/s'",
    "{promise_all}": "acceptance write --profile {loose} --output {tmp}/c.toml",
    "{from}": "calibrate --out {tmp}/o --device A100 --from-runs",
    "{nccl}": "network check --device h100-sxm5 --nic-bandwidth 400Gb/s --nics 8 --collective all_reduce",
    "{virtual}": "calibrate --out {tmp}/o --device-kind virtual --nproc 1 --truth",
    "{dgx}": "predict --machine dgx-a100 --model llama3-8b --batch 64 --layout",
    "{points}": "batch --points 250=125,500=150,1000=200,2000=300",
    "{divided}": "predict --profile {curves} --layout 'fsdp=4 tp=2 micro_batch=2'",
    "{llama3}": "diagnose llama3-8b --device h100-sxm --strategy fsdp --micro-batch 1 --sequence-length 8192 "
    "--precision bf16",
    "{hf}": "{llama2} --log {hf.log} --log-format hf --devices-per-node 8 --strategy fsdp",
    "{llama2}": "diagnose llama2-7b --device h100-sxm --precision bf16 --sequence-length 2048",
    "{clauses}": "acceptance write --profile {good} --workload heavy --output {tmp}/c.toml && "
    "acceptance judge {tmp}/c.toml",
    "{gpt2}": "diagnose gpt2-xl --device rtx-3090 --strategy ddp --micro-batch 2 --precision bf16",
    "{llama}": "diagnose llama2-7b --device h100-sxm --precision bf16 --sequence-length 2048 --micro-batch 1",
    "{one}": "--device h100-sxm --precision bf16 --micro-batch 1 --observed '1 GPU 3 s'",
}


def eleven(line: str) -> str:
    """As many lines of a log."""
    return "\n".join(line.format(n=n) for n in range(1, 12))


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
    "tiny.json": json.dumps(llama_config(32, 64, 2, 4, 100, 16) | {"num_key_value_heads": 2}),
    **{f"blank.{kind}": "@" for kind in ("json", "jsonl", "log", "py", "toml", "yaml")},
    "truth.toml": "[host]\nlaunch_s = 1e-5\n[device]\nflop_per_s = {fp32 = 1e13}\nbytes_per_s = 1e12\n",
    "runs.jsonl": json.dumps(RUN),
    "nccl.txt": NCCL,
    "endless.yaml": "model:\n  d_model: 8\n  n_layers: 2\n  n_heads: 2\n",
    "factories.py": FACTORIES,
    "large": LARGE,
    "small.toml": GOOD,
    "fast.log": eleven(" {n}%|x| {n}/100 [00:25<03:45,  2.00it/s]"),
    "hf.log": "  Instantaneous batch size per device = 8\n"
    "  Total train batch size (w. parallel, distributed & accumulation) = 256\n"
    "  Gradient Accumulation steps = 4\n" + eleven("{n}%|x| {n}/100 [00:25<03:45,  2.0s/it]"),
    "titan.log": "Applied FSDP to the model\nlocal batch size 2, global batch size 16, gradient "
    "accumulation steps 1\n" + eleven("step: {n:2}  loss: 8  tps: 9,000"),
    "megatron.log": "using world size: 16, tensor-model-parallel size: 4\n"
    + eleven(
        "iteration {n}/ 90 | elapsed time per iteration (ms): 900.0 | global batch size: 16 |"
    ),
    "lightning.log": eleven("Epoch 0: 1%|x| {n}/90 [00:2<0:5, 2.0s/it]"),
    "uneven.yaml": "max_seq_len: 10\nmodel:\n  d_model: 100\n  n_layers: 3\n  n_heads: 3\n",
}
#: What measures or traces imports torch.
_WITH_TORCH: Final = ("calibrate", "validate", "trace")


def stored(machine: Machine, path: Path, *, workloads: int = 2) -> None:
    """The profile of a machine, with so many of its workloads."""
    found = profile(machine)
    as_file(replace(found, workloads=found.workloads[:workloads])).write(path)


_MACHINES: Final = {
    "stored": Machine(),
    "alone": Machine(world_size=1),
    "slower": Machine(time_scale=1.5),
    "sealed": Machine(dispatch_s=0.001),
    "good": Machine(relative_error=0.02),
    "loose": Machine(relative_error=0.2),
    "thin": Machine(relative_error=0.02, s_per_byte=5e-9),
}
_WRITERS: dict[str, Callable[[Path], object]] = {
    "part": lambda path: stored(Machine(relative_error=0.02), path, workloads=1),
    "inferred": lambda path: inferred().write(path),
    "curves": lambda path: as_file(
        replace(profile(Machine()), operators=costs_of_the_made_up_machine())
    ).write(path),
    "traced": lambda path: workload().write(path),
    "traced.json": lambda path: workload().write(path),
    "bare": lambda path: workload(with_memory=False).write(path),
    "plan": lambda path: written_plan(path.parent).rename(path),
    "budget": lambda path: written_budget(path.parent).rename(path),
    "tmp": Path.mkdir,
}
_WRITERS |= {name: partial(stored, machine) for name, machine in _MACHINES.items()}
_WRITERS |= {name: partial(Path.write_text, data=text) for name, text in _TEXTS.items()}


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


@cache
def contents(name: str) -> dict[str, bytes]:
    """Files that a writer makes, by their names."""
    with TemporaryDirectory() as folder:
        _WRITERS[name](Path(folder, name))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def put(name: str, folder: Path) -> Path:
    """The file of a name, or the folder."""
    for file, content in contents(name).items():
        (folder / file).write_bytes(content)
    if name == "tmp":
        (folder / name).mkdir()
    return folder / name


_EDITED: Final = re.compile(r"\{([\w.]+)~(.*?)~\}")


def typed(command: str, folder: Path) -> list[str]:
    """Words of a row's command; the files that it names are written."""

    def edited(match: re.Match[str]) -> str:
        path, words = put(match[1], folder), match[2].encode().decode("unicode_escape").split("~")
        text = path.read_text(encoding="utf-8")
        for old, new in zip(words[::2], words[1::2], strict=True):
            assert old in text
            text = text.replace(old, new, 1)
        path.write_text(text, encoding="utf-8")
        return str(path)

    for package, is_needed in (
        ("torch", command.startswith(_WITH_TORCH)),
        ("timm", "timm:" in command),
    ):
        if is_needed and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for name, text in _ABBREVIATIONS.items():
        command = command.replace(name, text)
    command = _EDITED.sub(edited, command)
    for name in _WRITERS:
        if f"{{{name}}}" in command:
            command = command.replace(f"{{{name}}}", str(put(name, folder)))
    return shlex.split(command)


def last(run: Run, words: list[str]) -> Result:
    """What the last of several commands says; those before it end well."""
    while "&&" in words:
        assert run(*words[: words.index("&&")]).exit_code == 0
        words = words[words.index("&&") + 1 :]
    return run(*words)


@pytest.mark.parametrize("row", rows("refusals.txt"))
def test_a_mistake_is_one_line(run: Run, tmp_path: Path, row: str) -> None:
    code, words, command = (part.strip() for part in row.split(" | ", 2))
    assert words in complaint(last(run, typed(command, tmp_path)), int(code))


def test_a_folder_without_a_calibration_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("predict", "--layout", "fsdp=8", "--model", "llama3-8b")
    assert "nothing was calibrated here" in complaint(result, 5)


_VALUE: Final = re.compile(r"\.(.+?) ([=<>]) (.+?)(?: within ([\d.]+) %)?")


def holds(answer: Any, path: str, sign: str, text: str, within: str | None) -> bool:
    """Whether a value of a document is as a row says; of records in a list a word chooses one."""
    for key in path.split("/"):
        if isinstance(answer, list) and not key.lstrip("-").isdigit():
            [answer] = (each for each in answer if json.dumps(key) in json.dumps(each))
        else:
            answer = answer[int(key) if isinstance(answer, list) else key]
    try:
        expected = json.loads(text)
    except ValueError:
        expected = text
    if sign != "=":
        return bool(answer < expected if sign == "<" else answer > expected)
    if isinstance(expected, float) or within is not None:
        return bool(answer == pytest.approx(expected, rel=float(within or 1e-4) / 100))
    return bool(answer == expected)


@pytest.mark.parametrize("row", rows("answers.txt"))
def test_an_answer_holds_what_it_should(run: Run, tmp_path: Path, row: str) -> None:
    code, checks, command = (part.strip() for part in row.split(" |", 2))
    result = last(run, typed(command, tmp_path))
    assert result.exit_code == int(code), result
    said = " ".join((result.stdout + result.stderr).split())
    for check in checks.split(" ; "):
        if found := _VALUE.fullmatch(check):
            answer = json.loads(result.stdout)
            assert holds(answer, *found.groups()), (check, answer)
        elif check.startswith("first "):
            words = check.removeprefix("first ")
            assert said.index(words) == said.index(words.split()[0]), (check, said)
        else:
            words = check.removeprefix("not ")
            assert (words in said) is (words == check), (check, said)

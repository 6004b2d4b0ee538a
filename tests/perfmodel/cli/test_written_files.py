"""Every command that writes a file: one call of the system fails, and the old file or the new one is there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibrate.layout_fit import infer
from perfmodel.report import figures
from tests.faults import NEVER, Faults, injected
from tests.fuzz.attack import target_in
from tests.perfmodel.cli.command import Run

#: Command lines; the file that they write stands last, or the folder of several.
COMMANDS = (
    "predict --profile {stored} --workload light --devices 1,2 --output out/a.json",
    "predict --profile {stored} --workload light --devices 1,2 --trace out/a.json",
    "predict --profile {stored} --workload light --devices 1,2 --plot out/a.svg",
    "whatif --profile {stored} --workload light --set network.bandwidth=2x --output out/a.json",
    "plan options {plan} --today 2026-11-21 --output out/a.json",
    "plan parallelism --profile {inferred} --model gpt2-xl --devices 8 --global-batch 64 --output out/a.json",
    "acceptance write --profile {stored} --output out/a.toml",
    "calibrate --from-runs {runs} --device A100 --out out/",
    "trace lenet --output out/a.json",
    "report --profile {stored} --devices 1 --out out/",
)
#: The first file that a command writes into a folder.
FIRST = {"calibrate": "inferred.json", "report": "report.html"}
OLD = b"what stood here before"


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """What takes seconds and writes nothing: its first result, of each format, again."""
    found: dict[object, Any] = {}

    def kept(*arguments: object, **options: object) -> Any:
        form = options.get("format")
        if form not in found:
            found[form] = function(*arguments, **options)
        return found[form]

    return kept


def calls_of(run: Run, words: list[str], folder: Path, fails_at: int) -> list[str]:
    """Run a command over an old file with one call failing; judge what is left; return its calls."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written = folder / FIRST.get(words[0], Path(words[-1]).name)
    written.write_bytes(OLD)
    faults = Faults(fails_at, folder)
    with injected(faults):
        ended = run(*words)
    code, err = ended.exit_code, ended.stderr
    content = written.read_bytes()
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in found if path.name.startswith(".")], faults.calls
    assert all(path.stat().st_size for path in found)
    if fails_at == NEVER:
        assert code == 0, err
        assert content != OLD
        return faults.calls
    last = faults.calls[-1]
    assert code == 1, last
    [line] = [line for line in err.splitlines() if line.startswith("perfmodel: ")]
    assert "Traceback" not in err
    if str(written) in line:
        # complete either way, and the message says which
        assert ("nothing was overwritten" in line) == (content == OLD), (last, line)
    else:
        assert (content, len(found)) != (OLD, 1), (last, line)
    return faults.calls


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.replace(" ", "-")[:24])
def test_every_call_of_a_writer_may_fail(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "figure_bytes", once(figures.figure_bytes))
    monkeypatch.setattr("calibrate.runs.infer", once(infer))
    if command.startswith("trace"):
        pytest.importorskip("torch")  # which starts a program when it is loaded
    (tmp_path / "out").mkdir()
    *words, written = command.split()
    words = [*target_in(tmp_path).filled(words), str(tmp_path / written)]
    calls = calls_of(run, words, tmp_path / "out", NEVER)
    assert {call.split()[0] for call in calls} == {"open", "write", "fsync", "rename"}
    # of many files those of the first and the last
    for at in sorted({*range(1, len(calls) + 1)[:8], *range(1, len(calls) + 1)[-8:]}):
        calls_of(run, words, tmp_path / "out", at)

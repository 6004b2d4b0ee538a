"""Every command that writes a file: one call of the system fails, and the old file or the new one is there."""

import shutil
from pathlib import Path

import pytest

from tests.faults import NEVER, Faults, injected
from tests.fuzz.attack import run_line, written_files

#: Command lines; what they write stands last.
COMMANDS = (
    "predict --profile {stored} --workload light --devices 1,2 --output out/a.json",
    "predict --profile {stored} --workload light --devices 1,2 --trace out/a.json",
    "predict --profile {stored} --workload light --devices 1,2 --plot out/a.svg",
    "predict --profile {inferred} --model gpt2-xl --layout dp=8 --timeline out/a.svg",
    "whatif --profile {stored} --workload light --set network.bandwidth=2x --output out/a.json",
    "plan options {plan} --today 2026-11-21 --output out/a.json",
    "plan parallelism --profile {inferred} --model gpt2-xl --devices 8 --global-batch 64 --output out/a.json",
    "acceptance write --profile {stored} --output out/a.toml",
    "network import {topology} --output out/a.toml",
)
OLD = b"what stood here before"


def calls_of(words: list[str], files: dict[str, str], folder: Path, fails_at: int) -> list[str]:
    """Run a command over an old file with one call failing; judge what is left; return its calls."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written = folder / Path(words[-1]).name
    written.write_bytes(OLD)
    faults = Faults(fails_at, folder)
    with injected(faults):
        code, _, err = run_line(words, files)
    content = written.read_bytes()
    assert [path.name for path in folder.iterdir()] == [written.name], faults.calls
    if fails_at == NEVER:
        assert code == 0, err
        assert content != OLD
        return faults.calls
    last = faults.calls[-1]
    assert code == 1, last
    [line] = [line for line in err.splitlines() if line.startswith("perfmodel: ")]
    assert str(written.name) in line
    assert "Traceback" not in err
    # complete either way, and the message says which
    assert ("nothing was overwritten" in line) == (content == OLD), (last, line)
    return faults.calls


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.replace(" ", "-")[:24])
def test_every_call_of_a_writer_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    *words, written = command.split()
    files, words = written_files(tmp_path), [*words, str(tmp_path / written)]
    calls = calls_of(words, files, tmp_path / "out", NEVER)
    assert {call.split()[0] for call in calls} == {"open", "write", "fsync", "rename"}
    for at in range(1, len(calls) + 1):
        calls_of(words, files, tmp_path / "out", at)

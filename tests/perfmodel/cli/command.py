"""The command line in this process: same arguments, same exit code, same lines."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from perfmodel.cli import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a user sees."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """Standard output on one line, because sentences are folded."""
        return " ".join(self.stdout.split())


Run: TypeAlias = Callable[..., Result]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Result:
        """One argument alone is the whole line."""
        words = shlex.split(str(arguments[0])) if len(arguments) == 1 else map(str, arguments)
        monkeypatch.setattr(sys, "argv", ["perfmodel", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int | None)
        return Result(exit_code=code or 0, stdout=captured.out, stderr=captured.err)

    return run


def complaint(result: Result, exit_code: int) -> str:
    """The one line; what shows progress is not one."""
    lines = [
        line
        for line in result.stderr.splitlines()
        if not line.startswith(("calibrate: ", "validate: "))
    ]
    assert result.exit_code == exit_code, result
    assert len(lines) == 1, result
    assert lines[0].startswith("perfmodel: ")
    assert "Traceback" not in result.stdout + result.stderr
    return lines[0]

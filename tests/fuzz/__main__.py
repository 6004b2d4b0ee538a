"""Attack every reader and command for some minutes: ``python -m tests.fuzz MINUTES [SEED]``."""

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.attack import (
    READERS,
    Edit,
    check_hostile_input,
    check_line,
    command_lines,
    edits,
    read_hostile,
    spoilt,
    written_files,
)

_SLOW_S = 10.0


def main(minutes: float, first_seed: int) -> int:
    """Print tries, and each kind of failure once with what makes it."""
    tries: Counter[str] = Counter()
    failures: dict[str, str] = {}
    end_s, number = time.monotonic() + 60 * minutes, first_seed
    freely = settings(
        max_examples=25,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        files = written_files(folder)

        def attempt(kind: str, told: object, act: object, *arguments: object) -> None:
            tries[kind] += 1
            start_s = time.monotonic()
            try:
                assert callable(act)
                act(*arguments)
                assert time.monotonic() - start_s < _SLOW_S, f"slow: {kind}"
            except Exception as error:  # noqa: BLE001 - each kind is told once
                place = traceback.extract_tb(error.__traceback__)[-1]
                key = f"{type(error).__name__} {place.name}:{place.lineno} {str(error)[:80]!r}"
                if key not in failures:
                    failures[key] = f"{kind}: {told!r:.600}"
                    sys.stdout.write(f"{key}\n    {failures[key]}\n")
                    sys.stdout.flush()

        while time.monotonic() < end_s:
            number += 1

            @seed(number)
            @settings(freely)
            @given(words=command_lines())
            def of_lines(words: list[str]) -> None:
                attempt("lines", words, check_line, words, files)

            @seed(number)
            @settings(freely)
            @given(changes=edits)
            def of_files(changes: list[Edit]) -> None:
                for reader in READERS:
                    content = spoilt(reader, changes, folder)
                    attempt(reader, changes, read_hostile, reader, content, folder)
                attempt("inputs", changes, check_hostile_input, changes, files)

            of_files()
            of_lines()
    sys.stdout.write(f"{tries.total():,} tries, {len(failures)} kinds of failures\n")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "80")
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))

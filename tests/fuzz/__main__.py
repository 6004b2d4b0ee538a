"""Attack every reader and command for some minutes: ``python -m tests.fuzz MINUTES [SEED]``; new seeds by default."""

import contextlib
import os
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.attack import Act, attacks, target_in

#: Tries of a round, where it is not 25: models take long to trace, requests no time.
_EXAMPLES: Final = {"factories": 8, "messages": 50}


def main(minutes: float, first_seed: int) -> int:
    """Print tries, and each kind of failure once with what makes it."""
    tries: Counter[str] = Counter()
    failures: dict[str, str] = {}
    end_s, number = time.monotonic() + 60 * minutes, first_seed
    checks = list(HealthCheck)
    freely = settings(database=None, phases=[Phase.generate], suppress_health_check=checks)

    def some_of(kind: str, strategy: st.SearchStrategy[Any], act: Act, number: int) -> None:
        @seed(number)
        @settings(freely, deadline=None, max_examples=_EXAMPLES.get(kind, 25))
        @given(drawn=strategy)
        def attempt(drawn: object) -> None:
            tries[kind] += 1
            try:
                faults = act(drawn)
                assert not faults, faults[0]
            except Exception as error:  # noqa: BLE001 - each kind is told once
                place = traceback.extract_tb(error.__traceback__)[-1]
                key = f"{type(error).__name__} {place.name}:{place.lineno} {str(error)[:80]!r}"
                if key not in failures:
                    failures[key] = f"{kind}: {drawn!r:.600}"
                    sys.stdout.write(f"{key}\n    {failures[key]}\n")
                    sys.stdout.flush()

        attempt()

    with (
        contextlib.ExitStack() as opened,
        tempfile.TemporaryDirectory() as outer,
        contextlib.chdir(outer),
    ):
        os.mkdir("work")  # noqa: PTH102 - whatever lies beside it in the end was written outside
        os.chdir("work")
        every = attacks(target_in(Path(outer, "work")), opened)
        with contextlib.suppress(KeyboardInterrupt):  # ends it early
            while number == first_seed or time.monotonic() < end_s:
                number += 1
                for kind, (strategy, act) in every.items():
                    if number == first_seed + 1 or time.monotonic() < end_s:
                        some_of(kind, strategy, act, number)
        if beside := sorted({path.name for path in Path(outer).iterdir()} - {"work"}):
            failures["outside"] = f"written outside the folder: {beside}"
            sys.stdout.write(f"{failures['outside']}\n")
    sys.stdout.write(f"{', '.join(f'{kind} {count:,}' for kind, count in tries.items())}\n")
    found = f"{tries.total():,} tries, {len(failures)} kinds of failures"
    sys.stdout.write(f"seed {first_seed}: {found}\n")
    return 1 if failures else 0


#: A forked command would wait for threads of the linear algebra that stayed behind.
_OWN: Final = {"COLUMNS": "80", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

if __name__ == "__main__":
    if not _OWN.items() <= os.environ.items():
        words = [sys.executable, "-u", "-m", "tests.fuzz", *sys.argv[1:]]
        os.execve(sys.executable, words, os.environ | _OWN)  # noqa: S606 - itself
    own_seed = int(sys.argv[2]) if len(sys.argv) > 2 else secrets.randbelow(2**32)
    sys.exit(main(float(sys.argv[1]), own_seed))

"""What every test starts from."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from hypothesis import settings

from calibrate.turns import LOCK_VARIABLE, machine_to_itself

# The same examples in every run, so that a test that fails tells about the change and not about luck.
# A deadline would measure the machine, not the law.
settings.register_profile("repeatable", deadline=None, derandomize=True)
# ``pytest --hypothesis-profile search`` looks for new examples; what it finds becomes a test.
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _lock_of_its_own(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Played measurements wait for nobody; real ones have queued before the test begins.

    Inside the test the wait would be reported as a line of progress, and count against deadlines.
    """
    is_real = request.node.get_closest_marker("real") is not None
    with machine_to_itself(_told) if is_real else nullcontext():
        monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path_factory.getbasetemp() / "measuring.lock"))
        yield


def _told(words: str) -> None:
    sys.stderr.write(f"{words}\n")

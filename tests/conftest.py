"""What every test starts from."""

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Final

import pytest
from hypothesis import settings

from calibrate.locks import LOCK_VARIABLE, machine_to_itself

#: Set in a worker of pytest-xdist, not in plain pytest.
_IS_ONE_OF_SEVERAL: Final = "PYTEST_XDIST_WORKER" in os.environ
# Workers have about a core each; numpy and torch read this when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Markers of what takes longest: it comes first, or one worker would still be at it when all others
#: have finished.
_LONG: Final = ("real", "netns", "browser", "long")
#: Files, or tests of files, that start ranks of their own: one after another on one worker.
WITH_RANKS: Final = frozenset(
    {
        "tests/calibrate/test_real_calibration.py",
        "tests/perfmodel/plan/test_acceptance.py::test_ranks_of_a_loop_say_which_of_them_is_slow",
        "tests/validate/testbed/test_netns.py",
    }
)
#: Tests of these files have nothing in common and take long.
_SPLIT: Final = frozenset({"tests/test_examples.py", "tests/calibrate/test_virtual.py"})

# The same examples in every run, so that a test that fails tells about the change and not about luck.
# A deadline would measure the machine, not the law.
settings.register_profile("repeatable", deadline=None, derandomize=True)
# ``pytest --hypothesis-profile search`` looks for new examples; what it finds becomes a test.
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command line in this process."""
    from tests.perfmodel.cli.command import runner  # noqa: PLC0415 - numpy must find its threads set

    return runner(monkeypatch, capsys)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores: tests that start processes wait for them."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers begin with what takes longest."""
    if _IS_ONE_OF_SEVERAL:
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    places = (at for at, name in enumerate(_LONG) if item.get_closest_marker(name) is not None)
    return next(places, len(_LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one piece of work, so that fixtures of a module are made once."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - absent with -p no:xdist

    class ByFile(LoadScopeScheduling):  # type: ignore[misc] # the plugin brings no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if WITH_RANKS & {file, nodeid}:
                return "ranks"
            return nodeid if file in _SPLIT else file

    return ByFile(config, log)


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

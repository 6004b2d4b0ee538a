"""What every test needs: to wait for nobody."""

from collections.abc import Iterator

import pytest

from calibrate.turns import LOCK_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def lock_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of these tests take turns among themselves, not with others on this machine.

    Waiting for another one would be reported, and stopped by a deadline of the test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOCK_VARIABLE, str(tmp_path_factory.mktemp("turns") / "lock"))
        yield

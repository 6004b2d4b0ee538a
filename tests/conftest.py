"""What every test starts from."""

import pytest


@pytest.fixture(autouse=True)
def _lock_of_its_own(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Played measurements wait for nobody: only real ones queue for the machine."""
    if request.node.get_closest_marker("real") is None:
        path = tmp_path_factory.getbasetemp() / "measuring.lock"
        monkeypatch.setattr("calibrate.turns.lock_path", lambda: path)

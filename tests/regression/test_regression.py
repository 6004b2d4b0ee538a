"""Numbers and errors are those of the recorded table; ``python -m tests.regression check``: all."""

import fnmatch
import json
import tomllib

import pytest

from tests.regression.__main__ import differences, run
from tests.regression.cases import HERE, Case, cases

_TABLE = json.loads((HERE / "table.json").read_bytes())
_EXPLAINED = tomllib.loads((HERE / "explained.toml").read_text(encoding="utf-8"))["explained"]
_FAST = [
    case
    for case in [case for case in cases() if case.is_fast][::3]
    if not any(fnmatch.fnmatch(case.name, glob) for glob in _EXPLAINED)
]


def test_every_case_has_a_row() -> None:
    assert list(_TABLE) == [case.name for case in cases()]


@pytest.mark.parametrize("case", _FAST, ids=lambda case: case.name)
def test_row(case: Case) -> None:
    assert not [*differences(_TABLE[case.name], run(case))]

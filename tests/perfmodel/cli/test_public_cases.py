"""The fifteen public questions of ``docs/is-this-normal.md``: answers written by hand, and the facts that matter.

``python -m tests.examples`` writes outputs on that page again; it does not write the answers.
"""

import json
import re
import shlex
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.examples import ROOT
from tests.perfmodel.cli.command import Run
from tests.perfmodel.cli.test_diagnose_command import odds

Found = dict[str, Any]


def runs(found: Found, key: str) -> list[Any]:
    return [run[key] for run in found["observations"]]


# fmt: off
NETWORK, LINKS = "slow network between nodes", "slow links inside the node"
#: By case (and command): the verdict begins so, the first cause too; the fact that matters.
CASES: Final[dict[str, tuple[str, str, Callable[[Found], bool]]]] = {
    "1": ("WRONG MODEL SIZE; of the size that is configured: NOT NORMAL", "",
          lambda f: "says 7 G parameters, the configuration has 0.12" in f["notes"][0]),
    # 16 bytes of each of 6.74 G parameters are more than a device has: one node holds them.
    "2": ("NOT NORMAL", NETWORK, lambda f: odds(f)["normal"] < 0.02 and odds(f)[NETWORK] > 0.1),
    "3": ("NOT NORMAL", "wrong units", lambda f: odds(f)["wrong units"] > 0.9 and odds(f)[LINKS] < 0.05),
    "4": ("NOT NORMAL", "other hardware in some runs",
          lambda f: odds(f)["normal"] < 0.01 and "132 % of the dense peak" in f["notes"][0]),
    # The second has twice the batch and takes less than twice the time.
    "5": ("normal", "normal", lambda f: runs(f, "is_normal") == [True, True]
          and 2 * f["observations"][0]["expected_s"]["nominal"] > f["observations"][1]["expected_s"]["nominal"]),
    "6": ("BORDERLINE", "normal", lambda f: odds(f)[NETWORK] > 0.1),
    "7": ("NOT NORMAL", NETWORK, lambda f: odds(f)[NETWORK] > 0.5 and odds(f)["loader"] < 0.05
          and runs(f, "is_normal") == [True, False] and runs(f, "over_first")[1]["p95"] < 8.7 / 2.5),
    # Three times 26 GB, half of it from the other node, in 7.7 s: 0.6 GB/s of each of 8 devices at least.
    "8": ("nothing was timed", "",
          lambda f: f["causes"] == [] and 0.6e9 < f["enough_bytes_per_s_of_a_device"] < 3e9),
    # Beside other causes the open network is the usual one, which no run here had.
    "9": ("NOT NORMAL", NETWORK,
          lambda f: odds(f)[NETWORK] > 0.7 and odds(f)["normal"] < 0.1 and odds(f)["memory thrash"] < 0.05),
    # Both passes gather the other half of 13.5 GB, in 53 s.
    "10": ("NOT NORMAL", LINKS, lambda f: f["causes"][0]["size"] == pytest.approx(6.74e9 * 2 / 53, rel=0.3)),
    "11": ("NOT NORMAL", LINKS, lambda f: odds(f)["normal"] < 0.05 and odds(f)["host-bound"] < 0.05),
    "12": ("normal", "", lambda f: f["checks"][0]["causes"] == []),
    "12 again": ("slow", "NVLink is not used", lambda f: len(f["checks"][0]["causes"]) == 1),
    "13": ("slow", "about 2 of 8 adapters", lambda f: f["checks"][0]["nodes"] == 2),
    "14": ("NOT NORMAL", "straggler",
           lambda f: runs(f, "is_normal") == [True, False] and odds(f)["loader shared by a node"] < 0.05),
    # Sharding divides the 12 bytes of Adam's states, not 32 inputs of layers of 8 x 4,096 x 4,096 x 2 bytes.
    "15": ("nothing was timed", "", lambda f: all(
        memory["optimizer"] == pytest.approx(12 * 6.74e9 / devices, rel=0.01)
        and memory["activations"] == pytest.approx(32 * 8 * 4096 * 4096 * 2)
        for memory, devices in zip(runs(f, "memory_bytes"), (8, 32), strict=True))),
}
# fmt: on
#: Case, its block of commands, and the answer where the page does not show the output.
SHOWN: Final[list[tuple[str, str, str]]] = re.findall(
    r"^\*\*(\d+)\. .*?^```sh(?:ell)?\n(.*?)^```\n\n(?:Answer: (.*?)$)?",
    (ROOT / "docs" / "is-this-normal.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


def commands() -> dict[str, tuple[str, str]]:
    """The page's commands by case, as somebody types them, with its answer."""
    return {
        case + " again" * at: (line, answer)
        for case, block, answer in SHOWN
        for at, line in enumerate(block.splitlines())
    }


def answer_of(found: Found) -> str:
    """Verdict, likeliest cause and next measurement, as the page puts them."""
    if "checks" in found:
        return f"{found['verdict']}; {found['checks'][0]['causes'][0].partition(':')[0]}"
    name, share = next(iter(odds(found).items()), ("normal", 1.0))
    causes = [] if name == "normal" else [f"{name} {100 * share:.0f} %"]
    return "; ".join([found["verdict"], *causes, f"measure next: {found['next']['name']}"])


def test_every_case_of_the_page_stands_in_the_table() -> None:
    assert set(commands()) == set(CASES)
    assert {case for case, *_ in SHOWN} == {str(n) for n in range(1, 16)}
    # Of cases 7 and 12 the page shows the whole output, which is compared with its own test.
    assert [case for case, _, answer in SHOWN if not answer] == ["7", "12"]


@pytest.mark.parametrize("case", CASES)
def test_the_answer_to_a_public_question(
    run: Run, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    line, answer = commands()[case]
    monkeypatch.chdir(ROOT)
    result = run(*shlex.split(line, comments=True)[1:], "--json")
    found: Found = json.loads(result.stdout)
    causes = [*odds(found)] if "causes" in found else found["checks"][0]["causes"]
    verdict, first, holds = CASES[case]
    assert result.exit_code == (4 if verdict == "slow" else 0), result
    assert found["verdict"].startswith(verdict)
    assert [*causes, ""][0].startswith(first)
    assert not answer or answer == answer_of(found)
    assert holds(found), found

"""The worked examples print what stands below them; ``python -m tests.examples`` writes it again."""

import re
import time
from pathlib import Path
from typing import Final

import pytest

from tests.examples import ROOT, examples, output, pages, workplace

#: Compared to the letter; of the others the numbers count.
_GOLDEN: Final = {ROOT / "README.md", ROOT / "docs" / "tutorial.md"}
_NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?")


#: Of a case that somebody asked about, on whatever machine answers.
_MOST_S: Final = 60.0


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def words(text: str) -> str:
    """The text without its numbers and line ends: verdicts, causes and advice."""
    return " ".join(_NUMBER.sub("#", text).split())


@pytest.mark.long
@pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)
def test_examples_print_what_is_shown(page: Path) -> None:
    with workplace() as folder:
        for example in examples(page):
            begun_s = time.perf_counter()
            printed = output(example, folder)
            assert time.perf_counter() - begun_s < _MOST_S, example.source
            if page in _GOLDEN:
                assert printed == example.shown, example.source
            else:
                assert words(printed) == words(example.shown), example.source
                assert numbers(printed) == pytest.approx(numbers(example.shown), rel=0.02), printed


def test_every_block_of_commands_is_an_example() -> None:
    """A block without its output below would not be run."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text.count("```shell\n") + text.count("```python\n") == len(examples(page)), page
    assert len(pages()) >= 5


def test_answers_fit_80_columns_and_hold_three_caveats() -> None:
    """Commands alone stay whole, and complaints. ``--verbose`` shows all caveats."""
    for page in pages():
        for example in examples(page):
            commands = max(1, len(re.findall(r"^perfmodel ", example.source, re.MULTILINE)))
            if "--verbose" not in example.source:
                assert example.shown.count("\ncaveat: ") <= 3 * commands, example.source
            if example.language == "shell":
                lines = example.shown.splitlines()
                told = [s for s in lines if not s.lstrip().startswith(("$ ", "perfmodel: "))]
                assert all(len(line) <= 80 or line.count(" ") < 2 for line in told), example.source


_PERSON: Final = re.compile(
    r"^\| [^|]+ \| [^|]+\? \| \[[^]]+\]\(([\w-]+\.md)\) \| (.+) \| (.+) \|$", re.MULTILINE
)


def test_two_commands_answer_each_of_four_people() -> None:
    """Answer and reason of the table stand in what these commands print; they are run with their page."""
    rows = _PERSON.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert len(rows) == 4
    for page, answer, why in rows:
        found = examples(ROOT / "docs" / page)
        most = 2 if sum(each.source.count("\n") for each in found[:2]) <= 2 else 1
        first = found[:most]
        assert sum(each.source.count("\n") for each in first) <= 2, page
        shown = " ".join(" ".join(each.shown for each in first).split())
        assert why in shown, page
        assert set(numbers(answer)) <= set(numbers(shown)), page

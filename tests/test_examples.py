"""The worked examples run; ``python -m tests.examples`` writes anew what stands below them."""

from pathlib import Path

import pytest

from tests.examples import examples, output, pages, workplace

#: Output of these pages is held to the letter; elsewhere the table of tests/regression holds numbers.
GOLDEN = ("lenet-on-8-gpus", "layouts")


@pytest.mark.long
@pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)
def test_examples_run_and_two_pages_print_what_is_shown(page: Path) -> None:
    with workplace() as folder:
        for example in examples(page):
            printed = output(example, folder)
            assert printed or not example.shown, example.source
            assert page.stem not in GOLDEN or printed == example.shown, example.source


def test_every_block_of_commands_is_an_example() -> None:
    """A block without its output below would not be run."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text.count("```shell\n") + text.count("```python\n") == len(examples(page)), page
    assert len(pages()) >= 5

"""The worked examples print what stands below them; ``python -m tests.examples`` writes it anew."""

from pathlib import Path

import pytest

from tests.examples import examples, output, pages, workplace


@pytest.mark.long
@pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)
def test_examples_print_what_is_shown(page: Path) -> None:
    with workplace() as folder:
        for example in examples(page):
            assert output(example, folder) == example.shown, example.source


def test_every_block_of_commands_is_an_example() -> None:
    """A block without its output below would not be run."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text.count("```shell\n") + text.count("```python\n") == len(examples(page)), page
    assert len(pages()) >= 5

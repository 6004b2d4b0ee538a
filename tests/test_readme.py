"""The pages say what the records say."""

from tests.benchmarks.record import block, figures


def test_the_figures_in_the_pages_are_those_of_the_records() -> None:
    """``make record`` writes them."""
    for page, found in figures().items():
        assert block(page.read_text(encoding="utf-8")) == found, page

"""The README says what the records say."""

from tests.benchmarks.record import README, figures, readme_block


def test_the_figures_in_the_readme_are_those_of_the_records() -> None:
    """``make record`` writes them."""
    assert readme_block(README.read_text(encoding="utf-8")) == figures()

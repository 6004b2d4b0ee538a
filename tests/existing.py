"""What may be none and is not."""

from typing import TypeVar

T = TypeVar("T")


def existing(found: T | None) -> T:
    """It is there, for readers and for the type checker."""
    assert found is not None
    return found

"""One thing that a what-if can change."""

from collections.abc import Callable
from dataclasses import dataclass

from perfmodel.scenarios.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfField:
    """A name, what it means, and what it does to a scenario."""

    name: str
    meaning: str
    example: str
    apply: Callable[[Scenario, str], Scenario]
    """Raises ``ValueError`` or a user error for a value that makes no sense."""

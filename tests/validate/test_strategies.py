"""Settings of the judge of strategies: drawn anew by the seed, feasible, of every family."""

import pytest

from perfmodel.layout.layout import parse_layout
from validate.strategies import BUDGETS, Strategy, rounds, strategies


@pytest.fixture(scope="module")
def drawn() -> tuple[Strategy, ...]:
    return strategies(BUDGETS["standard"].stacks_per_layout, most_ranks=4, seed=5)


def test_at_least_thirty_settings_of_every_family_on_two_to_four_ranks(
    drawn: tuple[Strategy, ...],
) -> None:
    assert len(drawn) >= 30
    assert len({one.setting.label for one in drawn}) == len(drawn)
    for family in ("fsdp", "zero", "tensor", "pipeline"):
        sizes = {parse_layout(one.layout).world_size for one in drawn if one.family == family}
        assert sizes == {2, 3, 4}


def test_another_seed_draws_other_stacks(drawn: tuple[Strategy, ...]) -> None:
    again = strategies(BUDGETS["standard"].stacks_per_layout, most_ranks=4, seed=6)
    assert {one.workload for one in again} != {one.workload for one in drawn}


def test_fewer_ranks_leave_out_what_needs_more() -> None:
    found = strategies(1, most_ranks=2, seed=1)
    assert {parse_layout(one.layout).world_size for one in found} == {2}


def test_every_round_runs_every_setting_once_in_another_order(drawn: tuple[Strategy, ...]) -> None:
    first, second, *_ = rounds(drawn, BUDGETS["standard"], seed=5)
    assert len(first) == len(second) == len(drawn)
    assert [task.layout for task in first] != [task.layout for task in second]

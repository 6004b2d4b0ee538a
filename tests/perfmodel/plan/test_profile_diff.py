"""Two profiles: what changed beyond noise."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from perfmodel.errors import IncomparableRuns
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.plan.profile_diff import Estimate, changed_facts, compare_profiles, score
from perfmodel.workload import Workload
from tests.perfmodel.profiles import Machine, profile, stretched

ERROR = 0.03


def noisy(seed: int, *, slower_forward: float = 1.0) -> MeasuredMachine:
    """One machine, calibrated once more: every curve point has an error of its own."""
    rng = np.random.default_rng(seed)
    document = profile(Machine(relative_error=ERROR, residual=0.02))

    def factors(name: str) -> Iterator[float]:
        factor = slower_forward if name == "forward" else 1.0
        return (factor * float(np.exp(ERROR * rng.standard_normal())) for _ in count())

    workloads = tuple(
        replace(entry, phases=tuple(stretched(one, factors) for one in entry.phases))
        for entry in document.workloads
    )
    return replace(document, workloads=workloads, num_rounds=20)


def of_models(machine: MeasuredMachine, change: Callable[[Workload], Workload]) -> MeasuredMachine:
    models = (replace(entry, workload=change(entry.workload)) for entry in machine.workloads)
    return replace(machine, workloads=tuple(models))


def test_measuring_twice_changes_nothing() -> None:
    """At a false discovery rate of 5 %, at most about one comparison in twenty finds anything."""
    found = [
        sum(entry.is_change for entry in compare_profiles(noisy(k), noisy(100 + k)).differences)
        for k in range(10)
    ]
    assert sum(count > 0 for count in found) <= 2


def test_what_did_change_is_found_and_ranked() -> None:
    document = compare_profiles(noisy(1), noisy(2, slower_forward=1.4))
    changed = [entry for entry in document.differences if entry.is_change]
    forward = [entry for entry in document.differences if " forward" in entry.what]
    assert {entry.what for entry in forward} <= {entry.what for entry in changed}
    assert len(changed) <= len(forward) + 2
    assert document.differences[0].is_change
    for entry in forward:
        assert entry.new / entry.old == pytest.approx(1.4, rel=0.2)
        assert entry.z > 0
    moved = {entry.what for entry in document.predictions if entry.is_moved}
    assert "heavy, 1 x 16" in moved


def test_a_score_is_a_difference_over_the_uncertainty_of_both() -> None:
    old = Estimate(value=2.0, unit="s", error=0.03)
    new = Estimate(value=2.2, unit="s", error=0.04)
    assert score(old, new) == pytest.approx(np.log(1.1) / 0.05)
    added = [Estimate(value=v, unit="s", error=e, is_additive=True) for v, e in ((0, 3), (10, 4))]
    assert score(*added) == pytest.approx(2.0)


@pytest.mark.parametrize("side", ["old", "new"])
def test_what_only_one_holds_is_said(side: str) -> None:
    pair = profile(Machine()), profile(Machine(world_size=1))
    document = compare_profiles(*(pair if side == "old" else pair[::-1]))
    assert any(line.startswith(f"only in the {side}: all_reduce") for line in document.missing)
    assert [entry.what.split(", ")[1] for entry in document.predictions] == ["1 x 16"] * 2


def test_steps_are_compared_though_gradients_were_ready_at_other_times() -> None:
    def later(model: Workload) -> Workload:
        parameters = (replace(p, ready_fraction=p.ready_fraction**1.1) for p in model.parameters)
        return replace(model, parameters=tuple(parameters))

    old = profile(Machine())
    shifted = of_models(old, later)
    assert shifted.workloads != old.workloads
    document, same = (compare_profiles(old, new) for new in (shifted, old))
    assert [e.what for e in document.predictions] == [e.what for e in same.predictions] != []
    assert not any("no step is compared" in caveat for caveat in document.caveats)


def test_profiles_of_other_models_compare_no_step_and_say_so() -> None:
    old = profile(Machine())
    other = of_models(old, lambda model: replace(model, forward_flop=2 * model.forward_flop))
    document = compare_profiles(old, other)
    assert document.predictions == ()
    assert document.caveats[0].startswith("no step is compared")


def test_nothing_in_common_is_refused() -> None:
    empty = replace(profile(Machine(world_size=1)), workloads=(), steps=())
    nothing = replace(empty, ddp=replace(empty.ddp, determined=(False,) * 5))
    with pytest.raises(IncomparableRuns, match="common parameter"):
        compare_profiles(nothing, profile(Machine()))


def test_facts_that_differ_are_listed_by_path() -> None:
    old = {"software": {"torch": "2.14"}, "cpu": {"load_average_1min": 1}, "gpus": [{"uuid": "a"}]}
    new = {"software": {"torch": "2.15"}, "cpu": {"load_average_1min": 9}, "gpus": []}
    assert changed_facts(old, new) == {
        "software.torch": ("2.14", "2.15"),
        "gpus.0.uuid": ("a", "-"),
    }

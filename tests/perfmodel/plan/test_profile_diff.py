"""Two profiles: what changed beyond noise."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel.errors import IncomparableRuns
from perfmodel.machine.measured import CurvePoint, MeasuredMachine
from perfmodel.plan.profile_diff import Estimate, changed_facts, compare_profiles, score
from tests.perfmodel.profiles import Machine, profile

ERROR = 0.03


def noisy(seed: int, *, slower_forward: float = 1.0) -> MeasuredMachine:
    """One machine, calibrated once more: every curve point has an error of its own."""
    rng = np.random.default_rng(seed)
    document = profile(Machine(relative_error=ERROR, residual=0.02))
    workloads = []
    for entry in document.workloads:
        phases = []
        for one in entry.phases:
            update: dict[str, Any] = {}
            for name in ("input", "forward", "backward", "optimizer"):
                factor = slower_forward if name == "forward" else 1.0
                update[name] = tuple(_drawn(p, rng, factor) for p in getattr(one, name))
            phases.append(replace(one, **update))
        workloads.append(replace(entry, phases=tuple(phases)))
    return replace(document, workloads=tuple(workloads), num_rounds=20)


def _drawn(point: CurvePoint, rng: np.random.Generator, factor: float) -> CurvePoint:
    time_s = point.time_s * factor * float(np.exp(ERROR * rng.standard_normal()))
    return replace(point, time_s=time_s)


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


def test_what_only_one_holds_is_said() -> None:
    document = compare_profiles(profile(Machine()), profile(Machine(world_size=1)))
    assert any(line.startswith("only in the old: all_reduce") for line in document.missing)
    assert [entry.what.split(", ")[1] for entry in document.predictions] == ["1 x 16"] * 2


def test_steps_are_compared_though_gradients_were_ready_at_other_times() -> None:
    old = profile(Machine())
    shifted = []
    for entry in old.workloads:
        parameters = [
            replace(p, ready_fraction=p.ready_fraction**1.1) for p in entry.workload.parameters
        ]
        shifted.append(
            replace(entry, workload=replace(entry.workload, parameters=tuple(parameters)))
        )
    assert tuple(shifted) != old.workloads
    document = compare_profiles(old, replace(old, workloads=tuple(shifted)))
    same = compare_profiles(old, old)
    assert (
        [entry.what for entry in document.predictions] == [e.what for e in same.predictions] != []
    )
    assert not any("no step is compared" in caveat for caveat in document.caveats)


def test_profiles_of_other_models_compare_no_step_and_say_so() -> None:
    old = profile(Machine())
    other = [
        replace(
            entry, workload=replace(entry.workload, forward_flop=2 * entry.workload.forward_flop)
        )
        for entry in old.workloads
    ]
    document = compare_profiles(old, replace(old, workloads=tuple(other)))
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

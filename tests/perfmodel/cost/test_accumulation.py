"""Gradients of later micro-batches, added by known kernels and by known calls of the host."""

import math
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.accumulation import additions, calls_of_additions
from perfmodel.cost.traced import issued
from perfmodel.layout import parse_layout
from perfmodel.machine.measured import MeasuredMachine, TracedWorkload
from perfmodel.step import Cause
from perfmodel.workload import Phase
from tests.existing import existing
from tests.perfmodel.cost.test_model import GRADIENTS, HEAVY, issuing, terms
from tests.perfmodel.cost.test_step_law import COSTS
from tests.perfmodel.llama import traced
from tests.perfmodel.profiles import Machine, compute_rate, host_costs, profile


def timed_over(*rows: tuple[float, float]) -> MeasuredMachine:
    """A machine whose kernels moved bytes over the memory in seconds, one pair each."""
    rates = (compute_rate("memory", time_s=time_s, bytes_per_s=b / time_s) for b, time_s in rows)
    return replace(profile(Machine()), rates=tuple(rates), asynchronous=True)


def test_gradients_are_added_to_those_of_earlier_micro_batches() -> None:
    """Twice in three micro-batches: 1 ms to start, and three bytes per byte at 1 ns, as kernels over memory took."""
    document = timed_over((8e6, 9e-3), (8e9, 8.001))
    workload = existing(document.workload("heavy"))
    sizes = [each.size_bytes for each in workload.workload.parameters]
    once, thrice = (terms(document, accumulation=count) for count in (1, 3))
    found_s = thrice.compute_s[Cause.BACKWARD] - once.compute_s[Cause.BACKWARD]
    added_s = 1e-3 * len(sizes) + 3e-9 * sum(sizes)
    assert found_s[0] == pytest.approx(2 / 3 * added_s)
    three = parse_layout("accumulation=3")
    assert additions(replace(document, rates=()), three, sizes) == 0.0
    # The schedule of a pipeline divides the sum, two bytes per byte.
    divided_s = 1e-3 * len(sizes) + 2e-9 * sum(sizes)
    pair_s = additions(document, replace(three, pp=2), sizes)
    assert pair_s == pytest.approx((2 * added_s + divided_s) / 3)


def test_adding_gradients_takes_a_processor_what_their_pages_took() -> None:
    document = replace(timed_over((8e6, 9e-3), (8e9, 8.001)), asynchronous=False)
    once, thrice = (terms(document, accumulation=count) for count in (1, 3))
    assert np.array_equal(thrice.compute_s[Cause.BACKWARD], once.compute_s[Cause.BACKWARD])


def test_the_host_issues_an_addition_for_every_gradient() -> None:
    """As timed; else at what a call of autograd costs more than a view: as fitted, or in the mean of both passes.

    A single operator differs from the mean by 30 %, beside what the mean is off by.
    """
    document = issuing(shared_s=5e-3)
    host = host_costs(forward_s=1e-6, backward_s=2e-6, view_s=5e-7, relative_error=0.1)
    for known, call_s, log_error in (
        (None, 0.01 / HEAVY.workload.num_operators, 0.3),
        (host, 1.5e-6, math.hypot(0.3, 0.1)),
        (replace(host, addition_s=2.5e-6, addition_log_error=0.05), 2.5e-6, 0.05),
    ):
        found = replace(document, host=known)
        once, twice = (terms(found, accumulation=count) for count in (1, 2))
        more_s = twice.issue_s[Cause.BACKWARD] - once.issue_s[Cause.BACKWARD]
        assert more_s[0] == pytest.approx(GRADIENTS * call_s / 2)
        assert np.log(more_s / more_s[0]).std() == pytest.approx(log_error, rel=0.2)


def test_an_addition_takes_the_place_of_a_view() -> None:
    """10 ms for all calls and views of a backward pass, a view 0.3 of a call; a division replaces nothing."""
    document = profile(Machine())
    heavy = existing(document.workload("heavy"))
    trace, memory = traced("resnet18")
    workload = TracedWorkload.of(heavy, trace, memory)
    counts = issued(trace.at(micro_batch=8), Phase.BACKWARD)
    kernels, views = counts["backward_s"], counts["view_s"]
    assert views > 0
    call_s = 10e-3 / (kernels + 0.3 * views)
    num_gradients = len(heavy.workload.parameters)
    passes_s = np.array([5e-3]), np.array([10e-3])
    machine = replace(document, host=None)
    for text, each_s in (
        ("accumulation=4", 3 / 4 * 0.7 * call_s),
        ("accumulation=4 pp=2", (3 / 4 * 0.7 + 1 / 4) * call_s),
    ):
        layout = parse_layout(f"{text} micro_batch=8")
        found_s, log_error = calls_of_additions(machine, workload, layout, passes_s)
        assert found_s == pytest.approx(num_gradients * each_s)
        assert log_error == 0.3


def test_what_additions_take_is_uncertain() -> None:
    """By 10 % where kernels over memory tell it; of a single micro-batch nothing is added."""
    document = timed_over((8e6, 8.0), (8e9, 8e3))
    once, twice = (terms(document, accumulation=count) for count in (1, 2))
    added_s = twice.compute_s[Cause.BACKWARD] - once.compute_s[Cause.BACKWARD]
    assert np.log(added_s / added_s[0]).std() == pytest.approx(0.1, rel=0.2)


def test_gradients_beyond_and_below_the_kernels_that_were_timed() -> None:
    """A line through the two smallest, never below nothing; beyond the largest at its rate."""
    machine = timed_over((4e6, 9e-3), (2e6, 3e-3), (1e6, 2e-3))
    rates = machine.rates[::-1]
    product = compute_rate("matmul", time_s=1.0, bytes_per_s=3e6)
    machine = replace(machine, rates=(product, *machine.rates))
    two = parse_layout("accumulation=2")
    for size, time_s in ((0, 1e-3), (3e6, 6e-3), (8e6, 18e-3)):
        # One addition of three bytes per byte in two micro-batches.
        found_s = additions(machine, two, [int(size / 3)])
        assert found_s == pytest.approx(time_s / 2, rel=1e-5)
    steep = replace(machine, rates=(replace(rates[0], time_s=1e-4, bytes_per_s=1e10), rates[1]))
    assert additions(steep, two, [0]) == 0.0
    # One kernel tells no line; a device that was fitted to steps has its data sheet.
    assert additions(replace(machine, rates=(rates[0],)), two, [10**6]) == 0.0
    fitted = replace(machine, rates=(), device_costs=COSTS)
    assert additions(fitted, two, [10**6, 10**6]) == pytest.approx(6e6 / 1e12 / 2)
    assert additions(machine, parse_layout("accumulation=1"), [10**6]) == 0.0

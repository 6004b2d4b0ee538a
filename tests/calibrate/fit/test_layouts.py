"""Fit of what libraries of layouts add: costs that made the observations come back."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from calibrate.fit.ddp import _run_variance, fit_layouts
from perfmodel.answer import Question, timed_workload
from perfmodel.answer.measured import measured_steps_s
from perfmodel.cost import contention
from perfmodel.documents.observation import LayoutObservation, StackSpec
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.layout import parse_layout
from perfmodel.machine.measured import LayoutCost, MeasuredMachine, Residual
from tests.perfmodel.llama import document
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import PROVENANCE, Machine, profile
from tests.perfmodel.report.samples import plain_validation

LAYOUTS = ("fsdp={n}", "dp={n} zero=1", "tp={n}", "pp={n} accumulation={n}")
BATCHES = (4, 16, 64)
CALL_S, BYTE_S = 2e-3, 2e-10


@cache
def machine(sharing: float = 1.0) -> MeasuredMachine:
    found = profile(Machine(world_size=4, sharing=sharing))
    return replace(found, operators=costs_of_the_made_up_machine())


@cache
def observations(truth: MeasuredMachine) -> tuple[LayoutObservation, ...]:
    """Steps as a machine predicts them; every micro-batch is that of a stack of its own."""
    traced = document()
    texts = ["dp=1", *(text.format(n=n) for text in LAYOUTS for n in (2, 4))]
    asked = [(batch, f"{text} micro_batch={batch}") for batch in BATCHES for text in texts]
    workload = timed_workload(truth, traced.workload, trace=traced.trace, memory=traced.memory)
    questions = [
        Question(machine=truth, workload=workload, layout=parse_layout(text), num_draws=1)
        for _, text in asked
    ]
    found = []
    for (batch, text), draws_s in zip(asked, measured_steps_s(questions), strict=True):
        is_alone = text.startswith("dp=1")
        layout = parse_layout(text)
        step_s = float(draws_s[0])
        found.append(
            LayoutObservation(
                task=text,
                round=0,
                stack=StackSpec(layers=batch, width=64),
                layout=text,
                optimizer="adamw",
                step_s=((step_s,),) * layout.world_size,
                workload=traced.workload if is_alone else None,
                trace=traced.trace if is_alone else None,
                memory=traced.memory if is_alone else None,
            )
        )
    return tuple(found)


def with_costs(found: MeasuredMachine, call_s: float, byte_s: float) -> MeasuredMachine:
    """Ranks that share processors work as much longer as their compute does."""
    traced = document()
    workload = timed_workload(found, traced.workload, trace=traced.trace, memory=traced.memory)

    def cost(family: str, n: int) -> LayoutCost:
        slowed = 1.0 if family == "pipeline" else contention(workload, 16, n, than=1)
        return LayoutCost(
            family=family,
            world_size=n,
            call_s=call_s * slowed,
            byte_s=byte_s * slowed,
            log_error=0.0,
        )

    names = ("fsdp", "zero", "tensor", "pipeline")
    return replace(found, layouts=tuple(cost(name, n) for name in names for n in (2, 4)))


def by_family(costs: Sequence[LayoutCost]) -> dict[tuple[str, int], LayoutCost]:
    return {(cost.family, cost.world_size): cost for cost in costs}


@cache
def known_and_found() -> tuple[dict[tuple[str, int], LayoutCost], ...]:
    """Of ranks that share processors."""
    own = machine(sharing=1.5)
    truth = with_costs(own, CALL_S, BYTE_S)
    return by_family(truth.layouts), by_family(fit_layouts(own, observations(truth)))


def test_costs_that_made_the_steps_come_back() -> None:
    """The prior draws them towards none by a few percent at most where steps tell."""
    known, found = known_and_found()
    assert found.keys() == known.keys()
    for name, cost in found.items():
        if name[0] in ("fsdp", "tensor"):
            assert cost.call_s == pytest.approx(known[name].call_s, rel=0.1)
        assert cost.call_s <= known[name].call_s * 1.1


def test_ranks_that_share_processors_pay_as_much_more_as_their_compute() -> None:
    known, found = known_and_found()
    for family in ("fsdp", "zero", "tensor"):
        slowed = known[family, 4].call_s / known[family, 2].call_s
        assert found[family, 4].call_s == pytest.approx(slowed * found[family, 2].call_s)


def test_steps_that_the_model_explains_leave_no_cost_and_no_scatter() -> None:
    for cost in fit_layouts(machine(), observations(machine())):
        assert cost.call_s == pytest.approx(0.0, abs=1e-9)
        assert cost.log_error == pytest.approx(0.0, abs=1e-3)


def test_without_a_traced_stack_or_operators_there_is_no_fit() -> None:
    untraced = [entry for entry in observations(machine()) if entry.trace is None]
    assert fit_layouts(machine(), untraced) == ()
    assert fit_layouts(replace(machine(), operators=None), observations(machine())) == ()


def test_repetitions_that_scatter_are_no_error_of_the_model() -> None:
    """20 % up and down around each predicted step: the scatter of a family stays far below."""
    exact = observations(machine())
    scattered = [
        entry.model_copy(
            update={
                "step_s": tuple(tuple(s * factor for s in rank) for rank in entry.step_s),
                "trace": entry.trace if factor > 1 else None,
            }
        )
        for entry in exact
        for factor in (1.2, 1 / 1.2)
    ]
    for cost in fit_layouts(machine(), scattered):
        assert cost.log_error < 0.02


def test_repetitions_scatter_around_the_mean_of_their_setting() -> None:
    """Two that differ by 0.2 in log, and one alone, which tells nothing: 0.02 of variance."""
    [one] = [
        each
        for each in observations(machine())
        if each.layout == LAYOUTS[0].format(n=2) + " micro_batch=4"
    ]
    again = one.model_copy(
        update={"step_s": tuple(tuple(s * math.exp(0.2) for s in rank) for rank in one.step_s)}
    )
    assert _run_variance([[one, again], [one]]) == pytest.approx(0.02)
    assert _run_variance([[one, again], [again, one]]) == pytest.approx(0.02)
    assert _run_variance([[one]]) == 0.0


def test_one_step_is_explained_as_far_as_the_prior_lets_it() -> None:
    """The excess e of one step m, by hand: with A, B [s] what costs of the prior's size add to it,

    minimum of ((A u + B v - e) / 0.1 m)^2 + u^2 + v^2:   A u + B v = e s / (1 + s), s = (A^2 + B^2) / (0.1 m)^2
    """
    text = LAYOUTS[0].format(n=2) + " micro_batch=4"

    def step_s(call_s: float, byte_s: float) -> float:
        truth = with_costs(machine(), call_s, byte_s)
        [found] = [entry for entry in observations(truth) if entry.layout == text]
        return found.median_step_s

    base_s = step_s(0.0, 0.0)
    call_s, byte_s = 2 * (step_s(1e-3, 0.0) - base_s), step_s(0.0, 1e-9) - base_s
    long_s = 1.5 * base_s
    alone, one = [e for e in observations(machine()) if e.layout in ("dp=1 micro_batch=4", text)]
    slow = one.model_copy(update={"step_s": ((long_s,),) * 2})
    [cost] = fit_layouts(machine(), [alone, slow])
    told = (call_s**2 + byte_s**2) / (0.1 * long_s) ** 2
    assert 0.1 < told < 1000
    explained_s = call_s * cost.call_s / 2e-3 + byte_s * cost.byte_s / 1e-9
    assert explained_s == pytest.approx((long_s - base_s) * told / (1 + told), rel=1e-6)
    # Both costs leave no step free; what one family misses, twice more as that of all, is two values.
    missed = math.log(long_s / (base_s + explained_s))
    assert cost.log_error == pytest.approx(math.sqrt(3 / 2) * missed, rel=1e-3)


def test_what_runs_of_a_layout_missed_comes_in_place_of_what_ddp_missed() -> None:
    """Steps without a layout missed 40 %. Layouts that were run miss nothing, as their runs; others are unsure.

    Nor do runs on four ranks tell about eight, and an earlier validation that missed 60 % counts all the same.
    """
    unsure = replace(machine(), residual=Residual(single_log_errors=(0.4,), ddp_log_errors=(0.4,)))
    traced = document()
    workload = timed_workload(unsure, traced.workload, trace=traced.trace, memory=traced.memory)

    def spread(
        known: MeasuredMachine, text: str, validation: ValidationDocument | None = None
    ) -> float:
        layout = parse_layout(f"{text} micro_batch=16")
        question = Question(machine=known, workload=workload, layout=layout, validation=validation)
        [draws_s] = measured_steps_s([question])
        return float(np.log(draws_s).std())

    judged = with_costs(unsure, 0.0, 0.0)
    for text in ("fsdp=2", "dp=2 zero=1", "pp=2 accumulation=2", "fsdp=2 tp=2"):
        assert spread(unsure, text) > 0.35
        assert spread(judged, text) < 0.2
    assert spread(judged, "dp=2") > 0.35
    assert spread(judged, "fsdp=8") > 0.35
    before = plain_validation()
    rows = tuple(row.model_copy(update={"signed_error": 0.6}) for row in before.settings)
    earlier = before.model_copy(update={"settings": rows, "provenance": PROVENANCE})
    assert spread(judged, "fsdp=2", earlier) > 0.35

"""Clauses and judgements, by sums that can be done by hand."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from perfmodel.api.decisions import acceptance_terms
from perfmodel.documents.acceptance import AcceptanceTerms, Clause, ClauseKind, Verdict
from perfmodel.documents.budget import GoodputDocument
from perfmodel.documents.observation import StepObservation
from perfmodel.engine.job import FailureCause, Job
from perfmodel.errors import CalibrationUnavailable, InvalidDocument
from perfmodel.layout import Synchronisation
from perfmodel.machine.measured import MeasuredMachine, Repeatability
from perfmodel.plan.acceptance import LOSS, STRONG, judge, power, probability_kept, strong_error
from perfmodel.plan.delivered import Delivery, Quantity, quantity, rank_ratios
from perfmodel.plan.goodput import goodput
from tests.existing import existing
from tests.perfmodel.profiles import Machine, compute_rate, profile, setting_of
from tests.played_worker import NUM_STEPS, step_observation


def machine(*, gemm: float = 1e12, **changes: float) -> MeasuredMachine:
    rate = compute_rate("matmul", shape=(64, 64, 64), time_s=1e-3, flop_per_s=gemm, bytes_per_s=1e9)
    document = profile(Machine(relative_error=0.02, **changes))  # type: ignore[arg-type]
    return replace(
        document, rates=(rate,), repeatability=Repeatability(run={1: 0.05}, round=0.0, occasion=0.0)
    )


def clause(terms: AcceptanceTerms, kind: ClauseKind) -> Clause:
    return next(entry for entry in terms.clause if entry.kind is kind)


def verdict(
    terms: AcceptanceTerms, delivered: MeasuredMachine, kind: ClauseKind, **more: Any
) -> Verdict:
    judged = judge(terms, Delivery(machine=delivered, **more)).judged
    return next(entry.verdict for entry in judged if entry.clause.kind is kind)


def test_a_limit_leaves_room_for_the_uncertainty_of_both_measurements() -> None:
    terms = acceptance_terms(machine(), ["heavy"], confidence=0.95)
    found = clause(terms, ClauseKind.GEMM)
    assert found.reference == 1e12
    each = NormalDist().inv_cdf(1 - 0.05 / len(terms.clause))
    allowance = each * (math.sqrt(2) + 1) * 0.05
    assert found.at_least == pytest.approx(1e12 * math.exp(-allowance))
    assert found.at_most is None


def test_busbw_and_latency_are_those_of_the_all_reduce() -> None:
    """Two ranks: two messages of half the size; busbw is size over time."""
    terms = acceptance_terms(machine(), [], confidence=0.95)
    busbw = clause(terms, ClauseKind.BUSBW)
    assert busbw.size_bytes == 4**13
    assert busbw.reference == pytest.approx(4**13 / (2 * (1e-4 + 4**13 / 2 * 1e-9)))
    latency = clause(terms, ClauseKind.LATENCY)
    assert latency.size_bytes == 2**15
    assert latency.reference == pytest.approx(2 * (1e-4 + 2**14 * 1e-9))


def test_a_machine_as_good_passes_all_clauses_with_the_confidence() -> None:
    """Reference and delivered are drawn around one truth; one clause of m bears 1 / m of all false alarms."""
    rng = np.random.default_rng(5)
    passed = 0
    for _ in range(300):
        reference, delivered = 1e12 * np.exp(0.05 * rng.standard_normal(2))
        terms = acceptance_terms(machine(gemm=reference), [], confidence=0.6)
        passed += verdict(terms, machine(gemm=delivered), ClauseKind.GEMM) is Verdict.PASSED
    assert passed / 300 == pytest.approx(1 - 0.4 / len(terms.clause), abs=0.05)
    assert terms.each_confidence == pytest.approx(1 - 0.4 / len(terms.clause))


def test_the_power_of_a_clause_is_how_often_a_loss_is_not_passed() -> None:
    rng = np.random.default_rng(6)
    caught = 0
    for _ in range(300):
        reference, delivered = np.exp(0.05 * rng.standard_normal(2))
        terms = acceptance_terms(machine(gemm=1e12 * reference), [], confidence=0.95)
        worse = machine(gemm=(1 - LOSS) * 1e12 * delivered)
        caught += verdict(terms, worse, ClauseKind.GEMM) is not Verdict.PASSED
    found = power(clause(terms, ClauseKind.GEMM), confidence=terms.each_confidence)
    assert 0.5 < found < 0.95
    assert caught / 300 == pytest.approx(found, abs=0.07)


def test_an_error_that_is_small_enough_makes_a_clause_strong() -> None:
    terms = acceptance_terms(machine(), [], confidence=0.95)
    each = terms.each_confidence
    strong = strong_error(confidence=each) / math.sqrt(2)
    found = clause(terms, ClauseKind.GEMM).model_copy(
        update={"reference_error": strong, "delivered_error": strong}
    )
    assert power(found, confidence=each) == pytest.approx(STRONG)


@pytest.mark.parametrize(
    ("gemm", "expected"),
    [(1e12, Verdict.PASSED), (0.75e12, Verdict.CLOSE), (0.55e12, Verdict.FAILED)],
)
def test_uncertainty_decides_what_can_be_called(gemm: float, expected: Verdict) -> None:
    """Four clauses: z is 2.24, the limit at 0.76; 0.05 of error reaches 12 % to either side."""
    terms = acceptance_terms(machine(), [], confidence=0.95)
    assert verdict(terms, machine(gemm=gemm), ClauseKind.GEMM) is expected


def test_a_slow_network_breaks_its_clauses_and_no_other() -> None:
    terms = acceptance_terms(machine(), ["heavy"], confidence=0.95)
    document = judge(terms, Delivery(machine=machine(s_per_byte=1.5e-9)))
    assert document.failed == ("all-reduce busbw at 7 MiB, 2 ranks",)
    [broken] = [entry for entry in document.judged if entry.verdict is Verdict.FAILED]
    assert broken.suspects[0].startswith("link: busbw of the largest all-reduce by group: 2 ranks")


def test_probabilities_are_normal_in_log() -> None:
    terms = acceptance_terms(machine(), ["heavy"], confidence=0.95)
    step = clause(terms, ClauseKind.STEP)
    assert step.at_most is not None
    found = Quantity(value=step.at_most * math.exp(0.1), log_error=0.1, source="measured")
    assert probability_kept(step, found) == pytest.approx(NormalDist().cdf(-1))
    exact = Quantity(value=step.at_most, log_error=0.0, source="measured")
    assert probability_kept(step, exact) == 1.0


def test_a_step_is_taken_from_a_run_where_there_is_one() -> None:
    terms = acceptance_terms(machine(), ["heavy"], confidence=0.95)
    single, both = (entry for entry in terms.clause if entry.kind is ClauseKind.STEP)
    found = existing(quantity(Delivery(machine=machine()), single))
    assert (found.value, found.source) == (0.25, "measured")
    predicted = existing(quantity(Delivery(machine=machine()), both))
    assert predicted.source == "predicted"


def repetition(*step_s: float) -> StepObservation:
    setting = setting_of("heavy", len(step_s), 4, synchronisation=Synchronisation.NO_SYNC)
    alike = step_observation(setting)
    ranks = zip(alike.ranks, step_s, strict=True)
    changed = tuple(
        rank.model_copy(update={"step_s": (time_s,) * NUM_STEPS}) for rank, time_s in ranks
    )
    return alike.model_copy(update={"ranks": changed})


def test_the_slow_rank_is_named() -> None:
    """The machine was slower at the second repetition: what counts is within a repetition."""
    repetitions = [repetition(1.0, 1.0, 1.3, 1.0), repetition(2.0, 2.0, 2.6, 2.0)]
    assert rank_ratios(repetitions) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.3, 3: 1.0})
    terms = acceptance_terms(machine(), ["heavy"], confidence=0.95)
    document = judge(terms, Delivery(machine=machine(gemm=0.5e12), observations=repetitions))
    [broken] = [entry for entry in document.judged if entry.verdict is Verdict.FAILED]
    assert broken.suspects[0].startswith("rank 2 (node 1, device 0) takes 1.30 times as long")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("at_least", "at_most", "must have at_least"),
        ("[[clause]]", "[[clause]", "cannot be read"),
        ("size_bytes = 32768\n", "", "latency must have size_bytes"),
    ],
)
def test_clauses_are_read_back_and_broken_ones_are_named(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    terms = acceptance_terms(machine(), ["heavy"], confidence=0.95)
    path = tmp_path / "clauses.toml"
    path.write_text(terms.toml(), encoding="utf-8")
    assert AcceptanceTerms.read(path) == terms
    path.write_text(terms.toml().replace(old, new), encoding="utf-8")
    with pytest.raises(InvalidDocument, match=words):
        AcceptanceTerms.read(path)


def test_a_machine_that_tells_nothing_is_refused() -> None:
    with pytest.raises(CalibrationUnavailable, match="nothing to write"):
        acceptance_terms(profile(Machine(world_size=1)), [], confidence=0.9)


def test_several_ranks_without_a_collective_are_not_measured_and_said() -> None:
    terms = acceptance_terms(machine(), ["heavy"], confidence=0.95)
    silent = replace(machine(), collectives=(), steps=())
    document = judge(terms, Delivery(machine=silent))
    together = [entry for entry in document.judged if (entry.clause.world_size or 0) > 1]
    assert len(together) == 3
    assert {entry.verdict for entry in together} == {Verdict.NOT_MEASURED}
    assert document.unmeasured == ("no all-reduce was measured: nothing is said about any link",)
    [across] = judge(terms, Delivery(machine=machine())).unmeasured
    assert "no group crossed nodes" in across


def test_useful_time_is_a_clause_and_is_judged_from_the_stops_that_were_seen() -> None:
    def job(mtbf_hours: float) -> GoodputDocument:
        cause = FailureCause(name="any", mtbf_device_s=3600 * mtbf_hours)
        asked = Job(
            devices=512,
            work_s=30 * 86400.0,
            checkpoint_interval_s=900.0,
            checkpoint_write_s=20.0,
            causes=(cause,),
            detection_s=60.0,
            restart_s=300.0,
        )
        return goodput(asked, replicas=60, mtbf_stops=100)

    good = job(2000)
    terms = acceptance_terms(machine(), [], confidence=0.95, goodput=good)
    found = clause(terms, ClauseKind.GOODPUT)
    assert found.reference == good.effective_fraction.nominal
    assert 0 < existing(found.at_least) < found.reference < 1
    for delivered, expected in (
        (good, Verdict.PASSED),
        (job(300), Verdict.FAILED),
        (None, Verdict.NOT_MEASURED),
    ):
        assert verdict(terms, machine(), ClauseKind.GOODPUT, goodput=delivered) is expected

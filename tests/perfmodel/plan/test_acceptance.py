"""Clauses and judgements by sums that can be done by hand; clauses of a job on a machine that nobody has."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.api.decisions import acceptance_terms
from perfmodel.documents.acceptance import AcceptanceTerms, Clause, ClauseKind, Verdict
from perfmodel.documents.budget import GoodputDocument
from perfmodel.documents.observation import StepObservation
from perfmodel.engine.job import FailureCause, Job
from perfmodel.errors import (
    EXIT_OUT_OF_TOLERANCE,
    CalibrationUnavailable,
    InvalidDocument,
    UsageError,
)
from perfmodel.layout import Synchronisation
from perfmodel.machine.measured import MeasuredMachine, Repeatability
from perfmodel.plan.acceptance import (
    CALIBRATE,
    LOSS,
    STRONG,
    judge,
    power,
    probability_kept,
    strong_error,
)
from perfmodel.plan.delivered import RUNS, Delivery, JobRun, Quantity, quantity, rank_ratios
from perfmodel.plan.goodput import goodput
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.nccl_logs import HEALTHY_US, nccl_log
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
    assert document.having(Verdict.FAILED) == ("all-reduce busbw at 7 MiB, 2 ranks",)
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
    single, both = (
        existing(quantity(Delivery(machine=machine()), entry))
        for entry in terms.clause
        if entry.kind is ClauseKind.STEP
    )
    assert (single.value, single.source) == (0.25, "measured")
    assert both.source == "predicted"


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
        ("at_least = ", "at_most = 9e99\nat_least = ", "at_least and no other limit"),
        ("[[clause]]", "[[clause]", "cannot be read"),
        ("size_bytes = 32768\n", "", "latency must have size_bytes"),
        ("confidence = 0.95", "confidence = 1.0", "must be|less than 1"),
        ("confidence = 0.95", "confidence = 0.5", "greater than 0.5"),
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


MACHINE = profile(Machine(relative_error=0.1))
CLUSTER = "2 100GB/s, 8 10GB/s"
JOB: Final[dict[str, Any]] = {"layout": "dp=16 micro_batch=16", "cluster": CLUSTER}


def log(path: Path, nodes: int, slower: float) -> Path:
    """All-reduces that take ``slower`` times as long as healthy ones, on nodes of two."""
    times_us = {size: slower * us for size, us in HEALTHY_US.items()}
    path.write_text(nccl_log(times_us, nodes=nodes, per_node=2), encoding="utf-8")
    return path


def test_a_job_is_promised_at_its_number_of_ranks_and_at_its_sizes() -> None:
    """The second bucket holds seven gradients of 1 MiB."""
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB)
    step, network, spread = terms.clause
    point = pm.predict(MACHINE, "heavy", devices=16, batch=16, cluster=CLUSTER).points[0]
    assert step.reference == pytest.approx(point.step_s.nominal)
    assert (step.layout, step.world_size) == ("dp=16 micro_batch=16", 16)
    found = network.collective, network.world_size, network.size_bytes
    assert found == ("all_reduce", 16, 7 * 2**20)
    assert spread.kind is ClauseKind.SPREAD
    assert terms.device_name.endswith(CLUSTER)


def test_the_remedy_of_a_weak_clause_keeps_its_word() -> None:
    """A run on one node is the predicted ratio's reference; the clause then has the power that was told."""
    weak = clause(pm.acceptance_terms(MACHINE, "heavy", **JOB), ClauseKind.STEP)
    words = r"on (\d+) such devices .*finds it with (\d+) %"
    found = existing(re.search(words, existing(weak.remedy)))
    devices, told = int(found[1]), int(found[2])
    alone_s = pm.predict(MACHINE, "heavy", devices=devices, batch=16, cluster=CLUSTER)
    part_s = 1.1 * alone_s.points[0].step_s.nominal
    observed = [f"{devices} GPUs {part_s} s"] * RUNS
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB, observed=observed)
    step = clause(terms, ClauseKind.STEP)
    assert step.reference == pytest.approx(1.1 * weak.reference, rel=1e-6)
    assert step.reference_error < weak.reference_error
    reached = power(step, confidence=terms.each_confidence)
    assert reached >= told / 100 - 0.01  # one run was counted upon, three were given


def test_a_good_delivery_passes_and_a_loss_is_found_as_often_as_said() -> None:
    observed = ["2 GPUs 1 node 0.3 s"] * RUNS
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB, observed=observed)
    step = clause(terms, ClauseKind.STEP)
    rng = np.random.default_rng(7)

    def passed(loss: float) -> float:
        verdicts = []
        for _ in range(300):
            true_s = step.reference * math.exp(step.reference_error * rng.standard_normal())
            seen_s = true_s / (1 - loss) * math.exp(step.delivered_error * rng.standard_normal())
            judged = pm.judge(terms, observed=[f"16 GPUs {seen_s} s"] * RUNS).judged
            verdicts += [e.verdict for e in judged if e.clause == step]
        return verdicts.count(Verdict.PASSED) / len(verdicts)

    assert passed(0) == pytest.approx(terms.each_confidence, abs=0.03)
    assert 1 - passed(LOSS) == pytest.approx(
        power(step, confidence=terms.each_confidence), abs=0.07
    )


def test_logs_of_a_part_promise_the_network_and_logs_of_all_keep_it(tmp_path: Path) -> None:
    part = [log(tmp_path / f"part{i}", 4, 1.0) for i in range(RUNS)]
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB, logs=part)
    blind = pm.acceptance_terms(MACHINE, "heavy", **JOB)
    network = clause(terms, ClauseKind.BUSBW)
    assert network.reference_error < clause(blind, ClauseKind.BUSBW).reference_error
    verdicts = {
        slower: next(
            e.verdict
            for e in pm.judge(terms, logs=[log(tmp_path / f"all{slower}", 8, slower)]).judged
            if e.clause == network
        )
        for slower in (0.8, 4.0)
    }
    assert verdicts == {0.8: Verdict.PASSED, 4.0: Verdict.FAILED}
    short = pm.judge(terms, logs=part)  # of fewer ranks: says nothing of all
    assert {e.verdict for e in short.judged} == {Verdict.NOT_MEASURED}
    said = "the log of all_reduce on 8 ranks judges nothing: clauses are about all_reduce on 16"
    assert short.unmeasured == (said,) * RUNS


_LOOP = """
import sys, time
import torch
import torch.distributed as dist
import perfmodel as pm

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
model.register_full_backward_pre_hook(lambda *_: time.sleep(0.2 if dist.get_rank() else 0.02))
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(wrapped.parameters())
with pm.record(wrapped, optimizer, steps=5, warmup=2) as run:
    for _ in range(8):
        wrapped(torch.ones(4, 8)).sum().backward()
        optimizer.step()
pm.write_run(run, sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.real
def test_ranks_of_a_loop_say_which_of_them_is_slow(tmp_path: Path, run: Run) -> None:
    """Both ranks end each step together; when their gradients are ready tells them apart."""
    (tmp_path / "train.py").write_text(_LOOP, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, tmp_path / "train.py", tmp_path / "run"], check=True)
    clauses = tmp_path / "clauses.toml"
    terms = pm.acceptance_terms(MACHINE, "heavy", layout="dp=2 micro_batch=16")
    clauses.write_text(terms.toml(), encoding="utf-8")
    told = run("acceptance", "judge", clauses, "--run", tmp_path / "run", "--json")
    complaint(told, EXIT_OUT_OF_TOLERANCE)
    judged = {e["clause"]["kind"]: e for e in json.loads(told.stdout)["judged"]}
    # Of two ranks the faster is the median: 0.2 over 0.02.
    assert judged["spread"]["delivered"] == pytest.approx(0.2 / 0.02, rel=0.2)
    assert judged["spread"]["suspects"][0].startswith("rank 1 (node 0, ")
    (tmp_path / "run" / "rank-00001.json").unlink()
    with pytest.raises(InvalidDocument, match="every rank of one run, got 1 of 2"):
        pm.judge(terms, runs=[tmp_path / "run"])


def test_a_large_model_needs_a_machine_by_name() -> None:
    with pytest.raises(UsageError, match="needs a machine by name, got synthetic"):
        pm.acceptance_terms(MACHINE, "llama2-7b", layout="dp=16", cluster=CLUSTER)


def test_a_part_of_the_ranks_says_nothing_of_all() -> None:
    spread = clause(pm.acceptance_terms(MACHINE, "heavy", **JOB), ClauseKind.SPREAD)
    ranks = {f"rank {i}": 1.0 for i in range(16)}
    whole = JobRun(step_s=1.0, world_size=16, own_s=ranks)
    assert existing(quantity(Delivery(runs=(whole,)), spread)).value == pytest.approx(1.0)
    part = JobRun(step_s=1.0, world_size=4, own_s=ranks)
    assert quantity(Delivery(runs=(part,)), spread) is None


def test_a_remedy_never_finds_less_than_the_clause_does(tmp_path: Path) -> None:
    """A run on a part whose ratio is less certain than the prediction is not advised."""
    machine = pm.with_nodes_of(ROOT / "docs/records/calibration/profile.json", "dgx-h100")
    terms = pm.acceptance_terms(machine, "resnet18", layout="dp=8 micro_batch=4")
    assert clause(terms, ClauseKind.STEP).remedy == CALIBRATE
    paths = [log(tmp_path / f"{slower}.txt", 8, slower) for slower in (0.5, 4.0)]
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB, logs=paths)
    assert clause(terms, ClauseKind.BUSBW).remedy == "give more nccl-tests logs (--log)"

"""Clauses of a job on a machine that nobody has, and what makes them strong."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.documents.acceptance import AcceptanceTerms, Clause, ClauseKind, Verdict
from perfmodel.errors import EXIT_OUT_OF_TOLERANCE, InvalidDocument, UsageError
from perfmodel.plan.acceptance import LOSS, power
from perfmodel.plan.delivered import RUNS, Delivery, JobRun, quantity
from perfmodel.plan.promises import CALIBRATE
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.nccl_logs import HEALTHY_US, nccl_log
from tests.perfmodel.profiles import Machine, profile

MACHINE = profile(Machine(relative_error=0.1))
CLUSTER = "2 100GB/s, 8 10GB/s"
JOB: Final[dict[str, Any]] = {"layout": "dp=16 micro_batch=16", "cluster": CLUSTER}


def of_kind(terms: AcceptanceTerms, kind: ClauseKind) -> Clause:
    return next(clause for clause in terms.clause if clause.kind is kind)


def log(path: Path, nodes: int, slower: float) -> Path:
    """All-reduces that take ``slower`` times as long as healthy ones, on nodes of two."""
    times_us = {size: slower * us for size, us in HEALTHY_US.items()}
    path.write_text(nccl_log(times_us, nodes=nodes, per_node=2), encoding="utf-8")
    return path


def test_a_job_is_promised_at_its_number_of_ranks_and_at_its_sizes() -> None:
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB)
    step, network, spread = terms.clause
    point = pm.predict(MACHINE, "heavy", devices=16, batch=16, cluster=CLUSTER).points[0]
    assert step.reference == pytest.approx(point.step_s.nominal)
    assert (step.layout, step.world_size) == ("dp=16 micro_batch=16", 16)
    assert (network.collective, network.world_size) == ("all_reduce", 16)
    assert network.size_bytes == 7 * 2**20  # the second bucket holds seven gradients
    assert spread.kind is ClauseKind.SPREAD
    assert terms.device_name.endswith(CLUSTER)


def test_the_remedy_of_a_weak_clause_keeps_its_word() -> None:
    """A run on one node is the predicted ratio's reference; the clause then has the power that was told."""
    weak = of_kind(pm.acceptance_terms(MACHINE, "heavy", **JOB), ClauseKind.STEP)
    words = r"on (\d+) such devices .*finds it with (\d+) %"
    found = existing(re.search(words, existing(weak.remedy)))
    devices, told = int(found[1]), int(found[2])
    alone_s = pm.predict(MACHINE, "heavy", devices=devices, batch=16, cluster=CLUSTER)
    part_s = 1.1 * alone_s.points[0].step_s.nominal
    observed = [f"{devices} GPUs {part_s} s"] * RUNS
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB, observed=observed)
    step = of_kind(terms, ClauseKind.STEP)
    assert step.reference == pytest.approx(1.1 * weak.reference, rel=1e-6)
    assert step.reference_error < weak.reference_error
    reached = power(step, confidence=terms.each_confidence)
    assert reached >= told / 100 - 0.01  # one run was counted upon, three were given


def test_a_good_delivery_passes_and_a_loss_is_found_as_often_as_said() -> None:
    observed = ["2 GPUs 1 node 0.3 s"] * RUNS
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB, observed=observed)
    step = of_kind(terms, ClauseKind.STEP)
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
    network = of_kind(terms, ClauseKind.BUSBW)
    assert network.reference_error < of_kind(blind, ClauseKind.BUSBW).reference_error
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
    spread = of_kind(pm.acceptance_terms(MACHINE, "heavy", **JOB), ClauseKind.SPREAD)
    ranks = {f"rank {i}": 1.0 for i in range(16)}
    whole = JobRun(step_s=1.0, world_size=16, own_s=ranks)
    assert existing(quantity(Delivery(runs=(whole,)), spread)).value == pytest.approx(1.0)
    part = JobRun(step_s=1.0, world_size=4, own_s=ranks)
    assert quantity(Delivery(runs=(part,)), spread) is None


def test_a_remedy_never_finds_less_than_the_clause_does(tmp_path: Path) -> None:
    """A run on a part whose ratio is less certain than the prediction is not advised."""
    machine = pm.with_nodes_of(ROOT / "docs/records/calibration/profile.json", "dgx-h100")
    terms = pm.acceptance_terms(machine, "resnet18", layout="dp=8 micro_batch=4")
    assert of_kind(terms, ClauseKind.STEP).remedy == CALIBRATE
    paths = [log(tmp_path / f"{slower}.txt", 8, slower) for slower in (0.5, 4.0)]
    terms = pm.acceptance_terms(MACHINE, "heavy", **JOB, logs=paths)
    assert of_kind(terms, ClauseKind.BUSBW).remedy == "give more nccl-tests logs (--log)"

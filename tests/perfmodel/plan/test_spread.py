"""One search, whoever does the work."""

import sys
from pathlib import Path

import pytest

from perfmodel import layout_search as parallelism
from perfmodel.answer.inferred import Training
from perfmodel.cost.inferred import open_inferred
from perfmodel.documents.prediction import ParallelismPlanDocument
from perfmodel.errors import UsageError
from perfmodel.layout_search import Request, Workers, plan_parallelism, spread
from perfmodel.workload.transformer import NamedTransformer
from tests.perfmodel.cost.large_samples import MODEL, document

SEVERAL = (Path("a"), Path("b"), Path("c"))


def search(workers: Workers) -> ParallelismPlanDocument:
    training = Training(
        model=NamedTransformer(name="gpt-1.3b", shape=MODEL, sequence=1024),
        devices=16,
        devices_per_node=8,
        global_batch=64,
    )
    request = Request(training=training, capacity_bytes=40 * 2**30, top=50)
    return plan_parallelism(open_inferred(document().machine), request, argv=(), workers=workers)


def same(first: ParallelismPlanDocument, second: ParallelismPlanDocument) -> bool:
    return first.model_copy(update={"provenance": second.provenance}) == second


def test_processes_find_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelism, "_PIECE", 100)
    alone = search(Workers())
    assert alone.num_feasible > 200
    assert same(search(Workers(processes=2)), alone)


def test_the_size_of_the_pieces_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(Workers())
    monkeypatch.setattr(parallelism, "_PIECE", 7)
    assert [entry.layout for entry in search(Workers()).ranked] == [
        entry.layout for entry in whole.ranked
    ]


def test_a_dask_cluster_finds_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra distributed is missing")
    monkeypatch.setattr(parallelism, "_PIECE", 100)
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
    )
    with cluster:
        found = search(Workers(scheduler=cluster.scheduler_address))
    assert same(found, search(Workers()))


def test_no_dask_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install 'perfmodel\[distributed\]'"):
        spread(Path.as_posix, SEVERAL, Workers(scheduler="tcp://127.0.0.1:1"))


def test_a_scheduler_that_is_no_address_is_one_line() -> None:
    pytest.importorskip("distributed", reason="the extra distributed is missing")
    with pytest.raises(UsageError, match="must be a Dask scheduler"):
        spread(Path.as_posix, SEVERAL, Workers(scheduler="nonsense://x"))

"""Collectives measured here and judged: what is fitted, what is predicted, what a folder is good for."""

import fcntl
import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.campaign import Progress, write_plan
from calibrate.locks import lock_path
from perfmodel.cost.collectives import message_bytes, num_messages, work
from perfmodel.cost.group_cost import MessageLaw
from perfmodel.documents.verdicts import NetworkVerdict
from perfmodel.errors import NotFeasible, UsageError
from tests.regression.cases import unpacked
from validate.testbed import cluster, network
from validate.testbed.cluster import CollectiveRun, CollectiveSetting

#: Links of 25 MB/s; a message costs 30 us of CPU time that all ranks share.
LAW = MessageLaw(logs=np.log([[1e-4], [4e-8], [3e-5], [1e-10], [7.0]]))


@dataclass(slots=True)
class LawfulCluster:
    """Plays collectives by the law."""

    played: list[str] = field(default_factory=list)

    def play(self, setting: CollectiveSetting) -> CollectiveRun:
        self.played.append(setting.name)
        durations_s = [
            (lawful_s(setting.collective, size, setting.num_ranks),) * 3
            for size in setting.sizes_bytes
        ]
        return CollectiveRun(setting=setting, started_utc=0.0, durations_s=tuple(durations_s))


def lawful_s(collective: str, size_bytes: float, ranks: int) -> float:
    count = num_messages(collective, ranks)
    sent = np.array([[message_bytes(collective, size_bytes, ranks)]])
    return count * float(LAW.message_s(sent, work(collective, ranks))[0, 0])


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the settings that a lawful cluster has played."""
    lawful = LawfulCluster()
    monkeypatch.setattr(cluster, "running_server", lambda: nullcontext(lawful))
    monkeypatch.setattr(cluster, "refuse_without_rights", lambda: None)
    return lawful.played


def run(folder: Path, budget: str = "quick", **changes: object) -> NetworkVerdict:
    request = network.NetworkRequest(folder=folder, budget=budget, **changes)  # type: ignore[arg-type]
    return network.validate_network(request, on_progress=lambda _: None)


def test_collectives_that_obey_the_law_are_predicted_and_judged_again_without_a_server(
    played: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for another measurement says nothing about the pace; a campaign continues."""
    told: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        told.append(progress)
        fcntl.flock(other, fcntl.LOCK_UN)

    request = network.NetworkRequest(folder=tmp_path, budget="quick", resume=True)
    with lock_path().open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        document = network.validate_network(request, on_progress=on_progress)
    assert told[0].task.startswith("waiting for another measurement")
    assert [progress.is_waiting for progress in told] == [True] + [False] * len(played)
    assert document.passed
    assert len(document.gates) == 2
    for series in document.series:
        ours, carried = series.errors
        assert carried.method == "bus bandwidth carried on"
        assert ours.mape < min(0.03, carried.mape), series.name
    assert NetworkVerdict.read(tmp_path / "network.json") == document
    num_played = len(played)
    assert num_played == len(set(played))

    def refuse() -> None:
        raise NotFeasible("no namespaces here")

    monkeypatch.setattr(cluster, "refuse_without_rights", refuse)
    assert run(tmp_path, resume=True).series == document.series
    assert len(played) == num_played
    with pytest.raises(NotFeasible, match="no namespaces"):
        run(tmp_path / "empty")


def test_the_recorded_campaign_is_judged_again_without_measuring(tmp_path: Path) -> None:
    record = Path("docs/records/network").resolve()
    (tmp_path / "plan.json").write_bytes((record / "plan.json").read_bytes())
    unpacked(record / "runs.jsonl", tmp_path / "runs.jsonl")
    found, recorded = (
        run(tmp_path, "standard", mbit=140.0, seed=8, resume=True),
        NetworkVerdict.read(record / "network.json"),
    )
    assert (found.gates, found.passed) == (recorded.gates, recorded.passed)
    assert [each.name for each in found.series] == [each.name for each in recorded.series]
    for ours, theirs in zip(found.series, recorded.series, strict=True):
        assert [e.method for e in ours.errors] == [e.method for e in theirs.errors]
        for one, other in zip(ours.errors, theirs.errors, strict=True):
            assert one.mape == pytest.approx(other.mape, rel=1e-9)


def test_nothing_is_judged_that_was_fitted() -> None:
    """Every second size of 2, 4 and 8 ranks is fitted; 6 and 16 ranks are predicted whole."""
    ranks, sizes = (2, 4, 6, 8, 16), network.SIZES_BYTES
    points = [network.point(n, size, (1.0,)) for n in ranks for size in sizes]
    known, found = network.splits(points)
    fitted = {(p.ranks, p.size_bytes) for p in known}
    assert fitted == set(product((2, 4, 8), sizes[::2]))
    assert {split.name: {(p.ranks, p.size_bytes) for p in split.unknown} for split in found} == {
        "every second size": set(product((2, 4, 8), sizes[1::2])),
        "a group between": set(product((6,), sizes)),
        "the largest group": set(product((16,), sizes)),
    }


def test_rounds_are_medians_and_their_spread_is_the_error() -> None:
    """Rounds of 1, 2 and 4 s: median 2, standard deviation ln 2, of the median 1.2533 / sqrt 3 of it."""
    point = network.point(2, 1024, (4.0, 1.0, 2.0))
    assert point.time_s == 2.0
    assert point.relative_error == pytest.approx(1.2533 * np.log(2) / np.sqrt(3), rel=1e-4)


def test_a_campaign_predicts_before_it_measures(
    played: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, judged = network.settings("quick", seed=1, mbit=100)

    def stop(folder: Path, content: dict[str, Any]) -> None:
        write_plan(folder, content)
        raise StopIteration

    # Known settings alone: the predictions are there, and no run that they judge.
    monkeypatch.setattr(network, "write_plan", stop)
    with pytest.raises(StopIteration):
        run(tmp_path, mbit=100.0)
    assert set(played) == {setting.name for setting in known}
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["gates"] == network.LIMITS
    assert len(content["predicted"]) == sum(len(setting.sizes_bytes) for setting in judged)
    for row in content["predicted"]:
        truth_s = lawful_s(row["collective"], row["size_bytes"], row["ranks"])
        assert row["time_s"] == pytest.approx(truth_s, rel=0.2), row


def test_a_campaign_is_judged_by_what_was_predicted_and_not_fitted(
    played: list[str], tmp_path: Path
) -> None:
    document = run(tmp_path, mbit=100.0)
    assert len(played) == len(set(played))
    known, judged = network.settings("quick", seed=1, mbit=100)
    points = {(s.collective, s.num_ranks, size) for s in known for size in s.sizes_bytes}
    others = {(s.collective, s.num_ranks, size) for s in judged for size in s.sizes_bytes}
    assert not points & others
    assert sum(series.num_predicted for series in document.series) == len(others)
    with pytest.raises(UsageError, match=r"--mbit: must be as in .*plan.json, got 50"):
        run(tmp_path, mbit=50.0, resume=True)
    with pytest.raises(UsageError, match=r"--budget: must be as in .*plan.json, got standard"):
        run(tmp_path, "standard", mbit=100.0, resume=True)
    assert run(tmp_path, mbit=100.0, resume=True).series == document.series
    content = json.loads((tmp_path / "plan.json").read_text())
    for row in content["predicted"]:
        row["time_s"] *= 2
    write_plan(tmp_path, content)
    again = run(tmp_path, mbit=100.0, resume=True)
    assert all(series.errors[0].mape > 0.8 for series in again.series)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cluster.obstacle() == "no ip, tc, unshare, setpriv, mount"

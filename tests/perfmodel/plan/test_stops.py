"""Checkpoints of a plan, as typed and as a calibration timed them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.documents.plan import Failures
from perfmodel.engine.job import best_interval_s
from perfmodel.errors import UsageError
from perfmodel.machine.measured import CheckpointProfile, CurvePoint
from perfmodel.plan.goodput import stops_of
from tests.perfmodel.plan.plans import PLAN, TODAY, written
from tests.perfmodel.profiles import as_file

SIZES = (1e8, 1e9)


def timed(*, error: float = 0.0) -> CheckpointProfile:
    """1 s and 10 ns a byte to write, half of that to read."""

    def curve(scale: float) -> tuple[CurvePoint, ...]:
        return tuple(
            CurvePoint(at=size, time_s=scale * (1 + size * 1e-8), relative_error=error)
            for size in SIZES
        )

    return CheckpointProfile(write=curve(1.0), read=curve(0.5))


def with_timed(folder: Path, checkpoint: CheckpointProfile) -> None:
    for name in ("slow.json", "fast.json"):
        machine = pm.read_profile(folder / name)
        as_file(replace(machine, checkpoint=checkpoint)).write(folder / name)


TIMED = PLAN.replace("checkpoint_s = 30", 'checkpoint_size = "500MB"').replace(
    "restart_s = 240\n", ""
)


def test_by_hand_a_size_between_two_that_were_timed() -> None:
    """500 MB: 1 + 5 s to write, 3 s to read, 60 s until anybody notices."""
    asked = Failures(mtbf_device_hours=100, checkpoint_size="500MB", detection_s=60)
    found = stops_of(asked, timed(), where="a.json")
    assert found.is_timed
    np.testing.assert_allclose(found.write_s, 6.0)
    np.testing.assert_allclose(found.recovery_s, 63.0)
    assert found.mtbf_device_s == 360_000
    assert found.notes[0].startswith("a.json: a checkpoint of 477 MiB is written in 6 s")
    assert "starting and warming up are not in it" in found.notes[1]
    halves = Failures(
        mtbf_device_hours=100, checkpoint_size="1GB", checkpoint_writers=2, restart_s=7
    )
    both = stops_of(halves, timed())
    np.testing.assert_allclose(both.write_s, 6.0)
    np.testing.assert_allclose(both.recovery_s, 7.0)
    assert "2 processes, said not to slow each other" in both.notes[0]
    assert len(both.notes) == 1


def test_a_timed_checkpoint_without_uncertainty_is_the_same_plan_as_one_that_is_typed(
    tmp_path: Path,
) -> None:
    typed = PLAN.replace("checkpoint_s = 30", "checkpoint_s = 6")
    by_hand = pm.plan_options(
        written(tmp_path, typed.replace("restart_s = 240", "restart_s = 3")), today=TODAY
    )
    path = written(tmp_path, TIMED)
    with_timed(tmp_path, timed())
    found = pm.plan_options(path, today=TODAY)
    for ours, theirs in zip(found.ranked, by_hand.ranked, strict=True):
        assert ours.elapsed_s == theirs.elapsed_s
        assert ours.checkpoint_s is not None
        assert ours.checkpoint_s.nominal == pytest.approx(6)
        assert theirs.checkpoint_s is None
    row = found.ranked[0]
    mtbf_s = 2000 * 3600 / row.devices
    assert row.checkpoint_interval_s == pytest.approx(best_interval_s(write_s=6, mtbf_s=mtbf_s))
    assert any(caveat.startswith("slow.json: a checkpoint of") for caveat in found.caveats)


def test_uncertainty_of_a_checkpoint_widens_the_end_and_is_in_the_tornado(tmp_path: Path) -> None:
    often = TIMED.replace("mtbf_device_hours = 2000", "mtbf_device_hours = 20")
    path = written(tmp_path, often)
    with_timed(tmp_path, timed())
    sure = pm.plan_options(path, today=TODAY)
    with_timed(tmp_path, timed(error=0.7))
    uncertain = pm.plan_options(path, today=TODAY)
    width, wider = (
        document.options[0].row.elapsed_s.p95 / document.options[0].row.elapsed_s.p5
        for document in (sure, uncertain)
    )
    assert wider > 1.005 * width
    swings = {entry.assumption: entry for entry in uncertain.tornado}
    swing = swings["the time of a checkpoint"]
    assert swing.high_elapsed_s > 1.01 * swing.low_elapsed_s
    assert "storage of the job" in swing.measurement


def test_a_machine_known_from_runs_needs_to_be_told_whose_storage(tmp_path: Path) -> None:
    plan = Path(__file__).parents[3] / "docs/plan.7b.toml"
    text = plan.read_text(encoding="utf-8").replace("checkpoint_s = 30", 'checkpoint_size = "94GB"')
    records = plan.parent / "records"
    path = tmp_path / "plan.toml"
    path.write_text(text.replace("records/", f"{records}/"), encoding="utf-8")
    with pytest.raises(UsageError, match="checkpoint_profile: must be given with work"):
        pm.plan_options(path, today=TODAY)

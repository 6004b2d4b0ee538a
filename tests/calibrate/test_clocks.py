"""Samples of ``nvidia-smi`` and lines of the kernel, played; what they say becomes caveats."""

from pathlib import Path

import pytest

from calibrate.clocks import CLOCKS, faults_now, sampled
from perfmodel.documents.observation import GpuObservation, gpu_faults, read_observations

OURS = "GPU-aaaa"
#: Time, index, UUID, clocks [MHz], power [W], heat [C], use [%], memory [MiB], reasons.
SAMPLES = (
    ("2026/11/23 22:00:00.000", 0, OURS, 1980, 2619, 120.5, 40, 3, 4, "0x0000000000000001"),
    ("2026/11/23 22:00:02.000", 0, OURS, 1410, 2619, 690.0, 88, 99, 70000, "0x0000000000000060"),
    ("2026/11/23 22:00:04.000", 0, OURS, 1755, 2619, 700.0, 80, 98, 70000, "0x0000000000000004"),
    ("2026/11/23 22:00:06.000", 0, OURS, 1980, 2619, 650.0, 79, 97, 70000, "0x0000000000000000"),
    (
        "2026/11/23 22:00:06.000",
        1,
        "GPU-of-others",
        300,
        2619,
        70.0,
        95,
        99,
        1,
        "0x0000000000000040",
    ),
)
XID = "[Mon Nov 23 {}] NVRM: Xid (PCI:0000:19:00): {}, pid=4242, name=python3, GPU has fallen off the bus."


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver that knows only the old name of the reasons, and the kernel's log."""
    rows = "\\n".join(", ".join(map(str, row)) for row in (*SAMPLES, ("No devices",)))
    (tmp_path / "log").write_text(XID.format("21:00:00", 31) + "\n")
    for name, script in {
        "nvidia-smi": f"""case "$*" in
*event_reasons*) exit 2;;
*--loop*) printf '{rows}\\n'; exec sleep 60;;
*index,clocks*) echo "0, 0x0000000000000040";;
*) echo "0x0000000000000000";;
esac""",
        "dmesg": f"cat {tmp_path}/log",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_samples_and_errors_are_noted_beside_a_campaign(programs: Path) -> None:
    output = programs / "observations.jsonl"
    with sampled(output, {OURS}):
        clocks = output.with_name(CLOCKS)
        while not clocks.exists() or clocks.read_text().count("\n") < len(SAMPLES) + 1:
            pass
        with (programs / "log").open("a") as log:
            log.write(XID.format("22:00:05", 79) + "\n")
    (entry,) = read_observations(output)
    assert isinstance(entry, GpuObservation)
    # Three of our samples are at work; 0x20 and 0x40 of one of them are both heat.
    assert (entry.num_busy, entry.clock_hz) == (3, 1.755e9)
    assert (entry.most_power_w, entry.most_heat_c) == (700.0, 88.0)
    assert entry.slowed == pytest.approx({"heat": 1 / 3, "its power limit": 1 / 3})
    # The error of before is not of this campaign.
    assert len(entry.xid) == 1
    faults = gpu_faults([entry, entry])
    assert faults[0].startswith("GPU clocks were lowered by heat in 33 % of the samples")
    assert faults[1].startswith("Xid 79 on GPU 0000:19:00 (pid=4242")
    assert faults[1].endswith(", 2 times: see dmesg")
    # What trains there is held back by the same limit.
    assert len(faults) == 2


@pytest.mark.usefixtures("programs")
def test_the_doctor_sees_what_is_wrong_now() -> None:
    first, second = faults_now()
    assert first == "GPU 0: clocks lowered by heat now"
    assert second.startswith("Xid 31 on GPU 0000:19:00")


def test_nothing_is_sampled_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    output = tmp_path / "observations.jsonl"
    for gpus in ((), {OURS}):
        with sampled(output, gpus):
            pass
    assert list(tmp_path.iterdir()) == []
    assert faults_now() == ()

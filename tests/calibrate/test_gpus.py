"""Texts as ``nvidia-smi`` prints them on four kinds of machine, and the samples beside a campaign."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from calibrate import gpus
from calibrate.environment import Facts, place
from calibrate.gpus import CLOCKS, faults_now, sampled
from calibrate.launch import LaunchFlags
from perfmodel.documents.observation import GpuObservation, gpu_faults, read_observations
from perfmodel.errors import MeasurementFailed, UsageError
from tests.calibrate.samples import GIB, plain_gpu

UUIDS = [f"GPU-5f2b1c3d-0a1b-2c3d-4e5f-{index:012d}" for index in range(8)]
H100 = "\n".join(
    f"{index}, NVIDIA H100 80GB HBM3, {uuid}, 16, 16, 81559, 4, 700.00, 1980, 1980, Default, Disabled, 0, 550.54.15"
    for index, uuid in enumerate(UUIDS)
)
PCIE_BOX = (
    "0, NVIDIA GeForce RTX 4090, GPU-aaaaaaaa-0000-0000-0000-000000000000, "
    "8, 16, 24564, 512, 450.00, 210, 3105, Default, [N/A], [N/A], 560.35.03\n"
    "1, NVIDIA RTX A6000, GPU-bbbbbbbb-0000-0000-0000-000000000000, "
    "16, 16, 49140, 3, 300.00, 1800, 2100, Prohibited, [N/A], 2, 560.35.03\n"
)
MIG = (
    "0, NVIDIA A100-SXM4-40GB, GPU-cccccccc-0000-0000-0000-000000000000, "
    "16, 16, 40960, 0, 400.00, 1410, 1410, Default, Enabled, 0, 535.161.08\n"
)
HIDDEN = (
    "0, Tesla K80, GPU-dddddddd-0000-0000-0000-000000000000, "
    "[Unknown Error], [N/A], 11441, [N/A], [Not Supported], [N/A], 875, Default, [N/A], [Not Supported], 470.82.01\n"
)


Play = Callable[[str], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Puts a script in the place of ``nvidia-smi``."""

    def written(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return written


def listing(text: str) -> str:
    return f"[ \"$1\" != topo ] && cat <<'END'\n{text}\nEND"


def test_eight_h100_are_read_with_si_units(play: Play) -> None:
    """81559 MiB x 1048576 = 85520809984 B; 1980 MHz = 1.98e9 Hz."""
    play(listing(H100))
    found = gpus.query_gpus()
    assert [gpu["index"] for gpu in found] == list(range(8))
    assert [gpu["uuid"] for gpu in found] == UUIDS
    expected = {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 85_520_809_984,
        "max_clock_hz": 1.98e9,
        "power_limit_w": 700.0,
        "pcie_width": 16,
        "mig_mode": "Disabled",
        "driver": "550.54.15",
    }
    assert expected.items() <= found[0].items()
    assert gpus.query_gpu_topology() is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            PCIE_BOX,
            {"pcie_width": 8, "max_pcie_width": 16, "compute_mode": "Default"}
            | dict.fromkeys(("mig_mode", "uncorrected_ecc_errors")),
        ),
        (MIG, {"mig_mode": "Enabled"}),
        (
            HIDDEN,
            {"memory_bytes": 11_441 * 2**20}
            | dict.fromkeys(("pcie_width", "power_limit_w", "clock_hz")),
        ),
    ],
)
def test_what_a_driver_does_not_know_is_none(play: Play, answer: str, expected: Facts) -> None:
    play(listing(answer))
    assert expected.items() <= gpus.query_gpus()[0].items()


def test_the_table_of_links_is_kept_without_colours(play: Play) -> None:
    play("printf '\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0\\t X \\tNV18\\n'")
    assert gpus.query_gpu_topology() == "GPU0\tGPU1\nGPU0\t X \tNV18\n"


def test_processes_are_read(play: Play) -> None:
    play(listing(f"{UUIDS[0]}, 4242, python3, 71234\n{UUIDS[1]}, 77, [N/A], [N/A]"))
    found = gpus.query_gpu_processes()
    assert found == [
        {"gpu_uuid": UUIDS[0], "pid": 4242, "name": "python3", "memory_bytes": 71_234 * 2**20},
        {"gpu_uuid": UUIDS[1], "pid": 77, "name": None, "memory_bytes": None},
    ]


HANGS = "exec sleep 30"


@pytest.mark.parametrize(
    ("script", "processes"),
    [
        *((listing(text), []) for text in ("", "No devices were found", "\n", "a, b")),
        ("echo 'Failed to initialize NVML'; exit 9", None),
        (HANGS, None),
        (None, None),
    ],
)
def test_a_program_that_lists_nothing_fails_hangs_or_is_missing_is_as_none(
    play: Play, monkeypatch: pytest.MonkeyPatch, script: str | None, processes: list[Facts] | None
) -> None:
    monkeypatch.setattr("calibrate.processes._TIMEOUT_S", 0.1 if script == HANGS else 20.0)
    monkeypatch.setenv("PATH", "/nowhere")
    if script is not None:
        play(script)
    assert gpus.query_gpus() == []
    assert gpus.query_gpu_processes() == processes


def test_a_driver_that_refuses_a_field_still_names_its_gpus(play: Play) -> None:
    """Old drivers refuse the whole query for one unknown field."""
    row = f"0, Tesla K80, {UUIDS[0]}, 11441, 390.30"
    play(f'case "$1" in *mig.mode*) exit 2;; --query-gpu=*) echo "{row}";; esac')
    (gpu,) = gpus.query_gpus()
    assert (gpu["name"], gpu["uuid"], gpu["driver"]) == ("Tesla K80", UUIDS[0], "390.30")
    assert gpu["memory_bytes"] == 11441 * 2**20
    assert gpu["mig_mode"] is None


# What torch and nvidia-smi say of a node with ``count`` GPUs, and what a calibration makes of it.
def listed(count: int, *, mig: str = "Disabled") -> list[Facts]:
    return [plain_gpu(index) | {"mig_mode": mig} for index in range(count)]


def seen(count: int, words: str = "", name: str = "NVIDIA H100 80GB HBM3") -> Facts:
    own = [{"name": name, "uuid": f"GPU-{index}", "memory_bytes": GIB} for index in range(count)]
    return {"gpus": own, "words": words}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A node as nvidia-smi and torch show it."""

    def shown(smi: list[Facts], torch: Facts, *, visible: str | None = None) -> None:
        monkeypatch.setattr(gpus, "query_gpus", lambda: smi)
        monkeypatch.setattr(gpus, "ask_torch", lambda: torch)
        monkeypatch.setattr(gpus, "has_driver", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return shown


HERE = {"host": {"fingerprint": "0"}}
MIXED = {"gpus": [*seen(1)["gpus"], *seen(1, name="NVIDIA A100-SXM4-40GB")["gpus"]], "words": ""}
SLICE = seen(1, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")


@pytest.mark.parametrize(
    ("smi", "torch", "visible", "says"),
    [
        (
            8,
            seen(0, "Found no driver"),
            None,
            "of the 8 that nvidia-smi lists (Found no driver); in",
        ),
        (8, seen(0), "-1", "must name one of the 8 GPUs here, got '-1', of which torch sees 0"),
        (
            8,
            seen(0),
            "",
            "got '', of which torch sees 0; correct or unset it, or use --device-kind",
        ),
        (8, seen(1), "0,9", "got '0,9', of which torch sees 1"),
        (1, SLICE, None, "a GPU must be whole, got NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
        (2, MIXED, None, "one kind, got 1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100-SXM4-40GB"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_cannot_be_calibrated_are_refused(
    node: Callable[..., None], device: str, smi: int, torch: Facts, visible: str | None, says: str
) -> None:
    """Also where the user left the choice open: a machine with GPUs is never measured as a processor."""
    node(listed(smi), torch, visible=visible)
    with pytest.raises(UsageError) as caught:
        place(HERE, device, LaunchFlags())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    # The doctor says the same, before.
    assert gpus.problem(torch) == str(caught.value)


def test_mig_without_a_slice_is_named(node: Callable[..., None]) -> None:
    node(listed(1, mig="Enabled"), seen(0, "no CUDA-capable device"))
    with pytest.raises(UsageError, match="must be whole, got NVIDIA H100 80GB HBM3 with MIG on"):
        place(HERE, "auto", LaunchFlags())


def test_gpus_that_are_alike_are_taken(node: Callable[..., None]) -> None:
    node(listed(8), seen(2), visible="0,1")
    here = place(HERE, "auto", LaunchFlags())
    assert (here.device_kind, here.topology.ranks_per_node) == ("cuda", 2)
    assert here.gpus == ("GPU-0", "GPU-1")
    with pytest.raises(
        UsageError, match="ranks per node must be <= 2, the devices of this node, got 3"
    ):
        place(HERE, "cuda", LaunchFlags(nproc_per_node=3))
    # One rank needs one kind alone, and a processor none.
    node(listed(2), MIXED)
    assert place(HERE, "cuda", LaunchFlags(nproc_per_node=1)).gpus == ("GPU-0",)
    assert place(HERE, "cpu", LaunchFlags(nproc_per_node=1)).gpus == ()


def test_without_a_sign_of_a_gpu_torch_is_not_asked(
    node: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    node([], seen(0))
    monkeypatch.setattr(gpus, "ask_torch", lambda: pytest.fail("asked"))
    assert place(HERE, "auto", LaunchFlags(nproc_per_node=1)).device_kind == "cpu"


def test_a_driver_shows_without_its_tool(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container without nvidia-smi, a driver that does not answer, and a processor's node with the tool."""
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert not gpus.has_driver(tmp_path)
    play("echo 'failed because it could not communicate'; exit 9")
    assert not gpus.has_driver(tmp_path)
    slot = tmp_path / "sys/bus/pci/devices/0000:19:00.0"
    slot.mkdir(parents=True)
    (slot / "vendor").write_text("0x10de\n")
    (slot / "class").write_text("0x030200\n")
    assert gpus.has_driver(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert not gpus.has_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert gpus.has_driver(tmp_path)


def test_torch_is_asked_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This one really asks: without a GPU torch says why there is none.
    found = gpus.ask_torch()
    assert found["gpus"] or found["words"]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "torch cannot be asked" in gpus.ask_torch()["words"]


@pytest.mark.parametrize(
    ("processes", "held_bytes", "says"),
    [
        (
            [{"gpu_uuid": "GPU-1", "pid": 4242, "name": "python3", "memory_bytes": 70 * GIB}],
            0,
            "got python3 (pid 4242) with 70 GiB; end it",
        ),
        ([], 9 * GIB, "got 9 GiB held by a process that is not"),
    ],
)
def test_a_gpu_that_others_use_is_refused(
    node: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    processes: list[Facts],
    held_bytes: int,
    says: str,
) -> None:
    smi = listed(3)
    smi[1]["memory_used_bytes"] = held_bytes
    node(smi, seen(3))
    looks: list[float] = []
    monkeypatch.setattr("calibrate.gpus.time.sleep", looks.append)
    monkeypatch.setattr(gpus, "query_gpu_processes", lambda: processes)
    gpus.refuse_used(("GPU-0", "GPU-2"))
    gpus.refuse_used(())
    assert not looks
    with pytest.raises(MeasurementFailed) as caught:
        gpus.refuse_used(("GPU-0", "GPU-1"))
    assert str(caught.value).startswith("GPU 1: must be free to be measured, ")
    assert says in str(caught.value)
    assert str(caught.value).endswith("use free ones with CUDA_VISIBLE_DEVICES=0,2")
    # Ranks that have just ended may still be listed.
    assert len(looks) == 3


# Samples of ``nvidia-smi`` and lines of the kernel, played; what they say becomes caveats.
OURS = "GPU-aaaa"
#: Time, index, UUID, clocks [MHz], power [W], heat [C], use [%], memory [MiB], reasons.
SAMPLES = (
    ("2026/11/23 22:00:00.000", 0, OURS, 1980, 2619, 120.5, 40, 3, 4, "0x0000000000000001"),
    ("2026/11/23 22:00:02.000", 0, OURS, 1410, 2619, 690.0, 88, 99, 70000, "0x0000000000000060"),
    ("2026/11/23 22:00:04.000", 0, OURS, 1755, 2619, 700.0, 80, 98, 70000, "0x0000000000000004"),
    ("2026/11/23 22:00:06.000", 0, OURS, 1980, 2619, 650.0, 79, 97, 70000, "0x0000000000000000"),
    ("2026/11/23 22:00:06.000", 1, "GPU-others", 300, 2619, 70.0, 95, 99, 1, "0x0000000000000040"),
)
XID = "[Mon Nov 23 {}] NVRM: Xid (PCI:0000:19:00): {}, pid=4242, name=python3, GPU has fallen off the bus."


@pytest.fixture
def programs(play: Play, tmp_path: Path) -> Path:
    """A driver that knows only the old name of the reasons, and the kernel's log."""
    rows = "\\n".join(", ".join(map(str, row)) for row in (*SAMPLES, ("No devices",)))
    (tmp_path / "log").write_text(XID.format("21:00:00", 31) + "\n")
    play(f"""case "$*" in
*event_reasons*) exit 2;;
*--loop*) printf '{rows}\\n'; exec sleep 60;;
*index,clocks*) echo "0, 0x0000000000000040";;
*) echo "0x0000000000000000";;
esac""")
    (tmp_path / "dmesg").write_text(f"#!/bin/sh\ncat {tmp_path}/log\n")
    (tmp_path / "dmesg").chmod(0o755)
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
    faults = gpu_faults([entry, entry.model_copy(update={"slowed": {}})])
    assert faults[0].startswith("GPU clocks were lowered by heat in 17 % of the samples")
    assert faults[1].startswith("Xid 79 on GPU 0000:19:00 (pid=4242")
    assert faults[1].endswith(", 2 times: see dmesg")
    # What trains there is held back by the same limit; once in twenty is often.
    assert len(faults) == 2
    seldom, often = (entry.model_copy(update={"slowed": {"heat": s}}) for s in (0.049, 0.05))
    assert [len(gpu_faults([each])) for each in (seldom, often)] == [1, 2]


@pytest.mark.usefixtures("programs")
def test_the_doctor_sees_what_is_wrong_now() -> None:
    first, second = faults_now()
    assert first == "GPU 0: clocks lowered by heat now"
    assert second.startswith("Xid 31 on GPU 0000:19:00")


def test_nothing_is_sampled_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    output = tmp_path / "observations.jsonl"
    for uuids in ((), {OURS}):
        with sampled(output, uuids):
            pass
    assert list(tmp_path.iterdir()) == []
    assert faults_now() == ()

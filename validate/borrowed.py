"""Use case: one command for a borrowed device: look at it, calibrate, judge, pack, each within its time.

Every stage is a command as a user would type it, in a process of its own. It resumes what it finds, so that the
same campaign, started again, goes on where its time was over.
"""

import io
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, Self

from calibrate.campaign import OBSERVATIONS
from calibrate.environment import Placement, describe_environment, place
from calibrate.gpus import refuse_used
from calibrate.launch import Launch, Launcher, LaunchFlags
from calibrate.locks import folder_to_itself, machine_to_itself
from perfmodel.documents import command_line, file_sha256, installed_version
from perfmodel.documents.observation import gpu_faults, read_observations
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import (
    CampaignDocument,
    ModelsValidationDocument,
    StageRun,
    ValidationDocument,
)
from perfmodel.errors import (
    Interrupted,
    InvalidDocument,
    MeasurementFailed,
    PerfModelError,
    UsageError,
    why,
)
from perfmodel.files import MOST_BYTES, MOST_LOG_BYTES, Unreadable, read_bytes, write_atomically
from perfmodel.units import Bytes, Seconds, format_bytes, format_duration
from validate.judging import measured_runs, measured_steps
from validate.memory import MemorySummary, read_summary
from validate.validate import VALIDATION, judge_recorded

# The archive of a campaign: packed where a device was borrowed, read at home.
ARCHIVE: Final = "campaign.tar.gz"
CAMPAIGN: Final = "campaign.json"
MOST_PACKED_BYTES: Final[Bytes] = 12_000_000
#: What an archive holds. Raw operators of judged models are the first to stay behind.
_PACKED: Final = (
    CAMPAIGN,
    *("smoke.json", "*.txt", "*/clocks.csv"),
    *("*/plan.json", "*/observations.jsonl", "*/profile.json", "*/validation.json"),
    *(
        "*/models-*.json",
        "*/predicted-*.json",
        "*/in-place/plan.json",
        "*/in-place/observations.jsonl",
    ),
)
_MOST_MEMBERS: Final = 200
#: Of a long name or a time, which stand before their member.
_MOST_EXTENSION_BYTES: Final[Bytes] = 4096
_MOST_PARTS: Final = 4


def pack(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the archive of a campaign into its folder; return it, and the names of what was too large."""
    path, left_out = folder / ARCHIVE, list[str]()
    files = sorted({file for pattern in _PACKED for file in folder.glob(pattern)})
    try:
        while True:
            content = _packed(folder, files)
            if len(content) <= MOST_PACKED_BYTES or not files:
                write_atomically(path, content)
                return path, tuple(left_out)
            # What judges comes last.
            first = max(files, key=lambda file: ("in-place" in file.parts, file.stat().st_size))
            files.remove(first)
            left_out.append(str(first.relative_to(folder)))
    except OSError as error:
        raise PerfModelError(f"{path}: cannot be written: {why(error)}") from error


def _packed(folder: Path, files: Sequence[Path]) -> bytes:
    """Content of the archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for file in files:
            archive.add(file, arcname=str(file.relative_to(folder)), recursive=False)
    return content.getvalue()


class _Header(tarfile.TarInfo):
    """A header of an archive; extensions are short, since Python before 3.11.10 takes time with the square of one."""

    @classmethod
    def frombuf(cls, *arguments: Any) -> Self:
        """As ``tarfile`` reads it."""
        found = super().frombuf(*arguments)
        if not found.isreg() and found.size > _MOST_EXTENSION_BYTES:
            raise Unreadable("a header must be short, got a longer one")
        return found


def unpack(path: Path, into: Path) -> CampaignDocument:
    """Write the members of an archive into an empty folder; return what the campaign says of itself.

    Raises
    ------
    InvalidDocument
        If the archive is missing, cut short, too large, of another version, or holds what none of ours does.
    """
    try:
        content = read_bytes(path, most=MOST_LOG_BYTES)
        stream = io.BytesIO(content)
        with tarfile.open(fileobj=stream, mode="r:", tarinfo=_Header) as archive:
            for number, member in enumerate(archive):
                _refuse_strange(member, number)
                file = archive.extractfile(member)
                assert file is not None  # it is a regular file
                target = into.joinpath(*PurePosixPath(member.name).parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as written:
                    written.write(file.read())
    except FileExistsError as error:
        raise InvalidDocument(f"{path}: must hold every member once, got one twice") from error
    except (OSError, ValueError) as error:
        raise InvalidDocument(f"{path}: campaign cannot be read: {why(error)}") from error
    except RecursionError as error:
        raise InvalidDocument(
            f"{path}: must have one header a member, got many in a row"
        ) from error
    except (tarfile.TarError, EOFError) as error:
        raise InvalidDocument(
            f"{path}: must be a whole archive of perfmodel calibrate --campaign, got {error}; copy it again"
        ) from error
    if not (into / CAMPAIGN).exists():
        raise InvalidDocument(
            f"{path}: must hold {CAMPAIGN}, got none; perfmodel calibrate --campaign writes one"
        )
    try:
        return CampaignDocument.read(into / CAMPAIGN)
    except InvalidDocument as error:
        # The folder is a temporary one, which no user knows.
        raise InvalidDocument(str(error).replace(f"{into}/", f"{path}: ")) from error


def _refuse_strange(member: tarfile.TarInfo, number: int) -> None:
    """Refuse links, devices, names that leave the folder, and whatever is too large."""
    name = PurePosixPath(member.name)
    if number >= _MOST_MEMBERS:
        raise Unreadable(f"it must have at most {_MOST_MEMBERS} members, got more")
    if not member.isreg() or member.issparse():
        raise Unreadable(f"every member must be a regular file, got {member.name!r:.60}")
    if not any(name.match(pattern) for pattern in _PACKED) or (
        name.is_absolute() or ".." in name.parts or len(name.parts) > _MOST_PARTS
    ):
        raise Unreadable(f"it must hold files of a campaign alone, got {member.name!r:.60}")
    if member.size > MOST_BYTES:
        raise Unreadable(f"a member must have at most {format_bytes(MOST_BYTES)}, got more")


SMOKE: Final = "calibrate.smoke"
CALIBRATION: Final = "calibration"
PROFILE: Final = "profile.json"
#: Ranks of a first look start within this. [s]
_SMOKE_S: Final = 120.0
#: Between asking a stage to end and ending it. [s]
_GRACE_S: Final = 20.0
#: What a stage needs at least to say something. [s]
_LEAST_S: Final = 10.0
_WORDS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedRequest:
    """What the user asked for."""

    folder: Path
    limit_s: Seconds
    """For all stages together; those that are not done then wait for the next call."""
    device: str = "auto"
    truth: str | None = None
    num_ranks: int | None = None
    models: tuple[str, ...] = ()
    """Reference models to calibrate; none: those of a short campaign."""


class Stage(NamedTuple):
    """A command, and its share of the time."""

    name: str
    share: float
    arguments: tuple[str, ...]


def stages(request: BorrowedRequest, campaign: CampaignDocument) -> tuple[Stage, ...]:
    """What a campaign does, in order."""
    folder, kind = request.folder, campaign.device_kind
    device = ["--device-kind", kind]
    if campaign.truth is not None:
        device += ["--truth", campaign.truth]
    calibration = folder / CALIBRATION
    judged = ("--profile", str(calibration / PROFILE), "--budget", "quick")
    again = ("--soon", "--resume", "--out")
    whole = ("--models", ",".join(campaign.models), "--nproc", str(campaign.num_ranks))
    found = (
        Stage("doctor", 0.5, ("doctor",)),
        Stage(
            CALIBRATION,
            5.0,
            ("calibrate", *device, *whole, "--budget", "quick", *again[1:], str(calibration)),
        ),
        # The shortest first: what it leaves is for the others. Cut, it alone starts over: half more than an H100 took.
        Stage(
            "memory",
            2.5,
            ("validate", "memory", *_MEMORY, *device, "--out", str(folder / "memory")),
        ),
        Stage("steps", 4.0, ("validate", *judged, *again, str(folder / "steps"))),
        Stage("models", 5.0, ("validate", "models", *judged, *again, str(folder / "models"))),
    )
    return tuple(stage for stage in found if stage.name not in campaign.skipped)


_MEMORY: Final = ("--models", "torchvision:resnet18,gpt2-like", "--batches", "4")
#: Some that keep their device busy, one that waits for its host.
_MODELS: Final = {"cuda": ("resnet50", "gpt2", "lenet")}
_SMALL_MODELS: Final = ("lenet", "resnet18")


def carry_out(
    request: BorrowedRequest, launcher: Launcher, *, on_line: Callable[[str], None]
) -> tuple[CampaignDocument, Path]:
    """Run the stages that are not done; return how they ended, and the archive of it all.

    Raises
    ------
    UsageError
        If there is no such device, or the folder holds a campaign with other options.
    MeasurementFailed
        If the first look at the device fails.
    """
    here = place(
        describe_environment(request.truth),
        request.device,
        LaunchFlags(nproc_per_node=request.num_ranks),
    )
    if here.topology.num_nodes > 1:
        raise UsageError(
            f"--campaign: must run on one node, got {here.topology.num_nodes}; for several, "
            "perfmodel calibrate and perfmodel validate with --nnodes"
        )
    with folder_to_itself(request.folder):
        campaign = _opened(request, here)
        _look(request, here, launcher, on_line)
        pending = [each for each in stages(request, campaign) if each.name not in campaign.done]
        for run in _runs(pending, request, on_line):
            campaign = campaign.with_run(run)
            campaign.write(request.folder / CAMPAIGN)
        archive, left_out = pack(request.folder)
    for name in left_out:
        on_line(f"caveat: {name} is too large for the archive; it stays in {request.folder}")
    return campaign, archive


def _opened(request: BorrowedRequest, here: Placement) -> CampaignDocument:
    """The campaign in the folder, or a new one; other options than those of before are refused."""
    path = request.folder / CAMPAIGN
    is_virtual = here.device_kind == "virtual"
    skipped = {"doctor": "a virtual device has no machine"} if is_virtual else {}
    asked = CampaignDocument(
        version=installed_version("perfmodel") or "unknown",
        device_kind=here.device_kind,
        truth=here.truth,
        models=request.models or _MODELS.get(here.device_kind, _SMALL_MODELS),
        num_ranks=here.topology.ranks_per_node,
        skipped=skipped,
    )
    if not path.exists():
        asked.write(path)
        return asked
    found = CampaignDocument.read(path)
    for name in ("version", "device_kind", "truth", "models", "num_ranks"):
        before, now = getattr(found, name), getattr(asked, name)
        if before != now:
            raise UsageError(
                f"--campaign: {path} was begun with {name} = {_text(before)}, got {_text(now)}; "
                "repeat its options, or choose another folder"
            )
    return found


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _look(
    request: BorrowedRequest, here: Placement, launcher: Launcher, on_line: Callable[[str], None]
) -> None:
    """Let every rank train one step, unless that was seen before."""
    output = request.folder / "smoke.json"
    if output.exists():
        return
    on_line(f"smoke test: {here.topology.ranks_per_node} x {here.device_kind}")
    truth = () if here.truth is None else (here.truth,)
    queues = here.device_kind != "virtual"
    with machine_to_itself(on_line) if queues else nullcontext():
        refuse_used(here.gpus)
        launcher.run(
            Launch(
                arguments=(here.device_kind, str(output.resolve()), *truth),
                topology=here.topology,
                conditions=here.conditions,
                stall_timeout_s=_SMOKE_S,
            )
        )


def _runs(
    pending: Sequence[Stage], request: BorrowedRequest, on_line: Callable[[str], None]
) -> Iterator[StageRun]:
    """Stages one after another; what one leaves of its time is for those after it."""
    end_s = time.monotonic() + request.limit_s
    for number, stage in enumerate(pending):
        shares = sum(each.share for each in pending[number:])
        # Without a calibration there is nothing to judge: it may take all that is left.
        share = 1.0 if stage.name == CALIBRATION else stage.share / shares
        left_s, least_s = end_s - time.monotonic(), min(_LEAST_S, request.limit_s / 10)
        if left_s < least_s:
            return
        limit_s = max(least_s, left_s * share)
        on_line(f"{stage.name}: at most {format_duration(limit_s)}")
        run = _run(stage, request.folder / f"{stage.name}.txt", limit_s=limit_s)
        on_line(f"{stage.name}: {_ended(run)}")
        yield run
        if stage.name == CALIBRATION and not run.is_done:
            return


def _run(stage: Stage, log: Path, *, limit_s: Seconds) -> StageRun:
    """Run a stage, and ask it to end when its time is over: what it has measured is kept."""
    command = (sys.executable, "-m", "perfmodel", *stage.arguments)
    start_s = time.monotonic()
    with log.open("ab") as written:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT
        )
        exit_code: int | None = None
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            raise Interrupted(
                f"{stage.name}: stopped by the user; what was measured is kept; repeat the command"
            ) from None
        finally:
            _end(process)
    return StageRun(
        name=stage.name,
        command=command_line(("perfmodel", *stage.arguments)),
        exit_code=exit_code,
        limit_s=limit_s,
        took_s=time.monotonic() - start_s,
        words=_last_words(log),
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process to end its measurement tidily, and end it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip()[:_WORDS] for line in reversed(lines) if line.strip()), "")


def _ended(run: StageRun) -> str:
    took = f"after {format_duration(run.took_s)}"
    if run.exit_code is None:
        return f"not finished {took}, repeat the command to go on"
    if run.is_done:
        return f"done {took}" if run.exit_code == 0 else f"out of tolerance {took}"
    return f"failed with exit code {run.exit_code} {took}: {run.words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What the records of a campaign say, judged wherever they are."""

    campaign: CampaignDocument
    profile: ProfileDocument | None = None
    steps: ValidationDocument | None = None
    models: tuple[ModelsValidationDocument, ...] = ()
    memory: MemorySummary | None = None
    notes: tuple[str, ...] = field(default=())
    """Why a part is missing."""


def judge(folder: Path, campaign: CampaignDocument) -> Verdicts:
    """Judge the records in a folder; measures nothing.

    Steps are compared again, predictions as they were written before the runs. Verdicts on models and memory are
    read, and must be on the records beside them.
    """
    notes = [f"{name}: not part of it: {why}" for name, why in campaign.skipped.items()]
    done = campaign.done | {*campaign.skipped}
    notes += [
        f"{stage.name}: {_ended(stage)}" for stage in campaign.stages if stage.name not in done
    ]
    for records in sorted(folder.glob(f"*/{OBSERVATIONS}")):
        faults = gpu_faults(read_observations(records))
        notes += [f"{records.parent.name}: {fault}" for fault in faults]
    path = folder / CALIBRATION / PROFILE
    if not path.exists():
        return Verdicts(campaign=campaign, notes=(*notes, "no profile: nothing to judge"))
    profile = ProfileDocument.read(path)
    steps = None
    if (folder / "steps" / OBSERVATIONS).exists():
        try:
            steps = judge_recorded(profile.machine, folder / "steps")
        except MeasurementFailed as error:
            notes.append(f"steps: {error}")
    runs = folder / "memory" / VALIDATION
    return Verdicts(
        campaign=campaign,
        profile=profile,
        steps=steps,
        models=_models(folder / "models", profile),
        memory=read_summary(runs) if runs.exists() else None,
        notes=tuple(notes),
    )


def _models(folder: Path, profile: ProfileDocument) -> tuple[ModelsValidationDocument, ...]:
    """Verdicts on models, each of them on the runs beside it."""
    found = []
    for path in sorted(folder.glob("models-*.json")):
        document = ModelsValidationDocument.read(path)
        runs = folder / OBSERVATIONS
        measured = measured_steps(measured_runs(read_observations(runs)))
        is_theirs = (
            document.profile_digest == profile.machine.digest
            and document.observations_sha256 == file_sha256(runs)
            and all(
                row.setting in measured and measured[row.setting].value_s == row.measured_s
                for row in document.models
            )
        )
        if not is_theirs:
            raise InvalidDocument(
                f"{path}: must be a verdict on the profile and the runs beside it, got one on others; "
                "fetch the archive again"
            )
        found.append(document)
    return tuple(found)


def unfinished(request: BorrowedRequest, campaign: CampaignDocument) -> tuple[str, ...]:
    """Stages that the next call has to run."""
    names = (stage.name for stage in stages(request, campaign))
    return tuple(name for name in names if name not in campaign.done)

"""The process that plays the cluster, and the settings that it runs one after another.

Predictions are on disk before the first run that they judge, every finished run before the next begins.
What is on disk is not run or predicted again: an interrupted campaign continues where it stopped.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from calibrate.campaign import PLAN, Progress, read_plan, write_plan
from calibrate.locks import folder_to_itself, machine_to_itself
from calibrate.processes import usable_cores
from perfmodel.errors import (
    InvalidDocument,
    MeasurementFailed,
    NotFeasible,
    UsageError,
    why,
)
from perfmodel.statistics import Interval
from perfmodel.units import Seconds
from validate.testbed.links import BUSY, STEAL
from validate.testbed.records import (
    CollectiveRun,
    CollectiveSetting,
    HostUse,
    Job,
    Run,
    TrainingRun,
    TrainingSetting,
    append_run,
    read_runs,
)

_TOOLS: Final = ("ip", "tc", "unshare", "setpriv", "mount")
#: Importing torch on a busy machine.
_START_LIMIT_S: Final = 120.0
#: Beyond the time that a job gives its ranks: wiring and tidying up.
_MARGIN_S: Final = 30.0
_REFUSAL: Final = (
    "{command}: network namespaces with shaped links must be allowed here, got {found}; "
    "run as root, or where user namespaces are allowed, on Linux with iproute2 and util-linux"
)
#: A private /run, because iproute2 keeps namespaces there; then the trial or the server.
_PRIVATE_RUN: Final = "mount -t tmpfs tmpfs /run && mkdir /run/netns && "
_TRIAL: Final = (
    "ip netns add trial && ip -n trial link add name trial0 type veth peer name trial1 && "
    "tc -n trial qdisc add dev trial0 root tbf rate 8mbit burst 70000 limit 100000 && "
    "ip netns add other && ip netns del other && ip netns del trial"
)
#: Ranks may take this long, whatever they do: nothing in the plan comes near.
_LIMIT_S: Final = 120.0
#: A run from which other guests of the host took more than this share of the cores is repeated.
STEAL_LIMIT: Final = 0.02
#: So often at most. The hypervisor's counter alone decides: no duration and no prediction is looked at.
_MOST_ATTEMPTS: Final = 3

Setting: TypeAlias = TrainingSetting | CollectiveSetting


class Cluster(Protocol):
    """Plays jobs."""

    def play(self, job: Job) -> dict[str, Any]:
        """Run one job; return the server's reply."""


def _isolation() -> tuple[str, ...]:
    """Command that runs another in private namespaces, and takes it down with this process.

    The other becomes the first process of a process namespace: with it all its children end, and
    with the last of them their network namespaces.
    """
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return (
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", *user, "--mount", "--net", "--pid", "--fork"),
        *("--kill-child=SIGKILL", "--mount-proc"),
    )


def obstacle() -> str | None:
    """Why the testbed cannot run here, or None: tried in namespaces that vanish again."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        return f"no {', '.join(missing) or 'Linux'}"
    command = (*_isolation(), "sh", "-c", _PRIVATE_RUN + _TRIAL)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode == 0:
        return None
    words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return words[:200]


def refuse_without_rights(command: str) -> None:
    """Refuse a command that cannot run here."""
    found = obstacle()
    if found is not None:
        raise NotFeasible(_REFUSAL.format(command=command, found=found))


@contextmanager
def running_server() -> Iterator[Cluster]:
    """A server that has imported torch; whatever happens, nothing of it is left afterwards."""
    serve = f"{_PRIVATE_RUN} exec {sys.executable} -m validate.testbed.server"
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as complaints,
        subprocess.Popen(
            (*_isolation(), "sh", "-c", serve),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            bufsize=1,
            # Ctrl-C is for this process; the server ends because this one takes it down.
            start_new_session=True,
        ) as process,
    ):
        server = Server(process, complaints)
        try:
            server.hear(limit_s=_START_LIMIT_S)
            yield server
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    complaints: Any

    def play(self, job: Job) -> dict[str, Any]:
        """Run one job."""
        assert self.process.stdin is not None
        self.process.stdin.write(job.model_dump_json() + "\n")
        self.process.stdin.flush()
        reply = self.hear(limit_s=job.limit_s + _MARGIN_S)
        if "error" in reply:
            raise MeasurementFailed(f"{job.setting.name}: {reply['error']}")
        return reply

    def hear(self, *, limit_s: Seconds) -> dict[str, Any]:
        """Wait for one line of the server."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.complaints.seek(0)
            lines = self.complaints.read().strip().splitlines() or ["it left no word"]
            raise MeasurementFailed(f"testbed: the server fell silent: {lines[-1][:300]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def play(cluster: Cluster, setting: Setting) -> Run:
    """Run one setting; up to three times where other guests of the host disturb it: the quietest run is kept."""
    runs: list[Run] = []
    while not runs or (len(runs) < _MOST_ATTEMPTS and runs[-1].host.steal_share > STEAL_LIMIT):
        reply = cluster.play(Job(setting=setting, limit_s=_LIMIT_S))
        runs.append(_run(setting, reply))
    kept = min(runs, key=lambda run: run.host.steal_share)
    return kept.model_copy(update={"attempts": len(runs)})


def _run(setting: Setting, reply: dict[str, Any]) -> Run:
    """What the ranks tell; their clocks are one clock, and rank 0 reads the counters."""
    ranks = reply["ranks"]
    before, after = ranks[0]["before"], ranks[0]["after"]
    sent = {link: after["counters"][link] - before["counters"][link] for link in before["counters"]}
    own_s = sum(rank["after"]["cpu_s"] - rank["before"]["cpu_s"] for rank in ranks)
    busy_s, steal_s = sent.pop(BUSY), sent.pop(STEAL)
    common: dict[str, Any] = {
        "setting": setting,
        "started_utc": reply["started_utc"],
        "host": HostUse(
            window_s=after["at_s"] - before["at_s"],
            own_cpu_s=own_s,
            foreign_cpu_s=max(0.0, busy_s - own_s),
            steal_cpu_s=max(0.0, steal_s),
            num_cores=usable_cores(),
            is_realtime=reply["is_realtime"],
        ),
    }
    if isinstance(setting, CollectiveSetting):
        sizes = list(zip(*(rank["sizes"] for rank in ranks), strict=True))
        n = setting.fabric.num_ranks
        return CollectiveRun(
            **common,
            durations_s=tuple(_durations(of_ranks[:n]) for of_ranks in sizes),
            cpu_s=tuple(sum(r["cpu_s"] for r in of_ranks) / setting.copies for of_ranks in sizes),
        )
    # A step has ended when it has ended on every rank.
    ends_s = np.max([rank["ends_s"] for rank in ranks], axis=0)
    common |= {
        "step_s": tuple(np.diff(ends_s).tolist()),
        "link_bytes": {link: int(size) for link, size in sent.items()},
    }
    late_s = np.concatenate([rank["late_s"] for rank in ranks])
    return TrainingRun(
        **common,
        bucket_bytes=tuple(ranks[0]["bucket_bytes"]),
        late_mean_s=float(late_s.mean()),
        late_p99_s=float(np.quantile(late_s, 0.99)),
    )


def _durations(of_ranks: tuple[dict[str, Any], ...]) -> tuple[Seconds, ...]:
    """From the last start to the last end: earlier ranks only wait."""
    starts_s, ends_s = (
        np.max([r[key] for r in of_ranks], axis=0) for key in ("starts_s", "ends_s")
    )
    return tuple((ends_s - starts_s).tolist())


#: Settings that the model is fitted on, and those that judge it.
CALIBRATION: Final = "calibration.jsonl"
RUNS: Final = "runs.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRequest:
    """What the user asked for."""

    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Runs settings that are not on disk yet."""

    cluster: Cluster
    total: int
    on_progress: Callable[[Progress], None]
    done: int = 0

    def run(self, settings: Sequence[Setting], output: Path) -> None:
        """Run what is missing, one line each."""
        finished = {run.setting.name for run in read_runs(output)}
        for setting in settings:
            if setting.name not in finished:
                append_run(output, play(self.cluster, setting))
            self.done += 1
            self.on_progress(Progress(done=self.done, total=self.total, task=setting.name))


@contextmanager
def open_campaign(
    request: CampaignRequest, *, command: str, total: int, on_progress: Callable[[Progress], None]
) -> Iterator[Campaign]:
    """Ranks that are ready to run, on a machine that nobody else measures meanwhile."""
    refuse_without_rights(command)
    with (
        folder_to_itself(request.folder),
        machine_to_itself(
            lambda words: on_progress(Progress(done=0, total=total, task=words, is_waiting=True))
        ),
        running_server() as cluster,
    ):
        yield Campaign(
            cluster=cluster,
            total=total,
            on_progress=on_progress,
        )


def refuse_earlier_runs(request: CampaignRequest, first: str) -> None:
    """Refuse a folder that holds ``first``, the file a campaign begins with, without ``--resume``."""
    output = request.folder / first
    if not request.resume and output.exists():
        raise UsageError(
            f"--out: must hold no runs yet, got {output}; "
            "continue with --resume, or choose another folder"
        )


def predict_once(
    folder: Path,
    settings: Sequence[TrainingSetting],
    predict: Callable[[TrainingSetting], Interval],
    *,
    options: Mapping[str, object],
    terms: Mapping[str, object],
) -> dict[str, Interval]:
    """Predicted steps by name: those of an earlier start, or new ones, written before the first run. [s]

    ``options``: what the user chose that decides on the settings, by the names of the flags.
    ``terms``: what stands beside the predictions, such as gates and the law that they follow.
    """
    path = folder / PLAN
    if not path.exists():
        predicted = {setting.name: predict(setting) for setting in settings}
        rows = {name: asdict(step_s) for name, step_s in predicted.items()}
        write_plan(folder, {**options, **terms, "predicted_s": rows})
        return predicted
    raw = read_plan(folder)
    try:
        predicted = {name: Interval(**row) for name, row in raw["predicted_s"].items()}
        earlier = ", ".join(f"{option} {raw[option]}" for option in options)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidDocument(f"{path}: plan cannot be read: {why(error)}") from error
    if set(predicted) != {setting.name for setting in settings}:
        flags = " and ".join(f"--{option}" for option in options)
        raise UsageError(
            f"{flags}: must be as in {path} ({earlier}), and the settings those of this version; "
            "repeat them, or choose another folder"
        )
    return predicted

"""Hostile files and command lines: valid ones with something wrong in them."""

import contextlib
import json
import re
import resource
import shlex
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st

from calibrate.runs import read_run_rows, read_runs
from calibrate.step_table import read_steps
from perfmodel.documents.acceptance import AcceptanceTerms
from perfmodel.documents.budget import read_budget
from perfmodel.documents.hardware import read_cluster
from perfmodel.documents.importers import read_config, read_device_names, read_nccl_paste
from perfmodel.documents.observation import read_observations
from perfmodel.documents.observed import read_log
from perfmodel.documents.plan import read_plan
from perfmodel.documents.profile import (
    InferredDocument,
    ProfileDocument,
    RunColumns,
    read_run_columns,
)
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import PerfModelError
from perfmodel.files import unsealed_content
from perfmodel.growth import read_series
from perfmodel.tracing.huggingface_config import DECODERS, read_shape
from tests.fuzz import nonsense
from tests.fuzz.forked import checked
from tests.fuzz.grammar import command_lines, factories
from tests.fuzz.nonsense import HOSTILE, READING, UNSEALED, garbage, one, words
from tests.fuzz.wire import messages, page_of
from tests.perfmodel.cli.test_refusals import _WRITERS
from tests.perfmodel.documents.test_observed import LINES, ten
from tests.perfmodel.plan.plans import TODAY
from tests.regression.cases import unpacked
from validate.borrowed import unpack

_ROOT: Final = Path(__file__).parents[2]
_INPUTS: Final = _ROOT / "tests" / "regression" / "inputs"
_MEASURED: Final = _ROOT / "docs" / "records" / "calibration" / "profile.json"
_MLPERF: Final = b"""\
:::MLLOG {"key": "global_batch_size", "value": 256, "time_ms": 0, "metadata": {}}
:::MLLOG {"key": "block_start", "value": null, "time_ms": 1000, "metadata": {"samples_count": 0}}
:::MLLOG {"key": "block_stop", "value": null, "time_ms": 5000, "metadata": {"samples_count": 2560}}"""
_COLUMNS: Final = (
    b'[columns]\nstep_time_s = "time"\n[units]\nstep_time_s = "ms"\n[constants]\ntp = 1\n'
)
_STEPS: Final = b"""model,batch,image,precision,memory_format,step_time_s
torchvision:resnet18,32,224,fp32,contiguous,0.05
torchvision:vgg11,16,224,amp fp16,,0.08
"""
_OBSERVATION: Final = b"""{"task":"a","kind":"processor","steal_s":0.0,"busy_s":1.0}
{"task":"b","kind":"environment","facts":{"host":{"fingerprint":"x"}}}
"""
_RECORD: Final = b'{"a": {"tp": 2, "times": [1, 2.5]}, "step_time_s": 1}\n'
_CLAUSES: Final = b"schema_version = 1\nconfidence = 0.95\n[[clause]]\n"
_ARCHIVE: Final = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xab\xae\x05\0C\xbf\xa6\xa3\2\0\0\0"


def _read_nccl(path: Path) -> None:
    read_device_names(path)
    read_nccl_paste(path, collective="all_reduce")


Read = Callable[[Path], object]
#: What it finds wrong in the outcome: nothing, or a line for each fault.
Act = Callable[[Any], list[str]]
#: Every reader of files of users: the ending of its file, a valid file, and what reads it.
READERS: Final[dict[str, tuple[str, bytes | str | Path, Read]]] = {
    "profile": ("json", "stored", ProfileDocument.read),
    "inferred": ("json", "inferred", InferredDocument.read),
    "workload": ("json", "traced", WorkloadDocument.read),
    "plan": ("toml", "plan", lambda path: read_plan(path, today=TODAY)),
    "budget": ("toml", "budget", lambda path: read_budget(path, today=TODAY)),
    "columns": ("toml", _COLUMNS, read_run_columns),
    "cluster": ("toml", _ROOT / "docs" / "clusters" / "ethernet.toml", read_cluster),
    "clauses": ("toml", _CLAUSES, AcceptanceTerms.read),
    "observations": ("jsonl", _OBSERVATION, read_observations),
    "runs": (
        "csv",
        _ROOT / "docs" / "runs" / "a100.csv",
        lambda path: read_runs(path, RunColumns()),
    ),
    "throughput": ("csv", _ROOT / "docs" / "runs" / "one-node.csv", read_series),
    "records": ("jsonl", _RECORD, read_run_rows),
    "mlperf": ("log", _MLPERF, read_run_rows),
    "config": ("json", _INPUTS / "config.json", lambda path: read_shape(path, families=DECODERS)),
    "nccl-tests": ("txt", _INPUTS / "nccl.txt", _read_nccl),
    **{f"log of {n}": ("log", ten(n).encode(), partial(read_log, name=n)) for n in LINES},
    "training config": ("yaml", _ROOT / "docs" / "cases" / "mpt-7b.yaml", read_config),
    "steps": ("csv", _STEPS, read_steps),
    "archive": ("tar.gz", _ARCHIVE, lambda path: unpack(path, path.parent / "unpacked")),
}

_TOKEN: Final = re.compile(rb'"[^"\n]*"|[-+]?[0-9][0-9.eE+-]*|\w+|[\[\]{}:,=]')
#: What is repeated, until it is so long, shows readers whose time grows with its square.
_GROWN_BYTES: Final = 500_000


class Edit(NamedTuple):
    """One change of a file; places are shares of its length or of its tokens."""

    kind: str
    place: float
    text: str

    def apply(self, content: bytes) -> bytes:
        text, at = self.text.encode("utf-8", "surrogatepass"), int(self.place * len(content))
        if self.kind == "cut":
            return content[:at]
        if self.kind == "insert":
            return content[:at] + text + content[at:]
        if self.kind == "flip" and content:
            flipped = content[min(at, len(content) - 1)] ^ (1 << len(text) % 8)
            return content[:at] + bytes([flipped]) + content[at + 1 :]
        tokens = list(_TOKEN.finditer(content))
        if not tokens:
            return text
        number = int(self.place * (len(tokens) - 1))
        token = tokens[number]
        if self.kind == "grow":
            first = tokens[max(0, number - len(text) % 12)].start()
            chunk = content[first : token.end()] + b" " * (len(text) % 2)
            return content[:first] + chunk * (_GROWN_BYTES // len(chunk)) + content[first:]
        inside = token[0].startswith(b'"') and self.kind == "word"
        new = b'"' + text + b'"' if inside else text
        again = content[token.start() :] if self.kind == "repeat" else content[token.end() :]
        return content[: token.start()] + new + again


_KINDS: Final = words("cut insert flip value value word repeat grow")
_EDIT: Final = st.builds(Edit, one(_KINDS), st.floats(0, 1), one(HOSTILE))
edits: Final = st.lists(_EDIT, min_size=1, max_size=3)


def valid(name: str, folder: Path) -> bytes:
    """A file that the reader takes."""
    source = READERS[name][1]
    if isinstance(source, str):
        _WRITERS[source](folder / source)
        return (folder / source).read_bytes()
    return source.read_bytes()[:6000] if isinstance(source, Path) else source


def spoilt(content: bytes, changes: list[Edit]) -> bytes:
    """A valid file with changes."""
    for change in changes:
        content = change.apply(content)
    return content


#: What stands for a file in command lines, where a test has written it.
_MADE: Final = ("stored", "slower", "inferred", "traced", "plan", "budget")
#: Files of the project by the names that stand for them; commands get copies.
_SHIPPED: Final = {
    "nccl": "tests/regression/inputs/nccl.txt",
    "config": "tests/regression/inputs/config.json",
    "runs": "docs/runs/a100.csv",
    "throughput": "docs/runs/one-node.csv",
    "cluster": "docs/clusters/ethernet.toml",
    "yaml": "docs/cases/mpt-7b.yaml",
    "net": "docs/cases/net.py",
    "validation": "docs/records/validation",
    "folder": "docs/records/calibration",
    "truth": "calibrate/virtual/truths/two-nodes.toml",
}
#: Of ``GARBAGE`` what no factory says; torch's anomaly mode, which one may turn on, prints a traceback of its own.
_OF_NO_FACTORY: Final = re.compile(
    r"Traceback \(|internal error|pydantic|https?://errors|set_int_max"
)


class Target(NamedTuple):
    """A folder, its valid files by the names that stand for them in command lines, and all that attacks them."""

    folder: Path
    files: dict[str, str]

    def filled(self, words: list[str]) -> list[str]:
        """Words with the paths that names in braces stand for."""
        files = self.files
        return [re.sub(r"\{(\w+)\}", lambda m: files.get(m[1], m[0]), word) for word in words]

    def written(self, name: str, content: bytes) -> str:
        """The path of a new file."""
        path = self.folder / name
        path.write_bytes(content)
        return str(path)

    def read(self, name: str, content: bytes) -> list[str]:
        """A reader takes a file, or refuses it in the user's words; anything else is a fault."""
        ending, _, read = READERS[name]
        try:
            read(Path(self.written(f"hostile.{ending}", content)))
        except PerfModelError as error:
            return garbage(str(error))
        return []

    def line(self, words: list[str]) -> list[str]:
        """A command answers, or complains in one line; anything else is a fault."""
        return checked(self.filled(words), self.folder)[1]

    def edited(self, document: str, line: str, content: object) -> list[str]:
        """A command answers from a document that somebody edited, or refuses it."""
        path = self.written(f"edited-{document}.json", json.dumps(content).encode())
        return self.line([*line.split(), path, "--unsealed"])

    def spoilt(self, document: str, line: str, changes: list[Edit]) -> list[str]:
        """A command answers from what its writer wrote, or refuses the file: a change is never believed."""
        content = Path(self.files[document]).read_bytes()
        new = spoilt(content, changes)
        path = self.written(f"spoilt-{document}.json", new)
        found, faults = checked(self.filled([*line.split(), path]), self.folder)
        is_sealed = document in dict(UNSEALED)
        if found.code == 0 and is_sealed and json.loads(new) != json.loads(content):
            faults.append(f"believed: {line}")
        return faults

    def factory(self, drawn: tuple[str, str]) -> list[str]:
        """A command on a module with a factory; a workload that it writes must be sound."""
        text, line = drawn
        path = self.written("factory.py", text.encode("utf-8", "surrogatepass"))
        _, faults = checked(
            shlex.split(line.replace("{factory}", path)),
            self.folder,
            garbage=_OF_NO_FACTORY,
            is_interrupted="raise KeyboardInterrupt" in text,
        )
        if not faults and (written := self.folder / "forked" / "work" / "o.json").exists():
            try:
                WorkloadDocument.read(written)
            except PerfModelError as error:
                faults.append(f"wrote what it refuses: {error}")
        return faults


def target_in(folder: Path) -> Target:
    """Write valid files into a folder."""
    for name in _MADE:
        _WRITERS[name](folder / name)
    (folder / "tmp").mkdir()
    (folder / "measured").write_bytes(_MEASURED.read_bytes())
    (folder / "log").write_text(ten("torchtitan"), encoding="utf-8")
    for name in ("columns", "steps", "observations"):
        (folder / f"{name}.{READERS[name][0]}").write_bytes(valid(name, folder))
    for name, path in _SHIPPED.items():
        source, copy = _ROOT / path, folder / f"{name}{Path(path).suffix}"
        copy.mkdir() if source.is_dir() else copy.write_bytes(source.read_bytes())
        for file in source.iterdir() if source.is_dir() else ():
            plain = file.name.removesuffix(".xz")
            unpacked(source / plain, copy / plain)
    files = {path.name.partition(".")[0]: str(path) for path in folder.iterdir()}
    files["validation"] += "/validation.json"
    target = Target(folder, files | {name: str(folder / name) for name in ("goodput", "clauses")})
    job = "goodput --devices 100 --work-days 10 --mtbf-device-hours 50000 --checkpoint-s 60 --json"
    found, _ = checked(words(job), folder)
    target.written("goodput", found.out.encode())
    checked(target.filled(words("acceptance write --profile {stored} --output clauses")), folder)
    (folder / "forked" / "work" / "clauses").rename(folder / "clauses")
    return target


#: A try in this process may take so much of a processor and of memory.
_MOST_CPU_S: Final = 10.0
_MOST_GROWTH_KIB: Final = 512 * 1024


def guarded(act: Act) -> Act:
    """The same; what takes long or much memory is a fault."""

    def act_guarded(drawn: Any) -> list[str]:
        start_s, start_kib = time.process_time(), _peak_kib()
        faults = act(drawn)
        if time.process_time() - start_s > _MOST_CPU_S:
            faults.append(f"took {time.process_time() - start_s:.0f} s")
        if _peak_kib() - start_kib > _MOST_GROWTH_KIB:
            faults.append(f"took {(_peak_kib() - start_kib) / 1024:.0f} MiB")
        return faults

    return act_guarded


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def attacks(
    target: Target, opened: contextlib.ExitStack
) -> dict[str, tuple[st.SearchStrategy[Any], Act]]:
    """What each kind of attack draws, and what it does with it; ``opened`` ends the page."""

    def on_reader(name: str) -> Act:
        return lambda changes: target.read(name, spoilt(valid(name, target.folder), changes))

    documents = {
        name: unsealed_content(json.loads(Path(target.files[name]).read_text(encoding="utf-8")))
        for name in dict(UNSEALED)
    }

    def on_edited(drawn: Any) -> list[str]:
        (name, line), what = drawn
        return target.edited(name, line, nonsense.changed(documents[name], what))

    def on_spoilt(drawn: Any) -> list[str]:
        (name, line), changes = drawn
        return target.spoilt(name, line, changes)

    @cache
    def page() -> Act:
        return opened.enter_context(page_of(Path(target.files["stored"])))

    def on_page(parts: Any) -> list[str]:
        return page()(parts)

    kinds: dict[str, tuple[st.SearchStrategy[Any], Act]] = {
        **{name: (edits, on_reader(name)) for name in READERS},
        "edited": (nonsense.edited, on_edited),
        "spoilt": (
            st.tuples(st.sampled_from(READING), edits),
            on_spoilt,
        ),
        "questions": (nonsense.questions(), nonsense.page_check()),
        "messages": (messages(), on_page),
        "lines": (command_lines(), target.line),
        "factories": (factories(), target.factory),
    }
    return {kind: (drawn, guarded(act)) for kind, (drawn, act) in kinds.items()}

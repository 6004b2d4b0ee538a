"""Hostile files and command lines: valid ones with something wrong in them."""

import contextlib
import io
import json
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

from calibrate.runs import read_run_rows, read_runs
from calibrate.step_table import read_steps
from perfmodel.cli import main
from perfmodel.documents import unsealed_content
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
from perfmodel.tracing.huggingface_config import DECODERS, read_shape
from tests.fuzz.forked import (
    GARBAGE,
    Outcome,
    checked_lines,
    factory_check,
    faults_of_words,
    filled,
)
from tests.fuzz.grammar import command_lines, factories
from tests.fuzz.nonsense import HOSTILE, UNSEALED, changed, edited, page_check, questions
from tests.fuzz.wire import messages, page_of
from tests.perfmodel.cli.test_refusals import _WRITERS
from tests.perfmodel.documents.test_observed import LINES, ten
from tests.perfmodel.plan.plans import TODAY
from tests.regression.cases import unpacked
from validate.borrowed import unpack

_ROOT: Final = Path(__file__).parents[2]
_INPUTS: Final = _ROOT / "tests" / "regression" / "inputs"
_RUNS: Final = _ROOT / "docs" / "runs" / "a100.csv"
_MEASURED: Final = _ROOT / "docs" / "records" / "calibration" / "profile.json"
_MLPERF: Final = "\n".join(
    f':::MLLOG {{"key": "{key}", "value": {value}, "time_ms": {ms}, "metadata": {metadata}}}'
    for key, value, ms, metadata in (
        ("global_batch_size", 256, 0, "{}"),
        ("block_start", "null", 1000, '{"samples_count": 0}'),
        ("block_stop", "null", 5000, '{"samples_count": 2560}'),
    )
)
_COLUMNS: Final = (
    '[columns]\nstep_time_s = "time"\n[units]\nstep_time_s = "ms"\n[constants]\ntp = 1\n'
)
_STEPS: Final = (
    "model,batch,image,precision,memory_format,step_time_s\n"
    "torchvision:resnet18,32,224,fp32,contiguous,0.05\ntorchvision:vgg11,16,224,amp fp16,,0.08\n"
)
_OBSERVATION: Final = (
    '{"task":"a","kind":"processor","steal_s":0.0,"busy_s":1.0}\n'
    '{"task":"b","kind":"environment","facts":{"host":{"fingerprint":"x"}}}\n'
)

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
    "columns": ("toml", _COLUMNS.encode(), read_run_columns),
    "cluster": ("toml", _ROOT / "docs" / "clusters" / "ethernet.toml", read_cluster),
    "clauses": (
        "toml",
        b"schema_version = 1\nconfidence = 0.95\n[[clause]]\n",
        AcceptanceTerms.read,
    ),
    "observations": ("jsonl", _OBSERVATION.encode(), read_observations),
    "runs": ("csv", _RUNS, lambda path: read_runs(path, RunColumns())),
    "records": ("jsonl", b'{"a": {"tp": 2, "times": [1, 2.5]}, "step_time_s": 1}\n', read_run_rows),
    "mlperf": ("log", _MLPERF.encode(), read_run_rows),
    "config": ("json", _INPUTS / "config.json", lambda path: read_shape(path, families=DECODERS)),
    "nccl-tests": (
        "txt",
        _INPUTS / "nccl.txt",
        lambda path: (read_device_names(path), read_nccl_paste(path, collective="all_reduce")),
    ),
    **{f"log of {n}": ("log", ten(n).encode(), partial(read_log, name=n)) for n in LINES},
    "training config": ("yaml", _ROOT / "docs" / "cases" / "mpt-7b.yaml", read_config),
    "steps": ("csv", _STEPS.encode(), read_steps),
    "archive": (
        "tar.gz",
        b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xab\xae\x05\0C\xbf\xa6\xa3\2\0\0\0",
        lambda path: unpack(path, path.parent / "unpacked"),
    ),
}

_TOKEN: Final = re.compile(rb'"[^"\n]*"|[-+]?[0-9][0-9.eE+-]*|\w+|[\[\]{}:,=]')


#: What is repeated, until it is so long, shows readers whose time grows with its square.
_GROWN_BYTES: Final = 500_000


@dataclass(frozen=True)
class Edit:
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


edits: Final = st.lists(
    st.builds(
        Edit,
        st.sampled_from(("cut", "insert", "flip", "value", "value", "word", "repeat", "grow")),
        st.floats(0, 1),
        st.sampled_from(HOSTILE),
    ),
    min_size=1,
    max_size=3,
)


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


def read_hostile(name: str, content: bytes, folder: Path) -> list[str]:
    """Read it: it is taken, or refused in the user's words; anything else is a fault."""
    ending, _, read = READERS[name]
    path = folder / f"hostile.{ending}"
    path.write_bytes(content)
    try:
        read(path)
    except PerfModelError as error:
        return garbage(str(error))
    return []


def garbage(said: str) -> list[str]:
    """What a library says in a message."""
    return [f"words of a library: {said}"] if GARBAGE.search(said) else []


#: What stands for a file in command lines, where a test has written it.
_MADE: Final = ("stored", "slower", "inferred", "traced", "plan", "budget")
#: Files of the project by the names that stand for them; commands get copies.
_SHIPPED: Final = {
    "nccl": "tests/regression/inputs/nccl.txt",
    "config": "tests/regression/inputs/config.json",
    "runs": "docs/runs/a100.csv",
    "cluster": "docs/clusters/ethernet.toml",
    "yaml": "docs/cases/mpt-7b.yaml",
    "net": "docs/cases/net.py",
    "validation": "docs/records/validation",
    "folder": "docs/records/calibration",
    "truth": "calibrate/virtual/truths/two-nodes.toml",
}


def written_files(folder: Path) -> dict[str, str]:
    """Valid files by the names that stand for them in command lines, all in a folder."""
    for name in _MADE:
        _WRITERS[name](folder / name)
    (folder / "tmp").mkdir()
    (folder / "measured").write_bytes(_MEASURED.read_bytes())
    (folder / "log").write_text(ten("torchtitan"), encoding="utf-8")
    for name in ("columns", "steps", "observations"):
        (folder / f"{name}.{READERS[name][0]}").write_bytes(valid(name, folder))
    for name, path in _SHIPPED.items():
        source, target = _ROOT / path, folder / f"{name}{Path(path).suffix}"
        target.mkdir() if source.is_dir() else target.write_bytes(source.read_bytes())
        for file in source.iterdir() if source.is_dir() else ():
            plain = file.name.removesuffix(".xz")
            unpacked(source / plain, target / plain)
    found = {path.name.partition(".")[0]: str(path) for path in folder.iterdir()}
    found["validation"] += "/validation.json"
    job = "goodput --devices 100 --work-days 10 --mtbf-device-hours 50000 --checkpoint-s 60 --json"
    ended = run_line(job.split())
    (folder / "goodput").write_text(ended.out, encoding="utf-8")
    line = f"acceptance write --profile {folder}/stored --output {folder}/clauses"
    assert (ended.code, run_line(line.split()).code) == (0, 0)
    return found | {name: str(folder / name) for name in ("goodput", "clauses")}


def run_line(words: list[str]) -> Outcome:
    """How a command ends in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["perfmodel", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    return Outcome(code, out.getvalue(), err.getvalue())


def check_line(words: list[str], files: dict[str, str]) -> list[str]:
    """Run a command: it answers, or complains in one line; anything else is a fault."""
    words = filled(words, files)
    return faults_of_words(run_line(words), words)


def check_edited(document: str, line: str, content: object, files: dict[str, str]) -> list[str]:
    """A command answers from a document that somebody edited, or refuses it."""
    path = Path(files[document]).with_name(f"edited-{document}.json")
    path.write_text(json.dumps(content), encoding="utf-8")
    return check_line([*line.split(), str(path), "--unsealed"], files)


#: Commands that answer from a file, which stands behind the last word; those of documents have a seal.
READING: Final = (
    *UNSEALED,
    *((name, "check") for name in dict(UNSEALED)),
    ("stored", "diff {slower}"),
    ("plan", "plan options --today 2026-11-21"),
    ("budget", "cost --today 2026-11-21"),
)


def check_spoilt(
    document: str, line: str, edits_of: list[Edit], files: dict[str, str]
) -> list[str]:
    """A command answers from what its writer wrote, or refuses the file: a change is never believed."""
    path = Path(files[document]).with_name(f"spoilt-{document}.json")
    content = Path(files[document]).read_bytes()
    new = spoilt(content, edits_of)
    path.write_bytes(new)
    words = filled([*line.split(), str(path)], files)
    found = run_line(words)
    faults = faults_of_words(found, words)
    if found.code == 0 and document in dict(UNSEALED) and json.loads(new) != json.loads(content):
        faults.append(f"believed: {line}")
    return faults


#: A try may take so much of a processor and of memory.
_MOST_CPU_S: Final = 10.0
_MOST_GROWTH_KIB: Final = 512 * 1024


def guarded(act: Act, files: dict[str, str]) -> Act:
    """The same; what takes long, takes much memory, or changes its input is a fault."""

    def act_guarded(drawn: Any) -> list[str]:
        inputs = [Path(name) for name in files.values()]
        before = [path.read_bytes() for path in inputs if path.is_file()]
        start_s, start_kib = time.process_time(), _peak_kib()
        faults = act(drawn)
        if time.process_time() - start_s > _MOST_CPU_S:
            faults.append(f"took {time.process_time() - start_s:.0f} s")
        if _peak_kib() - start_kib > _MOST_GROWTH_KIB:
            faults.append(f"took {(_peak_kib() - start_kib) / 1024:.0f} MiB")
        if [path.read_bytes() for path in inputs if path.is_file()] != before:
            faults.append("changed its input")
        return faults

    return act_guarded


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def attacks(
    folder: Path, files: dict[str, str], opened: contextlib.ExitStack
) -> dict[str, tuple[st.SearchStrategy[Any], Act]]:
    """What each kind of attack draws, and what it does with it; ``opened`` ends the page."""

    def on_reader(name: str) -> Act:
        return lambda changes: read_hostile(name, spoilt(valid(name, folder), changes), folder)

    documents = {
        name: unsealed_content(json.loads(Path(files[name]).read_text(encoding="utf-8")))
        for name in dict(UNSEALED)
    }

    def on_edited(drawn: Any) -> list[str]:
        (name, line), what = drawn
        return check_edited(name, line, changed(documents[name], what), files)

    def on_spoilt(drawn: Any) -> list[str]:
        (name, line), what = drawn
        return check_spoilt(name, line, what, files)

    @cache
    def page() -> Act:
        return opened.enter_context(page_of(Path(files["stored"])))

    def on_page(parts: Any) -> list[str]:
        return page()(parts)

    kinds: dict[str, tuple[st.SearchStrategy[Any], Act]] = {
        **{name: (edits, on_reader(name)) for name in READERS},
        "edited": (edited, on_edited),
        "spoilt": (st.tuples(st.sampled_from(READING), edits), on_spoilt),
        "questions": (questions(), page_check(garbage)),
        "messages": (messages(), on_page),
        "lines": (command_lines(), checked_lines(folder, files)),
        "factories": (factories(), factory_check(folder)),
    }
    return {kind: (drawn, guarded(act, files)) for kind, (drawn, act) in kinds.items()}

"""Cases of the table: one line each in ``cases.txt``, and the files that they name."""

import gzip
import hashlib
import lzma
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
#: Recorded campaigns; another folder: REGRESSION_RECORDS.
RECORDS: Final = os.environ.get("REGRESSION_RECORDS", "docs/records")
_CACHE: Final = ROOT / ".regression-cache"
#: What ``{name}`` stands for in a line.
_NAMES: Final = {
    "records": RECORDS,
    "calibration": f"{RECORDS}/calibration/profile.json",
    "operators": "tests/regression/inputs/other-machine.json",
    "h100": "perfmodel/documents/machines/runs/dgx-h100.json",
    "a100": "perfmodel/documents/machines/runs/dgx-a100.json",
    "inputs": "tests/regression/inputs",
}
#: What ``perfmodel trace`` makes of each ``{traced:name}``.
_TRACED: Final = {
    "resnet50": "resnet50 --image-size 64 --micro-batch 4 --optimizer-implementation foreach",
    "llama": "{inputs}/config.json --sequence-length 128 --micro-batch 2 --optimizer adamw "
    "--optimizer-implementation foreach",
    "mlp": "{inputs}/model.py:network --optimizer-implementation foreach",
    "lenet": "lenet --micro-batch 64 --optimizer-implementation foreach --device-kind as-cuda",
    "lenet_cpu": "lenet --micro-batch 64 --optimizer-implementation foreach --device-kind cpu",
}
#: Cases that take seconds.
_SLOW: Final = re.compile(r"^(fit\.|plan\.|search\.|diff\.|page\.export|api\.plan|goodput\.best)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    kind: str
    """Of the answer, as ``quantities`` knows it; or error."""
    words: tuple[str, ...]
    """What the message of an error must name."""
    line: str

    @property
    def is_fast(self) -> bool:
        """Whether it takes well below a second and needs no torch."""
        return "{traced:" not in self.line and not _SLOW.match(self.name)


def unpacked(record: Path, target: Path) -> Path:
    """A file of a record that may be packed, as it was written."""
    [packed] = record.parent.glob(f"{record.name}*")
    opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(packed.suffix, open)
    with opened(packed, "rb") as content:
        target.write_bytes(content.read())
    return target


def cases() -> list[Case]:
    """All cases, in the order of the file."""
    found = []
    for line in (HERE / "cases.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        name, kind, command = line.split(" | ", 2)
        kind, _, words = kind.partition(": ")
        found.append(Case(name=name, kind=kind, words=tuple(words.split()), line=command))
    return found


def filled(line: str, folder: Path) -> str:
    """A line with the paths that its names stand for."""
    names = {**_NAMES, "tmp": str(folder), "out": str(folder / "out")}

    def path(match: re.Match[str]) -> str:
        return str(_traced(match[2])) if match[1] == "traced" else names[match[1]]

    return re.sub(r"\{(\w+)(?::(\w+))?\}", path, line)


def _traced(name: str) -> Path:
    """A workload file, made once by each version of the code that traces."""
    sources = sorted(p for p in (ROOT / "perfmodel").rglob("*.py") if "trac" in str(p))
    code = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:12]
    path = _CACHE / code / f"{name}.json"
    if not path.exists():
        words = filled(_TRACED[name], path.parent).split()
        command = (sys.executable, "-m", "perfmodel", "trace", *words, "--output", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Blocks of convolutions are as wide as the vectors of a processor: 8 floats on any.
        environ = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True, env=environ)
    return path

"""Files that no reader may take, hang on, or choke on; the same for what a user types and prints to."""

import errno
import gzip
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from perfmodel import files
from perfmodel.documents.importers import read_config
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    CalibrationUnavailable,
    PerfModelError,
    UsageError,
    printable,
)
from perfmodel.files import (
    Unreadable,
    append_line,
    parse_json,
    parse_toml,
    read_bytes,
    read_table,
    trim_unfinished_line,
    write_atomically,
)
from perfmodel.units import MIB, decimal, parse_duration, whole
from tests.examples import ROOT
from tests.perfmodel.cli.command import Run, complaint


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def bomb(path: Path) -> Path:
    path = path.with_suffix(".gz")
    path.write_bytes(gzip.compress(bytes(3 * MIB)))
    return path


def torn(path: Path) -> Path:
    path = path.with_suffix(".gz")
    path.write_bytes(gzip.compress(bytes(range(256)) * 100)[:-20])
    return path


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(3 * MIB)
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (pipe, "regular file"),
        (lambda _: Path("/dev/zero"), "regular file"),
        (bomb, "at most 2 MiB"),
        (sparse, "at most 2 MiB"),
        (torn, "truncated"),
    ],
)
def test_a_file_without_end_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], says: str
) -> None:
    with pytest.raises(Unreadable, match=says):
        read_bytes(make(tmp_path / "file"), most=2 * MIB)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_json, "[" * 100_000, "at most 64 deep"),
        (parse_json, '{"a":' * 100 + "1" + "}" * 100, "at most 64 deep"),
        (parse_json, '{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        (parse_json, "9" * 5000, "at most 30 digits"),
        (
            parse_json,
            json.dumps(dict.fromkeys(map(str, range(files.MOST_KEYS + 1)))),
            "50,000 keys",
        ),
        (parse_json, "[" + "0," * files.MOST_VALUES + "0]", "values"),
        (parse_toml, "a" + ".a" * 200_000 + " = 1", "at most 64 deep"),
        (parse_toml, "a = " + "[" * 20_000, "at most 64 deep"),
        (parse_toml, f"a = {'9' * 5000}", "at most 30 digits"),
        (parse_toml, "#" * (MIB + 1), "at most 1 MiB"),
        (parse_toml, "[a.b]\n[a.b]\n", r"no TOML \(a key stands twice, line 2, column \d\)$"),
        (parse_toml, "a = 1\n[a.b]\n", r"no TOML \(a key stands twice, line 2, column \d\)$"),
        (parse_toml, "a = {b = 1, b = 2}", r"no TOML \(a key stands twice, line 1, column \d+\)$"),
        (parse_toml, "a 1", r"no TOML \(expected '=' after a key in a key/value pair, line 1, "),
        (parse_toml, "a = [1,", r"no TOML \(invalid value, end of document\)$"),
    ],
    ids=range(15),
)
def test_text_within_limits(parse: Callable[[str], object], text: str, says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        parse(text)


def test_a_list_of_wrong_values_is_refused_at_its_first(stored: Path) -> None:
    """All errors of 400 KB took 740 MiB."""
    content = json.loads(stored.read_text())
    content["machine"]["steps"] = [{}] * 100_000
    stored.write_text(json.dumps(content))
    with pytest.raises(CalibrationUnavailable, match=r"steps\.0\.workload.*\(and 6 more: "):
        ProfileDocument.read(stored)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b,a\n1,2,3\n", "'a' twice"),
        ("a,b\n1\n", "line 2: must have as many cells as the heading, 2, got 1"),
        ("a\n" + "1\n" * (files.MOST_ROWS + 1), "at most 100,000 rows"),
        ('a\n"' + "x" * 200_000, "line"),
    ],
    ids=range(4),
)
def test_tables_within_limits(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(Unreadable, match=says):
        list(read_table(path))


def test_columns_without_a_name_are_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a,b,,\n1,2,,\n")
    [(_, row)] = read_table(path)
    assert (row["a"], row["b"]) == ("1", "2")


@pytest.mark.parametrize("text", ["1_000", "1_59.637", "\u0661\u0662", "\uff11", "0x10", "", "1,5"])
def test_a_number_is_ascii_without_separators(text: str) -> None:
    for parse in (decimal, whole):
        with pytest.raises(ValueError, match="must be a"):
            parse(text)


def test_a_long_quantity_is_read_in_one_pass() -> None:
    with pytest.raises(ValueError, match="must look like"):
        parse_duration("1" * 1_000_000 + "!")


def test_a_number_of_a_trainers_file_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "log.yaml"
    path.write_text(f"model:\n  d_model: {'9' * 5000}\n")
    with pytest.raises(UsageError, match="at most 30 digits, got 5,000"):
        read_config(path)


def test_control_characters_are_spelt_out(run: Run, stored: Path) -> None:
    assert printable("a\x1b[31m\x9b\u202e b\n") == "a\\x1b[31m\\x9b\\u202e b\n"
    result = run("predict", "--profile", stored, "--workload", "\x1b[2Jlight")
    assert "\x1b" not in complaint(result, EXIT_USAGE)


def ran(words: list[str], **others: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **others
    )


#: What is imported as if an installation had no extras.
_BARE = """
import importlib.util, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'psutil', 'torch', 'torchvision', 'matplotlib', 'jinja2', 'anyio'}:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name.split('.')[0])
sys.meta_path.insert(0, Missing())
from perfmodel.cli import main
main()
"""


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("validate published --data {tmp} --sources none", EXIT_USAGE, "--sources: must be among"),
        ("fit {tmp}", EXIT_FAILURE, "plan cannot be read"),
        ("predict --profile {stored} --workload light --json", EXIT_OK, ""),
        ("predict --profile {stored} --workload light --plot a.svg", EXIT_FAILURE, "[report]"),
        ("trace resnet18", EXIT_FAILURE, ".[calibrate]"),
        ("doctor", EXIT_FAILURE, ".[calibrate]"),
        ("validate memory --out {tmp}", EXIT_FAILURE, ".[calibrate]"),
        ("validate network --out {tmp}", EXIT_FAILURE, ".[calibrate]"),
    ],
)
def test_an_installation_without_extras(
    stored: Path, tmp_path: Path, command: str, code: int, says: str
) -> None:
    words = command.format(stored=stored, tmp=tmp_path).split()
    done = ran([sys.executable, "-c", _BARE, *words])
    assert (done.returncode, done.stderr.count("\n") <= 1) == (code, True)
    assert says in done.stderr


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        (">/dev/full", EXIT_FAILURE, "No space left on device"),
        (">&-", EXIT_FAILURE, "output is closed"),
        ("| head -1", EXIT_OK, ""),  # a reader that leaves early
        ("2>&-", EXIT_OK, ""),
    ],
)
def test_an_output_that_takes_nothing(stored: Path, end: str, code: int, says: str) -> None:
    command = f"{sys.executable} -m perfmodel predict --profile {stored} --workload light {end}"
    done = ran(["bash", "-c", command])
    assert done.returncode == code
    assert says in done.stderr
    assert done.stderr.count("\n") == bool(says)


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-"])
def test_ranks_have_a_standard_error_where_the_command_has_none(closed: str) -> None:
    """Else the first file that they open takes its place."""
    code = (
        "import subprocess, sys\n"
        "from perfmodel.cli import main\n"
        "try:\n main()\n"
        "except SystemExit:\n pass\n"
        "ask = 'import sys; sys.exit(sys.stderr is None)'\n"
        "print(sys.stderr.fileno(), subprocess.run([sys.executable, '-c', ask]).returncode)\n"
    )
    done = ran(["bash", "-c", f'"$0" -c "$1" --version {closed}', sys.executable, code])
    assert (done.returncode, done.stdout.splitlines()[1:]) == (EXIT_OK, ["2 0"])


@pytest.mark.parametrize(
    "command", ["predict --profile {stored} --workload light", "trace {file}:f"]
)
def test_a_folder_that_is_gone_is_told(
    run: Run, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    if command.startswith("trace"):
        pytest.importorskip("torch")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = complaint(run(command.format(stored=stored, file=tmp_path / "f.py")), EXIT_USAGE)
    assert said == "perfmodel: the folder where the command runs is gone; go to another one"


def test_an_interrupt_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = ran([sys.executable, "-m", "perfmodel", "--version"], env=os.environ | path)
    assert (done.returncode, done.stderr) == (130, "perfmodel: interrupted\n")


def test_what_a_factory_prints_is_no_part_of_the_answer(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "factory.py"
    file.write_text(
        "import torch\nprint('imported')\ndef make():\n print('called')\n"
        " return torch.nn.Linear(3, 2), torch.empty(4, 3)\n"
    )
    done = run("trace", f"{file}:make", "--output", tmp_path / "w.json", "--json")
    assert json.loads(done.stdout)["workload"]["name"] == "factory:make"
    assert "imported\ncalled\n" in done.stderr


def test_a_pipe_is_written_through_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(max_workers=1) as pool:
        read = pool.submit(pipe.read_text)
        write_atomically(pipe, "words")
        assert read.result(timeout=10) == "words"
    assert pipe.is_fifo()


def test_a_pipe_without_a_reader_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfmodel.files._READER_S", 0.1)
    with pytest.raises(PerfModelError, match="cannot be written: no program reads this pipe"):
        write_atomically(pipe(tmp_path / "answer.json"), "words")


def test_a_pipe_is_not_continued(tmp_path: Path) -> None:
    """Its reader would wait for a writer without end."""
    with pytest.raises(
        PerfModelError, match="cannot be continued: it must be a regular file, got a"
    ):
        trim_unfinished_line(pipe(tmp_path / "observations.jsonl"))


@pytest.mark.parametrize("exists", [False, True])
def test_the_target_of_a_link_is_replaced_in_one_step(tmp_path: Path, *, exists: bool) -> None:
    """A reader that opened the old file reads it to its end."""
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(Path("elsewhere") / "file")
    if exists:
        target.write_text("old words")
        with target.open() as reader:
            write_atomically(link, "new")
            assert reader.read() == "old words"
    else:
        write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [entry.name for entry in target.parent.iterdir()] == ["file"]


def test_links_in_a_circle_and_folders_that_are_files_are_refused(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(tmp_path / other)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "a", tmp_path / "file" / "profile.json"):
        with pytest.raises(PerfModelError, match="cannot be written"):
            write_atomically(path, "words")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old", encoding="utf-8")

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PerfModelError, match=r"cannot be written: No space left on device; free"):
        write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_files_have_the_rights_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", "words")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    (tmp_path / "new").chmod(0o600)
    write_atomically(tmp_path / "new", "other words")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_the_name_of_a_file_is_on_disk_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a crash may undo the replacement, or lose a file that was made."""
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda it: synced.append(stat.S_ISDIR(os.fstat(it).st_mode)))
    write_atomically(tmp_path / "profile.json", "words")
    append_line(tmp_path / "observations.jsonl", "{}")
    append_line(tmp_path / "observations.jsonl", "{}")
    assert synced == [False, True, False, True, False]


def test_a_folder_that_cannot_be_synced_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PerfModelError, match="was written, but may be lost if the power fails"):
        write_atomically(tmp_path / "file", "words")
    assert (tmp_path / "file").read_text() == "words"


def test_what_a_killed_writer_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    names = (".file.0123abcd", ".file.89abcdef", ".file.other.0123abcd")
    for name in names:
        (tmp_path / name).write_text("half a fi")
    os.utime(tmp_path / names[0], (0, 0))
    os.utime(tmp_path / names[2], (0, 0))
    write_atomically(tmp_path / "file", "words")
    assert sorted(each.name for each in tmp_path.iterdir()) == [names[1], names[2], "file"]

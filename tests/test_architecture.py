"""Promises about the shape of the project, each of them a test."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from perfmodel.cli import app
from tests.conftest import WITH_RANKS
from tests.existing import existing

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("calibrate", "perfmodel", "validate")
LONGEST_FILE_LINES = 640
LONGEST_FUNCTION_LINES = 80

#: The command line is a promise: flags without dashes, arguments in capitals. A change here needs a
#: line in CHANGELOG.md.
COMMAND_LINE = """
perfmodel: install-completion show-completion version
acceptance:
acceptance judge: CLAUSES goodput json log observed part profile run
acceptance write: cluster confidence goodput json layout log machine nodes-like observed output profile workload
    unsealed
batch: machine batches devices json micro-batch points profile samples-per-s samples-per-unit
    verbose workload unsealed
calibrate: budget campaign columns device device-kind from-runs from-steps json master-addr
    master-port minutes models nnodes node-rank nproc out resume seed truth
check: FILE json
cost: BUDGET_FILE json today
devices: NAME json links
diagnose: MODEL accumulation cluster device devices devices-per-node global-batch json log log-format lora
    machine micro-batch name nic-bandwidth nics observed precision profile sequence-length strategy unsealed
diff: NEW OLD json unsealed
doctor: json
explain: accumulation batch bucket-cap-mb cluster device devices json layout loader-samples-per-s
    machine nodes-like profile scaling validation verbose workload unsealed
fit: FOLDER json
goodput: cause checkpoint-interval-s checkpoint-s deadline-days detection-s devices json
    mtbf-device-hours mtbf-stops replacement-hours replicas restart-s
    seed spares work-days verbose
machines: NAME json
memory: machine device device-kind device-memory devices gradient-as-bucket-view json
    micro-batch optimizer precision profile sequence-length verbose workload unsealed
network:
network check: LOG bucket-cap-mb cluster collective device json machine nic-bandwidth nics profile workload unsealed
plan:
plan options: PLAN export json output report today verbose unsealed
plan parallelism: cluster machine device-memory devices devices-per-node global-batch interleave json model output
    profile sequence-length top verbose unsealed
predict: machine torch nccl accumulation batch bucket-cap-mb cluster csv device device-memory devices devices-per-node
    json layout loader-samples-per-s model no-measure nodes-like output plot profile samples scaling
    sequence-length sync-every-step throughput trace validation verbose workload unsealed
report: json devices out profile validation unsealed
serve: machine cluster port profile validation workload unsealed
trace: MODEL json checkpointing device-kind image-size micro-batch optimizer optimizer-implementation
    output precision sequence-length
validate: json budget from master-addr master-port nnodes node-rank out profile resume seed soon
    validation
validate memory: json batches device-kind models out truth
validate models: json budget out profile resume seed soon
validate network: json budget mbit out resume seed
validate published: json data output sources
validate strategies: json budget out profile resume seed soon
whatif: machine batch cluster device device-memory devices devices-per-node fields json layout model
    nodes-like output profile scaling sequence-length set validation verbose workload unsealed
"""


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_no_file_is_longer_than_one_can_read() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources(*PACKAGES, "tests")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE_LINES
    }
    assert long == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{function.name}": function.end_lineno - function.lineno + 1
        for path in sources(*PACKAGES, "tests")
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if function.end_lineno is not None
        and function.end_lineno - function.lineno >= LONGEST_FUNCTION_LINES
    }
    assert long == {}


_COUNTED = """
import io, contextlib, sys
from perfmodel.cli import main
root, touched, called = sys.argv.pop(1), set(), set()
def follow(frame, event, _):
    code = frame.f_code
    # Bodies of modules and classes are no calls: CO_OPTIMIZED is of functions alone.
    if event == "call" and code.co_filename.startswith(root) and code.co_flags & 1:
        touched.add(code.co_filename)
        called.add((code.co_filename, code.co_qualname))
sys.argv[0] = "perfmodel"
sys.setprofile(follow)
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
sys.setprofile(None)
loaded = [name for name in sys.modules if name.partition(".")[0] == "perfmodel"]
print(len(loaded), len(touched), len(called))
"""


def test_what_a_prediction_loads_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures, not limits: modules of ours for a table of three device counts."""
    profile = "docs/records/calibration/profile.json"
    question = ("predict", "--profile", profile, "--workload", "resnet18", "--devices", "1,8,64")
    command = (sys.executable, "-c", _COUNTED, str(ROOT / "perfmodel"), *question)
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    loaded, touched, called = map(int, done.stdout.split())
    sizes = {
        folder: [len(path.read_text(encoding="utf-8").splitlines()) for path in sources(folder)]
        for folder in (*PACKAGES, "tests")
    }
    with capsys.disabled():
        sys.stdout.write(
            f"\npredict: {loaded} modules loaded, {called} functions in {touched} files called\n"
        )
        for folder, lines in sizes.items():
            sys.stdout.write(f"{folder}: {sum(lines):,} lines in {len(lines)} modules\n")
    assert 0 < touched <= loaded


def test_files_that_the_design_names_exist() -> None:
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_/]+(?:\.py|/))`", text)
    assert "cost/collectives.py" in named
    folders = (ROOT, ROOT / "perfmodel")
    assert [name for name in named if not any((at / name).exists() for at in folders)] == []


#: Files that are no results: locks, lines that are appended, members of an archive, folders of the testbed.
WRITERS = {
    "perfmodel/files.py",
    "calibrate/gpus.py",
    "calibrate/locks.py",
    "validate/borrowed.py",
    "validate/testbed/server.py",
}


def test_files_are_written_in_one_place() -> None:
    """``write_atomically``: whatever fails, the old file or the new one is there."""
    writing = re.compile(
        r"""\.write_(text|bytes)\(|\bopen\([^)]*["'][rwax]?b?[wax+]b?["']|savefig\((?!file,)|os\.replace|to_csv\("""
    )
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources(*PACKAGES)
        if writing.search(path.read_text(encoding="utf-8"))
    }
    assert found <= WRITERS
    assert "perfmodel/files.py" in found


def test_every_folder_with_code_is_a_package_that_gets_installed(pyproject: dict[str, Any]) -> None:
    patterns = pyproject["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent for path in sources(*PACKAGES)}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    missed = {name for name in names if not any(fnmatch(name, p) for p in patterns)}
    assert missed == set()
    roots = {name.partition(".")[0] for name in names}
    assert roots == set(PACKAGES) == set(pyproject["tool"]["importlinter"]["root_packages"])


def test_nothing_else_at_the_top_would_be_installed(pyproject: dict[str, Any]) -> None:
    patterns = pyproject["tool"]["setuptools"]["packages"]["find"]["include"]
    found = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir()
        and path.name.isidentifier()
        and any(fnmatch(path.name, p) for p in patterns)
    }
    assert found == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_are_typed(package: str, pyproject: dict[str, Any]) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in pyproject["tool"]["setuptools"]["package-data"][package]


def test_the_installed_version_is_that_of_the_source(pyproject: dict[str, Any]) -> None:
    assert importlib.metadata.version("perfmodel") == pyproject["project"]["version"]


def test_the_changelog_starts_with_this_version(pyproject: dict[str, Any]) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}$", text, flags=re.MULTILINE)
    assert released[0] == pyproject["project"]["version"]
    unreleased = [line for line in text.partition("\n## 0.")[0].splitlines()[4:] if line]
    assert len(unreleased) <= 60
    assert max(map(len, unreleased)) <= 200


def test_every_make_target_explains_itself() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = existing(re.search(r"^\.PHONY:(.*)$", text, flags=re.MULTILINE))
    explained = re.findall(r"^([a-z-]+):.*## \S", text, flags=re.MULTILINE)
    assert set(explained) == set(phony.group(1).split())


def test_what_make_starts_may_keep_its_bytecode() -> None:
    """Images that forbid it are common, and pip compiles nothing here."""
    done = subprocess.run(
        ["make", "--eval=shown: ; @env", "shown"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "PATH=" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout


def test_files_that_start_ranks_are_known_to_the_scheduler_of_tests() -> None:
    """Two of them at once would wait for each other's turn on the machine."""
    marked = re.compile(r"\bmark\.(real|netns)\b")
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources("tests")
        if path.name.startswith("test_") and marked.search(path.read_text(encoding="utf-8"))
    } - {"tests/test_architecture.py"}
    assert found == {name.partition("::")[0] for name in WITH_RANKS}


def test_the_command_line_is_the_one_that_was_promised() -> None:
    root: Any = get_command(app)
    commands = {name: root.get_command(None, name) for name in root.list_commands(None)}
    found = {"perfmodel": root.params}
    for name, command in commands.items():
        found[name] = command.params
        for inner, sub_command in getattr(command, "commands", {}).items():
            found[f"{name} {inner}"] = sub_command.params
    options = {
        name: {
            option.removeprefix("--") if option.startswith("--") else option.upper()
            for parameter in parameters
            for option in parameter.opts
        }
        for name, parameters in found.items()
    }
    lines = COMMAND_LINE.replace("\n    ", " ").strip().split("\n")
    promised = {line.partition(":")[0]: set(line.partition(":")[2].split()) for line in lines}
    assert options == promised
    silent = {name for name, known in promised.items() if "json" not in known}
    assert silent == {"perfmodel", "acceptance", "network", "plan", "serve"}

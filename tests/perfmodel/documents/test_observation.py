"""Lines of observations: strict, sealed, each task once."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from calibrate.fit.profile import failed_replays, fit_profile
from perfmodel import documents
from perfmodel.documents import (
    check_file,
)
from perfmodel.documents.observation import (
    OUT_OF_MEMORY,
    CollectiveObservation,
    EnvironmentObservation,
    FailedObservation,
    Observation,
    ProcessorObservation,
    failures,
    read_observations,
    refuse_repeated,
    steal_share,
    tasks_done,
)
from perfmodel.errors import (
    EXIT_OK,
    InvalidDocument,
)
from perfmodel.files import append_line
from tests.perfmodel.profiles import PROVENANCE, setting_of

LINE = CollectiveObservation(
    task="all_reduce-2",
    round=0,
    collective="all_reduce",
    world_size=2,
    size_bytes=1024,
    durations_s=((0.1,), (0.2,)),
).model_dump_json()


def test_a_last_line_without_its_end_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text(f"{LINE}\n{LINE}\n{LINE[:-9]}", encoding="utf-8")
    observations = read_observations(path)
    assert len(observations) == 2
    assert tasks_done(observations) == {"all_reduce-2"}


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (LINE[:-9], ""),
        (LINE.replace('"round":0', '"round":0,"colour":1'), "collective.colour: unknown key"),
        (LINE.replace("0.2", "NaN"), r"collective.durations_s.1.0: .* got nan"),
        (LINE.replace('"kind":"collective"', '"kind":"rumour"'), "document: .*'rumour'"),
        (LINE.replace('"kind":"collective",', ""), "document: must have the key 'kind', got none"),
        (
            LINE.replace('"round":0', '"round":0,"round":0'),
            "every key must stand once, got 'round'",
        ),
        # Marks by their numbers in Unicode stand for those of the key that is gone.
        (
            LINE.replace('"task":"', '"round":0,"task":"\\u0022\\u0022'),
            "every key must stand once, got 'round'",
        ),
        (LINE.replace('"round":0', f'"round":{"9" * 31}'), "numbers must have at most 30 digits"),
        (
            f'{{"kind":"environment","task":"e","round":0,"facts":{"{"}"a":{"[" * 64}{"]" * 64}}}}}',
            "environment.facts: lists and objects must be at most 64 deep",
        ),
    ],
)
def test_a_broken_line_in_the_middle_is_named_by_its_number(
    tmp_path: Path, broken: str, problem: str
) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text(f"{LINE}\n{broken}\n{LINE}\n", encoding="utf-8")
    with pytest.raises(InvalidDocument, match=f"line 2: {problem}") as caught:
        read_observations(path)
    assert str(caught.value).startswith(f"{path}: line 2: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sound", "twice"),
    [
        ('"a1":1,"a2":2', '"a1":1,"a1":2'),
        ('"a":1,"\\"-1":2', '"\\"-1":1,"\\"-1":2'),
        ('"a":{"b":0.1}', '"a":{"b":1e-3},"a":3'),
    ],
)
def test_a_key_that_stands_twice_is_found_in_lines_like_others(
    tmp_path: Path, sound: str, twice: str
) -> None:
    """Lines that differ in numbers alone are read strictly once."""
    path = tmp_path / "observations.jsonl"
    lines = [
        f'{{"kind":"environment","task":"e","round":{number},"facts":{{{facts}}}}}'
        for number, facts in enumerate((sound, sound, twice))
    ]
    path.write_text("\n".join(lines[:2]) + "\n", encoding="utf-8")
    assert len(read_observations(path)) == 2
    append_line(path, lines[2])
    with pytest.raises(InvalidDocument, match="line 3: every key must stand once"):
        read_observations(path)


def test_a_text_without_its_end_is_not_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each of its marks the search would go to the end of the line: 300 kB took minutes."""
    searched: list[bytes] = []

    def search(_: object, line: bytes) -> bytes:
        searched.append(line)
        return line

    monkeypatch.setattr(documents.observation, "_TEXT", SimpleNamespace(sub=search))
    path = tmp_path / "observations.jsonl"
    path.write_text(LINE + "\n" + '"\\' * 1000 + "\n", encoding="utf-8")
    with pytest.raises(InvalidDocument, match="line 2: "):
        read_observations(path)
    assert searched == [LINE.encode()]


def test_lines_that_were_read_are_not_kept() -> None:
    """64 MiB of unlike lines would take twice the memory."""
    shapes: set[bytes] = set()
    for letter in ("a", "b"):
        assert documents.observation._is_surely_strict(
            f'{{"key":"{letter * 1000}"}}'.encode(), shapes
        )
    assert sum(map(len, shapes)) == 64


def test_a_line_that_was_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    append_line(path, LINE, LINE)
    assert len(read_observations(path)) == 2
    first, second = path.read_text(encoding="utf-8").splitlines()
    digit = next(at for at, letter in enumerate(second) if letter in "2345678")
    changed = second[:digit] + "9" + second[digit + 1 :]
    path.write_text(f"{first}\n{changed}\n", encoding="utf-8")
    with pytest.raises(InvalidDocument, match="line 2: was changed after it was written: its seal"):
        read_observations(path)
    path.write_text(f"{first}\n{LINE}\n", encoding="utf-8")
    with pytest.raises(InvalidDocument, match="line 2: must carry a seal as others do, got none"):
        read_observations(path)


def test_lines_are_sealed_unless_an_older_version_began_the_file(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    others = [LINE.replace("all_reduce-2", name) for name in ("a", "b")]
    append_line(path, *others)
    assert check_file(path)[0]["seal"] == "fits"
    path.write_text(f"{LINE}\n", encoding="utf-8")
    append_line(path, *others)
    assert path.read_text(encoding="utf-8").splitlines() == [LINE, *others]
    assert check_file(path)[0]["seal"] == "none"


def test_a_short_line_is_no_seal(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text('{"kind":"unknown"}\n', encoding="utf-8")
    with pytest.raises(InvalidDocument, match=r"line 1: .*'unknown'"):
        read_observations(path)


def test_a_task_that_is_recorded_twice_is_named(tmp_path: Path) -> None:
    """Two campaigns filled one folder: their runs are not those of one plan."""
    path = tmp_path / "observations.jsonl"
    append_line(path, LINE)
    refuse_repeated(path, read_observations(path))
    assert check_file(path)[1] == EXIT_OK
    append_line(path, LINE)
    with pytest.raises(InvalidDocument, match="twice"):
        check_file(path)
    with pytest.raises(InvalidDocument, match="recorded once, got 'all_reduce-2' twice; two cam"):
        fit_profile(path, provenance=PROVENANCE)
    other = LINE.replace("all_reduce-2", "other")
    for line in (other, other):
        append_line(path, line)
    with pytest.raises(InvalidDocument, match=r"twice \(and 1 more\); two"):
        refuse_repeated(path, read_observations(path))


def test_what_failed_runs_again_but_not_what_memory_did_not_hold() -> None:
    """A later try may end well; the last reason of the others is told."""
    large = f"{OUT_OF_MEMORY}: 9 GB"
    reasons = (("a", "killed"), ("b", large), ("c", "killed"), ("a", "raised"))
    entries: list[Observation] = [
        each
        for task, reason in reasons
        for each in (
            FailedObservation(task=task, round=0, setting=setting_of("light", 1, 4), reason=reason),
            ProcessorObservation(task=task, round=0, busy_s=1.0, steal_s=0.0),
        )
    ]
    entries.append(EnvironmentObservation(task="c", round=0, facts={}))
    refuse_repeated(Path(), entries)
    assert [(each.task, each.reason) for each in failures(entries)] == [
        ("a", "raised"),
        ("b", large),
    ]
    assert tasks_done(entries) == {"b", "c"}
    assert failed_replays(failures(entries)) == ("light, micro-batch 4, failed 2 times: raised",)


def test_missing_observations_and_those_that_are_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match="observations cannot be read"):
        read_observations(tmp_path / "none.jsonl")
    for content in (b"garbage", b'{"task": "half', b"\0\1", b"\xff\xfe\0\n"):
        (tmp_path / "some.jsonl").write_bytes(content)
        with pytest.raises(InvalidDocument, match=r"line 1: (must be a JSON object|it is no text)"):
            read_observations(tmp_path / "some.jsonl")


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_only_a_newline_ends_a_line(tmp_path: Path, separator: str) -> None:
    """JSON leaves other line separators of Unicode as they are."""
    fact = EnvironmentObservation(task="e", round=0, facts={"name": f"a{separator}b"})
    path = tmp_path / "observations.jsonl"
    path.write_text(f"{fact.model_dump_json()}\n{LINE}\n", encoding="utf-8")
    assert len(read_observations(path)) == 2


def test_durations_are_stored_finer_than_any_clock_ticks_and_no_finer() -> None:
    observed = ProcessorObservation(task="t", round=0, busy_s=0.1234567891234, steal_s=0.1 + 0.2)
    stored = observed.model_dump_json()
    assert '"busy_s":0.1234567891,"steal_s":0.3' in stored
    assert ProcessorObservation.model_validate_json(stored).model_dump_json() == stored
    assert steal_share([]) == 0.0
    assert steal_share([observed, observed]) == pytest.approx(0.3 / 0.4234567891)

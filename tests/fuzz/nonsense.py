"""Documents of the right form that say nonsense, and questions at the page: what schemas alone let through."""

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from hypothesis import strategies as st
from starlette.testclient import TestClient

from perfmodel.page.server import application
from tests.perfmodel.page.sessions import answers, layout_answers

Drawn: TypeAlias = st.SearchStrategy[str]


def words(text: str) -> list[str]:
    """The words of a list."""
    return text.split()


def texts(text: str) -> list[str]:
    """Texts of a list that stand three blanks or a line apart."""
    return re.split(r" {3,}|\n", text.strip())


def one(found: Sequence[str]) -> Drawn:
    """Any of these."""
    return st.sampled_from(found)


def joined(each: Drawn, separator: str, *, least: int = 0, most: int) -> Drawn:
    """Some, one after the other."""
    return st.lists(each, min_size=least, max_size=most).map(separator.join)


#: Words of libraries, which mean nothing to a user.
GARBAGE: Final = re.compile(
    r"pydantic|numpy|Traceback|https?://errors|NoneType|object is not|set_int_max|internal error|<class|Warning|codec"
)
#: What stands where a number or a text should.
_NUMBERS: Final = (
    *(0, 1, -1, 2, 3, 7, 1000, 10**9, 2**31, 2**53 + 1, 2**63, 10**29),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e-300, 1e-12, 1e12, 1e150, 1e300, -1e300, 0.999999),
)
_TEXTS: Final = ("", "x", "\u0661", "\x1b[31m", "a" * 300, "light", "cpu", "NV\u00b2", "{0}%s")
_OTHERS: Final[tuple[Any, ...]] = (None, True, [], {}, [1], [[]], {"a": 1})
#: What stands where a number, a name or anything else should.
HOSTILE: Final = [
    *words("1e999 -1e999 NaN nan inf -1 0 -0 1e-320 1e300 0.5 1_000 999999999 0x10 1e3 1. \u0663"),
    *words('\uff11\uff12 true null "5" "" [] {} [[[[ {"a":1,"a":2} .. / %s {0} a=b=c , ; : ='),
    *words("dp=8 10us 25GB/s 2x \x9b31m \\ud800 \\u001b[2J \u00b2 NV\u00b2 18446744073709551616"),
    *("\x1b[31m", "\x00", "\ufeff", "\u2028", "\ud800", "\r", "\n", "9" * 25, "9" * 5000),
    *("1" * 300, "x" * 3000, "[" * 2000, '{"a":' * 300),
]


class Change(NamedTuple):
    """One value of a document: where, as a share of all its values, what happens, and the new one."""

    place: float
    kind: str
    value: Any


_KINDS: Final = words("like like like any drop twice reverse scale")
_NEW: Final = st.sampled_from((*_NUMBERS, *_NUMBERS, *_TEXTS, *_OTHERS))
_CHANGE: Final = st.builds(Change, st.floats(0, 1), one(_KINDS), _NEW)
changes: Final = st.lists(_CHANGE, min_size=1, max_size=3)


def _places(found: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    for key in list(found) if isinstance(found, dict) else range(len(found)):
        yield found, key
        if isinstance(found[key], dict | list):
            yield from _places(found[key])


def _like(old: Any, new: Any) -> Any:
    """The new value as the kind of the old one."""
    number = new if isinstance(new, int | float) else 0
    if isinstance(old, bool) or not isinstance(old, int | float | str):
        return new
    if isinstance(old, str):
        return new if isinstance(new, str) else "x"
    return float(number) if isinstance(old, float) else int(min(abs(number), 1e29))


def changed(document: Any, what: list[Change]) -> Any:
    """A copy of a JSON object with changes that keep it JSON."""
    found = copy.deepcopy(document)
    for change in what:
        places = [place for place in _places(found) if place[1] != "schema_version"]
        if not places:
            break
        inside, key = places[int(change.place * (len(places) - 1))]
        old = inside[key]
        if change.kind == "drop":
            del inside[key]
        elif change.kind == "twice" and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(old))
        elif change.kind == "reverse" and isinstance(old, list):
            old.reverse()
        elif change.kind == "scale" and isinstance(old, float):
            inside[key] = old * 1e30
        else:
            new = copy.deepcopy(change.value)
            inside[key] = new if change.kind == "any" else _like(old, new)
    return found


#: Commands that answer from an edited document, which stands behind the last word.
UNSEALED: Final = (
    ("stored", "predict --workload heavy --devices 1,2,64 --profile"),
    ("stored", "explain --workload light --profile"),
    ("stored", "whatif --workload light --set network.bandwidth=2x --profile"),
    ("stored", "batch --workload light --profile"),
    ("stored", "acceptance write --output written --profile"),
    ("measured", "predict --workload resnet18 --devices 1,8 --profile"),
    ("measured", "predict --no-measure --devices 1,2 --workload {traced} --profile"),
    ("inferred", "predict --model gpt2-xl --layout dp=8 --profile"),
    ("inferred", "plan parallelism --model gpt2-xl --devices 8 --global-batch 64 --profile"),
    ("traced", "memory --workload"),
    ("traced", "predict --profile {stored} --no-measure --workload"),
)
#: Commands that answer from a file, which stands behind the last word; those of documents have a seal.
READING: Final = (
    *UNSEALED,
    *((name, "check") for name in dict(UNSEALED)),
    ("stored", "diff {slower}"),
    ("plan", "plan options --today 2026-11-21"),
    ("budget", "cost --today 2026-11-21"),
)
edited: Final = st.tuples(st.sampled_from(UNSEALED), changes)

#: A question at the page of a calibrated machine, and at that of one inferred from runs.
STEP: Final[dict[str, Any]] = json.loads("""
{"profile": "here", "workload": "light", "scaling": "weak", "layout": "dp=8", "batch": 16, "cluster": null,
 "capacity_bytes": 17179869184, "changes": {"network.bandwidth": "2x", "network.latency": "10us"}}
""")
_LAYOUT: Final[dict[str, Any]] = json.loads("""
{"profile": "inferred", "workload": "gpt2-xl", "batch": 64, "layout": "dp=8 tp=2 pp=2 zero=1",
 "capacity_bytes": 68719476736}
""")
_FIELDS: Final = words("""
network.bandwidth network.latency network.algorithm device memory.bandwidth precision accumulation bucket_cap_mb
loader.samples_per_s workload cluster devices ranks.noise device.speed bucket_cap x
""")
_VALUES: Final = [
    *words("0 1 -1 2x 0x 1e300x 1e-300x 400Gb/s 1e300B/s 10us 1e300s nan inf bf16 ring tree"),
    *words("1e-320x 64 1000000 0.5 1e3 1e308PB/s 1e300B \u0661x \ud800 NV\u00b2 h100-sxm5"),
    *("", " ", "9" * 39, "9" * 40),
]
_KEYS: Final = words("""
dp tp pp cp ep zero fsdp ddp micro_batch accumulation x interleave schedule recompute shard precision one_process
""")
_WORDS: Final = [
    *words("0 1 2 3 4 8 16 48 64 1024 1000000 -1 1.5 \u00b2 yes no full gpipe nan 7,9,9,7"),
    *("bf16", "1_0", "+2", "", "9" * 20, "9" * 100, "9" * 5000),
]
layouts: Final = joined(st.builds("{}={}".format, one(_KEYS), one(_WORDS)), " ", most=6)
BROKEN: Final = (b"", b"{", b"[" * 3000, b"\xff", b"9" * 5000, b',"layout":"dp=8"')


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, bytes]:
    """Address and body of a request."""
    asked = copy.deepcopy(draw(st.sampled_from((STEP, _LAYOUT))))
    if draw(st.booleans()):
        fields = st.dictionaries(one(_FIELDS), one(_VALUES), max_size=4)
        is_step = "changes" in asked
        asked["changes" if is_step else "layout"] = draw(fields if is_step else layouts)
    if draw(st.integers(0, 2)):
        asked = changed(asked, draw(changes))
    body = json.dumps(asked).encode()
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.sampled_from(BROKEN)) + body[at:]
    return draw(one(["/answer", "/detail"])), body


def garbage(said: str) -> list[str]:
    """What a library says in a message."""
    return [f"words of a library: {said}"] if GARBAGE.search(said) else []


def page_check() -> Callable[[tuple[str, bytes]], list[str]]:
    """Ask pages: an answer is finite, a refusal is one line; anything else is a fault."""
    pages = [application(each) for each in (answers(), layout_answers())]
    clients = [TestClient(page, base_url="http://127.0.0.1") for page in pages]

    def check(asked: tuple[str, bytes]) -> list[str]:
        faults: list[str] = []
        for client in clients:
            headers = {"Content-Type": "application/json"}
            got = client.post(asked[0], content=asked[1], headers=headers)
            if got.status_code == 200:
                json.loads(got.text, parse_constant=faults.append)
                continue
            said = got.json().get("error", "")
            if got.status_code not in (400, 413, 422) or not said or "\n" in said:
                faults.append(f"status {got.status_code}: {said!r}")
            faults += garbage(said)
        return faults

    return check

"""Logged speeds of a training: typed by a person, ``2 nodes of 4: 8.7 s``, or read from the log of its trainer.

Lines as the trainers of late 2026 write them: Lightning and HF Trainer show tqdm bars, of batches and of
optimizer steps, HF prints ``train_steps_per_second`` at the end; Megatron-LM "elapsed time per iteration (ms)";
torchtitan "tps:", which is of one device; llm-foundry "throughput/device/tokens_per_sec".
"""

import enum
import math
import re
import signal
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, NoReturn

from perfmodel.errors import InvalidDocument, UsageError, reading, refuse_unknown
from perfmodel.files import LastLines, read_last_lines
from perfmodel.units import decimal, whole

#: Of an observation, or of a pattern for lines of a log.
MOST_CHARACTERS: Final = 500


class Unit(enum.StrEnum):
    """What a logged number counts."""

    STEP = "s per step"
    MICRO_STEP = "s per micro-step"
    STEPS = "steps/s"
    TOKENS = "tokens/s"
    SAMPLES = "samples/s"
    WORDS = "words/s"
    MFU = "MFU"
    FLOP = "FLOP/s of a device"
    MEMORY = "bytes of a device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One number of one setting; None is what the text does not say."""

    text: str
    value: float | None = None
    """In SI units; a share for MFU."""
    unit: Unit | None = None
    per_device: bool | None = None
    devices: int | None = None
    nodes: int | None = None
    per_node: int | None = None
    layout: str = ""
    """Words such as ``tp=2 pp=4``."""
    device: str = ""
    """Name of the accelerator, such as ``rtx 3090``."""
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    """Tokens of one sample."""


_PER_S: Final = r"\s*(?:/|per)\s*s(?:ec|econd)?"
#: Longer ones first.
_UNITS: Final = tuple(
    (re.compile(rf"(?:{pattern})(?![\w/])", re.IGNORECASE), unit, scale)
    for pattern, unit, scale in (
        (rf"tok(?:en)?s?{_PER_S}|tps", Unit.TOKENS, 1.0),
        (rf"ktok(?:en)?s?{_PER_S}", Unit.TOKENS, 1e3),
        (rf"(?:samples?|images?|imgs?|sequences?|seqs?){_PER_S}", Unit.SAMPLES, 1.0),
        (rf"words?{_PER_S}|wps", Unit.WORDS, 1.0),
        (rf"(?:it|iters?|iterations?|steps?|batch(?:es)?){_PER_S}", Unit.STEPS, 1.0),
        (r"%\s*mfu|mfu\s*%", Unit.MFU, 0.01),
        (r"mfu", Unit.MFU, 1.0),
        (r"tflops?(?:/s)?", Unit.FLOP, 1e12),
        (r"pflops?(?:/s)?", Unit.FLOP, 1e15),
        (r"gib", Unit.MEMORY, 2.0**30),
        (r"gb", Unit.MEMORY, 1e9),
        (
            r"(?:ms|msec|milliseconds?)(?:\s*(?:/|per)\s*(?:it|iter\w*|step|batch))?",
            Unit.STEP,
            1e-3,
        ),
        (r"(?:s|sec|seconds?)(?:\s*(?:/|per)\s*(?:it|iter\w*|step|batch))?", Unit.STEP, 1.0),
        (r"(?:min|minutes?)(?:\s*(?:/|per)\s*(?:it|iter\w*|step|batch))?", Unit.STEP, 60.0),
    )
)
#: Commas part thousands: 2,5 is not 25.
_NUMBER: Final = r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)\s*(k(?![a-z]))?\s*"
_WORDS: Final = {"one": "1", "two": "2", "three": "3", "four": "4", "eight": "8"}
_LAYOUT: Final = re.compile(r"\b[a-z_]+=[\w.,-]+")
_SETTINGS: Final = (
    re.compile(r"\b(?P<nodes>\d[\d,]*)\s*nodes?\s*(?:of|x|with)\s*(?P<per_node>\d+)\b"),
    re.compile(r"\b(?P<nodes>\d[\d,]*)\s*x\s*(?P<per_node>\d+)\b"),
    re.compile(r"\b(?P<nodes>\d[\d,]*)\s*nodes?\b"),
)
_DEVICES: Final = re.compile(r"\b(?P<devices>\d[\d,]*)\s*(?:gpus?|devices?|cards?|ranks?)\b")
_ACCELERATOR: Final = re.compile(
    r"(?:\b(?P<devices>\d[\d,]*)\s*x?\s*)?(?<![a-z])"
    r"(?P<device>(?:(?:nvidia|geforce|tesla|amd|instinct)\s+)*(?:(?:rtx|gtx)\s?|mi|gb|gh|[abhlvt])\d{1,4}"
    r"(?:\s?ti|x)?(?:-[a-z0-9-]+)?)s?\b"
)
_EACH: Final = re.compile(r"(?:per|/|each)\s*(?:gpu|device|card|rank)\b|\beach\b")
_ALL: Final = re.compile(r"\b(?:total|all|together|overall)\b")
_FILLERS: Final = (
    *("on", "in", "a", "an", "at", "with", "and", "of", "the", "is", "took", "takes"),
    *("reserved", "memory", "gpus"),
)


def read_observed(text: str) -> Logged:
    """A typed observation such as ``2 nodes of 4: 8.7 s``; ``UsageError`` for what is not understood."""
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"--observed: must have at most {MOST_CHARACTERS} characters, got {len(text):,}"
        )
    left = re.sub(r"\bmfu[\s:=]*([\d.]+)\s*(%?)", r"\1 \2 mfu", text.casefold())
    for word, digit in _WORDS.items():
        left = re.sub(rf"\b{word}\b", digit, left)
    layout = " ".join(_LAYOUT.findall(left))
    left = _LAYOUT.sub(" ", left)
    found: dict[str, int] = {}
    for pattern in _SETTINGS:
        if match := pattern.search(left):
            found |= {name: _whole(value) for name, value in match.groupdict().items()}
            left = left[: match.start()] + " " + left[match.end() :]
            break
    per_device = True if _EACH.search(left) else False if _ALL.search(left) else None
    left = _ALL.sub(" ", _EACH.sub(" ", left))
    if match := _DEVICES.search(left):
        found["devices"] = _whole(match["devices"])
        left = left[: match.start()] + " " + left[match.end() :]
    named = ""
    if match := _ACCELERATOR.search(left):
        named = match["device"]
        if match["devices"] and "devices" not in found:
            found["devices"] = _whole(match["devices"])
        left = left[: match.start()] + " " + left[match.end() :]
    value, unit, left = _quantity(text, left)
    strange = [w for w in re.findall(r"[^\s:,;.]+", left) if w not in _FILLERS]
    if strange:
        raise UsageError(
            f"--observed: {text!r} holds {' '.join(strange)!r}, which is not understood; such as '8 GPUs "
            "1 node 2.5 s' or '64 GPUs: 1,000 tokens/s per GPU'"
        )
    return Logged(
        text=text,
        value=value,
        unit=unit,
        per_device=per_device,
        layout=layout,
        device=named,
        **found,
    )


def _whole(text: str) -> int:
    try:
        found = whole(text.replace(",", ""))
    except ValueError as error:
        raise UsageError(f"--observed: counts {error}") from None
    if not 0 < found <= 2**20:
        raise UsageError(f"--observed: counts must be 1 to {2**20:,}, got {text}")
    return found


def _quantity(text: str, left: str) -> tuple[float | None, Unit | None, str]:
    """The number with a unit, and the text without it."""
    for pattern, unit, scale in _UNITS:
        for match in re.finditer(rf"{_NUMBER}(?={pattern.pattern})", left, re.IGNORECASE):
            end = pattern.match(left, match.end())
            assert end is not None
            try:
                value = decimal(match[1].replace(",", "")) * scale * (1e3 if match[2] else 1.0)
            except ValueError as error:
                raise UsageError(f"--observed: {error} in {text!r}") from None
            if unit is Unit.MFU and scale == 1 and value > 1:
                value /= 100  # "MFU 13.5"; above 100 % it is written with its sign
            if not 0 < value < math.inf:
                raise UsageError(f"--observed: must be finite and > 0, got {match[1]} in {text!r}")
            return value, unit, left[: match.start()] + " " + left[end.end() :]
    if re.search(r"\d", left) or not re.search(r"gpu|device|card|node|rank|\dx\d", text.casefold()):
        known = "s, ms, it/s, tokens/s, samples/s, words/s, MFU, TFLOP/s, GiB"
        raise UsageError(f"--observed: {text!r} must hold one number with a unit of {known}")
    return None, None, left


#: The first steps still compile, fill caches and warm up.
_WARM_UP: Final = 3
_LEAST_LINES: Final = 2
_MOST_TOLD: Final = 3
#: A step this many times as long as the median holds an evaluation or a checkpoint.
_PAUSE: Final = 3.0
#: First and last third of a log that differ by more are not of one setting.
_CHANGED: Final = 1.5
#: Of a pattern of one's own for a whole log. [s]
_MOST_SEARCH_S: Final = 5.0


class _Format(NamedTuple):
    """One number per line: group ``value`` with its unit, and what must stand before it: ``step``, ``epoch``.

    Two patterns, because one with ``.*`` inside takes time with the square of a line.
    """

    pattern: str
    unit: Unit
    scale: float = 1.0
    per_device: bool | None = None
    before: str = ""
    word: str = ""
    """Stands in every such line; found in a tenth of the pattern's time."""
    is_folded: bool = True
    """Whether lines are read in small letters."""

    def search(self, log: LastLines) -> Iterator[tuple[int, dict[str, str]]]:
        """Lines with a value: the number of each, and the groups of both patterns."""
        value, before = re.compile(self.pattern), re.compile(self.before)
        for number, text in enumerate(log.lines, start=log.skipped + 1):
            line = text.casefold() if self.is_folded else text
            found = value.search(line) if line and self.word in line else None
            start = before.match(line, 0, found.start()) if found else None
            if found and start and found["value"]:
                yield number, start.groupdict() | found.groupdict()


#: One way to read each text: a choice of where digits part takes time with the square of their number.
_FLOAT: Final = r"(?P<value>(?:[\d,]*\.\d+|[\d,]*\d)(?:e[+-]?\d+)?)"
_EPOCH: Final = r".*?epoch (?P<epoch>\d+)"
_STEP: Final = r".*?step:\s*(?P<step>[\d,]+)"
_BAR: Final = r"\b(?P<step>\d+)/(?P<total>\d+) \[[\d:]+<[\d:?]+,\s*"
#: A bar turns from s/it to it/s at one a second: both are read.
_RATE: Final = rf"{_FLOAT}\s*(?P<rate>s/it|it/s)"
#: By trainer, the likeliest first: the first that a log holds is read.
FORMATS: Final = {
    # Its bar counts batches, not optimizer steps; those of validations name no epoch.
    # Of a loader without a length it has no end; Rich draws another.
    "lightning": tuple(
        _Format(rf"{bar}{_RATE}", Unit.MICRO_STEP, before=_EPOCH, word="epoch")
        for bar in (
            _BAR,
            r"\b\d+it \[[\d:]+,\s*",
            r"\b(?P<step>\d+)/(?P<total>\d+) [\d:]+ \S [-\d:]+ ",
        )
    ),
    "hf": (
        _Format(rf"{_BAR}{_RATE}", Unit.STEP, before=rf"(?:{_EPOCH})?", word="<"),
        _Format(
            rf"'train_steps_per_second': '?{_FLOAT}", Unit.STEPS, word="train_steps_per_second"
        ),
        _Format(
            rf"\btrain_steps_per_second\s+= +{_FLOAT}", Unit.STEPS, word="train_steps_per_second"
        ),
    ),
    "megatron": (
        _Format(
            rf"elapsed time per iteration \(ms\): {_FLOAT}",
            Unit.STEP,
            1e-3,
            before=r".*?iteration\s+(?P<step>\d+)/",
            word="elapsed time per iteration",
        ),
    ),
    "torchtitan": (
        _Format(
            rf"\b(?:tps|wps): {_FLOAT}", Unit.TOKENS, per_device=True, before=_STEP, word="ps: "
        ),
        _Format(rf"\bmfu: {_FLOAT}%", Unit.MFU, 0.01, before=_STEP, word="mfu: "),
    ),
    "llm-foundry": tuple(
        _Format(rf"{key}: {_FLOAT}", unit, per_device=per_device, word=key)
        for key, unit, per_device in (
            ("throughput/device/tokens_per_sec", Unit.TOKENS, True),
            ("throughput/batches_per_sec", Unit.STEPS, None),
            ("throughput/samples_per_sec", Unit.SAMPLES, False),
        )
    ),
}
#: Groups that a pattern of one's own may name.
GROUPS: Final = {
    "s": (Unit.STEP, 1.0, None),
    "ms": (Unit.STEP, 1e-3, None),
    "it_per_s": (Unit.STEPS, 1.0, None),
    "tokens_per_s": (Unit.TOKENS, 1.0, False),
    "tokens_per_s_per_gpu": (Unit.TOKENS, 1.0, True),
    "samples_per_s": (Unit.SAMPLES, 1.0, None),
    "tflops": (Unit.FLOP, 1e12, True),
}


def _formats(name: str) -> Sequence[_Format]:
    kind, colon, pattern = name.partition(":")
    if kind != "regex" or not colon:
        refuse_unknown("--log-format", name, (*FORMATS, "regex:PATTERN"))
        return FORMATS[name]
    if len(pattern) > MOST_CHARACTERS:
        raise UsageError(f"--log-format: pattern must be at most {MOST_CHARACTERS} characters")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--log-format: pattern {pattern!r} is broken: {error}") from error
    named = [group for group in compiled.groupindex if group in GROUPS]
    if len(named) != 1:
        raise UsageError(
            f"--log-format: pattern must name one group of {', '.join(GROUPS)}, such as "
            f"'regex:took (?P<ms>[0-9.]+) ms', got {pattern!r}"
        )
    unit, scale, per_device = GROUPS[named[0]]
    valued = pattern.replace(f"?P<{named[0]}>", "?P<value>")
    return (_Format(valued, unit, scale, per_device, is_folded=False),)


@contextmanager
def _within_time(name: str) -> Iterator[None]:
    """End what a pattern of one's own searches for too long: some try every way to divide a line.

    The main thread alone can be interrupted; others wait.
    """
    if name in FORMATS or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> NoReturn:
        raise UsageError(
            f"--log-format: pattern must find its lines within {_MOST_SEARCH_S:g} s; leave out a repetition "
            f"inside a repetition, such as (a+)+, got {name.removeprefix('regex:')!r}"
        )

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, _MOST_SEARCH_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


#: Levels of ZeRO in words.
_LEVELS: Final = {"fsdp": "3", "true": "1"}
#: What the heads of logs say of a run: of HF Trainer, Lightning, torchtitan, and the arguments that Megatron-LM
#: prints. Each with text that stands in every such line, all in small letters.
_HEADS: Final = tuple(
    (name, word, re.compile(pattern))
    for name, word, pattern in (
        (
            "micro_batch",
            "batch size per device",
            r"\binstantaneous batch size per device = ([\d,]+)",
        ),
        ("micro_batch", "local batch size", r"\blocal batch size:? (\d+)"),
        ("micro_batch", "micro_batch_size", r"^ *micro_batch_size \.+ (\d+)"),
        (
            "accumulation",
            "gradient accumulation steps",
            r"\bgradient accumulation steps(?: =|:)? (\d[\d,]*)",
        ),
        ("global_batch", "total train batch", r"\btotal train batch size \([^()]*\) = ([\d,]+)"),
        ("global_batch", "global batch size", r"\bglobal batch size:? *(\d+)"),
        ("global_batch", "global_batch_size", r"^ *global_batch_size \.+ (\d+)"),
        ("sequence_length", "sequence length", r"\bsequence length:? (\d+)"),
        ("sequence_length", "seq_length", r"^ *seq_length \.+ (\d+)"),
        ("devices", "world_size", r"^ *world_size \.+ (\d+)"),
        ("devices", "using world size", r"\busing world size: (\d+)"),
        (
            "devices",
            "starting with",
            r"\bdistributed processes registered. starting with (\d+) proc",
        ),
        ("zero", "applied fsdp", r"\bapplied (fsdp) to the model"),
        ("zero", "use_distributed_optimizer", r"^ *use_distributed_optimizer \.+ (true)"),
        ("tp", "parallel", r"\btensor[-_]model[-_]parallel[-_ ]size(?: \.+|:) (\d+)"),
        ("pp", "parallel", r"\bpipeline[-_]model[-_]parallel[-_ ]size(?: \.+|:) (\d+)"),
        ("cp", "parallel", r"\bcontext[-_]parallel[-_ ]size(?: \.+|:) (\d+)"),
    )
)


def read_log(path: Path, *, name: str | None = None) -> tuple[Logged, tuple[str, ...]]:
    """The median speed of the settled steps of a log, and what was left out.

    ``name``: Of ``FORMATS``, or a pattern; None: the one trainer whose lines the log holds.

    Raises ``InvalidDocument`` if there are no steps, warm-up alone, several runs, or lines of several trainers.
    """
    formats = None if name is None else _formats(name)
    with reading(path, "log"):
        log = read_last_lines(path)
    known = name or _format_of(path, log)
    with _within_time(known):
        logged, notes = _read(path, log, known, formats or FORMATS[known])
    if log.skipped:
        notes = (
            f"{path}: of a long log the last {_lines(len(log.lines))} are read, {log.skipped} are left out",
            *notes,
        )
    if name is None:
        notes = (f"{path}: read as a log of {known}; --log-format names another", *notes)
    return logged, notes


def _format_of(path: Path, log: LastLines) -> str:
    """The trainer whose lines a log holds; bars with epochs are Lightning's."""
    held = [
        name
        for name, forms in FORMATS.items()
        if any(next(form.search(log), None) for form in forms)
    ]
    if {"lightning", "hf"} <= set(held):
        held.remove("hf")
    if len(held) > 1:
        raise InvalidDocument(
            f"{path}: log must be of one trainer, but holds lines of {' and '.join(held)}; name one with "
            "--log-format, or keep one run"
        )
    if not held:
        raise InvalidDocument(
            f"{path}: log holds no step of {', '.join(FORMATS)}; name its lines with --log-format, such as "
            "'regex:took (?P<ms>[0-9.]+) ms'"
        )
    return held[0]


def _read(
    path: Path, log: LastLines, name: str, formats: Sequence[_Format]
) -> tuple[Logged, tuple[str, ...]]:
    for form in formats:
        found = _lines_of(path, log, form)
        rows = list(_rows(path, found))
        if rows:
            break
    else:
        raise InvalidDocument(
            f"{path}: log holds no step that --log-format {name} knows; name another of "
            f"{', '.join(FORMATS)}, or regex:PATTERN"
        )
    is_summary = len(rows) == 1 and rows[0][0] is None
    warm_up = 0 if is_summary else _warm_up(rows)
    settled = rows[warm_up:]
    if len(settled) < _LEAST_LINES and not is_summary:
        raise InvalidDocument(
            f"{path}: log must go on after its warm-up (the first line, steps 1 to {_WARM_UP}) for at least "
            f"{_LEAST_LINES} lines, got {len(settled)} of {len(rows)}; let the training run longer"
        )
    values = [value for _, value in settled]
    middle = median(values)
    is_time = form.unit in (Unit.STEP, Unit.MICRO_STEP)
    paused = [v for v in values if (v > _PAUSE * middle if is_time else v < middle / _PAUSE)]
    notes = [] if is_summary else [f"{path}: first {_lines(warm_up)} left out as warm-up"]
    if paused:
        told = f"{len(paused)} slow {'line' if len(paused) == 1 else 'lines'}"
        notes.append(f"{path}: {told} left out as pauses (evaluation, checkpoint)")
    slow = frozenset(paused)
    kept = [value for value in values if value not in slow]
    # Bars of other lengths than that which trains.
    counts = Counter(line.total for line in found)
    del counts[_training_bar(found)]
    others = [f"{count} of {total} steps" for total, count in counts.most_common(_MOST_TOLD)]
    if others:
        notes.append(f"{path}: bars left out as evaluation or another run: {', '.join(others)}")
    notes += _changing(path, kept, form)
    logged = Logged(
        text=f"{path.name}: {'its summary' if is_summary else f'median of {_lines(len(kept))}'}",
        value=median(kept) * form.scale,
        unit=form.unit,
        per_device=form.per_device,
    )
    return replace(logged, **_told(path, (*log.beginning, *log.lines))), tuple(notes)


def _lines(count: int) -> str:
    return "line" if count == 1 else f"{count} lines"


def _told(path: Path, lines: Sequence[str]) -> dict[str, Any]:
    """Batch, sequence, devices and layout as a log tells them, each the same all along."""
    found: dict[str, int] = {}
    for line in lines:
        low = line.casefold()
        for name, word, pattern in _HEADS:
            match = pattern.search(low) if word in low else None
            try:
                value = whole(_LEVELS.get(match[1], match[1]).replace(",", "")) if match else 0
            except ValueError as error:
                raise InvalidDocument(f"{path}: {name.replace('_', ' ')} {error}") from None
            if value and found.setdefault(name, value) != value:
                raise InvalidDocument(
                    f"{path}: log must be of one run, but has two of {name.replace('_', ' ')}: {found[name]} "
                    f"and {value}; keep one run"
                )
    words = {key: found.pop(key) for key in ("tp", "pp", "cp", "zero") if key in found}
    shared = {key: size for key, size in words.items() if size > 1 and key != "zero"}
    layout = " ".join(f"{key}={size}" for key, size in words.items() if key in {*shared, "zero"})
    if {"micro_batch", "accumulation", "global_batch"} <= found.keys():
        each = found["micro_batch"] * found["accumulation"]
        if found["global_batch"] % each == 0 and not shared:
            found.setdefault("devices", found["global_batch"] // each)
        del found["global_batch"]
    return found | ({"layout": layout} if layout else {})


class _Line(NamedTuple):
    """One number of a log."""

    number: int
    step: int | None
    value: float
    total: str | None
    """Steps of its bar."""


def _changing(path: Path, values: Sequence[float], form: _Format) -> Iterator[str]:
    """A note where the first and the last third of a log are not of one speed."""
    third = len(values) // 3
    if third < _LEAST_LINES:
        return
    first, last = median(values[:third]), median(values[-third:])
    if not 1 / _CHANGED < first / last < _CHANGED:
        yield (
            f"{path}: speed changes from {first * form.scale:.3g} to {last * form.scale:.3g} {form.unit} along "
            "the log, as of several runs or settings; keep one"
        )


def _warm_up(rows: Sequence[tuple[int | None, float]]) -> int:
    """Lines of warm-up: the first, and those of the first steps; a line may stand for many steps.

    Where lines have no steps, a short log may be a line for many steps, too.
    """
    steps = [step for step, _ in rows if step is not None]
    if steps:
        return max(1, sum(step <= _WARM_UP for step in steps))
    return _WARM_UP if len(rows) >= 2 * _WARM_UP else 1


def _lines_of(path: Path, log: LastLines, form: _Format) -> list[_Line]:
    """Every number of a format."""
    found = []
    for number, groups in form.search(log):
        text, epoch, total = (groups.get(name) for name in ("step", "epoch", "total"))
        try:
            step = (
                None
                if text is None
                else whole(text.replace(",", "")) + whole(epoch or "0") * whole(total or "0")
            )
            value = decimal(groups["value"].replace(",", ""))
            if groups.get("rate") == "it/s" and value:
                value = 1 / value
        except ValueError as error:
            raise InvalidDocument(f"{path}: line {number}: {error}") from None
        if value == math.inf:
            raise InvalidDocument(f"{path}: line {number}: must be finite, got {groups['value']}")
        found.append(_Line(number, step, value, total))
    return found


def _training_bar(found: Sequence[_Line]) -> str | None:
    """Steps of the bar that trains: its steps take longer than those of any evaluation, however many lines show it."""
    values: defaultdict[str | None, list[float]] = defaultdict(list)
    steps: defaultdict[str | None, int] = defaultdict(int)
    for line in found:
        values[line.total].append(line.value)
        steps[line.total] = max(steps[line.total], line.step or len(values[line.total]))
    return max(values, key=lambda bar: steps[bar] * statistics.median(values[bar]), default=None)


def _rows(path: Path, found: Sequence[_Line]) -> Iterator[tuple[int | None, float]]:
    """Step and value of every line, steps ascending; of bars those of the one that trains."""
    trains = _training_bar(found)
    before = -1
    for number, step, value, total in found:
        if total != trains:
            continue
        if step is not None and step < before:
            raise InvalidDocument(
                f"{path}: log must be of one run, but line {number} goes from step {before} back to "
                f"{step}; keep one run"
            )
        if value > 0 and (step is None or step > before):
            yield step, value
        before = before if step is None else step

"""Logged speeds of a training, as a person types them: ``2 nodes of 4: 8.7 s``."""

import enum
import math
import re
from dataclasses import dataclass
from typing import Final

from perfmodel.errors import UsageError
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

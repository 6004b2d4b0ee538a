"""How a large model is spread over devices: one grammar for every parallelism, and what is impossible.

``dp=8 tp=4 pp=2 cp=1 ep=1 zero=1 micro_batch=2 recompute=selective schedule=1f1b interleave=2``
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, TypeVar

from perfmodel import checks
from perfmodel.errors import NotFeasible, UsageError, did_you_mean
from perfmodel.parallelism.strategy import MOST_BATCH, MOST_DEVICES


class Recompute(enum.StrEnum):
    """Which activations are computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    """Attention alone (Korthikanti 2022, arXiv 2205.05198)."""
    FULL = "full"


class Schedule(enum.StrEnum):
    """Order of the micro-batches in a pipeline."""

    GPIPE = "gpipe"
    """All forward passes, then all backward passes: every micro-batch is in flight."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward in turn: at most one micro-batch in flight per stage behind."""
    ZERO_BUBBLE = "zero_bubble"
    """Weight gradients fill the bubble; a third of it is left (Qi 2023, arXiv 2401.10241)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to spread a transformer over ``world_size`` devices."""

    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Ranks that share each matrix."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Ranks that share each sequence."""
    ep: int = 1
    """Ranks that share the experts."""
    zero: int = 0
    """0: everything replicated, 1: optimizer sharded over dp, 2: and gradients, 3: and parameters."""
    micro_batch: int = 1
    """Sequences per forward pass of one replica."""
    accumulation: int = 1
    """Micro-batches per step of one replica."""
    recompute: Recompute = Recompute.NONE
    schedule: Schedule = Schedule.ONE_F_ONE_B
    interleave: int = 1
    """Stages per device (virtual pipeline)."""
    sequence_parallel: bool = False
    """Norms and dropouts are divided over tp as well."""

    def __post_init__(self) -> None:
        """Refuse layouts that no model could have."""
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "accumulation", "interleave"):
            checks.at_least(name, getattr(self, name), 1)
        checks.within("dp x tp x pp x cp", self.world_size, 1, MOST_DEVICES)
        checks.within("dp x micro_batch x accumulation", self.global_batch, 1, MOST_BATCH)
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero must be 0, 1, 2 or 3, got {self.zero}")
        if self.interleave > 1 and self.pp == 1:
            raise ValueError(f"interleave must be 1 without a pipeline, got {self.interleave}")
        if self.interleave > 1 and self.schedule is not Schedule.ONE_F_ONE_B:
            raise ValueError(
                f"schedule must be {Schedule.ONE_F_ONE_B} with interleave > 1, got {self.schedule}"
            )
        if self.pp > 1 and self.zero > 1:
            raise ValueError(
                f"zero must be 0 or 1 in a pipeline (gradients stay until the last micro-batch), "
                f"got {self.zero}"
            )

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.dp * self.micro_batch * self.accumulation

    def __str__(self) -> str:
        """The layout in the grammar that ``parse_layout`` reads, defaults left out."""
        return " ".join(
            f"{field.name}={_text(value)}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        )


_NUMBERS: Final = (
    "dp", "tp", "pp", "cp", "ep", "zero", "micro_batch", "accumulation", "interleave"
)  # fmt: skip
_KEYS: Final = (*_NUMBERS, "recompute", "schedule", "sequence_parallel")


def parse_layout(text: str) -> Layout:
    """A layout from text such as ``dp=8 tp=4 pp=2 zero=1 micro_batch=2 recompute=selective``.

    Raises
    ------
    UsageError
        If a word is not ``key=value``, a key is unknown or given twice, or a value makes no sense.
    """
    words: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise UsageError(
                f"layout: every word must be KEY=VALUE with KEY one of {', '.join(_KEYS)}, "
                f"got {word!r}{_near(key)}"
            )
        if key in words:
            raise UsageError(f"layout: {key} must be given once, got it twice in {text!r}")
        words[key] = value
    try:
        return Layout(
            **{key: _number(key, words[key]) for key in _NUMBERS if key in words},
            recompute=_choice("recompute", words, Recompute.NONE),
            schedule=_choice("schedule", words, Schedule.ONE_F_ONE_B),
            sequence_parallel=_yes(words.get("sequence_parallel", "no")),
        )
    except ValueError as error:
        raise UsageError(f"layout: {error}") from error


def require_feasible(
    layout: Layout, *, layers: int, heads: int, world_size: int, sequence: int | None = None
) -> None:
    """Refuse a layout that this model or this number of devices does not allow.

    Raises
    ------
    NotFeasible
        Naming the first rule that is broken.
    """
    reason = impossible(
        layout, layers=layers, heads=heads, world_size=world_size, sequence=sequence
    )
    if reason is not None:
        raise NotFeasible(f"layout {layout}: {reason}")


def impossible(
    layout: Layout, *, layers: int, heads: int, world_size: int, sequence: int | None = None
) -> str | None:
    """Why a layout cannot be run, or ``None``."""
    stages = layout.pp * layout.interleave
    rules = (
        (
            layout.world_size != world_size,
            f"dp x tp x pp x cp must be {world_size} devices, got {layout.world_size}",
        ),
        (
            heads % layout.tp != 0,
            f"tp must divide the {heads} heads, got {layout.tp}",
        ),
        (
            layers % stages != 0,
            f"pp x interleave must divide the {layers} layers, got {stages}",
        ),
        (
            sequence is not None and sequence % (2 * layout.cp) != 0 and layout.cp > 1,
            f"2 x cp must divide the {sequence} tokens of a sequence, got cp = {layout.cp}",
        ),
        (
            layout.ep != 1,
            f"ep must be 1 for a model without experts, got {layout.ep}",
        ),
        (
            layout.interleave > 1 and layout.accumulation % layout.pp != 0,
            f"accumulation must be a multiple of pp = {layout.pp}, got {layout.accumulation}",
        ),
    )
    return next((reason for broken, reason in rules if broken), None)


def accumulation_for(*, global_batch: int, dp: int, micro_batch: int) -> int:
    """Micro-batches per step that make up a global batch.

    Raises
    ------
    NotFeasible
        If the batch cannot be split evenly.
    """
    each = dp * micro_batch
    if global_batch < 1 or global_batch % each:
        raise NotFeasible(
            f"global batch must be a multiple of dp x micro_batch ({each}), got {global_batch}"
        )
    return global_batch // each


_ChoiceT = TypeVar("_ChoiceT", Recompute, Schedule)


def _choice(key: str, words: Mapping[str, str], default: _ChoiceT) -> _ChoiceT:
    kind = type(default)
    try:
        return kind(words.get(key, default))
    except ValueError:
        raise ValueError(f"{key} must be one of {', '.join(kind)}, got {words[key]!r}") from None


def _near(key: str) -> str:
    return "" if key in _KEYS else did_you_mean(key, _KEYS)


def _number(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{key} must be a whole number, got {text!r}") from None


def _yes(text: str) -> bool:
    if text not in {"yes", "no"}:
        raise ValueError(f"sequence_parallel must be yes or no, got {text!r}")
    return text == "yes"


def _text(value: object) -> str:
    return "yes" if value is True else str(value)

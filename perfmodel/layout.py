"""How training is spread over devices: one record and one grammar for every parallelism.

``ddp=8``, ``fsdp=8 tp=2``, ``dp=8 tp=4 pp=2 zero=1 micro_batch=2 recompute=selective schedule=1f1b``. DDP on
n devices is ``Layout(dp=n)``. ``feasible_layouts`` are all that a model, a cluster and a global batch allow.
"""

import enum
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Final, Literal

import numpy as np

from perfmodel.errors import (
    NotFeasible,
    UsageError,
    check_at_least,
    check_positive,
    check_within,
    did_you_mean,
)
from perfmodel.statistics import IntArray
from perfmodel.units import MIB, Bytes, decimal, whole

Scaling = Literal["weak", "strong"]

#: Ten times the largest machine; beyond, tables and times say nothing.
MOST_DEVICES: Final = 2**20
#: Samples per step, of one device or all; float64 still counts them.
MOST_BATCH: Final = 2**40
#: Samples of one forward pass of one device, as traces have: of the smallest images they keep terabytes.
MOST_MICRO_BATCH: Final = 2**24

#: PyTorch's defaults when ``bucket_cap_mb`` is not given: ``_DEFAULT_FIRST_BUCKET_BYTES`` and 25 MiB
#: (torch/nn/parallel/distributed.py). An explicit cap applies to the first bucket as well.
DEFAULT_FIRST_BUCKET_BYTES: Final = 1 * MIB
DEFAULT_BUCKET_BYTES: Final = 25 * MIB


class Synchronisation(enum.StrEnum):
    """What happens to the gradients of a step."""

    NONE = "none"
    """A bare module, no wrapper: what runs on a single device."""
    NO_SYNC = "no_sync"
    """Wrapped in DistributedDataParallel, gradients kept local (``no_sync``): isolates compute."""
    DDP = "ddp"
    """Wrapped in DistributedDataParallel, gradients averaged bucket by bucket."""


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
    """One forward, one backward alternating: at most one micro-batch in flight per stage behind."""


class Precision(enum.StrEnum):
    """Type of the factors of matrix products; a calibration's runs used 16 bit."""

    BF16 = "bf16"
    FP8 = "fp8"
    """Products in 8 bit; weights, activations and messages stay in 16 bit."""
    TF32 = "tf32"
    """Products of 32-bit numbers on tensor cores; all else is 32 bit."""
    FP32 = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to spread training over ``world_size`` devices."""

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
    shard: int = 0
    """Ranks among which zero=3 shards, replicated across such groups (HSDP); 0: all."""
    precision: Precision = Precision.BF16
    one_process: bool = False
    """torch's DataParallel: threads of one process behind one interpreter lock."""
    bucket_cap_mb: float | None = None
    """MiB, as DistributedDataParallel takes it; None: PyTorch's default (1 MiB, then 25 MiB)."""
    wrapper: Synchronisation | None = None
    """None: DDP where several replicas hold the same layers, else a bare module."""

    def __post_init__(self) -> None:
        """Refuse layouts that no model could have."""
        for name, least in _LEAST.items():
            check_at_least(name, getattr(self, name), least)
        check_within("micro_batch", self.micro_batch, 1, MOST_MICRO_BATCH)
        check_within("dp x tp x pp x cp", self.world_size, 1, MOST_DEVICES)
        check_within("dp x micro_batch x accumulation", self.global_batch, 1, MOST_BATCH)
        if self.bucket_cap_mb is not None:
            check_positive("bucket_cap", self.bucket_cap_mb)
        usual = Synchronisation.DDP if self.dp * self.cp > 1 else Synchronisation.NONE
        if self.wrapper is usual:
            object.__setattr__(self, "wrapper", None)  # equal layouts compare equal
        for rules in (_pipeline_contradictions, _sharding_contradictions, _thread_contradictions):
            for reason in rules(self):
                raise ValueError(reason)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same layers before any sharding."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks among which states are divided, if they are."""
        return self.shard or self.replicas

    def stages(self, layers: int) -> tuple[int, ...]:
        """Layers of every pipeline stage.

        What is left of an even split goes to the middle: the embedding and the head are at the ends.
        """
        each, left = divmod(layers, self.pp)
        order = (*range(1, self.pp - 1), 0)
        more = set(order[:left])
        return tuple(each + (stage in more) for stage in range(self.pp))

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def local_batch(self) -> int:
        """Samples per optimizer step of one replica."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step of all replicas."""
        return self.dp * self.local_batch

    @property
    def alone(self) -> "Layout":
        """The same micro-steps on one device without DDP."""
        return Layout(micro_batch=self.micro_batch, accumulation=self.accumulation)

    @property
    def is_ddp(self) -> bool:
        """Whether it is data parallelism alone, as DistributedDataParallel does it."""
        return self == Layout(
            dp=self.dp,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            bucket_cap_mb=self.bucket_cap_mb,
            wrapper=self.wrapper,
        )

    @property
    def beside(self) -> "Layout":
        """As many ranks that exchange gradients alone as compute together: those of a pipeline stage."""
        return self if self.is_ddp else replace(self.alone, dp=self.world_size // self.pp)

    @property
    def synchronisation(self) -> Synchronisation:
        """What happens to the gradients of a step."""
        if self.wrapper is not None:
            return self.wrapper
        return Synchronisation.DDP if self.dp * self.cp > 1 else Synchronisation.NONE

    @property
    def bucket_limits_bytes(self) -> tuple[Bytes, ...]:
        """Size limits of the first bucket and of those after it (the last one repeats)."""
        if self.bucket_cap_mb is None:
            return (DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_BYTES)
        return (int(min(self.bucket_cap_mb * MIB, sys.maxsize)),)

    def __str__(self) -> str:
        """The layout in the grammar that ``parse_layout`` reads, defaults left out."""
        words = {
            _WORDS.get(field.name, field.name): _text(value)
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        if words.pop("wrapper", None) == "ddp":
            words = {"ddp": str(self.dp)} | words
        return " ".join(f"{word}={text}" for word, text in words.items())


def _pipeline_contradictions(layout: Layout) -> Iterator[str]:
    if layout.interleave > 1 and layout.pp == 1:
        yield f"interleave must be 1 without a pipeline, got {layout.interleave}"
    if layout.interleave > 1 and layout.schedule is not Schedule.ONE_F_ONE_B:
        yield f"schedule must be {Schedule.ONE_F_ONE_B} with interleave > 1, got {layout.schedule}"
    if layout.pp > 1 and layout.zero > 1:
        yield (
            "zero must be 0 or 1 in a pipeline (gradients stay until the last micro-batch), "
            f"got {layout.zero}"
        )


def _sharding_contradictions(layout: Layout) -> Iterator[str]:
    replicas, zero, shard = layout.replicas, layout.zero, layout.shard
    if layout.synchronisation is Synchronisation.NONE and replicas > 1:
        yield f"dp x cp must be 1 without DDP, got {replicas}"
    if zero not in (0, 1, 2, 3):
        yield f"zero must be 0, 1, 2 or 3, got {zero}"
    if shard > 0 and zero != 3:
        yield f"shard must come with zero=3, got {zero}"
    if shard > 0 and replicas % shard != 0:
        yield f"shard must divide the {replicas} replicas (dp x cp), got {shard}"
    if shard > 0 and layout.ep > 1:
        yield f"shard excludes expert parallelism, got ep = {layout.ep}"
    if replicas % layout.ep != 0:
        yield f"ep must divide the {replicas} replicas (dp x cp), got {layout.ep}"


def _thread_contradictions(layout: Layout) -> Iterator[str]:
    if not layout.one_process:
        return
    usual = layout.bucket_cap_mb is None and layout.accumulation == 1
    if not (usual and layout.dp in _THREADED and replace(layout, one_process=False).is_ddp):
        few, many = _THREADED[0], _THREADED[-1]
        alone = f"must stand with dp of {few} to {many} and micro_batch alone"
        yield f"one_process=yes (DataParallel) {alone}, got {layout}"


#: Devices of one process whose steps were published.
_THREADED: Final = (2, 3, 4)
#: Fields whose word in the grammar is another one.
_WORDS: Final = {"bucket_cap_mb": "bucket_cap"}
_FIELDS: Final = {
    _WORDS.get(field.name, field.name): field for field in fields(Layout) if field.name != "wrapper"
}
#: Words that stand for two others: DistributedDataParallel, FullyShardedDataParallel.
_SHORT: Final = {"ddp": 0, "fsdp": 3}
KEYS: Final[tuple[str, ...]] = (*_FIELDS, *_SHORT)
#: Smallest value of what is counted; ``zero`` is one of four.
_LEAST: Final = {
    name: 0 if name == "shard" else 1
    for name, field in _FIELDS.items()
    if type(field.default) is int and name != "zero"
}


def parse_layout(text: str) -> Layout:
    """A layout from text such as ``dp=8 tp=4 pp=2 zero=1 micro_batch=2 recompute=selective``."""
    words: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS:
            raise UsageError(
                f"layout: every word must be KEY=VALUE with KEY one of {', '.join(KEYS)}, "
                f"got {word!r}{'' if key in KEYS else did_you_mean(key, KEYS)}"
            )
        if key in words:
            raise UsageError(f"layout: {key} must be given once, got it twice in {text!r}")
        words[key] = value
    try:
        wrapper = Synchronisation.DDP if "ddp" in words else None
        words = _spelled_out(words)
        values = {
            _FIELDS[key].name: _value(key, word, like=_FIELDS[key].default)
            for key, word in words.items()
        }
        layout = Layout(wrapper=wrapper, **values)
        _require_meaning(layout, words)
    except ValueError as error:
        raise UsageError(f"layout: {error}") from error
    return layout


def _spelled_out(words: Mapping[str, str]) -> dict[str, str]:
    """The words with ``ddp`` and ``fsdp`` as ``dp`` and ``zero``."""
    short = [word for word in _SHORT if word in words]
    if not short:
        return dict(words)
    [first, *others] = short
    for other in (*others, "dp", "zero", "one_process"):
        if other in words:
            raise ValueError(f"{first} excludes {other}, got both")
    rest = {key: text for key, text in words.items() if key != first}
    return {**rest, "dp": words[first], "zero": str(_SHORT[first])}


def _require_meaning(layout: Layout, words: Mapping[str, str]) -> None:
    """Refuse options that were typed and would change nothing."""
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel=yes must come with tp > 1, got tp = 1")
    if "schedule" in words and layout.pp == 1:
        raise ValueError(f"schedule must come with pp > 1, got {layout.schedule} with pp = 1")


def scaled_layouts(
    world_sizes: Sequence[int],
    *,
    scaling: Scaling,
    batch: int,
    accumulation: int = 1,
    bucket_cap_mb: float | None = None,
) -> tuple[Layout, ...]:
    """Data-parallel layouts, one per world size; one device has no wrapper.

    ``batch``: Weak scaling: samples per forward pass of each rank, whatever their number. Strong scaling:
    samples per step of all ranks together.
    """
    check_within("batch", batch, 1, MOST_BATCH if scaling == "strong" else MOST_MICRO_BATCH)
    check_within("accumulation", accumulation, 1, MOST_BATCH)
    layouts = []
    for world_size in world_sizes:
        check_within("devices", world_size, 1, MOST_DEVICES)
        parts = world_size * accumulation if scaling == "strong" else 1
        if batch % parts:
            raise NotFeasible(
                f"--scaling strong: the global batch must be a multiple of devices x accumulation "
                f"({parts}), got {batch}; choose another --batch or fewer --devices"
            )
        layouts.append(
            Layout(
                dp=world_size,
                micro_batch=batch // parts,
                accumulation=accumulation,
                bucket_cap_mb=bucket_cap_mb,
            )
        )
    return tuple(layouts)


def accumulation_for(*, global_batch: int, dp: int, micro_batch: int) -> int:
    """Micro-batches per step that make up a global batch."""
    each = dp * micro_batch
    if global_batch < 1 or global_batch % each:
        raise NotFeasible(
            f"global batch must be a multiple of dp x micro_batch ({each}), got {global_batch}"
        )
    return global_batch // each


def _value(key: str, text: str, *, like: Any) -> Any:
    """The value of a word, of the type that the default of its field has."""
    if isinstance(like, bool):
        if text not in {"yes", "no"}:
            raise ValueError(f"{key} must be yes or no, got {text!r}")
        return text == "yes"
    if isinstance(like, enum.StrEnum):
        known = [each.value for each in type(like)]
        if text not in known:
            raise ValueError(f"{key} must be one of {', '.join(known)}, got {text!r}")
        return type(like)(text)
    try:
        return whole(text) if isinstance(like, int) else decimal(text)
    except ValueError as error:
        raise ValueError(f"{key} {error}") from None


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """One configuration of a workload that can be run for real: the record of a ``Layout``."""

    workload: str
    world_size: int
    micro_batch: int
    """Samples per forward pass of one rank."""
    accumulation: int = 1
    """Micro-steps per optimizer step; only the last one communicates."""
    synchronisation: Synchronisation = Synchronisation.DDP
    bucket_cap_mb: float | None = None
    """MiB, as DistributedDataParallel takes it; ``None`` means PyTorch's default (1 MiB, then 25 MiB)."""
    divided: str = ""
    """The layout in its grammar, if it is more than data parallelism."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot be run."""
        check_at_least("world_size", self.world_size, 1)
        check_at_least("micro_batch", self.micro_batch, 1)
        check_at_least("accumulation", self.accumulation, 1)
        if self.bucket_cap_mb is not None:
            check_positive("bucket_cap_mb", self.bucket_cap_mb)
        _ = self.layout

    @classmethod
    def of(cls, workload: str, layout: Layout) -> "RunSetting":
        """The record of a layout of a workload."""
        found = cls(
            workload=workload,
            world_size=layout.world_size,
            micro_batch=layout.micro_batch,
            accumulation=layout.accumulation,
            synchronisation=layout.synchronisation
            if layout.world_size == 1 or layout.wrapper is not None
            else Synchronisation.DDP,
            bucket_cap_mb=layout.bucket_cap_mb,
        )
        return found if found.layout == layout else replace(found, divided=str(layout))

    @property
    def layout(self) -> Layout:
        """What was run, without the workload."""
        if self.divided:
            return parse_layout(self.divided)
        return Layout(
            dp=self.world_size,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            wrapper=self.synchronisation,
            bucket_cap_mb=self.bucket_cap_mb,
        )

    @property
    def local_batch(self) -> int:
        """Samples per optimizer step of one replica."""
        return self.layout.local_batch

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step of all replicas."""
        return self.layout.global_batch

    @property
    def label(self) -> str:
        """A short name that is unique among settings, for tables and logs."""
        if self.divided:
            return f"{self.workload} {self.divided}"
        cap = "default" if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g}MiB"
        return (
            f"{self.workload} n={self.world_size} micro_batch={self.micro_batch} "
            f"accumulation={self.accumulation} {self.synchronisation} cap={cap}"
        )


LARGEST_MICRO_BATCH: Final = 64
LARGEST_CONTEXT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the layouts of one model on one cluster."""

    layers: int
    heads: int
    devices: int
    sequence: int | None = None
    """Tokens per sequence, if known."""
    experts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutColumns:
    """One row per layout, whole numbers; recomputation by its position in ``Recompute``."""

    rows: IntArray
    """Shape ``(num_layouts, 10)``: the numbers of ``COLUMNS``."""

    def __len__(self) -> int:
        """Number of layouts."""
        return len(self.rows)

    def column(self, name: str) -> IntArray:
        """One number of every layout."""
        return self.rows[:, COLUMNS.index(name)]

    def layout(self, index: int) -> Layout:
        """One of them, with the options that are taken for granted."""
        numbers: dict[str, Any] = dict(zip(COLUMNS, self.rows[index].tolist(), strict=True))
        recompute = tuple(Recompute)[numbers.pop("recompute")]
        return Layout(recompute=recompute, sequence_parallel=numbers["tp"] > 1, **numbers)


COLUMNS: Final = (
    "dp", "tp", "pp", "cp", "ep", "zero", "micro_batch", "accumulation", "recompute", "interleave"
)  # fmt: skip


def feasible_layouts(
    limits: Limits, *, global_batch: int, interleave: int = 1, fused_attention: bool = True
) -> LayoutColumns:
    """Every layout of a global batch that ``impossible`` does not refuse, within bounds.

    One forward, one backward alternating; sequence parallelism wherever matrices are shared; sharding only
    where there is somebody to share with. Stages may be uneven by one layer.

    ``interleave``: Most stages per device.
    ``fused_attention``: Selective recomputation then saves nothing and is left out.
    """
    check_at_least("devices", limits.devices, 1)
    check_at_least("global_batch", global_batch, 1)
    check_at_least("interleave", interleave, 1)
    recomputes = (0, 2) if fused_attention else (0, 1, 2)
    rows = list(_rows(limits, global_batch, interleave, recomputes))
    return LayoutColumns(rows=np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS)))


def _rows(
    limits: Limits, global_batch: int, most_interleave: int, recomputes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    for tp, pp, cp in _shares(limits):
        dp = limits.devices // (tp * pp * cp)
        if global_batch % dp:
            continue
        zeros = (0,) if dp * cp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)
        each = global_batch // dp
        eps = [ep for ep in divisors(limits.experts) if dp * cp % ep == 0]
        for micro_batch in divisors(each, most=LARGEST_MICRO_BATCH):
            accumulation = each // micro_batch
            is_even = pp > 1 and accumulation % pp == limits.layers % pp == 0
            chunks = divisors(limits.layers // pp, most=most_interleave) if is_even else (1,)
            for interleave in chunks:
                for ep, zero, recompute in product(eps, zeros, recomputes):
                    yield (
                        *(dp, tp, pp, cp, ep, zero),
                        *(micro_batch, accumulation, recompute, interleave),
                    )


def _shares(limits: Limits) -> Iterator[tuple[int, int, int]]:
    """How many ranks share a matrix, the layers and a sequence."""
    devices, sequence = limits.devices, limits.sequence or 1
    for tp in divisors(limits.heads):
        for pp in divisors(devices, most=limits.layers):
            cp = 1
            while cp <= LARGEST_CONTEXT:
                whole = cp == 1 or sequence % (2 * cp) == 0
                if whole and devices % (tp * pp * cp) == 0:
                    yield tp, pp, cp
                cp *= 2


def divisors(number: int, *, most: int | None = None) -> tuple[int, ...]:
    """Divisors in ascending order, up to a bound."""
    bound = number if most is None else min(number, most)
    return tuple(value for value in range(1, bound + 1) if number % value == 0)


def require_feasible(layout: Layout, limits: Limits) -> None:
    """Refuse a layout that this model or this number of devices does not allow."""
    reason = impossible(layout, limits)
    if reason is not None:
        raise NotFeasible(f"layout {layout}: {reason}")


def impossible(layout: Layout, limits: Limits) -> str | None:
    """Why a layout cannot be run, or ``None``."""
    return next(_refusals(layout, limits), None)


def _refusals(layout: Layout, limits: Limits) -> Iterator[str]:
    layers, sequence, experts = limits.layers, limits.sequence, limits.experts
    chunks = layout.pp * layout.interleave
    if limits.heads % layout.tp != 0:
        yield f"tp must divide the {limits.heads} heads, got {layout.tp}"
    if chunks > layers:
        yield f"pp x interleave must be at most the {layers} layers, got {chunks}"
    if layout.interleave > 1 and layers % chunks != 0:
        yield f"pp x interleave must divide the {layers} layers, got {chunks}"
    if sequence is not None and layout.cp > 1 and sequence % (2 * layout.cp) != 0:
        yield f"2 x cp must divide the {sequence} tokens of a sequence, got cp = {layout.cp}"
    if experts == 1 and layout.ep != 1:
        yield f"ep must be 1 for a model without experts, got {layout.ep}"
    if experts % layout.ep != 0:
        yield f"ep must divide the {experts} experts, got {layout.ep}"
    if layout.interleave > 1 and layout.accumulation % layout.pp != 0:
        yield f"accumulation must be a multiple of pp = {layout.pp}, got {layout.accumulation}"
    if layout.world_size != limits.devices:
        yield f"dp x tp x pp x cp must be {limits.devices} devices, got {layout.world_size}"
    if layout.one_process:
        yield "one_process=yes (DataParallel) is known of traced models on GPUs, not of --model"

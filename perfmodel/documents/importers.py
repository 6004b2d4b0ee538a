"""Files of other tools: logs of nccl-tests as measured collectives, files of trainers as training configurations.

Lines of logs hold size, count, type, reduction, root, then time in us, algbw and busbw in GB/s (decimal) and
errors, out of place and in place. Trainers are llm-foundry, axolotl, LLaMA-Factory, Lightning and its command line,
NeMo, torchtitan.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perfmodel.errors import InvalidDocument, UsageError, reading
from perfmodel.files import Unreadable, leaves, parse_toml, read_text
from perfmodel.machine.measured import CurvePoint, MeasuredCollective
from perfmodel.units import MIB, decimal, format_bytes, whole

#: A log tells no spread; single figures are means of some twenty iterations.
IMPORTED_ERROR: Final = 0.02
#: algbw is printed with two decimals: time and bandwidth must agree to that, or the units differ.
_UNIT_TOLERANCE: Final = 0.05
#: In our words.
COLLECTIVES: Final = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast"),
    *("all_to_all", "send_recv"),
)
#: By the end of a program's name without underscores, such as ``alltoall_perf`` or ``nccl_all_reduce_perf``.
_PROGRAMS: Final = {name.replace("_", ""): name for name in COLLECTIVES}
_RANK: Final = re.compile(r"#\s+Rank\s+(\d+)\s(?:\s*Group\s+(\d+)\s)?.*\son\s+(\S+)\s+device")
#: Behind the rank, its host and the address on its bus.
_DEVICE_NAME: Final = re.compile(r"#\s+Rank\s+\d+\s.*\sdevice\s+\d+\s+\[[^\]\s]*\]\s+(\S.*)")
#: Figures that are too wide for their column are printed with an exponent.
_FIGURE: Final = r"([\d.]+(?:e[+-]?\d+)?)"
_ROW: Final = re.compile(
    rf"(?a)^\s*([\d_]+)\s+([\d_]+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+{_FIGURE}\s+{_FIGURE}"
    r"(?:\s+([\d.e+-]+)\s+(\S+))?"
)
#: Heading of the number of wrong elements; older versions print the largest deviation there, as "error".
_WRONG: Final = "#wrong"
#: In place of that number, if they were not counted.
_UNCOUNTED: Final = ("N/A", "None", "nan")
#: Columns of a row with both sides, out of place and in place.
_BOTH_SIDES: Final = 13
_MOST_SAID: Final = 120
#: Of all tests of a paste; a sweep has some tens.
_MOST_ROWS: Final = 10_000
_SUMMARY: Final = re.compile(r"^# Out of bounds values *: *\d+ +(\w+)", re.MULTILINE)
#: The program that ran: newer logs say it, before older ones stands the command that started it.
_STARTED: Final = re.compile(
    r"^(?:# Collective test starting: *|(?!#).*?\b)(\w+_perf)\b", re.MULTILINE
)
_BEGINS: Final = ("# nccl-tests version", "# Collective test starting", "# nThread")
_END: Final = "# Avg bus bandwidth"
_FAILED: Final = re.compile(r"^.*Test (?:\w+ )?failure.*$", re.MULTILINE)
#: What mpirun --tag-output, srun --label, kubectl logs --timestamps and quoting put before a line.
_PREFIX: Final = re.compile(
    r"^(?:\[\d+,\d+\]<\w+>: ?|\d+: |\d{4}-\d\d-\d\dT\S+ |> ?)+", re.MULTILINE
)


def read_nccl_paste(
    path: Path, *, collective: str | None = None
) -> tuple[tuple[MeasuredCollective, ...], tuple[str, ...]]:
    """Every test of a paste in its order, and notes on those that end before their summary.

    Raises ``InvalidDocument`` if a test failed, its units are others, or it has no row or too many.
    """
    texts = _texts(path)
    try:
        found = tuple(_from_text(path, text, collective) for text in texts)
    except (ValueError, OverflowError) as error:
        raise InvalidDocument(
            f"{path}: a number of the log is damaged: {error}; save it again"
        ) from error
    if (rows := sum(len(each.points) for each in found)) > _MOST_ROWS:
        raise InvalidDocument(
            f"{path}: log must hold at most {_MOST_ROWS:,} rows, got {rows:,}; check parts of it apart"
        )
    notes = tuple(
        f"the {each.collective} log ends before its summary: its largest size is "
        f"{format_bytes(each.points[-1].at)}"
        for each, text in zip(found, texts, strict=True)
        if _END not in text
    )
    return found, notes


def _text(path: Path) -> str:
    with reading(path, "nccl-tests log"):
        text = _PREFIX.sub("", read_text(path).replace("\u00a0", " "))
    if text.lstrip().startswith("{"):
        raise InvalidDocument(f"{path}: log is JSON; give what the program printed")
    return text


def _texts(path: Path) -> list[str]:
    """The text of each test of a file: it begins with its options and ends with its mean."""
    text = _text(path)
    pieces: list[list[str]] = [[]]
    has_table = False
    for line in text.splitlines():
        if line.startswith(_BEGINS) and has_table:
            pieces.append([])
            has_table = False
        has_table = has_table or "(us)" in line
        pieces[-1].append(line)
        if line.startswith(_END):
            pieces.append([])
            has_table = False
    texts = ["\n".join(lines) for lines in pieces]
    return [piece for piece in texts if "(us)" in piece] or [text]


def _from_text(path: Path, text: str, collective: str | None) -> MeasuredCollective:
    if "(us)" not in text or "(GB/s)" not in text:
        raise InvalidDocument(
            f"{path}: log must hold a table of nccl-tests, whose columns must be in (us) and (GB/s); run "
            "all_reduce_perf -b 8 -e 1G -f 2"
        )
    if failed := _FAILED.search(text):
        raise InvalidDocument(
            f"{path}: log must end without an error, got {failed[0].strip()[:_MOST_SAID]!r}; repair the "
            "machine and run again"
        )
    checked = _SUMMARY.search(text)
    if checked is not None and checked[1] != "OK":
        raise InvalidDocument(
            f"{path}: log must end with 'Out of bounds values: 0 OK', got FAILED; repair the machine and run "
            "again: times of wrong results tell nothing"
        )
    rows = [match for match in map(_ROW.match, text.splitlines()) if match]
    columns = [len(row.string.split()) for row in rows]
    if _END not in text and len(rows) > 1 and columns[-1] < columns[0]:
        rows.pop()  # cut in the middle
    listed = [match.groups() for match in map(_RANK.match, text.splitlines()) if match]
    ranks = [(whole(rank), whole(group or "0"), host) for rank, group, host in listed]
    _refuse_ranks(path, ranks)
    if collective is None and (started := _STARTED.search(text)):
        program = started[1].removesuffix("_perf").replace("_", "")
        collective = next((_PROGRAMS[end] for end in _PROGRAMS if program.endswith(end)), None)
    collective = collective or _told(rows, len(ranks))
    if collective is None:
        raise InvalidDocument(f"{path}: log does not name its collective; pass --collective")
    points = [
        _point(
            path,
            decimal(row[1].replace("_", "")),
            time_us=decimal(row[6]),
            algbw=decimal(row[7]),
            wrong=row[9] if _WRONG in text else None,
        )
        for row in rows
    ]
    found = sorted((point for point in points if point is not None), key=lambda point: point.at)
    if not found:
        raise InvalidDocument(f"{path}: log is truncated: no rows with a size and a time")
    return MeasuredCollective(
        collective=collective,
        world_size=len(ranks),
        num_nodes=len({host for _, _, host in ranks}),
        points=tuple(found),
    )


def _told(rows: Sequence[re.Match[str]], ranks: int) -> str | None:
    """The collective that the columns of a log allow; None where they allow several.

    All ranks end with a sum of all (root -1): busbw over algbw is 2 (n - 1) / n of an all-reduce,
    (n - 1) / n of a reduce-scatter. A copy from one rank has a root, at the rate of its links. What cannot
    run in place (all-to-all, send and receive) has no count of wrong elements there.
    """
    rated = [row for row in rows if row[8] and decimal(row[7]) >= 1]
    if not rated or ranks < 2:
        return None
    last = rated[-1]
    reduction, has_root = last[4], whole(last[5]) >= 0
    ratio = decimal(last[8]) / decimal(last[7])
    columns = last.string.split()
    counted = [wrong not in _UNCOUNTED for wrong in (last[9], columns[-1])]
    passes = ratio * ranks / (ranks - 1)
    is_moved = reduction == "none" and not has_root and len(columns) == _BOTH_SIDES and counted[0]
    is_sum = reduction != "none" and not has_root
    sent_alone = is_sum and counted == [True, False]
    allowed = {
        "broadcast": reduction == "none" and has_root and abs(ratio - 1) < _UNIT_TOLERANCE,
        "all_gather": is_moved and counted[1],
        "all_to_all": is_moved and not counted[1],
        "send_recv": sent_alone,
        "all_reduce": is_sum and not sent_alone and abs(passes / 2 - 1) < _UNIT_TOLERANCE,
        "reduce_scatter": is_sum and not sent_alone and abs(passes - 1) < _UNIT_TOLERANCE,
    }
    return next((name for name, is_it in allowed.items() if is_it), None)


def _refuse_ranks(path: Path, ranks: Sequence[tuple[int, int, str]]) -> None:
    """Ranks are number, group and host."""
    if len(ranks) < 2:
        raise InvalidDocument(
            f"{path}: log must list at least 2 ranks, got {len(ranks)}; keep its lines '#  Rank ...'"
        )
    groups = {group for _, group, _ in ranks}
    if len(groups) > 1:
        raise InvalidDocument(
            f"{path}: log must be of one group, got {len(groups)} that ran side by side and shared links; "
            "run one alone, without NCCL_TESTS_SPLIT"
        )
    numbers = [number for number, _, _ in ranks]
    count = max(numbers) + 1
    if len(numbers) != count or len(set(numbers)) != count or min(numbers) < 0:
        raise InvalidDocument(
            f"{path}: log must list every rank once, got {len(ranks)} lines for ranks 0 to {count - 1}; "
            "it is truncated or joined from several, save it again"
        )


def read_device_names(path: Path) -> tuple[str, ...]:
    """The devices of an nccl-tests log as their driver names them, each once; none if it does not say."""
    lines = map(_DEVICE_NAME.match, _text(path).splitlines())
    return tuple(dict.fromkeys(match[1].strip() for match in lines if match))


def _point(
    path: Path, size_bytes: float, *, time_us: float, algbw: float, wrong: object
) -> CurvePoint | None:
    if size_bytes <= 0:
        return None
    if wrong is not None and str(wrong) not in _UNCOUNTED and decimal(str(wrong)) > 0:
        raise InvalidDocument(
            f"{path}: results at {size_bytes:.0f} B must be right (#wrong 0), got {wrong} wrong elements; "
            "repair the machine and run again: times of wrong results tell nothing"
        )
    if not (math.isfinite(time_us) and time_us > 0):
        raise InvalidDocument(f"{path}: time at {size_bytes:.0f} B must be > 0 us, got {time_us}")
    implied = size_bytes / time_us / 1e3
    # Below 1 GB/s two decimals say too little.
    if algbw >= 1 and abs(implied / algbw - 1) > _UNIT_TOLERANCE:
        raise InvalidDocument(
            f"{path}: {size_bytes:.0f} B in {time_us} us are {implied:.3g} GB/s, but the log prints "
            f"{algbw}; units must be us and GB/s (decimal)"
        )
    return CurvePoint(at=size_bytes, time_s=time_us * 1e-6, relative_error=IMPORTED_ERROR)


_LINE: Final = re.compile(r"^(?P<indent> *)(?P<key>[\w.-]+):(?:\s+(?P<value>.*))?$")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*$")
_INTERPOLATED: Final = re.compile(r"^\$\{(?:variables\.)?([\w.]+)\}$")
#: Blocks that hold settings of the block around them.
_WRAPPERS: Final = ("init_args", "config", "config_overrides", "parameters")
_QUOTES: Final = " '\""
#: Mappings inside mappings in one line: each level is read once more.
_MOST_NESTED: Final = 16
_TRUE: Final = ("true", "yes", "on")
_SIZE: Final = re.compile(
    r"(?a)(?<![\w.])(?:(\d{1,4})x)?(\d{1,9}(?:\.\d{1,9})?)\s?([bm])(?![a-z])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """What a trainer's file says; None is what it leaves out."""

    name: str
    """Of the run and of the model, as far as they are named."""
    shape: Mapping[str, int] | None = None
    """Width, layers, heads, inner width, vocabulary of a GPT-like model."""
    model: str | None = None
    """By name, where the file has no shape."""
    sequence: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    strategy: str | None = None
    frozen: bool = False
    """Whether adapters alone are trained."""


def read_config(path: Path) -> TrainingConfig:
    """The settings in a trainer's file; ``InvalidDocument`` if it cannot be read."""
    with reading(path, "configuration"):
        text = read_text(path, most=MIB)
        found = _toml(text) if path.suffix == ".toml" else _yaml(path, text)
    get = _Getter(path, found)
    width, layers, heads = (
        get.count(*(f"model.{name}" for name in names))
        for names in (
            ("d_model", "dim", "hidden_size", "n_embd"),
            ("n_layers", "n_layer", "num_hidden_layers", "num_layers"),
            ("n_heads", "n_head", "num_attention_heads"),
        )
    )
    shape = None
    if width and layers and heads:
        ratio = get.count("model.expansion_ratio") or 4
        shape = {
            "hidden": width,
            "layers": layers,
            "heads": heads,
            "feed_forward": get.count("model.intermediate_size", "model.ffn_hidden_size")
            or ratio * width,
            "vocabulary": get.count("model.vocab_size") or 50_368,
        }
    base = get.text("base_model", "model_name_or_path", "model.pretrained_model_name_or_path")
    names = (get.text("run_name"), get.text("name"), base, path.stem)
    flavour = " ".join(filter(None, (get.text("model.name"), get.text("model.flavor"))))
    return TrainingConfig(
        name=" ".join(dict.fromkeys(filter(None, (*names, flavour)))),
        shape=shape,
        model=base or flavour or None,
        sequence=get.count(
            *("max_seq_len", "sequence_len", "cutoff_len", "training.seq_len", "model.max_seq_len"),
            *("model.encoder_seq_length", "model.seq_length"),
        ),
        micro_batch=get.count(
            *("device_train_microbatch_size", "micro_batch_size", "training.local_batch_size"),
            *("per_device_train_batch_size", "model.micro_batch_size"),
            *("training.batch_size", "data.batch_size"),
        ),
        global_batch=get.count(
            *("global_train_batch_size", "training.global_batch_size", "model.global_batch_size")
        ),
        accumulation=get.count("gradient_accumulation_steps", "trainer.accumulate_grad_batches"),
        precision=_precision(get),
        strategy=_strategy(get, found),
        frozen=get.text("adapter", "finetuning_type") in ("lora", "qlora"),
    )


def size_in_name(name: str) -> float | None:
    """Parameters that a name tells, such as 7e9 for ``mpt-7b``; None if it tells none or several."""
    sizes = {
        int(copies or 1) * float(number) * (1e9 if unit in "bB" else 1e6)
        for copies, number, unit in _SIZE.findall(name.replace("_", " ").replace("-", " "))
    }
    return sizes.pop() if len(sizes) == 1 else None


def _yaml(path: Path, text: str) -> dict[str, str]:
    """Scalars by their path. Lists, blocks of text and anchors are left out: no setting needs them."""
    found: dict[str, str] = {}
    seen = set()
    parents: list[tuple[int, str]] = []
    for raw in text.splitlines():
        match = _LINE.match(_COMMENT.sub("", raw).rstrip())
        if match is None:
            continue
        indent = len(match["indent"])
        while parents and parents[-1][0] >= indent:
            parents.pop()
        key = ".".join([*(name for _, name in parents), match["key"]])
        value = (match["value"] or "").strip()
        if not value:
            parents.append((indent, match["key"]))
        elif key in seen:
            raise InvalidDocument(f"{path}: {key} must be given once; remove one")
        else:
            seen.add(key)
            found |= _scalars(key, value)
    if not found:
        raise InvalidDocument(f"{path}: configuration must hold lines KEY: VALUE, got none")
    return found


def _scalars(key: str, value: str, depth: int = 0) -> dict[str, str]:
    """A value by its path, or those of a mapping in one line, such as ``{d_model: 8, attn: {rope: true}}``."""
    if depth > _MOST_NESTED:
        raise Unreadable(f"mappings in one line must be at most {_MOST_NESTED} deep")
    if not (value.startswith("{") and value.endswith("}")):
        whole_key = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
        return {whole_key: value.strip("'\"")}
    found: dict[str, str] = {}
    level, begin = 0, 1
    for at, mark in enumerate(value):
        level += (mark in "{[") - (mark in "}]")
        if (mark == "," and level == 1) or level == 0:
            name, _, inner = value[begin:at].partition(":")
            if inner.strip():
                path = f"{key}.{name.strip(_QUOTES)}"
                found |= _scalars(path, inner.strip(), depth + 1)
            begin = at + 1
    return found


def _toml(text: str) -> dict[str, str]:
    found = leaves(parse_toml(text))
    return {path: str(value) for path, value in found if isinstance(value, str | int | float)}


@dataclass(frozen=True, slots=True)
class _Getter:
    """Values by any of their names."""

    path: Path
    found: Mapping[str, str]

    def text(self, *names: str) -> str | None:
        """Of the first name that there is; references to other keys are followed once."""
        for name in names:
            value = self.found.get(name)
            if value is not None and (match := _INTERPOLATED.match(value)):
                value = self.found.get(f"variables.{match[1]}", self.found.get(match[1]))
            if value is not None and value.casefold() not in ("null", "none", "auto", "~"):
                return value
        return None

    def count(self, *names: str) -> int | None:
        """A whole number above 0."""
        text = self.text(*names)
        if text is None:
            return None
        digits = text.replace("_", "")
        name = next(name for name in names if name in self.found)
        try:
            number = whole(digits)
        except ValueError as error:
            raise UsageError(f"{self.path}: {name} {error}") from None
        if number == 0:
            raise UsageError(f"{self.path}: {name} must be a whole number >= 1, got {text!r}")
        return number if number > 0 else None  # -1: the trainer decides


def _precision(get: _Getter) -> str | None:
    text = get.text("precision", "trainer.precision", "training.mixed_precision_param") or ""
    for name in ("bf16", "bfloat16", "fp16", "float16", "16-mixed"):
        if name in text:
            return "bf16"  # both have the same peak
    if (get.text("bf16", "fp16") or "").casefold() in _TRUE:
        return "bf16"
    if (get.text("tf32") or "").casefold() in _TRUE:
        return "tf32"
    return "fp32" if text.startswith(("32", "fp32", "float32")) else None


def _strategy(get: _Getter, found: Mapping[str, str]) -> str | None:
    text = (get.text("trainer.strategy", "strategy") or "").casefold()
    sharding = get.text("fsdp_config.sharding_strategy")
    if sharding is not None:
        return {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp"}.get(sharding)
    if "fsdp" in text or any(key.startswith("fsdp_config") for key in found):
        return "fsdp"
    zero = re.search(
        r"stage_([123])|(?<![a-z])z(?:ero)?[-_]?([123])", f"{text} {get.text('deepspeed') or ''}"
    )
    if zero:
        return f"zero{zero[1] or zero[2]}"
    if "parallelism.data_parallel_shard_degree" in found:
        return "fsdp"
    return "ddp" if "ddp" in text else None

"""Options that commands share, each defined once, and the files and models that they name.

Texts become values here, and errors name the option.
"""

import datetime as dt
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypeVar

import typer

from perfmodel.errors import CalibrationUnavailable, UsageError, did_you_mean
from perfmodel.units import (
    MINUTE_S,
    MOST_ENTRIES,
    Bytes,
    decimal,
    parse_bandwidth,
    parse_bytes,
    whole,
)

if TYPE_CHECKING:
    from perfmodel.machine.measured import MeasuredMachine

_Choice = TypeVar("_Choice", bound=str)
_Found = TypeVar("_Found")
DEFAULT_CALIBRATION: Final = Path("runs/calibration")
DEFAULT_PROFILE: Final = DEFAULT_CALIBRATION / "profile.json"
DEFAULT_DEVICES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def parsed(
    parse: Callable[[str], object], metavar: str, flag: str, meaning: str, *others: str
) -> Any:
    """An option, or an argument in capitals, whose text becomes a value; a ``ValueError`` names the flag.

    ``others``: Further flags of the same option.
    """

    def value(text: object) -> object:
        if not isinstance(text, str):  # the default
            return text
        try:
            return parse(text)
        except ValueError as error:
            raise UsageError(f"{flag}: {error}") from None

    if not flag.startswith("-"):
        return typer.Argument(parser=value, metavar=flag, help=meaning)
    return typer.Option(flag, *others, parser=value, metavar=metavar, help=meaning)


def one_of(flag: str, text: str, choices: Sequence[_Choice]) -> _Choice:
    """One of a few words."""
    for known in choices:
        if known == text:
            return known
    near = did_you_mean(text, choices)
    raise UsageError(f"{flag}: must be {' or '.join(choices)}, got {text!r}{near}")


def choice(flag: str, choices: Sequence[str], meaning: str) -> Any:
    """An option that is one of a few words."""
    metavar = f"[{'|'.join(choices)}]"
    return parsed(lambda text: one_of(flag, text, choices), metavar, flag, meaning)


def _names(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",")) if text else ()
    if "" in found:
        raise ValueError(f"must have no empty entry, got {text!r}")
    return found


def _above_zero(parse: Callable[[str], float]) -> Callable[[str], float]:
    def value(text: str) -> float:
        found = parse(text)
        if not (math.isfinite(found) and found > 0):
            raise ValueError(f"must be finite and > 0, got {text!r}")
        return found

    return value


def _whole(text: str, least: float = 1, most: float = math.inf) -> int:
    found = whole(text)
    if found < least:
        raise ValueError(f"must be >= {least}, got {found}")
    if found > most:
        raise ValueError(f"must be <= {most:,}, got {found}")
    return found


def _file(text: str) -> Path:
    if not text:  # Python takes it for the folder where the command runs
        raise ValueError("must name a file or folder, got nothing; . is this one")
    return Path(text)


def _ending(text: str, one: str, other: str) -> Path:
    if Path(text).suffix not in (one, other):
        raise ValueError(f"must end in {one} or {other}, got {text!r}")
    return Path(text)


def _number(text: str, *, or_zero: bool = False) -> float:
    found = decimal(text)
    if not (math.isfinite(found) and (found > 0 or (or_zero and found == 0))):
        raise ValueError(f"must be finite and {'>=' if or_zero else '>'} 0, got {text.strip()}")
    return found


def _few(text: str, what: str, *, instead: str = "leave some out") -> tuple[str, ...]:
    if len(found := _names(text)) > MOST_ENTRIES:
        raise ValueError(f"must name at most {MOST_ENTRIES} {what}, got {len(found)}; {instead}")
    return found


def _counts(text: str) -> tuple[int, ...]:
    names = _few(text, "counts", instead="name 1,2,4,8,...: between them it is smooth")
    if not names:
        raise ValueError("must name at least one count, got none")
    return tuple(map(_whole, names))


def _pairs(text: str) -> dict[float, float]:
    found: dict[float, float] = {}
    for part in _few(text, "pairs"):
        key_text, equals, value_text = part.partition("=")
        if not equals:
            raise ValueError(f"must look like 256=4.0,512=5.0, got {part!r}")
        key = _number(key_text)
        if key in found:
            raise ValueError(f"must name each batch once, got {key:g} twice")
        found[key] = _number(value_text)
    return found


def _day(text: str) -> dt.date:
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"must look like 2026-11-21, got {text!r}") from None


# Each makes an option of a flag and its meaning.
#: Such as 80GiB. [B]
size = partial(parsed, _above_zero(parse_bytes), "SIZE")
#: Such as 25GB/s. [B/s]
bandwidth = partial(parsed, _above_zero(parse_bandwidth), "RATE")
#: Words as they are; several, separated by commas; a file or folder; a file to write a plot or a task to.
text = partial(parsed, str, "TEXT")
names = partial(parsed, _names, "TEXT")
file = partial(parsed, _file, "PATH")
picture = partial(parsed, partial(_ending, one=".svg", other=".png"), "FILE")
task = partial(parsed, partial(_ending, one=".yaml", other=".py"), "FILE")


def bounded(least: float = -math.inf, most: float = math.inf) -> Callable[..., Any]:
    """Makes an option of a flag and its meaning: a whole number within bounds."""
    return partial(parsed, partial(_whole, least=least, most=most), "N")


#: A whole number, one from 1 on, or several, separated by commas.
integer, count = bounded(), bounded(1)
counts = partial(parsed, _counts, "N,N,...")
#: Any number; one above zero, or several, separated by commas; one of zero or more.
number = partial(parsed, decimal, "X")
positive = partial(parsed, _number, "X")
numbers = partial(parsed, lambda text: tuple(map(_number, _few(text, "numbers"))), "X,X,...")
non_negative = partial(parsed, partial(_number, or_zero=True), "X")
#: ``BATCH=NUMBER`` above zero, separated by commas.
pairs = partial(parsed, _pairs, "BATCH=X,...")
#: ``--seed``, of its meaning: seeds below 0 are those of a calibration's own draws.
seed = partial(parsed, partial(_whole, least=0), "N", "--seed")
#: ``--minutes``, of its meaning: a limit. [s]
minutes = partial(parsed, lambda text: MINUTE_S * _number(text), "MINUTES", "--minutes")


def refuse_unlike_truth(device_kind: str, truth: str | None) -> None:
    """Refuse a truth without a virtual device, and the reverse."""
    if (truth is not None) != (device_kind == "virtual"):
        got = "it alone" if truth is not None else "no --truth"
        raise UsageError(f"--truth: must come with --device-kind virtual, got {got}")


def asked(use_case: Callable[..., _Found], context: typer.Context, **others: Any) -> _Found:
    """What a use case, or its request, makes of the options that it has by name; ``others`` as they are."""
    known = {*inspect.signature(use_case).parameters} & {*context.params}
    return use_case(**{name: context.params[name] for name in known} | others)


def typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter stood on the command line, whatever its value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_texts(flag: str, arguments: Sequence[str]) -> list[str]:
    """What stands behind a flag, each time."""
    found = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name == flag:
            found.append(value if equals else following)
    return found


def refuse_typed(context: typer.Context, excluded: Mapping[str, str], *, beside: str) -> None:
    """Refuse parameters that would be ignored beside an option; ``excluded`` says what to do instead."""
    for name, instead in excluded.items():
        if typed(context, name):
            flag = f"--{name.replace('_', '-')}"
            texts = typed_texts(flag, sys.argv)  # none of a switch, or of another name
            told = "both" if context.params[name] is True or not texts else texts[-1]
            raise UsageError(f"{flag}: excludes {beside}, got {told}; {instead}")


def converted(
    machine: "MeasuredMachine",
    *,
    device: str | None,
    torch: str | None = None,
    nccl: str | None = None,
) -> "MeasuredMachine":
    """The machine with other versions of software, or with another device by the law of steps.

    ``torch``, ``nccl``: Versions that will run; None: those of the machine.
    """
    if nccl is not None:
        from perfmodel.cost.network import for_nccl

        machine = for_nccl(machine, nccl)
    if torch is not None:
        from perfmodel.cost.step_curves import for_version

        machine = for_version(machine, torch)
    if device is None:
        return machine
    from perfmodel.cost.rescaling import rescaled_profile
    from perfmodel.documents.hardware import find_device, shipped_catalogue

    catalogue = shipped_catalogue()
    return rescaled_profile(machine, find_device(device, catalogue), catalogue)


def made(path: Path) -> Path:
    """A profile that somebody made or named."""
    if path == DEFAULT_PROFILE and not path.exists():
        raise CalibrationUnavailable(
            f"{path}: nothing was calibrated here; perfmodel calibrate does it in 10 minutes, --machine "
            "takes a machine by name (perfmodel machines) and measures nothing"
        )
    return path


def profiled(path: Path) -> "MeasuredMachine":
    """The machine of a profile."""
    from perfmodel.documents.profile import ProfileDocument

    return ProfileDocument.read(made(path)).machine


# What is asked about.
def _machine_path(text: str) -> Path:
    from perfmodel.documents.profile import machine_file

    _file(text)
    return machine_file(text, flag="--machine")


def machine(meaning: str) -> Any:
    """``--profile``, or ``--machine`` with the name of a machine that comes with perfmodel."""
    return parsed(_machine_path, "FILE", "--profile", meaning, "--machine")


Profile: TypeAlias = Annotated[Path, file("--profile", "Profile, from perfmodel calibrate.")]
Machine: TypeAlias = Annotated[
    Path, machine("Profile, from perfmodel calibrate, or a name of perfmodel machines.")
]
OptionalMachine: TypeAlias = Annotated[
    Path | None, machine("Profile, or a name of perfmodel machines, whose devices are meant.")
]
TorchVersion: TypeAlias = Annotated[
    str | None, text("--torch", "PyTorch that will run; others than the machine's widen intervals.")
]
NcclVersion: TypeAlias = Annotated[
    str | None,
    text("--nccl", "NCCL that will run; others than the machine's widen its collectives."),
]
#: What is trained if nobody says; else the first workload of the profile.
USUAL_WORKLOAD: Final = "resnet18"
Workload: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Calibrated workload by name, a workload file (JSON), or a model: FILE.py:FACTORY, "
        "torchvision:NAME, timm:NAME, a Hugging Face config.json."
    ),
]
Device: TypeAlias = Annotated[
    str | None, typer.Option(help="Device by its data sheet, such as h100-sxm (perfmodel devices).")
]
DeviceKind: TypeAlias = Annotated[
    str | None, choice("--device-kind", ("cpu", "cuda"), "cpu or cuda; default: as traced.")
]
WhichDevice: TypeAlias = Annotated[
    str,
    choice(
        "--device-kind",
        ("auto", "cpu", "cuda", "virtual"),
        "auto, cpu, cuda or virtual: what is measured.",
    ),
]
Truth: TypeAlias = Annotated[
    str | None,
    text("--truth", "With --device-kind virtual: its costs, a TOML file or a shipped name."),
]
Validation: TypeAlias = Annotated[
    Path | None, file("--validation", "A validation, whose errors widen the intervals.")
]
ClusterFile: TypeAlias = Annotated[
    Path | None,
    file(
        "--cluster",
        "Cluster file (TOML), or links by name ('8 nvlink3, 8 eth-100'); default: its usual nodes.",
    ),
]
NodesLike: TypeAlias = Annotated[
    str | None,
    text("--nodes-like", "Other nodes are joined like those of a machine, such as dgx-h100."),
]
Scaling: TypeAlias = Annotated[
    Literal["weak", "strong"], choice("--scaling", ("weak", "strong"), "weak or strong.")
]
Batch: TypeAlias = Annotated[
    int | None,
    count(
        "--batch",
        "Weak scaling: samples per forward pass of each device; strong scaling, and with "
        "--layout: per step of all devices. Default: the middle calibrated one, the largest.",
    ),
]
Accumulation: TypeAlias = Annotated[int, count("--accumulation", "Micro-steps per optimizer step.")]
BucketCap: TypeAlias = Annotated[
    float | None, positive("--bucket-cap-mb", "DDP's bucket_cap_mb, in MiB; default: PyTorch's.")
]
LoaderRate: TypeAlias = Annotated[
    float | None,
    positive(
        "--loader-samples-per-s", "Samples that the input pipeline feeds one device, a second."
    ),
]
SyncEveryStep: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--sync-every-step", help="Every step waits for the device, as loss.item() does (GPUs)."
    ),
]
_COUNTS = parsed(
    lambda text: tuple(sorted(set(_counts(text)))),
    "N,N,...",
    "--devices",
    "Device counts, separated by commas.",
)
DeviceCounts: TypeAlias = Annotated[Sequence[int], _COUNTS]
OptionalDeviceCounts: TypeAlias = Annotated[Sequence[int] | None, _COUNTS]
Devices: TypeAlias = Annotated[int, count("--devices", "Number of devices.")]
MicroBatch: TypeAlias = Annotated[
    int | None, count("--micro-batch", "Samples per forward pass; default: as traced, calibrated.")
]

# Layouts of large models.
LayoutText: TypeAlias = Annotated[
    str | None,
    text("--layout", 'Such as "dp=8 tp=4 pp=2 zero=1 micro_batch=2"; all keys: docs/layouts.md.'),
]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Transformer: a Hugging Face config.json, or a name such as llama3-70b."),
]
SequenceLength: TypeAlias = Annotated[
    int | None, count("--sequence-length", "Tokens of one sample; default: the model's usual.")
]
DevicesPerNode: TypeAlias = Annotated[
    int | None, count("--devices-per-node", "Devices of a node, which share its fast links.")
]
Throughput: TypeAlias = Annotated[
    Path | None,
    file("--throughput", "Predict from a CSV of measured samples/s on fewer devices."),
]
DeviceMemory: TypeAlias = Annotated[
    Bytes | None, size("--device-memory", "Memory of one device, such as 80GiB.")
]

# Answers.
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print the answer as one JSON object.")
]
Output: TypeAlias = Annotated[Path | None, file("--output", "File to write the answer to (JSON).")]
Verbose: TypeAlias = Annotated[bool, typer.Option("--verbose", help="Print all caveats, in full.")]

# Money.
Today: TypeAlias = Annotated[
    dt.date | None, parsed(_day, "YYYY-MM-DD", "--today", "Day that the age of prices counts from.")
]

# Campaigns of measurements.
Folder: TypeAlias = Annotated[
    Path, file("--out", "Folder for what is measured, and for the result.")
]
Resume: TypeAlias = Annotated[
    bool, typer.Option("--resume", help="Continue, or judge again, what is in the folder.")
]
Seed: TypeAlias = Annotated[int, seed("Seed of the order of runs.")]
NumNodes: TypeAlias = Annotated[
    int | None, integer("--nnodes", "Nodes; start the command on each.")
]
NodeRank: TypeAlias = Annotated[int | None, integer("--node-rank", "Rank of this node.")]
MasterAddress: TypeAlias = Annotated[
    str | None, typer.Option("--master-addr", help="Address of node 0.")
]
MasterPort: TypeAlias = Annotated[int | None, integer("--master-port", "Port on node 0.")]
RanksPerNode: TypeAlias = Annotated[
    int | None, integer("--nproc", "Ranks per node; default: every GPU, up to 8 cores.")
]

"""Use case: costs of a device from a table of step times of models that anybody measured on it.

One row is one model at one batch: its traced work and its step time. What is wrong with a row is said with its
line; nothing is left out without a word.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from calibrate.processes import usable_cores
from calibrate.step_fit import (
    StepRow,
    constants_of,
    family_of,
    fit_device,
    left_out_errors,
    left_out_logs,
    predicted_s,
)
from perfmodel.cost.rescaling import sheet_of
from perfmodel.cost.step_curves import shipped_priors
from perfmodel.cost.step_law import ConstantPrior, Sheet
from perfmodel.cost.step_work import StepWork, step_work
from perfmodel.documents import Provenance, file_sha256
from perfmodel.documents.hardware import DataSheet, find_device, shipped_catalogue
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import (
    IncomparableRuns,
    InvalidDocument,
    UntraceableModel,
    UsageError,
    reading,
)
from perfmodel.files import read_table
from perfmodel.machine.measured import (
    DdpCosts,
    DeviceCosts,
    MeasuredMachine,
    MemoryFormat,
    Repeatability,
    Residual,
)
from perfmodel.units import MOST_DIGITS, Seconds, decimal, whole
from perfmodel.workload.step import OPTIMIZERS, StepMethod, TracedStep

_REQUIRED: Final = ("model", "batch", "precision", "step_time_s")
_OPTIONAL: Final = ("image", "sequence", "memory_format", "optimizer", "torch", "family", "source")
#: Written precision -> that of the trace, and whether the whole model is in 16 bit.
_PRECISIONS: Final[Mapping[str, tuple[str, bool]]] = {
    "fp32": ("fp32", False),
    "amp": ("fp16", False),
    "amp fp16": ("fp16", False),
    "amp bf16": ("bf16", False),
    "fp16": ("fp32", True),
    "bf16": ("fp32", True),
}
_FORMATS: Final[tuple[MemoryFormat, ...]] = ("contiguous", "channels_last")
_OPTIMIZERS: Final = (*OPTIMIZERS, "none")
#: Two times of one setting further apart contradict each other.
_CONTRADICTION: Final = 1.5
#: Lines of one setting that a note names.
_MOST_NAMED: Final = 20
#: Clocks run this much above those behind the peaks of data sheets.
_BOOST: Final = 1.25
#: Medians of a column are within this factor of what devices like this take; 1000 is a wrong unit.
_WRONG_UNIT: Final = 50.0
#: A row this far from the others of its table is named: kernels of single models differ by less.
_ODD_ROW: Final = 4.0
#: The first version whose optimizers work on lists of tensors, and whose attention is one kernel.
_FUSED_FROM: Final = 2
#: What DDP adds on a GPU, never seen in steps of one device: a kernel that copies each gradient into its bucket and
#: one back, each of which reads and writes it; kernels of collectives that slow others. [assumed]
_GRADIENT_KERNELS: Final = 2
_BUCKET_PASSES: Final = 4
_KERNEL_S: Final = 3e-6
_BESIDE: Final = (0.9, 1.0, 1.0, 0.95, 0.85)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a row measured; the work of a step follows from it."""

    model: str
    batch: int
    image: int | None
    sequence: int | None
    precision: str
    """As written."""
    memory_format: MemoryFormat
    optimizer: str
    torch: str

    @property
    def traced(self) -> tuple[str, int, int | None, int | None, str, str, bool]:
        """What one trace serves: any memory format."""
        precision, _ = _PRECISIONS[self.precision]
        optimizer = "sgd" if self.optimizer == "none" else self.optimizer
        return (
            *(self.model, self.batch, self.image, self.sequence),
            *(precision, optimizer, self.is_fused),
        )

    @property
    def is_fused(self) -> bool:
        """Whether that version of torch has fused attention and optimizers over lists."""
        release = _numbers(self.torch.split(".")[0])
        return not release or release[0] >= _FUSED_FROM


def _numbers(version: str) -> tuple[int, ...]:
    """Parts of a version that are numbers."""
    parts = version.split(".")
    return tuple(int(part) for part in parts if part.isdecimal() and len(part) <= MOST_DIGITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of a table."""

    where: str
    setting: Setting
    family: str
    step_s: Seconds


Trace = Callable[[Setting], TracedStep]


def read_steps(table: Path) -> tuple[list[TableRow], list[str]]:
    """Rows of a table of steps, and what must be known of their reading.

    Raises
    ------
    InvalidDocument
        If the table cannot be read, or a cell breaks a rule; with its line.
    IncomparableRuns
        If two rows are the same setting and contradict each other.
    """
    # First row of each setting, and its times by line: further rows need no memory of their own.
    kept: dict[Setting, tuple[TableRow, dict[int, Seconds]]] = {}
    unknown: set[str] = set()
    with reading(table, "steps"):
        for line, cells in read_table(table, columns=_REQUIRED, delimiters=",;\t"):
            unknown = unknown or set(cells) - {*_REQUIRED, *_OPTIONAL, ""}
            row = _row(f"{table}: line {line}", cells)
            _, times_s = kept.setdefault(row.setting, (row, {}))
            times_s[line] = row.step_s
    if not kept:
        raise InvalidDocument(f"{table}: must hold at least one step, got none")
    notes = [f"{table}: columns not read: {', '.join(sorted(unknown))}"] if unknown else []
    found = []
    for row, times_s in kept.values():
        first, last = (pick(times_s, key=times_s.__getitem__) for pick in (min, max))
        if times_s[last] > _CONTRADICTION * times_s[first]:
            raise IncomparableRuns(
                f"{table}: line {first} and line {last} are the same setting but take "
                f"{times_s[first]:g} s and {times_s[last]:g} s; remove the wrong one, or say what differs "
                "(precision, memory_format, torch)"
            )
        if len(times_s) > 1:
            more = f" and {len(times_s) - _MOST_NAMED:,} more" if len(times_s) > _MOST_NAMED else ""
            lines = ", ".join(map(str, islice(times_s, _MOST_NAMED)))
            notes.append(
                f"{table}: lines {lines}{more} are one setting: their geometric mean counts once"
            )
        mean_s = math.exp(statistics.fmean(map(math.log, times_s.values())))
        found.append(replace(row, step_s=mean_s))
    return found, notes


def _row(where: str, cells: Mapping[str, str]) -> TableRow:
    def text(name: str, default: str = "") -> str:
        return sys.intern(cells.get(name, "").strip()) or default

    def one_of(name: str, allowed: Sequence[str], default: str = "") -> str:
        value = text(name, default)
        if value not in allowed:
            raise InvalidDocument(f"{where}: {name}: must be {' or '.join(allowed)}, got {value!r}")
        return value

    def count(name: str, *, is_needed: bool = False) -> int | None:
        if not text(name) and not is_needed:
            return None
        try:
            found = whole(text(name))
        except ValueError as error:
            raise InvalidDocument(f"{where}: {name}: {error}") from error
        if found < 1:
            raise InvalidDocument(f"{where}: {name}: must be >= 1, got {found}")
        return found

    step_s = _seconds(where, text("step_time_s"))
    model = text("model")
    if not model:
        raise InvalidDocument(f"{where}: model: must be named, got nothing")
    memory_format = one_of("memory_format", _FORMATS, "contiguous")
    setting = Setting(
        model=model,
        batch=count("batch", is_needed=True) or 1,
        image=count("image"),
        sequence=count("sequence"),
        precision=one_of("precision", tuple(_PRECISIONS)),
        memory_format="channels_last" if memory_format == "channels_last" else "contiguous",
        optimizer=one_of("optimizer", _OPTIMIZERS, "sgd"),
        torch=text("torch"),
    )
    return TableRow(
        where=where, setting=setting, family=text("family", family_of(model)), step_s=step_s
    )


def _seconds(where: str, text: str) -> Seconds:
    try:
        found = decimal(text)
    except ValueError as error:
        raise InvalidDocument(f"{where}: step_time_s: {error}") from error
    if not (math.isfinite(found) and found > 0):
        raise InvalidDocument(f"{where}: step_time_s: must be finite and > 0, got {text}")
    return found


def trace_setting(setting: Setting) -> TracedStep:
    """The step of a setting as CUDA runs it."""
    from perfmodel.tracing.cuda import AsOnCuda  # noqa: PLC0415 - imports torch
    from perfmodel.tracing.source import SampleSize  # noqa: PLC0415
    from perfmodel.tracing.sources import find_source  # noqa: PLC0415
    from perfmodel.tracing.trace import trace_once  # noqa: PLC0415

    model, batch, image, sequence, precision, optimizer, is_fused = setting.traced
    method = StepMethod(
        optimizer=optimizer,
        optimizer_implementation="foreach",
        precision=precision,
        checkpointing="none",
        device_kind="cpu",
    )
    source = find_source(
        model, SampleSize(image_size=image, sequence_length=sequence), option="model"
    )
    casts = AsOnCuda(precision, fused_attention=is_fused)
    step = trace_once(source, method, micro_batch=batch, casts=casts)
    # Old optimizers update tensor by tensor; recording that takes long and says no more.
    method = replace(method, optimizer_implementation="foreach" if is_fused else "loop")
    return replace(step, method=method)


class TracedTable(NamedTuple):
    """Rows of a table with their work."""

    steps: list[StepRow]
    notes: list[str]
    """Of rows whose model cannot be traced, with the reason."""


def traced_tables(
    tables: Mapping[str, Sequence[TableRow]],
    trace: Trace = trace_setting,
    *,
    refuses_unknown: bool = False,
) -> dict[str, TracedTable]:
    """Tables by name with the work of their rows; a setting of several rows is traced once.

    Every trace has a copy of this process to itself: one that crashes is a note.
    ``refuses_unknown``: ``UsageError`` if nobody knows a model, which is a note otherwise.
    """
    from perfmodel.tracing.fork import CrashedError, apart  # noqa: PLC0415 - imports torch

    same: dict[object, list[TableRow]] = {}
    for rows in tables.values():
        for row in rows:
            same.setdefault(row.setting.traced, []).append(row)

    def works(of_one: Sequence[TableRow]) -> list[StepWork]:
        step = trace(of_one[0].setting)
        return [_work_of(row.setting, step) for row in of_one]

    if trace is trace_setting:
        import_models()
    found: dict[int, StepWork] = {}
    reasons: dict[int, str] = {}
    for of_one, told in apart(works, same.values(), at_once=usable_cores()):
        if isinstance(told, list):
            found |= {id(row): work for row, work in zip(of_one, told, strict=True)}
        elif not isinstance(told, UsageError | CrashedError):
            raise told
        elif refuses_unknown and not isinstance(told, UntraceableModel | CrashedError):
            raise UsageError(f"{of_one[0].where}: {told}") from told
        else:
            reasons |= dict.fromkeys(map(id, of_one), str(told))
    return {
        name: TracedTable(
            [_with_work(row, found[id(row)]) for row in rows if id(row) in found],
            [
                f"{row.where}: not used, {row.setting.model} cannot be traced: {reasons[id(row)]}"
                for row in rows
                if id(row) in reasons
            ],
        )
        for name, rows in tables.items()
    }


def _with_work(row: TableRow, work: StepWork) -> StepRow:
    return StepRow(
        where=row.where, model=row.setting.model, family=row.family, work=work, step_s=row.step_s
    )


def import_models() -> None:
    """Import what traces need, before there are copies of this process that would each do so."""
    import perfmodel.tracing.cuda  # noqa: PLC0415 - imports torch
    import perfmodel.tracing.sources  # noqa: PLC0415
    import perfmodel.tracing.trace  # noqa: F401, PLC0415

    with suppress(ImportError):
        import timm  # noqa: F401, PLC0415 - not a dependency


def _work_of(setting: Setting, step: TracedStep) -> StepWork:
    return step_work(
        step,
        is_pure_half=_PRECISIONS[setting.precision][1],
        memory_format=setting.memory_format,
        has_optimizer=setting.optimizer != "none",
    )


def calibrate_from_steps(
    table: Path, *, device: str, trace: Trace = trace_setting
) -> tuple[ProfileDocument, tuple[str, ...]]:
    """A machine of one device from a table of steps, and what to know of its reading.

    Raises ``InvalidDocument``, ``IncomparableRuns`` and ``UsageError`` with the line of what is wrong.
    """
    catalogued = find_device(device, shipped_catalogue())
    rows, notes = read_steps(table)
    newest, older = by_version(rows)
    machine, more = machine_from_steps(
        traced_tables({"": newest}, trace, refuses_unknown=True)[""],
        catalogued,
        priors=shipped_priors(sheet_of(catalogued).generation),
        source=table.name,
        newest=newest,
        older=older,
    )
    document = ProfileDocument(
        provenance=Provenance.of_answer(host_fingerprint="none: steps of others depend on no host"),
        observations_sha256=file_sha256(table),
        machine=machine,
    )
    return document, (*notes, *more)


def machine_from_steps(
    traced: TracedTable,
    device: DataSheet,
    *,
    priors: Mapping[str, ConstantPrior],
    source: str,
    newest: Sequence[TableRow],
    older: Sequence[TableRow] = (),
) -> tuple[MeasuredMachine, list[str]]:
    """The machine behind the newest rows of one device; older versions of torch only tell how far versions differ."""
    sheet = sheet_of(device)
    used, notes = traced.steps, [*traced.notes]
    if not used:
        raise InvalidDocument(
            f"{source}: must hold a model that can be traced, got none: {notes[0]}"
        )
    notes += refuse_impossible(used, sheet, priors, device.id)
    fit = fit_device(used, sheet, priors)
    logs = left_out_logs(used, sheet, priors)
    drift = 0.0
    if older:
        drift = _drift(newest, older)
        notes.append(
            f"{len(older)} steps of older versions of torch are not fitted: they tell how far versions differ"
        )
    open_names = sorted(fit.touched - fit.determined)
    if len(used) < len(fit.touched):
        notes.append(
            f"{len(used)} steps for {len(fit.touched)} constants: {len(open_names)} are as other devices say"
        )
    costs = DeviceCosts(
        flop_per_s=dict(sheet.flop_per_s),
        bytes_per_s=sheet.bytes_per_s,
        constants=constants_of(fit),
        undetermined=tuple(open_names),
        left_out=left_out_errors(used, logs),
        num_rows=len(used),
        num_models=len({row.model for row in used}),
        source=source,
        versions={"torch": newest[0].setting.torch} if newest[0].setting.torch else {},
        version_drift=drift,
        generation=sheet.generation,
    )
    return machine_of(costs, device), notes


def by_version(rows: Sequence[TableRow]) -> tuple[list[TableRow], list[TableRow]]:
    """Rows of the newest version of torch, and those of older ones."""

    def version(row: TableRow) -> tuple[int, ...]:
        return _numbers(row.setting.torch)

    newest = max(map(version, rows))
    return [r for r in rows if version(r) == newest], [r for r in rows if version(r) != newest]


def refuse_impossible(
    rows: Sequence[StepRow], sheet: Sheet, priors: Mapping[str, ConstantPrior], device: str
) -> list[str]:
    """Refuse what the device cannot do; what is odd but possible is named.

    Raises ``InvalidDocument`` for a wrong unit and for a step faster than the peak of its products.
    """
    before = fit_device((), sheet, priors)
    ratios = np.log([row.step_s for row in rows]) - np.log(predicted_s(rows, before, sheet))
    # Of two rows in the middle the one that the device expects: it need not answer for the other.
    sides = (np.quantile(ratios, 0.5, method="lower"), np.quantile(ratios, 0.5, method="higher"))
    middle = float(min(sides, key=abs))
    if abs(middle) > math.log(_WRONG_UNIT):
        row, off, which = rows[0], middle, "steps of this table are"
        if np.abs(ratios).min() <= math.log(_WRONG_UNIT):
            worst = int(np.argmax(np.abs(ratios)))
            row, off, which = rows[worst], float(ratios[worst]), f"{rows[worst].step_s:g} s is"
        raise InvalidDocument(
            f"{row.where}: step_time_s: {which} {math.exp(abs(off)):,.0f} times too "
            f"{'large' if off > 0 else 'small'} for {device}; the column must be in seconds"
        )
    found = []
    for row, ratio in zip(rows, ratios - middle, strict=True):
        share = float((row.work.count * row.work.flop).sum()) / row.step_s
        peak = sheet.flop_per_s[row.work.precision]
        if row.work.precision == "fp32":
            peak = max(peak, sheet.flop_per_s.get("tf32", 0.0))
        if share > _BOOST * peak:
            raise InvalidDocument(
                f"{row.where}: step_time_s: {row.step_s:g} s means {share / peak:.3g} times the peak of "
                f"{device}; check the device, the precision and the unit"
            )
        if abs(ratio) > math.log(_WRONG_UNIT):
            raise InvalidDocument(
                f"{row.where}: step_time_s: {row.step_s:g} s is {math.exp(abs(ratio)):,.0f} times what the other "
                "rows say; another unit, or a stall? Correct or remove it"
            )
        if abs(ratio) > math.log(_ODD_ROW):
            found.append(
                f"{row.where}: {row.step_s:g} s is {math.exp(ratio):.2g} times what the other rows say: it "
                "counts little"
            )
    return found


def _drift(newest: Sequence[TableRow], older: Sequence[TableRow]) -> float:
    """Absolute change in log of the same step between versions that one model in ten exceeds."""
    known = {replace(row.setting, torch=""): math.log(row.step_s) for row in newest}
    moved = [
        abs(math.log(row.step_s) - known[setting])
        for row in older
        if (setting := replace(row.setting, torch="")) in known
    ]
    return float(np.quantile(moved, 0.9)) if moved else 0.0


def machine_of(costs: DeviceCosts, device: DataSheet) -> MeasuredMachine:
    """A machine of one device with these costs; links between devices are those of a cluster file."""
    copies_s = _BUCKET_PASSES / costs.bytes_per_s
    gradient_s = _GRADIENT_KERNELS * costs.constants.get("launch_s", _KERNEL_S)
    values = (gradient_s, copies_s, 0.0, _BESIDE[0], 1.0)
    return MeasuredMachine(
        device_name=device.id,
        device_kind="cuda",
        backend="nccl",
        asynchronous=True,
        ranks_per_node=1,
        num_nodes=1,
        num_rounds=1,
        environment={"versions": dict(costs.versions)},
        # Errors of families left out hold runs and hours too.
        repeatability=Repeatability(run={}, round=0.0, occasion=0.0),
        workloads=(),
        collectives=(),
        ddp=DdpCosts(
            values=values,
            draws=tuple((*values[:3], speed, 1.0) for speed in _BESIDE),
            determined=(False,) * len(values),
        ),
        residual=Residual(single_log_errors=(0.0,), ddp_log_errors=()),
        rates=(),
        dispatch_s=costs.constants.get("host_s", 10e-6),
        steps=(),
        device_costs=costs,
        undetermined=(),
    )

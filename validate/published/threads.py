"""Published steps of nn.DataParallel: the step of one GPU predicts those of two, three and four.

One process leads all devices by threads, behind one interpreter lock. Of m modules and S bytes of parameters

    T(n) = soft_max(T(1) (1 + slower (n - 1)), n m module_s) + m replicate_s + S byte_s          n > 1

as one thread calls modules at a time, every step copies the model along a chain of devices, and gradients come
back. Devices share links and power, and wait for the slowest. Families of models are left out on every card, and
whole cards. Models are traced (half a minute). No command predicts by this law.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.layout_fit import heavy_tailed
from calibrate.processes import usable_cores
from calibrate.step_fit import family_of
from calibrate.step_table import Trace, import_models, trace_setting
from perfmodel.cost.layout_time import DEVICE_OR_HOST
from perfmodel.documents.verdicts import CARRIED, PublishedSeries
from perfmodel.errors import UsageError
from perfmodel.statistics import BoolArray, FloatArray, soft_maximum
from validate.published import devices
from validate.published.devices import setting_of
from validate.published.harness import Part, Row, Table, number, numbers, verdict

COLUMNS: Final = (*devices.COLUMNS, "source", "wrapper", "p5_ms", "p95_ms")
#: What a run on several GPUs and one on a single GPU have in common.
_ALIKE: Final = (
    *("source", "device", "library", "model", "framework", "precision", "memory_format"),
    *("image", "batch_per_gpu"),
)
#: Its own steps show that a run was disturbed: over those done by 5 % of them, the time by which 95 % are done.
_DISTURBED: Final = 1.5
#: Logarithms of module_s [s], replicate_s [s], byte_s [s/B] and slower before any step was seen: Python calls a
#: module in some 0.1 ms, PCIe 3.0 moves 12 GB/s both ways. Their spread then, and from one host to another.
PRIOR: Final = np.log([1e-4, 1e-4, 2e-10, 0.03])
_UNSEEN: Final = 1.0
_OTHER_HOST: Final = 0.5
#: Scatter around the law, in log.
_SIGMA: Final = 0.1
StringArray: TypeAlias = NDArray[np.str_]


class Steps(NamedTuple):
    """Rows on several devices as arrays of one length."""

    alone_s: FloatArray
    """On one device, of the same samples per device. [s]"""
    devices: FloatArray
    modules: FloatArray
    """Calls of modules in a forward pass."""
    parameter_bytes: FloatArray
    step_s: FloatArray
    card: StringArray
    family: StringArray
    disturbed: BoolArray


def threaded_s(steps: Steps, logs: FloatArray) -> FloatArray:
    """The law, by logarithms of its constants. [s]"""
    module_s, replicate_s, byte_s, slower = np.exp(logs)
    together_s = steps.alone_s * (1 + slower * (steps.devices - 1))
    calls_s = steps.devices * steps.modules * module_s
    copied_s = steps.modules * replicate_s + steps.parameter_bytes * byte_s
    return np.asarray(soft_maximum(together_s, calls_s, DEVICE_OR_HOST) + copied_s)


def fitted(
    steps: Steps, rows: BoolArray, centre: FloatArray = PRIOR, spread: float = _UNSEEN
) -> FloatArray:
    """Logarithms of the constants behind some rows, those aside whose own steps show a disturbance."""
    rows = rows & ~steps.disturbed

    def residuals(z: FloatArray) -> FloatArray:
        away = np.log(threaded_s(steps, centre + spread * z) / steps.step_s)[rows] / _SIGMA
        return np.concatenate([heavy_tailed(away), z])

    return np.asarray(centre + spread * least_squares(residuals, np.zeros_like(centre)).x)


def judge_threads(table: Table, trace: Trace = trace_setting) -> Iterator[PublishedSeries]:
    """Verdict by what is known of the card: other families on it and other cards, or other cards alone."""
    found = _read(table, trace)
    if found is None:
        table.skipped.append("data_parallel: no model on one GPU and on several")
        return
    cards = np.unique(found.card)
    of_card_s, of_family_s = (np.empty_like(found.step_s) for _ in range(2))
    for card in cards:
        own = found.card == card
        elsewhere = fitted(found, ~own)
        of_card_s[own] = threaded_s(found, elsewhere)[own]
        for family in np.unique(found.family[own]):
            left = own & (found.family == family)
            of_family_s[left] = threaded_s(
                found, fitted(found, own & ~left, elsewhere, _OTHER_HOST)
            )[left]
    # What is left out at a time, and among which rows.
    known = {
        "other cards alone": (of_card_s, found.card, np.full(len(found.card), "")),
        "other models": (of_family_s, np.char.add(found.card, found.family), found.card),
    }
    for words, (ours_s, left_out, among) in known.items():
        for kept, rows in (("all", np.full(len(ours_s), True)), ("undisturbed", ~found.disturbed)):
            parts = [
                _part(found, ours_s, left, others)
                for name in np.unique(left_out[rows])
                for left in [rows & (left_out == name)]
                for others in [rows & np.isin(among, among[left]) & ~left]
                if others.any()
            ]
            yield verdict(
                table.source,
                f"nn.DataParallel, {len(cards)} cards, {kept} runs; {words} known",
                parts,
                fitted=f"1 GPU; {words}",
                predicted="2, 3 and 4 GPUs",
                num_fitted=int((~found.disturbed).sum()),
            )


def _part(found: Steps, ours_s: FloatArray, left: BoolArray, others: BoolArray) -> Part:
    """Of one group left out; its interval is of the errors of the others, left out as well."""
    alone_s, devices, step_s = found.alone_s, found.devices, found.step_s
    alike = [others & (devices == n) for n in devices[left]]
    ratios = [np.median((step_s / alone_s)[rows if rows.any() else others]) for rows in alike]
    width = np.exp(np.quantile(np.abs(np.log(ours_s / step_s))[others], 0.9))
    return Part(
        measured=step_s[left],
        predicted={
            "law of threads": ours_s[left],
            "one ratio for each number of GPUs": alone_s[left] * np.array(ratios),
            CARRIED: alone_s[left],
        },
        interval=(ours_s[left] / width, ours_s[left] * width),
        beyond=np.ones(int(left.sum()), bool),
    )


def _read(table: Table, trace: Trace) -> Steps | None:
    """Rows on several GPUs whose model was also timed on one."""
    alone_ms = {
        _alike(row): step_ms
        for row in table.rows
        if row["gpus"] == "1" and (step_ms := number(row, "step_ms")) is not None
    }
    rules = {
        "one GPU, or another way to use several": lambda row: row["wrapper"] == "nn.DataParallel",
        "no step, no spread of it, no batch or no image size": lambda row: (
            numbers(row, "step_ms", "p5_ms", "p95_ms", "batch_per_gpu", "image") is not None
        ),
        "not timed on one GPU": lambda row: _alike(row) in alone_ms,
    }
    kept = table.keep(rules)
    sizes = _sizes(table, kept, trace)
    rows = [row for row in kept if setting_of(row).model in sizes]
    if not rows:
        return None

    def column(value: Callable[[Row], float]) -> FloatArray:
        return np.array([value(row) for row in rows])

    def size(row: Row) -> _Size:
        return sizes[setting_of(row).model]

    return Steps(
        alone_s=column(lambda row: alone_ms[_alike(row)] / 1e3),
        devices=column(lambda row: float(row["gpus"])),
        modules=column(lambda row: size(row).modules),
        # Models in 16 bit as a whole, or in 32 bit.
        parameter_bytes=column(
            lambda row: size(row).parameters * (2 if row["precision"] == "fp16" else 4)
        ),
        step_s=column(lambda row: float(row["step_ms"]) / 1e3),
        card=np.array([row["device"] for row in rows]),
        family=np.array([family_of(setting_of(row).model) for row in rows]),
        disturbed=column(lambda row: float(row["p95_ms"]) / float(row["p5_ms"])) > _DISTURBED,
    )


class _Size(NamedTuple):
    """Calls of modules in a forward pass of a model, and elements of its parameters."""

    modules: int
    parameters: int


def _sizes(table: Table, rows: list[Row], trace: Trace) -> dict[str, _Size]:
    """Sizes by model, each traced in a copy of this process; those of one that cannot be traced are left out."""
    from perfmodel.tracing.fork import CrashedError, apart  # noqa: PLC0415 - imports torch

    if trace is trace_setting:
        import_models()
    same: dict[str, list[Row]] = {}
    for row in rows:
        same.setdefault(setting_of(row).model, []).append(row)

    def size(of_one: list[Row]) -> _Size:
        step = trace(setting_of(of_one[0]))
        elements = sum(one.num_elements for one in step.parameters)
        return _Size(sum(step.modules_entered()), elements)

    found = {}
    for of_one, told in apart(size, same.values(), at_once=usable_cores()):
        model = setting_of(of_one[0]).model
        if isinstance(told, UsageError | CrashedError):
            note = f"{table.path.name}: {model} cannot be traced: {told}"
            table.leave_out("models that cannot be traced", len(of_one), note)
        elif isinstance(told, Exception):
            raise told
        else:
            found[model] = told
    return found


def _alike(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _ALIKE)

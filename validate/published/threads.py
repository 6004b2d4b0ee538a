"""Published steps of nn.DataParallel: the step of one GPU predicts those of two, three and four.

By the law of ``perfmodel predict --layout "dp=4 one_process=yes"``, its constants fitted again. The
family of the judged model is left out on all cards. Models are traced (half a minute).
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrate.processes import usable_cores
from calibrate.step_fit import OTHER_HOST, family_of, fit_threads
from calibrate.step_table import Trace, import_models, trace_setting
from perfmodel.cost.step_law import THREAD_CONSTANTS, ThreadedSteps
from perfmodel.documents.verdicts import CARRIED, PublishedSeries
from perfmodel.errors import UsageError
from perfmodel.statistics import BoolArray, FloatArray
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
StringArray: TypeAlias = NDArray[np.str_]


class Steps(NamedTuple):
    """Rows on several devices as arrays of one length."""

    law: ThreadedSteps
    step_s: FloatArray
    card: StringArray
    family: StringArray
    disturbed: BoolArray

    def fit(self, rows: BoolArray, centre: FloatArray | None = None) -> FloatArray:
        """Logarithms of the constants behind some rows, those aside whose own steps show a disturbance."""
        chosen = rows & ~self.disturbed
        law = ThreadedSteps(*(column[chosen] for column in self.law))
        if centre is None:
            return fit_threads(law, self.step_s[chosen])
        return fit_threads(law, self.step_s[chosen], centre, OTHER_HOST)

    def left_out_s(self) -> tuple[FloatArray, FloatArray]:
        """Every step by fits without its family: to other cards alone; and to its own card as well. [s]"""
        of_card_s, of_family_s = (np.empty_like(self.step_s) for _ in range(2))
        for card, family in sorted(set(zip(self.card.tolist(), self.family.tolist(), strict=True))):
            own, others = self.card == card, self.family != family
            left = own & ~others
            elsewhere = self.fit(~own & others)
            with_own = self.fit(own & others, elsewhere)
            of_card_s[left] = self.law.step_s(np.exp(elsewhere))[left]
            of_family_s[left] = self.law.step_s(np.exp(with_own))[left]
        return of_card_s, of_family_s

    def log_error(self, rows: BoolArray, ours_s: FloatArray) -> float:
        """What one undisturbed step in ten of some rows is off, in log."""
        off = np.abs(np.log(ours_s / self.step_s))
        return float(np.quantile(off[rows & ~self.disturbed], 0.9))


def thread_constants(table: Table, trace: Trace = trace_setting) -> dict[str, dict[str, float]]:
    """What ships: constants by the steps of each card and of all; what one undisturbed step in ten is off, in log.

    Other cards are as uncertain as the least known of these by the others.
    """
    found = _read(table, trace)
    assert found is not None, table.skipped
    of_card_s, of_family_s = found.left_out_s()
    own = {
        devices.device_of({"device": str(card)}): found.card == card
        for card in np.unique(found.card)
    }
    logs = {"others": found.fit(np.full(len(found.step_s), True))}
    errors = {"others": max(found.log_error(rows, of_card_s) for rows in own.values())}
    for name, rows in own.items():
        logs[name] = found.fit(rows, found.fit(~rows))
        errors[name] = found.log_error(rows, of_family_s)
    return {
        name: {
            **dict(zip(THREAD_CONSTANTS, np.exp(each).tolist(), strict=True)),
            "log_error": errors[name],
        }
        for name, each in logs.items()
    }


def judge_threads(table: Table, trace: Trace = trace_setting) -> Iterator[PublishedSeries]:
    """Verdict by where other families are known: on all cards, or on other cards alone."""
    found = _read(table, trace)
    if found is None:
        table.skipped.append("data_parallel: no model on one GPU and on several")
        return
    cards = np.unique(found.card)
    of_card_s, of_family_s = found.left_out_s()
    # What is left out at a time, and among which rows.
    known = {
        "other models on other cards": (of_card_s, found.card, np.full(len(found.card), "")),
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
    alone_s, counts, step_s = found.law.alone_s, found.law.devices, found.step_s
    alike = [others & (counts == n) for n in counts[left]]
    ratios = [np.median((step_s / alone_s)[rows if rows.any() else others]) for rows in alike]
    width = np.exp(np.quantile(np.abs(np.log(ours_s / step_s))[others], 0.9))
    return Part(
        measured=step_s[left],
        predicted={
            "perfmodel": ours_s[left],
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
        law=ThreadedSteps(
            alone_s=column(lambda row: alone_ms[_alike(row)] / 1e3),
            devices=column(lambda row: float(row["gpus"])),
            modules=column(lambda row: size(row).modules),
            # Models in 16 bit as a whole, or in 32 bit.
            parameter_bytes=column(
                lambda row: size(row).parameters * (2 if row["precision"] == "fp16" else 4)
            ),
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

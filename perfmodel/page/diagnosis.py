"""A logged speed beside the prediction on the page: normal or not, and which causes fit."""

import enum
import shlex
from contextlib import suppress
from typing import Any, Final

from perfmodel.answer import Answer
from perfmodel.diagnosis.asked import diagnosed
from perfmodel.diagnosis.cases import Case
from perfmodel.diagnosis.odds import NORMAL
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import PerfModelError, UsageError
from perfmodel.machine import DEVICES_PER_NODE
from perfmodel.page import LoggedSpeed, OfferedMachine, OfferedWorkload, PageQuestion
from perfmodel.statistics import Interval
from perfmodel.units import Seconds
from perfmodel.workload.transformer import NamedTransformer

_MOST_CAUSES: Final = 4
_LIKELY: Final = 0.05
_LARGE_PRECISION: Final = "bf16"


class Verdict(enum.StrEnum):
    """Where a logged step lies against the 90 % interval of the prediction."""

    NORMAL = "normal"
    SLOWER = "slower than normal"
    FASTER = "faster than normal"

    @classmethod
    def of(cls, logged_s: Seconds, predicted_s: Interval) -> "Verdict":
        """In one word, or three."""
        if logged_s > predicted_s.p95:
            return cls.SLOWER
        return cls.FASTER if logged_s < predicted_s.p5 else cls.NORMAL


def judged(
    asked: PageQuestion, machine: OfferedMachine, workload: OfferedWorkload, found: Answer
) -> dict[str, Any] | None:
    """Where a logged step lies among the predicted ones; causes by ``perfmodel diagnose`` if it is outside."""
    if asked.logged is None:
        return None
    logged_s = _step_s(asked.logged, workload, found)
    verdict = Verdict.of(logged_s, found.step)
    case, typed = _case(machine, workload, found, logged_s)
    causes: list[dict[str, Any]] = []
    next_name = ""
    if case is not None and verdict is not Verdict.NORMAL:
        with suppress(PerfModelError):  # the command says what a data sheet lacks
            odds = diagnosed(case).found
            likely = [fit for fit in odds.fits if fit.odds >= _LIKELY and fit.cause != NORMAL]
            causes = [
                {"name": fit.cause, "means": fit.means, "odds": fit.odds}
                for fit in likely[:_MOST_CAUSES]
            ]
            next_name = odds.next_name or ""
    return {
        "logged_s": logged_s,
        "verdict": verdict.value,
        # Of the predicted outcomes.
        "share_slower": float((found.step_s[1:] > logged_s).mean()),
        "causes": causes,
        "next_name": next_name,
        "command": shlex.join(["perfmodel", *typed]),
    }


def _step_s(logged: LoggedSpeed, workload: OfferedWorkload, found: Answer) -> Seconds:
    """The step that a logged number tells. [s]"""
    if logged.unit in ("ms", "s"):
        return logged.value * (1e-3 if logged.unit == "ms" else 1.0)
    sequence = workload.entry.sequence if isinstance(workload.entry, NamedTransformer) else None
    if (logged.unit == "tokens/s") != (sequence is not None):
        unit = "samples/s" if sequence is None else "tokens/s"
        raise UsageError(f"logged: must be in ms, s or {unit}, got {logged.unit}")
    return found.layout.global_batch * (sequence or 1) / logged.value


def _case(
    machine: OfferedMachine, workload: OfferedWorkload, found: Answer, logged_s: Seconds
) -> tuple[Case | None, list[str]]:
    """What ``diagnose`` is asked, None without a data sheet; and the command that says more."""
    layout, entry, sheet = found.layout, workload.entry, machine.sheet
    time = f"{f'{1e3 * logged_s:.6f}'.rstrip('0').rstrip('.')} ms"
    model: str | WorkloadDocument = workload.typed
    words, precision = f"{layout.world_size} GPUs, {time}", None
    if isinstance(entry, NamedTransformer):
        words, precision = f"{layout.world_size} GPUs, {layout}: {time}", _LARGE_PRECISION
    elif workload.trace is not None and workload.document is not None:
        model, precision = workload.document, workload.trace.method.precision
    by_sheet = sheet is not None and precision is not None
    case = Case(
        model=model,
        device=sheet.id if sheet and by_sheet else None,
        observed=(words,),
        devices_per_node=min(layout.world_size, DEVICES_PER_NODE),
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        precision=precision if by_sheet else None,
        strategy="ddp" if layout.zero == 0 else None,
    )
    names = ("devices_per_node", "micro_batch", "accumulation", "precision", "strategy")
    typed = {
        "--profile": None if by_sheet else machine.typed,
        "--device": case.device,
        "--observed": words,
        **{f"--{name.replace('_', '-')}": getattr(case, name) for name in names},
    }
    options = [text for name, value in typed.items() if value for text in (name, str(value))]
    return case if by_sheet else None, ["diagnose", workload.typed, *options]

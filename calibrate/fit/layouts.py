"""What families of layouts add to their exchanges: fitted to stacks of layers that ran under them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import nnls

from calibrate.summary import typical
from perfmodel.answer.measured import measured_steps_s, timed_workload
from perfmodel.answer.question import Question
from perfmodel.arrays import FloatArray
from perfmodel.cost.machine import contention
from perfmodel.cost.measured import PIPELINE, families
from perfmodel.documents.observation import LayoutObservation
from perfmodel.layout.layout import Layout, parse_layout
from perfmodel.machine.measured import (
    PHASE_CURVES,
    LayoutCost,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
)
from perfmodel.units import Seconds

#: Steps are linear in what is fitted; by how much is read off these. [s], [s/B]
_TRIAL: Final = (1e-3, 1e-9)
#: What a library's own code costs at most, as a rule: 2 ms of Python per exchange, a copy at 1 GB/s. Few
#: stacks, of few sizes, would else explain the drift of the machine by seconds per byte. Priors. [s], [s/B]
_PRIOR: Final = (2e-3, 1e-9)
#: Uncertainty of one measured step, in log, against which the priors are weighed.
_STEP_ERROR: Final = 0.1
#: A family's own scatter counts as much as so many values of the scatter of all.
_POOLED: Final = 2.0


class _Run(NamedTuple):
    workload: MeasuredWorkload
    layout: Layout
    measured_s: Seconds
    num_repetitions: int


def fit_layouts(
    machine: MeasuredMachine, observations: Sequence[LayoutObservation]
) -> tuple[LayoutCost, ...]:
    """Seconds per exchange and per byte of every family and number of ranks.

        measured step = predicted step + c(n) (call_s * exchanges + byte_s * bytes)

    One pair of costs per family, those of a rank alone: the work of n ranks that share processors takes
    c(n) times as long, as measured on their compute. On devices with processors of their own c is 1.
    Non-negative least squares in relative errors, drawn towards no cost by ``_PRIOR``.
    The scatter of a family is what its steps miss beyond the scatter of their repetitions.
    The compute of a stack is as it ran on one rank, so that only what the layout adds is left.
    """
    found: dict[tuple[str, str], list[LayoutObservation]] = defaultdict(list)
    for entry in observations:
        found[entry.stack.model_dump_json(), entry.layout].append(entry)
    traced = {
        entry.stack.model_dump_json(): entry for entry in observations if entry.trace is not None
    }
    if machine.operators is None or not traced:
        return ()
    runs: dict[tuple[str, int], list[_Run]] = defaultdict(list)
    for stack, source in traced.items():
        assert source.workload is not None
        priced = timed_workload(
            machine, source.workload, trace=source.trace, memory=source.memory, use_measured=False
        )
        alone = _run(priced, source.layout, found[stack, source.layout])
        ratio = alone.measured_s / float(_steps_s(machine, [alone])[0])
        workload = _scaled(priced, ratio)
        for (of_stack, text), entries in found.items():
            layout = parse_layout(text)
            if of_stack == stack and layout.world_size > 1:
                [family] = families(layout)
                runs[family, layout.world_size].append(_run(workload, text, entries))
    return _fitted(machine, dict(sorted(runs.items())), _run_variance(found.values()))


def _fitted(
    machine: MeasuredMachine, runs: dict[tuple[str, int], list[_Run]], run_variance: float
) -> tuple[LayoutCost, ...]:
    flat = [run for group in runs.values() for run in group]
    of_family = np.array([family for (family, _), group in runs.items() for _ in group])
    slowed = {
        (family, n): float(np.mean([_contention(family, run) for run in group]))
        for (family, n), group in runs.items()
    }

    def steps_s(call_s: float, byte_s: float) -> FloatArray:
        costs = tuple(
            LayoutCost(
                family=family,
                world_size=n,
                call_s=call_s * factor,
                byte_s=byte_s * factor,
                log_error=0.0,
            )
            for (family, n), factor in slowed.items()
        )
        return _steps_s(replace(machine, layouts=costs), flat)

    base_s = steps_s(0.0, 0.0)
    slopes = [
        (steps_s(_TRIAL[0], 0.0) - base_s) / _TRIAL[0],
        (steps_s(0.0, _TRIAL[1]) - base_s) / _TRIAL[1],
    ]
    design = np.stack(slopes, axis=1)
    measured_s = np.array([run.measured_s for run in flat])
    by_chance = np.array([run_variance / run.num_repetitions for run in flat])
    solved: dict[str, FloatArray] = {}
    squares: dict[str, float] = {}
    free: dict[str, int] = {}
    for family in dict.fromkeys(family for family, _ in runs):
        rows = of_family == family
        weights = 1 / (measured_s[rows] * _STEP_ERROR)
        scaled = np.vstack([design[rows] * weights[:, np.newaxis] * _PRIOR, np.eye(len(_PRIOR))])
        left = np.append((measured_s[rows] - base_s[rows]) * weights, np.zeros(len(_PRIOR)))
        solved[family] = nnls(scaled, left)[0] * _PRIOR
        missed = np.log(measured_s[rows] / (base_s[rows] + design[rows] @ solved[family]))
        squares[family] = max(0.0, float(missed @ missed - by_chance[rows].sum()))
        free[family] = max(0, len(missed) - int((solved[family] > 0).sum()))
    pooled = sum(squares.values()) / max(1, sum(free.values()))
    return tuple(
        LayoutCost(
            family=family,
            world_size=n,
            call_s=float(solved[family][0]) * factor,
            byte_s=float(solved[family][1]) * factor,
            log_error=math.sqrt((squares[family] + _POOLED * pooled) / (free[family] + _POOLED)),
        )
        for (family, n), factor in slowed.items()
    )


def _contention(family: str, run: _Run) -> float:
    """How many times as long a rank works while the others of its run work beside it.

    Stages of a pipeline are not all at work at once. The answer has their contention, instant by instant.
    """
    if family == PIPELINE:
        return 1.0
    return contention(run.workload, run.layout.micro_batch, run.layout.world_size, than=1)


def _steps_s(machine: MeasuredMachine, runs: Sequence[_Run]) -> FloatArray:
    """Nominal steps. [s]"""
    questions = [
        Question(machine=machine, workload=run.workload, layout=run.layout, num_draws=1)
        for run in runs
    ]
    return np.array([float(draws_s[0]) for draws_s in measured_steps_s(questions)])


def _run(workload: MeasuredWorkload, layout: str, entries: Sequence[LayoutObservation]) -> _Run:
    typical_s = typical([entry.median_step_s for entry in entries])
    return _Run(workload, parse_layout(layout), typical_s, len(entries))


def _run_variance(groups: Iterable[Sequence[LayoutObservation]]) -> float:
    """Variance of one repetition of a setting around their mean, in log."""
    logs = [np.log([entry.median_step_s for entry in group]) for group in groups]
    free = sum(len(group) - 1 for group in logs)
    return float(sum(((group - group.mean()) ** 2).sum() for group in logs)) / max(1, free)


def _scaled(workload: MeasuredWorkload, ratio: float) -> MeasuredWorkload:
    """The workload with all its compute so many times as long."""

    def scaled(curves: PhaseCurves) -> PhaseCurves:
        changed: dict[str, Any] = {
            name: tuple(replace(p, time_s=p.time_s * ratio) for p in getattr(curves, name))
            for name in PHASE_CURVES
        }
        return replace(curves, **changed)

    return replace(workload, phases=tuple(map(scaled, workload.phases)))

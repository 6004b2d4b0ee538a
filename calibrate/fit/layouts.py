"""What families of layouts add to their exchanges: fitted to stacks of layers that ran under them."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import nnls

from calibrate.summary import typical
from perfmodel.answer.measured import measured_steps_s, timed_workload
from perfmodel.answer.question import Question
from perfmodel.arrays import FloatArray
from perfmodel.cost.measured import families
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


def fit_layouts(
    machine: MeasuredMachine, observations: Sequence[LayoutObservation]
) -> tuple[LayoutCost, ...]:
    """Seconds per exchange and per byte of every family and number of ranks.

        measured step = predicted step + call_s * exchanges + byte_s * bytes

    Non-negative least squares in relative errors, drawn towards no cost by ``_PRIOR``.
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
        alone = _Run(priced, parse_layout(source.layout), _typical(found[stack, source.layout]))
        ratio = alone.measured_s / float(_steps_s(machine, [alone])[0])
        workload = _scaled(priced, ratio)
        for (of_stack, text), entries in found.items():
            layout = parse_layout(text)
            if of_stack == stack and layout.world_size > 1:
                [family] = families(layout)
                runs[family, layout.world_size].append(_Run(workload, layout, _typical(entries)))
    return _fitted(machine, dict(sorted(runs.items())))


def _fitted(
    machine: MeasuredMachine, runs: dict[tuple[str, int], list[_Run]]
) -> tuple[LayoutCost, ...]:
    flat = [run for group in runs.values() for run in group]

    def steps_s(call_s: float, byte_s: float) -> FloatArray:
        costs = tuple(
            LayoutCost(family=family, world_size=n, call_s=call_s, byte_s=byte_s, log_error=0.0)
            for family, n in runs
        )
        return _steps_s(replace(machine, layouts=costs), flat)

    base_s = steps_s(0.0, 0.0)
    slopes = [
        (steps_s(_TRIAL[0], 0.0) - base_s) / _TRIAL[0],
        (steps_s(0.0, _TRIAL[1]) - base_s) / _TRIAL[1],
    ]
    design = np.stack(slopes, axis=1)
    measured_s = np.array([run.measured_s for run in flat])
    squares: dict[str, list[float]] = defaultdict(list)
    free: dict[str, int] = defaultdict(int)
    solved = {}
    first = 0
    for (family, n), group in runs.items():
        rows = slice(first, first + len(group))
        first += len(group)
        weights = 1 / (measured_s[rows] * _STEP_ERROR)
        scaled = np.vstack([design[rows] * weights[:, np.newaxis] * _PRIOR, np.eye(len(_PRIOR))])
        left = np.append((measured_s[rows] - base_s[rows]) * weights, np.zeros(len(_PRIOR)))
        solution = nnls(scaled, left)[0] * _PRIOR
        missed = np.log(measured_s[rows] / (base_s[rows] + design[rows] @ solution))
        squares[family] += (missed**2).tolist()
        free[family] += max(0, len(group) - int((solution > 0).sum()))
        solved[family, n] = solution
    pooled = sum(map(sum, squares.values())) / max(1, sum(free.values()))
    return tuple(
        LayoutCost(
            family=family,
            world_size=n,
            call_s=float(solution[0]),
            byte_s=float(solution[1]),
            log_error=math.sqrt(
                (sum(squares[family]) + _POOLED * pooled) / (free[family] + _POOLED)
            ),
        )
        for (family, n), solution in solved.items()
    )


def _steps_s(machine: MeasuredMachine, runs: Sequence[_Run]) -> FloatArray:
    """Nominal steps. [s]"""
    questions = [
        Question(machine=machine, workload=run.workload, layout=run.layout, num_draws=1)
        for run in runs
    ]
    return np.array([float(draws_s[0]) for draws_s in measured_steps_s(questions)])


def _typical(entries: Sequence[LayoutObservation]) -> Seconds:
    return typical([entry.median_step_s for entry in entries])


def _scaled(workload: MeasuredWorkload, ratio: float) -> MeasuredWorkload:
    """The workload with all its compute so many times as long."""

    def scaled(curves: PhaseCurves) -> PhaseCurves:
        changed: dict[str, Any] = {
            name: tuple(replace(p, time_s=p.time_s * ratio) for p in getattr(curves, name))
            for name in PHASE_CURVES
        }
        return replace(curves, **changed)

    return replace(workload, phases=tuple(map(scaled, workload.phases)))

"""Step times of a large model over the number of devices: of every size the fastest layout that fits."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.curve import Samples
from perfmodel.cost.inferred_memory import fullest_and_fit
from perfmodel.cost.jobs import Jobs, jobs_from
from perfmodel.cost.memory import FITS_ABOVE
from perfmodel.documents.plan import ScalingStatement
from perfmodel.documents.prediction import Interval
from perfmodel.errors import NotFeasible
from perfmodel.parallelism.layout import Layout, accumulation_for
from perfmodel.parallelism.strategy import Scaling
from perfmodel.plan.assumptions import Assumption
from perfmodel.plan.parallelism import (
    Request,
    search_layouts,
    spread_against_first,
)
from perfmodel.plan.steps import Ends, Facts, FitInMemory
from perfmodel.predict_layout import (
    RARE_STALL,
    InferredMachine,
    Training,
    layout_caveats,
    layout_jobs,
)
from perfmodel.predictor import NUM_DRAWS
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.units import Bytes, format_bytes
from perfmodel.workload.transformers import NamedTransformer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutQuestion:
    """What is trained, and what is fixed of how it is spread."""

    model: NamedTransformer
    scaling: Scaling
    batch: int
    """Sequences per step: of each device (weak), or of all together (strong)."""
    capacity_bytes: Bytes
    devices_per_node: int
    fixed: Layout | None
    """``dp`` and ``accumulation`` of it follow from the devices and the batch; None: all are searched."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chosen:
    layout: Layout
    jobs: Jobs
    step_s: Samples
    memory: FitInMemory


class LayoutTable:
    """One model at one batch on one machine known from runs, over device counts.

    Parameters
    ----------
    counts
        Candidates; those that no layout splits, or none that fits, are left out.
    """

    def __init__(
        self, machine: InferredMachine, question: LayoutQuestion, *, counts: Iterable[int]
    ) -> None:
        self._machine, self._question = machine, question
        self._chosen: dict[int, _Chosen] = {}
        self.num_skipped = self.num_too_large = 0
        refusals: list[str] = []
        leanest: FitInMemory | None = None
        for count in sorted(set(counts)):
            try:
                found = self._best(count, self._global_batch(count))
            except NotFeasible as error:
                self.num_skipped += 1
                refusals.append(str(error).removeprefix("--devices: "))
                continue
            if found.memory.probability >= FITS_ABOVE:
                self._chosen[count] = found
            else:
                self.num_too_large += 1
                leanest = min(
                    leanest or found.memory, found.memory, key=lambda fit: fit.needed_bytes
                )
        self.counts: NDArray[np.int64] = np.array(sorted(self._chosen), dtype=int)
        self.refusal = "" if self._chosen else self._refusal(refusals, leanest)

    def global_batches(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sequences per step of all devices together, one per count."""
        return np.array([self._global_batch(int(count)) for count in counts])

    def step_s(self, counts: NDArray[np.int64]) -> Samples:
        """Draws of the step, shape ``(len(counts), num_draws)``. [s]"""
        return np.stack([self._chosen[int(count)].step_s for count in counts])

    def predict(self, counts: Iterable[int]) -> None:
        """Nothing to do: every count was predicted."""

    def has(self, count: int) -> bool:
        """Whether a count fits; then it was predicted."""
        return count in self._chosen

    def facts(self, count: int) -> Facts:
        """One size."""
        found = self._chosen[count]
        return Facts(
            micro_batch=found.layout.micro_batch,
            global_batch=found.layout.global_batch,
            step_s=found.step_s,
            evidence="inferred",
            memory=found.memory,
            layout=str(found.layout),
        )

    def ends(self, count: int) -> list[Ends]:
        """Assumptions about the step, and by which factors each alone moves it."""
        doubt = self._machine.model.doubt(self._chosen[count].jobs)
        spreads = {
            Assumption.LATENTS: doubt.latents,
            Assumption.LAYOUT_FORMULA: doubt.formula,
        }
        ends: list[Ends] = []
        for name, spread in spreads.items():
            factor = float(np.exp(DEVIATE_90 * spread[0]))
            ends.append((name, (1 / factor, factor)))
        if doubt.stall_probability[0] > RARE_STALL:
            # the nominal step lies between the calm and the stalled one
            found = self._chosen[count]
            calm_s = float(self._machine.model.predict(found.jobs, stalls=False).number_s[0])
            nominal_s = float(found.step_s[0])
            late_s = calm_s * float(doubt.stalled_ratio[0])
            low, high = min(calm_s, nominal_s), max(late_s, nominal_s)
            ends.append((Assumption.STALLS, (low / nominal_s, high / nominal_s)))
        return ends

    def scaling(self, count: int) -> list[ScalingStatement]:
        """Weak and strong scaling from the smallest size that fits."""
        first = int(self.counts[0])
        return [] if first == count else list(self._scaling_from(first, count))

    def caveats(self, count: int) -> list[str]:
        """Those of a prediction of that layout."""
        return layout_caveats(self._machine, self._chosen[count].jobs)

    def _scaling_from(self, first: int, count: int) -> Iterator[ScalingStatement]:
        together = self._global_batch(count)
        whole = together % count == 0
        batches: dict[Scaling, tuple[int, int]] = {"strong": (together, together)}
        if whole:
            batches["weak"] = (together // count, together // count * first)
        for scaling, (batch, few) in sorted(batches.items(), reverse=True):
            try:
                base = self._best(first, few)
            except NotFeasible:
                continue
            if base.memory.probability < FITS_ABOVE:
                continue
            ratio = (together / few) * self._ratio(base, self._chosen[count])
            yield ScalingStatement(
                scaling=scaling,
                batch=batch,
                devices=count,
                from_devices=first,
                speedup=Interval(p5=ratio[0], p50=ratio[1], p95=ratio[2]),
                efficiency=Interval(
                    **{
                        name: value * first / count
                        for name, value in zip(("p5", "p50", "p95"), ratio, strict=True)
                    }
                ),
            )

    def _ratio(self, slow: _Chosen, fast: _Chosen) -> NDArray[np.float64]:
        """5th percentile, nominal and 95th of one step over another: layouts deviate each by itself."""
        jobs = jobs_from(
            [(self._question.model.shape, chosen.layout) for chosen in (slow, fast)],
            sequence=self._question.model.sequence,
            devices_per_node=self._question.devices_per_node,
        )
        spread = float(spread_against_first(self._machine.model, jobs)[1])
        deviates = np.array([-DEVIATE_90, 0.0, DEVIATE_90])
        nominal = float(slow.step_s[0] / fast.step_s[0])
        return np.asarray(nominal * np.exp(deviates * spread))

    def _global_batch(self, count: int) -> int:
        question = self._question
        return question.batch if question.scaling == "strong" else question.batch * count

    def _best(self, count: int, global_batch: int) -> _Chosen:
        """The fastest layout that fits, or the leanest one if none does.

        Raises
        ------
        NotFeasible
            If no layout is possible.
        """
        training = Training(
            model=self._question.model,
            devices=count,
            devices_per_node=self._question.devices_per_node,
            global_batch=global_batch,
        )
        if self._question.fixed is not None:
            layout = _completed(self._question.fixed, count, global_batch)
            return self._measured(layout, layout_jobs(training, layout))
        model = self._machine.model
        request = Request(training=training, capacity_bytes=self._question.capacity_bytes)
        search = search_layouts(model, request)
        fitting = np.flatnonzero(search.judged.fit >= FITS_ABOVE)
        if not fitting.size:
            leanest = int(np.argmin(search.judged.needed_bytes))
            return self._measured(search.layouts.layout(leanest), search.jobs(np.array([leanest])))
        near = search.fastest(fitting)
        place = int(near[np.argmin(model.predict(search.jobs(near)).mean_s)])
        return self._measured(search.layouts.layout(place), search.jobs(np.array([place])))

    def _measured(self, layout: Layout, jobs: Jobs) -> _Chosen:
        model = self._machine.model
        needed, fit = fullest_and_fit(model.memory, jobs, self._question.capacity_bytes)
        return _Chosen(
            layout=layout,
            jobs=jobs,
            step_s=model.step_draws(jobs, num_draws=NUM_DRAWS)[0],
            memory=FitInMemory(
                needed_bytes=float(needed[0]),
                probability=float(fit[0]),
            ),
        )

    def _refusal(self, refusals: list[str], leanest: FitInMemory | None) -> str:
        if leanest is not None:
            return (
                f"device_memory: no layout of {self._question.model.name} fits into "
                f"{format_bytes(self._question.capacity_bytes)}; the leanest needs "
                f"{format_bytes(leanest.needed_bytes)} and fits with {leanest.probability:.0%}, where "
                f"{FITS_ABOVE:.0%} is asked for: take more or larger devices"
            )
        return refusals[-1]


def _completed(fixed: Layout, count: int, global_batch: int) -> Layout:
    """The fixed layout on so many devices.

    Raises
    ------
    NotFeasible
        If the devices or the batch cannot be split that way.
    """
    shared = fixed.tp * fixed.pp * fixed.cp
    if count % shared:
        raise NotFeasible(
            f"layout: tp x pp x cp = {shared} must divide the devices, got {count}; choose other counts"
        )
    dp = count // shared
    accumulation = accumulation_for(global_batch=global_batch, dp=dp, micro_batch=fixed.micro_batch)
    return dataclasses.replace(fixed, dp=dp, accumulation=accumulation)

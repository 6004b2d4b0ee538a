"""Step times over the number of devices: predicted at some counts, read between them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from perfmodel.arrays import IntArray
from perfmodel.context import caveats
from perfmodel.cost.curve import Samples
from perfmodel.cost.memory import FITS_ABOVE
from perfmodel.documents.plan import ScalingStatement
from perfmodel.documents.prediction import Evidence, PredictedPoint
from perfmodel.documents.profile import WorkloadProfile
from perfmodel.errors import NotFeasible
from perfmodel.parallelism.strategy import MOST_BATCH, Scaling, Setting, scaled_settings
from perfmodel.plan.steps import Ends, Facts, FitInMemory
from perfmodel.plan.tornado import step_ends
from perfmodel.predictor import Predictor, StepPrediction
from perfmodel.units import format_bytes

#: With more counts than this, steps are predicted at as many, evenly in log, and read linearly in log
#: between them.
MOST_KNOTS: Final = 48


class StepTable:
    """One workload at one batch on one machine, over device counts.

    Parameters
    ----------
    counts
        Candidates. Those into which the batch cannot be split, with strong scaling, are left out, and
        those that do not fit.
    memory
        Whether a setting fits into a device; None if nobody asks.
    """

    def __init__(  # noqa: PLR0913 - one parameter per part of the question
        self,
        predictor: Predictor,
        workload: WorkloadProfile,
        *,
        scaling: Scaling,
        batch: int,
        accumulation: int,
        counts: Iterable[int],
        memory: Callable[[Setting], FitInMemory] | None = None,
    ) -> None:
        self._memory = memory
        self._predictor, self._workload = predictor, workload
        self._scaling, self._batch, self._accumulation = scaling, batch, accumulation
        asked = sorted(set(counts))
        split = [count for count in asked if self._splits(count)]
        fitting = [count for count in split if self._fits(count)]
        self.counts: IntArray = np.array(fitting, dtype=int)
        self.num_skipped = len(asked) - len(split)
        self.num_too_large = len(split) - len(fitting)
        self.refusal = "" if fitting else self._refusal(split)
        self._draws: dict[int, Samples] = {}
        self._steps: dict[int, StepPrediction] = {}
        self._knots: tuple[Samples, Samples] | None = None
        self.predict(self._first_knots())

    def setting(self, count: int) -> Setting:
        """What so many devices run."""
        [setting] = scaled_settings(
            self._workload.workload.name,
            [count],
            scaling=self._scaling,
            batch=self._batch,
            accumulation=self._accumulation,
        )
        return setting

    def global_batches(self, counts: IntArray) -> IntArray:
        """Samples per step of all devices together, one per count."""
        if self._scaling == "strong":
            return np.full(len(counts), self._batch)
        return counts * self._batch * self._accumulation

    def step(self, count: int) -> StepPrediction:
        """One count with all that is known of its step; most counts are never asked for it."""
        if count not in self._steps:
            self._steps[count] = self._predictor.step(self._workload, self.setting(count))
            self._know({count: self._steps[count].step_s})
        return self._steps[count]

    def predict(self, counts: Iterable[int]) -> None:
        """Predict these counts, so that they are read exactly from now on."""
        fresh = [count for count in counts if count not in self._draws]
        if not fresh:
            return
        settings = [self.setting(count) for count in fresh]
        draws_s = self._predictor.step_draws(self._workload, settings)
        self._know(dict(zip(fresh, draws_s, strict=True)))

    def _know(self, draws_s: Mapping[int, Samples]) -> None:
        """Counts that are read exactly from now on."""
        self._draws.update(draws_s)
        self._knots = None

    def has(self, count: int) -> bool:
        """Whether a count was predicted, and not only read between others."""
        return count in self._draws

    def step_s(self, counts: IntArray) -> Samples:
        """Draws of the step at any counts, shape ``(len(counts), num_draws)``. [s]

        Between two predicted counts the nominal step is linear in log; the draws deviate from it as
        those of the nearer one do, so that doubt is not averaged away.
        """
        at, logs = self._table()
        where = np.log(counts)
        if len(at) == 1:
            return np.exp(np.repeat(logs, len(counts), axis=0))
        nominal = np.interp(where, at, logs[:, 0])
        right = np.clip(np.searchsorted(at, where), 1, len(at) - 1)
        nearest = np.where(where - at[right - 1] < at[right] - where, right - 1, right)
        deviations = logs - logs[:, :1]
        result: Samples = np.exp(nominal[:, None] + deviations[nearest])
        return result

    def _table(self) -> tuple[Samples, Samples]:
        if self._knots is None:
            counts = sorted(self._draws)
            logs = np.log(np.stack([self._draws[count] for count in counts]))
            self._knots = (np.log(counts), logs)
        return self._knots

    def facts(self, count: int) -> Facts:
        """One size."""
        step = self.step(count)
        return Facts(
            micro_batch=step.setting.micro_batch,
            global_batch=step.setting.global_batch,
            step_s=step.step_s,
            evidence=Evidence.weakest(step.terms.evidence.values()),
            memory=None if self._memory is None else self._memory(step.setting),
        )

    def ends(self, count: int) -> list[Ends]:
        """Assumptions about the step, and by which factors each alone moves it."""
        return list(step_ends(self.step(count)))

    def scaling(self, count: int) -> list[ScalingStatement]:
        """Weak and strong scaling from one device, as ``perfmodel predict`` has them."""
        return [] if count == 1 else list(self._scaling_of(self.step(count)))

    def caveats(self, count: int) -> list[str]:
        """Those of a prediction of that size."""
        step = self.step(count)
        point = self._predictor.point(step, baseline=self._alone(step.setting, "weak"))
        return list(caveats(self._predictor.profile, [point], workload=self._workload))

    def _scaling_of(self, step: StepPrediction) -> Iterator[ScalingStatement]:
        setting = step.setting
        batches: dict[Scaling, int] = {
            "weak": setting.micro_batch,
            "strong": setting.global_batch,
        }
        for scaling, batch in batches.items():
            if batch > MOST_BATCH:
                continue
            baseline = self._alone(setting, scaling)
            point: PredictedPoint = self._predictor.point(step, baseline=baseline)
            yield ScalingStatement(
                scaling=scaling,
                batch=batch,
                devices=setting.world_size,
                from_devices=1,
                speedup=point.speedup,
                efficiency=point.scaling_efficiency,
            )

    def _alone(self, setting: Setting, scaling: Scaling) -> StepPrediction:
        [alone] = scaled_settings(
            setting.workload,
            [1],
            scaling=scaling,
            batch=setting.micro_batch if scaling == "weak" else setting.global_batch,
            accumulation=setting.accumulation,
        )
        return self._predictor.step(self._workload, alone)

    def _splits(self, count: int) -> bool:
        if self._scaling == "weak":
            return True
        try:
            self.setting(count)
        except NotFeasible:
            return False
        return True

    def _fits(self, count: int) -> bool:
        return self._memory is None or self._memory(self.setting(count)).probability >= FITS_ABOVE

    def _refusal(self, split: Sequence[int]) -> str:
        if not split:
            return (
                "scaling strong: each batch must be a multiple of devices x accumulation, got none "
                "that is; choose other batches or counts"
            )
        assert self._memory is not None
        least = min(
            (self._memory(self.setting(n)) for n in split), key=lambda fit: fit.needed_bytes
        )
        return (
            f"device_memory: batch {self._batch} needs {format_bytes(least.needed_bytes)} of each device; "
            "take smaller batches or larger devices"
        )

    def _first_knots(self) -> Sequence[int]:
        if len(self.counts) <= MOST_KNOTS:
            return [int(count) for count in self.counts]
        wanted = np.geomspace(self.counts[0], self.counts[-1], MOST_KNOTS)
        places = np.searchsorted(self.counts, wanted - 1e-9).clip(0, len(self.counts) - 1)
        # one device runs without DDP: nothing is read between it and two
        return sorted({*self.counts[places].tolist(), *self.counts[:2].tolist()})

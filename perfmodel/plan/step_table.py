"""Step times over the number of devices: predicted at some counts, read between them."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.curve import Samples
from perfmodel.documents.profile import WorkloadProfile
from perfmodel.errors import NotFeasible
from perfmodel.parallelism.strategy import Setting
from perfmodel.predictor import Predictor, Scaling, StepPrediction, scaled_settings

#: With more counts than this, steps are predicted at as many, evenly in log, and read linearly in log
#: between them.
MOST_KNOTS: Final = 48


class StepTable:
    """One workload at one batch on one machine, over device counts.

    Parameters
    ----------
    counts
        Candidates. With strong scaling those into which the batch cannot be split are left out.
    """

    def __init__(
        self,
        predictor: Predictor,
        workload: WorkloadProfile,
        *,
        scaling: Scaling,
        batch: int,
        accumulation: int,
        counts: Iterable[int],
    ) -> None:
        self._predictor, self._workload = predictor, workload
        self._scaling, self._batch, self._accumulation = scaling, batch, accumulation
        asked = sorted(set(counts))
        self.counts: NDArray[np.int64] = np.array([n for n in asked if self._fits(n)], dtype=int)
        self.num_skipped = len(asked) - len(self.counts)
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

    def global_batches(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples per step of all devices together, one per count."""
        if self._scaling == "strong":
            return np.full(len(counts), self._batch)
        return counts * self._batch * self._accumulation

    def step(self, count: int) -> StepPrediction:
        """Predict one count."""
        self.predict([count])
        return self._steps[count]

    def predict(self, counts: Iterable[int]) -> None:
        """Predict these counts, so that they are read exactly from now on."""
        for count in counts:
            if count not in self._steps:
                self._steps[count] = self._predictor.step(self._workload, self.setting(count))
                self._knots = None

    def has(self, count: int) -> bool:
        """Whether a count was predicted, and not only read between others."""
        return count in self._steps

    def step_s(self, counts: NDArray[np.int64]) -> Samples:
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
            counts = sorted(self._steps)
            logs = np.log(np.stack([self._steps[count].step_s for count in counts]))
            self._knots = (np.log(counts), logs)
        return self._knots

    def _fits(self, count: int) -> bool:
        try:
            self.setting(count)
        except NotFeasible:
            return False
        return True

    def _first_knots(self) -> Sequence[int]:
        if len(self.counts) <= MOST_KNOTS:
            return [int(count) for count in self.counts]
        wanted = np.geomspace(self.counts[0], self.counts[-1], MOST_KNOTS)
        places = np.searchsorted(self.counts, wanted - 1e-9).clip(0, len(self.counts) - 1)
        # one device runs without DDP: nothing is read between it and two
        return sorted({*self.counts[places].tolist(), *self.counts[:2].tolist()})

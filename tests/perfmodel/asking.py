"""Questions about one machine, with what all of them share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.answer import NUM_DRAWS, Answer, Question, timed_workload
from perfmodel.answer.answer import answer, point, steps_s
from perfmodel.cost import Samples
from perfmodel.documents.prediction import PredictedPoint
from perfmodel.layout import Layout
from perfmodel.machine import Cluster
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.workload import Workload
from perfmodel.workload.memory import StepMemory
from perfmodel.workload.step import SymbolicStep


@dataclass(frozen=True)
class Asking:
    """What several questions have in common."""

    profile: MeasuredMachine
    num_draws: int = NUM_DRAWS
    use_measured: bool = True
    cluster: Cluster | None = None

    def workload(
        self,
        workload: str | Workload,
        trace: SymbolicStep | None = None,
        memory: StepMemory | None = None,
    ) -> MeasuredWorkload:
        return timed_workload(
            self.profile, workload, trace=trace, memory=memory, use_measured=self.use_measured
        )

    def question(self, workload: MeasuredWorkload, layout: Layout, **more: Any) -> Question:
        return Question(
            machine=self.profile,
            workload=workload,
            layout=layout,
            cluster=self.cluster,
            num_draws=self.num_draws,
            **more,
        )

    def step(self, workload: MeasuredWorkload, layout: Layout, **more: Any) -> Answer:
        return answer(self.question(workload, layout, **more))

    def point(self, step: Answer, *, baseline: Answer) -> PredictedPoint:
        return point(step, baseline=baseline)

    def step_draws(self, workload: MeasuredWorkload, layouts: Sequence[Layout]) -> list[Samples]:
        return steps_s([self.question(workload, layout) for layout in layouts])

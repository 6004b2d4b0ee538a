"""Questions about one machine, with what all of them share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.answer import NUM_DRAWS, Answer, Question, timed_workload
from perfmodel.answer.answer import answer, point, steps_s
from perfmodel.answer.measured import layout_costs
from perfmodel.cost import Samples, Terms
from perfmodel.documents.prediction import PredictedPoint
from perfmodel.documents.verdicts import ValidationDocument
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
    validation: ValidationDocument | None = None
    num_draws: int = NUM_DRAWS
    use_measured: bool = True
    cluster: Cluster | None = None
    num_repetitions: int = 1

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
            validation=self.validation,
            cluster=self.cluster,
            num_draws=self.num_draws,
            num_repetitions=self.num_repetitions,
            **more,
        )

    def step(self, workload: MeasuredWorkload, layout: Layout, **more: Any) -> Answer:
        return answer(self.question(workload, layout, **more))

    def terms(self, workload: MeasuredWorkload, layout: Layout) -> Terms:
        return layout_costs(self.question(workload, layout)).terms

    def point(self, step: Answer, *, baseline: Answer) -> PredictedPoint:
        return point(step, baseline=baseline)

    def step_draws(self, workload: MeasuredWorkload, layouts: Sequence[Layout]) -> list[Samples]:
        return steps_s([self.question(workload, layout) for layout in layouts])

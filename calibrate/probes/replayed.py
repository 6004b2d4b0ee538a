"""A task's step, replayed, as an observation."""

from dataclasses import dataclass, replace
from typing import Self

from calibrate.probes.replay import Replay
from calibrate.probes.session import Session
from calibrate.probes.tracing import replayed_step
from calibrate.task import ReplayTask, StepTask, replay_name
from perfmodel.documents.observation import RankSteps, ReplayObservation, TimedOperator
from perfmodel.tracing.trace import TracedModel
from perfmodel.workload.operator import Phase
from perfmodel.workload.signature import parameters_signature, signature
from perfmodel.workload.step import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A step that is replayed for a task."""

    task: ReplayTask
    traced: TracedModel | None
    """Its trace, if the worker made it."""
    step: TracedStep
    replay: Replay

    @classmethod
    def open(cls, session: Session, task: ReplayTask) -> Self:
        """Trace or read the step and repeat it once."""
        traced, step = replayed_step(session, task)
        return cls(task=task, traced=traced, step=step, replay=Replay(session, step))

    @classmethod
    def beside(cls, session: Session, task: StepTask) -> Self:
        """The step that a task runs."""
        return cls.open(
            session,
            ReplayTask(
                name=replay_name(task.name),
                round=task.round,
                workload=task.setting.workload,
                micro_batch=task.setting.micro_batch,
                trainee=task.trainee,
                target_s=task.target_s,
            ),
        )

    def observation(self, *, beside: RankSteps | None = None) -> ReplayObservation:
        """What was measured so far, and the steps that took turns with it."""
        times, step = self.replay.times, self.step
        # The same in every round: once is enough on disk.
        kept = self.traced if self.task.round == 0 else None
        counts = step.call_counts()
        return ReplayObservation(
            task=self.task.name,
            round=self.task.round,
            workload=self.task.workload,
            micro_batch=self.task.micro_batch,
            parameters=parameters_signature(step),
            num_trained=sum(parameter.ready_after is not None for parameter in step.parameters),
            operators=tuple(
                TimedOperator(
                    signature=signature(step.operators[position]),
                    phase=phase,
                    num_calls=counts[position, phase],
                    times_s=tuple(times_s),
                )
                for (position, phase), times_s in times.calls_s.items()
                if position not in times.failed
            ),
            forward_s=tuple(times.phases_s[Phase.FORWARD]),
            backward_s=tuple(times.phases_s[Phase.BACKWARD]),
            optimizer_s=tuple(times.phases_s[Phase.OPTIMIZER]),
            speed_probe_s=tuple(times.speed_probe_s),
            failed=tuple(sorted({step.operators[position].name for position in times.failed})),
            traced=None if kept is None else kept.step,
            model=None if kept is None else replace(kept.workload, name=self.task.workload),
            beside=beside,
        )

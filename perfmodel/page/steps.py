"""Answers about calibrated machines: the same steps, points and contrasts as ``perfmodel whatif``."""

import functools
import shlex
from dataclasses import replace
from typing import Final

from perfmodel.answer.answer import Forecast, answer, point, steps_s
from perfmodel.answer.measured import interval, measured_caveats
from perfmodel.answer.question import Answer, Question
from perfmodel.cost.memory import step_memory, verdict
from perfmodel.cost.terms import Samples
from perfmodel.documents.page import CurvePoint, MemoryAnswer, PageAnswer, StepQuestion
from perfmodel.documents.prediction import Contrast
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.layout.layout import Layout, scaled_layouts
from perfmodel.page.machines import OpenedWorkload, StepMachine, chosen, spent, timeline
from perfmodel.scenarios.compare import UNMEASURED, contrast_of_draws, with_assumed
from perfmodel.scenarios.fields import Scenario, changed, in_cluster

#: Where the curve is drawn at least, as far as ``perfmodel predict`` goes without being asked.
CURVE_UP_TO: Final = 1024
_CLUSTER: Final = "cluster"
#: Fields of ``--set`` that stand in the question by themselves, or would open files.
_ELSEWHERE: Final = frozenset({"workload", "devices", "batch", _CLUSTER})
#: Micro-steps and buckets are simulated one by one: beyond these they take seconds.
_LEAST_BUCKET_MB: Final = 1
_MOST_ACCUMULATION: Final = 64


class StepSession:
    """Answers questions about one machine and one workload, and keeps steps for the next one."""

    def __init__(self, machine: StepMachine, workload: str) -> None:
        self._machine = machine
        self._workload: OpenedWorkload = chosen("workload", workload, machine.workloads)
        self._scenario = functools.lru_cache(maxsize=16)(self._scenario_of)
        self._step = functools.lru_cache(maxsize=64)(self._step_of)
        self._draws = functools.lru_cache(maxsize=16)(self._draws_of)

    def answer(self, question: StepQuestion) -> PageAnswer:
        """Predict what is asked, the curve around it, and what the changes change.

        Raises
        ------
        UsageError
            If a change makes no sense here.
        NotFeasible
            If a global batch cannot be split evenly.
        CalibrationUnavailable
            If the profile holds too little for the question.
        """
        changes = _changes(question)
        scenario = self._scenario(changes)
        layouts = self._layouts(scenario, question)
        single, asked = (self._step(changes, layout) for layout in layouts)
        found = with_assumed(point(asked, baseline=single), scenario)
        memory, no_memory = _memory(
            self._workload, question, asked.layout, scenario.machine.memory_kind
        )
        notes = [
            *measured_caveats(asked.question, [asked]),
            *scenario.remarks,
            *((UNMEASURED,) if scenario.assumed else ()),
        ]
        return PageAnswer(
            setting=_words(self._workload.entry.workload.name, asked.layout, question.scaling),
            step_s=found.step_s,
            throughput=found.samples_per_s,
            throughput_unit="samples/s",
            speedup=found.speedup,
            efficiency=found.scaling_efficiency,
            efficiency_name="scaling efficiency",
            exposed_comm_s=found.exposed_comm_s,
            straggler_s=found.straggler_s,
            contrast=self._contrast(question, asked),
            breakdown_s={cause.value: time_s for cause, time_s in found.breakdown_s.items()},
            evidence=dict(found.evidence),
            curve=self._curve(question, asked),
            timeline_step_s=asked.trace.step_s,
            timeline=timeline(asked.trace),
            memory=memory,
            no_memory=no_memory,
            spent=spent(question.spending, found.samples_per_s, devices=question.devices),
            command=_command(self._machine, self._workload, question),
            caveats=tuple(dict.fromkeys(notes)),
        )

    def _scenario_of(self, changes: tuple[tuple[str, str], ...]) -> Scenario:
        base = Scenario(
            question=Question(
                machine=self._machine.profile,
                workload=self._workload.entry,
                validation=self._machine.validation,
                tails=(),
            ),
            request=Forecast(world_sizes=(1,), scaling="weak"),
        )
        fields = dict(changes)
        name = fields.pop(_CLUSTER, None)
        if name is not None:
            base = in_cluster(base, chosen("cluster", name, self._machine.clusters).cluster)
        scenario = changed(base, fields)
        request = _request(scenario)
        cap_mb = request.bucket_cap_mb
        if cap_mb is not None and cap_mb < _LEAST_BUCKET_MB:
            raise UsageError(
                f"bucket_cap: must be >= {_LEAST_BUCKET_MB} MiB on the page, got {cap_mb:g}; "
                "perfmodel whatif takes less"
            )
        if request.accumulation > _MOST_ACCUMULATION:
            raise UsageError(
                f"accumulation: must be <= {_MOST_ACCUMULATION} on the page, got "
                f"{request.accumulation}; perfmodel whatif takes more"
            )
        return scenario

    def _question(self, changes: tuple[tuple[str, str], ...], layout: Layout) -> Question:
        scenario = self._scenario(changes)
        rate = _request(scenario).loader_samples_per_s
        return replace(scenario.question, layout=layout, loader_samples_per_s=rate)

    def _step_of(self, changes: tuple[tuple[str, str], ...], layout: Layout) -> Answer:
        return answer(self._question(changes, layout))

    def _layouts(self, scenario: Scenario, question: StepQuestion) -> tuple[Layout, Layout]:
        """One device, which the speed-up refers to, and what is asked."""
        request = replace(
            _request(scenario),
            world_sizes=(question.devices,),
            scaling=question.scaling,
            batch=question.batch,
            loader_samples_per_s=None,
        )
        found = request.layouts(scenario.workload)
        return found[0], found[-1]

    def _contrast(self, question: StepQuestion, asked: Answer) -> Contrast | None:
        """Against the machine and the strategy as they are, draw by draw."""
        if not _changes(question):
            return None
        try:
            _, layout = self._layouts(self._scenario(()), question)
        except NotFeasible:  # the batch may need the changed accumulation to be split evenly
            return None
        before = self._step((), layout)
        batches = asked.layout.global_batch / layout.global_batch
        return contrast_of_draws(before.step_s, asked.step_s, batches=batches, is_paired=True)

    def _curve(self, question: StepQuestion, asked: Answer) -> tuple[CurvePoint, ...]:
        """Speed-ups of powers of two and of the count asked for, where the batch can be split."""
        layouts = self._powers(question, asked.layout)
        steps_s = {
            **dict(zip(layouts, self._draws(_changes(question), layouts), strict=True)),
            asked.layout: asked.step_s,
        }
        single = layouts[0]
        return tuple(
            CurvePoint(
                devices=layout.world_size,
                value=interval(
                    layout.global_batch / single.global_batch * steps_s[single] / steps_s[layout]
                ),
                ideal=layout.world_size,
            )
            for layout in sorted(steps_s, key=lambda layout: layout.world_size)
        )

    def _powers(self, question: StepQuestion, asked: Layout) -> tuple[Layout, ...]:
        """Settings like the one asked for, on powers of two."""
        most = CURVE_UP_TO if self._machine.profile.max_world_size > 1 else 1
        while most < question.devices:
            most *= 2
        cluster = self._scenario(_changes(question)).question.cluster
        most = most if cluster is None else min(most, cluster.num_devices)
        batch = asked.micro_batch if question.scaling == "weak" else asked.global_batch
        counts = [2**power for power in range(most.bit_length())]
        if question.scaling == "strong":
            counts = [count for count in counts if batch % (count * asked.accumulation) == 0]
        return scaled_layouts(
            counts,
            scaling=question.scaling,
            batch=batch,
            accumulation=asked.accumulation,
            bucket_cap_mb=asked.bucket_cap_mb,
        )

    def _draws_of(
        self, changes: tuple[tuple[str, str], ...], layouts: tuple[Layout, ...]
    ) -> list[Samples]:
        return steps_s([self._question(changes, layout) for layout in layouts])


def _request(scenario: Scenario) -> Forecast:
    assert scenario.request is not None
    return scenario.request


def _changes(question: StepQuestion) -> tuple[tuple[str, str], ...]:
    """Changes that ``--set`` knows and the page may make, in a fixed order.

    Raises
    ------
    UsageError
        If one would open a file, or stands in the question by itself.
    """
    for name in question.changes:
        if name in _ELSEWHERE:
            raise UsageError(f"changes: {name} must be asked by its own field, got a change")
    cluster = {} if question.cluster is None else {_CLUSTER: question.cluster}
    return tuple(sorted((question.changes | cluster).items()))


def _memory(
    workload: OpenedWorkload, question: StepQuestion, layout: Layout, device_kind: str
) -> tuple[MemoryAnswer | None, str]:
    document = workload.document
    found = (
        None
        if document is None
        else step_memory(document.workload, document.memory, layout, device_kind=device_kind)
    )
    if found is None:
        return None, (
            "Not known: this workload was not traced. perfmodel trace writes a file that can be given "
            "to perfmodel serve --workload."
        )
    if question.capacity_bytes is None:
        return None, "Give the memory of one device."
    probability = found.fit_probability(question.capacity_bytes)
    return MemoryAnswer(
        parts_bytes={name: float(size) for name, size in found.parts.items()},
        needed_bytes=found.needed_bytes,
        capacity_bytes=question.capacity_bytes,
        fit_probability=probability,
        verdict=verdict(probability).value,
    ), ""


def _words(workload: str, layout: Layout, scaling: str) -> str:
    parts = f"{layout.world_size:,} x {layout.micro_batch:,}"
    if layout.accumulation > 1:
        parts += f" x {layout.accumulation}"
    return (
        f"{workload}, devices x micro-batch{' x accumulation' * (layout.accumulation > 1)} "
        f"{parts}, global batch {layout.global_batch:,}, {scaling} scaling"
    )


def _command(machine: StepMachine, workload: OpenedWorkload, question: StepQuestion) -> str:
    words = [
        *("perfmodel", "whatif", "--profile", machine.typed, "--workload", workload.typed),
        *("--devices", str(question.devices), "--scaling", question.scaling),
    ]
    if question.batch is not None:
        words += ["--batch", str(question.batch)]
    if machine.validation_typed:
        words += ["--validation", machine.validation_typed]
    for name, value in _changes(question):
        is_cluster = name == _CLUSTER
        typed = chosen("cluster", value, machine.clusters).typed if is_cluster else value
        words += ["--set", f"{name}={typed}"]
    return shlex.join(words)

"""One question in, one answer out: what the server and the tests call.

Numbers come from the functions of ``perfmodel whatif`` and ``perfmodel predict --layout``.
"""

import functools
import shlex
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from perfmodel.answer import Answer, Question, interval
from perfmodel.answer.answer import answer, point, speedups, steps_s, with_memory
from perfmodel.answer.inferred import layout_document
from perfmodel.answer.measured import measured_caveats
from perfmodel.cost.inferred import open_inferred
from perfmodel.cost.jobs import jobs_from
from perfmodel.cost.layout_time import step_time_s
from perfmodel.cost.memory import verdict
from perfmodel.diagnosis.asked import diagnosed
from perfmodel.diagnosis.cases import Case
from perfmodel.diagnosis.odds import NORMAL, Fit
from perfmodel.documents.prediction import Contrast, PredictedPoint
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import CalibrationUnavailable, NotFeasible, PerfModelError, UsageError
from perfmodel.layout import MOST_DEVICES, Layout, accumulation_for, parse_layout, scaled_layouts
from perfmodel.machine import DEVICES_PER_NODE, Evidence, InferredMachine
from perfmodel.page import (
    LoggedSpeed,
    OfferedMachine,
    OfferedWorkload,
    PageQuestion,
    catalogue,
    chosen,
)
from perfmodel.scenarios import UNMEASURED, Scenario, contrast_of_draws, with_assumed
from perfmodel.scenarios.fields import changed
from perfmodel.units import Seconds
from perfmodel.workload.transformer import NamedTransformer

#: Where the curve of a calibrated machine ends at least, as far as ``perfmodel predict`` goes.
CURVE_UP_TO: Final = 1024
_LAYOUT_CURVE_UP_TO: Final = 16_384
_CLUSTER: Final = "cluster"
#: Changes of links alone.
_LINKS: Final = (_CLUSTER, "network.")
#: Fields of ``--set`` that stand in the question by themselves, or would open files.
_ELSEWHERE: Final = frozenset({"workload", "devices", "batch", _CLUSTER})
#: Micro-steps, buckets and passes are simulated one by one: beyond these they take seconds.
_LEAST_BUCKET_MB: Final = 1
_MOST_ACCUMULATION: Final = 64
_MOST_PASSES: Final = 8192
_NO_CAPACITY: Final = "Give the memory of one device."
_NOT_TRACED: Final = (
    "Not known: this workload was not traced. perfmodel trace writes a file that can be given to "
    "perfmodel serve --workload."
)


class _Subject(NamedTuple):
    """What a question is about, apart from its layout: the key of what is kept for the next one."""

    profile: str
    workload: str
    changes: tuple[tuple[str, str], ...] = ()
    """Fields of ``--set``, in a fixed order."""


class _Shown(NamedTuple):
    """What the two kinds of machines say in their own ways."""

    setting: str
    point: PredictedPoint
    typed: Sequence[str]
    """The command that prints the same numbers."""
    caveats: Sequence[str]
    contrast: Contrast | None = None


class Answers:
    """Answers questions one at a time, and remembers the last ones."""

    def __init__(self, machines: Mapping[str, OfferedMachine]) -> None:
        self._machines = machines
        self.catalogue = catalogue(machines)
        self._one_at_a_time = threading.Lock()
        self._scenario = functools.lru_cache(maxsize=64)(self._scenario_of)
        self._step = functools.lru_cache(maxsize=128)(
            lambda subject, layout: answer(self._question(subject, layout))
        )
        self._draws = functools.lru_cache(maxsize=32)(
            lambda subject, layouts: steps_s([self._question(subject, each) for each in layouts])
        )

    def answer(self, asked: PageQuestion) -> dict[str, Any]:
        """The prediction that is asked for; ``PerfModelError`` or ``ValueError`` where the user can mend it."""
        machine, workload = self._offered(asked)
        with self._one_at_a_time:
            subject = _subject(asked)
            alone, layout = self._layouts(asked, subject)
            found = self._step(subject, layout)
            single = found
            if layout != alone:
                # One device: no change of the links between devices changes its step.
                own = (each for each in subject.changes if not each[0].startswith(_LINKS))
                single = self._step(subject._replace(changes=tuple(own)), alone)
            if machine.kind == "calibrated":
                shown = self._of_calibrated(asked, found, single, machine, workload)
            else:
                shown = _of_inferred(asked, found, machine, workload)
        point, large = shown.point, shown.point.large_model
        throughput = point.samples_per_s if large is None else large.tokens_per_s
        efficiency = point.scaling_efficiency if large is None else large.mfu
        assert efficiency is not None
        parts_s = point.breakdown_s if large is None else large.parts_s.model_dump()
        memory = _fullest_stage(point)
        no_memory = _NO_CAPACITY if point.memory else _NOT_TRACED
        return {
            "setting": shown.setting,
            "step_s": found.step,
            "throughput": throughput,
            "throughput_unit": "samples/s" if large is None else "tokens/s",
            "speedup": point.speedup,
            "efficiency": efficiency,
            "efficiency_name": "scaling efficiency" if large is None else "MFU",
            "exposed_comm_s": point.exposed_comm_s if large is None else None,
            "straggler_s": point.straggler_s if large is None else None,
            "contrast": shown.contrast,
            "breakdown_s": {name.removesuffix("_s"): max(0.0, s) for name, s in parts_s.items()},
            "evidence": dict(point.evidence),
            "memory": memory,
            "no_memory": "" if memory else no_memory,
            "command": shlex.join(["perfmodel", *shown.typed]),
            "caveats": [*dict.fromkeys(shown.caveats)],
        }

    def detail(self, asked: PageQuestion) -> dict[str, Any]:
        """The curve around an answer, and a logged speed beside it; raises as ``answer`` does."""
        machine, workload = self._offered(asked)
        with self._one_at_a_time:
            subject = _subject(asked)
            found = self._step(subject, self._layouts(asked, subject)[-1])
            curve = (
                self._curve_of_scaling(asked, subject, found)
                if machine.kind == "calibrated"
                else _curve_of_replicas(found)
            )
            return {"curve": curve, "diagnosis": judged(asked, machine, workload, found)}

    def _offered(self, asked: PageQuestion) -> tuple[OfferedMachine, OfferedWorkload]:
        machine = chosen("profile", asked.profile, self._machines)
        return machine, chosen("workload", asked.workload, machine.workloads)

    def _layouts(self, asked: PageQuestion, subject: _Subject) -> tuple[Layout, Layout]:
        """One device, which a speed-up refers to, and what is asked; both the same without a speed-up."""
        scenario, layout = self._scenario(subject), parse_layout(asked.layout)
        if scenario.request is None:
            layout = _with_batch(layout, asked.batch)
            return layout, layout
        if layout != Layout(dp=layout.dp):
            raise UsageError(
                f"layout: must be dp=DEVICES on a calibrated machine, got {asked.layout!r}; perfmodel predict "
                "--layout takes others"
            )
        request = replace(
            scenario.request, world_sizes=(layout.dp,), scaling=asked.scaling, batch=asked.batch
        )
        found = request.layouts(scenario.question.measured)
        return found[0], found[-1]

    def _of_calibrated(
        self,
        asked: PageQuestion,
        found: Answer,
        single: Answer,
        machine: OfferedMachine,
        workload: OfferedWorkload,
    ) -> _Shown:
        """A calibrated machine after the changes, and what they change."""
        subject, layout = _subject(asked), found.layout
        scenario = self._scenario(subject)
        question = replace(found.question, capacity_bytes=asked.capacity_bytes)
        shown = with_memory(point(found, baseline=single), question)
        typed = ["--workload", workload.typed, "--devices", str(layout.world_size)]
        typed += ["--scaling", asked.scaling]
        typed += [] if asked.batch is None else ["--batch", str(asked.batch)]
        typed += ["--validation", machine.validation_typed] if machine.validation_typed else []
        for name, value in subject.changes:
            text = machine.clusters[value].typed if name == _CLUSTER else value
            typed += ["--set", f"{name}={text}"]
        sizes = f"{layout.world_size:,} x {layout.micro_batch:,}"
        kinds = "devices x micro-batch"
        if layout.accumulation > 1:
            sizes, kinds = f"{sizes} x {layout.accumulation}", f"{kinds} x accumulation"
        return _Shown(
            setting=f"{found.question.workload_name}, {kinds} {sizes}, global batch "
            f"{layout.global_batch:,}, {asked.scaling} scaling",
            point=with_assumed(shown, scenario),
            typed=["whatif", "--profile", machine.typed, *typed],
            caveats=[
                *scenario.remarks,
                *measured_caveats(found.question, {layout: found.evidence}),
                *((UNMEASURED,) if scenario.assumed else ()),
            ],
            contrast=self._contrast(asked, found),
        )

    def _question(self, subject: _Subject, layout: Layout) -> Question:
        return self._scenario(subject).question.at(layout)

    def _scenario_of(self, subject: _Subject) -> Scenario:
        """The machine after the changes, if the page can simulate it in time."""
        machine = self._machines[subject.profile]
        base = machine.scenario(machine.workloads[subject.workload])
        fields = dict(subject.changes)
        if base.request is None and fields:
            raise UsageError(
                f"changes: must be none on a machine inferred from runs, got {', '.join(fields)}; its layout "
                "says what can be changed"
            )
        name = fields.pop(_CLUSTER, None)
        if name is not None:
            base = base.asking(cluster=chosen(_CLUSTER, name, machine.clusters).cluster)
        scenario = changed(base, fields)
        if scenario.request is None:
            return scenario
        cap_mb, accumulation = scenario.request.bucket_cap_mb, scenario.request.accumulation
        if cap_mb is not None and cap_mb < _LEAST_BUCKET_MB:
            raise UsageError(
                f"bucket_cap: must be >= {_LEAST_BUCKET_MB} MiB on the page, got {cap_mb:g}; "
                "perfmodel whatif takes less"
            )
        if accumulation > _MOST_ACCUMULATION:
            raise UsageError(
                f"accumulation: must be <= {_MOST_ACCUMULATION} on the page, got {accumulation}; perfmodel "
                "whatif takes more"
            )
        return scenario

    def _contrast(self, asked: PageQuestion, found: Answer) -> Contrast | None:
        """Against the machine and the strategy as they are, draw by draw."""
        subject = _subject(asked)
        if not subject.changes:
            return None
        unchanged = subject._replace(changes=())
        try:
            _, layout = self._layouts(asked, unchanged)
            before_s = self._step(unchanged, layout).step_s
        except (NotFeasible, CalibrationUnavailable):
            # The batch may need the changed accumulation, several devices the cluster.
            return None
        batches = found.layout.global_batch / layout.global_batch
        return contrast_of_draws(before_s, found.step_s, batches=batches)

    def _curve_of_scaling(
        self, asked: PageQuestion, subject: _Subject, found: Answer
    ) -> list[dict[str, Any]]:
        """Speed-ups of powers of two and of the count asked for, where the batch can be split."""
        scenario, layout = self._scenario(subject), found.layout
        cluster = scenario.question.cluster
        has_links = cluster is not None or scenario.machine.max_world_size > 1
        most = CURVE_UP_TO if has_links else 1
        while most < layout.world_size:
            most *= 2
        most = most if cluster is None else min(most, cluster.num_devices)
        batch = layout.micro_batch if asked.scaling == "weak" else layout.global_batch
        counts = [2**power for power in range(most.bit_length())]
        if asked.scaling == "strong":
            counts = [count for count in counts if batch % (count * layout.accumulation) == 0]
        layouts = scaled_layouts(
            counts,
            scaling=asked.scaling,
            batch=batch,
            accumulation=layout.accumulation,
            bucket_cap_mb=layout.bucket_cap_mb,
        )
        draws_s = dict(zip(layouts, self._draws(subject, layouts), strict=True))
        draws_s[layout] = found.step_s
        single = layouts[0]
        return [
            {
                "devices": each.world_size,
                "value": interval(
                    speedups(
                        self._question(subject, each),
                        draws_s[each],
                        baseline=single,
                        before_s=draws_s[single],
                    )
                ),
                "ideal": each.world_size,
            }
            for each in sorted(draws_s, key=lambda layout: layout.world_size)
        ]


def _subject(asked: PageQuestion) -> _Subject:
    """Machine, workload, and changes that ``--set`` knows and the page may make: none opens a file."""
    for name in asked.changes:
        if name in _ELSEWHERE:
            raise UsageError(f"changes: {name} must be asked by its own field, got a change")
    cluster = {} if asked.cluster is None else {_CLUSTER: asked.cluster}
    return _Subject(asked.profile, asked.workload, tuple(sorted((asked.changes | cluster).items())))


def _with_batch(layout: Layout, batch: int | None) -> Layout:
    """The layout at a batch of all devices, if the page can simulate it in time."""
    if batch is not None and layout.accumulation != 1:
        raise UsageError(
            f"layout: accumulation must be left out beside a batch, got {layout.accumulation}"
        )
    if batch is not None:
        needed = accumulation_for(global_batch=batch, dp=layout.dp, micro_batch=layout.micro_batch)
        layout = replace(layout, accumulation=needed)
    passes = layout.accumulation * layout.pp * layout.interleave
    if passes > _MOST_PASSES:
        raise NotFeasible(
            f"batch: micro-batches x stages must be <= {_MOST_PASSES} on the page, got {passes}; "
            "take a larger micro-batch or more replicas, or perfmodel predict --layout"
        )
    return layout


def _of_inferred(
    asked: PageQuestion, found: Answer, machine: OfferedMachine, workload: OfferedWorkload
) -> _Shown:
    """A large model on a machine that was inferred from runs."""
    layout, model, capacity_bytes = found.layout, workload.entry, asked.capacity_bytes
    assert isinstance(model, NamedTransformer)
    question = replace(found.question, capacity_bytes=capacity_bytes)
    document = layout_document(replace(found, question=question))
    [shown] = document.points
    typed = ["--model", workload.typed, "--layout", str(layout) or "dp=1"]
    typed += [] if capacity_bytes is None else ["--device-memory", f"{capacity_bytes}B"]
    return _Shown(
        setting=f"{model.name}, {shown.layout}, {layout.world_size:,} devices, "
        f"global batch {layout.global_batch:,} sequences of {model.sequence:,} tokens",
        point=shown.model_copy(update={"evidence": {"all terms": Evidence.INFERRED}}),
        typed=["predict", "--profile", machine.typed, *typed],
        caveats=document.caveats,
    )


def _curve_of_replicas(asked: Answer) -> list[dict[str, Any]]:
    """More replicas of the same layout, each with the same batch.

    The closed form gives the shape of the curve; the program of the layout asked for, its level.
    """
    layout, machine, model = asked.layout, asked.question.machine, asked.question.workload
    assert isinstance(model, NamedTransformer)
    each = layout.world_size // layout.dp
    most = min(MOST_DEVICES, max(_LAYOUT_CURVE_UP_TO, layout.world_size))
    replicas = {layout.dp, *(2**power for power in range(20))}
    layouts = [replace(layout, dp=dp) for dp in sorted(replicas) if dp * each <= most]
    jobs = jobs_from(
        [(model.shape, entry) for entry in layouts],
        sequence=model.sequence,
        devices_per_node=DEVICES_PER_NODE,
    )
    assert isinstance(machine, InferredMachine)
    inferred = open_inferred(machine)
    formula_s = step_time_s(jobs, inferred.nominal)
    level = asked.trace.step_s / formula_s[layouts.index(layout)]
    found = inferred.predict(jobs, normal_s=level * formula_s)
    tokens = [entry.global_batch * model.sequence for entry in layouts]
    first = tokens[0] / float(found.number_s[0]) / layouts[0].world_size
    return [
        {
            "devices": entry.world_size,
            "value": work / found.of(i),
            "ideal": first * entry.world_size,
        }
        for i, (entry, work) in enumerate(zip(layouts, tokens, strict=True))
    ]


def _fullest_stage(shown: PredictedPoint) -> dict[str, Any] | None:
    """Memory of one rank of the fullest stage, where the memory of a device was given."""
    if shown.capacity_bytes is None or shown.fit_probability is None:
        return None
    stage = max(shown.memory, key=lambda stage: stage.needed_bytes)
    return {
        "parts_bytes": dict(stage.parts_bytes),
        "needed_bytes": stage.needed_bytes,
        "capacity_bytes": shown.capacity_bytes,
        "fit_probability": shown.fit_probability,
        "verdict": verdict(shown.fit_probability).value,
    }


# A logged speed beside the prediction: normal or not, and which causes fit.
_MOST_CAUSES: Final = 4
_LIKELY: Final = 0.05
_LARGE_PRECISION: Final = "bf16"


def judged(
    asked: PageQuestion, machine: OfferedMachine, workload: OfferedWorkload, found: Answer
) -> dict[str, Any] | None:
    """Where a logged step lies among the predicted ones; causes by ``perfmodel diagnose`` if it is outside."""
    if asked.logged is None:
        return None
    logged_s = _step_s(asked.logged, workload, found)
    case, typed = _case(machine, workload, found, logged_s)
    causes: list[Fit] = []
    next_name, word = "", "normal"
    if not found.step.holds(logged_s):
        word = f"{'slower' if logged_s > found.step.p95 else 'faster'} than normal"
    if case is not None and word != "normal":
        with suppress(PerfModelError):  # the command says what a data sheet lacks
            odds = diagnosed(case).found
            likely = [fit for fit in odds.fits if fit.odds >= _LIKELY and fit.cause != NORMAL]
            causes = likely[:_MOST_CAUSES]
            next_name = odds.next_name or ""
    return {
        "logged_s": logged_s,
        "verdict": word,
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

"""Answers about large models under a layout: the same function as ``perfmodel predict --layout``."""

import dataclasses
import functools
import shlex
from typing import Final

from perfmodel.answer.answer import answer
from perfmodel.answer.inferred import layout_document
from perfmodel.answer.question import Question
from perfmodel.cost.jobs import jobs_from
from perfmodel.cost.memory import verdict
from perfmodel.documents.page import CurvePoint, LayoutQuestion, MemoryAnswer, PageAnswer
from perfmodel.documents.prediction import LayoutPredictionDocument, StageMemory
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.layout.layout import MOST_DEVICES, Layout, accumulation_for, parse_layout
from perfmodel.machine.cluster import DEVICES_PER_NODE
from perfmodel.page.machines import LayoutMachine, chosen, spent, timeline
from perfmodel.statistics.interval import Interval
from perfmodel.step.program import Trace

#: Passes of all stages are simulated one by one: more of them take seconds.
_MOST_PASSES: Final = 8192
_MOST_CURVE: Final = 16_384
_PARTS: Final = ("parameters", "gradients", "optimizer", "activations", "logits")


class LayoutSession:
    """Answers questions about one machine and one transformer."""

    def __init__(self, machine: LayoutMachine, model: str) -> None:
        self._machine = machine
        self._model = chosen("workload", model, machine.models)
        self._predicted = functools.lru_cache(maxsize=32)(self._predict)

    def answer(self, question: LayoutQuestion) -> PageAnswer:
        """Predict what is asked, and tokens per second over the number of replicas.

        Raises
        ------
        UsageError
            If the layout is not in the grammar.
        NotFeasible
            If the model or the batch does not allow the layout.
        """
        layout = _layout(question)
        self._refuse_long(layout)
        document, trace = self._predicted(layout, question.capacity_bytes)
        return PageAnswer(
            setting=f"{self._model.name}, {document.layout}, {layout.world_size:,} devices, "
            f"global batch {layout.global_batch:,} sequences of {self._model.sequence:,} tokens",
            step_s=document.step_s,
            throughput=document.tokens_per_s,
            throughput_unit="tokens/s",
            speedup=None,
            efficiency=document.mfu,
            efficiency_name="MFU",
            exposed_comm_s=None,
            straggler_s=None,
            contrast=None,
            breakdown_s={
                name.removesuffix("_s"): max(0.0, time_s)
                for name, time_s in document.parts_s.model_dump().items()
            },
            evidence={"all terms": "inferred"},
            curve=self._curve(layout),
            timeline_step_s=trace.step_s,
            timeline=timeline(trace),
            memory=_memory(document),
            no_memory="" if document.capacity_bytes else "Give the memory of one device.",
            spent=spent(question.spending, document.tokens_per_s, devices=layout.world_size),
            command=self._command(question, layout),
            caveats=document.caveats,
        )

    def _predict(
        self, layout: Layout, capacity_bytes: int | None
    ) -> tuple[LayoutPredictionDocument, Trace]:
        question = Question(
            machine=self._machine.machine.machine,
            workload=self._model,
            layout=layout,
            capacity_bytes=capacity_bytes,
        )
        found = answer(question)
        return layout_document(found, argv=("perfmodel.page",)), found.trace

    def _refuse_long(self, layout: Layout) -> None:
        passes = layout.accumulation * layout.pp * layout.interleave
        if passes > _MOST_PASSES:
            raise NotFeasible(
                f"batch: micro-batches x stages must be <= {_MOST_PASSES} on the page, got {passes}; "
                "take a larger micro-batch or more replicas, or perfmodel predict --layout"
            )

    def _curve(self, layout: Layout) -> tuple[CurvePoint, ...]:
        """More replicas of the same layout, each with the same batch, by the closed form."""
        each = layout.world_size // layout.dp
        most = min(MOST_DEVICES, max(_MOST_CURVE, layout.world_size))
        replicas = {layout.dp, *(2**power for power in range(20))}
        layouts = [
            dataclasses.replace(layout, dp=dp) for dp in sorted(replicas) if dp * each <= most
        ]
        jobs = jobs_from(
            [(self._model.shape, entry) for entry in layouts],
            sequence=self._model.sequence,
            devices_per_node=DEVICES_PER_NODE,
        )
        found = self._machine.machine.model.predict(jobs)
        tokens = [entry.global_batch * self._model.sequence for entry in layouts]
        first = tokens[0] / float(found.number_s[0]) / layouts[0].world_size
        return tuple(
            CurvePoint(
                devices=entry.world_size,
                value=Interval(
                    p5=work / float(found.upper_s[i]),
                    nominal=work / float(found.number_s[i]),
                    p95=work / float(found.lower_s[i]),
                ),
                ideal=first * entry.world_size,
            )
            for i, (entry, work) in enumerate(zip(layouts, tokens, strict=True))
        )

    def _command(self, question: LayoutQuestion, layout: Layout) -> str:
        words = [
            *("perfmodel", "predict", "--profile", self._machine.typed),
            *("--model", self._model.name, "--layout", str(layout) or "dp=1"),
        ]
        if question.capacity_bytes is not None:
            words += ["--device-memory", f"{question.capacity_bytes}B"]
        return shlex.join(words)


def _layout(question: LayoutQuestion) -> Layout:
    layout = parse_layout(question.layout)
    if question.batch is None:
        return layout
    if layout.accumulation != 1:
        raise UsageError(
            f"layout: accumulation must be left out beside a batch, got {layout.accumulation}"
        )
    needed = accumulation_for(
        global_batch=question.batch, dp=layout.dp, micro_batch=layout.micro_batch
    )
    return dataclasses.replace(layout, accumulation=needed)


def _memory(document: LayoutPredictionDocument) -> MemoryAnswer | None:
    if document.capacity_bytes is None or document.fit_probability is None:
        return None
    fullest = max(document.memory, key=lambda stage: stage.needed_bytes)
    parts = {name: float(getattr(fullest, f"{name}_bytes")) for name in _PARTS}
    return MemoryAnswer(
        parts_bytes={**parts, "framework and allocator": _rest(fullest, parts)},
        needed_bytes=fullest.needed_bytes,
        capacity_bytes=document.capacity_bytes,
        fit_probability=document.fit_probability,
        verdict=verdict(document.fit_probability).value,
    )


def _rest(stage: StageMemory, parts: dict[str, float]) -> float:
    return max(0.0, stage.needed_bytes - sum(parts.values()))

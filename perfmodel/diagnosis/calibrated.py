"""A workload on a calibrated machine, its prediction taken apart so that causes can change it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from perfmodel.answer import Question
from perfmodel.answer.measured import layout_costs, measured_answer, measured_caveats, step_times
from perfmodel.cost.parameters import FittedParameters
from perfmodel.diagnosis.causes import NUM_DRAWS
from perfmodel.diagnosis.trained import Run
from perfmodel.layout import Layout
from perfmodel.machine import Evidence
from perfmodel.statistics import FloatArray
from perfmodel.step import Stream

_EXCHANGES: Final = (Stream.COMM, Stream.TENSOR, Stream.SEND_FORWARD, Stream.SEND_BACKWARD)
#: What causes change. On a calibrated machine all are factors on what was measured.
_TERMS: Final = (
    "matmul_flop_per_s",
    "memory_bytes_per_s",
    "data_bytes_per_s",
    "tensor_bytes_per_s",
    "node_bytes_per_s",
    "layer_host_s",
)


class _Parts(NamedTuple):
    """Of a predicted step, shape ``(NUM_DRAWS,)`` each. [s]"""

    silent_s: FloatArray
    """The step with communication that costs nothing."""
    exposed_s: FloatArray
    exchange_s: FloatArray
    """All communication, hidden or not."""
    launches_s: FloatArray
    """Host alone; 0 where the device is the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedModel:
    """A workload on its machine; nothing of a data sheet.

    exposed = max(0, exchange / links - (exchange - exposed as predicted) / speed)
    step    = max(silent / speed + exposed, launches * host)
    """

    question: Question
    tokens: float | None = None
    _by_run: dict[Layout, _Parts] = field(default_factory=dict, compare=False)
    _evidence: dict[Layout, Mapping[str, Evidence]] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Of the workload."""
        return self.question.workload_name

    @property
    def parameters(self) -> float:
        """Trainable elements."""
        return float(self.question.measured.workload.num_parameters)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Of the predictions of all runs that were asked for."""
        return measured_caveats(self.question, self._evidence) if self._evidence else ()

    def model_flop(self, run: Run) -> float:
        """Both passes."""
        workload = self.question.measured.workload
        return run.layout.global_batch * (workload.forward_flop + workload.backward_flop)

    def step_s(self, run: Run, terms: FittedParameters) -> FloatArray:
        """See the class."""
        parts = self._parts(run.layout)
        speed = np.asarray(terms["matmul_flop_per_s"])
        links = np.asarray(terms["node_bytes_per_s" if run.nodes > 1 else "data_bytes_per_s"])
        hidden_s = (parts.exchange_s - parts.exposed_s) / speed
        exposed_s = np.maximum(0.0, parts.exchange_s / links - hidden_s)
        device_s = parts.silent_s / speed + exposed_s
        return np.asarray(np.maximum(device_s, parts.launches_s * terms["layer_host_s"]))

    def memory_bytes(self, run: Run) -> Mapping[str, float]:  # noqa: ARG002 - the protocol's
        """Left to ``perfmodel memory``."""
        return {}

    def terms(self, layout: Layout) -> dict[str, FloatArray]:
        """Factors of 1 in every draw; the host's 0 where nothing is launched ahead."""
        found = {name: np.ones(NUM_DRAWS) for name in _TERMS}
        found["layer_host_s"] *= bool(self._parts(layout).launches_s.any())
        return found

    def _parts(self, layout: Layout) -> _Parts:
        """The prediction of ``perfmodel predict`` in its own draws, repeated up to ``NUM_DRAWS``."""
        if layout not in self._by_run:
            asked = self.question.at(layout)
            costs, found = layout_costs(asked), measured_answer(asked)
            program, durations_s = costs.program, costs.durations_s
            raw_s = step_times(program, costs.terms, durations_s)
            factor = found.step_s / raw_s
            exposed_s = np.minimum(found.exposed_comm_s, raw_s)

            def total_s(*streams: Stream) -> FloatArray:
                places = [place for stream in streams for place in program.on_stream(stream)]
                return np.asarray(durations_s[places].sum(axis=0))

            every = (
                raw_s - exposed_s,
                exposed_s,
                total_s(*_EXCHANGES),
                total_s(Stream.HOST) * (not program.host_waits),
            )
            self._by_run[layout] = _Parts(*(np.resize(part * factor, NUM_DRAWS) for part in every))
            self._evidence[layout] = found.evidence
        return self._by_run[layout]

"""Collectives between nodes behind shaped links, all played by one machine, and steps made of them.

A pipelined ring moves ``2 (n - 1) / n`` of the gradient over every edge. Its time is the larger, softly,
of two: what the busiest link needs, and what the machine that plays all nodes needs in CPU time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from perfmodel.arrays import FloatArray, soft_maximum
from perfmodel.cost.collectives import LIBRARIES, copies_in_turn, ring_share
from perfmodel.cost.terms import Samples
from perfmodel.documents.testbed import (
    CollectiveKind,
    CollectiveRun,
    Fabric,
    TrainingRun,
    TrainingSetting,
)
from perfmodel.engine.simulate import simulate
from perfmodel.step.program import Cause, Operation, StepProgram
from perfmodel.units import Bytes, BytesPerSecond, Seconds

_PAIR: Final = 2

#: How sharply the larger of wire and host wins, as the exponent of a norm.
SHARPNESS: Final = 8

#: Messages of a ring: each rank sends and receives two segments in each of ``2 (n - 1)`` steps.
_MESSAGES_PER_STEP: Final = 2

#: How often gloo's rings move the array past every rank; its reduce-scatter is an all-reduce of which each
#: rank keeps its part, by the counters of links and by its duration.
_PASSES: Final[Mapping[str, int]] = {
    "all_reduce": 2,
    "reduce_scatter": LIBRARIES["gloo"].scatter_passes,
    "all_gather": 1,
}

#: Between two ranks acknowledgements ride on the data that goes back. In a larger ring nothing goes
#: back to the sender, so that each of a message's parts is acknowledged by a frame of its own
#: (Ethernet, IP, TCP): an assumption that agrees with the counters of links at 4 to 16 ranks.
_ACKNOWLEDGED_PARTS: Final = 3
_ACKNOWLEDGEMENT_BYTES: Final = 14 + 20 + 32

#: Sizes up to this are all latency, from this on all bandwidth. [B]
_SMALL_BYTES: Final = 4096
_LARGE_BYTES: Final = 4_000_000

#: Collectives whose shaped link is at least this fast were limited by the machine.
_UNSHAPED_BYTES_PER_S: Final = 1e9

#: All-reduces that keep a shaped link busy for longer tell its rate and burst. [s]
_WIRE_ONLY_S: Final = 0.008

#: Messages' share in a warm all-reduce of two ranks, the rest is the call: recorded all-gathers, half of
#: an all-reduce each, tell 0.74. And how much the share that was measured here counts beside it: differences
#: of 0.1 ms are as uncertain as this belief.
_SHARE_OF_MESSAGES: Final = 0.75
_WEIGHT_OF_MEASURED: Final = 0.4
_SHARES: Final = (0.5, 1.0)

#: Quantile of the repeats of a warm all-reduce that nothing disturbed.
_UNDISTURBED: Final = 0.05


_KINDS: Final[dict[Cause, CollectiveKind]] = {
    Cause.ALL_REDUCE: "all_reduce",
    Cause.TENSOR: "all_reduce",
    Cause.ALL_GATHER: "all_gather",
    Cause.REDUCE_SCATTER: "reduce_scatter",
    Cause.BROADCAST: "broadcast",
    Cause.P2P: "send_recv",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapedRing:
    """Parameters of the ring; arrays have shape ``(num_draws,)``, draw 0 is the fitted value."""

    overhead: Samples
    """Bytes on the wire per byte of payload: headers of full frames."""
    message_bytes: Samples
    """Bytes on the wire per message between two ranks, whatever its size: announcements. [B]"""
    burst_bytes: Samples
    """What an idle shaped link lets through at once. [B]"""
    launch_s: Samples
    """From a call to the first message of an idle group. [s]"""
    p2p_s: Samples
    """From a message's arrival to the next one's departure. [s]"""
    launch_cpu_s: Samples
    """CPU time of one rank per call. [s]"""
    message_cpu_s: Samples
    """CPU time of one message. [s]"""
    byte_cpu_s: Samples
    """CPU time of one byte on any edge. [s/B]"""

    @classmethod
    def fit(
        cls,
        runs: Sequence[CollectiveRun],
        *,
        message_bytes: float,
        num_draws: int,
        rng: np.random.Generator,
    ) -> "ShapedRing":
        """Read the parameters off collectives between two ranks; draws resample the repeats of every point.

        Parameters
        ----------
        message_bytes
            As ``message_bytes_of`` reads it off counters of links: not random.
        runs
            On idle shaped links, small and large; warm ones that follow each other at once on cores kept
            awake, all-gathers among them; and crowded ones that saturate the machine, small and large.
        """

        def resampled(values: Sequence[float], draw: np.random.Generator) -> float:
            return float(np.median(draw.choice(values, len(values))))

        draws = [_estimate(runs, message_bytes, lambda values: float(np.median(values)))]
        for _ in range(num_draws - 1):
            draw = np.random.default_rng(int(rng.integers(2**32)))
            draws.append(_estimate(runs, message_bytes, partial(resampled, draw=draw)))
        table = np.array(draws)
        return cls(**{field.name: table[:, i] for i, field in enumerate(fields(cls))})

    def nominal(self) -> dict[str, float]:
        """Fitted values by name."""
        return {field.name: float(getattr(self, field.name)[0]) for field in fields(self)}

    def wire_s(
        self, size_bytes: Bytes, fabric: Fabric, collective: CollectiveKind = "all_reduce"
    ) -> Samples:
        """Time that the busiest link needs for one collective, without burst. [s]"""
        num_ranks = fabric.num_ranks
        if num_ranks == 1:
            return np.zeros_like(self.overhead)
        if collective not in _PASSES:
            copies = copies_in_turn(num_ranks) if collective == "broadcast" else 1
            each_s = (size_bytes * self.overhead + self.message_bytes) / min(
                free_rates(fabric).values()
            )
            copied: Samples = self.launch_s + copies * (each_s + self.p2p_s)
            return copied
        apart_bytes = _ACKNOWLEDGED_PARTS * _ACKNOWLEDGEMENT_BYTES if num_ranks > _PAIR else 0
        message_bytes = size_bytes / num_ranks * self.overhead + self.message_bytes + apart_bytes
        edge_bytes = _PASSES[collective] * (num_ranks - 1) * message_bytes
        seconds_per_byte = max(
            crossings / free
            for crossings, free in zip(
                ring_crossings(fabric).values(), free_rates(fabric).values(), strict=True
            )
        )
        sending_s = edge_bytes * seconds_per_byte
        result: Samples = sending_s + self.latency_s(num_ranks, collective)
        return result

    def latency_s(self, num_ranks: int, collective: CollectiveKind = "all_reduce") -> Samples:
        """Time in which the first message goes all the way round, whatever its size. [s]"""
        result: Samples = self.launch_s + _PASSES.get(collective, 1) * (num_ranks - 1) * self.p2p_s
        return result

    def burst_s(self, fabric: Fabric) -> Samples:
        """Time that the full burst of the busiest link saves. [s]"""
        loads = ring_crossings(fabric)
        free = free_rates(fabric)
        busiest = max(loads, key=lambda link: loads[link] / free[link])
        if loads[busiest] == 0:
            return np.zeros_like(self.overhead)
        result: Samples = self.burst_bytes / free[busiest]
        return result

    def cpu_s(
        self, size_bytes: Bytes, num_ranks: int, collective: CollectiveKind = "all_reduce"
    ) -> Samples:
        """CPU time of all ranks for one collective. [s]"""
        if num_ranks == 1:
            return np.zeros_like(self.overhead)
        passes = _PASSES.get(collective, 1)
        per_pass = _MESSAGES_PER_STEP * num_ranks if collective in _PASSES else 1
        result: Samples = (
            num_ranks * self.launch_cpu_s
            + passes * per_pass * (num_ranks - 1) * self.message_cpu_s
            + passes * (num_ranks - 1) * size_bytes * self.byte_cpu_s
        )
        return result

    def time_s(
        self,
        size_bytes: Bytes,
        fabric: Fabric,
        *,
        num_cores: int,
        burst_s: Samples,
        head_start_s: Samples | float = 0.0,
        collective: CollectiveKind = "all_reduce",
    ) -> Samples:
        """Time of one collective from the moment on which the links are its own. [s]

        Parameters
        ----------
        size_bytes
            Whole array, as nccl-tests counts it.
        burst_s
            What the burst of idle links saves.
        head_start_s
            For how long it was under way before, behind another that kept the links but not the
            machine busy.
        """
        num_ranks = fabric.num_ranks
        hidden_s = np.minimum(self.latency_s(num_ranks, collective), head_start_s)
        whole_s = self.wire_s(size_bytes, fabric, collective)
        wire_s = np.maximum(whole_s - burst_s - hidden_s, 0.0)
        host_s = self.cpu_s(size_bytes, num_ranks, collective) / num_cores
        return soft_maximum(wire_s, np.maximum(host_s - head_start_s, 0.0), SHARPNESS)


def link_rates(fabric: Fabric) -> dict[str, BytesPerSecond]:
    """Every shaped link and its rate. [B/s]"""
    nodes = {f"uplink of node {i}": rate for i, rate in enumerate(fabric.node_bytes_per_s)}
    racks = {f"uplink of rack {i}": rate for i, rate in enumerate(fabric.rack_bytes_per_s)}
    return nodes | racks


def path(fabric: Fabric, from_node: int, to_node: int) -> tuple[str, ...]:
    """Shaped links between two nodes."""
    if from_node == to_node:
        return ()
    source, target = fabric.rack(from_node), fabric.rack(to_node)
    own = (f"uplink of node {from_node}",)
    return own if source == target else (*own, f"uplink of rack {source}")


def ring_crossings(fabric: Fabric) -> dict[str, int]:
    """How many edges of the ring cross each link."""
    found = dict.fromkeys(link_rates(fabric), 0)
    nodes = fabric.node_of_rank
    for source, target in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
        for link in path(fabric, source, target):
            found[link] += 1
    return found


def free_rates(fabric: Fabric) -> dict[str, BytesPerSecond]:
    """What steady traffic leaves of each link. [B/s]"""
    free = link_rates(fabric)
    for stream in fabric.background:
        for link in path(fabric, stream.from_node, stream.to_node):
            free[link] -= stream.bytes_per_s
            if free[link] <= 0:
                raise ValueError(f"background must leave something of the {link}")
    return free


def undisturbed_s(durations_s: Sequence[float]) -> float:
    """What a warm collective takes while no other program disturbs it, read off its repeats. [s]"""
    return float(np.quantile(durations_s, _UNDISTURBED))


def _estimate(
    runs: Sequence[CollectiveRun], message_bytes: float, read: Callable[[Sequence[float]], float]
) -> list[float]:
    """Parameters in the order of the fields."""
    points = [
        (run.setting, size, read(times), cpu_s, undisturbed_s(times))
        for run in runs
        for size, times, cpu_s in zip(
            run.setting.sizes_bytes, run.durations_s, run.cpu_s, strict=True
        )
    ]
    single = [p for p in points if p[0].copies == 1]
    crowded = [p for p in points if p[0].copies > 1]
    at_once = [p for p in single if p[0].pause_s == 0 and p[1] <= _SMALL_BYTES]
    warm = [p for p in at_once if p[0].collective == "all_reduce"]
    halved = [p for p in at_once if p[0].collective == "all_gather"]
    cold = [p for p in single if p[0].pause_s > 0 and p[1] <= _SMALL_BYTES]
    rated = [
        (size, t, setting.fabric.node_bytes_per_s[0])
        for setting, size, t, *_ in single
        if setting.pause_s > 0
    ]
    shaped = [
        (size, t, rate)
        for size, t, rate in rated
        if size / rate > _WIRE_ONLY_S and rate < _UNSHAPED_BYTES_PER_S
    ]
    # Other programs disturb most repeats; many ranks see the cost without them.
    warm_s = float(np.median([p[4] for p in warm]))
    cold_s = float(np.median([p[2] for p in cold]))
    p2p_s = warm_s / 2
    launch_s = max(cold_s - warm_s, 0.0)
    # Two ranks move every byte once each way, in two messages: time x rate = overhead x size + 2 x
    # message - burst. Relative errors are alike, so that rows are divided by the size.
    rows = [(1.0, -1.0 / size) for size, *_ in shaped]
    values = [
        ((t - launch_s - 2 * p2p_s) * rate - 2 * message_bytes) / size for size, t, rate in shaped
    ]
    (overhead, burst), *_ = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)
    # Awake and warm, a small all-reduce keeps all cores busy, with its messages and with the call.
    num_cores = runs[0].host.num_cores
    share = _share_of_messages(warm_s, [p[4] for p in halved])
    message_cpu_s = share * num_cores * warm_s / (4 * _MESSAGES_PER_STEP)
    launch_cpu_s = float(np.median([p[3] for p in cold])) / 2 - 4 * message_cpu_s
    small_cpu_s = float(np.median([p[3] for p in crowded if p[1] <= _SMALL_BYTES]))
    byte_cpu_s = float(
        np.median([(p[3] - small_cpu_s) / (2 * p[1]) for p in crowded if p[1] >= _LARGE_BYTES])
    )
    return [
        float(overhead),
        float(message_bytes),
        float(burst),
        launch_s,
        p2p_s,
        max(launch_cpu_s, 0.0),
        message_cpu_s,
        byte_cpu_s,
    ]


def _share_of_messages(all_reduce_s: float, all_gathers_s: Sequence[float]) -> float:
    """Of a warm all-reduce between two ranks; an all-gather has the same call and half of the messages."""
    if not all_gathers_s:
        return _SHARE_OF_MESSAGES
    measured = 2 * (1 - float(np.median(all_gathers_s)) / all_reduce_s)
    measured = min(max(measured, _SHARES[0]), _SHARES[1])
    return _SHARE_OF_MESSAGES + _WEIGHT_OF_MEASURED * (measured - _SHARE_OF_MESSAGES)


def ring_bytes(size_bytes: float, fabric: Fabric) -> Mapping[str, float]:
    """Payload that one all-reduce sends over each link. [B]"""
    edge_bytes = size_bytes * float(ring_share(fabric.num_ranks, passes=2))
    return {link: count * edge_bytes for link, count in ring_crossings(fabric).items()}


def message_bytes_of(runs: Sequence[TrainingRun]) -> float:
    """Bytes on the wire that come with every message, from the counters of links of two ranks. [B]

    The counters see large sends as one frame before they are cut, so that they tell what belongs to
    messages, but not what belongs to bytes.
    """
    rows, sent = [], []
    for run in runs:
        num_ranks, num_steps = run.setting.fabric.num_ranks, len(run.step_s)
        payload = sum(ring_bytes(run.setting.model.gradient_bytes, run.setting.fabric).values())
        num_messages = 2 * (num_ranks - 1) * num_ranks * len(run.bucket_bytes)
        rows.append((payload * num_steps, num_messages * num_steps))
        sent.append(sum(run.link_bytes.values()))
    if not rows:
        raise ValueError("runs: must hold training runs of two ranks")
    weighted = np.array(rows, dtype=np.float64) / np.array(sent)[:, np.newaxis]
    (_, message_bytes), *_ = np.linalg.lstsq(weighted, np.ones(len(sent)), rcond=None)
    return max(0.0, float(message_bytes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayingMachine:
    """The machine that plays all ranks and links, as runs of two ranks have shown it."""

    ring: ShapedRing
    num_cores: int
    num_draws: int


class Saving(NamedTuple):
    """What a collective need not wait for; arrays have shape ``(num_draws,)``."""

    burst_s: FloatArray
    """What links that had time to rest let through at once. [s]"""
    head_start_s: FloatArray | float = 0.0
    """For how long it was under way before, behind another. [s]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCosts(ABC):
    """Seconds of the operations of one setting: collectives cost what the ring says."""

    setting: TrainingSetting
    calibration: PlayingMachine
    program: StepProgram

    def durations(self) -> FloatArray:
        """Time of each operation at nominal pace, shape ``(num_operations, num_draws)``. [s]"""
        # What a collective saves follows from when it starts, hence from durations without any saving.
        return self._with_savings(self._savings(self._with_savings({})))

    def step_s(self) -> Seconds:
        """One step at the fitted parameters and nominal pace, simulated. [s]"""
        return simulate(self.program, self.durations()[:, :1].T).step_s

    @abstractmethod
    def _savings(self, durations_s: FloatArray) -> Mapping[int, Saving]:
        """What each collective saves, by its position."""

    @abstractmethod
    def _size_bytes(self, operation: Operation) -> Bytes:
        """Array that a collective works on. [B]"""

    @abstractmethod
    def _compute_s(self, operation: Operation) -> Seconds:
        """Time of an operation that is no collective. [s]"""

    def _times(self, operation: Operation) -> float:
        """How many times what its ring takes once an operation on links takes."""
        del operation
        return 1.0

    def _collective_s(self, operation: Operation, saving: Saving) -> FloatArray:
        once_s = self.calibration.ring.time_s(
            self._size_bytes(operation),
            self.setting.fabric,
            num_cores=self.calibration.num_cores,
            burst_s=saving.burst_s,
            head_start_s=saving.head_start_s,
            collective=_KINDS[operation.cause],
        )
        return once_s * self._times(operation)

    def _with_savings(self, savings: Mapping[int, Saving]) -> FloatArray:
        nothing = np.zeros(self.calibration.num_draws)
        return np.stack(
            [
                self._collective_s(operation, savings.get(position, Saving(nothing)))
                if is_collective(operation)
                else np.full(self.calibration.num_draws, self._compute_s(operation))
                for position, operation in enumerate(self.program.operations)
            ]
        )


def is_collective(operation: Operation) -> bool:
    """Whether it is links that an operation keeps busy, point-to-point sends between two ranks included."""
    return operation.cause in _KINDS

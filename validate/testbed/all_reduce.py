"""All-reduces over shaped links between nodes that one machine plays.

What gloo's ring consists of is the product's (``cost.collectives``): ``count`` messages one after another of
``size / n``, of which all ranks together handle ``n`` at a time. The testbed adds shaped links and a machine
that needs CPU time for every node; the larger of the two decides, softly:

    wire = launch + count (p2p + (overhead * message + announced) / rate)  -  burst
    host = (n launch_cpu + count n (2 message_cpu + message * byte_cpu)) / cores
    time = (wire^8 + host^8)^(1/8)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Final

import numpy as np

from perfmodel.cost import Samples
from perfmodel.cost.collectives import message_bytes, num_messages, ring_share, work
from perfmodel.statistics import soft_maximum
from perfmodel.units import Bytes
from validate.testbed.records import CollectiveRun, Fabric, TrainingRun

_PAIR: Final = 2
#: How sharply the larger of wire and host wins, as the exponent of a norm.
SHARPNESS: Final = 8
#: Between two ranks acknowledgements ride on the data that goes back. In a larger ring nothing goes
#: back to the sender, so that each of a message's parts is acknowledged by a frame of its own
#: (Ethernet, IP, TCP): an assumption that agrees with the counters of links at 4 to 16 ranks.
_ACKNOWLEDGED_PARTS: Final = 3
_ACKNOWLEDGEMENT_BYTES: Final = 14 + 20 + 32
#: Sizes up to this are all latency, from this on all bandwidth. [B]
_SMALL_BYTES: Final = 4096
_LARGE_BYTES: Final = 4_000_000
#: All-reduces that keep a shaped link busy for longer tell its rate and burst. [s]
_WIRE_ONLY_S: Final = 0.008
#: Messages' share in a warm all-reduce of two ranks, the rest is the call: all-gathers, half of an
#: all-reduce each, told 0.74.
_SHARE_OF_MESSAGES: Final = 0.75
#: Quantile of the repeats of a warm all-reduce that nothing disturbed.
_UNDISTURBED: Final = 0.05


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
    """CPU time of sending or receiving one message. [s]"""
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
        """Read the parameters off all-reduces between two ranks; draws resample the repeats of every point.

        ``runs``: on idle shaped links, warm ones on cores kept awake, and crowded ones that saturate the
        machine. ``message_bytes``: as ``message_bytes_of`` reads it off counters of links, not random. [B]
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

    def latency_s(self, num_ranks: int) -> Samples:
        """Time in which the first message goes all the way round, whatever its size. [s]"""
        result: Samples = self.launch_s + num_messages("all_reduce", num_ranks) * self.p2p_s
        return result

    def wire_s(self, size_bytes: Bytes, fabric: Fabric) -> Samples:
        """Time that each link needs for one all-reduce, without burst. [s]"""
        n = fabric.num_ranks
        apart_bytes = _ACKNOWLEDGED_PARTS * _ACKNOWLEDGEMENT_BYTES if n > _PAIR else 0
        payload_bytes = message_bytes("all_reduce", size_bytes, n)
        sent_bytes = payload_bytes * self.overhead + self.message_bytes + apart_bytes
        count = num_messages("all_reduce", n)
        result: Samples = self.latency_s(n) + count * sent_bytes / fabric.bytes_per_s
        return result

    def burst_s(self, fabric: Fabric) -> Samples:
        """Time that the full burst of a link saves. [s]"""
        result: Samples = self.burst_bytes / fabric.bytes_per_s
        return result

    def cpu_s(self, size_bytes: Bytes, num_ranks: int) -> Samples:
        """CPU time of all ranks for one all-reduce. [s]"""
        if num_ranks == 1:
            return np.zeros_like(self.overhead)
        of_one = 2 * self.message_cpu_s + self.byte_cpu_s * size_bytes / num_ranks
        handled = num_messages("all_reduce", num_ranks) * work("all_reduce", num_ranks).handled
        result: Samples = num_ranks * self.launch_cpu_s + handled * of_one
        return result

    def time_s(
        self,
        size_bytes: Bytes,
        fabric: Fabric,
        *,
        num_cores: int,
        burst_s: Samples,
        head_start_s: Samples | float = 0.0,
    ) -> Samples:
        """Time of one all-reduce from the moment on which the links are its own. [s]

        ``burst_s``: what the burst of idle links saves. ``head_start_s``: for how long it was under way
        before, behind another that kept the links but not the machine busy.
        """
        if fabric.num_ranks == 1:
            return np.zeros_like(self.overhead)
        hidden_s = np.minimum(self.latency_s(fabric.num_ranks), head_start_s)
        wire_s = np.maximum(self.wire_s(size_bytes, fabric) - burst_s - hidden_s, 0.0)
        host_s = self.cpu_s(size_bytes, fabric.num_ranks) / num_cores
        return soft_maximum(wire_s, np.maximum(host_s - head_start_s, 0.0), SHARPNESS)


def _estimate(
    runs: Sequence[CollectiveRun], announced_bytes: float, read: Callable[[Sequence[float]], float]
) -> list[float]:
    """Parameters in the order of the fields."""
    points = [
        (run.setting, size, read(times), cpu_s, float(np.quantile(times, _UNDISTURBED)))
        for run in runs
        if run.setting.collective == "all_reduce"
        for size, times, cpu_s in zip(
            run.setting.sizes_bytes, run.durations_s, run.cpu_s, strict=True
        )
    ]
    crowded = [p for p in points if p[0].copies > 1]
    warm = [p for p in points if p[0].copies == 1 and p[0].pause_s == 0]
    idle = [p for p in points if p[0].copies == 1 and p[0].pause_s > 0]
    cold = [p for p in idle if p[1] <= _SMALL_BYTES]
    # Other programs disturb most warm repeats; many ranks see the cost without them.
    warm_s = float(np.median([p[4] for p in warm]))
    p2p_s = warm_s / num_messages("all_reduce", _PAIR)
    launch_s = max(float(np.median([p[2] for p in cold])) - warm_s, 0.0)
    # Two ranks move every byte once each way, in two messages: time x rate = overhead x size + 2 x
    # message - burst. Relative errors are alike, so that rows are divided by the size.
    rows, values = [], []
    for setting, size, time_s, *_ in idle:
        rate = setting.fabric.bytes_per_s
        if size / rate > _WIRE_ONLY_S:
            rows.append((1.0, -1.0 / size))
            values.append(((time_s - launch_s - warm_s) * rate - 2 * announced_bytes) / size)
    (overhead, burst), *_ = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)
    # Awake and warm, a small all-reduce keeps all cores busy: with 8 messages, sent or received, and the call.
    message_cpu_s = _SHARE_OF_MESSAGES * runs[0].host.num_cores * warm_s / 8
    launch_cpu_s = float(np.median([p[3] for p in cold])) / 2 - 4 * message_cpu_s
    small_cpu_s = float(np.median([p[3] for p in crowded if p[1] <= _SMALL_BYTES]))
    byte_cpu_s = [(p[3] - small_cpu_s) / (2 * p[1]) for p in crowded if p[1] >= _LARGE_BYTES]
    return [
        *(float(overhead), float(announced_bytes), float(burst), launch_s, p2p_s),
        *(max(launch_cpu_s, 0.0), message_cpu_s, float(np.median(byte_cpu_s))),
    ]


def ring_bytes(size_bytes: float, num_ranks: int) -> float:
    """Payload that one all-reduce sends over each link. [B]"""
    return size_bytes * float(ring_share(num_ranks, passes=2))


def message_bytes_of(runs: Sequence[TrainingRun]) -> float:
    """Bytes on the wire that come with every message, from the counters of links of two ranks. [B]

    The counters see large sends as one frame before they are cut, so that they tell what belongs to
    messages, but not what belongs to bytes.
    """
    rows, sent = [], []
    for run in runs:
        n, num_steps = run.setting.fabric.num_ranks, len(run.step_s)
        payload = n * ring_bytes(run.setting.model.gradient_bytes, n)
        messages = num_messages("all_reduce", n) * n * len(run.bucket_bytes)
        rows.append((payload * num_steps, messages * num_steps))
        sent.append(sum(run.link_bytes.values()))
    weighted = np.array(rows, dtype=np.float64) / np.array(sent)[:, np.newaxis]
    (_, found), *_ = np.linalg.lstsq(weighted, np.ones(len(sent)), rcond=None)
    return max(0.0, float(found))

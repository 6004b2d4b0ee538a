"""Laws of a training step on one device and under nn.DataParallel, with constants fitted to steps of many models.

An operator takes the time of its products and of its bytes, whichever is longer, and a launch. Products need
work to fill the device. The host launches operators meanwhile:

    t      = ((F / r)^3 + (B / (W w_f))^3)^(1/3) + t0                 F FLOP, B bytes, f family of operators
    B      grows by (1 + n0 V / ch) / (1 + n0 V / 128) in batch normalisation of images whose channels lie apart
    r      = min(P p_f s c o, peak of the data sheet)                 beyond it no device multiplies
    s      = x / (x + s0 V),  x = results * max(1, K / 512)           long sums are split among processors
    c      = ch / (ch + c0)                                           narrow channels use part of a tile
    o      = 1, or o0 where 16-bit channels are no multiple of 8      tensor cores need padding
    device = sum of t
    host   = h (N_forward + b N_backward + u N_updates + N0),  a view counts 0.3, N0 what a step takes by itself
    step   = (device^q + host^q)^(1/q),  q = 1 + sharpness

P and W are the data sheet's peaks times a constant of the device. Products in 16 bit reach less of higher peaks:
there P has the power 0.7 of the sheet's. V is the root of its peak in fp32 over 10 TFLOP/s: more processors to fill
with tiles. Depthwise kernels have no tiles: there V is 1. Convolutions of kernels over 1x1 may transform images and
multiply less than F [Winograd: Lavin and Gray 2016]: the data sheet does not bound them. p_f and w_f belong to
families, and apart to forward pass, gradient of inputs and gradient of weights, to fp32, and to 16 bit with and
without tensor cores.
In batch normalisation one block of threads takes one channel: n0 V of them ("norm channels") keep half as much busy
as many do.
The cube joins two limits smoothly, as q joins device and host: near balance each hides only part of the other.

Under nn.DataParallel one process leads n devices by threads, behind one interpreter lock. Of m modules and S bytes of
parameters, where a device alone takes T(1):

    T(n) = soft_max(T(1) (1 + slower (n - 1)), n m module_s) + m replicate_s + S byte_s          n > 1

as one thread calls modules at a time, every step copies the model along a chain of devices, and gradients come
back. Devices share links and power, and wait for the slowest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from perfmodel.cost.step_work import PRODUCTS, STEP_PHASES, STREAMS, StepWork
from perfmodel.statistics import FloatArray, IntArray, soft_maximum

_SHARED: Final = (
    *("peak fp32", "peak half", "memory", "launch_s", "half results", "half channels"),
    *("odd channels", "norm channels", "host_s", "host backward", "host update"),
    *("host step", "sharpness"),
)
#: Arithmetic of kernels: fp32, 16 bit on tensor cores, 16 bit on a device that has none.
ARITHMETICS: Final = ("fp32", "half", "vector half")
_FAMILY_CONSTANTS: Final = tuple(
    f"{arithmetic} {name}"
    for arithmetic in ARITHMETICS
    for name in (
        *(f"{product} rate" for product in PRODUCTS),
        *(f"{each} memory" for each in (*PRODUCTS, *STREAMS)),
    )
)
_LAST: Final = " channels last"
#: By family, whether it is a convolution that tensor cores can do.
_CONVOLVES: Final = np.array(
    [
        name.startswith(("conv", "group ", "stem")) and name in PRODUCTS
        for name in (*PRODUCTS, *STREAMS)
    ]
)
#: With as many channels batch normalisation takes what its bytes say: this keeps n0 apart from rates.
_USUAL_CHANNELS: Final = 128.0
_NORMALISES: Final = np.array([name.startswith("batch norm") for name in (*PRODUCTS, *STREAMS)])
#: By family, whether kernels may do with fewer products than are counted.
_TRANSFORMS: Final = np.array(
    [name in {"conv forward", "conv inputs", "conv weights"} for name in (*PRODUCTS, *STREAMS)]
)
#: Every constant of the law by name; those of channels-last images are factors on those of others.
CONSTANTS: Final = (*_SHARED, *_FAMILY_CONSTANTS, *(f"{n}{_LAST}" for n in _FAMILY_CONSTANTS))
POSITION: Final = {name: index for index, name in enumerate(CONSTANTS)}
#: From the constant of a family to its factor for channels-last images.
_TO_LAST: Final = len(_FAMILY_CONSTANTS)


#: Peaks that count as they are, in fp32 and in 16 bit, and the powers of others: chosen by leaving each of 11
#: devices out (seen). Mean absolute error of log steps: 0.226 without them, 0.203 with them. [FLOP/s]
_SINGLE_FLOP_PER_S, _HALF_FLOP_PER_S = 1e13, 6e13
_WIDTH_POWER, _HALF_POWER = 0.5, 0.7


class ConstantPrior(NamedTuple):
    """What is believed of a constant before the steps of a device."""

    median: float
    log_sigma: float


class Sheet(NamedTuple):
    """What a data sheet says."""

    flop_per_s: Mapping[str, float]
    """By precision; ``tf32``: of convolutions in fp32 on tensor cores, where there are such."""
    bytes_per_s: float
    generation: str = ""
    """Of the device, such as ``Hopper sm_90``."""

    @property
    def has_tensor_cores(self) -> bool:
        """Whether products in 16 bit have units of their own."""
        return self.flop_per_s["half"] > self.flop_per_s["fp32"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """The work of many steps on one device, row after row, as one array per column."""

    row: IntArray
    num_rows: int
    phase: IntArray
    rate: IntArray
    """Position of the constant of products in ``CONSTANTS``."""
    memory: IntArray
    is_last: FloatArray
    peak: IntArray
    count: FloatArray
    products_s: FloatArray
    """At the peak of the data sheet, or what 16 bit reaches of it."""
    least_s: FloatArray
    """Products take no less: at the peak of the data sheet, zero where it bounds nothing."""
    stream_s: FloatArray
    """At the bandwidth of the data sheet."""
    filling: FloatArray
    channels: FloatArray
    is_odd: FloatArray
    by_block: FloatArray
    """V over the channels that take a block of threads each; over usual ones in other kernels."""
    by_usual: FloatArray
    """V over usual channels."""
    launches: FloatArray
    """Shape ``(num_rows, 3)``."""

    @classmethod
    def of(cls, works: Sequence[StepWork], sheet: Sheet) -> "StepBatch":
        """Steps in a row."""
        sizes = [len(work.count) for work in works]

        def every(name: str) -> FloatArray:
            return np.concatenate([getattr(work, name) for work in works])

        def spread(values: Sequence[float]) -> FloatArray:
            return np.repeat(np.array(values), sizes)

        family = every("family").astype(np.int64)
        in_half = ARITHMETICS.index("half" if sheet.has_tensor_cores else "vector half")
        indices = [0 if work.precision == "fp32" else in_half for work in works]
        arithmetic = spread(indices).astype(np.int64)
        # Convolutions in fp32 go to tensor cores where these take TF32, products of matrices do not.
        tensor = sheet.flop_per_s.get("tf32", 0.0)
        in_tf32 = (arithmetic == 0) & _CONVOLVES[family] & (tensor > 0)
        multiplied = np.where(in_tf32, ARITHMETICS.index("half"), arithmetic)
        rate = np.array([[POSITION[f"{a} {name} rate"] for name in PRODUCTS] for a in ARITHMETICS])
        both = (*PRODUCTS, *STREAMS)
        memory = np.array([[POSITION[f"{a} {name} memory"] for name in both] for a in ARITHMETICS])
        peaks = np.array([POSITION[f"peak {p}"] for p in ("fp32", "half", "fp32")])
        single, half = sheet.flop_per_s["fp32"], sheet.flop_per_s["half"]
        by_vectors = every("by_vectors") > 0
        is_single = (arithmetic == 0) | by_vectors
        width = np.where(by_vectors, 1.0, (single / _SINGLE_FLOP_PER_S) ** _WIDTH_POWER)
        sheet_s = every("flop") / np.where(in_tf32, tensor, np.where(is_single, single, half))
        reached = (half / _HALF_FLOP_PER_S) ** (_HALF_POWER - 1) if sheet.has_tensor_cores else 1.0
        is_last = spread([float(work.memory_format == "channels_last") for work in works])
        is_apart = _NORMALISES[family] & (is_last == 0)
        return cls(
            row=spread(list(range(len(works)))).astype(np.int64),
            num_rows=len(works),
            phase=every("phase").astype(np.int64),
            rate=rate[multiplied, np.minimum(family, len(PRODUCTS) - 1)],
            memory=memory[arithmetic, family],
            is_last=is_last,
            peak=peaks[multiplied],
            count=every("count"),
            products_s=sheet_s / np.where(in_tf32 | ~is_single, reached, 1.0),
            least_s=np.where(_TRANSFORMS[family], 0.0, sheet_s),
            stream_s=every("moved_bytes") / sheet.bytes_per_s,
            filling=every("filling") / width,
            channels=every("channels"),
            is_odd=every("is_odd") * sheet.has_tensor_cores,
            by_block=width / np.where(is_apart, every("channels"), _USUAL_CHANNELS),
            by_usual=width / _USUAL_CHANNELS,
            launches=np.stack([work.launches for work in works]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSeconds:
    """Times of many steps. [s]"""

    step_s: FloatArray
    device_s: FloatArray
    """By phase, shape ``(num_rows, 3)``."""
    host_s: FloatArray
    """The same of the host."""
    kernel_s: FloatArray
    """Of one call of every kernel in the batch."""
    slope: FloatArray | None = None
    """Derivative of log step by the logarithm of each constant, shape ``(num_rows, num_constants)``."""


def step_seconds(batch: StepBatch, logs: FloatArray, *, with_slope: bool = False) -> StepSeconds:
    """Steps at the logarithms of all ``CONSTANTS``, in their order."""

    def of(name: str) -> float:
        return float(logs[POSITION[name]])

    fill = batch.filling / (batch.filling + math.exp(of("half results")))
    tile = batch.channels / (batch.channels + math.exp(of("half channels")))
    log_rate = logs[batch.rate] + batch.is_last * logs[batch.rate + _TO_LAST]
    log_rate = log_rate + logs[batch.peak] + batch.is_odd * of("odd channels")
    log_bytes = of("memory") + logs[batch.memory] + batch.is_last * logs[batch.memory + _TO_LAST]
    by_rate_s = batch.products_s / (np.exp(log_rate) * fill * tile)
    products = _cube(np.maximum(by_rate_s, batch.least_s))
    half_busy = math.exp(of("norm channels"))
    blocks, usual = 1 + half_busy * batch.by_block, 1 + half_busy * batch.by_usual
    stream = _cube(batch.stream_s * blocks / usual / np.exp(log_bytes))
    joined = np.maximum(products + stream, 1e-300)
    core_s = np.cbrt(joined)
    launch_s = math.exp(of("launch_s"))
    kernel_s = core_s + launch_s
    place = batch.row * len(STEP_PHASES) + batch.phase
    summed_s = np.bincount(place, batch.count * kernel_s, batch.num_rows * len(STEP_PHASES))
    device_s = np.asarray(summed_s, dtype=np.float64).reshape(batch.num_rows, len(STEP_PHASES))
    host_s = _host_s(batch, logs)
    whole_s, wait_s = device_s.sum(axis=1), host_s.sum(axis=1)
    slope = None
    if with_slope:
        power = 1 + math.exp(logs[POSITION["sharpness"]])
        share = 1 / (1 + (wait_s / whole_s) ** power)
        slope = np.zeros((batch.num_rows, len(CONSTANTS)))
        by_products = core_s * products / joined * (by_rate_s >= batch.least_s)
        by_bytes = core_s * stream / joined
        parts = (
            (batch.rate, -by_products),
            (batch.rate + _TO_LAST, -by_products * batch.is_last),
            (batch.peak, -by_products),
            (batch.memory, -by_bytes),
            (batch.memory + _TO_LAST, -by_bytes * batch.is_last),
            (POSITION["memory"], -by_bytes),
            (POSITION["odd channels"], -by_products * batch.is_odd),
            (POSITION["norm channels"], by_bytes * (1 / usual - 1 / blocks)),
            (POSITION["half results"], by_products * (1 - fill)),
            (POSITION["half channels"], by_products * (1 - tile)),
            (POSITION["launch_s"], np.full(len(core_s), launch_s)),
        )
        for constant, seconds in parts:
            at = batch.row * len(CONSTANTS) + constant
            slope += np.bincount(at, batch.count * seconds, slope.size).reshape(slope.shape)
        slope *= (share / whole_s)[:, np.newaxis]
        waiting = ((1 - share) / wait_s)[:, np.newaxis]
        itself_s = _itself_s(logs)
        backward_s, update_s = host_s[:, 1:2], host_s[:, 2:3] - itself_s
        slope[:, POSITION["host_s"]] = (waiting * wait_s[:, np.newaxis])[:, 0]
        slope[:, POSITION["host backward"]] = (waiting * backward_s)[:, 0]
        slope[:, POSITION["host update"]] = (waiting * update_s)[:, 0]
        slope[:, POSITION["host step"]] = (waiting * itself_s)[:, 0]
        # log step = log device - log(share) / q;  d/dq with share = device^q / (device^q + host^q)
        ratio = np.log(wait_s / whole_s)
        by_power = (1 - share) * ratio / power + np.log(share) / power**2
        slope[:, POSITION["sharpness"]] = by_power * (power - 1)
    step_s = joined_s(whole_s, wait_s, logs)
    return StepSeconds(
        step_s=step_s, device_s=device_s, host_s=host_s, kernel_s=kernel_s, slope=slope
    )


def joined_s(device_s: FloatArray, host_s: FloatArray, logs: FloatArray) -> FloatArray:
    """What takes a device and a host so long, each hiding the other only in part. [s]"""
    power = 1 + math.exp(logs[POSITION["sharpness"]])
    longer, shorter = np.maximum(device_s, host_s), np.minimum(device_s, host_s)
    return np.asarray(longer * (1 + (shorter / longer) ** power) ** (1 / power), dtype=np.float64)


def _cube(values: FloatArray) -> FloatArray:
    return values * values * values  # a power takes ten times as long


def _host_s(batch: StepBatch, logs: FloatArray) -> FloatArray:
    """Launches of forward, backward and updates, which come once a step, as what it takes by itself does. [s]"""
    factors = np.array([0.0, logs[POSITION["host backward"]], logs[POSITION["host update"]]])
    host_s: FloatArray = batch.launches * np.exp(logs[POSITION["host_s"]] + factors)
    host_s[:, 2] += _itself_s(logs)
    return host_s


def _itself_s(logs: FloatArray) -> float:
    return math.exp(logs[POSITION["host_s"]] + logs[POSITION["host step"]])


def log_constants(
    constants: Mapping[str, float], priors: Mapping[str, ConstantPrior]
) -> FloatArray:
    """Logarithms of all constants in their order; those that are not given are as the priors say."""
    return np.log([constants.get(name, priors[name].median) for name in CONSTANTS])


#: Constants of nn.DataParallel in the order of the law; the last is a share, others are seconds.
THREAD_CONSTANTS: Final = ("module_s", "replicate_s", "byte_s", "slower")
#: Exponent of its smooth maximum: devices and the lock hide each other almost fully.
_DEVICE_OR_LOCK: Final = 4.0


class ThreadedSteps(NamedTuple):
    """Steps of one process that leads several devices, as arrays that broadcast."""

    alone_s: FloatArray
    """On one device, of the same samples per device. [s]"""
    devices: FloatArray
    modules: FloatArray
    """Calls of modules in a forward pass."""
    parameter_bytes: FloatArray

    def parts_s(self, constants: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What devices and the lock take, and copies of the model, by ``THREAD_CONSTANTS``. [s]"""
        module_s, replicate_s, byte_s, slower = constants
        together_s = self.alone_s * (1 + slower * (self.devices - 1))
        led_s = soft_maximum(together_s, self.devices * self.modules * module_s, _DEVICE_OR_LOCK)
        return led_s, self.modules * replicate_s + self.parameter_bytes * byte_s

    def step_s(self, constants: FloatArray) -> FloatArray:
        """Whole steps. [s]"""
        led_s, copied_s = self.parts_s(constants)
        return led_s + copied_s

"""The model on one page: how long a training step takes, and how much memory and time it costs.

Machine: what a step runs on. It gives the duration of every operator and collective, with an uncertainty.
Each duration says its evidence: measured, interpolated, extrapolated, inferred or assumed.

StepProgram: one step as operations on streams (loader, host, compute, communication), joined by dependencies.
It knows work, no seconds. One compiler makes it from a workload and a layout.

Answer: step time, speed-up and memory. Each has an interval (p5 to p95), and evidence per term.

Below is the arithmetic alone, in plain seconds and bytes. The engine runs the same programs with SimPy,
and as an algebra over thousands of draws; ``tests/test_model.py`` holds both against this page.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

MIB = 1024**2


# Compute
def operator_s(
    flop: float, moved_bytes: float, flop_per_s: float, bytes_per_s: float, *, launch_s: float = 0.0
) -> float:
    """Time of one operator on the device, by the roofline [Williams et al. 2009]. [s]

    T = launch + max(flop / F, bytes / B)
    """
    return launch_s + max(flop / flop_per_s, moved_bytes / bytes_per_s)


# Collectives
class Tier(NamedTuple):
    """``n`` members of one tier of the network; each sends B = ``bytes_per_s`` after ``p2p_s``.

    A launch takes ``start_s``; a rank handles its own array at ``own_bytes_per_s``. A launch of a large array
    takes up to ``later_start_s`` more: half of it at ``half_bytes`` times the root of n.
    """

    n: int
    p2p_s: float
    bytes_per_s: float
    start_s: float = 0.0
    own_bytes_per_s: float = math.inf
    later_start_s: float = 0.0
    half_bytes: float = 1.0


def collective_s(algorithm: str, size_bytes: float, tier: Tier) -> float:
    """Time of a collective of S bytes (the whole array) among n members. [s]

    T = start + messages x p2p + arrays x S / B + S / own + later start x S / (S + half sqrt(n))

        algorithm                        messages     arrays
        send_recv                        1            1
        broadcast: binomial tree         log2(n)      log2(n)                          [1]
          chain (NCCL)                   n - 1        1                                [4]
        all_gather, reduce_scatter,
        all_to_all                       n - 1        (n - 1) / n                      [1]
        all-reduce: ring                 2 (n - 1)    2 (n - 1) / n                    [2]
          tree (double binary)           2 log2(n)    2 / 0.37;  n = 2: 1 / 0.37       [3, 4]
          halving_doubling               2 log2(n)    2 (1 - 1 / n);  n != 2^r: + 2    [1]
          nvls (the switch adds)         1            1 + 1 / n                        [5]

    log2 is rounded up; halving takes the n = 2^r below. 0.37 = 0.92 x 0.4 is the lowest share of the
    ring's rate that NCCL grants a tree. For NVLS ``p2p_s`` is the latency of the switch, 25 us. A ring
    over several tiers has their mean P2P latency and lowest B. A library takes the fastest that it has.
    Bus bandwidth is f S / T with f = ``arrays`` of the ring, 1 for send_recv and broadcast [6].

    References: [1] Thakur et al. 2005; [2] Patarasuk and Yuan 2009; [3] Sanders et al. 2009;
    [4] NCCL, src/graph/tuning.cc; [5] Klenk et al. 2020; [6] nccl-tests, doc/PERFORMANCE.md.
    """
    n, rounds, power = tier.n, math.ceil(math.log2(tier.n)), 1 << (tier.n.bit_length() - 1)
    one_ring = (n - 1, (n - 1) / n)
    messages, arrays = {
        "send_recv": (1, 1.0),
        "broadcast": (rounds, rounds),
        "chain": (n - 1, 1.0),
        "all_gather": one_ring,
        "reduce_scatter": one_ring,
        "all_to_all": one_ring,
        "ring": (2 * (n - 1), 2 * (n - 1) / n),
        "tree": (2 * rounds, min(n - 1, 2) / (0.92 * 0.4)),
        "halving_doubling": (2 * rounds, 2 * (1 - 1 / power + (power != n))),
        "nvls": (1, 1 + 1 / n),
    }[algorithm]
    own_s = size_bytes / tier.own_bytes_per_s
    later_s = tier.later_start_s * size_bytes / (size_bytes + tier.half_bytes * math.sqrt(n))
    start_s = tier.start_s + later_s
    return start_s + messages * tier.p2p_s + arrays * size_bytes / tier.bytes_per_s + own_s


def hierarchical_all_reduce_s(size_bytes: float, inside: Tier, across: Tier) -> float:
    """Time of reduce-scatter inside nodes, all-reduce across, all-gather inside [Cho et al. 2019]. [s]

    T = T_ring(S) inside + T_ring(S) across

    Members of ``across`` are nodes, and B is that of a node: its ranks reduce their parts at once.
    """
    return collective_s("ring", size_bytes, inside) + collective_s("ring", size_bytes, across)


# Data parallelism
def ddp_buckets(sizes_bytes: Sequence[int], cap_bytes: int | None = None) -> list[list[int]]:
    """Indices of the gradients in each bucket, in the order in which they are ready.

    A bucket closes after the tensor that reaches the cap: 1 MiB for the first one, then 25 MiB.
    An explicit cap holds for the first one too [Li et al. 2020; torch, reducer.cpp].
    """
    buckets: list[list[int]] = []
    is_full = True
    for index, size_bytes in enumerate(sizes_bytes):
        if is_full:
            buckets.append([])
            left_bytes = cap_bytes or (MIB if len(buckets) == 1 else 25 * MIB)
        buckets[-1].append(index)
        left_bytes -= size_bytes
        is_full = left_bytes <= 0
    return buckets


def overlapped_s(
    segments_s: Sequence[float], reduce_s: Sequence[float], speeds: tuple[float, float]
) -> float:
    """Time of a backward pass and its collectives, each in order on its own stream. [s]

    Segment k of the pass fills bucket k. At full speed:

        full_k = full_{k-1} + segment_k;    end_k = max(full_k, end_{k-1}) + reduce_k

    While both streams work, each runs at its speed <= 1 (they share memory, SMs or cores). Speeds
    change only when a segment or a collective ends, so the clock goes from one end to the next: exact.
    """
    left_s, done, now_s = (list(segments_s), list(reduce_s)), [0, 0], 0.0
    while done[1] < len(reduce_s):
        runs = [side for side in (0, 1) if done[side] < (len(segments_s), done[0])[side]]
        speed = speeds if len(runs) == 2 else (1.0, 1.0)
        needed_s = {side: left_s[side][done[side]] / speed[side] for side in runs}
        passed_s = min(needed_s.values())
        now_s += passed_s
        for side in runs:
            left_s[side][done[side]] -= passed_s * speed[side]
            done[side] += needed_s[side] <= passed_s
    return now_s


def ddp_step_s(  # noqa: PLR0913 - a step has as many parts
    forward_s: float, backward_s: float, optimizer_s: float, *,
    ready: Sequence[float] = (1.0,), all_reduce_s: Sequence[float] = (0.0,),
    hook_s: Sequence[float] = (), micro_batches: int = 1, host_s: float = 0.0,
    speeds: tuple[float, float] = (1.0, 1.0),
) -> float:  # fmt: skip
    """Steady-state time of one optimizer step under DistributedDataParallel [Li et al. 2020]. [s]

    Bucket k is full after the share ``ready[k]`` of the backward pass, the last one at its end; hooks
    then copy it, gradient by gradient. Only the last of m micro-batches communicates (``no_sync``).

        device = m forward + (m - 1) backward + overlapped(backward, all_reduce) + optimizer
        step   = max(device, host)    the host (dispatch, data loader) runs ahead: it binds if slower

    The engine takes the larger of the program without launches and of its launches alone.
    """
    ends = [0.0, *ready[:-1], 1.0]
    spans = zip(pairwise(ends), hook_s or [0.0] * len(ready), strict=True)
    segments_s = [(end - start) * backward_s + copy_s for (start, end), copy_s in spans]
    last_s = forward_s + overlapped_s(segments_s, all_reduce_s, speeds)
    return max((micro_batches - 1) * (forward_s + backward_s) + last_s + optimizer_s, host_s)


def straggler_factor(n: int, log_spread: float) -> float:
    """Step of the slowest of ``n`` ranks over a typical one: all wait for it. [1]

    E[max of n] = Phi^-1((n - 0.375) / (n + 0.25)) spreads of a normal logarithm [Blom 1958]
    """
    return math.exp(log_spread * NormalDist().inv_cdf((n - 0.375) / (n + 0.25)))


# Sharding, tensor and pipeline parallelism
def sharded_step_s(  # noqa: PLR0913 - a step has as many parts
    layers: int, forward_s: float, backward_s: float, gather_s: float, scatter_s: float,
    optimizer_s: float = 0.0, *, micro_batches: int = 1,
) -> float:  # fmt: skip
    """Time of one step with sharded parameters (FSDP, ZeRO-3), from times per layer. [s]

        gather_k  waits for the network and for the compute of layer k - 2
        compute_k = max(compute_{k-1}, gather_k) + work_k      forward, then backward
        scatter_k follows compute_k and gather_{k+1}           backward   [Zhao et al. 2023]

    HSDP: ``scatter_s`` includes the all-reduce across groups. Overlap slows nothing down here.
    ZeRO-1, 2: ``ddp_step_s`` with reduce-scatters, plus all-gathers that the first forward exposes.
    """
    ends_s, network_s = [0.0, 0.0], 0.0
    for _ in range(micro_batches):
        for k in range(2 * layers):
            network_s = max(network_s, ends_s[-2]) + gather_s
            start_s = max(ends_s[-1], network_s)
            if k > layers:
                network_s = max(network_s, ends_s[-1]) + scatter_s
            ends_s.append(start_s + (forward_s if k < layers else backward_s))
        network_s = max(network_s, ends_s[-1]) + scatter_s
    return max(ends_s[-1], network_s) + optimizer_s


def tensor_parallel_s(layers: int, activation_bytes: float, tier: Tier, passes: int = 2) -> float:
    """Time of the tensor-parallel collectives of one micro-batch; compute waits for them. [s]

    T = 2 passes layers T_ring(S)        S = tokens x hidden x bytes   [Shoeybi et al. 2019]

    Passes: forward and backward, and a third pass under full recomputation. Sequence parallelism sends as much.
    """
    return 2 * passes * layers * collective_s("ring", activation_bytes, tier)


def pipeline_s(
    stages: int, micro_batches: int, forward_s: float, backward_s: float, *, p2p_s: float = 0.0,
    interleave: int = 1,
) -> float:  # fmt: skip
    """Time of all passes through a pipeline, from the times of its fullest stage per micro-batch. [s]

    T = (m + (p - 1) / v) (f + b) + 2 (p - 1) p2p        [Huang et al. 2018; Narayanan et al. 2021]

    GPipe: exact if stages are even and p2p <= f, b. 1F1B and interleaved (v chunks per stage): exact
    without sends, else a lower bound. Uneven stages take no longer than this, without sends.
    """
    fill = (stages - 1) / interleave
    return (micro_batches + fill) * (forward_s + backward_s) + 2 * (stages - 1) * p2p_s


# Memory
def in_flight(stages: int, stage: int, micro_batches: int, interleave: int = 1) -> float:
    """Micro-batches whose activations a stage keeps under 1F1B (GPipe keeps all). [1]

    min(m, p - s);  interleaved (2 (p - s - 1) + (v - 1) p + 1) / v        [Narayanan et al. 2021]
    """
    chunks = 2 * (stages - stage - 1) + (interleave - 1) * stages + 1
    return min(micro_batches, chunks / interleave if interleave > 1 else stages - stage)


def memory_bytes(  # noqa: PLR0913 - memory has as many parts
    parameters: float, activation_bytes: float, *, kept: float = 1.0, zero: int = 0, shards: int = 1,
    gathered_bytes: float = 0.0, per_parameter: tuple[float, float, float] = (2.0, 4.0, 12.0),
) -> float:  # fmt: skip
    """Tensors of one rank, without framework context and allocator slack. [B]

    M = (a / n_3 + g / n_2 + o / n_1) P + gathered + kept A      [Rajbhandari et al. 2020]

    P: parameters of the rank's stage and tensor shard; A: activations of one micro-batch. ZeRO
    level z divides by n_z = ``shards``: optimizer (1), gradients (2), parameters (3).
    ``gathered_bytes``: whole layers that level 3 holds for a moment. ``per_parameter``: a, g, o, here
    Adam with 16-bit weights; with 32-bit weights 4, 4, 8.
    """
    states = zip(per_parameter, (3, 2, 1), strict=True)
    held = sum(each / (shards if zero >= level else 1) for each, level in states)
    return held * parameters + gathered_bytes + kept * activation_bytes


# Answers
def speed_up(batch: float, step_s: float, batch_alone: float, step_alone_s: float) -> float:
    """Samples per second over those of one device; over n it is the efficiency. [1]

    Weak scaling: batch = n batch_alone. Strong scaling: batch = batch_alone.
    """
    return (batch / step_s) / (batch_alone / step_alone_s)


def checkpoint_interval_s(write_s: float, mtbf_s: float) -> float:
    """Best work between checkpoints, sqrt(2 write MTBF), for write << MTBF [Young 1974]. [s]"""
    return math.sqrt(2 * write_s * mtbf_s)


def goodput(interval_s: float, write_s: float, mtbf_s: float, restart_s: float) -> float:
    """Useful share of the time of a job that fails at random, every MTBF of a device / n [Daly 2006].

    G = interval / (MTBF exp(restart / MTBF) (exp((interval + write) / MTBF) - 1))
    """
    stop_s = mtbf_s * math.exp(restart_s / mtbf_s)
    return interval_s / (stop_s * math.expm1((interval_s + write_s) / mtbf_s))

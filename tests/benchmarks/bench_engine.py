"""How fast steps are evaluated: simulated on all ranks, on one, and as algebra.

``python tests/benchmarks/bench_engine.py`` prints JSON; ``measure`` is for ``run.py``.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.cost.machine import CostModel
from perfmodel.documents.hardware import read_cluster
from perfmodel.documents.profile import ProfileDocument
from perfmodel.engine.algebra import end_times_with_interference, step_times
from perfmodel.engine.simulate import simulate
from perfmodel.step.program import Cause, Interference, Operation, StepProgram, Stream

NUM_RANKS = 1024
NUM_BUCKETS_SIMULATED = 54
NUM_BUCKETS_ALGEBRA = 200
NUM_EVALUATIONS = 65_536
NUM_BUCKETS_FLUID = 7
NUM_DRAWS = 2_000
CLUSTER = Path("docs/clusters/h100-16384.toml")
PROFILE = Path("docs/records/calibration/profile.json")
SLOWED = Interference(compute_speed=0.8, comm_speed=0.7)


def ddp_step(num_buckets: int) -> StepProgram:
    """Input, dispatch, forward, one backward segment and all-reduce per bucket, optimizer."""
    operations = [
        Operation(name="batch", stream=Stream.LOADER, cause=Cause.INPUT),
        Operation(name="dispatch[0]", stream=Stream.HOST, cause=Cause.DISPATCH, after=(0,)),
        Operation(name="forward", stream=Stream.COMPUTE, cause=Cause.FORWARD, after=(1,)),
        Operation(name="dispatch[1]", stream=Stream.HOST, cause=Cause.DISPATCH),
    ]
    for bucket in range(num_buckets):
        operations += [
            Operation(name=f"backward[{bucket}]", stream=Stream.COMPUTE, cause=Cause.BACKWARD),
            Operation(
                name=f"all_reduce[{bucket}]",
                stream=Stream.COMM,
                cause=Cause.ALL_REDUCE,
                after=(len(operations),),
            ),
        ]
    collectives = tuple(i for i, operation in enumerate(operations) if operation.is_collective)
    operations += [
        Operation(name="dispatch[2]", stream=Stream.HOST, cause=Cause.DISPATCH),
        Operation(
            name="optimizer",
            stream=Stream.COMPUTE,
            cause=Cause.OPTIMIZER,
            after=(*collectives, len(operations)),
        ),
    ]
    return StepProgram(tuple(operations))


def sample(act: Callable[[], object], *, num_repeats: int) -> dict[str, Any]:
    """Wall and CPU time of each repeat after one warm-up, and their medians and minima. [s]"""
    act()
    wall_s, cpu_s = [], []
    for _ in range(num_repeats):
        # Garbage of the repeat before belongs to that one.
        gc.collect()
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        act()
        wall_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.process_time() - started_cpu_s)
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "median_wall_s": statistics.median(wall_s),
        "median_cpu_s": statistics.median(cpu_s),
        "min_wall_s": min(wall_s),
    }


def measure_programs(*, num_repeats: int = 5) -> dict[str, Any]:
    """Simulate all ranks and one that stands for them; steps of many draws by the max-plus recursion."""
    simulated, algebra, fluid = (
        ddp_step(n) for n in (NUM_BUCKETS_SIMULATED, NUM_BUCKETS_ALGEBRA, NUM_BUCKETS_FLUID)
    )
    one_s = _durations(simulated, 1).T
    all_s = np.repeat(one_s, NUM_RANKS, axis=0)
    many_s, draws_s = _durations(algebra, NUM_EVALUATIONS), _durations(fluid, NUM_DRAWS)
    speeds = asdict(SLOWED)
    found = {
        name: sample(act, num_repeats=num_repeats)
        for name, act in {
            "expanded": lambda: simulate(simulated, all_s),
            "folded": lambda: simulate(simulated, one_s),
            "expanded_with_interference": lambda: simulate(simulated, all_s, interference=SLOWED),
            "algebra": lambda: step_times(algebra, many_s),
            "fluid": lambda: end_times_with_interference(fluid, draws_s, **speeds),
        }.items()
    }
    evaluations_per_s = NUM_EVALUATIONS / found["algebra"]["median_wall_s"]
    return found | {
        "num_ranks": NUM_RANKS,
        "expanded_over_folded": found["expanded"]["median_wall_s"]
        / found["folded"]["median_wall_s"],
        "evaluations_per_s": evaluations_per_s,
        "draws_with_interference_per_s": NUM_DRAWS / found["fluid"]["median_wall_s"],
    }


def _durations(program: StepProgram, num_draws: int) -> FloatArray:
    shape = (len(program.operations), num_draws)
    return np.random.default_rng(0).uniform(0.5e-3, 1.5e-3, shape)


def measure_folded(*, num_repeats: int = 5) -> dict[str, Any]:
    """Price and simulate the step of 200 buckets on 16,384 devices, one rank standing for all."""
    cluster = read_cluster(CLUSTER)
    program = ddp_step(NUM_BUCKETS_ALGEBRA)
    row_s = np.random.default_rng(0).uniform(0.5e-3, 1.5e-3, len(program.operations))
    costs = CostModel(ProfileDocument.read(PROFILE).machine, num_draws=1, seed=0, cluster=cluster)
    positions = np.array(program.on_stream(Stream.COMM))
    sizes_bytes = 2.0**20 + positions[:, np.newaxis]

    def read_collectives() -> None:
        row_s[positions] = costs.all_reduce_s(sizes_bytes, cluster.num_devices)[:, 0]

    reading = sample(read_collectives, num_repeats=num_repeats)
    return {
        "num_ranks": cluster.num_devices,
        "num_operations": len(program.operations),
        "pricing": reading,
        "steps": sample(lambda: simulate(program, row_s[np.newaxis, :]), num_repeats=num_repeats),
    }


def measure(*, num_repeats: int = 5) -> dict[str, Any]:
    """Measure all engines."""
    return {
        "programs": measure_programs(num_repeats=num_repeats),
        "folded_16384": measure_folded(num_repeats=num_repeats),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=2, allow_nan=False)

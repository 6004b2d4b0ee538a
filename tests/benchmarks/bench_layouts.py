"""How fast layouts of large models are predicted: one simulated, many in closed form, all searched.

``python -m tests.benchmarks.bench_layouts`` prints JSON; ``measure`` is for ``run.py``.
"""

import json
import sys
from typing import Any

from perfmodel.answer.answer import answer
from perfmodel.answer.inferred import Training
from perfmodel.answer.question import Question
from perfmodel.cost.inferred import InferredModel, open_inferred
from perfmodel.cost.layout_time import step_time_s
from perfmodel.layout.candidates import Space, feasible_layouts
from perfmodel.layout.layout import parse_layout
from perfmodel.layout_search import Request, plan_parallelism, search_jobs
from perfmodel.workload.transformer import TRANSFORMERS
from tests.benchmarks.bench_engine import sample
from tests.perfmodel.cost.large_samples import document

#: 175 G parameters on 1,024 devices, 1,536 sequences per step (Narayanan 2021, arXiv 2104.04473).
GPT3 = parse_layout(
    "tp=8 pp=16 dp=8 micro_batch=1 accumulation=192 zero=1 recompute=full sequence_parallel=yes"
)
SEARCHED = "llama3-70b"
NUM_DEVICES = 512
GLOBAL_BATCH = 1024


def training(name: str, *, devices: int, global_batch: int) -> Training:
    return Training(
        model=TRANSFORMERS[name], devices=devices, devices_per_node=8, global_batch=global_batch
    )


def measure_prediction(machine: InferredModel, *, num_repeats: int) -> dict[str, Any]:
    """Predict GPT-3: the whole answer."""
    question = Question(machine=machine.machine, workload=TRANSFORMERS["gpt3-175b"], layout=GPT3)
    step = answer(question)
    return {
        "num_devices": GPT3.world_size,
        "num_operations": len(step.program.operations),
        "predicted": sample(lambda: answer(question), num_repeats=num_repeats),
    }


def measure_search(machine: InferredModel, *, num_repeats: int) -> dict[str, Any]:
    """Time all layouts of a 70B model on 512 devices: the closed form, and the whole search."""
    asked = training(SEARCHED, devices=NUM_DEVICES, global_batch=GLOBAL_BATCH)
    shape = asked.model.shape
    layouts = feasible_layouts(
        Space(
            layers=shape.layers,
            heads=shape.heads,
            sequence=asked.model.sequence,
            devices=NUM_DEVICES,
            global_batch=GLOBAL_BATCH,
        )
    )
    jobs = search_jobs(asked, layouts)
    closed = sample(lambda: step_time_s(jobs, machine.nominal), num_repeats=num_repeats)
    request = Request(training=asked, capacity_bytes=80 * 2**30)
    searched = sample(lambda: plan_parallelism(machine, request, argv=()), num_repeats=num_repeats)
    return {
        "num_devices": NUM_DEVICES,
        "num_layouts": len(layouts),
        "closed_form": closed,
        "layouts_per_s": len(layouts) / closed["median_wall_s"],
        "search": searched,
    }


def measure(*, num_repeats: int = 5) -> dict[str, Any]:
    """Measure both."""
    machine = open_inferred(document().machine)
    return {
        "prediction": measure_prediction(machine, num_repeats=num_repeats),
        "search": measure_search(machine, num_repeats=num_repeats),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=2, allow_nan=False)

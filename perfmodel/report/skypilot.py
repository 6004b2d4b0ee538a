"""The answer to a plan as a task for SkyPilot: YAML of the chosen option, or a program with a time estimator."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perfmodel.documents.plan import PlanDocument, PlanRow
from perfmodel.errors import UsageError
from perfmodel.machine import DEVICES_PER_NODE
from perfmodel.units import format_duration

#: Accelerators as SkyPilot calls them (``sky show-gpus``); longer names before those that they hold.
_ACCELERATORS: Final = (
    *("GB200", "GH200", "B200", "H200", "H100", "A100", "L40S", "L40", "L4", "A10G", "A10"),
    *("V100", "T4", "RTX4090", "RTX3090", "MI300X"),
)
#: Sizes of memory that are names of their own.
_LARGE: Final = {"A100": "80GB", "V100": "32GB"}
_RUN: Final = """\
torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node "$SKYPILOT_NUM_GPUS_PER_NODE" \\
  --node-rank "$SKYPILOT_NODE_RANK" --master-port 29500 \\
  --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" train.py"""


def accelerator(device: str) -> str:
    """SkyPilot's name of a device; ``UsageError`` if it has none."""
    squeezed = re.sub(r"[^A-Z0-9]", "", device.upper())
    for name in _ACCELERATORS:
        if name in squeezed:
            size = _LARGE.get(name, "")
            has_size = bool(size) and size.removesuffix("GB") in squeezed.partition(name)[2]
            return f"{name}-{size}" if has_size else name
    raise UsageError(
        f"--export: SkyPilot must rent the device, got {device!r}; it knows {', '.join(_ACCELERATORS)}"
    )


def skypilot_text(document: PlanDocument, path: Path) -> str:
    """A task, or a program if the file is to end in ``.py``, of a plan that has an answer."""
    if path.suffix == ".py":
        return _program(document)
    row = document.ranked[0]
    nodes, held = _nodes(document, row)
    run = "\n".join(f"  {line}" for line in _RUN.splitlines())
    says = "\n".join(f"# {line}" for line in _says(document, row))
    return (
        f"{says}\nname: {json.dumps(_name(document))}\nnum_nodes: {nodes}\nresources:\n"
        f"  accelerators: {json.dumps(held)}\nrun: |\n{run}\n"
    )


def _nodes(document: PlanDocument, row: PlanRow) -> tuple[int, str]:
    """Nodes, and what each of them holds, such as ``H100:8``."""
    [option] = [each for each in document.plan.option if each.name == row.option]
    device = document.machine_of[row.option].device
    size = f" {option.device_memory}" if option.device_memory else ""
    each = math.gcd(row.devices, option.devices_per_node or DEVICES_PER_NODE)
    return row.devices // each, f"{accelerator(option.device or device + size)}:{each}"


def _says(document: PlanDocument, row: PlanRow) -> Sequence[str]:
    """What was chosen and predicted, a line each."""
    plan = document.plan
    [option] = [each for each in plan.option if each.name == row.option]
    takes = (
        f"{format_duration(row.elapsed_s.nominal)} [{format_duration(row.elapsed_s.p5)} to "
        f"{format_duration(row.elapsed_s.p95)}]"
    )
    lines = [
        f"{plan.work.name}: {row.devices:,} x {row.option}, batch {row.micro_batch} of each device",
        f"predicted: {takes}, {row.cost.nominal:,.0f} {plan.currency}",
        f"all limits are kept with {row.probability:.0%}",
        f"price: {option.price.value:g} {option.price.currency} {option.price.unit.value}, {option.price.source}",
    ]
    if row.layout is not None:
        lines.append(f"layout: {row.layout}")
    if row.checkpoint_interval_s is not None:
        lines.append(f"a checkpoint every {format_duration(row.checkpoint_interval_s)}")
    return [re.sub(r"\s+", " ", line) for line in lines]


def _program(document: PlanDocument) -> str:
    """Every ranked row, so that SkyPilot's optimizer weighs predicted times with its own prices.

    ``sky.optimize`` asks a server, and sends it YAML that holds no estimator: the optimizer is called here.
    """
    first = document.ranked[0]
    seconds: dict[int, dict[str, int]] = {}
    for row in (*document.ranked, *document.front):
        nodes, held = _nodes(document, row)
        known = seconds.setdefault(nodes, {})
        known[held] = min(known.get(held, 2**62), round(row.elapsed_s.nominal))
    says = "\n".join(f"# {line}" for line in _says(document, first))
    return f'''{says}
"""Times of perfmodel for SkyPilot's optimizer: python FILE.py launches nothing, it prints the choice."""

import sky

#: Predicted duration by number of nodes and by what each of them holds. [s]
SECONDS = {seconds}
NUM_NODES = {_nodes(document, first)[0]}
RUN = {json.dumps(_RUN)}


def time_estimator(resources):
    """Predicted duration on these resources. [s]"""
    [(name, count)] = resources.accelerators.items()
    return SECONDS[NUM_NODES][f"{{name}}:{{count:g}}"]


def task():
    """The training on any of the resources that were predicted for this number of nodes."""
    made = sky.Task(name={json.dumps(_name(document))}, run=RUN, num_nodes=NUM_NODES)
    made.set_resources({{sky.Resources(accelerators=held) for held in SECONDS[NUM_NODES]}})
    return made.set_time_estimator(time_estimator)


if __name__ == "__main__":
    with sky.Dag() as dag:
        task()
    sky.Optimizer.optimize(dag)
'''


def _name(document: PlanDocument) -> str:
    """Letters, digits and dashes, as names of tasks are."""
    return re.sub(r"[^a-z0-9]+", "-", document.plan.work.name.casefold()).strip("-") or "training"

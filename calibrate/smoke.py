"""A look at a device before anything is measured: every rank trains a step and reduces with all others.

``torchrun ... -m calibrate.smoke KIND OUTPUT [TRUTH]``; rank 0 writes what it saw.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from calibrate.agent import die_with_parent
from calibrate.device import Device, open_device
from calibrate.environment import torch_facts
from perfmodel.documents.base import write_atomically

_WIDTH = 256


def look(device: Device, group: dist.ProcessGroup) -> dict[str, Any]:
    """One training step in fp32, a product in bf16, an all-reduce of every gradient."""
    where = device.torch_device
    device.reset_peak()
    module = nn.Linear(_WIDTH, _WIDTH).to(where)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    clock = device.clock()
    clock.mark()
    module(torch.randn(_WIDTH, _WIDTH).to(where)).square().mean().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
    clock.mark()
    half = torch.zeros((_WIDTH, _WIDTH), dtype=torch.bfloat16, device=where)
    torch.mm(half, half)
    clock.mark()
    device.synchronise()
    _, step_s, both_s = clock.seconds()
    memory = device.peak_memory()
    return {
        "step_s": step_s,
        "bf16_product_s": both_s - step_s,
        "memory": None if memory is None else memory.model_dump(),
    }


@record
def main() -> None:
    """Look at the device of this rank."""
    die_with_parent()
    kind, output, *truth = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = open_device(
        kind,
        local_rank=int(os.environ["LOCAL_RANK"]),
        truth=truth[0] if truth else None,
        occasion="smoke",
    )
    group = dist.new_group(backend=device.backend)
    assert group is not None
    found = look(device, group)  # type: ignore[arg-type] # torch's own annotation is wider
    rows: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(found, rows if rank == 0 else None)
    if rank == 0:
        seen = {"device_kind": kind, "torch": torch_facts(), "ranks": rows}
        write_atomically(Path(output), json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Steps of a plain loop on a virtual GPU, for tests: shares nothing with what calibrates.

``torchrun -m tests.virtual_loop TRUTH OCCASION SETTING...``: one JSON line per setting on rank 0. A setting is
``workload:world_size:micro_batch:cap:item``; cap 0 is DDP's default, item 1 asks for the loss in every step.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.virtual.carrier import NAME, Carrier
from calibrate.virtual.gpu import VirtualGpu
from calibrate.virtual.truth import Truth
from perfmodel.trace.reference import MODELS

_WARM_UPS, _STEPS = 8, 24


def seconds_per_step(
    gpu: VirtualGpu, workload: str, world_size: int, micro_batch: int, cap_mb: float, *, item: bool
) -> float:
    """Of many steps with one wait at the end. [s]"""
    reference = MODELS[workload]
    module: nn.Module = reference.build().to(NAME)
    if world_size > 1:
        module = DistributedDataParallel(module, bucket_cap_mb=cap_mb or None)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    inputs = reference.draw_inputs(micro_batch)
    labels = torch.randint(0, reference.num_classes, (micro_batch,))

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            x, y = inputs.to(NAME, non_blocking=True), labels.to(NAME, non_blocking=True)
            loss = nn.functional.cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
            if item:
                loss.item()

    run(_WARM_UPS)
    gpu.synchronise()
    start_s = gpu.host_s
    run(_STEPS)
    gpu.synchronise()
    return (gpu.host_s - start_s) / _STEPS


def main() -> None:
    """Run the settings named on the command line."""
    truth, occasion, *settings = sys.argv[1:]
    dist.init_process_group("gloo")
    gpu = VirtualGpu(Truth.read(truth), rank=dist.get_rank(), occasion=occasion)
    Carrier.open(gpu)
    for setting in settings:
        workload, world_size, micro_batch, cap, item = setting.split(":")
        gpu.begin(setting)
        step_s = seconds_per_step(
            gpu, workload, int(world_size), int(micro_batch), float(cap), item=item == "1"
        )
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"setting": setting, "step_s": step_s}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

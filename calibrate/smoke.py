"""A look at a device before anything is measured: every rank trains a step and reduces with all others.

``torchrun ... -m calibrate.smoke KIND OUTPUT [TRUTH]``; rank 0 writes what it saw, and by which algorithm and
protocol NCCL reduces arrays of each size.
"""

import json
import os
import re
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from calibrate.device import Device
from calibrate.environment import torch_facts
from calibrate.processes import die_with_parent
from calibrate.ranks import open_device
from perfmodel.files import write_atomically

_WIDTH = 256
#: Arrays of 1 KiB to 256 MiB. [B]
_REDUCED_BYTES: Final = tuple(2**power for power in range(10, 29, 2))
#: In the order of the numbers that older versions print (src/include/nccl_tuner.h).
_ALGORITHMS: Final = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS: Final = ("LL", "LL128", "SIMPLE")
_CHOSEN: Final = re.compile(r"(\d+) Bytes -> Algo (\w+) proto (\w+)")


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


def logged(environ: MutableMapping[str, str], path: Path) -> None:
    """Let NCCL say in a file what it chooses, unless the user has it say something else."""
    asked = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING", "NCCL_DEBUG_FILE": path}
    if not environ.keys() & asked:
        environ.update({name: str(value) for name, value in asked.items()})


def choices(log: str) -> dict[int, str]:
    """Algorithm and protocol by size in bytes, in NCCL's words."""
    found = {}
    for size, algorithm, protocol in _CHOSEN.findall(log):
        names = (
            known[int(word)] if word.isdecimal() and int(word) < len(known) else word.upper()
            for known, word in ((_ALGORITHMS, algorithm), (_PROTOCOLS, protocol))
        )
        found[int(size)] = " ".join(names)
    return found


def _reduced(device: Device, group: dist.ProcessGroup, log: Path) -> dict[int, str]:
    """Reduce arrays of all sizes; what NCCL chose for them, where it says so."""
    for size_bytes in _REDUCED_BYTES:
        dist.all_reduce(torch.zeros(size_bytes // 4, device=device.torch_device), group=group)
    device.synchronise()
    text = ""
    with suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
    known = choices(text)
    return {size: known[size] for size in _REDUCED_BYTES if size in known}


@record
def main() -> None:
    """Look at the device of this rank."""
    die_with_parent()
    kind, output, *truth = sys.argv[1:]
    log = Path(output).with_name("nccl.txt")
    if kind == "cuda" and os.environ["RANK"] == "0":
        logged(os.environ, log)
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
    chosen = _reduced(device, group, log) if device.backend == "nccl" else {}  # type: ignore[arg-type]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(found, rows if rank == 0 else None)
    if rank == 0:
        seen = {"device_kind": kind, "torch": torch_facts(), "ranks": rows, "nccl": chosen}
        write_atomically(Path(output), json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()

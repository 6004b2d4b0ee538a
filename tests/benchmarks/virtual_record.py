"""Steps of the reference models as their host code asks for them, recorded once for all truths.

``python -m tests.benchmarks.virtual_record FOLDER MODEL KIND,... [BATCH...]`` records a part and takes seconds.
"""

import itertools
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from perfmodel.layout.layout import RunSetting, Synchronisation
from tests.virtual_ranks import Items, Recording

if TYPE_CHECKING:
    from perfmodel.workload.workload import Workload

#: Micro-batches that a quick calibration runs ...
CALIBRATED: Final = {
    "resnet50": (32, 256),
    "resnet50-fp32": (32, 128),
    "gpt2": (4, 32),
    "lenet": (64, 4096),
    "resnet18": (16, 512),
    "mlp": (64, 4096),
    "transformer": (8, 512),
}
#: ... and held-out ones between them.
HELD_OUT: Final = {
    "resnet50": (64, 160),
    "resnet50-fp32": (48, 96),
    "gpt2": (8, 24),
    "lenet": (256, 2048),
    "resnet18": (48, 256),
    "mlp": (256, 2048),
    "transformer": (24, 192),
}
CAPS_MB: Final = (None, 4.0, 10.0)
#: Samples of the pass that shows when gradients are ready.
READY_SAMPLES: Final = 4
KINDS: Final = (
    (Synchronisation.NONE, None),
    (Synchronisation.NO_SYNC, None),
    *((Synchronisation.DDP, cap_mb) for cap_mb in CAPS_MB),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Steps of one model, and what is known of it."""

    workload: "Workload | None"
    calibrated: dict[tuple[str, float | None, int], Items]
    """By synchronisation, bucket cap and micro-batch."""
    held_out: dict[tuple[str, float | None, int, bool], Items]
    """The same, and whether every step asks for its loss."""
    backward: Items
    names: tuple[str, ...]
    """Of gradients, in the order in which they are ready."""

    def items(self, setting: RunSetting) -> Items:
        return self.calibrated[
            setting.synchronisation.value, setting.bucket_cap_mb, setting.micro_batch
        ]


def record(model: str, kinds: Iterable[int], batches: Iterable[int]) -> Recorded:
    """Run steps of a model once, for real; with kind 0 what else is known of it."""
    workload = None
    if 0 in kinds:
        workload = _traced(model)
    recording = Recording()
    calibrated: dict[tuple[str, float | None, int], Items] = {}
    held_out: dict[tuple[str, float | None, int, bool], Items] = {}
    for (how, cap_mb), batch in itertools.product((KINDS[kind] for kind in kinds), batches):
        setting = RunSetting(
            workload=model,
            world_size=1 if how is Synchronisation.NONE else 2,
            micro_batch=batch,
            synchronisation=how,
            bucket_cap_mb=cap_mb,
        )
        if batch not in HELD_OUT[model]:
            calibrated[how.value, cap_mb, batch] = recording.of_calibration(setting)
        elif how is not Synchronisation.NO_SYNC:
            for asks in (False, True) if how is Synchronisation.NONE else (False,):
                held_out[how.value, cap_mb, batch, asks] = recording.of_plain_loop(
                    setting, asks_loss=asks
                )
    backward: Items = ()
    names: tuple[str, ...] = ()
    if workload is not None:
        backward, names = recording.of_ready_gradients(model, READY_SAMPLES)
    return Recorded(
        workload=workload,
        calibrated=calibrated,
        held_out=held_out,
        backward=backward,
        names=names,
    )


def _traced(model: str) -> "Workload":
    from perfmodel.tracing.reference import REFERENCES  # noqa: PLC0415 - slow imports
    from perfmodel.tracing.sources import reference_source  # noqa: PLC0415
    from perfmodel.tracing.trace import trace_model  # noqa: PLC0415

    method = REFERENCES[model].method("cpu")
    return trace_model(reference_source(model), method, micro_batch=READY_SAMPLES).workload


def loaded(folder: Path, model: str) -> Recorded:
    """All that was recorded of a model."""
    files = sorted(folder.glob(f"{model}-*.pickle"))
    parts = [Recorded(**pickle.loads(file.read_bytes())) for file in files]  # noqa: S301 - our own
    first = next(part for part in parts if part.workload is not None)
    for part in parts:
        first.calibrated.update(part.calibrated)
        first.held_out.update(part.held_out)
    return first


def main() -> None:
    """Carry out the command line."""
    folder, model, kinds, *typed = sys.argv[1:]
    batches = tuple(map(int, typed)) or (*CALIBRATED[model], *HELD_OUT[model])
    found = record(model, tuple(map(int, kinds.split(","))), batches)
    dist.destroy_process_group()
    name = "-".join((model, kinds, *typed))
    Path(folder, f"{name}.pickle").write_bytes(
        pickle.dumps({field.name: getattr(found, field.name) for field in fields(found)})
    )


if __name__ == "__main__":
    main()

"""Steps of the reference models as their host code asks for them, recorded once for all truths.

``python -m tests.benchmarks.virtual_record FOLDER MODEL`` takes seconds to minutes.
"""

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from calibrate.ranks import traced_as
from calibrate.virtual.gpu import Work
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.units import Bytes
from tests.virtual_ranks import Items, Kind, Mark, Recording

if TYPE_CHECKING:
    from perfmodel.tracing.trace import TracedModel

#: Micro-batches that are run; the work of others lies on lines through these.
RECORDED: Final = {
    "resnet50": (32, 256),
    "resnet50-fp32": (32, 128),
    "gpt2": (4, 32),
    "lenet": (64, 4096),
    "resnet18": (16, 512),
    "mlp": (64, 4096),
    "transformer": (8, 512),
}
#: Micro-batches that are judged, between those of a standard calibration.
HELD_OUT: Final = {
    "resnet50": (48, 160),
    "resnet50-fp32": (48, 112),
    "gpt2": (12, 24),
    "lenet": (256, 2048),
    "resnet18": (48, 128),
    "mlp": (256, 2048),
    "transformer": (24, 192),
}
#: Micro-batches of a step, beside one.
ACCUMULATED: Final = (2, 4)
ALONE: Final = Kind(Synchronisation.NONE)
CALIBRATED_KINDS: Final = (
    ALONE,
    Kind(Synchronisation.NO_SYNC),
    Kind(Synchronisation.DDP),
    Kind(Synchronisation.DDP, 4.0),
)
_TRACED_SAMPLES: Final = 4
#: Two micro-batches of few samples: what drawn models tell of a host.
TWICE: Final = Kind(Synchronisation.NONE, accumulation=2)
PLAIN_KINDS: Final = (
    ALONE,
    Kind(Synchronisation.DDP),
    Kind(Synchronisation.DDP, 10.0),
    *(
        Kind(how, accumulation=count)
        for count in ACCUMULATED
        for how in (Synchronisation.NONE, Synchronisation.DDP)
    ),
)


def judged_batches(model: str, kind: Kind) -> tuple[int, ...]:
    """Micro-batches of the plain loop; of several in a step the smaller one, where adding gradients weighs most."""
    return HELD_OUT[model] if kind.accumulation == 1 else HELD_OUT[model][:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Steps of one model, and what is known of it."""

    traced: "TracedModel"
    calibrated: dict[Kind, tuple[Items, ...]]
    """At the recorded micro-batches."""
    plain: dict[Kind, tuple[Items, ...]]
    """The same of a loop as users write it."""
    peak_bytes: dict[Kind, tuple[Bytes, ...]]
    """That such a step holds at most."""

    def items(self, name: str, setting: RunSetting) -> Items:
        """A step of a calibration."""
        return at_batch(setting.micro_batch, RECORDED[name], self.calibrated[Kind.of(setting)])

    def plain_items(self, name: str, setting: RunSetting) -> Items:
        """A step of the plain loop."""
        return at_batch(setting.micro_batch, RECORDED[name], self.plain[Kind.of(setting)])


def at_batch(batch: int, known: Sequence[int], recorded: Sequence[Items]) -> Items:
    """A step at another micro-batch: every size of a tensor is a line in it."""
    share = (batch - known[0]) / (known[1] - known[0])
    found: list[Work | Mark] = []
    for small, large in zip(*recorded, strict=True):
        if isinstance(small, Mark) or isinstance(large, Mark):
            assert small == large
            found.append(small)
            continue
        work = replace(
            small,
            flop=small.flop + share * (large.flop - small.flop),
            size_bytes=round(small.size_bytes + share * (large.size_bytes - small.size_bytes)),
        )
        assert replace(large, flop=work.flop, size_bytes=work.size_bytes) == work, (small, large)
        found.append(work)
    return tuple(found)


def record(model: str) -> Recorded:
    """Run steps of a model once, for real."""
    traced = _traced(model)
    recording = Recording()

    calibrated = {
        kind: tuple(recording.of_calibration(kind.at(model, batch)) for batch in RECORDED[model])
        for kind in (*CALIBRATED_KINDS, TWICE)
    }
    plain = {
        kind: [recording.of_plain_loop(kind.at(model, batch)) for batch in RECORDED[model]]
        for kind in PLAIN_KINDS
    }
    return Recorded(
        traced=traced,
        calibrated=calibrated,
        plain={kind: tuple(items for items, _ in found) for kind, found in plain.items()},
        peak_bytes={kind: tuple(peak for _, peak in found) for kind, found in plain.items()},
    )


def _traced(model: str) -> "TracedModel":
    from perfmodel.tracing.reference import REFERENCES  # noqa: PLC0415 - slow imports
    from perfmodel.tracing.trace import trace_model  # noqa: PLC0415

    method = REFERENCES[model].method(traced_as("virtual"))
    return trace_model(REFERENCES[model], method, micro_batch=_TRACED_SAMPLES)


def loaded(folder: Path, model: str) -> Recorded:
    """All that was recorded of a model."""
    content = (folder / f"{model}.pickle").read_bytes()
    return Recorded(**pickle.loads(content))  # noqa: S301 - our own


def main() -> None:
    """Carry out the command line."""
    folder, model = sys.argv[1:]
    found = record(model)
    dist.destroy_process_group()
    content = {field.name: getattr(found, field.name) for field in fields(found)}
    Path(folder, f"{model}.pickle").write_bytes(pickle.dumps(content))


if __name__ == "__main__":
    main()

"""What the predicting commands read."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfmodel.errors import UsageError, refuse_unknown

if TYPE_CHECKING:
    from perfmodel.answer.question import Question
    from perfmodel.machine.measured import MeasuredMachine
    from perfmodel.workload.transformer import NamedTransformer

_LONGEST_DEFAULT: Final = 8192


def read_machine(path: Path, *, device: str | None) -> "MeasuredMachine":
    """The machine of a profile, brought to another device by data-sheet ratios if one is named."""
    from perfmodel.documents.profile import ProfileDocument

    machine = ProfileDocument.read(path).machine
    if device is None:
        return machine
    from perfmodel.cost.rescaling import find_device, rescaled_profile, shipped_catalogue

    catalogue = shipped_catalogue()
    return rescaled_profile(machine, find_device(device, catalogue), catalogue)


def read_question(
    profile: Path,
    workload: str,
    *,
    validation: Path | None,
    cluster: Path | None,
    device: str | None,
) -> "Question":
    """A question about a workload by name or file on a calibrated machine."""
    from perfmodel.answer.measured import check_machine, open_workload
    from perfmodel.answer.question import Question

    machine = read_machine(profile, device=device)
    earlier, links = None, None
    if validation is not None:
        from perfmodel.documents.verdicts import ValidationDocument

        earlier = ValidationDocument.read(validation)
    if cluster is not None:
        from perfmodel.documents.hardware import read_cluster

        links = read_cluster(cluster)
    check_machine(machine, earlier, links)
    return Question(
        machine=machine,
        workload=open_workload(machine, workload),
        validation=earlier,
        cluster=links,
    )


def read_model(text: str, *, sequence: int | None) -> "NamedTransformer":
    """A transformer by name, or from a Hugging Face ``config.json``.

    Raises
    ------
    UsageError
        If there is no such name or file, or the closed forms do not cover the model.
    """
    from perfmodel.workload.transformer import TRANSFORMERS, NamedTransformer

    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return _from_config(path / "config.json" if path.is_dir() else path, sequence)
    refuse_unknown("--model", text, TRANSFORMERS)
    known = TRANSFORMERS[text]
    return NamedTransformer(name=text, shape=known.shape, sequence=sequence or known.sequence)


def _from_config(path: Path, sequence: int | None) -> "NamedTransformer":
    from perfmodel.trace.huggingface_config import DECODERS, LLAMA_FAMILY, Config, read_shape
    from perfmodel.workload.transformer import NamedTransformer, Transformer

    config = Config.read(path)
    shape = read_shape(config, families=DECODERS)
    if shape.head_width * shape.num_heads != shape.width:
        raise UsageError(
            f"{path}: head_dim x num_attention_heads must be hidden_size = {shape.width} for --layout, "
            f"got {shape.head_width * shape.num_heads}; the closed forms take square attention"
        )
    if sequence is not None and sequence > shape.num_positions:
        raise UsageError(
            f"--sequence-length: must be <= {shape.num_positions} for {path}, got {sequence}"
        )
    return NamedTransformer(
        name=str(config.get("_name_or_path", "") or path.resolve().parent.name or path.stem),
        shape=Transformer(
            layers=shape.num_layers,
            hidden=shape.width,
            heads=shape.num_heads,
            kv_heads=shape.num_key_value_heads,
            feed_forward=shape.inner_width,
            gated=shape.family in LLAMA_FAMILY,
            vocabulary=shape.vocabulary,
            tied=shape.tied,
            experts=max(shape.num_experts, 1),
            experts_per_token=shape.experts_per_token if shape.num_experts > 1 else 1,
        ),
        sequence=sequence or min(shape.num_positions, _LONGEST_DEFAULT),
    )

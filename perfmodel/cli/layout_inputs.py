"""What the commands about layouts read: a transformer and a calibration from runs; no torch."""

from pathlib import Path

from perfmodel.cli.options import at_least_one
from perfmodel.documents.inferred import InferredDocument
from perfmodel.errors import UsageError, did_you_mean
from perfmodel.predict_layout import OpenedMachine, opened_machine
from perfmodel.trace.huggingface_config import DECODERS, LLAMA_FAMILY, Config, read_shape
from perfmodel.workload.transformer import TRANSFORMERS, NamedTransformer, Transformer

_LONGEST_DEFAULT = 8192


def read_machine(profile: Path) -> OpenedMachine:
    """A calibration from runs.

    Raises
    ------
    CalibrationUnavailable
        If the file is missing, or is no calibration from runs.
    """
    return opened_machine(InferredDocument.read(profile).machine)


def read_model(text: str, *, sequence: int | None) -> NamedTransformer:
    """A transformer by name, or from a Hugging Face ``config.json``.

    Raises
    ------
    UsageError
        If there is no such name or file, or the closed forms do not cover the model.
    """
    if sequence is not None:
        at_least_one("--sequence-length", sequence)
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return _from_config(path / "config.json" if path.is_dir() else path, sequence)
    if text not in TRANSFORMERS:
        near = did_you_mean(text, TRANSFORMERS)
        raise UsageError(
            f"--model: must be a config.json or one of {', '.join(TRANSFORMERS)}, got {text!r}{near}"
        )
    known = TRANSFORMERS[text]
    return NamedTransformer(
        name=text, shape=known.shape, sequence=known.sequence if sequence is None else sequence
    )


def _from_config(path: Path, sequence: int | None) -> NamedTransformer:
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
        sequence=min(shape.num_positions, _LONGEST_DEFAULT) if sequence is None else sequence,
    )

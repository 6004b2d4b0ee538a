"""Configurations of trainers."""

from pathlib import Path

import pytest

from perfmodel.documents.training_configs import read_config, size_in_name
from perfmodel.errors import InvalidDocument, UsageError

FOUNDRY = """
variables:
  max_seq_len: 2048
run_name: mpt-7b-test   # the name says 7b
max_seq_len: ${variables.max_seq_len}
model:
  name: mpt_causal_lm
  d_model: 768
  n_heads: 12
  n_layers: 12
  vocab_size: 50368
  expansion_ratio: 4
global_train_batch_size: 256
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config:
  sharding_strategy: FULL_SHARD
callbacks:
  - speed_monitor
"""


def written(folder: Path, text: str, name: str = "train.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_llm_foundry(tmp_path: Path) -> None:
    found = read_config(written(tmp_path, FOUNDRY))
    assert found.shape == {
        "hidden": 768, "layers": 12, "heads": 12, "feed_forward": 3072, "vocabulary": 50368,
    }  # fmt: skip
    assert (found.sequence, found.micro_batch, found.global_batch) == (2048, 8, 256)
    assert (found.precision, found.strategy) == ("bf16", "fsdp")
    assert size_in_name(found.name) == pytest.approx(7e9)


def test_axolotl(tmp_path: Path) -> None:
    text = (
        "base_model: NousResearch/Llama-2-7b-hf\nsequence_len: 4096\nmicro_batch_size: 2\n"
        "gradient_accumulation_steps: 4\nbf16: true\nadapter: lora\ndeepspeed: zero3.json\n"
    )
    found = read_config(written(tmp_path, text))
    assert (found.model, found.sequence, found.accumulation) == (
        "NousResearch/Llama-2-7b-hf",
        4096,
        4,
    )
    assert (found.precision, found.strategy, found.frozen) == ("bf16", "zero3", True)


def test_torchtitan(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
    text += "[parallelism]\ndata_parallel_shard_degree = -1\n"
    found = read_config(written(tmp_path, text, "train.toml"))
    assert (found.model, found.micro_batch, found.sequence) == ("llama3 8B", 1, 8192)
    assert found.strategy == "fsdp"


def test_lightning(tmp_path: Path) -> None:
    text = "trainer:\n  precision: 16-mixed\n  strategy: ddp\n  accumulate_grad_batches: 2\ndata:\n  batch_size: 32\n"
    found = read_config(written(tmp_path, text))
    assert (found.precision, found.strategy, found.accumulation) == ("bf16", "ddp", 2)
    assert found.micro_batch == 32


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mpt-7b", 7e9),
        ("mixtral-8x7b", 56e9),
        ("gpt2-125m", 125e6),
        ("resnet50", None),
        ("7b of 13b", None),
    ],
)
def test_sizes_in_names(name: str, size: float | None) -> None:
    assert size_in_name(name) == size


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match="must hold lines KEY: VALUE"):
        read_config(written(tmp_path, "- just\n- a list\n"))
    with pytest.raises(UsageError, match="micro_batch_size must be a whole number"):
        read_config(written(tmp_path, "micro_batch_size: many\n"))

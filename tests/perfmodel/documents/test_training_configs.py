"""Configurations of trainers."""

from pathlib import Path

import pytest

from perfmodel.documents.training_configs import TrainingConfig, read_config, size_in_name
from perfmodel.errors import InvalidDocument, UsageError
from tests.existing import existing

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


AXOLOTL = """
base_model: NousResearch/Llama-2-7b-hf
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
adapter: lora
deepspeed: zero3.json
"""
TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
"""
LIGHTNING = """
trainer:
  precision: 16-mixed
  strategy: ddp
  accumulate_grad_batches: 2
data:
  batch_size: 32
"""


INLINE = """
max_seq_len: 2048
model: {name: mpt_causal_lm, d_model: 768, n_heads: 12, n_layers: 12, attn_config: {clip_qkv: 6, x: [1, 2]}}
fsdp_config: {sharding_strategy: SHARD_GRAD_OP}
"""
OVERRIDES = """
parameters:
  global_train_batch_size: 64
  model:
    name: hf_causal_lm
    pretrained_model_name_or_path: org/Llama-2-7b-hf
    config_overrides:
      hidden_size: 2048
      num_hidden_layers: 4
      num_attention_heads: 16
"""
LIGHTNING_CLI = """
trainer: {precision: bf16-mixed, strategy: deepspeed_stage_2}
model:
  class_path: mine.Gpt
  init_args: {n_embd: 512, n_layer: 6, n_head: 8}
data:
  init_args:
    batch_size: 16
"""
FACTORY = """
model_name_or_path: org/Meta-Llama-3-8B
finetuning_type: lora
cutoff_len: 1024
per_device_train_batch_size: 8
deepspeed: examples/deepspeed/ds_z3_config.json
"""


def shape_of(found: TrainingConfig) -> tuple[int, ...]:
    return tuple(existing(found.shape)[key] for key in ("hidden", "layers", "heads"))


def test_nested_and_inline_blocks(tmp_path: Path) -> None:
    inline = read_config(written(tmp_path, INLINE))
    assert (shape_of(inline), inline.strategy) == ((768, 12, 12), "zero2")
    over = read_config(written(tmp_path, OVERRIDES))
    assert (shape_of(over), over.global_batch) == ((2048, 4, 16), 64)
    cli = read_config(written(tmp_path, LIGHTNING_CLI))
    assert (shape_of(cli), cli.micro_batch, cli.strategy) == ((512, 6, 8), 16, "zero2")


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        (
            FACTORY,
            "train.yaml",
            {
                "model": "org/Meta-Llama-3-8B",
                "sequence": 1024,
                "micro_batch": 8,
                "strategy": "zero3",
                "frozen": True,
            },
        ),
        (
            AXOLOTL,
            "train.yaml",
            {
                "model": "NousResearch/Llama-2-7b-hf",
                "sequence": 4096,
                "accumulation": 4,
                "precision": "bf16",
                "strategy": "zero3",
                "frozen": True,
            },
        ),
        (
            TORCHTITAN,
            "train.toml",
            {"model": "llama3 8B", "micro_batch": 1, "sequence": 8192, "strategy": "fsdp"},
        ),
        (
            LIGHTNING,
            "train.yaml",
            {"precision": "bf16", "strategy": "ddp", "accumulation": 2, "micro_batch": 32},
        ),
    ],
    ids=["llama-factory", "axolotl", "torchtitan", "lightning"],
)
def test_other_trainers(tmp_path: Path, text: str, name: str, told: dict[str, object]) -> None:
    found = read_config(written(tmp_path, text, name))
    assert {key: getattr(found, key) for key in told} == told


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

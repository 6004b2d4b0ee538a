"""Configurations of trainers."""

from dataclasses import asdict
from pathlib import Path

import pytest

from perfmodel.documents.importers import read_config, size_in_name

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


SIZES = ("hidden", "layers", "heads", "feed_forward", "vocabulary")
FROZEN = ("model", "sequence", "strategy", "frozen")
LLAMA_2, LLAMA_3 = "NousResearch/Llama-2-7b-hf", "org/Meta-Llama-3-8B"


@pytest.mark.parametrize(
    ("text", "names", "told"),
    [
        (FOUNDRY, SIZES, (768, 12, 12, 3072, 50368)),
        (FOUNDRY, ("sequence", "micro_batch", "global_batch"), (2048, 8, 256)),
        (FOUNDRY, ("precision", "strategy"), ("bf16", "fsdp")),
        (FOUNDRY, ("name",), ("mpt-7b-test train mpt_causal_lm",)),
        (INLINE, (*SIZES[:3], "strategy"), (768, 12, 12, "zero2")),
        (OVERRIDES, (*SIZES[:3], "global_batch"), (2048, 4, 16, 64)),
        (LIGHTNING_CLI, (*SIZES[:3], "micro_batch", "strategy"), (512, 6, 8, 16, "zero2")),
        (FACTORY, (*FROZEN, "micro_batch"), (LLAMA_3, 1024, "zero3", True, 8)),
        (AXOLOTL, (*FROZEN, "accumulation"), (LLAMA_2, 4096, "zero3", True, 4)),
        (AXOLOTL, ("precision",), ("bf16",)),
        (TORCHTITAN, (*FROZEN, "micro_batch"), ("llama3 8B", 8192, "fsdp", False, 1)),
        (LIGHTNING, ("precision", "strategy"), ("bf16", "ddp")),
        (LIGHTNING, ("accumulation", "micro_batch"), (2, 32)),
        (LIGHTNING.replace("16-mixed", "32-true"), ("precision",), ("fp32",)),
    ],
)
def test_every_trainer(
    tmp_path: Path, text: str, names: tuple[str, ...], told: tuple[object, ...]
) -> None:
    name = "train.toml" if text is TORCHTITAN else "train.yaml"
    found = asdict(read_config(written(tmp_path, text, name)))
    known = found | (found["shape"] or {})
    assert tuple(known[name] for name in names) == told


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mpt-7b-test train mpt_causal_lm", 7e9),
        ("mixtral-8x7b", 56e9),
        ("gpt2-125m", 125e6),
        ("resnet50", None),
        ("7b of 13b", None),
    ],
)
def test_sizes_in_names(name: str, size: float | None) -> None:
    assert size_in_name(name) == size

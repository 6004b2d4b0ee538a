"""Configurations of trainers, and logs of nccl-tests."""

from dataclasses import asdict
from pathlib import Path

import pytest

from perfmodel.documents.importers import (
    read_config,
    read_device_names,
    read_nccl_paste,
    size_in_name,
)
from perfmodel.errors import InvalidDocument
from perfmodel.machine.measured import MeasuredCollective

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


NCCL = """# nccl-tests version 2.19.6
#  Rank  0 Group  0 Pid    11 on    node0 device  0 [0x01] NVIDIA H100
#  Rank  1 Group  0 Pid    12 on    node1 device  0 [0x01] NVIDIA H100
#
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)
        1024           256     float     sum      -1    20.00    0.05    0.05       0    20.10    0.05
   1_048_576        262144     float     sum      -1    50.00   20.97   20.97       0    51.00   20.56
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 10.5
"""


def log(folder: Path, text: str) -> Path:
    path = folder / "log"
    path.write_text(text)
    return path


def read_one(path: Path, collective: str | None = None) -> MeasuredCollective:
    (found,), _ = read_nccl_paste(path, collective=collective)
    return found


@pytest.mark.parametrize(
    "text",
    [
        *(NCCL.replace("20.97       0", f"20.97       {wrong}") for wrong in ("N/A", "0e+00")),
        # older versions print the largest rounding in place of wrong elements
        NCCL.replace("#wrong", " error").replace("20.97       0", "20.97   2e-06"),
    ],
)
def test_builds_of_every_age_are_read(tmp_path: Path, text: str) -> None:
    found = read_one(log(tmp_path, text), collective="all_reduce")
    assert found.points[-1].time_s == pytest.approx(50e-6)


def test_figures_too_wide_for_their_column_have_an_exponent(tmp_path: Path) -> None:
    """12 s for 12 TB: 1.2e+07 us and 1e+06 kB/us."""
    row = "12000000000000 3000000000000 float sum -1 1.2e+07 1000.0 1000.0 0"
    wide = NCCL.replace("# Out of bounds", f"  {row}\n# Out of bounds")
    assert read_one(log(tmp_path, wide), collective="all_reduce").points[-1].time_s == 12.0


@pytest.mark.parametrize(
    ("reduction", "root", "rates", "collective"),
    [
        ("sum", -1, "50.00 20.97 20.97", "all_reduce"),
        ("sum", -1, "50.00 20.97 10.48", "reduce_scatter"),
        ("sum", -1, "1048.6 1.00 1.00", "all_reduce"),
        ("none", 0, "50.00 20.97 20.97", "broadcast"),
    ],
)
def test_columns_tell_what_ran(
    tmp_path: Path, reduction: str, root: int, rates: str, collective: str
) -> None:
    told = NCCL.replace("sum      -1", f"{reduction}      {root}")
    told = told.replace("50.00   20.97   20.97", rates)
    found = read_one(log(tmp_path, told))
    assert (found.collective, found.world_size, found.num_nodes) == (collective, 2, 2)


@pytest.mark.parametrize(
    ("program", "collective"),
    [
        ("alltoall_perf", "all_to_all"),
        ("nccl_all_reduce_perf", "all_reduce"),
        ("rccl_all_gather_perf", "all_gather"),
        ("reduce_scatter_perf", "reduce_scatter"),
    ],
)
def test_programs_are_known_by_the_end_of_their_names(
    tmp_path: Path, program: str, collective: str
) -> None:
    named = f"# Collective test starting: {program}\n{NCCL.replace('sum ', 'none')}"
    assert read_one(log(tmp_path, named)).collective == collective


BOTH = "      20.97   {busbw}      0   51.00   20.56   20.56   {wrong}"


@pytest.mark.parametrize(
    ("reduction", "busbw", "wrong", "collective"),
    [
        ("none", 10.48, "0", "all_gather"),
        ("none", 10.48, "N/A", "all_to_all"),
        ("sum", 20.97, "N/A", "send_recv"),
        ("sum", 20.97, "0", "all_reduce"),
    ],
)
def test_what_cannot_run_in_place_has_no_count_of_errors_there(
    tmp_path: Path, reduction: str, busbw: float, wrong: str, collective: str
) -> None:
    told = NCCL.replace("sum      -1", f"{reduction}      -1")
    before, row = told.split("20.97   20.97", 1)
    sides = BOTH.format(busbw=busbw, wrong=wrong)
    told = before + sides.lstrip() + "\n" + row.partition("\n")[2]
    assert read_one(log(tmp_path, told)).collective == collective


@pytest.mark.parametrize(
    "before",
    ["[1,0]<stdout>:", "0: ", "2026-05-02T10:11:12.123456789Z ", "> ", "[1,0]<stdout>: > "],
)
def test_what_launchers_and_quoting_put_before_lines_is_cut(tmp_path: Path, before: str) -> None:
    text = "\n".join(before + line for line in NCCL.splitlines())
    path = log(tmp_path, text.replace("     ", "    \u00a0"))
    assert read_one(path).points[-1].time_s == pytest.approx(50e-6)
    assert read_device_names(path) == ("NVIDIA H100",)


NAMED = "# Collective test starting: all_reduce_perf\n" + NCCL
GATHER = "$ mpirun -np 2 ./build/all_gather_perf -b 1K\n# nThread 1\n" + NCCL.replace(
    "sum ", "none"
)


def test_a_paste_of_several_tests(tmp_path: Path) -> None:
    path = log(
        tmp_path, GATHER.partition("# Out of")[0] + NCCL + NAMED.partition("# Out of")[0][:-20]
    )
    found, notes = read_nccl_paste(path)
    assert [each.collective for each in found] == ["all_gather", "all_reduce", "all_reduce"]
    assert [len(each.points) for each in found] == [2, 2, 1]  # the last row is cut
    assert [note.rpartition(" is ")[2] for note in notes] == ["1 MiB", "1 KiB"]


def test_a_paste_of_too_many_rows_is_refused(tmp_path: Path) -> None:
    assert len(read_nccl_paste(log(tmp_path, NAMED * 5_000))[0]) == 5_000
    with pytest.raises(InvalidDocument, match="at most 10,000 rows, got 10,002; check parts"):
        read_nccl_paste(log(tmp_path, NAMED * 5_001))

"""Makes the machines that come with perfmodel, and judges speed-ups of their nodes.

    python -m tests.benchmarks.machines FOLDER              judge: models and devices left out, eight GPUs from one
    python -m tests.benchmarks.machines FOLDER --write      make perfmodel/documents/machines, the prior and
                                                            constants of nn.DataParallel

``FOLDER`` holds published tables: single_device_steps.csv.gz of single cards, throughput.csv and nccl_times.csv.gz of
datacentre machines. Tracing 500 steps takes some 8 minutes of one processor, the fits one.
``perfmodel validate published --sources single_device_steps`` judges the cards.

Rows of datacentre machines are of one GPU in 16 bit, and in fp32 where the device has
no TF32. What sources do not print: images have 224 pixels, SQuAD samples 384 tokens; ConvNets of DeepLearningExamples
run channels last; their rates, printed without a batch, are taken as those of 128 samples. Left out: EfficientNet-B4,
of which no device holds 128 samples, and pre-training with 512 tokens, which would exceed the fp32 peak of a V100.
"""

import argparse
import hashlib
import json
import lzma
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import numpy as np
import typer

import perfmodel as pm
from calibrate.random_models import draw
from calibrate.step_fit import DeviceFit, StepRow, fit_device, predicted_s, prior_over
from calibrate.step_table import (
    Setting,
    TableRow,
    TracedTable,
    by_version,
    machine_from_steps,
    traced_tables,
)
from perfmodel.cost.step_law import CONSTANTS, ConstantPrior
from perfmodel.documents import Provenance
from perfmodel.documents.hardware import find_device, open_cluster, shipped_catalogue
from perfmodel.documents.profile import ProfileDocument
from perfmodel.files import read_table, write_atomically
from perfmodel.machine import Cluster
from perfmodel.machine.measured import CollectiveProfile, CurvePoint, MeasuredMachine, MemoryFormat
from validate.published import SOURCES, devices, threads
from validate.published.harness import Table, read_rows

_ROOT: Final = Path(__file__).parents[2] / "perfmodel"
_RECORDS: Final = Path(__file__).parents[2] / "docs" / "records"
_CARDS: Final = "single_device_steps"
_SOURCES: Final = {
    "huggingface/pytorch-image-models": "huggingface/pytorch-image-models @aa4b5850",
    "ryujaehun/pytorch-gpu-benchmark": "ryujaehun/pytorch-gpu-benchmark @3f47a9e2",
}
_STEPS: Final = "throughput.csv"
_COLLECTIVES: Final = "nccl_times.csv.gz"
_LAMBDA: Final = "lambdal/deeplearning-benchmark"
_NVIDIA: Final = "NVIDIA/DeepLearningExamples"
_KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter")
_ERROR: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Where the terms of a machine come from."""

    device: str
    """In the catalogue."""
    hardware: tuple[str, ...]
    """Names of it in the tables of steps."""
    collectives: str | None = None
    """Name in the table of collectives: links between the eight GPUs of its node."""
    nodes: tuple[str, str, str] | None = None
    """Links inside and between as many nodes as are predicted, what they are called, and who says so."""
    records: str | None = None
    """Of this repository, instead of published steps."""


MACHINES: Final = {
    "a10": Made(device="a10", hardware=("LambdaCloud A10",)),
    "a100-pcie": Made(device="a100-pcie-40", hardware=("LambdaCloud A100 40GB PCIe",)),
    "dgx-a100": Made(
        device="a100-sxm4-80",
        hardware=("A100 80GB SXM4", "DGX A100"),
        collectives="NVIDIA A100-SXM4-80GB",
        nodes=(
            "8 nvlink3, 2048 ib-hdr x8",
            "200 Gb/s InfiniBand per GPU",
            "the user guide of the DGX A100",
        ),
    ),
    "dgx-h100": Made(
        device="h100-sxm5",
        hardware=("H100 80GB SXM5", "Dell H100 80GB SXM5", "DellTexas H100 80GB SXM5"),
        collectives="NVIDIA H100 80GB HBM3",
        nodes=(
            "8 nvlink4, 2048 ib-ndr x8",
            "400 Gb/s InfiniBand per GPU",
            "the user guide of the DGX H100",
        ),
        records="dgx-h100",
    ),
    "dgx-1-v100": Made(device="v100-sxm2-32", hardware=("DGX-1",)),
}

#: Part of a source's name of a model -> ours, pixels, tokens, optimizer, memory format in 16 bit.
_MODELS: Final = {
    "resnet50": ("torchvision:resnet50", 224, None, "sgd", "contiguous"),
    "bert_base_squad": ("bert-base.json", None, 384, "adamw", "contiguous"),
    "bert_large_squad": ("bert-large.json", None, 384, "adamw", "contiguous"),
    "LanguageModeling/BERT": ("bert-large.json", None, 384, "adamw", "contiguous"),
    "resnext101-32x4d": ("timm:resnext101_32x4d", 224, None, "sgd", "channels_last"),
    "[efficientnet-b0]": ("timm:efficientnet_b0", 224, None, "sgd", "channels_last"),
}
_BERT: Final = {
    file: {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    }
    for file, hidden, layers in (("bert-base.json", 768, 12), ("bert-large.json", 1024, 24))
}
#: Hugging Face configs; the last is the reference model.
_CONFIGS: Final = _BERT | {
    "gpt2.json": {
        "model_type": "gpt2",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
}
#: Samples of a micro-batch, and tokens, where a source prints none or those of a whole step.
_UNPRINTED_BATCH: Final = 128
_UNPRINTED_TOKENS: Final = 8192
_TOKENS: Final = 128
_LARGEST_BATCH: Final = 1024
_PRECISIONS: Final = {"AMP/FP16": "amp fp16", "FP32": "fp32"}


#: Real GPUs that campaigns of this repository ran on: folder of the records -> device in the catalogue.
RECORDED: Final = {"dgx-h100": "h100-sxm5", "h200": "h200-sxm"}
#: Files of the records and what counts in them.
_FILES: Final = {"loops": "loop", "calibration": "step"}
_REFERENCES: Final = {
    "lenet": ("lenet", None, "fp32", "sgd", "contiguous"),
    "resnet50": ("torchvision:resnet50", 224, "amp bf16", "adamw", "channels_last"),
    "gpt2": ("gpt2.json", None, "amp bf16", "adamw", "contiguous"),
}


def recorded_rows(name: str, configs: Path) -> list[TableRow]:
    """Steps of a real GPU: plain loops, and calibrated steps of settings that no loop ran; means of their runs."""
    found: dict[Setting, list[float]] = {}
    looped: set[Setting] = set()
    for file, kind in _FILES.items():
        text = lzma.decompress((_RECORDS / name / f"{file}.jsonl.xz").read_bytes()).decode()
        for record in map(json.loads, text.splitlines()):
            run = record.get("setting", {})
            if (
                record["kind"] != kind
                or run["synchronisation"] != "none"
                or run["accumulation"] > 1
            ):
                continue
            setting = _setting(run["workload"], run["micro_batch"], configs)
            if kind == "loop":
                looped.add(setting)
                found.setdefault(setting, []).append(record["step_s"])
            elif setting not in looped:
                mean_s = statistics.fmean(record["ranks"][0]["step_s"])
                found.setdefault(setting, []).append(mean_s)
    return [
        TableRow(
            where=f"docs/records/{name}: {setting.model}, batch {setting.batch}",
            setting=setting,
            family=setting.model,
            step_s=statistics.fmean(seen),
        )
        for setting, seen in found.items()
    ]


def _setting(workload: str, batch: int, configs: Path) -> Setting:
    """A reference model, or one that was drawn at random."""
    if workload in _REFERENCES:
        model, image, precision, optimizer, shape = _REFERENCES[workload]
        model = str(configs / model) if model in _CONFIGS else model
    else:
        seed, index = workload.split(maxsplit=1)[0].split("-")
        drawn = draw(int(seed), int(index), on_gpu=True, with_timm=False)
        package, name, image = drawn.sketch.published or ("", "", None)
        model = f"{package}:{name}" if name else drawn.write_file(configs)
        precision = "fp32" if drawn.precision == "fp32" else f"amp {drawn.precision}"
        optimizer, shape = drawn.optimizer, "contiguous"
    return Setting(
        model=model,
        batch=batch,
        image=image,
        sequence=None,
        precision=precision,
        memory_format="channels_last" if shape == "channels_last" else "contiguous",
        optimizer=optimizer,
        torch="2.11",
    )


def rows_of(folder: Path, made: Made, configs: Path, *, gpus: int = 1) -> list[TableRow]:
    """Steps of a machine; what several hosts measured is their median."""
    found: dict[Setting, list[tuple[int, float]]] = {}
    for line, cells in read_table(folder / _STEPS):
        if cells["gpus"] == str(gpus) and cells["hardware"] in made.hardware:
            for setting, step_s in _read(cells, configs, gpus):
                found.setdefault(setting, []).append((line, step_s))
    return [
        TableRow(
            where=f"{_STEPS}: line {seen[0][0]}",
            setting=setting,
            family=Path(setting.model).stem,
            step_s=statistics.median(step_s for _, step_s in seen),
        )
        for setting, seen in found.items()
    ]


def _read(cells: dict[str, str], configs: Path, gpus: int) -> Iterator[tuple[Setting, float]]:
    """The setting and the time of a row that one of our models stands for."""
    is_ours = cells["source"] == _LAMBDA or (
        cells["source"] == _NVIDIA and cells["framework"] == "PyTorch"
    )
    known = [value for name, value in _MODELS.items() if cells["model"].endswith(name)]
    precision = _PRECISIONS.get(cells["precision"])
    if not (is_ours and known and precision and cells["throughput"]):
        return
    model, image, tokens, optimizer, memory_format = known[0]
    if "pre-training" in cells["notes"]:
        # Many micro-batches make a step, printed as its batch on DGX-1: the optimizer is a small part.
        optimizer, tokens = "none", int(cells["seq_len"])
        if tokens != _TOKENS:
            return
    batch = int(float(cells["micro_batch"] or 0))
    if tokens and batch > _LARGEST_BATCH:
        batch = _UNPRINTED_TOKENS // tokens
    elif image and not batch:
        batch = _UNPRINTED_BATCH
    if not batch:
        return
    in_16_bit = precision != "fp32"
    shape: MemoryFormat = (
        "channels_last" if in_16_bit and memory_format == "channels_last" else "contiguous"
    )
    setting = Setting(
        model=str(configs / model) if model in _BERT else model,
        batch=batch,
        image=image,
        sequence=tokens,
        precision=precision,
        memory_format=shape,
        optimizer=optimizer,
        torch="1",
    )
    yield setting, gpus * batch / float(cells["throughput"])


def collectives_of(folder: Path, device: str) -> tuple[tuple[CollectiveProfile, ...], str]:
    """Groups of 2, 4 and 8 in one node at the newest version of NCCL in the table, and that version.

    Rows of a size are of 16 bit and of int8 by turns. Gradients are never int8, which no switch adds.
    """
    times: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    for _, cells in read_table(folder / _COLLECTIVES):
        if cells["device"] == device and cells["nodes"] == "1" and cells["nccl"]:
            key = cells["nccl"], cells["collective"], int(cells["gpus"])
            of_one = times.setdefault(key, {})
            of_one.setdefault(int(cells["size_bytes"]), []).append(float(cells["time_us"]) * 1e-6)
    newest = max((v for v, _, _ in times), key=lambda text: [int(part) for part in text.split(".")])
    profiles = [
        CollectiveProfile(
            collective=kind,
            world_size=ranks,
            points=tuple(
                CurvePoint(at=size, time_s=float(np.median(seen[::2])), relative_error=_ERROR)
                for size, seen in sorted(of_one.items())
            ),
        )
        for (version, kind, ranks), of_one in sorted(times.items())
        if version == newest and kind in _KINDS
    ]
    return tuple(profiles), newest


class Rows(NamedTuple):
    """Rows of one device."""

    traced: TracedTable
    newest: list[TableRow]
    older: list[TableRow]
    """Of earlier versions of PyTorch."""


def machine(
    name: str, folder: Path, rows: Rows, priors: Mapping[str, ConstantPrior]
) -> tuple[MeasuredMachine, list[str]]:
    """A machine and what to know of it."""
    made = MACHINES[name]
    found, notes = machine_from_steps(
        rows.traced,
        find_device(made.device, shipped_catalogue()),
        priors=priors,
        source=f"docs/records/{made.records}" if made.records else f"{_LAMBDA}, {_NVIDIA}",
        newest=rows.newest,
    )
    if made.collectives is None:
        return found, notes
    groups, version = collectives_of(folder, made.collectives)
    assert found.device_costs is not None
    costs = replace(found.device_costs, versions={**found.device_costs.versions, "nccl": version})
    found = replace(
        found,
        collectives=groups,
        ranks_per_node=max(group.world_size for group in groups),
        device_costs=costs,
        environment={"versions": dict(costs.versions)},
        cluster=nodes_of(made),
    )
    return found, notes


def nodes_of(made: Made) -> Cluster | None:
    """Nodes of a machine as its data sheet joins them: nobody measured those links."""
    if made.nodes is None:
        return None
    links, name, source = made.nodes
    found = open_cluster(links)
    inside, between = found.tiers
    between = replace(between, source=f"{between.source}, {source}")
    return replace(found, name=name, tiers=(replace(inside, source="measured"), between))


def judge_nodes(name: str, folder: Path, configs: Path) -> None:
    """Print speed-ups of eight GPUs over one: published, and predicted by the machine that ships."""
    made = MACHINES[name]
    alone = {_likeness(row.setting): row for row in rows_of(folder, made, configs)}
    for row in rows_of(folder, made, configs, gpus=8):
        one = alone.get(_likeness(row.setting))
        if one is None or row.setting.optimizer == "none":
            continue
        setting = row.setting
        workload = pm.trace(
            setting.model,
            micro_batch=setting.batch,
            sequence_length=setting.sequence,
            precision="fp16",
            optimizer=setting.optimizer,
            device_kind="as-cuda",
        )
        found = pm.predict(name, workload, devices=[8], batch=setting.batch).points[0].speedup
        assert found is not None
        rates = [each.setting.batch / each.step_s for each in (row, one)]
        typer.echo(
            f"    {Path(setting.model).stem}, batch {setting.batch}: published {8 * rates[0] / rates[1]:.2f}, "
            f"predicted {found.nominal:.2f} [{found.p5:.2f}-{found.p95:.2f}]"
        )


def _likeness(setting: Setting) -> tuple[object, ...]:
    return (*setting.traced, setting.memory_format)


def rows_of_all(cards: Table, folder: Path, configs: Path) -> dict[str, Rows]:
    """Rows of single cards and of recorded GPUs by device, of other machines by name."""
    tables = devices.public_rows(cards)
    tables |= {device: recorded_rows(name, configs) for name, device in RECORDED.items()}
    tables |= {
        name: rows_of(folder, made, configs) for name, made in MACHINES.items() if not made.records
    }
    by_age = {name: by_version(of_one) for name, of_one in tables.items()}
    traced = traced_tables({name: newest for name, (newest, _) in by_age.items()})
    for name, (steps, notes) in traced.items():
        typer.echo(f"{name}: {len(steps)} rows, {len(notes)} not traced", err=True)
    return {name: Rows(traced[name], *of_one) for name, of_one in by_age.items()}


def judge_left_out(rows: Mapping[str, Sequence[StepRow]], fits: Mapping[str, DeviceFit]) -> None:
    """Print how wrong the steps of a device are of which no row is known."""
    for name, sheet in devices.sheets_of(list(rows)).items():
        ours = predicted_s(
            rows[name], fit_device((), sheet, devices.priors_of(name, rows, fits)), sheet
        )
        errors = ours / np.array([row.step_s for row in rows[name]]) - 1
        typer.echo(
            f"{name} left out, {len(errors)} rows: MAPE {np.abs(errors).mean():.1%}, "
            f"mean {errors.mean():+.1%}, worst {np.abs(errors).max():.0%}"
        )


def write_priors(fits: Mapping[str, DeviceFit]) -> None:
    """Write the prior of the next device, of a generation that is known and of any other."""
    lines = [
        "# Prior of the constants of perfmodel/cost/step_law.py on a device without steps: median and standard",
        "# deviation of the logarithm. A generation has what it says otherwise.",
        "# Made by python -m tests.benchmarks.machines FOLDER --write.",
    ]
    said: dict[str, str] = {}
    for generation in ("", *sorted({fit.generation for fit in fits.values()})):
        priors = prior_over(list(fits.values()), generation)
        words = {n: f"[{priors[n].median:.5g}, {priors[n].log_sigma:.4g}]" for n in CONSTANTS}
        said = said or words
        lines.append(f'["{generation}"]' if generation else "[constants]")
        lines += [f'"{n}" = {words[n]}' for n in CONSTANTS if not generation or words[n] != said[n]]
    write_atomically(_ROOT / "cost" / "device_priors.toml", "\n".join(lines) + "\n")


def write_threads(folder: Path) -> None:
    """Write the constants of nn.DataParallel on hosts of every card, and of others."""
    found = threads.thread_constants(SOURCES["data_parallel"].open("data_parallel", folder))
    lines = [
        "# Constants of nn.DataParallel in perfmodel/cost/step_law.py by card, and the absolute error in log that one",
        "# undisturbed step in ten of other models exceeds; of others, on the card that the rest know least.",
        "# Made by python -m tests.benchmarks.machines FOLDER --write.",
    ]
    for name, values in found.items():
        lines += [f"[{name}]", *(f"{key} = {value:.5g}" for key, value in values.items())]
    write_atomically(_ROOT / "cost" / "threads.toml", "\n".join(lines) + "\n")


def make_cards(
    path: Path,
    rows: Mapping[str, Rows],
    steps: Mapping[str, Sequence[StepRow]],
    fits: Mapping[str, DeviceFit],
) -> None:
    """Write the machines of single cards."""
    sources = {devices.device_of(row): row["source"] for row in read_rows(path, columns=())}
    for name, source in sources.items():
        found, notes = machine_from_steps(
            rows[name].traced,
            find_device(name, shipped_catalogue()),
            priors=devices.priors_of(name, steps, fits),
            source=_SOURCES[source],
            newest=rows[name].newest,
            older=rows[name].older,
        )
        _write(name, found, [path])
        typer.echo("\n  ".join((name, *notes[-2:])))


def tables_of(made: Made, folder: Path) -> list[Path]:
    """Files that hold the steps of a machine."""
    if made.records is None:
        return [folder / _STEPS]
    return [_RECORDS / made.records / f"{file}.jsonl.xz" for file in _FILES]


def sha256_of(tables: Sequence[Path]) -> str:
    """SHA-256 of files one after another, as ``cat FILES | sha256sum`` says it."""
    return hashlib.sha256(b"".join(table.read_bytes() for table in tables)).hexdigest()


def _write(name: str, found: MeasuredMachine, tables: Sequence[Path]) -> None:
    made = Provenance.of_answer(host_fingerprint="none: steps of others depend on no host")
    command = ("python", "-m", "tests.benchmarks.machines")
    document = ProfileDocument(
        provenance=made.model_copy(update={"command_line": command}),
        observations_sha256=sha256_of(tables),
        machine=found,
    )
    document.write(_ROOT / "documents" / "machines" / f"{name}.json")


def main() -> None:
    """Judge, or write what ships."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with TemporaryDirectory() as configs:
        for file, values in _CONFIGS.items():
            (Path(configs) / file).write_text(json.dumps(values), encoding="utf-8")
        _make(asked.folder, Path(configs), writes=asked.write)


def _make(folder: Path, configs: Path, *, writes: bool) -> None:
    table = SOURCES[_CARDS].open(_CARDS, folder)
    rows = rows_of_all(table, folder, configs)
    steps = {
        MACHINES[name].device if name in MACHINES else name: of_one.traced.steps
        for name, of_one in rows.items()
    }
    fits = devices.fits_of(steps, devices.sheets_of(list(steps)))
    judge_left_out(steps, fits)
    if writes:
        write_priors(fits)
        write_threads(folder)
        make_cards(table.path, rows, steps, fits)
    for name, made in MACHINES.items():
        of_one = rows[made.device if made.records else name]
        found, notes = machine(name, folder, of_one, devices.priors_of(made.device, steps, fits))
        assert found.device_costs is not None
        typer.echo(f"{name}: {found.device_costs.num_rows} rows")
        for error in found.device_costs.left_out:
            typer.echo(f"    {error}")
        typer.echo("    " + "\n    ".join(notes))
        if writes:
            _write(name, found, tables_of(made, folder))
        elif made.collectives:
            judge_nodes(name, folder, configs)


if __name__ == "__main__":
    main()

"""Models of timm and Hugging Face in a plain loop, against a machine by name: what its users will see.

None of these models was timed for the machine, and no fit reads these loops.

    python -m tests.benchmarks.strangers draw SEED          cases, drawn at random, as JSON
    python -m tests.benchmarks.strangers measure CASES      on a GPU: a line of JSON for each, in a process of its own
    python -m tests.benchmarks.strangers judge h100 [RUNS]  predicted beside measured, here, without a GPU

``measure`` needs timm and transformers, and nothing of perfmodel.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

RUNS: Final = Path(__file__).parents[2] / "docs" / "records" / "strangers" / "runs.jsonl"
_NUM_DRAWN: Final = 12
_PARAMETERS: Final = (3e6, 9e7)
_BATCHES: Final = (8, 32, 64, 128)
#: Steps before a run, runs, and how long one takes at least. [s]
_WARM_UP: Final = 8
_NUM_RUNS: Final = 3
_RUN_S: Final = 0.6
#: Usual fine-tuning and pre-training of Hugging Face: model, samples, precision; AdamW.
_HUGGING_FACE: Final = (
    ("bert", 32, "bf16"),
    ("llama", 8, "bf16"),
    ("t5", 16, "fp32"),
    ("vit", 64, "bf16"),
    ("distilbert", 4, "fp32"),
)
_NAMES: Final = {name for name, *_ in _HUGGING_FACE}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def drawn(seed: int) -> Iterator[dict[str, Any]]:
    """Cases: models of timm of as many families, each with a batch, precision and optimizer; then Hugging Face's."""
    import timm  # noqa: PLC0415 - takes a second, and only two commands need it

    choose, families = random.Random(seed), set[str]()  # noqa: S311 - draws models
    # Models that differ from another in their weights alone.
    unlike = ("test_", "distilled", "_fx", "naflex", "dino", "clip", "siglip")
    names = [n for n in timm.list_models() if not any(word in n for word in unlike)]
    while len(families) < _NUM_DRAWN:
        name = choose.choice(names)
        family = name.split("_")[0].rstrip("0123456789")
        if family in families:
            continue
        with torch.device("meta"):
            try:
                model = timm.create_model(name, num_classes=1000)
            except (NotImplementedError, RuntimeError):  # it needs content of its tensors
                continue
        least, most = _PARAMETERS
        if model.default_cfg["input_size"] != (3, 224, 224):
            continue
        if not least < sum(p.numel() for p in model.parameters()) < most:
            continue
        families.add(family)
        yield {
            "seed": seed,
            "model": name,
            "batch": choose.choice(_BATCHES),
            "precision": choose.choice(("fp32", "bf16")),
            "optimizer": choose.choice(("sgd", "adamw")),
        }
    for name, batch, precision in _HUGGING_FACE:
        yield {"model": name, "batch": batch, "precision": precision, "optimizer": "adamw"}


def of_hugging_face(name: str, batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model without weights of others, and a batch with labels."""
    hf: Any = import_module("transformers")  # need not be installed

    def tokens(length: int, most: int) -> torch.Tensor:
        return torch.randint(0, most, (batch, length))

    if name == "bert":
        ids = tokens(512, 30_522)
        return hf.BertForMaskedLM(hf.BertConfig()), {"input_ids": ids, "labels": ids.clone()}
    if name == "distilbert":
        found = {"input_ids": tokens(128, 30_522), "labels": torch.randint(0, 2, (batch,))}
        return hf.DistilBertForSequenceClassification(hf.DistilBertConfig()), found
    if name == "llama":
        config = hf.LlamaConfig(
            vocab_size=32_000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
        )
        ids = tokens(1024, 32_000)
        return hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}
    if name == "t5":
        config = hf.T5Config(decoder_start_token_id=0, pad_token_id=0)
        found = {"input_ids": tokens(256, 32_128), "labels": tokens(64, 32_128)}
        return hf.T5ForConditionalGeneration(config), found
    images = {"pixel_values": torch.randn(batch, 3, 224, 224)}
    labels = {"labels": torch.randint(0, 1000, (batch,))}
    return hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000)), images | labels


def _loss_of(case: dict[str, Any]) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The model on the GPU, and a forward pass."""
    if case["model"] in _NAMES:
        module, batch = of_hugging_face(case["model"], case["batch"])
        model = module.cuda()
        inputs = {key: value.cuda() for key, value in batch.items()}
        return model, lambda: model(**inputs).loss
    import timm  # noqa: PLC0415 - as above

    model = timm.create_model(case["model"], num_classes=1000).cuda()
    images = torch.randn(case["batch"], 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (case["batch"],), device="cuda")
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step in each run, and of issuing one alone; peak of memory."""
    model, loss_of = _loss_of(case)
    model.train()
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-4)
        if case["optimizer"] == "adamw"
        else torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    )
    is_16_bit = case["precision"] == "bf16"

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16) if is_16_bit else nullcontext():
            loss = loss_of()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def run_s(num_steps: int) -> float:
        began_s = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / num_steps

    run_s(_WARM_UP)
    num_steps = max(10, min(100, int(_RUN_S / run_s(1))))
    step_s = [run_s(num_steps) for _ in range(_NUM_RUNS)]
    issue_s = []
    for _ in range(_NUM_RUNS):
        began_s = time.perf_counter()
        step()
        issue_s.append(time.perf_counter() - began_s)
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {**case, "gpu": torch.cuda.get_device_name()} | {
        "versions": {name: version(name) for name in ("torch", "timm", "transformers")},
        "step_s": step_s,
        "issue_s": issue_s,
        "peak_bytes": peak,
    }


def judged(machine: str, runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any, float]]:
    """Each run, the step that the machine by name predicts, and the peak of tensors. [B]"""
    import perfmodel as pm  # noqa: PLC0415 - a GPU's machine need not have it

    for run in runs:
        if "step_s" not in run:
            _say(f"{run['model']:26} failed: {run['error']}")
            continue
        if run["model"] in _NAMES and find_spec("transformers") is None:
            _say(f"{run['model']:26} left out: transformers is not installed")
            continue
        how = {key: run[key] for key in ("optimizer", "precision")} | {"device_kind": "as-cuda"}
        if run["model"] in _NAMES:
            workload = pm.trace(*of_hugging_face(run["model"], run["batch"]), **how)
        else:
            workload = pm.trace(f"timm:{run['model']}", micro_batch=run["batch"], **how)
        answer = pm.predict(machine, workload, devices=1, batch=run["batch"])
        memory = pm.memory(workload, machine=machine, micro_batch=run["batch"])
        yield run, answer.points[0].step_s, memory.found.tensor_bytes


def tell(machine: str, runs: list[dict[str, Any]]) -> None:
    """Print a line for each model, and the figures of all; steps that take their host's time apart."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    of_memory: list[float] = []
    num_inside = 0
    for run, predicted, tensor_bytes in judged(machine, runs):
        step_s = statistics.fmean(run["step_s"])
        error = predicted.nominal / step_s - 1.0
        is_inside = predicted.p5 <= step_s <= predicted.p95
        waits = statistics.median(run["issue_s"]) > 0.85 * step_s
        errors[waits].append(error)
        num_inside += is_inside
        of_memory.append(tensor_bytes / run["peak_bytes"] - 1.0)
        _say(
            f"{run['model']:26} {run['batch']:4} {run['precision']} {run['optimizer']:5} {step_s * 1e3:7.1f} ms, "
            f"predicted {predicted.nominal * 1e3:7.1f} [{predicted.p5 * 1e3:.1f}-{predicted.p95 * 1e3:.1f}] "
            f"{error:+7.1%} {'inside' if is_inside else 'OUTSIDE'}, memory {of_memory[-1]:+.1%}"
            f"{', host-bound' if waits else ''}"
        )
    every = errors[True] + errors[False]
    for words, of in (
        ("steps", every),
        ("host-bound", errors[True]),
        ("others", errors[False]),
        ("memory", of_memory),
    ):
        if of:
            worst, mape = max(of, key=abs), statistics.fmean(map(abs, of))
            bias = statistics.fmean(of)
            _say(
                f"{words}: {len(of)} models, MAPE {mape:.1%}, bias {bias:+.1%}, worst {worst:+.1%}"
            )
    _say(f"inside: {num_inside} of {len(every)} judged; {len(runs) - len(every)} were not")


def _in_a_process(case: dict[str, Any]) -> None:
    """Measure a case in a child: the parent has imported what is large, and never touches the GPU."""
    child = os.fork()
    if child == 0:
        try:
            _say(json.dumps(measured(case)))
        except Exception as error:  # noqa: BLE001 - whatever a stranger's model raises
            _say(json.dumps({**case, "error": repr(error)[-300:]}))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        _say(json.dumps({**case, "error": f"the process ended with status {status}"}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["draw", seed]:
            _say(json.dumps(list(drawn(int(seed)))))
        case ["measure", cases]:
            # The parent may ask whether there is a GPU, yet must not open it.
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            for each in json.loads(Path(cases).read_text(encoding="utf-8")):
                _in_a_process(each)
        case ["judge", machine, *paths]:
            text = Path(*(paths or [str(RUNS)])).read_text(encoding="utf-8")
            tell(machine, [json.loads(line) for line in text.splitlines()])
        case _:
            sys.exit(__doc__)

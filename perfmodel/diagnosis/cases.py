"""What a user holds, and what was logged as observations of runs: nothing that was not said is assumed."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from perfmodel.diagnosis.odds import Observation
from perfmodel.diagnosis.trained import Run, Trained
from perfmodel.documents.observed import Logged, Unit
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.layout import Layout, accumulation_for, parse_layout
from perfmodel.machine import Cluster
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.units import BytesPerSecond, Seconds

#: English text, tokenizers of 32,000 to 128,000 entries: assumed. [tokens/word]
TOKENS_PER_WORD: Final = 1.33
#: MFU that no transformer reaches: the best published ones on A100 and H100 have 0.6 to 0.7. Convolutions take
#: fewer FLOP than are counted, and so does causal attention, which counts in longer sequences.
_MOST_REACHED: Final = 0.8
_MOST_TOKENS: Final = 16_384
#: Of ZeRO, by strategy.
LEVELS: Final = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
#: Rates from here on need no digits behind the point.
_WHOLE: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a user holds; options of ``diagnose``."""

    model: str | WorkloadDocument
    """A name, a file, or a traced model."""
    device: str | None = None
    """By its data sheet."""
    machine: MeasuredMachine | None = None
    """That was calibrated, in place of a data sheet."""
    cluster: Cluster | None = None
    """Links between the devices of ``machine``."""
    observed: Sequence[str] | None = None
    log: Path | None = None
    log_format: str | None = None
    devices: int | None = None
    devices_per_node: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    strategy: str | None = None
    nic_bandwidth: BytesPerSecond | None = None
    nics: int | None = None
    name: str | None = None
    lora: bool = False


def unsaid(logged: Logged, case: Case) -> list[str]:
    """What neither a logged number nor the options say of its run, as options."""
    per_node = logged.per_node or case.devices_per_node
    devices = logged.devices or case.devices or (logged.nodes and per_node)
    needs = []
    if not devices:
        needs.append("--devices (or '8 GPUs' in --observed)")
    if devices != 1 and not per_node and not (logged.nodes and devices):
        needs.append("--devices-per-node (or '1 node')")
    shared = math.prod(map(int, re.findall(r"\b[tpc]p=(\d+)", logged.layout)))
    is_said = case.strategy or re.search(r"\b(?:dp|ddp|fsdp|zero)=", logged.layout)
    if devices != shared and not is_said:
        needs.append(f"--strategy ({', '.join(LEVELS)})")
    return needs


def run_of(logged: Logged, case: Case) -> Run:
    """The run of a logged number of which nothing is ``unsaid``; ``UsageError`` if it contradicts itself."""
    where = f"--observed {logged.text!r}"
    per_node = logged.per_node or case.devices_per_node
    devices = logged.devices or case.devices
    if logged.per_node and logged.nodes:
        told = logged.nodes * logged.per_node
        if logged.devices not in (None, told, logged.per_node):
            raise UsageError(f"{where}: nodes x devices of a node are {told}, not {logged.devices}")
        devices = told
    elif logged.nodes and devices:
        if devices % logged.nodes:
            raise UsageError(f"{where}: {devices} devices must fill {logged.nodes} nodes evenly")
        per_node = devices // logged.nodes
    elif logged.nodes and per_node:
        devices = logged.nodes * per_node
    assert devices is not None, "the command asks for devices"
    assert per_node is not None or devices == 1, "the command asks for nodes"
    try:
        return Run(layout=_layout(logged, case, devices), devices_per_node=per_node or 1)
    except NotFeasible as error:
        raise UsageError(f"{where}: {error}; see --global-batch and --micro-batch") from error


def _layout(logged: Logged, case: Case, devices: int) -> Layout:
    parse_layout(logged.layout)  # refuses what makes no sense
    words = dict(word.split("=", 1) for word in logged.layout.split())
    if not {"dp", "ddp", "fsdp"} & set(words):
        shared = math.prod(int(words.get(key, "1")) for key in ("tp", "pp", "cp"))
        if devices % shared:
            raise UsageError(
                f"--observed {logged.text!r}: {devices} devices must be a multiple of tp x pp x cp = {shared}"
            )
        words["dp"] = str(devices // shared)
        if words["dp"] != "1" and "zero" not in words:
            if case.strategy is None:
                raise UsageError(
                    f"--strategy: must be one of {', '.join(LEVELS)} for {devices} devices, got none"
                )
            words["zero"] = str(LEVELS[case.strategy])
    words = ({} if case.precision is None else {"precision": case.precision}) | words
    layout = parse_layout(" ".join(f"{key}={value}" for key, value in words.items()))
    if layout.world_size != devices:
        raise UsageError(
            f"--observed {logged.text!r}: layout has {layout.world_size} devices, not {devices}"
        )
    accumulation, micro = case.accumulation, case.micro_batch
    if "micro_batch" in words:
        micro = layout.micro_batch
    if case.global_batch is not None and micro is not None:
        accumulation = accumulation_for(
            global_batch=case.global_batch, dp=layout.dp, micro_batch=micro
        )
    elif case.global_batch is not None:
        micro, left = divmod(case.global_batch, layout.dp * (accumulation or 1))
        if left:
            raise UsageError(
                f"--global-batch: must be a multiple of the {layout.dp} replicas of {logged.text!r}, got "
                f"{case.global_batch}"
            )
    assert micro is not None, "the command asks for a batch"
    return replace(layout, micro_batch=micro, accumulation=accumulation or layout.accumulation)


def observation_of(
    logged: Logged, run: Run, trained: Trained, *, peak_flop_per_s: float
) -> tuple[Observation, tuple[str, ...]]:
    """A logged number as a step time, and how it was read where the text leaves that open."""
    value, unit = logged.value, logged.unit
    if value is None or unit is None or unit is Unit.MEMORY:
        return Observation(text=logged.text, run=run, step_s=None), ()
    notes = []
    is_rate = unit in (Unit.TOKENS, Unit.SAMPLES, Unit.WORDS)
    if is_rate and logged.per_device is None and run.devices > 1:
        whole = f"all {run.devices} devices; write 'per GPU' if not"
        notes.append(f"{logged.text!r} is read as of {whole}")
    if unit is Unit.MICRO_STEP:
        count = run.layout.accumulation
        one = "one is read as a step; --accumulation says more"
        told = f"{count} are a step" if count > 1 else one
        notes.append(f"{logged.text!r} counts batches: {told}")
    if unit is Unit.WORDS:
        notes.append(f"a word is read as {TOKENS_PER_WORD} tokens")
    if unit is Unit.MFU and math.isinf(peak_flop_per_s):
        raise UsageError(
            f"--observed {logged.text!r}: MFU is a share of a data sheet's peak, which a profile lacks; give "
            "step times, or --device instead of --profile"
        )
    step_s = _step_s(logged, value, unit, run, trained, peak_flop_per_s)
    reached = trained.model_flop(run) / run.devices / step_s / peak_flop_per_s
    is_counted = trained.tokens is not None and trained.tokens <= _MOST_TOKENS
    is_possible = reached <= _MOST_REACHED or not is_counted
    if not is_possible:
        peak = "its peak (nanoGPT's is 312 TFLOP/s of an A100), " if unit is Unit.MFU else ""
        notes.append(
            f"TOO FAST: {logged.text!r} means {100 * reached:.0f} % of the dense peak (MFU), which no training "
            f"reaches; check {peak}units, batch, sequence length, model and device"
        )
    found = Observation(text=logged.text, run=run, step_s=step_s, is_possible=is_possible)
    return found, tuple(notes)


def _step_s(
    logged: Logged, value: float, unit: Unit, run: Run, trained: Trained, peak_flop_per_s: float
) -> Seconds:
    samples = run.layout.global_batch
    each = run.devices if logged.per_device else 1
    if unit in (Unit.TOKENS, Unit.WORDS):
        if trained.tokens is None:
            raise UsageError(
                f"--observed {logged.text!r}: {unit} need a model of sequences, got {trained.name}; "
                "give samples/s"
            )
        rate = value * (TOKENS_PER_WORD if unit is Unit.WORDS else 1.0) * each
        return samples * trained.tokens / rate
    if unit is Unit.SAMPLES:
        return samples / (value * each)
    if unit in (Unit.MFU, Unit.FLOP):
        reached = value * (peak_flop_per_s if unit is Unit.MFU else 1.0)
        return trained.model_flop(run) / run.devices / reached
    if unit is Unit.MICRO_STEP:
        return value * run.layout.accumulation
    return 1 / value if unit is Unit.STEPS else value


def logged_as(step_s: Seconds, logged: Logged, measured_s: Seconds | None) -> str:
    """A step in the unit that was logged, such as ``7,480 tokens/s per device``; empty for step times.

    ``measured_s``: The logged number as a step time: every rate falls as the step grows. [s]
    """
    if logged.value is None or measured_s is None:
        return ""
    unit, value = logged.unit, logged.value * measured_s / step_s
    whose = " per device" if logged.per_device else ""
    if unit in (Unit.TOKENS, Unit.WORDS) or (unit is Unit.SAMPLES and value >= _WHOLE):
        return f"{value:,.0f} {unit}{whose}"
    if unit is Unit.SAMPLES:
        return f"{value:.3g} {unit}{whose}"
    if unit is Unit.MFU:
        return f"{100 * value:.3g} % MFU"
    return f"{value / 1e12:.0f} TFLOP/s" if unit is Unit.FLOP else ""

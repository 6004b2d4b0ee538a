"""A case as it is told: a model, runs and observations; what is missing is asked for in one line."""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.answer import open_question
from perfmodel.answer.inferred import Training, layout_jobs
from perfmodel.cost.jobs import DeviceSheet, FittedParameters, Jobs
from perfmodel.cost.memory import Verdict, verdict
from perfmodel.cost.rescaling import device_sheet
from perfmodel.diagnosis.cases import (
    LEVELS,
    CalibratedModel,
    Case,
    LargeModel,
    Observation,
    RooflineModel,
    Run,
    Trained,
    observation_of,
    run_of,
    unsaid,
)
from perfmodel.diagnosis.causes import ALLOCATED, BETWEEN, CLOCK, SIZE, Measurement
from perfmodel.diagnosis.odds import Diagnosis, draw_terms, enough_network, usual_network
from perfmodel.diagnosis.odds import diagnose as use_case
from perfmodel.documents import Shown
from perfmodel.documents.hardware import (
    PCIE_BYTES_PER_S,
    DataSheet,
    find_device,
    host_link_bytes_per_s,
    is_called,
    sheet_named,
    shipped_catalogue,
)
from perfmodel.documents.importers import TrainingConfig, read_config, size_in_name
from perfmodel.documents.observed import Logged, Unit, read_log, read_observed
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError, refuse_unknown
from perfmodel.layout import Recompute
from perfmodel.models import (
    is_size,
    is_traceable,
    is_workload_file,
    read_model,
    read_workload,
    workload_of,
)
from perfmodel.units import BytesPerSecond, format_bytes, format_rate
from perfmodel.workload import is_model
from perfmodel.workload.transformer import TRANSFORMERS, NamedTransformer, gpt

_TRAINERS: Final = (".yaml", ".yml", ".toml")
#: A name and a shape that differ by less are one model.
_SAME_SIZE: Final = 1.5
_MOST_OBSERVED: Final = 32
_MOST_CAVEATS: Final = 2
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosed(Shown):
    """Odds of causes, and what is told beside them."""

    found: Diagnosis
    model: str
    """Name, size, device and what was taken as given."""
    logged: tuple[Logged, ...]
    trained: Trained
    notes: tuple[str, ...]
    contradicts: bool = False
    """Whether the size in the name is not that of the configuration."""
    fits: bool = True
    """Whether no run is known to need more memory than a device has, even with activations recomputed."""
    is_calibrated: bool = False
    enough: BytesPerSecond | None = None
    """Between nodes, of one device, for 90 % of the speed of one node. [B/s]"""
    per_node: int = 1
    crosses_nodes: bool = False


def diagnosed(case: Case) -> Diagnosed:
    """The diagnosis of a case, and what must be told beside it.

    Raises ``UsageError`` if something is missing or contradicts itself; options are named as on the command
    line.
    """
    typed, config = case, TrainingConfig(name=case.name or "")
    if _is_trainer(case.model):
        config = read_config(Path(str(case.model)))
        unsaid = [name for name in _SHARED if getattr(case, name) is None]
        case = replace(case, **{name: getattr(config, name) for name in unsaid})
    _refuse_alone(case)
    logged, notes = _logged(case)
    case, more = _told_by_log(case, logged)
    case, own = _with_own_batch(_named_in(case, logged))
    _refuse_missing(case, config, logged)
    rng = np.random.default_rng(_SEED)
    expected = _by_machine(typed) if case.machine else _by_sheet(case, config)
    trained = expected.trained
    said = None if case.machine else case.precision
    case = replace(case, precision=expected.precision)
    notes += more + own
    runs = [run_of(each, case) for each in logged]
    # A traced model has no shape: nothing tells what other layouts than data parallelism send.
    for run in runs if isinstance(trained, RooflineModel) else ():
        if run.layout.zero or run.layout.dp != run.devices:
            raise UsageError(
                f"--strategy: must be ddp for a traced model, got {run.layout}; give a config.json or a name"
            )
    notes += tuple(_without_accumulation(case, runs))
    observations: list[Observation] = []
    for each, run in zip(logged, runs, strict=True):
        observation, more = observation_of(
            each, run, trained, peak_flop_per_s=expected.peak_flop_per_s
        )
        observations.append(observation)
        notes += more
    largest = max(runs, key=lambda run: run.nodes)
    terms, usual, more, enough = _terms(case, expected, largest, rng)
    contradiction = tuple(_contradiction(case.name or config.name or trained.name, trained))
    memory, is_too_large = _too_large(trained, runs, expected.capacity_bytes)
    found = use_case(
        trained,
        observations,
        terms,
        usual=usual,
        device=None if expected.sheet is None else expected.device,
        capacity_bytes=expected.capacity_bytes,
        own_links=expected.own_links,
        rng=rng,
    )
    if isinstance(trained, CalibratedModel):
        more = trained.caveats[:_MOST_CAVEATS]
    if contradiction and found.fits:
        found = _to_measure(found, SIZE, largest, expected)
    elif not found.fits:
        in_memory = any(each.unit is Unit.MEMORY for each in logged)
        untimed = BETWEEN if usual is not terms else CLOCK
        found = _to_measure(found, ALLOCATED if in_memory else untimed, largest, expected)
    tokens = f"{trained.tokens:,.0f} tokens" if trained.tokens else None
    batch = f"micro-batch {case.micro_batch}"
    if case.global_batch is not None:
        batch = f"global batch {case.global_batch}"
    taken = ", ".join(filter(None, (said, case.strategy, batch, tokens)))
    size = format_rate(trained.parameters, "").removesuffix("/s")
    return Diagnosed(
        found=found,
        model=f"{trained.name} ({size} parameters) on {expected.device}, {taken}",
        logged=tuple(logged),
        trained=trained,
        notes=(*contradiction, *memory, *notes, *more),
        contradicts=bool(contradiction),
        fits=not is_too_large,
        is_calibrated=expected.sheet is None,
        enough=enough,
        per_node=min(largest.devices, largest.devices_per_node),
        crosses_nodes=expected.sheet is not None
        and largest.nodes > 1
        and largest.layout.dp == largest.devices,
    )


class _Expected(NamedTuple):
    """What a normal step is expected by."""

    trained: Trained
    device: str
    precision: str | None
    """None: that of the trace."""
    peak_flop_per_s: float
    capacity_bytes: float
    own_links: bool
    sheet: DataSheet | None
    """None on a calibrated machine."""


def _to_measure(
    found: Diagnosis, measurement: Measurement, run: Run, expected: _Expected
) -> Diagnosis:
    """With a measurement that comes before all odds."""
    command = measurement.typed(run, None if expected.sheet is None else expected.device)
    return replace(found, next_name=measurement.name, next_command=command, information=None)


def _by_machine(case: Case) -> _Expected:
    """The prediction on a calibrated machine."""
    machine, model = case.machine, case.model
    assert machine is not None
    for name in ("device", "precision", "lora", "sequence_length", "nics"):
        if getattr(case, name) not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag}: excludes --profile and --machine, got both; machine and trace have their own"
            )
    if isinstance(model, str):
        if model in TRANSFORMERS and machine.workload(model) is None:
            raise UsageError(
                f"MODEL: {model} goes with the data sheet of a device, got a machine; give --device "
                "(perfmodel devices) in its place, or the model's config.json"
            )
        model = workload_of(machine, model)
    question = open_question(machine, model, cluster=case.cluster, where="MODEL")
    return _Expected(
        trained=CalibratedModel(question=question, workload=question.measured.workload),
        device=machine.device_name,
        precision=None,
        peak_flop_per_s=math.inf,
        capacity_bytes=math.inf,
        own_links=True,
        sheet=None,
    )


def _by_sheet(case: Case, config: TrainingConfig) -> _Expected:
    """Priors of a data sheet."""
    assert case.device is not None
    sheet = find_device(case.device, shipped_catalogue())
    assert case.precision is not None
    precision = {"fp16": "bf16"}.get(case.precision, case.precision)
    return _Expected(
        trained=_trained(case, config, sheet, precision),
        device=sheet.id,
        precision=precision,
        peak_flop_per_s=_peak(sheet, precision),
        capacity_bytes=float(sheet.memory.size_bytes),
        own_links=sheet.link is not None and not sheet.link_joins_pairs,
        sheet=sheet,
    )


def _terms(
    case: Case, expected: _Expected, largest: Run, rng: np.random.Generator
) -> tuple[FittedParameters, FittedParameters, tuple[str, ...], BytesPerSecond | None]:
    """Draws of what a step is made of, also with the usual network, notes, and the network that is enough."""
    trained = expected.trained
    if expected.sheet is None:
        assert isinstance(trained, CalibratedModel)
        terms = trained.terms(largest.layout)
        return terms, terms, (), None
    sheet, known = _sheet(case, expected.sheet, largest)
    known = known or largest.nodes == 1
    crosses = largest.nodes > 1 and largest.layout.dp == largest.devices
    enough = enough_network(trained, largest, sheet) if crosses else None
    terms = draw_terms(sheet, rng, known_network=known)
    if known:
        return terms, terms, (), enough
    note = (
        "the network between nodes was not given: its rate is open within a factor of 10; "
        "give --nic-bandwidth and --nics"
    )
    return terms, usual_network(sheet, terms), (note,), enough


#: Options that a trainer's file may answer.
_SHARED: Final = ("micro_batch", "global_batch", "accumulation", "precision", "strategy")


def _without_accumulation(case: Case, runs: Sequence[Run]) -> Iterator[str]:
    """A note where a global batch alone was said: it is read as one micro-batch of each replica."""
    is_open = case.global_batch is not None and not (case.micro_batch or case.accumulation)
    if is_open and any(run.layout.micro_batch > 1 for run in runs):
        whole = {f"{run.layout.micro_batch} on {run.devices}" for run in runs}
        yield (
            f"global batch {case.global_batch} is read as one micro-batch of each replica (samples on devices: "
            f"{', '.join(sorted(whole))}); with gradient accumulation give --micro-batch too"
        )


#: Options that the head of a log may answer.
_IN_HEADS: Final = ("micro_batch", "accumulation", "global_batch", "sequence_length", "devices")


def _told_by_log(case: Case, logged: Sequence[Logged]) -> tuple[Case, tuple[str, ...]]:
    """The case with what the head of a log says of batch and devices, and a note on it."""
    if case.log is None:
        return case, ()
    read = logged[-1]
    taken: dict[str, Any] = {}
    for name in _IN_HEADS:
        said, typed = getattr(read, name), getattr(case, name)
        if said is not None and typed not in (None, said):
            raise UsageError(
                f"--{name.replace('_', '-')}: must be the {said} of {case.log}, got {typed}; leave it out"
            )
        if said is not None and typed is None and name != "devices":
            taken[name] = said
    if case.global_batch is not None:
        taken.pop("accumulation", None)
    level = re.search(r"zero=(\d)", read.layout)
    if level and case.strategy and LEVELS[case.strategy] != int(level[1]):
        raise UsageError(
            f"--strategy: must be the {level[0]} of {case.log}, got {case.strategy}; leave it out"
        )
    words = [f"{name.replace('_', '-')} {value}" for name, value in taken.items()]
    words += [f"{read.devices} devices"] if read.devices else []
    words += [read.layout] if read.layout else []
    notes = (f"read from {case.log}: {', '.join(words)}",) if words else ()
    return replace(case, **taken), notes


def _with_own_batch(case: Case) -> tuple[Case, tuple[str, ...]]:
    """The case with the batch that came with a traced model, where nothing else says one, and a note on it."""
    document = None
    if case.micro_batch is None and case.global_batch is None and not _is_trainer(case.model):
        document = _traced(case.model)
    if document is None or document.trace.own_micro_batch is None:
        return case, ()
    own = document.trace.own_micro_batch
    note = f"micro-batch {own}: the batch that came with the model; --micro-batch says another"
    return replace(case, model=document, micro_batch=own), (note,)


def _named_in(case: Case, logged: Sequence[Logged]) -> Case:
    """The case with the accelerator that an observation names, which must be that of the options."""
    catalogue = shipped_catalogue()
    for each in logged:
        if not each.device:
            continue
        if case.device is None and case.machine is None:
            case = replace(case, device=each.device)
        flag, name = "--device", case.device
        if case.machine is not None:
            flag, name = "--machine", case.machine.device_name
        assert name is not None
        sheet = sheet_named(name, catalogue)
        if sheet is None and case.machine is None:
            sheet = find_device(name, catalogue)
        if sheet is None or not is_called(sheet, each.device):
            raise UsageError(
                f"{flag}: must be the {each.device!r} of --observed {each.text!r}, got {name}; ask for each "
                "device alone"
            )
    return case


def _refuse_missing(case: Case, config: TrainingConfig, logged: Sequence[Logged]) -> None:
    """Everything that is missing in one line; nothing is compared with a default."""
    missing = []
    if case.device is None and case.machine is None:
        missing.append("--device (such as h100-sxm; see perfmodel devices), or --profile")
    if case.micro_batch is None and case.global_batch is None:
        missing.append("--micro-batch or --global-batch")
    if case.precision is None and case.machine is None:
        missing.append("--precision (bf16, fp16, tf32 or fp32)")
    is_shape = config.shape is not None or (isinstance(case.model, str) and is_size(case.model))
    if is_shape and case.machine is None and not (case.sequence_length or config.sequence):
        missing.append("--sequence-length (tokens of one sample)")
    if not case.observed and case.log is None:
        missing.append("--observed or --log")
    missing += dict.fromkeys(need for each in logged for need in unsaid(each, case))
    if missing:
        raise UsageError(f"diagnose: needs {', '.join(missing)}; nothing is assumed in their place")


def _refuse_alone(case: Case) -> None:
    """Options that come in pairs, and a strategy that nobody knows."""
    if case.strategy is not None:
        refuse_unknown("--strategy", case.strategy, LEVELS)
    if case.log is None and case.log_format is not None:
        raise UsageError("--log-format: must come with --log, got it alone")
    if case.cluster is not None and case.machine is None:
        raise UsageError("--cluster: must come with --profile, got it alone; see --nic-bandwidth")
    if (case.nics is None) != (case.nic_bandwidth is None):
        raise UsageError("--nic-bandwidth: must come with --nics, got one of them alone")


def _logged(case: Case) -> tuple[list[Logged], tuple[str, ...]]:
    typed = [case.observed] if isinstance(case.observed, str) else case.observed or ()
    if len(typed) > _MOST_OBSERVED:
        raise UsageError(f"--observed: must be at most {_MOST_OBSERVED} numbers, got {len(typed)}")
    found = [read_observed(part.strip()) for text in typed for part in text.split(";")]
    if case.log is None:
        return found, ()
    logged, notes = read_log(case.log, name=case.log_format)
    return [*found, logged], notes


def _is_trainer(model: str | WorkloadDocument) -> bool:
    return isinstance(model, str) and Path(model).suffix in _TRAINERS


def _traced(model: str | WorkloadDocument) -> WorkloadDocument | None:
    """The step of a model that is traced; None of one that is known by its shape."""
    if isinstance(model, WorkloadDocument):
        return model
    is_traced = is_model(model) or is_workload_file(model) or is_traceable(model)
    return read_workload(model) if is_traced else None


def _trained(case: Case, config: TrainingConfig, sheet: DataSheet, precision: str) -> Trained:
    document = _traced(case.model)
    if document is not None:
        return RooflineModel(
            workload=document.workload,
            trace=document.trace,
            rate_ratio=_peak(sheet, precision) / _peak(sheet, "bf16"),
            bytes_ratio=0.5 if precision == "bf16" else 1.0,
        )
    text, sequence = str(case.model), case.sequence_length or config.sequence
    if _is_trainer(text):
        named = _of_trainer(Path(text), config, sequence)
    else:
        try:
            named = read_model(text, sequence=sequence, flag="MODEL")
        except UsageError as error:
            others = (
                "torchvision:NAME, timm:NAME, FILE.py:FACTORY, a config.json or a trainer's YAML"
            )
            names = re.sub("^MODEL: must be", f"MODEL: must be {others}, or", str(error))
            raise UsageError(names) from error
    frozen = case.lora or config.frozen

    @functools.cache
    def jobs(run: Run) -> Jobs:
        training = Training(
            model=named,
            devices=run.devices,
            devices_per_node=run.devices_per_node,
            global_batch=run.layout.global_batch,
        )
        return layout_jobs(training, run.layout, device=sheet.id)

    return LargeModel(
        name=named.name,
        parameters=named.shape.parameters,
        tokens=float(named.sequence),
        jobs=jobs,
        frozen=frozen,
    )


def _of_trainer(path: Path, config: TrainingConfig, sequence: int | None) -> NamedTransformer:
    """The model of a trainer's file: its shape, or the name of a known one."""
    if config.shape is not None:
        assert sequence is not None, "the command asks for it"
        sizes: dict[str, Any] = dict(config.shape)
        feed_forward = sizes.pop("feed_forward")
        try:
            shape = replace(gpt(**sizes), feed_forward=feed_forward)
        except ValueError as error:
            raise UsageError(f"{path}: model: {error}; correct it") from error
        return NamedTransformer(name=path.stem, shape=shape, sequence=sequence)
    wanted = "".join(filter(str.isalnum, (config.model or "").rpartition("/")[2].casefold()))
    # Meta's own names; 3.1 has the shapes of 3.
    wanted = wanted.removeprefix("meta").replace("llama31", "llama3", 1)
    for name, known in sorted(TRANSFORMERS.items(), key=lambda each: -len(each[0])):
        if wanted.startswith("".join(filter(str.isalnum, name))):
            return NamedTransformer(
                name=name, shape=known.shape, sequence=sequence or known.sequence
            )
    named = f"its name {config.model!r} is none" if config.model else "no name"
    raise UsageError(
        f"MODEL: {path} holds no shape of a model (d_model, n_layers, n_heads), and {named} of "
        f"{', '.join(TRANSFORMERS)}; give its config.json"
    )


def _contradiction(name: str, trained: Trained) -> Iterator[str]:
    """A line where the size in a name is not that of the configuration."""
    claimed = size_in_name(name)
    if claimed is not None and not 1 / _SAME_SIZE < claimed / trained.parameters < _SAME_SIZE:
        yield (
            f"WRONG MODEL SIZE: the name {name!r} says {claimed / 1e9:.3g} G parameters, the configuration has "
            f"{trained.parameters / 1e9:.3g} G, which is what is expected here"
        )


def _too_large(
    trained: Trained, runs: Sequence[Run], capacity_bytes: float
) -> tuple[tuple[str, ...], bool]:
    """Lines on runs that need more memory than a device has, and whether some do however they are run."""
    if not isinstance(trained, LargeModel):
        return (), False

    def beyond(recompute: Recompute | None) -> dict[Run, str]:
        found = {}
        for run in runs:
            layout = replace(run.layout, recompute=recompute or run.layout.recompute)
            fit = trained.fit(replace(run, layout=layout), capacity_bytes)
            if fit is not None and verdict(fit[1]) is Verdict.DOES_NOT_FIT:
                found[run] = f"{format_bytes(fit[0])} by {str(run.layout) or 'one device'}"
        return found

    least = beyond(Recompute.FULL)
    rest = {text for run, text in beyond(None).items() if run not in least}
    has, notes = f"a device has {format_bytes(capacity_bytes)}, needed are", []
    if least:
        notes.append(
            f"DOES NOT FIT, even with recompute=full: {has} {', '.join(sorted(set(least.values())))}; the "
            "step expected is that of a larger device, what ran was smaller, sharded or offloaded"
        )
    if rest:
        notes.append(
            f"fits, if at all, only with recompute=full: {has} {', '.join(sorted(rest))} without it; add it "
            "to --observed if it ran so"
        )
    return tuple(notes), bool(least)


def _peak(sheet: DataSheet, precision: str) -> float:
    known = dict(sheet.peaks)
    peak = known.get(precision) or (known.get("fp16") if precision == "bf16" else None)  # type: ignore[call-overload]
    if peak is None:
        raise UsageError(
            f"--precision: {sheet.id} must have a peak for it, got {precision}; it has {', '.join(known)}"
        )
    return float(peak.flop_per_s)


def _sheet(case: Case, data_sheet: DataSheet, largest: Run) -> tuple[DeviceSheet, bool]:
    """Data sheet for the priors, and whether the network between nodes is known.

    A bridge joins two devices, and nothing says that there is one: PCIe is expected of such cards.
    """
    sheet = device_sheet(data_sheet.id)
    if data_sheet.link is None or data_sheet.link_joins_pairs:
        host = host_link_bytes_per_s(data_sheet, shipped_catalogue())
        sheet = replace(sheet, link_bytes_per_s=host or PCIE_BYTES_PER_S)
    if case.nic_bandwidth is None or case.nics is None:
        return sheet, False
    rate = case.nic_bandwidth * case.nics / largest.devices_per_node
    return replace(sheet, node_bytes_per_s=rate), True

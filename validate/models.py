"""Use case: predict models drawn at random, train them in a plain loop, and judge the predictions."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

from calibrate.campaign import OBSERVATIONS, Campaign, Progress, keep_plan, measure
from calibrate.environment import Placement, describe_environment, placement_of, provenance
from calibrate.experiment import is_short
from calibrate.launch import Launcher
from calibrate.random_models import RandomModel, draw
from calibrate.ranks import traced_as
from calibrate.replays import replays_in, with_replays
from calibrate.task import ReplayTask, StepTask, Task
from calibrate.workloads import in_starts
from perfmodel.answer import Question, interval, open_workload
from perfmodel.answer.answer import answer
from perfmodel.documents.observation import (
    ReplayObservation,
    failures,
    read_observations,
    steal_share,
)
from perfmodel.documents.verdicts import (
    ComparedModel,
    FailedModel,
    Gate,
    ModelsValidationDocument,
)
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import (
    CalibrationUnavailable,
    Interrupted,
    MeasurementFailed,
    PerfModelError,
    refuse_unknown,
)
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine import Evidence
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.statistics import Interval
from perfmodel.tracing.fork import Fork
from perfmodel.units import Seconds
from validate.judging import (
    IN_PLACE,
    ProfileRequest,
    Tolerances,
    compared,
    gate,
    judged,
    launches,
    measured_runs,
    measured_steps,
    shuffled,
    summarise,
    summarise_any,
    wait_for_another_occasion,
)

Mode = Literal["measured", "curves"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

#: By whether the model was measured in place, or calibrated curves are read.
TOLERANCES: Final = {
    "measured": Tolerances(step_mape=0.05, step_worst=0.18),
    "curves": Tolerances(step_mape=0.14, step_worst=0.50),
}
_DDP_MAPE: Final = 0.07
#: That train, in the same starts, before the loops of them all: a host drifts within a quarter of an hour.
_MODELS_PER_BLOCK: Final = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsBudget:
    """How many models, and how often each is measured."""

    num_models: int
    num_parallel: int
    """Of them on all ranks too."""
    num_repetitions: int
    """Of every run, each in processes of its own."""
    num_later: int = 0
    """Of them when every model has been judged, the others right after the model was trained in place."""
    repetition_s: Seconds
    replay_rounds: int
    """Rounds in which every model is measured in place: trained, and timed operator by operator."""
    replay_s: Seconds

    @property
    def num_soon(self) -> int:
        """Repetitions right after the training in place."""
        return self.num_repetitions - self.num_later

    @classmethod
    def of(cls, name: str, device_kind: str) -> "ModelsBudget":
        """Of a name on a kind of device; a borrowed GPU has little time, and a virtual one is slow to emulate."""
        budget = BUDGETS[name]
        is_reduced = device_kind == "virtual" or is_short(name, device_kind)
        if not is_reduced:
            return budget
        return replace(budget, num_repetitions=2, num_later=0, replay_rounds=2)


BUDGETS: Final = {
    "quick": ModelsBudget(
        num_models=9,
        num_parallel=2,
        num_repetitions=3,
        repetition_s=1.0,
        replay_rounds=2,
        replay_s=1.0,
    ),
    "standard": ModelsBudget(
        num_models=44,
        num_parallel=10,
        num_repetitions=6,
        num_later=2,
        repetition_s=1.2,
        # One round scatters by a tenth.
        replay_rounds=8,
        replay_s=1.0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnModel:
    """A model with the file of its trace, or the reason why there is none."""

    model: RandomModel
    document: Path
    reason: str | None = None

    def in_place(self, folder: Path, target_s: Seconds, world_size: int) -> ReplayTask:
        """One training and replay; ``folder`` takes its code. On several ranks it trains as well."""
        return ReplayTask(
            name=f"{self.model.name} replayed",
            round=0,
            workload=self.model.name,
            micro_batch=self.model.micro_batch,
            document=str(self.document.resolve()),
            code=self.model.write_file(folder),
            world_size=world_size,
            target_s=target_s,
        )

    def setting(self, world_size: int) -> RunSetting:
        """On a number of ranks."""
        return RunSetting(
            workload=self.model.name,
            world_size=world_size,
            micro_batch=self.model.micro_batch,
            synchronisation=Synchronisation.NONE if world_size == 1 else Synchronisation.DDP,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """What was predicted of a run before it."""

    step_s: Interval
    evidence: Evidence
    untimed: tuple[str, ...]


#: By mode, every run.
Predicted = dict[Mode, dict[RunSetting, PredictedRun]]


def validate_models(
    request: ProfileRequest,
    in_place: Launcher,
    plain_loop: Launcher,
    *,
    on_progress: Callable[[Progress], None],
) -> tuple[ModelsValidationDocument, ...]:
    """Draw models, measure each block in place, predict it, run its loops; one verdict per mode.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine, or has no costs of operators.
    """
    refuse_unknown("--budget", request.budget, BUDGETS)
    here = placement_of(request.profile)
    budget = ModelsBudget.of(request.budget, here.device_kind)
    if request.profile.operators is None:
        raise CalibrationUnavailable(
            "--profile: must hold costs of operators, got none; run perfmodel calibrate again"
        )
    seed = request.seed
    drawn = trace_models(seed, budget.num_models, request.folder, here.device_kind, on_progress)
    blocks = _blocks(request, drawn, budget, here)
    trainings = Campaign(
        folder=request.folder / IN_PLACE,
        plan={"stage": "validate models, in place", "seed": seed, "budget": request.budget},
        rounds=(),
        placement=here,
    )
    loops = Campaign(
        folder=request.folder,
        plan={
            "stage": "validate models",
            "budget": request.budget,
            "seed": seed,
            "profile_digest": request.profile.digest,
            "gates": {mode: asdict(promise) for mode, promise in TOLERANCES.items()}
            | {"several ranks": _DDP_MAPE},
        },
        rounds=(),
        placement=here,
    )
    predicted: Predicted = {mode: {} for mode in MODES}
    timed, observations = (each.folder / OBSERVATIONS for each in (trainings, loops))
    wait_for_another_occasion(request, on_progress)
    tasks = (sum(map(len, b.trainings)) + budget.num_repetitions * len(b.settings) for b in blocks)
    whole, resume = _Whole(on_progress, num_tasks=sum(tasks)), request.resume
    try:
        for index, block in enumerate(blocks):
            written = request.folder / f"predicted-{index}.json"
            # Predictions are made once: what failed is not tried again after them.
            stage = replace(trainings, rounds=block.trainings, tries_again=not written.exists())
            whole.run(stage, in_place, resume=resume)
            # What later blocks trained changes no prediction of this one, when a campaign goes on.
            names = {setting.workload for setting in block.settings}
            replays = [replay for replay in replays_in(timed) if replay.workload in names]
            found = predict(request.profile, block.settings, replays)
            for mode, runs in found.items():
                predicted[mode].update(runs)
            steps_s: dict[str, object] = {
                mode: {setting.label: asdict(run.step_s) for setting, run in runs.items()}
                for mode, runs in found.items()
            }
            keep_plan(written, steps_s)
            soon = _rounds(block.settings, range(budget.num_soon), budget, seed)
            whole.run(replace(loops, rounds=launches(soon, request)), plain_loop, resume=resume)
            # The others continue what the first block began.
            resume = True
        if budget.num_later:
            settings = {one: entry for block in blocks for one, entry in block.settings.items()}
            later = range(budget.num_soon, budget.num_repetitions)
            stage = replace(loops, rounds=_rounds(settings, later, budget, seed))
            whole.run(stage, plain_loop, resume=resume)
    except Interrupted:
        # What has run is judged, for a device that may not come back; the next call judges all.
        with suppress(PerfModelError):
            _judge_all(request, drawn, predicted, observations, timed)
        raise
    return _judge_all(request, drawn, predicted, observations, timed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Models that are trained in place, predicted, and then run in loops, before the next ones are."""

    trainings: Sequence[Sequence[ReplayTask]]
    settings: Mapping[RunSetting, DrawnModel]


@dataclass(slots=True)
class _Whole:
    """Campaigns of all blocks, told as one."""

    on_progress: Callable[[Progress], None]
    num_tasks: int
    num_before: int = 0

    def run(self, stage: Campaign, launcher: Launcher, *, resume: bool) -> None:
        """Measure one of them."""
        measure(stage, launcher, resume=resume, on_progress=self._tell)
        self.num_before += sum(map(len, stage.rounds))

    def _tell(self, of_one: Progress) -> None:
        done = self.num_before + of_one.done
        self.on_progress(replace(of_one, done=done, total=self.num_tasks))


def _blocks(
    request: ProfileRequest, drawn: Sequence[DrawnModel], budget: ModelsBudget, here: Placement
) -> tuple[_Block, ...]:
    """Every traced model in one of them; the first are run on all ranks, too."""
    traced = [entry for entry in drawn if entry.reason is None]
    most = here.topology.world_size
    ranks = {
        entry.model.name: most if at < budget.num_parallel else 1 for at, entry in enumerate(traced)
    }
    # What DDP adds to GPUs is measured by the calibration alone.
    on_ranks = ranks if here.device_kind == "cpu" else dict.fromkeys(ranks, 1)
    order = shuffled(traced, f"{request.seed}-replays")
    num_blocks = math.ceil(len(order) / _MODELS_PER_BLOCK)
    found = []
    for block in (order[first::num_blocks] for first in range(num_blocks)):
        tasks = [
            entry.in_place(request.folder, budget.replay_s, on_ranks[entry.model.name])
            for entry in block
        ]
        settings = {
            entry.setting(world_size): entry
            for entry in block
            for world_size in sorted({1, ranks[entry.model.name]})
        }
        found.append(_Block(trainings=in_starts(tasks, budget.replay_rounds), settings=settings))
    return tuple(found)


def _judge_all(
    request: ProfileRequest,
    drawn: Sequence[DrawnModel],
    predicted: Predicted,
    observations: Path,
    timed: Path,
) -> tuple[ModelsValidationDocument, ...]:
    """Write a verdict in each mode."""
    documents = tuple(
        judge_models(request, mode, drawn, predicted, observations, timed) for mode in MODES
    )
    for document in documents:
        document.write(request.folder / file_name(document.mode))
    return documents


def file_name(mode: str) -> str:
    """Of the verdict in one mode; one campaign serves both."""
    return f"models-{mode}.json"


def trace_models(
    seed: int,
    count: int,
    folder: Path,
    device_kind: str,
    on_progress: Callable[[Progress], None],
) -> list[DrawnModel]:
    """Draw and trace models as a user traces a file; those that cannot be traced have a reason."""
    found = []
    kind = traced_as(device_kind)
    for index in range(count):
        model = draw(seed, index, on_gpu=device_kind != "cpu")
        path = folder / "traces" / f"{index}.json"
        words = f"tracing {model.name}"
        on_progress(Progress(done=index, total=count, task=words, is_waiting=True))
        reason = None
        if not path.exists():
            # Tensors of a GPU without content open it, and this process would be another user of it.
            with Fork(partial(_trace, model, folder, path, kind)) as copy:
                reason = copy.result()
        found.append(DrawnModel(model=model, document=path, reason=reason))
    return found


def _trace(model: RandomModel, folder: Path, path: Path, device_kind: str) -> str | None:
    """Write the trace of a model; return why that did not work."""
    try:
        traced = model.traced(folder, device_kind)
    except PerfModelError as error:
        return f"cannot be traced: {error}"
    WorkloadDocument(
        workload=replace(traced.workload, name=model.name),
        trace=traced.step,
        memory=traced.memory,
    ).write(path)
    return None


def _rounds(
    settings: Mapping[RunSetting, DrawnModel], repetitions: range, budget: ModelsBudget, seed: int
) -> tuple[tuple[Task, ...], ...]:
    """Every run once, in a new order, in each of these repetitions."""
    return tuple(
        tuple(
            StepTask(
                name=f"{index}: {setting.label}",
                round=index,
                setting=setting,
                random_model=(settings[setting].model.seed, settings[setting].model.index),
                target_s=budget.repetition_s,
            )
            for setting in shuffled([*settings], f"{seed}-{index}")
        )
        for index in repetitions
    )


def predict(
    profile: MeasuredMachine,
    settings: Mapping[RunSetting, DrawnModel],
    replays: Sequence[ReplayObservation],
) -> Predicted:
    """Every run in both modes."""
    documents = {
        entry.document: WorkloadDocument.read(entry.document) for entry in settings.values()
    }

    def one(machine: MeasuredMachine, mode: Mode, setting: RunSetting) -> PredictedRun:
        document = documents[settings[setting].document]
        question = Question(
            machine=machine,
            workload=open_workload(machine, document, use_measured=mode == "measured"),
            layout=setting.layout,
        )
        found = answer(question)
        return PredictedRun(
            step_s=interval(found.step_s),
            evidence=found.evidence["compute"],
            untimed=question.measured.untimed,
        )

    known = with_replays(profile, replays)
    return {
        "measured": {setting: one(known, "measured", setting) for setting in settings},
        "curves": {setting: one(profile, "curves", setting) for setting in settings},
    }


def judge_models(
    request: ProfileRequest,
    mode: Mode,
    drawn: Sequence[DrawnModel],
    predicted: Predicted,
    observations: Path,
    timed: Path,
) -> ModelsValidationDocument:
    """Put every prediction of a mode beside what was measured; measures nothing."""
    entries = read_observations(observations)
    found = measured_runs(entries)
    families = {entry.model.name: entry.model.family for entry in drawn}
    rows = tuple(
        ComparedModel(
            **compared(setting, run.step_s, [*found[setting].values()]),
            family=families[setting.workload],
            evidence=run.evidence,
            untimed=run.untimed,
        )
        for setting, run in sorted(predicted[mode].items(), key=lambda item: item[0].label)
        if setting in found
    )
    single = [row for row in rows if row.setting.world_size == 1]
    if not single:
        raise MeasurementFailed(
            f"{observations}: must hold runs of models on one rank, got none; continue with --resume"
        )
    failed = {entry.model.name: entry.reason for entry in drawn if entry.reason is not None}
    for records in (entries, read_observations(timed) if mode == "measured" else []):
        for lost in failures(records):
            failed.setdefault(lost.setting.workload, lost.reason)
    names = {setting.workload for setting in predicted[mode] if setting in found}
    absent = [one.workload for one in predicted[mode] if one not in found]
    absent += [entry.model.name for entry in drawn if entry.model.name not in names]
    for name in absent:
        failed.setdefault(name, "has not run; continue with --resume")
    summary = summarise([row.signed_error for row in single])
    num_soon = ModelsBudget.of(request.budget, request.profile.device_kind).num_soon
    later = measured_steps(measured_runs(entry for entry in entries if entry.round >= num_soon))
    several = summarise_any([row.signed_error for row in rows if row.setting.world_size > 1])
    gates: tuple[Gate, ...] = TOLERANCES[mode].judge(summary=summary, rows=rows)
    if several is not None and mode == "measured":
        gates += (gate("several ranks, step-time MAPE", several.mape, at_most=_DDP_MAPE),)
    by_family: dict[str, list[float]] = {}
    for row in single:
        by_family.setdefault(row.family.split()[0], []).append(row.signed_error)
    return ModelsValidationDocument(
        **judged(request.profile, observations, gates, rows),
        provenance=provenance(describe_environment(), seed=request.seed),
        mode=mode,
        seed=request.seed,
        num_drawn=len(drawn),
        steal=steal_share(entries),
        models=rows,
        failed=tuple(FailedModel(name=name, reason=why) for name, why in failed.items()),
        summary=summary,
        summary_by_family={name: summarise(own) for name, own in sorted(by_family.items())},
        summary_ddp=several,
        summary_later=summarise_any(
            [
                run.step_s.signed_error(later[setting].value_s)
                for setting, run in predicted[mode].items()
                if setting in later and setting.world_size == 1
            ]
        ),
    )

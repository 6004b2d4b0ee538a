"""Use case: real FSDP2, ZeRO, tensor parallelism and pipelines on this machine, judged.

Stacks of layers that no calibration has seen are drawn and traced. Their operators are timed on one rank, as
``predict`` does. The profile predicts their layouts; then they are trained in plain loops. Some run on one rank as
well: the noise floor, which no gate counts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from calibrate.campaign import PLAN, Campaign, Progress, keep_plan, measure, read_plan
from calibrate.environment import describe_environment, placement_of, provenance
from calibrate.launch import Launcher
from calibrate.replays import replays_in, with_replays
from calibrate.task import LayoutTask, ReplayTask
from calibrate.workloads import in_starts
from perfmodel.answer import Question, open_workload
from perfmodel.answer.answer import answer
from perfmodel.documents.observation import (
    LayoutObservation,
    StackSpec,
    read_observations,
    steal_share,
)
from perfmodel.documents.verdicts import ComparedStrategy, StrategiesDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import CalibrationUnavailable, MeasurementFailed, refuse_unknown
from perfmodel.files import write_atomically
from perfmodel.layout import RunSetting, parse_layout
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.statistics import Interval
from perfmodel.units import Seconds
from validate.judging import (
    IN_PLACE,
    ProfileRequest,
    Tolerances,
    compared,
    families,
    judged,
    shuffled,
    wait_for_another_occasion,
)

VERDICT: Final = "strategies.json"
TOLERANCES: Final = Tolerances(step_mape=0.08, step_worst=0.25)
Optimizer = Literal["sgd", "adamw"]
#: What each family is run as; n is the number of ranks.
_FAMILIES: Final = {
    "fsdp": ("fsdp={n}",),
    "zero": ("dp={n} zero=2", "dp={n} zero=1"),
    "tensor": ("tp={n}",),
    "pipeline": ("pp={n} accumulation={m} schedule=gpipe", "pp={n} accumulation={m}"),
}
_COMBINED: Final = ("fsdp=2 tp=2", "dp=2 pp=2 accumulation={m}", "tp=2 pp=2 accumulation={m}")
_COMBINED_RANKS: Final = 4
#: The first stacks once more on one rank, undivided: what these runs miss is drift of the host, not of a layout.
ALONE: Final = "one rank"
_NUM_ALONE: Final = 3
#: Widths whose heads of 32 two, three or four ranks can share, and the rest of a stack.
_WIDTHS: Final = (192, 256, 384, 512, 576)
_HEAD: Final = 32
_LAYERS: Final = (4, 5, 6, 8)
_TOKENS: Final = (16, 32, 64, 128)
#: Work of all ranks in one step, drawn on a logarithmic scale: a fraction of a second on a core. [FLOP]
_STEP_FLOP: Final = (4e9, 16e9)
_FLOP_PER_PARAMETER: Final = 6


class Budget(NamedTuple):
    """How much is run."""

    num_rounds: int
    """Fresh process groups; each runs every setting once."""
    stacks_per_layout: int
    target_s: Seconds
    """Of timed steps in a repetition. [s]"""
    replay_rounds: int
    """Rounds in which the operators of every stack are timed on one rank."""


BUDGETS: Final = {"quick": Budget(2, 1, 0.6, 1), "standard": Budget(4, 2, 0.9, 2)}


class Strategy(NamedTuple):
    """One run: a stack under a layout."""

    family: str
    stack: StackSpec
    layout: str
    optimizer: Optimizer

    @property
    def workload(self) -> str:
        """Name of what is trained."""
        stack = self.stack
        kind = "transformer" if stack.head else "mlp"
        return f"{kind}-{stack.layers}x{stack.width}-{stack.tokens}-{self.optimizer}"

    @property
    def setting(self) -> RunSetting:
        """The record of the run."""
        return RunSetting.of(self.workload, parse_layout(self.layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategiesRequest(ProfileRequest):
    """What the user asked for, and how a model becomes a workload file."""

    trace: Callable[[str, Optimizer], WorkloadDocument]
    """Of FILE.py:FACTORY."""


def validate_strategies(
    request: StrategiesRequest, launcher: Launcher, *, on_progress: Callable[[Progress], None]
) -> StrategiesDocument:
    """Draw settings, write predictions, run them in fresh processes, and compare.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine, or has no costs of operators or of a second rank.
    """
    refuse_unknown("--budget", request.budget, BUDGETS)
    budget = BUDGETS[request.budget]
    machine = request.profile
    here = placement_of(machine)
    if machine.operators is None or machine.max_world_size == 1:
        raise CalibrationUnavailable(
            "--profile: must hold costs of operators and of several ranks; "
            "run perfmodel calibrate with --nproc 2 or more"
        )
    drawn = strategies(
        budget.stacks_per_layout, most_ranks=machine.max_world_size, seed=request.seed
    )
    timed = measure(
        Campaign(
            folder=request.folder / IN_PLACE,
            plan={"stage": "validate strategies, in place", "seed": request.seed},
            rounds=in_starts(trace_stacks(request, drawn, budget), budget.replay_rounds),
            placement=here,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    plan: dict[str, Any] = {
        "stage": "validate strategies",
        "budget": request.budget,
        "seed": request.seed,
        "profile_digest": machine.digest,
        "gates": asdict(TOLERANCES),
        "intervals_of": "runs",
    }
    if request.resume and (request.folder / PLAN).exists():
        # Predictions are made once, before the first run.
        kept = read_plan(request.folder).get("predicted_s", {})
        plan["predicted_s"] = {one.setting.label: kept.get(one.setting.label) for one in drawn}
        keep_plan(request.folder / PLAN, plan)
    else:
        known = with_replays(machine, replays_in(timed))
        plan["predicted_s"] = {
            one.setting.label: asdict(predict(known, one, request.folder)) for one in drawn
        }
    wait_for_another_occasion(request, on_progress)
    observations = measure(
        Campaign(
            folder=request.folder,
            plan=plan,
            rounds=rounds(drawn, budget, seed=request.seed),
            placement=here,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    predicted_s = {label: Interval(**found) for label, found in plan["predicted_s"].items()}
    document = judge_strategies(request, drawn, predicted_s, observations)
    document.write(request.folder / VERDICT)
    return document


def strategies(stacks_per_layout: int, *, most_ranks: int, seed: int) -> tuple[Strategy, ...]:
    """Every layout of every family on 2 to 4 ranks, and some together, each with stacks of its own.

    The first of these stacks are run once more, on one rank.
    """
    rng = random.Random(seed)  # noqa: S311 - a sample, no secret
    found: dict[str, Strategy] = {}
    ranks = [n for n in (2, 3, 4) if n <= most_ranks]
    kinds = [(f, text, n) for f, texts in _FAMILIES.items() for text in texts for n in ranks]
    if most_ranks >= _COMBINED_RANKS:
        kinds += [("combined", text, _COMBINED_RANKS) for text in _COMBINED]
    for number, (family, text, n) in enumerate(kinds * stacks_per_layout):
        while True:
            one = _draw(rng, family, text, n, attends=number % 3 > 0)
            if one is not None and one.workload not in found:
                break
        found[one.workload] = one
    drawn = tuple(found.values())
    alone = (
        one._replace(family=ALONE, layout=f"micro_batch={parse_layout(one.layout).micro_batch}")
        for one in drawn[:_NUM_ALONE]
    )
    return *drawn, *alone


def _draw(
    rng: random.Random, family: str, text: str, num_ranks: int, *, attends: bool
) -> Strategy | None:
    """A stack for a layout; None if it cannot be divided so."""
    layers, width, tokens = rng.choice(_LAYERS), rng.choice(_WIDTHS), rng.choice(_TOKENS)
    micro_batches = num_ranks * rng.choice((1, 2)) if "{m}" in text else 1
    parameters = layers * width**2 * (12 if attends else 8)
    step_flop = float(np.exp(rng.uniform(*np.log(_STEP_FLOP))))
    bare = parse_layout(text.format(n=num_ranks, m=micro_batches))
    samples = step_flop / (_FLOP_PER_PARAMETER * parameters * tokens) / (bare.dp * micro_batches)
    optimizer: Optimizer = rng.choice(("sgd", "adamw"))
    if samples < 1 or (width // _HEAD) % bare.tp or layers < bare.pp:
        return None
    return Strategy(
        family,
        StackSpec(layers=layers, width=width, tokens=tokens, head=_HEAD if attends else 0),
        f"{text.format(n=num_ranks, m=micro_batches)} micro_batch={round(samples)}",
        optimizer,
    )


def trace_stacks(
    request: StrategiesRequest, drawn: Sequence[Strategy], budget: Budget
) -> list[ReplayTask]:
    """A training and replay of every stack; the file of its trace is written if it is missing."""
    tasks = []
    for one in (each for each in drawn if each.family != ALONE):
        # A factory of its own for the tracer, which takes files.
        path = request.folder.resolve() / "models" / f"{one.workload}.py"
        write_atomically(
            path,
            "from calibrate.probes.strategies import traceable\n\n\n"
            f"def stack():\n    return traceable({one.stack.model_dump()})\n",
        )
        document = _document(request.folder, one)
        if not document.exists():
            request.trace(f"{path}:stack", one.optimizer).write(document)
        tasks.append(
            ReplayTask(
                name=f"{one.workload} replayed",
                round=0,
                workload=one.workload,
                micro_batch=parse_layout(one.layout).micro_batch,
                document=str(document.resolve()),
                code=f"{path}:stack",
                target_s=budget.target_s,
            )
        )
    return tasks


def _document(folder: Path, strategy: Strategy) -> Path:
    return folder / "traces" / f"{strategy.workload}.json"


def predict(machine: MeasuredMachine, strategy: Strategy, folder: Path) -> Interval:
    """Step of a stack under its layout, from its operators and the costs of the machine. [s]"""
    document = WorkloadDocument.read(_document(folder, strategy))
    question = Question(
        machine=machine,
        workload=open_workload(machine, document),
        layout=parse_layout(strategy.layout),
    )
    return answer(question).step


def rounds(
    drawn: Sequence[Strategy], budget: Budget, *, seed: int
) -> tuple[tuple[LayoutTask, ...], ...]:
    """Every setting once in every round, in an order of its own."""
    return tuple(
        tuple(
            LayoutTask(
                name=f"{index}: {one.setting.label}",
                round=index,
                stack=one.stack,
                layout=one.layout,
                optimizer=one.optimizer,
                target_s=budget.target_s,
            )
            for one in shuffled(drawn, f"{seed}-{index}")
        )
        for index in range(budget.num_rounds)
    )


def judge_strategies(
    request: StrategiesRequest,
    drawn: Sequence[Strategy],
    predicted_s: dict[str, Interval],
    observations: Path,
) -> StrategiesDocument:
    """Put every prediction beside what was measured; measures nothing."""
    entries = read_observations(observations)
    runs: dict[str, list[Seconds]] = {}
    for entry in entries:
        if isinstance(entry, LayoutObservation):
            label = entry.task.partition(": ")[2]
            runs.setdefault(label, []).append(entry.median_step_s)
    if missing := [one.setting.label for one in drawn if one.setting.label not in runs]:
        raise MeasurementFailed(
            f"{observations}: {len(missing)} predicted settings were not run, such as {missing[0]}; "
            "continue with --resume"
        )
    rows = [
        ComparedStrategy(
            **compared(
                one.setting,
                predicted_s[label],
                runs[label],
                measured_s=float(np.median(runs[label])),
            ),
            family=one.family,
        )
        for one in drawn
        for label in [one.setting.label]
    ]
    alone = [row for row in rows if row.family == ALONE]
    divided = [row for row in rows if row.family != ALONE]
    groups = families(divided)
    summary = groups[-1].summary
    gates = TOLERANCES.judge(summary=summary, rows=divided)
    return StrategiesDocument(
        **judged(request.profile, observations, gates, divided),
        provenance=provenance(describe_environment(), seed=request.seed),
        steal=steal_share(entries),
        settings=tuple(rows),
        summary=summary,
        families=(*families(alone)[:-1], *groups),
    )

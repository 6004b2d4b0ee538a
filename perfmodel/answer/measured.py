"""Answers about machines that were calibrated: programs, their costs in every draw, their caveats."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from perfmodel.answer import Answer, Question, interval
from perfmodel.cost import Samples, Terms, contention, in_step, phases_under, slowed
from perfmodel.cost.collectives import library_of
from perfmodel.cost.machine import (
    SEED,
    CostModel,
    families,
    form_factors,
    model_form,
    ranks_beside,
    step_program,
)
from perfmodel.cost.network import groups
from perfmodel.documents import QUIET, age_notes
from perfmodel.engine import algebra
from perfmodel.errors import CalibrationUnavailable, NotFeasible
from perfmodel.files import unsealed_notes
from perfmodel.layout import Layout, Synchronisation
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    OCCASION_OVER_RUN,
    DeviceCosts,
    MeasuredMachine,
    MeasuredWorkload,
    Repeatability,
    Residual,
    TracedWorkload,
    TrainedStep,
)
from perfmodel.statistics import FloatArray
from perfmodel.step import (
    Cause,
    Interference,
    Operation,
    StepProgram,
    Stream,
    Trace,
    with_waiting_host,
)
from perfmodel.step.compile import compile_step
from perfmodel.units import Bytes

# Only some questions need memory, contention or a batch law. They are imported where they are used: together
# they would double the start of a prediction.
if TYPE_CHECKING:
    from perfmodel.machine import Cluster

#: Streams of what ranks send each other.
_EXCHANGES: Final = (Stream.COMM, Stream.TENSOR, Stream.SEND_FORWARD, Stream.SEND_BACKWARD)
#: What the host issues; the loader works beside both.
_ISSUED: Final = (Stream.COMPUTE, *_EXCHANGES)
#: A program of more operations is evaluated in fewer draws.
_LARGE_PROGRAM: Final = 2000
#: The same of stages, which wait for each other: every operation takes a pass over all of them.
_LARGE_DIVIDED: Final = 400
_DRAWS_OF_LARGE: Final = 64
#: Runs of one setting on a quiet machine differ by less. [log]
_RESTLESS: Final = 0.1


class Costs(NamedTuple):
    """A layout's program, and how long each operation takes on the typical and on the slowest rank."""

    program: StepProgram
    terms: Terms
    median_s: Samples
    """Shape ``(num_operations, num_draws)``. [s]"""
    durations_s: Samples
    trained: TrainedStep | None = None
    """The training of this very layout under DistributedDataParallel, if there is one."""


@lru_cache(maxsize=16)
def cost_model(machine: MeasuredMachine, cluster: "Cluster | None", num_draws: int) -> CostModel:
    """Draws of all parameters of a machine, the same whenever the same is asked."""
    return CostModel(machine, num_draws=num_draws, cluster=cluster)


def layout_costs(question: Question) -> Costs:
    """Program of a layout and the duration of its operations, in every draw."""
    machine, workload, layout = _parts(question)
    cluster = question.cluster
    if cluster is not None and layout.world_size > cluster.num_devices:
        raise NotFeasible(
            f"--devices: must be at most {cluster.num_devices}, all that {cluster.name} has, "
            f"got {layout.world_size}; ask for fewer or enlarge the cluster file"
        )
    if layout.one_process:
        return _threaded_costs(question)
    if layout.world_size > 1 and machine.max_world_size == 1 and cluster is None:
        raise CalibrationUnavailable(
            f"--devices: {layout.world_size} devices need links between them, but {machine.device_name} was "
            f"measured alone; name those it has (--cluster '{layout.world_size} pcie4-x16', another of perfmodel "
            "devices --links, or a file), or calibrate with --nproc 2"
        )
    program = step_program(machine, workload, layout)
    if question.sync_every_step and machine.asynchronous:
        program = with_waiting_host(program)
    large = _LARGE_PROGRAM if layout.is_ddp else _LARGE_DIVIDED
    most = _DRAWS_OF_LARGE if len(program.operations) > large else question.num_draws
    model = cost_model(machine, cluster, min(question.num_draws, most))
    rate = question.loader_samples_per_s
    terms = model.terms(workload, layout, program, loader_samples_per_s=rate)
    if question.gradient_share != 1:
        terms = terms.sending(question.gradient_share)
    terms, trained = _brought_to_training(terms, program, workload, layout)
    median_s = terms.median_durations(program)
    durations_s = slowed(program, median_s, terms.slowest)
    return Costs(program, terms, median_s, durations_s, trained)


def _threaded_costs(question: Question) -> Costs:
    """Costs under nn.DataParallel: a device's own step, longer by the law of one process, and copies of the model."""
    from perfmodel.cost.step_law import ThreadedSteps  # noqa: PLC0415 - only of DataParallel

    machine, workload, layout = _parts(question)
    cluster, said = question.cluster, "--layout: one_process=yes (DataParallel)"
    if not machine.asynchronous or not isinstance(workload, TracedWorkload):
        raise NotFeasible(
            f"{said} is known of traced models on GPUs, got {workload.workload.name} on {machine.device_name}"
        )
    if cluster is not None and layout.dp > (inside := cluster.devices_per_node or layout.dp):
        raise NotFeasible(
            f"{said} must lie in one node, {inside} devices of {cluster.name}, got dp={layout.dp}"
        )
    if question.gradient_share != 1:
        raise NotFeasible(f"{said} sends gradients whole, got {question.gradient_share:g} of them")
    alone = layout_costs(replace(question, layout=layout.alone, loader_samples_per_s=None))
    alone_s = step_times(alone.program, alone.terms, alone.durations_s)
    constants, log_error, _ = _threads_of(machine)
    traced = workload.trace.at(micro_batch=layout.micro_batch)
    steps = ThreadedSteps(
        alone_s=alone_s,
        devices=np.array(layout.dp),
        modules=np.array(sum(traced.modules_entered())),
        parameter_bytes=np.array(sum(p.size_bytes for p in workload.workload.parameters)),
    )
    model = cost_model(machine, question.cluster, len(alone_s))
    off = model.wrong_together("nn.DataParallel", log_error)
    led_s, copied_s = (part_s * off for part_s in steps.parts_s(constants))
    # One stream of work, which already holds what hosts take.
    once = compile_step(workload.workload, layout.alone, asynchronous=False)
    last = len(once.operations) - 1
    copies = Operation("copy model and gradients", Stream.COMM, Cause.BROADCAST, (last,))
    program = StepProgram((*once.operations, copies))
    terms = alone.terms.times(led_s / sum(alone.terms.compute_s.values()))
    rate = question.loader_samples_per_s
    terms = replace(
        terms,
        exchange_s={Cause.BROADCAST: lambda _: copied_s},
        load_s=np.full(len(alone_s), layout.global_batch / rate if rate else 0.0),
        evidence={**terms.evidence, "nn.DataParallel": Evidence.INFERRED},
    )
    median_s = terms.median_durations(program)
    return Costs(program, terms, median_s, slowed(program, median_s, terms.slowest))


def _threads_of(machine: MeasuredMachine) -> tuple[FloatArray, float, bool]:
    """``shipped_threads`` of its device by the name in the catalogue."""
    from perfmodel.cost.rescaling import SCALED_FROM  # noqa: PLC0415 - only of DataParallel
    from perfmodel.cost.step_curves import shipped_threads  # noqa: PLC0415
    from perfmodel.documents.hardware import sheet_named, shipped_catalogue  # noqa: PLC0415

    sheet = sheet_named(machine.device_name.partition(SCALED_FROM)[0], shipped_catalogue())
    return shipped_threads("" if sheet is None else sheet.id)


def with_predicted(machine: MeasuredMachine, workload: TracedWorkload) -> TracedWorkload:
    """The workload with what the costs of its machine say of each step that was trained on several ranks."""

    def told(trained: TrainedStep) -> TrainedStep:
        if trained.world_size == 1:
            return trained
        layout = Layout(dp=trained.world_size, micro_batch=trained.micro_batch)
        bare = replace(workload, trained=())
        costs = layout_costs(Question(machine=machine, workload=bare, layout=layout))
        predicted_s = step_times(costs.program, costs.terms, costs.durations_s)
        return replace(trained, predicted_s=tuple(predicted_s.tolist()))

    known = (each for each in workload.trained if each.world_size <= machine.ranks_per_node)
    return replace(workload, trained=tuple(map(told, known)))


def _brought_to_training(
    terms: Terms, program: StepProgram, workload: MeasuredWorkload, layout: Layout
) -> tuple[Terms, TrainedStep | None]:
    """Terms of a data-parallel layout, brought to the nearest training on several ranks; that, if it is its own.

    The number of ranks comes before the micro-batch. With T measured and P predicted of that training, and p predicted
    of the layout:

        step = p T / P                                  on as many ranks: other batches are off by the same share
        step = p (1 + (T - P) / max(p, P))              else: as much longer, never more than that share

    Residuals of reference models at other batches: 5 % by the share, 9 % by the difference. From 2 ranks to 4 the
    share is off by 9 %, the difference by 6 %.
    """
    known = [each for each in workload.trained if each.world_size > 1]
    is_together = layout.is_ddp and layout.synchronisation is Synchronisation.DDP
    if not known or not is_together or layout.world_size == 1:
        return terms, None

    def distance(each: TrainedStep) -> tuple[float, float]:
        ranks, batches = each.world_size / layout.world_size, each.micro_batch / layout.micro_batch
        return abs(math.log(ranks)), abs(math.log(batches))

    trained = min(known, key=distance)
    step_s = float(step_times(program, terms, terms.durations(program))[0])
    predicted_s = trained.predicted_s[0]
    is_alike = layout.world_size == trained.world_size and layout.accumulation == 1
    least_s = predicted_s if is_alike else max(step_s, predicted_s)
    terms = terms.times(1 + (trained.step_s - predicted_s) / least_s)
    if layout != Layout(dp=trained.world_size, micro_batch=trained.micro_batch):
        return terms, None
    # A what-if, or other links, change what is predicted.
    if math.isclose(step_s, predicted_s):
        terms = replace(terms, evidence={**terms.evidence, "step": Evidence.MEASURED})
    return terms, trained


def measured_answer(question: Question) -> Answer:
    """What a layout takes on a calibrated machine."""
    machine, _, _ = _parts(question)
    costs = layout_costs(question)
    program, terms, median_s, durations_s, _ = costs
    trace = _steady_trace(program, terms, durations_s[:, :1])
    model = cost_model(machine, question.cluster, durations_s.shape[1])
    cases_s = [durations_s, _without(program, durations_s, *_EXCHANGES), median_s]
    step_s, silent_s, even_s = all_step_times(program, [(terms, case_s) for case_s in cases_s])
    crowded = crowding(question, trace)
    draws_s = _of_one_run(question, model, costs, step_s) * crowded
    size_bytes, bottleneck = largest_all_reduce(program), None
    if question.cluster is not None and size_bytes:
        group = groups(question.layout)[Cause.ALL_REDUCE]
        bottleneck = model.network.bottleneck(size_bytes, group)
    return Answer(
        question=question,
        program=program,
        trace=trace,
        step=interval(draws_s),
        step_s=draws_s,
        exposed_comm_s=np.maximum(0.0, step_s * crowded - silent_s),
        straggler_s=max(0.0, trace.step_s - float(even_s[0])),
        evidence=dict(terms.evidence),
        bottleneck_link=bottleneck,
    )


def measured_steps_s(questions: Sequence[Question]) -> list[Samples]:
    """The ``step_s`` of many questions and nothing else: by algebra, equal programs together. [s]"""
    every = [layout_costs(question) for question in questions]
    alike: dict[StepProgram, list[int]] = {}
    for index, costs in enumerate(every):
        alike.setdefault(costs.program, []).append(index)
    draws_s: dict[int, Samples] = {}
    for program, chosen in alike.items():
        cases = [(every[index].terms, every[index].durations_s) for index in chosen]
        draws_s |= zip(chosen, all_step_times(program, cases), strict=True)
    found = []
    for index, (question, costs) in enumerate(zip(questions, every, strict=True)):
        model = cost_model(_parts(question)[0], question.cluster, costs.durations_s.shape[1])
        crowded = 1.0
        if question.layout.pp > 1:
            nominal = algebra.trace(costs.program, costs.durations_s[:, 0])
            crowded = crowding(question, nominal)
        found.append(_of_one_run(question, model, costs, draws_s[index]) * crowded)
    return found


def step_times(program: StepProgram, terms: Terms, durations_s: Samples) -> Samples:
    """Duration of the step in every draw, by algebra. [s]"""
    [result] = all_step_times(program, [(terms, durations_s)])
    return result


def all_step_times(program: StepProgram, cases: Sequence[tuple[Terms, Samples]]) -> list[Samples]:
    """Durations of a step in many cases, all draws of all cases together. [s]

    Steps follow each other. On an asynchronous device the host never waits: it runs ahead until one of the
    two sides hides the other, and no step but the first waits for its first launch.

        step = max(step without launches, step of launches alone)

    If the host waits in every step, each one begins with an idle device: the program as it stands.
    """
    durations_s = np.concatenate([case_s for _, case_s in cases], axis=1)
    every = [terms for terms, _ in cases]
    step_s = np.max(
        [_makespans(program, every, s) for s in steady_sides(program, durations_s)], axis=0
    )
    return np.split(step_s, len(cases))


def steady_sides(program: StepProgram, durations_s: Samples) -> list[Samples]:
    """Durations of what may bind the steady step: of the device and of the host, or of both together."""
    if program.host_waits or not program.on_stream(Stream.HOST):
        return [durations_s]
    return [_without(program, durations_s, Stream.HOST), _without(program, durations_s, *_ISSUED)]


def _steady_trace(program: StepProgram, terms: Terms, nominal_s: Samples) -> Trace:
    """The nominal step; on an asynchronous device that of the side which binds."""
    interference = Interference(
        compute_speed=float(terms.compute_speed[0]), comm_speed=float(terms.comm_speed[0])
    )
    sides_s = [side_s[:, 0] for side_s in steady_sides(program, nominal_s)]
    if interference.is_none or not program.on_stream(Stream.COMM):
        sides = [algebra.trace(program, side_s) for side_s in sides_s]
    else:
        from perfmodel.engine.simulate import simulate  # noqa: PLC0415 - free overlap needs no SimPy

        sides = [
            simulate(program, side_s[np.newaxis], interference=interference) for side_s in sides_s
        ]
    return max(sides, key=lambda trace: trace.step_s)


def _makespans(program: StepProgram, cases: Sequence[Terms], durations_s: Samples) -> Samples:
    """Ends of one step from its start, the draws of all cases together. [s]

    A few thousand draws take hardly longer than a few hundred. Where overlap is free the recursion in
    max-plus algebra says the same in a fraction of the time.
    """
    compute_speed = np.concatenate([terms.compute_speed for terms in cases])
    comm_speed = np.concatenate([terms.comm_speed for terms in cases])
    is_free = (compute_speed == 1).all() and (comm_speed == 1).all()
    # Launches alone leave nothing that could contend.
    if is_free or not durations_s[list(program.on_stream(Stream.COMM))].any():
        return algebra.step_times(program, durations_s)
    ends_s = algebra.end_times_with_interference(
        program, durations_s, compute_speed=compute_speed, comm_speed=comm_speed
    )
    return np.asarray(ends_s.max(axis=0))


def _parts(question: Question) -> tuple[MeasuredMachine, MeasuredWorkload, Layout]:
    machine, workload = question.machine, question.workload
    assert isinstance(machine, MeasuredMachine), machine
    assert isinstance(workload, MeasuredWorkload), workload
    return machine, workload, question.layout


def _without(program: StepProgram, durations_s: Samples, *streams: Stream) -> Samples:
    """The same durations, with what some streams do costing nothing."""
    result = durations_s.copy()
    for stream in streams:
        result[list(program.on_stream(stream))] = 0.0
    return result


_NO_RESIDUAL: Final = Residual(single_log_errors=(0.0,), ddp_log_errors=(0.0,))
#: Of the variance of an occasion, what settings on as many ranks share and others do not: ten campaigns, processors.
_OF_RANKS: Final = 0.15
#: How far loops of other processes are off a training in place, in log, beside what runs scatter by: processors.
_OTHER_PROCESSES: Final = 0.05


def _of_one_run(question: Question, model: CostModel, costs: Costs, step_s: Samples) -> Samples:
    """Draws with what parameters do not tell: one more round, and the form of the model. [s]

    A step on several ranks that was measured is as uncertain as its mean, and has the form of one on a single rank.
    With T measured, P predicted of it and p of a what-if, each draw takes T p / P.

    Rounds and occasions move every step; settings on as many ranks move together:

        common = sqrt(1 - s) of all + sqrt(s) of as many ranks
    """
    machine, workload, layout = _parts(question)
    if layout.one_process:
        layout = layout.alone  # its law is fitted to steps, and told by its own error
    machine = _as_trained_here(machine, workload, layout, costs)
    num_draws = model.num_draws
    again = machine.repeatability
    used = families(layout)
    reached = {c.family for c in machine.layouts if ranks_beside(c.family, layout) <= c.world_size}
    if used and reached.issuperset(used):
        # What runs of such layouts missed comes in place of what those of DDP missed, on as many ranks as ran.
        machine = replace(machine, residual=_NO_RESIDUAL)
    form = model_form(
        machine,
        {} if question.validation is None else question.validation.signed_errors,
        workload,
        # DDP alone exchanges once in a step, however many micro-batches it has.
        layout if layout.is_ddp else replace(layout.beside, accumulation=1),
        num_draws=num_draws,
        is_measured=costs.trained is not None,
        run_error=again.run_of(layout.world_size),
    )
    if used:
        form = form * form_factors(model, layout)
    # What is predicted is one more round, whose own deviation comes beside the error of their mean.
    common = np.random.default_rng(SEED).standard_normal(num_draws)
    common[0] = 0.0
    of_ranks = model.deviates(f"occasion of {layout.world_size} ranks")
    common = math.sqrt(1 - _OF_RANKS) * common + math.sqrt(_OF_RANKS) * of_ranks
    spread = again.common(machine.num_rounds)
    if costs.trained is not None:
        predicted_s = np.resize(costs.trained.predicted_s, num_draws)
        errors = costs.trained.relative_error * model.deviates("trained on several ranks")
        step_s = step_s * predicted_s[0] / predicted_s * np.exp(errors)
    return np.asarray(step_s * np.exp(spread * common) * form)


def _as_trained_here(
    machine: MeasuredMachine, workload: MeasuredWorkload, layout: Layout, costs: Costs
) -> MeasuredMachine:
    """The machine with the noise of the trainings of this workload, if its processors trained this step.

    How quiet the host was then counts, and not how quiet it was during calibration. No curve was read, so that
    no residual of one counts.
    """
    alone = layout.is_ddp and layout.world_size == layout.accumulation == 1
    asked = (1, layout.micro_batch)
    found = (e for e in workload.trained if alone and (e.world_size, e.micro_batch) == asked)
    # Over other links, nobody trained it.
    trained = costs.trained if "step" in costs.terms.evidence else next(found, None)
    is_foreign = machine.asynchronous or machine.rescaling is not None
    if is_foreign or trained is None or trained.run_log_error is None:
        return machine
    run = trained.run_log_error
    occasion = math.hypot(math.sqrt(OCCASION_OVER_RUN) * run, _OTHER_PROCESSES)
    again = Repeatability(run={layout.world_size: run}, round=0.0, occasion=occasion)
    return replace(machine, residual=_NO_RESIDUAL, repeatability=again)


def crowding(question: Question, trace: Trace) -> float:
    """Factor on a pipelined step by how many stages compute at once.

    Ranks share processors and the path to memory. What all of them do at an instant is slowed alike, so that
    time passes more slowly: with k(t) stages at work at instant t of the step with one, on compute or on
    exchanges that a library works out on the processors,

        step = integral of slowdown(k(t)) dt

    Where all stages are at work they are in step.
    """
    machine, workload, layout = _parts(question)
    if layout.pp == 1:
        return 1.0
    by_processors = library_of(machine.backend).by_processors
    busy_on = {Stream.COMPUTE, *(_EXCHANGES if by_processors else ())}
    ranks = phases_under(machine, workload, layout).world_size
    largest = in_step(machine, workload, layout.pp * ranks)
    at_once = [*range(ranks, layout.pp * ranks, ranks), largest]
    slowdowns = [contention(workload, layout.micro_batch, n, than=ranks) for n in at_once]
    works = [o.stream in busy_on for o in trace.program.operations]
    starts_s, ends_s = trace.start_s[0][works], trace.end_s[0][works]
    at_s = np.concatenate([starts_s, ends_s])
    change = np.concatenate([np.ones_like(starts_s), -np.ones_like(ends_s)])
    order = np.argsort(at_s, kind="stable")
    busy = np.clip(np.cumsum(change[order])[:-1], 1, layout.pp).astype(int)
    spans_s = np.diff(at_s[order])
    stretched_s = float(np.sum(spans_s * (np.array(slowdowns)[busy - 1] - 1)))
    return 1 + stretched_s / trace.step_s


def largest_all_reduce(program: StepProgram) -> Bytes:
    """Bytes of the largest gradient bucket of a step; 0 if there is none. [B]"""
    sizes = (o.size_bytes for o in program.operations if o.cause is Cause.ALL_REDUCE)
    return max(sizes, default=0)


def measured_caveats(
    question: Question, found: Mapping[Layout, Mapping[str, Evidence]]
) -> tuple[str, ...]:
    """What a reader must know before acting on the numbers of some layouts, given their evidence."""
    machine, workload, _ = _parts(question)
    cluster, rescaling = question.cluster, machine.rescaling
    largest = max(1 if layout.one_process else layout.world_size for layout in found)
    said = [*unsealed_notes()]
    if machine.device_costs is None:  # runs of others are as old as they are
        said += [f"calibration {note}" for note in age_notes(machine.origin.made_utc)]
    if machine.steal > QUIET:
        said.append(
            f"CPU steal time was {100 * machine.steal:.0f} % in calibration: repeat it on a quiet host"
        )
    scatter = max(machine.repeatability.run.values(), default=0.0)
    if scatter > _RESTLESS:
        said.append(
            f"runs of one setting differed by {100 * scatter:.0f} %: calibrate on a quiet machine"
        )
    batches = {layout.micro_batch for layout in found}
    # Three lines are shown: first what the times of this workload rest on, then what no answer of this machine knows.
    said += [*_origin_caveats(machine, workload, sorted(batches)), *machine.undetermined]
    if rescaling is not None:
        said += [*rescaling.notes, *(rescaling.notes_on_groups if largest > 1 else ())]
    measured = {cost.family for cost in machine.layouts}
    if not measured.issuperset(name for layout in found for name in families(layout)):
        said.append("FSDP, TP and PP: 5 % of error assumed for each; see validate strategies")
    if largest > machine.max_world_size:
        links = _assumed_links(machine, cluster)
        ranks = machine.max_world_size
        known = f"{ranks} ranks" if ranks > 1 else "one rank"
        said.append(f"{largest} devices assume {links}; {known} measured")
    is_crossed = machine.num_nodes > 1 and machine.ranks_per_node > 1
    if is_crossed and cluster is not None and not any(t.as_measured for t in cluster.tiers):
        told = "collectives crossed two tiers at once: node links are the cluster file's"
        said.append(told + ("; 'measured' names those measured" if machine.between_nodes else ""))
    outside = {
        layout.micro_batch
        for layout, evidence in found.items()
        if evidence["compute"] is Evidence.EXTRAPOLATED and layout.is_ddp
    }
    if any(layout.one_process for layout in found):
        _, log_error, is_own = _threads_of(machine)
        known = "other models on this card" if is_own else "other cards, all on PCIe"
        within = f"90 % of undisturbed steps within {math.expm1(log_error):.0%} by {known}"
        said.append(f"nn.DataParallel: {within}; memory is not modelled")
    if outside and machine.workload(question.workload_name) is not None:
        listed = ", ".join(map(str, sorted(outside)))
        said.append(f"micro-batches outside the calibrated range: {listed}")
    return tuple(said)


def _assumed_links(machine: MeasuredMachine, cluster: "Cluster | None") -> str:
    """Links that more devices than were measured are taken to have."""
    if cluster is None:
        return "equal links in one ring"
    if cluster is machine.cluster:
        runs = f", from {cluster.tiers[-1].source}"
        return cluster.name + (runs if cluster.evidence is Evidence.INFERRED else " (--cluster)")
    if any(tier.as_measured for tier in cluster.tiers):
        return "links between nodes as measured"
    return "links as in the cluster file"


#: A caveat is one line.
_NAMED_FAMILIES: Final = 3


def _origin_caveats(
    profile: MeasuredMachine, workload: MeasuredWorkload, batches: Sequence[int]
) -> tuple[str, ...]:
    """How a workload that was never run came to its times at the micro-batches asked for."""
    name = workload.workload.name
    names = ", ".join(workload.untimed)
    untimed = (f"never timed, taken at the machine's peak: {names}",) if names else ()
    # Where curves are read that lie nearest to the micro-batches.
    known = dict(workload.far)
    nearest = (min(known, key=lambda at: abs(math.log(at / batch))) for batch in batches if known)
    if far := [*dict.fromkeys(family for batch in nearest for family in known[batch])]:
        more = f" and {len(far) - _NAMED_FAMILIES} more" if len(far) > _NAMED_FAMILIES else ""
        untimed = (*untimed, f"far from every timing: {', '.join(far[:_NAMED_FAMILIES])}{more}")
    if profile.rescaling is not None:
        return untimed
    if profile.workload(name) is not None:
        return ()
    if profile.device_costs is not None:
        return _law_caveats(profile.device_costs, workload)
    if not workload.measured_batches:
        return f"{name} was never run: its operators are read from curves", *untimed
    return f"{name} was not calibrated, but measured in place", *untimed


def measured_in_place(workload: MeasuredWorkload) -> Iterator[str]:
    """What of a workload was measured in place, in words."""
    found: dict[str, list[int]] = defaultdict(list)
    for each in workload.trained:
        ranks = each.world_size
        words = f"under DDP on {ranks} ranks" if ranks > 1 else "trained in place"
        found[words].append(each.micro_batch)
    timed = [n for n in workload.measured_batches if n not in found["trained in place"]]
    for words, batches in (*found.items(), ("operators timed in place", timed)):
        if batches:
            yield f"{words} at micro-batch {', '.join(map(str, batches))}"


def _law_caveats(costs: DeviceCosts, workload: MeasuredWorkload) -> tuple[str, ...]:
    """What a step rests on whose law was fitted to steps of other models."""
    within = math.expm1(workload.shared_log_error)
    known = [(each.precision, each.memory_format) for each in costs.left_out]
    assert isinstance(workload, TracedWorkload), workload
    from perfmodel.cost.step_work import mode_of  # noqa: PLC0415

    said = f"inferred from {costs.num_rows} steps of {costs.num_models} models"
    if mode_of(workload.trace) in known:
        return (f"{said}: 90 % of new ones within {within:.0%}; {costs.source}",)
    modes = ", ".join(map(" ".join, known))
    return (
        f"within {within:.0%} assumed: {said}, none in this precision and memory format (only {modes})",
    )

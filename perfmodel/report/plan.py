"""Ranked options and layouts, costs, courses of jobs, the law of the batch, clauses: tables and sentences.

The answer to a plan is also a task for SkyPilot: YAML of the chosen option, or a program with a time estimator.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from perfmodel.documents.acceptance import (
    AcceptanceDocument,
    AcceptanceTerms,
    Clause,
    ClauseKind,
    Verdict,
)
from perfmodel.documents.budget import BatchDocument, CostDocument, CostOption, GoodputDocument
from perfmodel.documents.plan import OptionVerdict, PlanDocument, PlanRow
from perfmodel.documents.prediction import ParallelismPlanDocument
from perfmodel.errors import UsageError
from perfmodel.machine import DEVICES_PER_NODE
from perfmodel.plan.acceptance import LARGE_BYTES, LOSS, power
from perfmodel.report import (
    Table,
    caveat_lines,
    count_interval,
    duration_interval,
    interval,
    number,
    one_line,
    percent,
    table,
)
from perfmodel.units import format_bytes, format_duration, format_rate

_ROWS_SHOWN = 5


def plan_table(document: PlanDocument) -> Table:
    """The best size of every option, the winner first."""
    limits, work = document.plan.limits, document.plan.work
    amount = (
        f"{work.total_samples:,.0f} samples"
        if work.tokens is None
        else f"{work.tokens:,.0f} tokens"
    )
    return table(
        f"{work.name}: {amount} from {document.start} to {limits.deadline}",
        document.options,
        {
            "<Option": "row.option",
            "De-\nvices": "row.devices:,",
            "Batch\neach": "row.micro_batch",
            "Time": "row.elapsed_s",
            f"Cost,\n{document.plan.currency}": "row.cost:k",
            "P(dead-\nline)": "row.deadline_probability:%",
            "P(all\nlimits)": "row.probability:%",
            "<Verdict": lambda entry: "feasible" if entry.is_feasible else "not feasible",
        },
        caption=f"{document.num_feasible:,} of {document.num_candidates:,} candidates keep all limits with "
        f"{percent(limits.probability)}; one row per option, the cheapest or the one that comes nearest. "
        "[p5-p95]: 90 % of outcomes should lie inside.",
    )


def plan_lines(document: PlanDocument, *, verbose: bool = False) -> Iterator[str]:
    """Why, what else, what the answer depends on, and what to measure next."""
    plan = document.plan
    yield from (f"warning: {warning}" for warning in document.warnings)
    for entry in document.options:
        row, fewest = entry.row, entry.smallest_devices
        yield f"{_named(document, row)}: {entry.reason}{_break_even(entry, document)}"
        if row.layout is not None:
            yield f"  layout: {row.layout}"
        if row.needed_bytes is not None and row.fit_probability is not None:
            size = format_bytes(row.needed_bytes)
            yield f"  memory: {size} of each device, fits with {percent(row.fit_probability)}"
        found = "none of its sizes" if fewest is None else f"{fewest:,}"
        wanted = percent(plan.limits.probability)
        yield f"  fewest devices for the deadline with {wanted}: {found}"
    if document.ranked:
        yield _winner_line(document.ranked[0])
        yield from more_money_lines(document)
    for row in document.ranked[:_ROWS_SHOWN]:
        yield (
            f"ranked: {_named(document, row)}, batch {row.micro_batch}: "
            f"{format_duration(row.elapsed_s.nominal)}, {row.cost.nominal:,.0f}, {percent(row.probability)}"
        )
    for swing in document.tornado:
        yield (
            f"depends on {swing.assumption}: {swing.low_cost:,.0f} to {swing.high_cost:,.0f} "
            f"{plan.currency}, {format_duration(swing.low_elapsed_s)} to "
            f"{format_duration(swing.high_elapsed_s)}"
        )
    yield f"next measurement: {document.next_measurement}"
    caveats = list(document.caveats)
    if document.num_skipped:
        caveats.append(f"{document.num_skipped} sizes do not split the global batch evenly")
    if document.num_too_large:
        caveats.append(f"{document.num_too_large} sizes do not fit into memory")
    yield from caveat_lines(caveats, verbose=verbose)


def _named(document: PlanDocument, row: PlanRow) -> str:
    """Option, size and device."""
    return f"{row.option} ({row.devices:,} x {document.machine_of[row.option].device})"


#: What counts as a little more money, and as sooner.
_LITTLE: Final = 0.25
_SOONER: Final = 0.9
_MOST_OFFERS: Final = 2


def more_money_lines(document: PlanDocument) -> list[str]:
    """What a little more money than the first buys, such as ``4.8 % more: half the time``."""
    first = document.ranked[0]
    found = {}
    for row in (*document.ranked, *document.front):
        more = row.cost.nominal / first.cost.nominal - 1
        takes = row.elapsed_s.nominal / first.elapsed_s.nominal
        if 0 < more <= _LITTLE and takes <= _SOONER:
            found[more] = (
                f"a little more money: {_named(document, row)} costs {percent(more)} more and takes "
                f"{percent(takes)} of the time ({format_duration(row.elapsed_s.nominal)})"
            )
    return [found[more] for more in sorted(found)[:_MOST_OFFERS]]


def _break_even(entry: OptionVerdict, document: PlanDocument) -> str:
    if entry.break_even_price is not None:
        return f"; breaks even at {entry.break_even_price:.4g} per device-hour"
    is_rival = entry.is_feasible and entry is not document.options[0]
    return "; no price per device-hour makes up for the rest" if is_rival else ""


def _winner_line(row: PlanRow) -> str:
    facts = [
        f"step {one_line(duration_interval(row.step_s))}",
        f"global batch {row.global_batch:,}",
    ]
    if row.power_kw is not None and row.energy_kwh is not None:
        facts.append(f"{row.power_kw:,.1f} kW, {row.energy_kwh:,.0f} kWh")
    if row.checkpoint_interval_s is not None:
        every = format_duration(row.checkpoint_interval_s)
        facts.append(f"a checkpoint every {every}, {row.expected_stops:.1f} stops")
    return f"the first: {'; '.join(facts)}; weakest evidence: {row.evidence}"


def infeasible_line(document: PlanDocument) -> str:
    """One line that names the nearest option, and what it would take."""
    nearest = document.options[0]
    row = nearest.row
    return (
        f"plan: no candidate keeps all limits; nearest: {_named(document, row)}, batch "
        f"{row.micro_batch}: {nearest.reason}"
    )


def cost_table(document: CostDocument) -> Table:
    """One way of paying per row, the cheapest first."""
    budget = document.budget
    return table(
        f"{budget.buy.devices} devices at {percent(budget.utilisation)} utilisation",
        document.options,
        {
            "<Option": "cost.name",
            f"{budget.currency}\nper year": "yearly:,.0f",
            f"{budget.currency} per useful\ndevice-hour": "per_useful_device_hour:.3f",
            "Buying pays at\nutilisation": _crossover,
        },
    )


def cost_lines(document: CostDocument) -> Iterator[str]:
    """What buying is made of, where the prices come from, and which are stale."""
    budget, items = document.budget, document.items
    parts = {
        "depreciation": items.depreciation,
        "energy": items.idle_energy + items.working_energy * budget.utilisation,
        "staff": items.staff,
        "upkeep": items.upkeep,
    }
    listed = ", ".join(f"{name} {value:,.0f}" for name, value in parts.items())
    yield from (f"warning: {warning}" for warning in document.warnings)
    yield f"Buying: {items.capital:,.0f} {budget.currency} at the start; per year {listed}"
    for name, price in budget.prices().items():
        yield (
            f"price: {name}: {price.value:,.10g} {price.currency} {price.unit.value}, {price.date}, "
            f"{price.region}, term {price.term}, {price.source}"
        )


def _crossover(option: CostOption) -> str:
    if option.cost.name == "buy":
        return "-"
    pays = option.buying_pays
    if pays is None:
        return "never"
    if pays.at_least > 0:
        return f"from {percent(pays.at_least)}"
    return "always" if pays.at_most >= 1 else f"up to {percent(pays.at_most)}"


def goodput_table(document: GoodputDocument) -> Table:
    """Where the time of the job goes."""
    total_s = document.elapsed_mean_s
    return table(
        "Time by activity",
        [*document.spent_mean_s.items(), ("all", total_s)],
        {"<Activity": "0", "Time": "1:s", "Share": lambda spent: percent(spent[1] / total_s)},
        caption=f"Mean of {document.replicas} courses.",
    )


def goodput_lines(document: GoodputDocument, *, verbose: bool = False) -> Iterator[str]:
    """What the courses say, one sentence per line."""
    job, effective = document.job, document.effective_fraction
    mtbf = "never" if math.isinf(job.mtbf_s) else f"every {format_duration(job.mtbf_s)}"
    causes = [f"{name} {number(count)}" for name, count in document.stops_mean.items()]
    by_cause = f" ({', '.join(causes)})" if len(causes) > 1 else ""
    yield f"Devices: {job.devices}, simulated {document.replicas} times"
    yield (
        f"End: {one_line(duration_interval(document.elapsed_s))} after the start, for "
        f"{format_duration(job.work_s)} of work (median and 90 % of courses)"
    )
    low, high = percent(effective.p5), percent(effective.p95)
    yield f"Effective training time: {percent(effective.nominal)} [{low} - {high}]"
    yield f"Unplanned stops: {one_line(interval(document.unplanned_stops))}, {mtbf}{by_cause}"
    yield (
        f"Checkpoints: every {format_duration(job.checkpoint_interval_s)} of work, "
        f"{format_duration(job.checkpoint_write_s)} each"
    )
    best = "the shorter the better, as a checkpoint costs nothing"
    if math.isinf(job.mtbf_s):
        best = "none, as nothing ever fails"
    elif document.best_interval_s is not None:
        best = format_duration(document.best_interval_s)
    yield f"Best interval: {best}"
    if document.deadline_s is not None and document.deadline_probability is not None:
        share = percent(document.deadline_probability)
        yield f"Done within {format_duration(document.deadline_s)}: {share} of the courses"
    yield from caveat_lines(document.caveats, verbose=verbose)


_TESTED: Final = 3
#: What a search takes for granted wherever matrices are shared.
_GRANTED: Final = " sequence_parallel=yes"


def search_table(document: ParallelismPlanDocument) -> Table:
    """The fastest layouts, each with what it loses to the first."""
    trained = document.trained
    return table(
        f"{trained.name}, {trained.devices} x {document.device_name} of "
        f"{format_bytes(document.capacity_bytes)}, {trained.global_batch} sequences of "
        f"{trained.sequence} tokens per step",
        document.ranked,
        {
            "rank": lambda entry: f"{entry.rank}{' tie' if entry.ties and entry.loses_in else ''}",
            "step (90 %)": lambda entry: (
                f"{format_duration(entry.step_s.nominal)} ({format_duration(entry.step_s.p5)} - "
                f"{format_duration(entry.step_s.p95)})"
            ),
            "MFU": "mfu:.0%",
            "memory": "needed_bytes",
            "fits": "fit_probability:.0%",
            "<layout": lambda entry: entry.layout.replace(_GRANTED, ""),
            "<loses in": lambda entry: (
                f"{entry.loses_in} {format_duration(entry.loses_by_s)}" if entry.loses_in else ""
            ),
        },
        caption="With sequence_parallel=yes wherever tp > 1.",
    )


def search_lines(document: ParallelismPlanDocument, *, verbose: bool = False) -> Iterator[str]:
    """How much was searched, why the runner-up lost, caveats."""
    counts = f"{document.num_feasible} layouts are possible, {document.num_fitting} fit"
    yield f"{counts}; evidence {document.evidence}"
    ranked = document.ranked
    first_s = ranked[0].step_s.nominal if ranked else 0.0
    if len(ranked) > 1:
        second = ranked[1]
        where = f", most of it in {second.loses_in} ({format_duration(second.loses_by_s)})"
        yield (
            f"runner-up: {second.layout}, {'a tie' if second.ties else 'behind'}: "
            f"{second.step_s.nominal / first_s - 1:+.1%}{where if second.loses_by_s > 0 else ''}; "
            f"slower with probability {second.slower_probability:.0%}"
        )
    tested = document.test_first
    if len(tested) > 1:  # before a long job, and what that is worth
        few = tested[:_TESTED]
        more = f"; {len(tested)} layouts: {tested[-1].chance:.0%}" if len(tested) > _TESTED else ""
        yield f"test first: {'; '.join(entry.layout for entry in few)}"
        yield f"one of them is within 3 % of the fastest with {few[-1].chance:.0%}{more}"
    ties = sum(entry.ties for entry in ranked) - 1
    if ties:
        yield f"{ties} more of those shown tie with the first: the error bar cannot tell them apart"
    lost = next((entry for entry in ranked if not entry.ties), None)
    if lost is not None and lost is not ranked[1]:
        yield (
            f"the first that loses beyond the error bar: {lost.layout}, by "
            f"{lost.step_s.nominal / first_s - 1:.1%}, most of it in {lost.loses_in} "
            f"({format_duration(lost.loses_by_s)}); slower with probability {lost.slower_probability:.0%}"
        )
    yield from caveat_lines(document.caveats, verbose=verbose)


#: Accelerators as SkyPilot calls them (``sky show-gpus``); longer names before those that they hold.
_ACCELERATORS: Final = (
    *("GB200", "GH200", "B200", "H200", "H100", "A100", "L40S", "L40", "L4", "A10G", "A10"),
    *("V100", "T4", "RTX4090", "RTX3090", "MI300X"),
)
#: Sizes of memory that are names of their own. [GB]
_LARGE: Final = {"A100": "80", "V100": "32"}
_RUN: Final = """\
torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node "$SKYPILOT_NUM_GPUS_PER_NODE" \\
  --node-rank "$SKYPILOT_NODE_RANK" --master-port 29500 \\
  --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" train.py"""


def accelerator(device: str) -> str:
    """SkyPilot's name of a device; ``UsageError`` if it has none."""
    squeezed = re.sub(r"[^A-Z0-9]", "", device.upper())
    name = next((name for name in _ACCELERATORS if name in squeezed), None)
    if name is None:
        raise UsageError(
            f"--export: SkyPilot must rent the device, got {device!r}; it knows {', '.join(_ACCELERATORS)}"
        )
    size = _LARGE.get(name)
    return f"{name}-{size}GB" if size and size in squeezed.partition(name)[2] else name


def skypilot_text(document: PlanDocument, path: Path) -> str:
    """A task, or a program if the file is to end in ``.py``, of a plan that has an answer."""
    if path.suffix == ".py":
        return _program(document)
    row = document.ranked[0]
    nodes, held = _nodes(document, row)
    run = "\n".join(f"  {line}" for line in _RUN.splitlines())
    says = "\n".join(f"# {line}" for line in _says(document, row))
    return (
        f"{says}\nname: {json.dumps(_name(document))}\nnum_nodes: {nodes}\nresources:\n"
        f"  accelerators: {json.dumps(held)}\nrun: |\n{run}\n"
    )


def _nodes(document: PlanDocument, row: PlanRow) -> tuple[int, str]:
    """Nodes, and what each of them holds, such as ``H100:8``."""
    [option] = [each for each in document.plan.option if each.name == row.option]
    device = document.machine_of[row.option].device
    size = f" {option.device_memory}" if option.device_memory else ""
    each = math.gcd(row.devices, option.devices_per_node or DEVICES_PER_NODE)
    return row.devices // each, f"{accelerator(option.device or device + size)}:{each}"


def _says(document: PlanDocument, row: PlanRow) -> Sequence[str]:
    """What was chosen and predicted, a line each."""
    plan = document.plan
    [option] = [each for each in plan.option if each.name == row.option]
    lines = [
        f"{plan.work.name}: {row.devices:,} x {row.option}, batch {row.micro_batch} of each device",
        f"predicted: {duration_interval(row.elapsed_s)}, {row.cost.nominal:,.0f} {plan.currency}",
        f"all limits are kept with {row.probability:.0%}",
        f"price: {option.price.value:g} {option.price.currency} {option.price.unit.value}, {option.price.source}",
    ]
    if row.layout is not None:
        lines.append(f"layout: {row.layout}")
    if row.checkpoint_interval_s is not None:
        lines.append(f"a checkpoint every {format_duration(row.checkpoint_interval_s)}")
    return [re.sub(r"\s+", " ", line) for line in lines]


def _program(document: PlanDocument) -> str:
    """Every ranked row, so that SkyPilot's optimizer weighs predicted times with its own prices.

    ``sky.optimize`` asks a server, and sends it YAML that holds no estimator: the optimizer is called here.
    """
    first = document.ranked[0]
    seconds: dict[int, dict[str, int]] = {}
    for row in (*document.ranked, *document.front):
        nodes, held = _nodes(document, row)
        known = seconds.setdefault(nodes, {})
        known[held] = min(known.get(held, 2**62), round(row.elapsed_s.nominal))
    says = "\n".join(f"# {line}" for line in _says(document, first))
    return f'''{says}
"""Times of perfmodel for SkyPilot's optimizer: python FILE.py launches nothing, it prints the choice."""

import sky

#: Predicted duration by number of nodes and by what each of them holds. [s]
SECONDS = {seconds}
NUM_NODES = {_nodes(document, first)[0]}
RUN = {json.dumps(_RUN)}


def time_estimator(resources):
    """Predicted duration on these resources. [s]"""
    [(name, count)] = resources.accelerators.items()
    return SECONDS[NUM_NODES][f"{{name}}:{{count:g}}"]


def task():
    """The training on any of the resources that were predicted for this number of nodes."""
    made = sky.Task(name={json.dumps(_name(document))}, run=RUN, num_nodes=NUM_NODES)
    made.set_resources({{sky.Resources(accelerators=held) for held in SECONDS[NUM_NODES]}})
    return made.set_time_estimator(time_estimator)


if __name__ == "__main__":
    with sky.Dag() as dag:
        task()
    sky.Optimizer.optimize(dag)
'''


def _name(document: PlanDocument) -> str:
    """Letters, digits and dashes, as names of tasks are."""
    return re.sub(r"[^a-z0-9]+", "-", document.plan.work.name.casefold()).strip("-") or "training"


def batch_table(document: BatchDocument) -> Table:
    """One row per batch size; readable on 80 columns."""
    return table(
        "Batch size and time to target",
        document.outlooks,
        {
            "Batch": "batch:g",
            "Samples\nto target": "samples:k",
            "Steps": lambda entry: count_interval(entry.steps).partition("\n")[0],
            "Samples/s": "samples_per_s:number",
            "Samples/s\nspeed-up": "throughput_speedup:number",
            "Target\nspeed-up": "target_speedup",
            "Time to\ntarget": "time_to_target_s",
        },
        caption=f"Speed-ups against batch {document.reference_batch:g}; [p5-p95].",
    )


def batch_lines(document: BatchDocument, *, verbose: bool = False) -> Iterator[str]:
    """The critical batch and what must be known before acting."""
    critical = one_line(count_interval(document.critical_batch))
    rates = ", ".join(
        f"{entry.batch:g} x{number(entry.learning_rate_factor)}"
        for entry in document.outlooks
        if entry.batch != document.reference_batch
    )
    yield f"Critical batch (twice the samples of a tiny one): {critical}"
    against = f"against batch {document.reference_batch:g}: {rates}"
    yield f"Learning rate of SGD {against} (Adam: the square roots)"
    yield from caveat_lines(document.caveats, verbose=verbose)


def terms_table(terms: AcceptanceTerms) -> Table:
    """The clauses, as they stand in the file."""
    count = len(terms.clause)
    whole = f"all {count} clauses" if count > 1 else "its clause"
    return table(
        f"Acceptance: like {terms.device_name}",
        terms.clause,
        {
            "<Clause": "name",
            "Reference": lambda clause: clause_value(clause, clause.reference),
            "Un-\ncertainty": "reference_error:%",
            "Limit": _limit,
            f"Finds a loss\nof {percent(LOSS)}": lambda clause: percent(
                power(clause, confidence=terms.each_confidence)
            ),
        },
        caption=f"A machine as good as the reference, measured as well, passes {whole} "
        f"with {percent(terms.confidence)} at least: false alarm at most {percent(1 - terms.confidence)}. "
        "Uncertainty: standard error.",
    )


def terms_lines(terms: AcceptanceTerms) -> Iterator[str]:
    """What the person who signs must know of the clauses: which are too weak, and what would make them strong."""
    each = terms.each_confidence
    for clause in terms.clause:
        if clause.remedy:
            found = f"{percent(LOSS)} with {percent(power(clause, confidence=each))}"
            yield f"too weak: {clause.name}: finds a loss of {found}; {clause.remedy}"
    sizes = [clause.size_bytes for clause in terms.clause if clause.kind is ClauseKind.BUSBW]
    largest = max((size for size in sizes if size is not None), default=LARGE_BYTES)
    has_job = any(clause.kind is ClauseKind.STEP for clause in terms.clause)
    if largest < LARGE_BYTES and not has_job:
        yield (
            f"caveat: no all-reduce of {format_bytes(LARGE_BYTES)} was measured: its bandwidth is "
            f"promised at {format_bytes(largest)}"
        )
    kinds = {clause.kind for clause in terms.clause}
    if ClauseKind.STEP in kinds:
        kinds.add(ClauseKind.GEMM)  # the step holds them
    if absent := [words for kind, words in _PROMISES.items() if kind not in kinds]:
        yield (
            f"caveat: nothing is promised about {', '.join(absent)}: the profile holds none; calibrate a "
            "reference"
        )


#: What a contract should speak of; a goodput is asked for apart.
_PROMISES: Final = {
    ClauseKind.GEMM: "matrix products",
    ClauseKind.BUSBW: "collectives",
    ClauseKind.SPREAD: "stragglers",
    ClauseKind.STEP: "steps",
}


def judgement_table(document: AcceptanceDocument) -> Table:
    """Every clause beside what was delivered."""
    return table(
        f"Acceptance of {document.delivered_name}",
        document.judged,
        {
            "<Clause": "clause.name",
            "Limit": lambda entry: _limit(entry.clause),
            "Delivered": lambda entry: (
                "-" if entry.delivered is None else clause_value(entry.clause, entry.delivered)
            ),
            "Uncertainty": lambda entry: (
                "-" if entry.delivered is None else percent(entry.delivered_error)
            ),
            "P(kept)": "probability_kept:%",
            "<Verdict": "verdict.value",
        },
        caption=f"Passed or failed: with {percent(document.terms.each_confidence)} confidence each, which makes "
        f"{percent(document.terms.confidence)} for all. Uncertainty: standard error of what was delivered.",
    )


def judgement_lines(document: AcceptanceDocument) -> Iterator[str]:
    """Who is to blame, and what to do where uncertainty is too large."""
    for entry in document.judged:
        yield from (f"{entry.clause.name}: {suspect}" for suspect in entry.suspects)
    if close := document.having(Verdict.CLOSE):
        was_calibrated = document.delivered_digest is not None
        longer = "calibrate with a larger --budget" if was_calibrated else "run it more often"
        yield f"too close to call: {', '.join(close)}; {longer}"
    if missing := document.having(Verdict.NOT_MEASURED):
        yield f"not measured, so not accepted: {', '.join(missing)}"
    weak = [
        entry.clause.name
        for entry in document.judged
        if entry.verdict is Verdict.PASSED and entry.clause.remedy
    ]
    if weak:
        yield (
            f"passed, but too weak to find a loss of {percent(LOSS)}: {', '.join(weak)}; the clauses say what "
            "makes them strong"
        )
    yield from (f"unmeasured: {sentence}" for sentence in document.unmeasured)


_UNITS: Final[dict[str, Callable[[float], str]]] = {
    "s": format_duration,
    "share": percent,
    "ratio": lambda value: f"{number(value)} x",
}


def clause_value(clause: Clause, value: float) -> str:
    """Text of a value in the unit of its clause."""
    show = _UNITS.get(clause.unit)
    return show(value) if show else format_rate(value, clause.unit.removesuffix("/s"))


def _limit(clause: Clause) -> str:
    rule = "at least" if clause.more_is_better else "at most"
    return f"{rule} {clause_value(clause, clause.limit)}"

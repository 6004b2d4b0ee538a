"""A diagnosis, and the check of an nccl-tests log, as tables, lines and JSON."""

from collections.abc import Iterator, Sequence
from typing import Final

from perfmodel.diagnosis.asked import Diagnosed
from perfmodel.diagnosis.cases import Run, logged_as
from perfmodel.diagnosis.causes import SLOW_NETWORK
from perfmodel.diagnosis.odds import NORMAL, Diagnosis, Fit, Judged
from perfmodel.documents.observed import Unit
from perfmodel.layout import Recompute
from perfmodel.network_check import Band, NetworkCheck, Verdict, worst
from perfmodel.report import Table, counted, duration_interval, percent, table
from perfmodel.units import format_bytes, format_duration, format_rate

#: Before a command, which stays on one line.
COMMAND: Final = "  $ "
#: Causes below are told as those that do not fit; those between are left out.
_LIKELY: Final = 0.05
_UNLIKELY: Final = 0.01
_MOST_CAUSES: Final = 4
_MOST_EXCLUDED: Final = 5
_MOST_COMPARED: Final = 3
#: Probability of a normal run from which on it is called normal, and below which it is not.
_DECIDED: Final = 0.5
_ABNORMAL: Final = 0.1


def diagnosis_table(told: Diagnosed) -> Table:
    """Each logged number beside the interval of a normal machine."""
    found = told.found
    rows = [(each, logged) for each, logged in zip(found.judged, told.logged, strict=True)]
    return table(
        told.model,
        rows,
        {
            "<Logged": lambda row: row[1].text,
            "<Run": lambda row: _run(row[0].observation.run),
            "Step": "0.observation.step_s",
            "Expected": lambda row: duration_interval(row[0].expected_s),
            "In its\nunit": lambda row: (
                logged_as(row[0].expected_s.nominal, row[1], row[0].observation.step_s) or "-"
            ).replace(" ", "\n", 1),
            "<Verdict": lambda row: _word(row[0]),
        },
        caption="Expected: as perfmodel predict has it on this machine, 90 % of runs inside."
        if told.is_calibrated
        else "Expected: of a normal machine by data sheets, 90 % inside.",
    )


def verdict(told: Diagnosed) -> str:
    """In one line: normal, not normal, or between the two; first what makes it of another run."""
    words = judgement(told.found)
    if not told.fits:
        words = f"DOES NOT FIT in memory; on a larger device: {words}"
    if told.contradicts:
        return f"verdict: WRONG MODEL SIZE; of the size that is configured: {words}"
    return f"verdict: {words}"


def judgement(found: Diagnosis) -> str:
    """The same, of the numbers alone."""
    if not found.fits:
        return "nothing was timed; this is what to expect"
    odds = next(fit.odds for fit in found.fits if fit.cause == NORMAL)
    if odds < _ABNORMAL:
        return "NOT NORMAL"
    if odds >= _DECIDED:
        return "normal"
    return f"BORDERLINE, normal with {percent(odds)}"


def diagnosis_lines(told: Diagnosed) -> Iterator[str]:
    """Verdict, what was read into the numbers, causes with odds, those that do not fit, one measurement."""
    found = told.found
    yield verdict(told)
    yield from (f"note: {note}" for note in told.notes)
    yield from _memory_lines(told)
    yield from _compared(told)[:_MOST_COMPARED]
    if told.crosses_nodes:
        kept = "no bandwidth between nodes keeps"
        if told.enough is not None:
            kept = f"{format_rate(8 * told.enough * told.per_node, 'b')} a node keep"
        yield f"network: {kept} 90 % of the speed of one node"
    likely = [fit for fit in found.fits if fit.odds >= _LIKELY][:_MOST_CAUSES]
    yield from (f"{percent(fit.odds):>7}  {_cause(fit, told)}" for fit in likely)
    left = 1 - sum(fit.odds for fit in likely)
    if likely and left >= _LIKELY:
        yield f"{percent(left):>7}  all others together"
    excluded = [fit.cause for fit in found.fits if fit.odds < _UNLIKELY][:_MOST_EXCLUDED]
    if excluded:
        yield f"does not fit (below 1 %): {', '.join(excluded)}"
    if found.next_name is not None:
        settles = ""
        if found.information is not None:
            settles = f" (expected to settle {100 * found.information:.0f} % of what is open)"
        yield f"measure next: {found.next_name}{settles}"
        yield f"{COMMAND}{found.next_command}"


def diagnosis_json(told: Diagnosed) -> dict[str, object]:
    """For programs; SI units."""
    found = told.found
    return {
        "model": told.model,
        "verdict": verdict(told).removeprefix("verdict: "),
        "fits": told.fits,
        "observations": [
            {
                "text": each.observation.text,
                "devices": each.observation.run.devices,
                "devices_per_node": each.observation.run.devices_per_node,
                "layout": str(each.observation.run.layout),
                "step_s": each.observation.step_s,
                "expected_s": each.expected_s,
                "over_first": each.over_first,
                "is_normal": each.is_normal,
                "memory_bytes": dict(told.trained.memory_bytes(each.observation.run)),
            }
            for each in found.judged
        ],
        "causes": found.fits,
        "next": {
            "name": found.next_name,
            "command": found.next_command,
            "information": found.information,
        },
        "enough_bytes_per_s_of_a_device": told.enough,
        "notes": told.notes,
    }


def _run(run: Run) -> str:
    layout = str(run.layout).replace(" ", "\n") or "1 device"
    return f"{run.nodes} x {min(run.devices, run.devices_per_node)}\n{layout}"


def _word(judged: Judged) -> str:
    if judged.is_normal is None:
        return "-"
    if judged.is_normal:
        return "normal"
    step_s = judged.observation.step_s
    assert step_s is not None
    ratio = step_s / judged.expected_s.nominal
    return f"{ratio:.2g} x slower" if ratio > 1 else f"{1 / ratio:.2g} x faster"


def _cause(fit: Fit, told: Diagnosed) -> str:
    size = ""
    is_link = fit.cause in (SLOW_NETWORK, "slow links inside the node")
    if fit.size is not None and is_link and told.is_calibrated:
        size = f" ({1 / fit.size:.2g} x)"
    elif fit.size is not None and is_link:
        between = fit.cause == SLOW_NETWORK
        rate = fit.size * (told.per_node if between else 1)
        whose = "a node" if between else "a device"
        size = f" (implied: {format_rate(8 * rate, 'b')} {whose})"
    elif fit.size is not None:
        size = f" ({fit.size:.2g} x)"
    return f"{fit.cause}{size}: {fit.means}"


def _compared(told: Diagnosed) -> list[str]:
    """Each step over the first that was timed: what both share cancels."""
    steps = [
        (each.observation, each.observation.step_s, each.over_first) for each in told.found.judged
    ]
    first_s = next((step_s for _, step_s, _ in steps if step_s is not None), None)
    return [
        f"compared: '{observation.text}' takes {step_s / first_s:.3g} x as long as the first, expected "
        f"{expected.nominal:.3g} x [{expected.p5:.2g}-{expected.p95:.2g}]"
        for observation, step_s, expected in steps
        if step_s is not None and first_s is not None and expected is not None
    ]


def _memory_lines(told: Diagnosed) -> Iterator[str]:
    """What is divided by the number of devices, and what is not, where memory was logged."""
    for each, logged in zip(told.found.judged, told.logged, strict=True):
        parts = told.trained.memory_bytes(each.observation.run)
        if logged.unit is not Unit.MEMORY or logged.value is None or not parts:
            continue
        states = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
        rest = parts["activations"] + parts["logits"]
        recomputed = each.observation.run.layout.recompute is Recompute.FULL
        less = "a smaller micro-batch" + " or recomputing" * (not recomputed)
        yield (
            f"memory on {counted(each.observation.run.devices, 'device')}: states {format_bytes(states)} "
            f"(sharding divides them), activations {format_bytes(rest)} (only {less} does); "
            f"logged {format_bytes(logged.value)}, the rest is cache and buffers"
        )


def check_table(check: NetworkCheck) -> Table:
    """Size bands with what was measured and what the links should reach."""
    columns: dict[str, str] = {
        "<Size of the array": "0",
        "busbw": "1.busbw_bytes_per_s",
        "Expected": "1.expected_busbw_bytes_per_s",
        "Reached": "1.share:%",
        "<Verdict": "1.verdict",
    }
    if any(band.buckets for band in check.bands):
        columns["Buckets"] = "1.buckets"
    return table(
        f"{check.collective}, {check.ranks} ranks on {counted(check.nodes, 'node')}, "
        f"{check.machine}",
        [(_sizes(band), band) for band in check.bands],
        columns,
        caption="busbw: at the largest size of the band. Reached: expected over measured time, mean of "
        "the band; normal from 25 % up to 32 MiB, 45 % up to 256 MiB, 50 % beyond, if none takes longer "
        "than a larger one.",
    )


def check_lines(check: NetworkCheck) -> Iterator[str]:
    """Verdict, likely causes, what a training step loses, and what was taken for granted."""
    yield f"verdict: {check.verdict}"
    for rank, cause in enumerate(check.causes, start=1):
        yield f"likely cause {rank}: {cause}"
    if check.collective == "all_to_all":
        yield "note: bytes over link rates; compared with no published all-to-all"
    step = check.step
    if step is not None:
        yield (
            f"step: {counted(step.num_buckets, 'bucket')}, {format_bytes(step.gradient_bytes)} of "
            f"gradients: all-reduces take {format_duration(step.measured_s)}, expected "
            f"{format_duration(step.expected_s)}"
        )
        if check.verdict is Verdict.SLOW:
            lost = format_duration(step.lost_s)
            yield f"cost: up to {lost} a step, as far as backward does not hide it"
    yield from (f"link of {link}" for link in check.links)


def check_json(checks: Sequence[NetworkCheck], notes: Sequence[str]) -> dict[str, object]:
    """For programs; SI units."""
    return {
        "schema_version": 2,
        "verdict": worst(check.verdict for check in checks),
        "checks": checks,
        "notes": notes,
    }


def _sizes(band: Band) -> str:
    low, high = format_bytes(band.smallest_bytes), format_bytes(band.largest_bytes)
    return low if low == high else f"{low} - {high}"

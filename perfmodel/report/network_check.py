"""The check of an nccl-tests log as a table, lines and JSON."""

from pydantic_core import to_json

from perfmodel.network_check import Band, NetworkCheck, Verdict
from perfmodel.report.wording import Table, counted, table
from perfmodel.units import format_bytes, format_duration


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
        "the band; normal from 25 % up to 32 MiB, 45 % up to 256 MiB, 50 % beyond.",
    )


def check_lines(check: NetworkCheck) -> list[str]:
    """Verdict, likely causes, what a training step loses, and what was taken for granted."""
    lines = [f"verdict: {check.verdict}"]
    lines += [f"likely cause {rank}: {cause}" for rank, cause in enumerate(check.causes, start=1)]
    step = check.step
    if step is not None:
        lines.append(
            f"step: {counted(step.num_buckets, 'bucket')}, {format_bytes(step.gradient_bytes)} of "
            f"gradients: all-reduces take {format_duration(step.measured_s)}, expected "
            f"{format_duration(step.expected_s)}"
        )
        if check.verdict is Verdict.SLOW:
            lines.append(
                f"cost: up to {format_duration(step.lost_s)} a step, as far as backward does not hide it"
            )
    return [*lines, *(f"link of {link}" for link in check.links)]


def check_json(check: NetworkCheck) -> str:
    """For programs; SI units."""
    written = {"schema_version": 1, "verdict": check.verdict, "check": check}
    return to_json(written, indent=1).decode()


def _sizes(band: Band) -> str:
    low, high = format_bytes(band.smallest_bytes), format_bytes(band.largest_bytes)
    return low if low == high else f"{low} - {high}"

"""An explanation as lines."""

from typing import Final

from perfmodel.explanation import Change, Explanation, Loss
from perfmodel.report import caveat_lines, number, percent, short_label
from perfmodel.units import Seconds, format_duration

#: Less than this share of a step is rounding.
_SMALLEST_SHARE: Final = 1e-6


def explanation_lines(explanation: Explanation, *, verbose: bool = False) -> list[str]:
    """Ranked causes with their share of the lost time, and one change to try for each.

    One device loses nothing to others: its gains are told in samples per second, not as a speed-up.
    """
    whole_s, of_whole = _whole(explanation)
    lines = [_headline(explanation)]
    if explanation.bottleneck is not None:
        lines.append(
            f"bottleneck: {explanation.bottleneck}; nothing else, made free, saves as much"
        )
    for rank, loss in enumerate(explanation.losses, start=1):
        share = percent(loss.lost_s / whole_s)
        cause = loss.cause.replace("_", " ")
        lines.append(f"{rank}. {cause}: {_ms(loss.lost_s)}, {share} {of_whole} - {loss.what}")
        lines += [_advice(explanation, loss), f"   to confirm: {loss.confirm}"]
    lines.append("All that was tried, one at a time:")
    lines += [f"   {change.what}: {_effect(explanation, change)}" for change in explanation.changes]
    against = "samples/s" if _is_alone(explanation) else "speed-ups"
    lines.append(
        "Each cause is removed alone, all else as it was; causes overlap, so that they need not "
        f"add up. Gains are per global batch of the setting, {against} over the same baseline."
    )
    return [*lines, *caveat_lines(explanation.caveats, verbose=verbose)]


def _is_alone(explanation: Explanation) -> bool:
    return explanation.ideal_speedup == 1


def _whole(explanation: Explanation) -> tuple[Seconds, str]:
    """What shares refer to: the lost time, or the step where nothing is lost to other devices."""
    if not _is_alone(explanation) and explanation.lost_s > 0:
        return explanation.lost_s, "of the lost time"
    return explanation.step_s, "of the step"


def _headline(explanation: Explanation) -> str:
    name = short_label(explanation.setting)
    step = _ms(explanation.step_s)
    if _is_alone(explanation):
        return (
            f"{name}: a step takes {step}; one device waits for no other and has no speed-up to lose; "
            "what could be saved:"
        )
    return (
        f"{name}: speed-up {number(explanation.speedup)} of {explanation.ideal_speedup}; a step "
        f"takes {step}, ideal would be {_ms(explanation.ideal_step_s)}, "
        f"{_ms(explanation.lost_s)} are lost:"
    )


def _advice(explanation: Explanation, loss: Loss) -> str:
    if not loss.one_change:
        return "   nothing that was tried helps"
    return f"   try {loss.one_change}: {_ms(loss.gain_s)} less, {_gain(explanation, loss)}"


def _effect(explanation: Explanation, change: Change) -> str:
    if abs(change.gain_s) < _SMALLEST_SHARE * explanation.step_s:
        return "no difference"
    sign = "-" if change.gain_s > 0 else "+"
    return f"step {sign}{_ms(abs(change.gain_s))}, {_gain(explanation, change)}"


def _gain(explanation: Explanation, found: Loss | Change) -> str:
    if _is_alone(explanation):
        faster = explanation.step_s / (explanation.step_s - found.gain_s) - 1
        return f"samples/s {percent(faster, signed=True)}"
    return f"speed-up {found.gain_speedup:+.2f}"


def _ms(seconds: Seconds) -> str:
    # One unit throughout, so that the lines compare; tiny ones in full.
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-5 else format_duration(seconds)

"""An explanation as lines."""

from collections.abc import Iterator
from typing import Final

from perfmodel.explanation import Change, Explanation, Loss
from perfmodel.report import caveat_lines, number, percent, short_label
from perfmodel.units import Seconds, format_duration

#: Less than this share of a step is rounding.
_SMALLEST_SHARE: Final = 1e-6


def explanation_lines(explanation: Explanation, *, verbose: bool = False) -> Iterator[str]:
    """Ranked causes with their share of the lost time, and one change to try for each.

    One device loses nothing to others: its gains are told in samples per second, not as a speed-up.
    """
    is_alone, step_s = _is_alone(explanation), explanation.step_s
    whole_s, of_whole = step_s, "of the step"
    if not is_alone and explanation.lost_s > 0:
        whole_s, of_whole = explanation.lost_s, "of the lost time"
    yield _headline(explanation)
    if explanation.bottleneck is not None:
        yield f"bottleneck: {explanation.bottleneck}; nothing else, made free, saves as much"
    first: dict[str, int] = {}
    for rank, loss in enumerate(explanation.losses, start=1):
        share = percent(loss.lost_s / whole_s)
        cause = loss.cause.replace("_", " ")
        yield f"{rank}. {cause}: {_ms(loss.lost_s)}, {share} {of_whole} - {loss.what}"
        advice = "nothing that was tried helps"
        same = first.setdefault(loss.one_change, rank)
        if same < rank and loss.one_change:
            advice = f"try the same as for {same}"
        elif loss.one_change:
            advice = f"try {loss.one_change}: {_ms(loss.gain_s)} less, {_gain(explanation, loss)}"
        yield f"   {advice}"
        yield f"   to confirm: {loss.confirm}"
    yield "All that was tried, one at a time:"
    for change in explanation.changes:
        effect = "no difference"
        if abs(change.gain_s) >= _SMALLEST_SHARE * step_s:
            sign = "-" if change.gain_s > 0 else "+"
            effect = f"step {sign}{_ms(abs(change.gain_s))}, {_gain(explanation, change)}"
        yield f"   {change.what}: {effect}"
    against = "samples/s" if is_alone else "speed-ups"
    yield (
        "Each cause is removed alone, all else as it was; causes overlap, so that they need not "
        f"add up. Gains are per global batch of the setting, {against} over the same baseline."
    )
    yield from caveat_lines(explanation.caveats, verbose=verbose)


def _is_alone(explanation: Explanation) -> bool:
    return explanation.ideal_speedup == 1


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


def _gain(explanation: Explanation, found: Loss | Change) -> str:
    if _is_alone(explanation):
        faster = explanation.step_s / (explanation.step_s - found.gain_s) - 1
        return f"samples/s {percent(faster, signed=True)}"
    return f"speed-up {found.gain_speedup:+.2f}"


def _ms(seconds: Seconds) -> str:
    # One unit throughout, so that the lines compare; tiny ones in full.
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-5 else format_duration(seconds)

"""An explanation as text."""

from perfmodel.explain import Explanation, Loss
from perfmodel.report.wording import number, percent, short_label
from perfmodel.units import Seconds, format_duration


def explanation_lines(explanation: Explanation) -> list[str]:
    """Ranked causes with their share of the lost time, and one change to try for each."""
    whole_s, of_whole = _whole(explanation)
    lines = [_headline(explanation)]
    for rank, loss in enumerate(explanation.losses, start=1):
        lines += _loss_lines(rank, loss, whole_s=whole_s, of_whole=of_whole)
    lines += _tried_lines(explanation)
    lines.append(
        "Each cause is removed alone, all else as it was; causes overlap, so that they need not "
        "add up. Gains are per global batch of the setting, speed-ups over the same baseline."
    )
    return lines


def _whole(explanation: Explanation) -> tuple[Seconds, str]:
    """What shares refer to: the lost time, or the step where nothing is lost to other devices."""
    if explanation.ideal_speedup > 1 and explanation.lost_s > 0:
        return explanation.lost_s, "of the lost time"
    return explanation.step_s, "of the step"


def _headline(explanation: Explanation) -> str:
    name = short_label(explanation.setting)
    step = _ms(explanation.step_s)
    if explanation.ideal_speedup == 1:
        return f"{name}: a step takes {step}; what could be saved:"
    return (
        f"{name}: speed-up {number(explanation.speedup)} of {explanation.ideal_speedup}; a step "
        f"takes {step}, ideal would be {_ms(explanation.ideal_step_s)}, "
        f"{_ms(explanation.lost_s)} are lost:"
    )


def _loss_lines(rank: int, loss: Loss, *, whole_s: Seconds, of_whole: str) -> list[str]:
    cause = loss.cause.replace("_", " ")
    share = percent(loss.lost_s / whole_s)
    found = f"{rank}. {cause}: {_ms(loss.lost_s)}, {share} {of_whole} - {loss.what}"
    if not loss.one_change:
        return [found, "   nothing that was tried helps"]
    gain = f"{_ms(loss.gain_s)} less, speed-up {loss.gain_speedup:+.2f}"
    return [found, f"   try {loss.one_change}: {gain}"]


def _tried_lines(explanation: Explanation) -> list[str]:
    tried = [
        f"   {change.what}: step {_signed_ms(-change.gain_s)}, speed-up {change.gain_speedup:+.2f}"
        for change in explanation.changes
    ]
    return ["All that was tried, one at a time:", *tried]


def _ms(seconds: Seconds) -> str:
    # One unit throughout, so that the lines compare; tiny ones in full.
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-5 else format_duration(seconds)


def _signed_ms(seconds: Seconds) -> str:
    return f"{'-' if seconds < 0 else '+'}{_ms(abs(seconds))}"

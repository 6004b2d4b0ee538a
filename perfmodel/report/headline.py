"""The top of a report: verdict, the three numbers that matter, and what they mean."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from perfmodel.documents.prediction import Evidence, PredictedPoint, PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.validation import ValidationDocument
from perfmodel.report.wording import (
    duration_interval,
    interval,
    number,
    one_line,
    percent,
    scaling_words,
    verdict,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNumber:
    """One number, and the words that go with it."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What the person who signs reads first."""

    verdict: str
    state: Literal["passed", "failed", "unknown"]
    numbers: tuple[KeyNumber, ...]
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]


def headline(
    profile: ProfileDocument,
    *,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> Headline:
    """Sum up a report in plain words."""
    words = verdict(validation)
    state: Literal["passed", "failed", "unknown"] = "unknown"
    if validation is not None and validation.profile_digest != profile.digest:
        words = "NOT VALIDATED: the validation at hand judged another profile"
    elif validation is not None:
        state = "passed" if validation.passed else "failed"
    return Headline(
        verdict=words,
        state=state,
        numbers=(_speedup(predictions), _error(validation), _coverage(validation)),
        sentences=(*map(_prediction_sentence, predictions), *_error_sentences(validation)),
        warnings=(
            *_mismatches(profile, predictions, validation),
            *dict.fromkeys(caveat for entry in predictions for caveat in entry.caveats),
        ),
    )


def _largest(prediction: PredictionDocument) -> PredictedPoint | None:
    return max(prediction.points, key=lambda point: point.setting.world_size, default=None)


def _speedup(predictions: Sequence[PredictionDocument]) -> KeyNumber:
    prediction = next((entry for entry in predictions if entry.points), None)
    point = _largest(prediction) if prediction else None
    if prediction is None or point is None:
        return KeyNumber(name="Speed-up", value="-", meaning="nothing was predicted")
    low, high = (number(bound, like=point.speedup.p50) for bound in _ends(point))
    which = f"{prediction.workload}, {scaling_words(prediction)}"
    return KeyNumber(
        name=f"Speed-up on {point.setting.world_size} devices",
        value=f"{number(point.speedup.p50)} x",
        meaning=f"90 % interval {low} to {high}; {which}",
    )


def _ends(point: PredictedPoint) -> tuple[float, float]:
    return point.speedup.p5, point.speedup.p95


def _error(validation: ValidationDocument | None) -> KeyNumber:
    if validation is None:
        return KeyNumber(name="Typical error", value="unknown", meaning="no fresh runs were made")
    summary, floor = validation.summary, validation.noise_floor
    beside = f"; repeating a run differs by {percent(floor.mape)}" if floor else ""
    return KeyNumber(
        name="Typical error of a step time",
        value=percent(summary.mape),
        meaning=f"over {summary.num_settings} fresh runs on at most {_largest_run(validation)} "
        f"devices{beside}",
    )


def _largest_run(validation: ValidationDocument) -> int:
    return max(entry.setting.world_size for entry in validation.settings)


def _coverage(validation: ValidationDocument | None) -> KeyNumber:
    if validation is None:
        return KeyNumber(name="Intervals kept", value="unknown", meaning="promised: 90 %")
    covered = sum(entry.is_covered for entry in validation.settings)
    return KeyNumber(
        name="Intervals kept",
        value=percent(validation.coverage),
        meaning=f"{covered} of {len(validation.settings)} fresh runs lay inside; promised: 90 %",
    )


def _prediction_sentence(prediction: PredictionDocument) -> str:
    point = _largest(prediction)
    if point is None:
        return f"{prediction.workload}: no number of devices was asked for."
    setting = point.setting
    grounds = {
        Evidence.MEASURED: "this setting ran on this machine",
        Evidence.INTERPOLATED: "it lies between settings that ran on this machine",
        Evidence.EXTRAPOLATED: "it lies beyond what ran on this machine",
        Evidence.ASSUMED: "part of it was assumed, not measured",
    }[point.weakest_evidence]
    return (
        f"{prediction.workload}, {scaling_words(prediction)}: {setting.world_size} devices should "
        f"process {one_line(interval(point.speedup))} times as many samples per second as one, "
        f"{setting.local_batch} per device and step, in steps of "
        f"{one_line(duration_interval(point.step_s))}; {grounds}."
    )


def _error_sentences(validation: ValidationDocument | None) -> Iterator[str]:
    if validation is None:
        yield "Nobody has checked these predictions: run the validation before relying on them."
        return
    summary = validation.summary
    direction = "too slow" if summary.bias > 0 else "too fast"
    yield (
        f"On fresh runs that calibration had not seen, predictions were {direction} by "
        f"{percent(abs(summary.bias))} on average (bias) and off by {percent(summary.mape)} "
        f"typically (MAPE), at the machine speed of the calibration; the worst was off by "
        f"{percent(summary.worst_absolute)}. As the clock showed it, without that correction: "
        f"bias {percent(validation.summary_raw.bias, signed=True)}, "
        f"MAPE {percent(validation.summary_raw.mape)}."
    )
    yield (
        f"No fresh run used more than {_largest_run(validation)} devices: how wrong predictions "
        "for more are has not been checked."
    )
    if validation.noise_floor is not None:
        yield (
            "Simply repeating a calibrated run differs by "
            f"{percent(validation.noise_floor.mape)}: no model could do much better than that here."
        )


def _mismatches(
    profile: ProfileDocument,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> Iterator[str]:
    if validation is not None and validation.profile_digest != profile.digest:
        yield "The validation judged another profile than the one shown here."
    for prediction in predictions:
        if prediction.profile_digest != profile.digest:
            yield f"The prediction of {prediction.workload} rests on another profile."
        elif validation is not None and prediction.validation_digest not in (
            None,
            validation.digest,
        ):
            yield f"The prediction of {prediction.workload} rests on another validation."

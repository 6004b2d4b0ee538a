"""The last ten lines of ``make quickstart``: predicted, how wrong, how sure, the main loss, the report, what next.

``python -m validate.quickstart FOLDER``: reads the profile and the validation in the folder, measures nothing.
"""

import sys
from pathlib import Path
from typing import Final

from perfmodel.answer import Question, interval, open_question
from perfmodel.answer.answer import Forecast, answer
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.explanation import explain
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.report import duration_interval, number, one_line, percent
from perfmodel.report import interval as words_of
from perfmodel.report.validation import gate_lines, verdict
from perfmodel.units import format_duration

#: Devices that are predicted: more than were measured, few enough for a reader to believe.
_DEVICES: Final = 8


def closing_lines(
    profile: MeasuredMachine, validation: ValidationDocument, *, folder: Path
) -> list[str]:
    """Ten lines, the same whatever the outcome."""
    questions = {
        entry.workload.name: Forecast(world_sizes=(_DEVICES,), scaling="weak").at_largest(
            open_question(profile, entry.workload.name)
        )
        for entry in profile.workloads[:2]
    }
    heaviest = max(questions, key=lambda name: questions[name].measured.workload.num_parameters)
    return [
        *(_predicted(question) for question in questions.values()),
        *_judged(validation),
        _main_loss(questions[heaviest]),
        f"Report: {folder / 'report' / 'report.html'}; tables of all commands: {folder}/*.txt",
        (
            f"Next, your model: perfmodel predict --profile {folder / 'calibration' / 'profile.json'} "
            "--workload FILE.py:FACTORY"
        ),
        "Next, narrower intervals: make calibrate validate report BUDGET=standard OUT=runs/standard",
    ]


def _predicted(question: Question) -> str:
    found = answer(question)
    layout = question.layout
    alone = answer(
        question.at(Forecast(world_sizes=(1,), scaling="weak").layouts(question.measured)[0])
    )
    speedup = interval(layout.world_size * alone.step_s / found.step_s)
    return (
        f"Predicted: {question.workload_name} on {layout.world_size} devices, {layout.micro_batch} samples "
        f"each: step {one_line(duration_interval(found.step))}, speed-up {one_line(words_of(speedup))}"
    )


def _judged(validation: ValidationDocument) -> list[str]:
    settings, speedups = validation.summary, validation.speedup_summary
    floor = validation.noise_floor
    inside = sum(row.num_inside or 0 for row in validation.settings)
    runs = sum(row.num_repetitions for row in validation.settings)
    wrong = (
        f"How wrong: {settings.num_settings} new settings, each run {validation.settings[0].num_repetitions} "
        f"times: off by {percent(settings.mape)} on average, {percent(settings.worst_absolute)} at worst"
    )
    if speedups is not None:
        wrong += f"; speed-ups by {percent(speedups.mape)}"
    noise = "not measured" if floor is None else percent(floor.mape)
    missed = [gate for gate in validation.gates if not gate.passed]
    return [
        wrong,
        (
            f"How sure: {inside} of {runs} runs lay inside their 90 % interval; "
            f"calibrated settings, run again, were off by {noise}"
        ),
        f"Verdict: {verdict(validation)}",
        ("Gates missed: " if missed else "Gates: ")
        + "; ".join(line[6:] for line in gate_lines((missed or validation.gates)[:2])),
    ]


def _main_loss(question: Question) -> str:
    explained = explain(question, scaling="weak")
    name = f"Main loss of {question.workload_name} on {question.layout.world_size} devices"
    if not explained.losses:
        return f"{name}: none"
    loss = explained.losses[0]
    change = f"; try {loss.one_change}" if loss.one_change else ""
    return (
        f"{name}: {loss.cause.replace('_', ' ')}, {format_duration(loss.lost_s)} of a step of "
        f"{format_duration(explained.step_s)} (speed-up {number(explained.speedup)}){change}"
    )


def main(folder: Path) -> None:
    """Print the lines."""
    profile = ProfileDocument.read(folder / "calibration" / "profile.json").machine
    validation = ValidationDocument.read(folder / "validation" / "validation.json")
    sys.stdout.write("\n".join(closing_lines(profile, validation, folder=folder)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""How much depends on which layers were drawn: curves from random halves of the timed operators.

``python -m tests.benchmarks.rejudge_draws docs/records/operators docs/records/calibration 4`` judges the
recorded runs of held-out models, curves alone on one rank, once per half; no proof.
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrate.fit.operators import fit_operators
from calibrate.fit.profile import fit_profile
from perfmodel.documents.observation import Observation, OperatorsObservation, read_observations
from perfmodel.documents.profile import ProfileDocument
from perfmodel.machine.measured import MeasuredMachine
from tests.benchmarks.rejudge_models import say, unpacked
from validate.models import ModelsRequest, judge_models


def main() -> None:
    """Print the errors of every half."""
    judged, calibration = (Path(argument) for argument in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed = unpacked(calibration, folder / "calibration.jsonl")
        recorded = ProfileDocument.read(calibration / "profile.json")
        profile = fit_profile(timed, provenance=recorded.provenance).machine
        observations, runs = read_observations(timed), unpacked(judged, folder / "runs.jsonl")
        for seed in range(int(sys.argv[3])):
            half = _half(observations, seed)
            request = ModelsRequest(profile=_fitted(profile, half), folder=folder, mode="curves")
            rows = judge_models(request, read_observations(runs), runs).models
            say(f"half {seed}", [row for row in rows if row.setting.world_size == 1])


def _half(observations: Sequence[Observation], seed: int) -> list[Observation]:
    """Everything, but of the operators and optimizers that were timed one by one only every second."""
    draw = random.Random(seed)  # noqa: S311 - a choice, no secret
    return [
        entry.model_copy(
            update={
                "operators": tuple(o for o in entry.operators if draw.random() < 0.5),
                "optimizers": tuple(o for o in entry.optimizers if draw.random() < 0.5),
            }
        )
        if isinstance(entry, OperatorsObservation)
        else entry
        for entry in observations
    ]


def _fitted(profile: MeasuredMachine, observations: Sequence[Observation]) -> MeasuredMachine:
    assert profile.operators is not None, "the recorded calibration timed operators"
    operators = fit_operators(
        observations,
        workloads=profile.workloads,
        rates=profile.rates,
        speed_probe_s=profile.speed_probe_alone_s,
        sensitivity=profile.speed_sensitivity,
    )
    assert operators is not None, "half of the operators are left"
    return replace(
        profile, operators=replace(operators, repetition_errors=profile.operators.repetition_errors)
    )


if __name__ == "__main__":
    main()

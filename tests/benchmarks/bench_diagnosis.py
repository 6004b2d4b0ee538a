"""``python -m tests.benchmarks.bench_diagnosis``: what ``diagnose`` says of published steps.

Its interval rests on the priors of a data sheet alone. Runs of two clusters, which other people measured,
say how often 90 % intervals hold, how often a run is called not normal, and how often it is where the
same step takes three times as long.
"""

import functools
import sys
from collections.abc import Sequence

import numpy as np

from perfmodel.cost.jobs import Jobs, jobs_from_columns
from perfmodel.cost.rescaling import device_sheet
from perfmodel.diagnosis.cases import LargeModel, Observation, Run
from perfmodel.diagnosis.odds import Diagnosis, diagnose, draw_terms
from perfmodel.documents.profile import InferredDocument
from perfmodel.layout import Layout
from perfmodel.report.diagnosis import judgement
from tests.examples import ROOT

_RECORDS = {"a100": "a100-sxm4-80", "h100": "h100-sxm5"}
_SLOWER = 3.0
_SIZES = ("dp", "tp", "pp", "cp", "micro_batch", "accumulation")


def diagnosed(jobs: Jobs, step_s: float, device: str) -> Diagnosis:
    """The diagnosis of one run by its columns."""
    dp, tp, pp, cp, micro_batch, accumulation = (int(getattr(jobs, name)[0]) for name in _SIZES)
    layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, micro_batch=micro_batch, accumulation=accumulation)
    run = Run(layout=layout, devices_per_node=int(jobs.devices_per_node[0]))
    trained = LargeModel(
        name="published", parameters=1.0, tokens=float(jobs.sequence[0]), jobs=lambda _: jobs
    )
    rng = np.random.default_rng(0)
    terms = draw_terms(device_sheet(device), rng, known_network=True)
    return diagnose(
        trained,
        [Observation(text="", run=run, step_s=step_s)],
        terms,
        usual=terms,
        device=device,
        capacity_bytes=float("inf"),
        own_links=True,
        rng=rng,
    )


def _share(said: Sequence[str], word: str) -> str:
    return f"{sum(word in each for each in said)} of {len(said)}"


def main() -> None:
    """Print coverage, false alarms and what is found, per record."""
    for record, device in _RECORDS.items():
        machine = InferredDocument.read(
            ROOT / f"perfmodel/documents/machines/runs/dgx-{record}.json"
        ).machine
        every = jobs_from_columns(machine.runs)
        of = functools.partial(diagnosed, device=device)
        runs = [(every.take(np.array([i])), s) for i, s in enumerate(machine.step_s)]
        found = [of(jobs, step_s) for jobs, step_s in runs]
        late = [judgement(of(jobs, _SLOWER * step_s)) for jobs, step_s in runs]
        inside = [str(each.judged[0].is_normal) for each in found]
        said = [judgement(each) for each in found]
        sys.stdout.write(
            f"{record}: inside {_share(inside, 'True')}, NOT NORMAL {_share(said, 'NOT')}, borderline "
            f"{_share(said, 'BORDER')}; {_SLOWER:g} x slower: NOT NORMAL {_share(late, 'NOT')}, "
            f"borderline {_share(late, 'BORDER')}\n"
        )


if __name__ == "__main__":
    main()

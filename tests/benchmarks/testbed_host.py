"""What the machine did while it played the clusters of a recorded testbed campaign.

``python -m tests.benchmarks.testbed_host docs/records/testbed/third``
"""

import sys
from pathlib import Path
from typing import Final

from perfmodel.documents.testbed import HostUse, JudgedStep, TestbedDocument, TrainingRun
from tests.benchmarks.rejudge import recorded_runs
from validate.testbed.disturbance import STEAL_LIMIT
from validate.testbed.resources import HOST

#: Share of the cores that a busy machine has for the testbed.
_BUSY: Final = 0.95


def main() -> None:
    """Print what other guests took, and what steps charged the cores where the machine is the limit."""
    folder = Path(sys.argv[1])
    hosts = {
        run.setting.name: run.host
        for run in recorded_runs(folder / "runs.jsonl.gz")
        if isinstance(run, TrainingRun)
    }
    lost = [host.steal_share for host in hosts.values()]
    disturbed = sorted(share for share in lost if share > STEAL_LIMIT)
    _say(f"{len(disturbed)} of {len(lost)} runs lost more than {STEAL_LIMIT:.0%} of the cores")
    if disturbed:
        _say(f"these lost {disturbed[0]:.1%} to {disturbed[-1]:.1%}")
    for step in TestbedDocument.read(folder / "testbed.json").settings:
        if step.limit == step.predicted.limit == HOST:
            _say(_charged(step, hosts[step.name]))


def _charged(step: JudgedStep, host: HostUse) -> str:
    busy_cores_s = _BUSY * host.window_s * host.num_cores
    used_s = step.uses[HOST] * step.measured_s
    predicted_s = step.predicted.uses[HOST] * step.predicted.step_s.nominal
    return (
        f"{step.name}: off by {step.signed_error:+.1%}; a step charged the cores "
        f"{used_s / predicted_s:.2f} times what was predicted; CPU time over {_BUSY} of the cores "
        f"{host.own_cpu_s / busy_cores_s - 1:+.1%}, with that of other processes "
        f"{(host.own_cpu_s + host.foreign_cpu_s) / busy_cores_s - 1:+.1%}"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()

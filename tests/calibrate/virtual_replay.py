"""Run by a test: a step of LeNet on a virtual GPU, whole and operator by operator, and the probe of events.

A drawn model, too, which trains as well.

A process that has opened a virtual GPU keeps it for good.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from calibrate.probes import Session
from calibrate.probes.compute import measure_compute
from calibrate.probes.replay import measure_model, measure_replay
from calibrate.probes.training import measure_steps
from calibrate.random_models import draw
from calibrate.task import ComputeTask, ModelTask, ReplayTask, StepTask
from calibrate.virtual import Truth
from calibrate.virtual.carrier import NAME, Carrier
from calibrate.virtual.gpu import VirtualGpu
from perfmodel.documents.observation import QUEUE_PROBE
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.layout import RunSetting, Synchronisation
from tests.played_worker import append

LENET = RunSetting(
    workload="lenet", world_size=1, micro_batch=64, synchronisation=Synchronisation.NONE
)


def main(truth: Path, output: Path) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    gpu = VirtualGpu(Truth.read(truth))
    Carrier.open(gpu)
    session = Session.open(gpu, group_sizes=(1,))
    queues = [
        ComputeTask(
            name=f"{count} kernels",
            round=0,
            probe=QUEUE_PROBE,
            dtype="fp32",
            shape=(count,),
            target_s=0.01,
        )
        for count in (1, 17)
    ]
    replay = ReplayTask(name="replay", round=0, workload="lenet", micro_batch=64, target_s=0.01)
    steps = StepTask(name="steps", round=0, setting=LENET, target_s=0.01, min_steps=2)
    drawn = ModelTask(name="perceptron", round=0, seed=-2, index=14, target_s=0.01)
    model, folder = draw(drawn.seed, drawn.index, on_gpu=True), output.parent
    with gpu.without():
        traced = model.traced(folder, NAME)
    document = folder / "traced.json"
    WorkloadDocument(workload=traced.workload, trace=traced.step).write(document)
    train = ReplayTask(
        name="train",
        round=0,
        workload=traced.workload.name,
        micro_batch=model.micro_batch,
        document=str(document),
        code=model.write_file(folder),
        target_s=0.01,
    )
    found = (
        *(measure_compute(session, queue) for queue in queues),
        measure_replay(session, replay),
        measure_steps(session, steps),
        measure_model(session, drawn),
        measure_replay(session, train),
        measure_replay(session, train.model_copy(update={"name": "again", "round": 1})),
    )
    append(output, *found)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

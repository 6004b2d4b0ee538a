"""Write the gradient norms of a DDP training to norms.csv: ``torchrun --nproc-per-node 2 FILE``.

Copy ``NormLog`` into a training of your own: register it before the first step, call ``end_step`` after
every optimizer step. It costs two sums per bucket and one tiny all-reduce per step. Without gradient
accumulation, clipping comes after it.
"""

import csv
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class NormLog:
    """Squared norms of gradients, of one rank and averaged over all, by step."""

    def __init__(self, model: DistributedDataParallel, local_batch: int) -> None:
        self.ranks, self.local_batch = dist.get_world_size(), local_batch
        self.own = self.mean = torch.zeros(())
        self.rows: list[tuple[int, int, float, float]] = []
        model.register_comm_hook(self, average)

    def end_step(self) -> None:
        """Add the row of the step that has just ended."""
        own = self.own.clone()
        dist.all_reduce(own)
        self.rows.append((self.ranks, self.local_batch, float(own) / self.ranks, float(self.mean)))
        self.own = self.mean = torch.zeros(())

    def write(self, path: Path) -> None:
        """Write what ``perfmodel batch --gradient-norms`` reads."""
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(("ranks", "local_batch", "mean_square", "square_of_mean"))
            table.writerows(self.rows)


def average(log: NormLog, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does anyway, with the norms before and after it."""
    gradient = bucket.buffer()
    log.own = log.own.to(gradient.device) + gradient.square().sum()
    work = dist.all_reduce(gradient.div_(log.ranks), async_op=True)

    def note(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        [averaged] = future.value()
        log.mean = log.mean.to(averaged.device) + averaged.square().sum()
        return averaged

    return work.get_future().then(note)


def main() -> None:
    """Learn a straight line from noisy points, as a stand-in for a real training."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    log = NormLog(model, local_batch=16)
    for _ in range(100):
        points = torch.randn(16, 20)
        targets = points.sum(dim=1, keepdim=True) + torch.randn(16, 1)
        nn.functional.mse_loss(model(points), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.end_step()
    if dist.get_rank() == 0:
        log.write(Path("norms.csv"))
    # Threads of the group run our callbacks: none may be left when a rank ends.
    del model
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What is trained in place, by start of processes."""

from calibrate.task import ReplayTask
from calibrate.workloads import in_starts


def test_every_start_trains_all_models_and_then_all_of_them_again() -> None:
    """On several ranks, one trains alone before; they share the time."""
    task = ReplayTask(name="a", round=0, workload="a", micro_batch=1, target_s=0.5)
    both = task.model_copy(update={"name": "b", "workload": "b", "world_size": 2})
    starts = in_starts([task, both], num_rounds=3)
    of_round = [("a", 1, 0.5), ("b", 1, 0.25), ("b on 2 ranks", 2, 0.25)]
    assert [[(t.name, t.world_size, t.target_s) for t in tasks] for tasks in starts] == [
        [(f"{index}: {name}", *how) for index in rounds for name, *how in of_round]
        for rounds in ((0, 1), (2,))
    ]
    assert [[task.round for task in tasks] for tasks in starts] == [[0] * 3 + [1] * 3, [2] * 3]

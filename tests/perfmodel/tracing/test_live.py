"""Modules and loops that exist, as the user's own code holds them."""

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import perfmodel as pm
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.tracing.loop import optimizer_of
from perfmodel.tracing.step import hollow
from tests.existing import existing

CODE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)), torch.randn(4, 8)
"""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def batch(samples: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 8), torch.randint(0, 3, (samples,))


def recorded(document: WorkloadDocument) -> object:
    step = document.trace.at(micro_batch=4)
    return [step.operators[call.operator] for call in step.calls()]


def test_a_module_is_traced_as_the_factory_that_makes_it(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(CODE)
    inputs, labels = batch()
    ours = pm.trace(network(), inputs, labels, loss=cross_entropy)
    theirs = pm.trace(f"{file}:model", micro_batch=4)
    assert recorded(ours) == recorded(theirs)
    assert ours.memory == theirs.memory


def test_nothing_of_the_module_changes() -> None:
    module = network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    pm.trace(module, *batch(), loss=cross_entropy)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_shared_parameters_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.rows = nn.LSTM(4, 4, 2)

    copy = hollow(Tied())
    assert copy.get_parameter("embed.weight") is copy.get_parameter("head.weight")
    assert sum(1 for _ in copy.parameters()) == sum(1 for _ in Tied().parameters())


def test_tensors_without_samples_keep_their_size() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 3)

        def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
            scores: Tensor = self.out(rows @ mask)
            return scores

    inputs, labels = batch()
    # Tokenizers return such a mapping, which is no dict.
    masked = UserDict({"rows": inputs, "mask": torch.zeros(8, 8)})
    found = pm.trace(Masked(), masked, labels, loss=cross_entropy, micro_batch=32)
    assert found.trace.at(micro_batch=64).micro_batch == 64


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        ("adamw", ("adamw", "default", 0)),
        (torch.optim.AdamW, ("adamw", "default", 0)),
        (torch.optim.Adam, ("adamw", "default", 1)),
        (torch.optim.SGD, ("sgd", "default", 1)),
    ],
)
def test_optimizers_are_taken_as_the_loop_has_them(
    optimizer: str | type[torch.optim.Optimizer], found: tuple[str, str, int]
) -> None:
    own = optimizer if isinstance(optimizer, str) else optimizer(network().parameters(), lr=0.1)  # type: ignore[call-arg]
    name, implementation, caveats = optimizer_of(own)
    assert (name, implementation, len(caveats)) == found


def test_bad_input_says_what_to_give() -> None:
    inputs, _ = batch()
    with pytest.raises(UsageError, match="keeps as many states"):
        pm.trace(network(), inputs, optimizer=torch.optim.Adagrad(network().parameters()))
    with pytest.raises(UsageError, match="optimizer: must be one of sgd, adamw"):
        pm.trace(network(), inputs, optimizer="lion")
    with pytest.raises(UsageError, match="precision: must be one of fp32, bf16, fp16, got 'fp8'"):
        pm.trace(network(), inputs, precision="fp8")
    with pytest.raises(UsageError, match="device_kind: must be one of cpu, cuda, as-cuda"):
        pm.trace(network(), inputs, device_kind="tpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="record: needs the optimizer of the loop, got NoneType"):
        pm.record(network(), None)
    optimizer = torch.optim.SGD(network().parameters())
    assert pm.record(nn.Identity(), optimizer).first is None
    wrong: dict[str, tuple[Any, ...]] = {"steps": (0, "5"), "warmup": (-1, 1.5), "loss": ("mean",)}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(UsageError, match=f"record: {name} must be a .*, got {value!r}"):
            pm.record(nn.Identity(), optimizer, **{name: value})
    with pytest.raises(UsageError, match="inputs: must hold a tensor"):
        pm.trace(network())
    with pytest.raises(UntraceableModel, match="accepts 4 samples of 5 float32"):
        pm.trace(network(), torch.randn(4, 5), loss=torch.sum)
    with pytest.raises(UntraceableModel, match="give a loss"):
        pm.trace(nn.Conv2d(3, 3, 1), torch.randn(4, 3, 2, 2))


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: nn.Module,
    *,
    steps: int,
    passes: int = 1,
) -> None:
    for _ in range(steps):
        for _ in range(passes):
            inputs, labels = batch()
            loss(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loop_is_recorded_as_it_runs() -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    with pm.record(model, optimizer, loss=loss, steps=5, warmup=2) as run:
        loop(model, optimizer, loss, steps=4, passes=3)
        assert not run.is_done
        loop(model, optimizer, loss, steps=8, passes=3)
    assert run.is_done
    assert len(run.step_s) == 5
    assert run.accumulation == 3
    assert run.observed.startswith("1 GPU 1 node ")
    ours = pm.trace(run)
    theirs = pm.trace(model, *batch(), loss=loss, optimizer=optimizer)
    assert recorded(ours) == recorded(theirs)
    assert not model._forward_hooks


def test_a_loop_that_says_no_loss_is_told_so() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pm.record(model, optimizer, steps=1, warmup=0) as run:
        loop(model, optimizer, nn.CrossEntropyLoss(), steps=2)
    found = existing(pm.trace(run).trace)
    assert "no loss was given: the mean of the outputs stands for it" in found.caveats


def test_a_loop_that_is_too_short_or_not_there_is_refused() -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    with pm.record(model, optimizer, loss=loss) as run:
        loop(model, optimizer, loss, steps=3)
    with pytest.raises(UsageError, match="at least 5 optimizer steps inside the block, got 3"):
        _ = run.step_s
    with pm.record(model, optimizer) as empty, pytest.raises(UsageError, match="no forward pass"):
        pm.trace(empty)

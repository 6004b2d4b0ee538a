"""Memory of a rank of a traced step under a layout."""

import pytest

from perfmodel.cost.memory import (
    BUCKETS,
    DeviceMemory,
    MemorySetting,
    device_memory,
    overhead_of,
    rank_memory,
)
from perfmodel.layout.layout import parse_layout
from perfmodel.step.division import parameter_bytes
from perfmodel.workload.memory import Part
from tests.perfmodel.llama import LAYERS, document, traced

BATCH = 8


def ranks(text: str, model: str = "llama") -> tuple[DeviceMemory, ...]:
    trace, memory = traced(model)
    layout = parse_layout(f"{text} micro_batch={BATCH}")
    return rank_memory(trace, memory, layout, overhead=overhead_of(memory, "cpu"))


def part(of: DeviceMemory, name: Part) -> int:
    return of.parts[name.value]


@pytest.mark.parametrize("model", ["llama", "resnet18"])
@pytest.mark.parametrize("devices", [1, 8])
def test_data_parallelism_alone_needs_what_the_traced_step_needs(model: str, devices: int) -> None:
    _, memory = traced(model)
    expected = device_memory(
        memory,
        MemorySetting(micro_batch=BATCH, devices=devices),
        gradient_bytes=document(model).workload.gradient_bytes,
        overhead=overhead_of(memory, "cpu"),
    )
    assert ranks(f"dp={devices}", model) == (expected,)


def test_sharding_divides_states_and_gathers_two_units() -> None:
    trace, _ = traced()
    whole = parameter_bytes(trace, range(len(trace.parameters)), 1)
    (plain,), (first,), (third,) = (ranks(f"dp=8 zero={zero}") for zero in (0, 1, 3))
    assert part(first, Part.OPTIMIZER) == pytest.approx(part(plain, Part.OPTIMIZER) / 8, abs=1)
    assert first.parts[BUCKETS] == 0
    assert part(third, Part.PARAMETERS) < whole
    assert third.needed_bytes < first.needed_bytes < plain.needed_bytes


def test_tensor_parallelism_divides_matrices_and_what_blocks_keep() -> None:
    trace, _ = traced()
    (one,), (two,), (all_divided,) = (
        ranks(text) for text in ("dp=1", "tp=2", "tp=2 sequence_parallel=yes")
    )
    half = parameter_bytes(trace, range(len(trace.parameters)), 2)
    assert part(two, Part.PARAMETERS) == pytest.approx(half, abs=1)
    assert part(one, Part.ACTIVATIONS) / 2 < part(two, Part.ACTIVATIONS)
    assert part(all_divided, Part.ACTIVATIONS) < part(two, Part.ACTIVATIONS)


def test_early_stages_keep_the_activations_of_all_micro_batches_in_flight() -> None:
    stages = ranks("pp=4 accumulation=8")
    assert len(stages) == LAYERS
    kept = [part(stage, Part.ACTIVATIONS) for stage in stages[:3]]
    assert kept[0] == pytest.approx(2 * kept[2], rel=1e-6)
    assert kept[1] == pytest.approx(1.5 * kept[2], rel=1e-6)
    again = ranks("pp=4 accumulation=8 recompute=full")
    assert all(a.needed_bytes <= b.needed_bytes for a, b in zip(again[:3], stages[:3], strict=True))

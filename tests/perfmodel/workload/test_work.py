"""Floating point operations and bytes of single operators, by hand."""

import pytest

from perfmodel.workload.operator import TensorSpec, flop, traffic_bytes


def spec(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, stride=stride)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "arguments", "expected"),
    [
        ("aten.mm.default", [spec(2, 3), spec(3, 5)], [spec(2, 5)], "[[], {}]", 2 * 2 * 3 * 5),
        (
            "aten.addmm.default",
            [spec(5), spec(2, 3), spec(3, 5)],
            [spec(2, 5)],
            "[[], {}]",
            2 * 2 * 3 * 5,
        ),
        (
            "aten.convolution.default",
            [spec(2, 4, 8, 8), spec(6, 2, 3, 3)],
            [spec(2, 6, 8, 8)],
            "[[0, 1, null, [1, 1], [1, 1], [1, 1], false, [0, 0], 2], {}]",
            2 * (2 * 6 * 8 * 8) * (2 * 3 * 3),
        ),
        ("aten.add.Tensor", [spec(2, 3), spec(2, 3)], [spec(2, 3)], "[[], {}]", 0),
    ],
)
def test_products_count_two_per_multiply_add(
    name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], arguments: str, expected: int
) -> None:
    assert flop(name, inputs, outputs, arguments) == expected


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "mutated", "view", "expected"),
    [
        ("aten.add.Tensor", [spec(10), spec(10)], [spec(10)], (), False, (80, 40)),
        ("aten.relu_.default", [spec(10)], [], (0,), False, (40, 40)),
        ("aten.zero_.default", [spec(10)], [], (0,), False, (0, 40)),
        ("aten.copy_.default", [spec(10), spec(10, dtype="bfloat16")], [], (0,), False, (20, 40)),
        ("aten.view.default", [spec(10)], [spec(2, 5)], (), True, (0, 0)),
        ("aten.empty_like.default", [spec(10)], [spec(10)], (), False, (0, 0)),
        # Of an expanded tensor only what is stored is read.
        ("aten.clone.default", [spec(4, 10, stride=(0, 1))], [spec(4, 10)], (), False, (40, 160)),
        # Of a table only the rows asked for: 3 rows of 5 values, and 3 indices.
        (
            "aten.embedding.default",
            [spec(1000, 5), spec(3, dtype="int64")],
            [spec(3, 5)],
            (),
            False,
            (60 + 24, 60),
        ),
    ],
)
def test_each_tensor_moves_once(
    name: str,
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
    mutated: tuple[int, ...],
    view: bool,  # noqa: FBT001
    expected: tuple[int, int],
) -> None:
    assert traffic_bytes(name, inputs, outputs, mutated=mutated, view=view) == expected

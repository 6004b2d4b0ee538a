"""Floating point operations and bytes of single operators, by hand."""

import pytest

from perfmodel.workload import Operator, TensorSpec


def spec(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, stride=stride)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "mutated", "expected"),
    [
        ("add", [spec(10), spec(10)], [spec(10)], (), (80, 40)),
        ("relu_", [spec(10)], [], (0,), (40, 40)),
        ("zero_", [spec(10)], [], (0,), (0, 40)),
        ("copy_", [spec(10), spec(10, dtype="bfloat16")], [], (0,), (20, 40)),
        ("view", [spec(10)], [spec(2, 5)], (), (0, 0)),
        ("empty_like", [spec(10)], [spec(10)], (), (0, 0)),
        # Of an expanded tensor only what is stored is read.
        ("clone", [spec(4, 10, stride=(0, 1))], [spec(4, 10)], (), (40, 160)),
        # Of a table only the rows asked for: 3 rows of 5 values, and 3 indices.
        ("embedding", [spec(1000, 5), spec(3, dtype="int64")], [spec(3, 5)], (), (60 + 24, 60)),
        # 4 rows of 5 values, and 4 indices; backward the gradient of a bag for each of its rows.
        ("_embedding_bag", [spec(1000, 5), spec(4, dtype="int64")], [spec(2, 5)], (), (112, 40)),
        (
            "_embedding_bag_backward",
            [spec(2, 5), spec(4, dtype="int64")],
            [spec(1000, 5)],
            (),
            (112, 20_000),
        ),
        # Of bags that keep their maximum, a gradient reads where that was, too; rows are named by indices alone.
        (
            "_embedding_bag_backward",
            [spec(2, 5), spec(4, dtype="int64"), spec(2, 5, dtype="int64")],
            [spec(1000, 5)],
            (),
            (192, 20_000),
        ),
        # An edited file may leave tensors out.
        ("_embedding_bag", [spec()], [spec(2, 5)], (), (0, 40)),
    ],
)
def test_each_tensor_moves_once(
    name: str,
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
    mutated: tuple[int, ...],
    expected: tuple[int, int],
) -> None:
    found = Operator.of(
        *(f"aten.{name}.default", tuple(inputs), tuple(outputs), "[[], {}]"),
        mutated=mutated,
        view=name == "view",
    )
    assert (found.read_bytes, found.written_bytes) == expected

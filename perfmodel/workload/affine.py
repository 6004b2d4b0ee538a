"""Integers that grow with the micro-batch: what stays of a shape when the batch is left open."""

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from perfmodel.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """``constant + per_sample * micro_batch``, a whole number."""

    constant: int
    per_sample: int

    def at(self, micro_batch: int) -> int:
        """The value at one micro-batch."""
        return self.constant + self.per_sample * micro_batch


Dimension: TypeAlias = int | Affine


def through(points: tuple[tuple[int, int], tuple[int, int]]) -> Dimension:
    """The line through two points (micro-batch, value).

    Raises
    ------
    ValueError
        If the line does not pass through whole numbers in between.
    """
    (first_batch, first), (second_batch, second) = points
    if first == second:
        return first
    per_sample, rest = divmod(second - first, second_batch - first_batch)
    if rest:
        raise ValueError(
            f"a size is {first} at micro-batch {first_batch} and {second} at {second_batch}: "
            "it does not grow by a whole number per sample"
        )
    return Affine(constant=first - per_sample * first_batch, per_sample=per_sample)


def value_at(dimension: Dimension, micro_batch: int) -> int:
    """The value of a dimension at one micro-batch."""
    return dimension.at(micro_batch) if isinstance(dimension, Affine) else dimension


def merged_arguments(first: Any, second: Any, *, micro_batches: tuple[int, int]) -> Any:
    """Arguments of one call, seen at two micro-batches, with every differing integer as a line.

    A line is written ``{"affine": [constant, per_sample]}``. Numbers with a fraction (such as
    1 / micro-batch in the gradient of a mean) do not move any cost: the first one stays.

    Raises
    ------
    ValueError
        If the arguments differ in anything but numbers.
    """
    if isinstance(first, bool) or isinstance(second, bool) or first is None:
        return _equal(first, second)
    if isinstance(first, int) and isinstance(second, int):
        line = through(((micro_batches[0], first), (micro_batches[1], second)))
        return {"affine": [line.constant, line.per_sample]} if isinstance(line, Affine) else line
    if isinstance(first, int | float) and isinstance(second, int | float):
        return first
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [
            merged_arguments(one, other, micro_batches=micro_batches)
            for one, other in zip(first, second, strict=True)
        ]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {
            key: merged_arguments(first[key], second[key], micro_batches=micro_batches)
            for key in first
        }
    return _equal(first, second)


def _equal(first: Any, second: Any) -> Any:
    if first != second:
        raise ValueError(f"an argument is {first!r} at one micro-batch and {second!r} at another")
    return first


def arguments_at(arguments: str, micro_batch: int) -> str:
    """JSON of arguments with every line replaced by its value."""
    if '"affine"' not in arguments:
        return arguments
    return json.dumps(_filled(json.loads(arguments), micro_batch))


def _filled(value: Any, micro_batch: int) -> Any:
    if isinstance(value, list):
        return [_filled(item, micro_batch) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"affine"}:
            constant, per_sample = value["affine"]
            return constant + per_sample * micro_batch
        return {key: _filled(item, micro_batch) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineBytes:
    """A size that grows with the micro-batch. [B]"""

    constant_bytes: Bytes
    per_sample_bytes: Bytes

    def at(self, micro_batch: int) -> Bytes:
        """The size at one micro-batch. [B]"""
        return self.constant_bytes + self.per_sample_bytes * micro_batch

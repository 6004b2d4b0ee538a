"""What activation checkpointing of some blocks keeps in memory."""

from collections.abc import Mapping, Sequence

from perfmodel.units import Bytes
from perfmodel.workload.memory import Block


def kept_by_checkpointing(
    blocks: Sequence[Block], activations: Bytes, micro_batch: int, *, chosen: Sequence[Block]
) -> Bytes:
    """Activations alive at once when every chosen block keeps its input alone. [B]

    What the others make and what stands outside blocks stays; one chosen block at a time is computed
    again.
    """
    outside = max(0, activations - sum(_saved(block, micro_batch) for block in blocks))
    again = {block.path for block in chosen}
    others = sum(_saved(block, micro_batch) for block in blocks if block.path not in again)
    inputs = sum(_input(block, micro_batch) for block in chosen)
    at_work = max((_saved(block, micro_batch) for block in chosen), default=0)
    return min(activations, outside + others + inputs + at_work)


def by_saving(
    blocks: Sequence[Block], shares: Mapping[str, float], micro_batch: int
) -> list[Block]:
    """Blocks by bytes saved per time of computing them again, the best first.

    Parameters
    ----------
    shares
        Share of each block, by its path, in the time of the forward pass.
    """

    def worth(block: Block) -> float:
        saved = _saved(block, micro_batch) - _input(block, micro_batch)
        return saved / max(shares.get(block.path, 0.0), 1e-9)

    return sorted(blocks, key=worth, reverse=True)


def _saved(block: Block, micro_batch: int) -> Bytes:
    return max(0, block.saved.at(micro_batch))


def _input(block: Block, micro_batch: int) -> Bytes:
    return max(0, block.input.at(micro_batch))

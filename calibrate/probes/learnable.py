"""Samples that can be learned and never repeat, so that training has a true gradient and noise around it."""

import functools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

NUM_CLASSES: Final = 10
_WIDTH: Final = 28
_COARSE: Final = 7
_LARGEST_SHIFT: Final = 3
_PATTERN_SEED: Final = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """An endless source: which of ten smooth patterns is it, shifted and under noise?"""

    generator: torch.Generator
    noise: float
    """Standard deviation over that of a pattern: classes overlap, gradients differ."""

    def draw(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Images of shape ``(num_samples, 1, 28, 28)`` and the numbers of their patterns."""
        labels = torch.randint(0, NUM_CLASSES, (num_samples,), generator=self.generator)
        rows, columns = (self._shifted(num_samples) for _ in range(2))
        images = _patterns()[labels[:, None, None], rows[:, :, None], columns[:, None, :]]
        noise = torch.randn(images.shape, generator=self.generator)
        return (images + self.noise * noise)[:, None], labels

    def _shifted(self, num_samples: int) -> Tensor:
        shifts = torch.randint(
            -_LARGEST_SHIFT, _LARGEST_SHIFT + 1, (num_samples, 1), generator=self.generator
        )
        return (torch.arange(_WIDTH) + shifts) % _WIDTH


def samples(seed: int, *, noise: float) -> Samples:
    """The stream of a seed; different seeds share the patterns and nothing else."""
    return Samples(generator=torch.Generator().manual_seed(seed), noise=noise)


def description(noise: float) -> str:
    """What is learned, in words."""
    return (
        f"{NUM_CLASSES} patterns shifted by up to {_LARGEST_SHIFT} pixels under {noise:g} times as much "
        "noise"
    )


@functools.cache
def _patterns() -> Tensor:
    """Shape ``(10, 28, 28)``, standard deviation 1 each."""
    generator = torch.Generator().manual_seed(_PATTERN_SEED)
    coarse = torch.randn(NUM_CLASSES, 1, _COARSE, _COARSE, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=_WIDTH, mode="bicubic")[:, 0]
    return smooth / smooth.std(dim=(1, 2), keepdim=True)

"""Reference models: small enough for a CPU, different enough to tell the terms of the model apart."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """How to build a model and one batch of synthetic samples for it."""

    build: Callable[[], nn.Module]
    sample: str
    draw_inputs: Callable[[int], Tensor]
    num_classes: int


def lenet() -> nn.Module:
    """LeNet-5 as in Dive into Deep Learning, section 7.6: sigmoids and average pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.Sigmoid(),
        nn.AvgPool2d(2, stride=2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.Sigmoid(),
        nn.AvgPool2d(2, stride=2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.Sigmoid(),
        nn.Linear(120, 84),
        nn.Sigmoid(),
        nn.Linear(84, 10),
    )


class Residual(nn.Module):
    """The residual block of Dive into Deep Learning, section 8.6."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = (
            nn.Identity() if stride == 1 else nn.Conv2d(in_channels, out_channels, 1, stride=stride)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Features of shape ``(N, out_channels, H / stride, W / stride)``."""
        hidden = torch.relu(self.bn1(self.conv1(inputs)))
        return torch.relu(self.bn2(self.conv2(hidden)) + self.shortcut(inputs))


def resnet18() -> nn.Module:
    """ResNet-18 for 1x28x28 images, the multi-GPU example of Dive into Deep Learning, section 13.6."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    widths = (64, 64, 128, 256, 512)
    for in_channels, out_channels in itertools.pairwise(widths):
        stride = 1 if in_channels == out_channels else 2
        layers.append(Residual(in_channels, out_channels, stride=stride))
        layers.append(Residual(out_channels, out_channels, stride=1))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def mlp() -> nn.Module:
    """Large parameters, little compute: the case that the network decides."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, 1024), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


class Transformer(nn.Module):
    """A small pre-norm transformer encoder over 64 tokens with a classifier on the mean."""

    def __init__(self) -> None:
        super().__init__()
        width, num_layers, num_tokens, vocabulary = 256, 4, 64, 1000
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(num_tokens, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                nhead=4,
                dim_feedforward=4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape ``(N, vocabulary)`` from token ids of shape ``(N, 64)``."""
        hidden = self.embed(tokens) + self.position
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.classify(self.norm(hidden).mean(dim=1))
        return logits


def _images(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 1, 28, 28)


def _tokens(num_samples: int) -> Tensor:
    return torch.randint(0, 1000, (num_samples, 64))


MODELS = {
    name: ReferenceModel(build=build, sample=sample, draw_inputs=draw, num_classes=classes)
    for name, build, sample, draw, classes in (
        ("lenet", lenet, "1x28x28 image", _images, 10),
        ("resnet18", resnet18, "1x28x28 image", _images, 10),
        ("mlp", mlp, "784 features", _images, 10),
        ("transformer", Transformer, "64 tokens", _tokens, 1000),
    )
}

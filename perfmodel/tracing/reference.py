"""Reference models, different enough to tell the terms of the model apart: small ones, and those that fill a GPU."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from perfmodel.tracing.source import make_optimizer
from perfmodel.workload.step import DEFAULT, StepMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """How to build a model, one batch of synthetic samples for it, and how it is trained."""

    build: Callable[[], nn.Module]
    sample: str
    draw_inputs: Callable[[int], Tensor]
    num_classes: int
    num_labels: int = 1
    """Of one sample: 1, or as many as it has tokens."""
    precision: str = "fp32"
    """fp32 as torch computes it by default, or the type of autocast."""
    channels_last: bool = False
    optimizer: str = "sgd"
    implementation: str = DEFAULT
    """Of the optimizer."""

    def draw_labels(self, samples: int) -> Tensor:
        """Classes of samples, or of each of their tokens."""
        shape = (samples,) if self.num_labels == 1 else (samples, self.num_labels)
        return torch.randint(0, self.num_classes, shape)

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of scores in the last dimension."""
        if self.num_labels > 1:
            scores, labels = scores.flatten(0, 1), labels.flatten()
        return nn.functional.cross_entropy(scores, labels)

    def made(self) -> nn.Module:
        """A new model in the layout in which it is trained."""
        module = self.build()
        for parameter in module.parameters() if self.channels_last else ():
            # ``module.to`` would swap parameters, which those without content refuse.
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return module

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """As a user writes it."""
        if self.implementation == DEFAULT:
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        return make_optimizer(parameters, name=self.optimizer, implementation=self.implementation)

    def method(self, device_kind: str) -> StepMethod:
        """How a step is traced for a kind of device."""
        return StepMethod(
            optimizer=self.optimizer,
            optimizer_implementation=self.implementation,
            precision=self.precision,
            checkpointing="none",
            device_kind=device_kind,
        )


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


def resnet50() -> nn.Module:
    """ResNet-50 of torchvision for 224 x 224 pixels."""
    from torchvision import models  # noqa: PLC0415 - takes seconds

    module: nn.Module = models.resnet50()
    return module


_GPT2_TOKENS: Final = 1024
_GPT2_VOCABULARY: Final = 50_257


def gpt2() -> nn.Module:
    """A decoder of the size of GPT-2 small (124 million parameters), without dropout."""
    from perfmodel.tracing.huggingface_config import Config, read_shape  # noqa: PLC0415 - few need it
    from perfmodel.tracing.transformers import CausalLanguageModel  # noqa: PLC0415

    values = {
        "model_type": "gpt2",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": _GPT2_VOCABULARY,
        "max_position_embeddings": _GPT2_TOKENS,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    return CausalLanguageModel(read_shape(Config(Path("gpt2"), values), families=("gpt2",)))


def _colour_images(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 3, 224, 224)


def _channels_last_images(num_samples: int) -> Tensor:
    return _colour_images(num_samples).contiguous(memory_format=torch.channels_last)


def _text(num_samples: int) -> Tensor:
    return torch.randint(0, _GPT2_VOCABULARY, (num_samples, _GPT2_TOKENS))


MODELS = {
    name: ReferenceModel(build=build, sample=sample, draw_inputs=draw, num_classes=classes)
    for name, build, sample, draw, classes in (
        ("lenet", lenet, "1x28x28 image", _images, 10),
        ("resnet18", resnet18, "1x28x28 image", _images, 10),
        ("mlp", mlp, "784 features", _images, 10),
        ("transformer", Transformer, "64 tokens", _tokens, 1000),
    )
}
#: Models that keep a GPU busy, each with the precision and the optimizer of its usual recipe. They are calibrated
#: by these names; ``find_source`` takes them for those of torchvision.
GPU_MODELS: Final = {
    "resnet50": ReferenceModel(
        build=resnet50,
        sample="3x224x224 image",
        draw_inputs=_channels_last_images,
        num_classes=1000,
        precision="bf16",
        channels_last=True,
        optimizer="adamw",
        implementation="foreach",
    ),
    "resnet50-fp32": ReferenceModel(
        build=resnet50,
        sample="3x224x224 image",
        draw_inputs=_colour_images,
        num_classes=1000,
        implementation="foreach",
    ),
    "gpt2": ReferenceModel(
        build=gpt2,
        sample=f"{_GPT2_TOKENS} tokens",
        draw_inputs=_text,
        num_classes=_GPT2_VOCABULARY,
        num_labels=_GPT2_TOKENS,
        precision="bf16",
        optimizer="adamw",
        implementation="fused",
    ),
}
#: All that a calibration can run.
REFERENCES: Final = MODELS | GPU_MODELS

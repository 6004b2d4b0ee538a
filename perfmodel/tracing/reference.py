"""Reference models, different enough to tell the terms of the model apart: small ones, and those that fill a GPU."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perfmodel.tracing.source import (
    ModelSource,
    classification_loss,
    images,
    labelled,
    make_optimizer,
    texts,
    token_loss,
    tokens,
)
from perfmodel.workload.step import DEFAULT, USUAL_METHOD, StepMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel(ModelSource):
    """A source that calibrations also train for real, with the recipe for that."""

    precision: str = "fp32"
    """fp32 as torch computes it by default, or the type of autocast."""
    optimizer: str = "sgd"
    implementation: str = DEFAULT
    """Of the optimizer."""
    cudnn_benchmark: bool = False
    """Whether cuDNN tries its algorithms and keeps the fastest."""
    ddp_options: tuple[str, ...] = ()
    """Switches of DistributedDataParallel that are on."""

    def wrapped(self, module: nn.Module, **how: Any) -> DistributedDataParallel:
        """The module under DDP, with the switches of the recipe.

        Its first backward pass must synchronise gradients if the graph is static.
        """
        options: dict[str, Any] = dict.fromkeys(self.ddp_options, True)
        return DistributedDataParallel(module, **options, **how)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """As a user writes it."""
        if self.implementation == DEFAULT:
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        return make_optimizer(parameters, name=self.optimizer, implementation=self.implementation)

    def method(self, device_kind: str) -> StepMethod:
        """How a step is traced for a kind of device."""
        return replace(
            USUAL_METHOD,
            optimizer=self.optimizer,
            optimizer_implementation=self.implementation,
            precision=self.precision,
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


def resnet50() -> nn.Module:
    """ResNet-50 of torchvision for 224 x 224 pixels."""
    from torchvision import models  # noqa: PLC0415 - takes seconds

    module: nn.Module = models.resnet50()
    return module


_GPT2_TOKENS: Final = 1024
_GPT2_VOCABULARY: Final = 50_257


def gpt2() -> nn.Module:
    """A decoder of the size of GPT-2 small (124 million parameters), without dropout."""
    from perfmodel.tracing.huggingface_config import shape_of  # noqa: PLC0415 - few need it
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
    return CausalLanguageModel(shape_of(values, path=Path("gpt2")))


def _resnet50_channels_last() -> nn.Module:
    module = resnet50()
    for parameter in module.parameters():
        # ``module.to`` would swap parameters, which those without content refuse.
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


MODELS: Final = {
    name: ReferenceModel(
        name=name,
        build=build,
        sample=sample,
        draw_batch=labelled(draw_inputs, num_classes),
        loss=classification_loss,
    )
    for name, build, sample, draw_inputs, num_classes in (
        ("lenet", lenet, "1x28x28 image", images(1, 28, 28), 10),
        ("resnet18", resnet18, "1x28x28 image", images(1, 28, 28), 10),
        ("mlp", mlp, "784 features", images(1, 28, 28), 10),
        ("transformer", Transformer, "64 tokens", tokens(1000, 64), 1000),
    )
}
_RESNET50: Final = ReferenceModel(
    name="resnet50",
    build=_resnet50_channels_last,
    sample="3x224x224 image",
    draw_batch=labelled(
        lambda samples: images(3, 224, 224)(samples).contiguous(memory_format=torch.channels_last),
        1000,
    ),
    loss=classification_loss,
    precision="bf16",
    optimizer="adamw",
    implementation="foreach",
)
#: Models that keep a GPU busy, each with the precision and the optimizer of its usual recipe. They are calibrated
#: by these names; ``find_source`` takes them for those of torchvision.
GPU_MODELS: Final = {
    "resnet50": _RESNET50,
    "resnet50-tuned": replace(
        _RESNET50,
        name="resnet50-tuned",
        cudnn_benchmark=True,
        ddp_options=("gradient_as_bucket_view", "static_graph"),
    ),
    "resnet50-fp32": ReferenceModel(
        name="resnet50-fp32",
        build=resnet50,
        sample="3x224x224 image",
        draw_batch=labelled(images(3, 224, 224), 1000),
        loss=classification_loss,
        implementation="foreach",
    ),
    "gpt2": ReferenceModel(
        name="gpt2",
        build=gpt2,
        sample=f"{_GPT2_TOKENS} tokens",
        draw_batch=texts(_GPT2_VOCABULARY, _GPT2_TOKENS),
        loss=token_loss,
        precision="bf16",
        optimizer="adamw",
        implementation="fused",
    ),
}
#: All that a calibration can run.
REFERENCES: Final = MODELS | GPU_MODELS

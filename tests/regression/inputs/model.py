"""A model for perfmodel trace."""

import torch


def network() -> tuple[torch.nn.Module, torch.Tensor]:
    layers = (
        torch.nn.Linear(256, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )
    return torch.nn.Sequential(*layers), torch.zeros(8, 256)

"""A value head for critics: one number per token from the last hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """`V_t = w . h_t + b`, in fp32, starting at zero so that a fresh critic predicts nothing rather
    than noise.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        value: Tensor = self.linear(hidden_NH.to(self.linear.weight.dtype))[:, 0]
        return value

"""The clipped surrogate of PPO, as a function of any ratio. It never decides what the ratio is."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.algorithms.tokens import Stats


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Stats]:
    r"""$-\min(\rho A,\ \mathrm{clip}(\rho, 1-l, 1+h) A)$, and where the clip decides.

    >>> loss, _ = surrogate(torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0]), 0.2, 0.25)
    >>> loss.tolist()
    [-1.25, 1.5]
    """
    free = ratio * advantage
    bounded = ratio.clamp(1 - low, 1 + high) * advantage
    with torch.no_grad():
        # In place on a fresh tensor, a comparison gives numbers at a fraction of the cost of bools.
        cut = (free - bounded).gt_(0)
        cut_high = (cut * advantage).gt_(0)
    return -torch.minimum(free, bounded), {
        "policy/clip_frac_low": cut.sub_(cut_high),
        "policy/clip_frac_high": cut_high,
    }

"""The critic's loss: `(Tokens) -> (one loss per trained token, statistics)`."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.algorithms.tokens import Stats, Tokens


def clipped_value(x: Tokens, clip: float) -> tuple[Tensor, Stats]:
    r"""$\frac12 \max((V - R)^2, (\mathrm{clip}(V, V_{old} \pm c) - R)^2)$: a value that has moved
    further than c from where the batch began gains nothing by moving on.
    """
    assert x.value is not None and x.old_value is not None and x.returns is not None
    error = x.value - x.returns
    bounded = x.value.clamp(x.old_value - clip, x.old_value + clip) - x.returns
    free_2, bounded_2 = error.square(), bounded.square()
    return torch.maximum(free_2, bounded_2) / 2, {
        "critic/clip_frac": (bounded_2.detach() - free_2.detach()).gt_(0),
        "critic/error": error.detach().abs(),
    }

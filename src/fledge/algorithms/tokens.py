"""What a loss sees: one entry per *trained* token of a micro-batch, so that no loss needs a mask.

Legend: N trained tokens. Gradients flow through `logp`, `entropy` and `value` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0

Stats = dict[str, Tensor]
"""Name to one number per trained token. Names ending in `_max` or `_min` are reduced to the
extreme, others to the mean.
"""


@dataclass(frozen=True)
class Tokens:
    """Trained tokens with everything known about them.

    `engine_logp` is what the engine recorded when it sampled, `old_logp` the policy at the start of
    this batch, `ref_logp` the frozen reference (if asked for), `weight` the weight of a supervised
    token.
    """

    logp: Tensor
    entropy: Tensor
    engine_logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    weight: Tensor
    sequence: Tensor
    sequences: int
    ref_logp: Tensor | None = None
    value: Tensor | None = None

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of `x` over each token's own sequence, repeated for each of its tokens."""
        zeros = torch.zeros(self.sequences, dtype=x.dtype, device=x.device)
        sums = zeros.index_add(0, self.sequence, x)
        counts = zeros.index_add(0, self.sequence, torch.ones_like(x))
        return (sums / counts.clamp(min=1))[self.sequence]


def safe_log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """`logp - other`, kept within +-20 so that its exponential stays finite."""
    return (logp - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def safe_ratio(logp: Tensor, other: Tensor) -> Tensor:
    return safe_log_ratio(logp, other).exp()

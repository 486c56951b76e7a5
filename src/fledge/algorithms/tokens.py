"""What a loss sees: one entry per *trained* token of a micro-batch, so that no loss needs a mask.

Legend: N trained tokens of S whole sequences, one after the other. Gradients flow through `logp`,
`entropy` and `value` only. A sequence is the thing that a sequence-level loss compares: an episode,
or (for preferences) a pair; it is never cut into two micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within this, so that their exponential stays finite."""

LEAST_LOGP = -1e4
"""Log-probs below this count as this: an impossible token (-inf) would make NaN out of 0 * inf."""

Stats = dict[str, Tensor]
"""Name to one number per trained token; NaN where it does not apply. Names ending in `_max` or
`_min` are reduced to the extreme, others to the mean.
"""


@dataclass(frozen=True)
class Tokens:
    """Trained tokens with everything known about them.

    `engine_logp` is what the engine recorded when it sampled, `old_logp` the policy at the start of
    this batch, `ref_logp` the frozen reference, `weight` the weight of a supervised token. A critic
    sees `value`, and `old_value` and `returns` from before the update. `side` is +1 on the chosen
    and -1 on the rejected half of a pair. `chosen` marks what a loss's `prepare` has picked.
    """

    logp: Tensor
    entropy: Tensor
    engine_logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    weight: Tensor
    sequence: Tensor
    lengths: Tensor
    ref_logp: Tensor | None = None
    value: Tensor | None = None
    old_value: Tensor | None = None
    returns: Tensor | None = None
    side: Tensor | None = None
    chosen: Tensor | None = None

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Tensor],
        logp: Tensor,
        entropy: Tensor,
        lengths: Tensor,
        value: Tensor | None = None,
    ) -> Tokens:
        """Tokens from a batch's columns; what is not among them takes its neutral value."""

        def column(name: str) -> Tensor | None:
            found = columns.get(name)
            return None if found is None else found.to(logp)

        def or_else(name: str, default: Tensor) -> Tensor:
            found = column(name)
            return default if found is None else found

        engine_logp = or_else("engine_logp", logp.detach())
        return cls(
            logp=logp,
            entropy=entropy,
            engine_logp=engine_logp,
            old_logp=or_else("old_logp", engine_logp),
            advantage=or_else("advantage", torch.zeros_like(logp)),
            weight=or_else("weight", torch.ones_like(logp)),
            sequence=torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths),
            lengths=lengths,
            ref_logp=column("ref_logp"),
            value=value,
            old_value=column("value"),
            returns=column("returns"),
            side=column("side"),
            chosen=column("chosen"),
        )

    def sequence_sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over each token's own sequence, repeated for each of its tokens."""
        return segment_sums(x, self.lengths).index_select(0, self.sequence)

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of `x` over each token's own sequence, repeated for each of its tokens."""
        means = segment_sums(x, self.lengths) / self.lengths.clamp(min=1)
        return means.index_select(0, self.sequence)

    def once(self, x: Tensor) -> Tensor:
        """A statistic of sequences: kept at the first token of each, NaN at the others, so that its
        mean is one over sequences.
        """
        firsts = (self.lengths.cumsum(0) - self.lengths)[self.lengths > 0]
        found = torch.full_like(x, torch.nan)
        found[firsts] = x.detach()[firsts]
        return found


def segment_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """Sums over neighbours: the first `lengths[0]` entries, the next `lengths[1]`, and so on.

    >>> segment_sums(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 2])).tolist()
    [1.0, 0.0, 5.0]
    """
    return torch.segment_reduce(x, "sum", lengths=lengths, initial=0)


def safe_log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """`logp - other` within +-20; two impossible tokens are equally impossible, so 0."""
    return (safe_logp(logp) - safe_logp(other)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def safe_ratio(logp: Tensor, other: Tensor) -> Tensor:
    return safe_log_ratio(logp, other).exp()


def safe_logp(logp: Tensor) -> Tensor:
    """Finite also for an impossible token, which gets no gradient."""
    return logp.clamp(min=LEAST_LOGP)


def out_of_range(x: Tokens) -> Tensor:
    """1 where a ratio to the old policy or to the engine's had to be bounded: it is counted."""
    found = _beyond(x.logp, x.old_logp)
    if x.engine_logp is not x.old_logp:
        found = torch.maximum(found, _beyond(x.logp, x.engine_logp))
    return found


def _beyond(logp: Tensor, other: Tensor) -> Tensor:
    return (logp.detach() - other).abs_().sub_(MAX_LOG_RATIO).gt_(0)

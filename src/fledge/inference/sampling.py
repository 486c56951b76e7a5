"""Drawing tokens on the device, with the log-prob of what was really drawn from.

One uniform number per token, keyed by (seed of the request, index of the token), is turned into a
token by the inverse of the cumulative distribution: so a request draws the same tokens alone and in
a crowd. Legend: B requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.types import Sampling

_MASK = (1 << 64) - 1


@dataclass
class Columns:
    """Sampling settings of a batch of requests, one entry each; filters that nobody uses cost
    nothing.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    index: Tensor
    greedy: Tensor
    any_greedy: bool
    filtered: bool

    @classmethod
    def of(
        cls, settings: Sequence[Sampling], index: Sequence[int], device: torch.device
    ) -> Columns:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([s.temperature or 1.0 for s in settings], torch.float32),
            top_p=column([s.top_p for s in settings], torch.float32),
            top_k=column([s.top_k for s in settings], torch.int64),
            min_p=column([s.min_p for s in settings], torch.float32),
            seed=column([_signed(_mix(s.seed & _MASK)) for s in settings], torch.int64),
            index=column(list(index), torch.int64),
            greedy=column([s.greedy for s in settings], torch.bool),
            any_greedy=any(s.greedy for s in settings),
            filtered=any(s.top_p < 1 or s.top_k or s.min_p for s in settings if not s.greedy),
        )


def draw(logits_BV: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Token, its log-prob under the distribution drawn from, and its log-prob under the plain
    softmax.
    """
    logits = logits_BV.float()
    plain = logits.log_softmax(-1)
    scaled = logits / columns.temperature[:, None]
    if columns.filtered:
        scaled = keep_likely(scaled, columns)
    logp = scaled.log_softmax(-1)
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    target = uniform(columns.seed, columns.index)[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    chosen = logp.gather(1, token[:, None])[:, 0]
    if columns.any_greedy:
        token = torch.where(columns.greedy, logits.argmax(-1), token)
        chosen = torch.where(columns.greedy, 0.0, chosen)  # all mass on one token
    return token, chosen, plain.gather(1, token[:, None])[:, 0]


def keep_likely(scaled_BV: Tensor, columns: Columns) -> Tensor:
    """Set what top-k, then top-p, then min-p leave out to -inf; the likeliest token stays."""
    ordered, order = scaled_BV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled_BV.shape[1], device=scaled_BV.device)
    limit = torch.where(columns.top_k > 0, columns.top_k, scaled_BV.shape[1])[:, None]
    ordered = ordered.masked_fill(rank >= limit, float("-inf"))
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability
    top_p = columns.top_p[:, None]
    drop = ((before >= top_p) & (top_p < 1)) | (
        probability < columns.min_p[:, None] * probability[:, :1]
    )
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


def uniform(seed_B: Tensor, index_B: Tensor) -> Tensor:
    """One number in [0, 1) per (seed, index): a counter-based generator (splitmix64) in wrapping
    int64 arithmetic.
    """
    z = seed_B + (index_B + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; the operator on int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: int) -> int:
    """Spread neighbouring seeds apart, so that (seed, index + 1) and (seed + 1, index) have nothing
    in common.
    """
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return x ^ (x >> 33)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x

r"""How much a token counts, given the gap between the engine that sampled it and the trainer:
`(Tokens, log_rho) -> one weight per token`, with $\rho = \pi_{old} / \pi_{engine}$.

`log_rho` carries no gradient and is within +-20; so are its sums over sequences here. The weights
of several corrections are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from fledge.algorithms.bounds import AtLeastOne, Positive, Share
from fledge.algorithms.tokens import MAX_LOG_RATIO, Tokens


def token_tis(x: Tokens, log_rho: Tensor, *, cap: Positive = 2.0) -> Tensor:
    r"""Truncated importance sampling: $\min(\rho, cap)$."""
    return log_rho.exp().clamp(max=cap)


def token_clamp(x: Tokens, log_rho: Tensor, *, eps: Share) -> Tensor:
    r"""$\rho$ within $[1 - \epsilon, 1 + \epsilon]$."""
    return log_rho.exp().clamp(1 - eps, 1 + eps)


def sequence_tis(x: Tokens, log_rho: Tensor, *, cap: Positive = 2.0) -> Tensor:
    r"""$\min(\prod_t \rho_t, cap)$, the same for all tokens of a sequence."""
    return _log_product(x, log_rho).exp().clamp(max=cap)


def geometric_mask(
    x: Tokens, log_rho: Tensor, *, low: Share = 0.99, high: AtLeastOne = 1.01
) -> Tensor:
    r"""Only sequences whose geometric mean of $\rho$ is in $[low, high]$."""
    return _inside(x.sequence_mean(log_rho), low, high)


def product_mask(x: Tokens, log_rho: Tensor, *, low: Share = 0.5, high: AtLeastOne = 2.0) -> Tensor:
    r"""Only sequences with $\prod_t \rho_t$ in $[low, high]$."""
    return _inside(_log_product(x, log_rho), low, high)


def outlier_mask(
    x: Tokens, log_rho: Tensor, *, low: Share = 1e-4, high: AtLeastOne = 100.0
) -> Tensor:
    r"""Only sequences in which every $\rho_t$ is in $[low, high]$."""
    return x.sequence_sum(1 - _inside(log_rho, low, high)).eq_(0)


def token_mask(
    x: Tokens, log_rho: Tensor, *, low: Share | None = 0.5, high: AtLeastOne | None = 2.0
) -> Tensor:
    r"""Only tokens with $\rho$ in $[low, high]$; None is no bound."""
    return _inside(log_rho, 0.0 if low is None else low, math.inf if high is None else high)


def icepop(x: Tokens, log_rho: Tensor, *, low: Share = 0.5, high: AtLeastOne = 5.0) -> Tensor:
    r"""$\rho$ where it is in $[low, high]$, else 0."""
    return log_rho.exp() * _inside(log_rho, low, high)


def _log_product(x: Tokens, log_rho: Tensor) -> Tensor:
    return x.sequence_sum(log_rho).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _inside(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """1 where the ratio is in [low, high], else 0; compared as logarithms, which costs no exp."""
    least = math.log(low) if low > 0 else -math.inf
    return (log_ratio.clamp(least, math.log(high)) - log_ratio).eq_(0)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "token_tis": token_tis,
    "token_clamp": token_clamp,
    "sequence_tis": sequence_tis,
    "geometric_mask": geometric_mask,
    "product_mask": product_mask,
    "outlier_mask": outlier_mask,
    "token_mask": token_mask,
    "icepop": icepop,
}

r"""Estimates of $\mathrm{KL}(\pi \| ref)$ per token, and a coefficient that can follow a target.

With $d = \log\pi - \log ref$, within +-20, of tokens that were sampled from $\pi$ (Schulman,
"Approximating KL divergence", 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fledge.algorithms.tokens import safe_log_ratio

MOST_ERROR = 0.2
LEAST_FACTOR = 0.1
LEAST_COEF = 1e-8


def k1(logp: Tensor, ref: Tensor) -> Tensor:
    """$d$: unbiased, may be negative; its gradient is 0 in expectation."""
    return safe_log_ratio(logp, ref)


def k2(logp: Tensor, ref: Tensor) -> Tensor:
    """$d^2 / 2$: biased, but its gradient is that of the KL in expectation."""
    return safe_log_ratio(logp, ref).square() / 2


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """$e^{-d} + d - 1$: unbiased, and never negative."""
    d = safe_log_ratio(ref, logp)
    return d.exp() - d - 1


def absolute(logp: Tensor, ref: Tensor) -> Tensor:
    """$|d|$."""
    return safe_log_ratio(logp, ref).abs()


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
}


class AdaptiveCoefficient:
    r"""Raises `coef` while the KL is above its target, and lowers it below (arXiv:1909.08593):

    $c \leftarrow c\,(1 + e\, n / \mathrm{horizon})$ after $n$ episodes, with the error
    $e = \mathrm{kl} / \mathrm{target} - 1$ within +-0.2. Fixed without a target. Never 0 or less:
    from there it could not come back.
    """

    def __init__(self, coef: float, target: float | None, horizon: float) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, episodes: int) -> None:
        if self.target is None:
            return
        error = min(max(kl / self.target - 1, -MOST_ERROR), MOST_ERROR)
        factor = max(1 + error * episodes / self.horizon, LEAST_FACTOR)
        self.coef = max(self.coef * factor, LEAST_COEF)

    def state(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.coef = state["coef"]

"""Policy losses: `(Tokens) -> (one loss per trained token, statistics)`. Pure; they never mask and
never reduce.

`fledge.algorithms.reduce` turns the per-token loss into one number, once for all losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fledge.algorithms.tokens import Stats, Tokens, safe_log_ratio, safe_ratio


def clipped(x: Tokens, *, low: float = 0.2, high: float = 0.2) -> tuple[Tensor, Stats]:
    r"""PPO surrogate $-\min(\rho A,\ \mathrm{clip}(\rho, 1-l, 1+h) A)$; `high > low` is clip-higher
    (DAPO).
    """
    ratio = safe_ratio(x.logp, x.old_logp)
    bounded = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * x.advantage, bounded * x.advantage)
    cut = ratio.detach()
    return loss, {
        "policy/clip_frac_low": ((cut < 1 - low) & (x.advantage < 0)).float(),
        "policy/clip_frac_high": ((cut > 1 + high) & (x.advantage > 0)).float(),
    }


def policy_gradient(x: Tokens) -> tuple[Tensor, Stats]:
    r"""REINFORCE: $-A \log \pi$ (Williams, 1992)."""
    return -x.advantage * x.logp, {}


def cross_entropy(x: Tokens) -> tuple[Tensor, Stats]:
    r"""Supervised: $-w \log \pi$, with w the weight of the token."""
    return -x.weight * x.logp, {"sft/loss": -x.logp.detach()}


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    r"""$\mathrm{KL}(\pi\|\mathrm{ref}) \approx e^{d} - d - 1$, d = ref - logp: unbiased, never
    negative.
    """
    d = safe_log_ratio(ref_logp, logp)
    return d.exp() - d - 1


LOSSES: dict[str, Callable[..., Any]] = {"clipped": clipped, "policy_gradient": policy_gradient}

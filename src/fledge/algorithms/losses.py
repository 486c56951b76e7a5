r"""Policy losses: `(Tokens) -> (one loss per trained token, statistics)`. Pure; they never mask and
never reduce.

`fledge.algorithms.reduce` turns the per-token loss into one number, once for all losses. In the
formulas, $\rho = \pi / \pi_{old}$, $A$ is the advantage and $\mathrm{sg}$ stops gradients. Losses
that must look at a whole mini-batch are in `covariance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fledge.algorithms.bounds import AboveOne, NotNegative, Positive, Share
from fledge.algorithms.clipping import surrogate
from fledge.algorithms.covariance import ClipCov, KlCov
from fledge.algorithms.tokens import (
    MAX_LOG_RATIO,
    Stats,
    Tokens,
    safe_log_ratio,
    safe_logp,
    safe_ratio,
    segment_sums,
)

LEAST_REST = 1e-12
"""What is left to all other tokens counts as at least this: log(0) is infinite."""


def clipped(x: Tokens, *, low: Share = 0.2, high: NotNegative = 0.2) -> tuple[Tensor, Stats]:
    r"""PPO: $-\min(\rho A,\ \mathrm{clip}(\rho, 1-l, 1+h) A)$ (arXiv:1707.06347); `high > low` is
    the clip-higher of DAPO (arXiv:2503.14476).
    """
    return surrogate(safe_ratio(x.logp, x.old_logp), x.advantage, low, high)


def dual_clip(
    x: Tokens, *, low: Share = 0.2, high: NotNegative = 0.2, c: AboveOne = 3.0
) -> tuple[Tensor, Stats]:
    r"""As `clipped`, and at most $-cA$ where $A < 0$ (arXiv:1912.09729)."""
    loss, stats = clipped(x, low=low, high=high)
    # Where A >= 0 the loss is not positive, so that c|A| bounds nothing there.
    most = x.advantage.abs().mul_(c)
    return torch.minimum(loss, most), {
        **stats,
        "policy/clip_frac_dual": (loss.detach() - most).gt_(0),
    }


def gspo(x: Tokens, *, low: Share = 3e-4, high: NotNegative = 4e-4) -> tuple[Tensor, Stats]:
    r"""PPO's clip on the ratio of the sequence, $s = \exp(\mathrm{mean}_t \log\rho_t)$, in the form
    with a gradient per token: $s_t = \mathrm{sg}(s)\, \pi_t / \mathrm{sg}(\pi_t)$
    (arXiv:2507.18071).
    """
    s = _geometric_mean(x, safe_log_ratio(x.logp.detach(), x.old_logp))
    live = safe_logp(x.logp)
    # e^u at u = 0 has the value and the gradient of 1 + u.
    return surrogate(s + s * (live - live.detach()), x.advantage, low, high)


def _geometric_mean(x: Tokens, log_ratio: Tensor) -> Tensor:
    """Of the ratios of each token's own sequence; one exponential per sequence, not per token."""
    means = segment_sums(log_ratio, x.lengths) / x.lengths.clamp(min=1)
    return means.exp().index_select(0, x.sequence)


def cispo(
    x: Tokens,
    *,
    low: Share = 1.0,
    high: NotNegative = 4.0,
    anchor: Literal["old", "engine"] = "old",
) -> tuple[Tensor, Stats]:
    r"""$-A\, \mathrm{sg}(\mathrm{clip}(\rho, 1-l, 1+h)) \log\pi$: the clip bounds the weight of a
    token and never takes its gradient away (MiniMax-M1, arXiv:2506.13585).
    """
    ratio = safe_ratio(x.logp.detach(), x.old_logp if anchor == "old" else x.engine_logp)
    weight = ratio.clamp(1 - low, 1 + high)
    return -(weight * x.advantage) * safe_logp(x.logp), {
        "policy/clip_frac_low": (ratio - weight).lt_(0),
        "policy/clip_frac_high": (ratio - weight).gt_(0),
    }


def sapo(x: Tokens, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> tuple[Tensor, Stats]:
    r"""A soft clip: $-A\, \frac{4}{\tau} \sigma(\tau (\rho - 1))$, with a $\tau$ for each sign of
    the advantage (arXiv:2511.20347).
    """
    tau = x.advantage.clone().gt_(0).mul_(tau_pos - tau_neg).add_(tau_neg)
    gate = torch.sigmoid(tau * (safe_ratio(x.logp, x.old_logp) - 1))
    return gate * (x.advantage * -4).div_(tau), {}


def dppo(
    x: Tokens, *, divergence: Literal["tv", "kl"] = "tv", delta: Positive = 0.2
) -> tuple[Tensor, Stats]:
    r"""$-\rho A$ from the engine's policy on, without the tokens whose own probability has moved
    too far to where the advantage pushes it: $|p - p_e| > \delta$, or
    $\mathrm{KL}(p_e \| p) > \delta$ of "this token or another" (arXiv:2602.04879).
    """
    log_ratio = safe_log_ratio(x.logp, x.engine_logp)
    ratio = log_ratio.exp()
    with torch.no_grad():
        # An engine's p below e^-20 of the policy's is raised to that, as it is in the ratio: then
        # p = p_engine * ratio also where the ratio is bounded, and a large move cannot hide.
        p_engine = torch.maximum(x.logp - MAX_LOG_RATIO, x.engine_logp).exp_()
        moved = _moved if divergence == "tv" else _signed_kl
        masked = moved(p_engine, ratio, log_ratio).mul_(x.advantage.sign()).gt_(delta)
        weight = (masked - 1).mul_(x.advantage)
    return ratio * weight, {"policy/masked_frac": masked}


def _moved(p_engine: Tensor, ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """$p - p_e$: its size is the total variation of "this token or another"."""
    return p_engine * (ratio - 1)


def _signed_kl(p_engine: Tensor, ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """The binary KL of the engine's policy to the current one, negative where p has fallen."""
    rest = (1 - p_engine * ratio).clamp_(min=LEAST_REST)
    rest_engine = (1 - p_engine).clamp_(min=LEAST_REST)
    kl = rest_engine * (rest_engine / rest).log_() - p_engine * log_ratio
    return kl.mul_(log_ratio.sign())


def geo_mean(x: Tokens, *, bound: Positive = 0.4) -> tuple[Tensor, Stats]:
    r"""$-A \exp(\mathrm{mean}_t\, d'_t)$ per sequence, where $d = \log\rho$ is held back in the
    direction of the advantage only: $d' = \mathrm{sgn}(A) \min(\mathrm{sgn}(A)\, d,\ b)$ (GMPO,
    arXiv:2507.20673).
    """
    sign = x.advantage.sign()
    forward = sign * safe_log_ratio(x.logp, x.old_logp)
    mean = _geometric_mean(x, sign * forward.clamp(max=bound))
    cut = (forward.detach() - bound).gt_(0)
    cut_high = cut * sign.clamp(min=0)
    return -x.advantage * mean, {
        "policy/clip_frac_low": cut.sub_(cut_high),
        "policy/clip_frac_high": cut_high,
    }


def importance_sampling(x: Tokens) -> tuple[Tensor, Stats]:
    r"""$-\frac{\pi}{\pi_{engine}} A$: unbiased, and unbounded."""
    return -safe_ratio(x.logp, x.engine_logp) * x.advantage, {}


def rollout_is(x: Tokens, *, low: Share = 0.5, high: NotNegative = 4.0) -> tuple[Tensor, Stats]:
    r"""$-\mathrm{sg}(f) A \log\pi$ with $f = \pi / \pi_{engine}$ inside $(1-l, 1+h)$, else 0."""
    ratio = safe_ratio(x.logp.detach(), x.engine_logp)
    inside = ((ratio - (1 - low)) * ((1 + high) - ratio)).gt_(0)
    return -(ratio * inside * x.advantage) * safe_logp(x.logp), {"policy/masked_frac": 1 - inside}


def dro(x: Tokens, *, beta: Positive = 0.05) -> tuple[Tensor, Stats]:
    r"""Direct reward optimisation, $-A \log\pi + \frac{\beta}{2} \log^2\frac{\pi}{\pi_{engine}}$,
    without its value function (arXiv:2405.19107).
    """
    distance = safe_log_ratio(x.logp, x.engine_logp)
    return 0.5 * beta * distance.square() - x.advantage * safe_logp(x.logp), {}


def policy_gradient(x: Tokens) -> tuple[Tensor, Stats]:
    r"""REINFORCE: $-A \log \pi$ (Williams, 1992)."""
    return -x.advantage * safe_logp(x.logp), {}


def cross_entropy(x: Tokens) -> tuple[Tensor, Stats]:
    r"""Supervised: $-w \log \pi$, with w the weight of the token."""
    logp = safe_logp(x.logp)
    return -x.weight * logp, {"sft/loss": -logp.detach()}


LOSSES: dict[str, Callable[..., Any]] = {
    "clipped": clipped,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "clip_cov": ClipCov,
    "kl_cov": KlCov,
    "geo_mean": geo_mean,
    "importance_sampling": importance_sampling,
    "rollout_is": rollout_is,
    "dro": dro,
    "policy_gradient": policy_gradient,
}

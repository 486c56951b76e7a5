r"""Losses that treat the tokens with the highest covariance of log-prob and advantage differently:
these are the ones that use up the entropy (arXiv:2505.22617).

$\mathrm{cov}_t = (A_t - \bar A)(\log\pi_t - \overline{\log\pi})$, with means over the trained
tokens of a whole mini-batch. So the tokens are picked once per mini-batch, by `prepare`, and a
micro-batch reads the choice in `Tokens.chosen`. The bounds are of the *raw* advantage: one that is
scaled by a token count never reaches them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.algorithms.bounds import NotNegative, Positive, PositiveShare, Share
from fledge.algorithms.clipping import surrogate
from fledge.algorithms.tokens import Stats, Tokens, safe_log_ratio, safe_logp, safe_ratio
from fledge.errors import PluginError


class ClipCov:
    """`clipped`, where a few tokens lose their gradient: drawn among those that have a covariance
    between `cov_low` and `cov_high` and that the clip has not already cut.
    """

    def __init__(
        self,
        *,
        ratio: PositiveShare = 2e-4,
        low: Share = 0.2,
        high: NotNegative = 0.2,
        cov_low: float = 1.0,
        cov_high: float = 5.0,
    ) -> None:
        if not cov_low < cov_high:
            raise PluginError(
                f"algorithm.loss: clip_cov has no covariance between cov_low={cov_low:g} and "
                f"cov_high={cov_high:g}; set cov_low below cov_high"
            )
        self.ratio, self.low, self.high = ratio, low, high
        self.cov_low, self.cov_high = cov_low, cov_high

    def prepare(self, x: Tokens, draw: Tensor) -> Tensor:
        """1 for each chosen token of the mini-batch, 0 for the others."""
        _, stats = self._clipped(x)
        cov = covariance(x)
        candidate = (
            (cov > self.cov_low)
            & (cov < self.cov_high)
            & (stats["policy/clip_frac_low"] == 0)
            & (stats["policy/clip_frac_high"] == 0)
        )
        return smallest(draw, candidate, share_of(self.ratio, len(cov))).to(x.logp.dtype)

    def __call__(self, x: Tokens) -> tuple[Tensor, Stats]:
        loss, stats = self._clipped(x)
        chosen = chosen_of(x)
        return loss * (1 - chosen), {**stats, "policy/cov_chosen_frac": chosen}

    def _clipped(self, x: Tokens) -> tuple[Tensor, Stats]:
        return surrogate(safe_ratio(x.logp, x.old_logp), x.advantage, self.low, self.high)


class KlCov:
    r"""$-\rho A$, plus $c\,|\log\rho|$ on the tokens with the highest covariance. Exactly $-\rho A$
    as long as the policy has not moved.
    """

    def __init__(self, *, ratio: PositiveShare = 2e-3, coef: Positive = 1.0) -> None:
        self.ratio, self.coef = ratio, coef

    def prepare(self, x: Tokens, draw: Tensor) -> Tensor:
        """1 for each chosen token of the mini-batch, 0 for the others."""
        cov = covariance(x)
        count = min(share_of(self.ratio, len(cov)), len(cov))
        if not count:
            return torch.zeros_like(x.logp)
        least = cov.topk(count).values[-1]
        above = cov > least
        # Among equals the draws decide, not the order of the batch.
        equal = smallest(draw, cov == least, count - int(above.sum()))
        return (above | equal).to(x.logp.dtype)

    def __call__(self, x: Tokens) -> tuple[Tensor, Stats]:
        log_ratio = safe_log_ratio(x.logp, x.old_logp)
        chosen = chosen_of(x)
        loss = self.coef * chosen * log_ratio.abs() - log_ratio.exp() * x.advantage
        return loss, {"policy/cov_chosen_frac": chosen}


def covariance(x: Tokens) -> Tensor:
    """Each token's share in the covariance of log-prob and advantage over these tokens.

    The means are taken in double precision, so that the order of the tokens does not show.
    """
    logp = safe_logp(x.logp.detach())
    return (x.advantage - x.advantage.mean(dtype=torch.float64)) * (
        logp - logp.mean(dtype=torch.float64)
    )


def share_of(ratio: float, tokens: int) -> int:
    """At least one token, so that a small mini-batch is not silently left alone."""
    return max(1, round(ratio * tokens))


def smallest(draw: Tensor, candidate: Tensor, count: int) -> Tensor:
    """The up to `count` candidates with the smallest draws, as a boolean mask.

    >>> draw, candidate = torch.tensor([0.3, 0.1, 0.2]), torch.tensor([True, False, True])
    >>> smallest(draw, candidate, 1).tolist()
    [False, False, True]
    """
    places = candidate.nonzero().squeeze(1)
    ordered = draw[places].topk(min(count, len(places)), largest=False).indices
    found = torch.zeros_like(candidate)
    found[places[ordered]] = True
    return found


def chosen_of(x: Tokens) -> Tensor:
    if x.chosen is None:
        raise PluginError(
            "algorithm.loss: clip_cov and kl_cov choose their tokens once per mini-batch; call "
            "`prepare` and pass its result on as `Tokens.chosen`"
        )
    return x.chosen

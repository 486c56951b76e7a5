"""Advantages from the episodes of one task: `(group) -> one number per episode`, and the names of
all estimators. Those that look at a whole batch or at single tokens are in `returns`.

Rewards are measured from the first one before they are averaged, so that a group whose rewards are
all equal, or a group of one, gets exactly 0: it says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

from fledge.algorithms.returns import (
    Reinforce,
    distillation,
    gae,
    gdpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    turn,
)
from fledge.errors import PluginError
from fledge.types import Episode


def grpo(group: Sequence[Episode], *, scale_by_std: bool = True) -> list[float]:
    r"""Group-relative: $A_i = (r_i - \bar r) / (\mathrm{std} + 10^{-6})$, std unbiased
    (arXiv:2402.03300).

    `scale_by_std=False` is Dr. GRPO (arXiv:2503.20783).
    """
    deviations = _deviations([e.reward for e in group])
    if not scale_by_std:
        return deviations
    scale = sqrt(sum(d * d for d in deviations) / max(1, len(group) - 1)) + 1e-6
    return [d / scale for d in deviations]


def rloo(group: Sequence[Episode]) -> list[float]:
    r"""Leave-one-out: $A_i = r_i - \frac{1}{n-1}\sum_{j \ne i} r_j = (r_i - \bar r)\frac{n}{n-1}$
    (arXiv:2402.14740).
    """
    scale = len(group) / max(1, len(group) - 1)
    return [d * scale for d in _deviations([e.reward for e in group])]


def maxrl(group: Sequence[Episode]) -> list[float]:
    r"""Maximum likelihood: $A_i = (r_i - \bar r) / (\bar r + 10^{-6})$ (arXiv:2602.02710).

    With rewards of 0 and 1, a task that succeeds with probability p weighs about 1/p. The mean
    stands for that probability, so rewards below 0 have no meaning here.
    """
    rewards = [e.reward for e in group]
    for episode, reward in zip(group, rewards, strict=True):
        if reward < 0:
            raise PluginError(
                "algorithm.advantage: maxrl needs rewards of 0 or more, but episode "
                f"{episode.index} of task {episode.task_key!r} has {reward:g}"
            )
    scale = sum(rewards) / max(1, len(rewards)) + 1e-6
    return [d / scale for d in _deviations(rewards)]


def opo(group: Sequence[Episode]) -> list[float]:
    r"""The baseline of least variance, where long replies count more:
    $A_i = r_i - \sum_j l_j r_j / \sum_j l_j$ (arXiv:2505.23585), with $l_j$ trained tokens.
    """
    lengths = [e.response_length for e in group]
    if not any(lengths):
        return [0.0] * len(group)
    return _deviations([e.reward for e in group], lengths)


def _deviations(rewards: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """From the mean, or from the weighted one."""
    shifted = [r - rewards[0] for r in rewards]
    if weights is None:
        mean = sum(shifted) / max(1, len(shifted))
    else:
        mean = sum(w * s for w, s in zip(weights, shifted, strict=True)) / sum(weights)
    return [s - mean for s in shifted]


ADVANTAGES: dict[str, Callable[..., Any]] = {
    "grpo": grpo,
    "reinforce": Reinforce,
    "rloo": rloo,
    "reinforce++": reinforce_pp,
    "reinforce++_baseline": reinforce_pp_baseline,
    "gae": gae,
    "maxrl": maxrl,
    "opo": opo,
    "gdpo": gdpo,
    "remax": remax,
    "turn": turn,
    "distillation": distillation,
}
"""What `algorithm.advantage` may name."""

"""Advantage estimators: from the rewards of episodes to one number per episode. Pure functions.

A group function `(episodes of one task) -> list[float]` is applied group by group. An estimator
with memory is a class with `__call__(groups) -> list[list[float]]`, `state()` and `restore(state)`;
its state is part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from fledge.types import Episode, Group


def grpo(group: Sequence[Episode], *, scale_by_std: bool = True) -> list[float]:
    r"""Group-relative: $A_i = (r_i - \\bar r) / (\\mathrm{std} + 10^{-6})$, std unbiased
    (arXiv:2402.03300).

    `scale_by_std=False` is Dr. GRPO (arXiv:2503.20783). A group of one, or one without spread, says
    nothing: all zeros.
    """
    rewards = [e.reward for e in group]
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = stdev(rewards) + 1e-6 if scale_by_std else 1.0
    return [(r - mean) / scale for r in rewards]


class Reinforce:
    r"""REINFORCE: $A_i = r_i - b$, with b a running average of earlier batch means (0 before the
    first batch).

    The baseline never contains the batch it is subtracted from, so it does not bias the gradient.
    """

    def __init__(self, *, baseline: bool = True, decay: float = 0.9) -> None:
        self.baseline = baseline
        self.decay = decay
        self.average: float | None = None

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        rewards = [[e.reward for e in g.episodes] for g in groups]
        baseline = (self.average or 0.0) if self.baseline else 0.0
        mean = fmean(r for row in rewards for r in row)
        before = mean if self.average is None else self.average
        self.average = self.decay * before + (1 - self.decay) * mean
        return [[r - baseline for r in row] for row in rewards]

    def state(self) -> dict[str, Any]:
        return {"average": self.average}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]


ADVANTAGES: dict[str, Callable[..., Any]] = {"grpo": grpo, "reinforce": Reinforce}

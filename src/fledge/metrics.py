"""Names and arithmetic of metrics: token-weighted means, maxima, and what a step of episodes says.

A `Ledger` adds up per-token statistics across micro-batches, so that a metric never depends on how
the batch was cut. Names that end in `_max` or `_min` keep the extreme; all others are means over
the tokens they were recorded for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from fledge.types import Group, Outcome


class Ledger:
    """Means and extremes over everything recorded since the last `drain`.

    >>> ledger = Ledger()
    >>> for total in (3.0, 1.0):
    ...     ledger.add("policy/entropy", total, count=2)
    >>> for gap in (0.5, 0.2):
    ...     ledger.extreme("mismatch/abs_logp_max", gap)
    >>> ledger.drain()
    {'policy/entropy': 1.0, 'mismatch/abs_logp_max': 0.5}
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._extremes: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def extreme(self, name: str, value: float) -> None:
        pick = min if name.endswith("_min") else max
        self._extremes[name] = pick(self._extremes.get(name, value), value)

    def drain(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        found = {**means, **self._extremes}
        self._sums.clear()
        self._extremes.clear()
        return found


def rollout_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """What a batch of groups says before anything is trained on it."""
    episodes = [e for g in groups for e in g.episodes]
    everything = episodes + [e for g in groups for e in g.discarded]
    rewards = [e.reward for e in episodes]
    lengths = [e.response_length for e in episodes]
    lags = [version - v for e in episodes for s in e.segments for v in s.versions if v >= 0]
    found = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "group/zero_std_frac": fmean(
            float(len({e.reward for e in g.episodes}) <= 1) for g in groups
        ),
        "response/len_mean": fmean(lengths),
        "response/truncated_frac": fmean(float(e.outcome is Outcome.TRUNCATED) for e in episodes),
        "turns/mean": fmean(len(e.rewards) for e in episodes),
        "stale/versions_mean": fmean(lags) if lags else 0.0,
        "stale/versions_max": float(max(lags, default=0)),
    }
    for outcome in Outcome:
        found[f"outcome/{outcome.value}_frac"] = fmean(
            float(e.outcome is outcome) for e in everything
        )
    found |= _means("env", (e.info for e in episodes))
    found |= _means("reward/part", (e.components for e in episodes))
    return found


def _means(prefix: str, infos: Iterable[Mapping[str, float]]) -> dict[str, float]:
    ledger = Ledger()
    for info in infos:
        for name, value in info.items():
            if math.isfinite(value):
                ledger.add(f"{prefix}/{name}", value, 1)
    return ledger.drain()


def pass_at_k(correct: int, n: int, k: int) -> float:
    """Unbiased chance that one of k samples drawn from n, of which `correct` are right, is right
    (arXiv:2107.03374).

    >>> pass_at_k(correct=1, n=4, k=2)
    0.5
    """
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod((n - correct - i) / (n - i) for i in range(k))

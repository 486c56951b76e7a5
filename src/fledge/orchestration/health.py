"""Watching a run: terms that contribute exactly nothing, signals that die out, numbers that drift.
It warns; it never repairs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fledge.errors import TrainingError
from fledge.types import Group

PATIENCE = 5
"""Steps in a row before something is called a pattern."""

MANY_DROPPED = 0.1
"""Share of a step's episodes above which dropping them is called out again."""

MISMATCH_ALARM = {"fp32": 1e-3, "bf16": 0.5, "fp16": 0.2}
"""Largest engine/trainer log-prob difference per token that rounding can explain."""

_TERMS = {
    "term/kl": "algorithm.kl.coef is set, but the KL term has been exactly 0",
    "term/entropy": "algorithm.entropy_coef is set, but the entropy has been exactly 0",
    "term/policy": "every policy-loss term has been exactly 0: no episode differs from its "
    "baseline",
}


class Health:
    """Counts of what looked wrong, each warned about once."""

    def __init__(self, warn: Callable[[str], None], dtype: str, vocabulary: int) -> None:
        self._warn = warn
        self._uniform = math.log(vocabulary)
        self._first_entropy: float | None = None
        self._limit = MISMATCH_ALARM[dtype]
        self._zero_for: Counter[str] = Counter()
        self.warnings: dict[str, int] = {}
        self.worst_mismatch = 0.0
        self.publishes = 0
        self.dropped: Counter[str] = Counter()
        self.filtered_groups = 0

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Read one step's metrics."""
        for name, text in _TERMS.items():
            if name in metrics:
                self._zero_for[name] = self._zero_for[name] + 1 if metrics[name] == 0 else 0
                if self._zero_for[name] >= PATIENCE:
                    self._say(f"{text} for {PATIENCE} steps in a row", step)
        if not any(name.endswith("/grad_norm") for name in metrics):
            self._say("nothing was trained: every episode was masked or filtered out", step)
        if metrics.get("optim/grad_norm") == 0:
            self._say("the gradient is exactly 0: this step taught nothing", step)
        entropy = metrics.get("policy/entropy")
        if entropy is not None:
            self._first_entropy = entropy if self._first_entropy is None else self._first_entropy
            if entropy > 0.9 * self._uniform > 1.2 * self._first_entropy:
                self._say(
                    "the policy has become almost uniform, which is what divergence looks like; "
                    "lower optim.lr",
                    step,
                )
        if metrics.get("response/truncated_frac", 0) > 0.5:
            self._say("more than half of the replies hit rollout.max_new_tokens", step)
        gap = metrics.get("mismatch/abs_logp_max", 0.0)
        self.worst_mismatch = max(self.worst_mismatch, gap)
        if gap > self._limit:
            self._say("engine and trainer log-probs differ", step, f"by up to {gap:.2g}")

    def dropped_episodes(self, step: int, groups: Sequence[Group]) -> None:
        """Failed episodes leave a biased rest: say so at the first one, and when it is many."""
        failed = [episode for group in groups for episode in group.discarded]
        played = len(failed) + sum(len(group.episodes) for group in groups)
        self.dropped.update(episode.outcome.value for episode in failed)
        if failed:
            first = failed[0]
            example = f"such as {first.outcome.value}: {first.error}"
            self._say("episodes could not be scored and were dropped", step, example)
            if len(failed) > MANY_DROPPED * played:
                share = f"{len(failed)} of {played}"
                self._say("more than a tenth of a step's episodes were dropped", step, share)

    def filtered(self, step: int, filtered: int, missing: int, nothing: bool) -> None:
        """Dynamic sampling: how much was turned down, and whether it gave up."""
        self.filtered_groups += filtered
        if missing:
            self._say(
                "the batch could not be filled with groups that have spread within "
                "algorithm.shaping.max_rounds",
                step,
                f"{missing} missing",
            )
        self._zero_for["filter"] = self._zero_for["filter"] + 1 if nothing else 0
        if self._zero_for["filter"] >= PATIENCE:
            raise TrainingError(
                f"algorithm.shaping.dynamic_sampling: for {PATIENCE} steps in a row no group had "
                "two different rewards, so there is nothing to learn from; check the reward, raise "
                "rollout.group_size, or stop here if the task is solved"
            )

    def _say(self, text: str, step: int, detail: str = "") -> None:
        if text not in self.warnings:
            self._warn(f"step {step}: {text}{f' ({detail})' if detail else ''}")
        self.warnings[text] = self.warnings.get(text, 0) + 1

    def state(self) -> dict[str, Any]:
        own = {"zero_for": dict(self._zero_for), "first_entropy": self._first_entropy}
        return {**own, **self.report()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._zero_for = Counter(state["zero_for"])
        self._first_entropy = state["first_entropy"]
        self.warnings = dict(state["warnings"])
        self.worst_mismatch = state["worst_mismatch"]
        self.publishes = state["publishes_proven"]
        self.dropped = Counter(state["dropped_episodes"])
        self.filtered_groups = state["filtered_groups"]

    def report(self) -> dict[str, Any]:
        """The health section of `report.json`."""
        return {
            "warnings": dict(self.warnings),
            "worst_mismatch": self.worst_mismatch,
            "publishes_proven": self.publishes,
            "dropped_episodes": dict(self.dropped),
            "filtered_groups": self.filtered_groups,
        }

"""Watching a run: terms that contribute exactly nothing, signals that die out, numbers that drift.
It warns; it never repairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

PATIENCE = 5
"""Steps in a row before something is called a pattern."""

MISMATCH_ALARM = {"fp32": 1e-3, "bf16": 0.5, "fp16": 0.2}
"""Largest engine/trainer log-prob difference per token that rounding can explain."""

_TERMS = {
    "term/kl": "algorithm.kl_coef is set, but the KL term has been exactly 0",
    "term/entropy": "algorithm.entropy_coef is set, but the entropy has been exactly 0",
    "term/policy": "every policy-loss term has been exactly 0: no episode differs from its "
    "baseline",
}


class Health:
    """Counts of what looked wrong, each warned about once."""

    def __init__(self, warn: Callable[[str], None], dtype: str) -> None:
        self._warn = warn
        self._limit = MISMATCH_ALARM[dtype]
        self._zero_for: Counter[str] = Counter()
        self.warnings: dict[str, int] = {}
        self.worst_mismatch = 0.0
        self.publishes = 0
        self.dropped: Counter[str] = Counter()

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Read one step's metrics."""
        for name, text in _TERMS.items():
            if name in metrics:
                self._zero_for[name] = self._zero_for[name] + 1 if metrics[name] == 0 else 0
                if self._zero_for[name] >= PATIENCE:
                    self._say(f"{text} for {PATIENCE} steps in a row", step)
        if metrics.get("optim/grad_norm") == 0:
            self._say("the gradient is exactly 0: this step changed nothing", step)
        if metrics.get("response/truncated_frac", 0) > 0.5:
            self._say("more than half of the replies hit rollout.max_new_tokens", step)
        gap = metrics.get("mismatch/abs_logp_max", 0.0)
        self.worst_mismatch = max(self.worst_mismatch, gap)
        if gap > self._limit:
            self._say(f"engine and trainer log-probs differ by up to {gap:.2g}", step)

    def _say(self, text: str, step: int) -> None:
        key = text.split(" differ by")[0]
        if key not in self.warnings:
            self._warn(f"step {step}: {text}")
        self.warnings[key] = self.warnings.get(key, 0) + 1

    def state(self) -> dict[str, Any]:
        return {"zero_for": dict(self._zero_for), **self.report()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._zero_for = Counter(state["zero_for"])
        self.warnings = dict(state["warnings"])
        self.worst_mismatch = state["worst_mismatch"]
        self.publishes = state["publishes_proven"]
        self.dropped = Counter(state["dropped_episodes"])

    def report(self) -> dict[str, Any]:
        """The health section of `report.json`."""
        return {
            "warnings": dict(self.warnings),
            "worst_mismatch": self.worst_mismatch,
            "publishes_proven": self.publishes,
            "dropped_episodes": dict(self.dropped),
        }

"""Learning rates as a pure function of the step: nothing to save, nothing to get out of step."""

from __future__ import annotations

import math

from fledge.config.schema import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of the update that leads from `step` to `step + 1`.

    >>> c = OptimConfig(lr=1.0, warmup_steps=2, schedule="linear")
    >>> [round(learning_rate(c, s, 6), 3) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    left = max(steps - config.warmup_steps, 1)
    progress = (step - config.warmup_steps) / left
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr

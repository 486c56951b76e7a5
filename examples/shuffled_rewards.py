"""A control: GRPO whose rewards are shuffled inside each group, so that they say nothing about the
replies.

    fledge train quickstart algorithm.advantage=examples.shuffled_rewards:shuffled
    run_dir=runs/control

If a model still improves, the gain does not come from your reward.
"""

import random
from collections.abc import Sequence

from fledge.algorithms.advantages import grpo
from fledge.types import Episode


def shuffled(group: Sequence[Episode]) -> list[float]:
    """GRPO's advantages, dealt out at random; the deal depends on the episodes alone, so a resumed
    run repeats it.
    """
    advantages = grpo(group)
    random.Random(repr([e.segments for e in group])).shuffle(advantages)
    return advantages

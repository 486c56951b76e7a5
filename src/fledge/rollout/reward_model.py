"""A learned reward on top of the environment's: wraps any `Generator`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fledge.errors import RewardError
from fledge.interfaces import Generator
from fledge.types import Episode, Group, Message, Task

NAME = "reward_model"
"""Of the raw score among an episode's `components`."""


@dataclass(frozen=True)
class RewardModelGenerator:
    """Adds `weight * score` to the reward of each episode's last turn. The raw score is a part of
    the reward, beside those of the environment, or beside the one number it gave, as `env`.

    All episodes of a task, the greedy one included, are scored in one call, so that the score of an
    episode does not depend on what else was going on. An episode without a reply has no score.
    """

    inner: Generator
    score: Callable[[Sequence[Sequence[Message]]], list[float]]
    weight: float = 1.0

    async def generate(self, task: Task, n: int, *, epoch: int, seed: int) -> Group:
        group = await self.inner.generate(task, n, epoch=epoch, seed=seed)
        greedy = [group.greedy] if group.greedy is not None else []
        scored = self._scored([*group.episodes, *greedy], task)
        episodes = tuple(scored[: len(group.episodes)])
        return replace(group, episodes=episodes, greedy=scored[-1] if greedy else None)

    def _scored(self, episodes: Sequence[Episode], task: Task) -> list[Episode]:
        talks = [_to_the_last_reply(e) if e.outcome.usable else () for e in episodes]
        scores = self._ask([talk for talk in talks if talk], task)
        return [
            self._rewarded(episode, next(scores)) if talk else episode
            for episode, talk in zip(episodes, talks, strict=True)
        ]

    def _ask(self, talks: Sequence[Sequence[Message]], task: Task) -> Iterator[float]:
        try:
            scores = self.score(talks) if talks else []
        except RewardError as error:
            raise RewardError(f"reward_model: task {task.key!r}: {error}") from error
        for score in scores:
            if not math.isfinite(score):
                raise RewardError(
                    f"reward_model: task {task.key!r}: the score of a reply is {score}, not a "
                    "finite number; the model that reward_model.path names is broken"
                )
        assert len(scores) == len(talks), "one score per conversation"
        return iter(scores)

    def _rewarded(self, episode: Episode, score: float) -> Episode:
        *before, last = episode.rewards or (0.0,)
        return replace(
            episode,
            rewards=(*before, last + self.weight * score),
            components={**(episode.components or {"env": sum(episode.rewards)}), NAME: score},
        )


def _to_the_last_reply(episode: Episode) -> tuple[Message, ...]:
    """Without what the environment said after the end: a reward model judges replies."""
    messages = episode.messages
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    return messages

"""Guess a number: many turns, each answered by "higher" or "lower".

Rows have `low`, `high` and `secret`; `tasks` makes them. The smallest environment whose best policy
needs more than one turn: halving finds any of n numbers in floor(log2 n) + 1 guesses.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from fledge.envs.answers import Row, Split, last_tagged, said, split_of
from fledge.envs.base import Environment
from fledge.errors import DataError
from fledge.types import Message, Step, Task, user

LARGEST_RANGE = 1_000_000
_WHOLE = re.compile(r"-?[0-9]{1,12}")


@dataclass(frozen=True)
class Secret:
    """One row.

    >>> Secret(low=1, high=100, secret=37).secret
    37
    """

    low: int
    high: int
    secret: int

    @model_validator(mode="after")
    def _is_inside(self) -> Self:
        if not self.low <= self.secret <= self.high:
            raise ValueError(f"secret {self.secret} is not from {self.low} to {self.high}")
        return self


class Guess(Environment[Secret]):
    """Reward is 1 for a hit, plus `bonus` times the share of turns that were left.

    A reply that is no guess, or one outside the range, uses up its turn and earns `malformed`.
    """

    def __init__(
        self,
        task: Task,
        *,
        max_turns: Annotated[int, Field(ge=1, le=100)] = 10,
        bonus: Annotated[float, Field(ge=0, le=1)] = 0.0,
        malformed: Annotated[float, Field(ge=-1, le=0)] = 0.0,
    ) -> None:
        super().__init__(task)
        self.max_turns = max_turns
        self.bonus = bonus
        self.malformed = malformed
        self.turns = 0

    async def reset(self) -> Sequence[Message]:
        return [
            user(
                f"I picked a whole number from {self.task.low} to {self.task.high}. Find it in at "
                f"most {self.max_turns} guesses. Reply with one guess as <guess>N</guess>; I answer"
                " whether my number is higher or lower."
            )
        ]

    async def step(self, reply: Message) -> Step:
        self.turns += 1
        left = self.max_turns - self.turns
        guess = guess_in(reply.content)
        if guess == self.task.secret:
            reward = 1.0 + self.bonus * left / self.max_turns
            return Step(reward=reward, terminated=True, info={"guesses": float(self.turns)})
        if guess is None or not self.task.low <= guess <= self.task.high:
            feedback, reward = self._rule(), self.malformed
        else:
            feedback, reward = "higher" if guess < self.task.secret else "lower", 0.0
        return Step(messages=[user(feedback)] if left else [], reward=reward, terminated=not left)

    def _rule(self) -> str:
        return (
            f"Reply with one whole number from {self.task.low} to {self.task.high} as "
            "<guess>N</guess>."
        )


def guess_in(reply: str) -> int | None:
    """The last `<guess>N</guess>`, or a reply that is a whole number and nothing else.

    >>> guess_in("Halfway: <guess>50</guess>"), guess_in("50"), guess_in("50 or 51")
    (50, 50, None)
    """
    text = said(reply)
    found = last_tagged(text, "guess")
    if found is None and "<guess>" not in text:
        found = text.strip()
    return int(found) if found is not None and _WHOLE.fullmatch(found) else None


def tasks(
    split: Split = "train",
    count: int | None = None,
    seed: int = 0,
    low: int = 1,
    high: int = 1000,
) -> list[Row]:
    """Secrets from `low` to `high` in a shuffled order, all of the split unless `count` says fewer.
    Each is in one split, whatever the seed.
    """
    if not 0 < high - low <= LARGEST_RANGE:
        raise DataError(f"data: high - low must be from 1 to {LARGEST_RANGE}, got {high - low}")
    secrets = [n for n in range(low, high + 1) if split_of(f"{low} {high} {n}") == split]
    random.Random(f"{split}/{seed}").shuffle(secrets)
    return [{"low": low, "high": high, "secret": n} for n in secrets[:count]]

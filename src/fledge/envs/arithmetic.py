"""Sums of two numbers: the quickstart's environment, its tasks and its demonstrations.

Every problem belongs to exactly one of three pools, chosen by a hash of its text: held out,
demonstrated, or practised. No seed moves a problem from one pool to another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fledge.envs.base import Environment
from fledge.types import Message, Step, user

LARGEST = 99
HELD_OUT = 500
DEMONSTRATED = 4000


@dataclass(frozen=True)
class Problem:
    """One row.

    >>> Problem("34+57", "91").answer
    '91'
    """

    prompt: str
    answer: str


class Pools(NamedTuple):
    """All problems, each in one pool."""

    held_out: list[Problem]
    demonstrated: list[Problem]
    practised: list[Problem]


class Arithmetic(Environment[Problem]):
    """Reward is 1 when the reply is the sum and nothing else, otherwise 0."""

    async def reset(self) -> Sequence[Message]:
        return [user(self.task.prompt)]

    async def step(self, reply: Message) -> Step:
        return Step(reward=float(reply.content == self.task.answer), terminated=True)


def problems() -> list[Problem]:
    """All of them, in counting order."""
    numbers = range(LARGEST + 1)
    return [Problem(f"{a}+{b}", str(a + b)) for a in numbers for b in numbers]


def pools() -> Pools:
    """The three pools: cut from the list of problems in the order of their hashes."""
    ordered = sorted(problems(), key=lambda p: hashlib.sha256(p.prompt.encode()).digest())
    practised_from = HELD_OUT + DEMONSTRATED
    return Pools(ordered[:HELD_OUT], ordered[HELD_OUT:practised_from], ordered[practised_from:])


def tasks(split: Literal["train", "eval"] = "train") -> list[dict[str, str]]:
    """Rows with `prompt` and `answer`: `train` is the practised pool, `eval` the held-out one."""
    chosen = pools().practised if split == "train" else pools().held_out
    return [{"prompt": p.prompt, "answer": p.answer} for p in chosen]


def demonstrations() -> list[dict[str, str]]:
    """Rows with `prompt` and `response`, from the demonstrated pool."""
    return [{"prompt": p.prompt, "response": p.answer} for p in pools().demonstrated]

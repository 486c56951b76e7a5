"""Sums such as 345+67: the quickstart's environment, its tasks and its demonstrations.

The demonstrations have a bad habit: they often forget to carry. A model that learns from them
forgets, too; the reward teaches it to carry. Every problem belongs to exactly one of four pools,
chosen by a hash of its text; no seed moves it to another.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from fledge.envs.base import Environment
from fledge.types import Message, Step, user

HELD_OUT = 500
TUNING = 500
PRACTISED = 11_000


@dataclass(frozen=True)
class Problem:
    """One row.

    >>> Problem("345+67", "412").answer
    '412'
    """

    prompt: str
    answer: str


class Pools(NamedTuple):
    """All problems, each in one pool."""

    held_out: list[Problem]
    tuning: list[Problem]
    practised: list[Problem]
    demonstrated: list[Problem]


class Arithmetic(Environment[Problem]):
    """Reward is 1 when the reply is the sum and nothing else, otherwise 0."""

    async def reset(self) -> Sequence[Message]:
        return [user(self.task.prompt)]

    async def step(self, reply: Message) -> Step:
        return Step(reward=float(reply.content == self.task.answer), terminated=True)


def problems() -> list[Problem]:
    """All 72,000, in counting order."""
    return [Problem(f"{a}+{b}", str(a + b)) for a in range(100, 900) for b in range(10, 100)]


@functools.cache
def pools() -> Pools:
    """Cut from the list of problems in the order of their hashes."""
    ordered = sorted(problems(), key=lambda p: _hash(p.prompt))
    cuts = (0, HELD_OUT, HELD_OUT + TUNING, HELD_OUT + TUNING + PRACTISED, len(ordered))
    return Pools(*(ordered[start:end] for start, end in pairwise(cuts)))


def tasks(split: Literal["train", "tuning", "eval"] = "train") -> list[dict[str, str]]:
    """Rows with `prompt` and `answer`. `eval` is for reporting; choose settings by `tuning`, never
    by `eval`.
    """
    found = pools()
    chosen = {"train": found.practised, "tuning": found.tuning, "eval": found.held_out}[split]
    return [{"prompt": p.prompt, "answer": p.answer} for p in chosen]


def demonstrations(forget: Annotated[float, Field(ge=0, le=1)] = 0.6) -> list[dict[str, str]]:
    """Rows with `prompt` and `response`, of which a fraction `forget` drops every carry: 345+67
    becomes 302.
    """
    return [{"prompt": p.prompt, "response": _demonstrate(p, forget)} for p in pools().demonstrated]


def pairs() -> list[dict[str, str]]:
    """Preferences over the problems that RL practises: the sum rather than the sum without carries,
    wherever the two differ.
    """
    found = [(p, without_carries(p.prompt)) for p in pools().practised]
    return [
        {"prompt": p.prompt, "chosen": p.answer, "rejected": wrong}
        for p, wrong in found
        if wrong != p.answer
    ]


def _demonstrate(problem: Problem, forget: float) -> str:
    draw = int.from_bytes(_hash(f"habit {problem.prompt}")[:4]) / 2**32
    return without_carries(problem.prompt) if draw < forget else problem.answer


def without_carries(prompt: str) -> str:
    """The sum, column by column, each carry forgotten.

    >>> without_carries("345+67")
    '302'
    """
    a, b = prompt.split("+")
    columns = zip(a, b.rjust(len(a), "0"), strict=True)
    return "".join(str((int(x) + int(y)) % 10) for x, y in columns)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
